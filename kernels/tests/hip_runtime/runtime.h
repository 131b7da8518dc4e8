// What the parts of the runtime share: devices, streams and answers.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

enum Code : unsigned {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    NoDevice = 100,
    InvalidDevice = 101,
    NoBinaryForGpu = 209,
    InvalidHandle = 400,
    NotFound = 500,
    NotReady = 600,
    LaunchFailure = 719,
    CaptureUnsupported = 900,
    CaptureInvalidated = 901,
    CaptureImplicit = 906,
};

struct Device {
    // Its number on the machine, whatever is visible.
    int index;
    // As the runtime names it, with its features: AMD's have waves of 64, and warp32 is none of AMD's.
    std::string architecture;
    int wave, shared_bytes;
    size_t bytes, used = 0;
    // What a kernel has failed with: from then on every call does.
    std::atomic<unsigned> failed{Success};
    // Launches until the device is lost, and until a kernel never ends; below 0 where that does not happen.
    std::atomic<long> launches_until_lost{-1}, launches_until_hung{-1};

    std::string target() const { return architecture.substr(0, architecture.find(':')); }
};

// The visible devices, after HIP_VISIBLE_DEVICES.
std::vector<std::unique_ptr<Device>>& devices();
// The device that this thread has set, by its number among the visible ones.
int& current();

inline bool is_device(int device) { return device >= 0 && device < int(devices().size()); }
// What every call that needs a device begins with.
inline Code ready() {
    if (devices().empty()) return NoDevice;
    return Code(devices()[current()]->failed.load());
}

// Something that a stream does; it answers what went wrong.
using Task = std::function<Code()>;

// A point in a stream.
struct Signal {
    std::mutex lock;
    std::condition_variable changed;
    bool reached = false;
    std::chrono::steady_clock::time_point at;

    void reach() {
        std::lock_guard<std::mutex> held(lock);
        at = std::chrono::steady_clock::now();
        reached = true;
        changed.notify_all();
    }
    bool is_reached() {
        std::lock_guard<std::mutex> held(lock);
        return reached;
    }
    void wait() {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return reached; });
    }
};

// A stream: a thread of its own does its tasks, one after the other, as late as it likes.
struct Stream {
    const int device;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Task> tasks;
    uint64_t enqueued = 0, done = 0;
    bool over = false;
    // What is recorded instead of being done.
    std::optional<std::vector<Task>> recording;
    // Whether something that cannot be recorded was asked for meanwhile.
    bool spoilt = false;
    std::thread thread;

    explicit Stream(int device) : device(device) {
        thread = std::thread([this] { run(); });
    }
    ~Stream() {
        {
            std::lock_guard<std::mutex> held(lock);
            over = true;
            changed.notify_all();
        }
        thread.join();
    }

    Code enqueue(Task task) {
        std::lock_guard<std::mutex> held(lock);
        if (recording) {
            recording->push_back(std::move(task));
        } else {
            tasks.push_back(std::move(task));
            enqueued++;
            changed.notify_all();
        }
        return Success;
    }
    // For what cannot be recorded.
    Code refuse_recording() {
        std::lock_guard<std::mutex> held(lock);
        if (!recording) return Success;
        spoilt = true;
        return CaptureUnsupported;
    }
    uint64_t position() {
        std::lock_guard<std::mutex> held(lock);
        return enqueued;
    }
    bool is_past(uint64_t position) {
        std::lock_guard<std::mutex> held(lock);
        return done >= position;
    }
    void finish() {
        std::unique_lock<std::mutex> held(lock);
        const uint64_t all = enqueued;
        changed.wait(held, [&] { return done >= all; });
    }

private:
    void run() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            changed.wait(held, [&] { return over || !tasks.empty(); });
            if (tasks.empty()) return;
            Task task = std::move(tasks.front());
            tasks.pop_front();
            held.unlock();
            // After a failure nothing is done any more, but what waits for it goes on.
            Device& on = *devices()[device];
            const Code answer = task();
            unsigned none = Success;
            if (answer != Success) on.failed.compare_exchange_strong(none, answer);
            held.lock();
            done++;
            changed.notify_all();
        }
    }
};

// The stream of a handle; none where there is none.
std::shared_ptr<Stream> stream_of(void* handle);
// All streams of a device.
std::vector<std::shared_ptr<Stream>> streams_on(int device);
