// Streams, events and graphs.
#pragma once
#include "runtime.h"

namespace {

std::mutex streams_lock;
std::map<void*, std::shared_ptr<Stream>> streams;

struct Event {
    int device;
    bool has_time;
    std::mutex lock;
    // The point where it was last recorded.
    std::shared_ptr<Signal> last;

    std::shared_ptr<Signal> recorded() {
        std::lock_guard<std::mutex> held(lock);
        return last;
    }
};

using Tasks = std::vector<Task>;

}  // namespace

std::shared_ptr<Stream> stream_of(void* handle) {
    std::lock_guard<std::mutex> held(streams_lock);
    auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Stream>> streams_on(int device) {
    std::lock_guard<std::mutex> held(streams_lock);
    std::vector<std::shared_ptr<Stream>> found;
    for (auto& [handle, stream] : streams) {
        if (stream->device == device) found.push_back(stream);
    }
    return found;
}

EXPORTED Code hipStreamCreateWithFlags(void** out, unsigned flags) {
    if (Code wrong = ready()) return wrong;
    if (flags != 0) return InvalidValue;
    auto stream = std::make_shared<Stream>(current());
    std::lock_guard<std::mutex> held(streams_lock);
    *out = stream.get();
    streams[*out] = stream;
    return Success;
}

EXPORTED Code hipStreamDestroy(void* handle) {
    auto stream = stream_of(handle);
    if (!stream) return InvalidHandle;
    std::lock_guard<std::mutex> held(streams_lock);
    streams.erase(handle);
    return Success;
}

EXPORTED Code hipStreamSynchronize(void* handle) {
    auto stream = stream_of(handle);
    if (!stream) return InvalidHandle;
    if (Code wrong = stream->refuse_recording()) return wrong;
    stream->finish();
    return Code(devices()[stream->device]->failed.load());
}

// Waits for what is being recorded too, and so spoils it.
EXPORTED Code hipDeviceSynchronize() {
    if (Code wrong = ready()) return wrong;
    Code answer = Success;
    for (auto& stream : streams_on(current())) {
        if (Code wrong = stream->refuse_recording()) answer = wrong;
    }
    if (answer) return answer;
    for (auto& stream : streams_on(current())) stream->finish();
    return ready();
}

// For libraries of the vendor: what they do stands in the order of the stream, and can be recorded.
EXPORTED Code emulated_hip_enqueue(void* handle, const std::function<void()>* work) {
    auto stream = stream_of(handle);
    if (!stream || stream->device != current()) return InvalidHandle;
    return stream->enqueue([work = *work] { return work(), Success; });
}

// --- events ----------------------------------------------------------------------------------------------

EXPORTED Code hipEventCreateWithFlags(void** out, unsigned flags) {
    if (Code wrong = ready()) return wrong;
    constexpr unsigned WITHOUT_TIME = 2;
    if (flags != 0 && flags != WITHOUT_TIME) return InvalidValue;
    *out = new Event{current(), flags != WITHOUT_TIME, {}, nullptr};
    return Success;
}

EXPORTED Code hipEventDestroy(void* event) {
    delete static_cast<Event*>(event);
    return Success;
}

EXPORTED Code hipEventRecord(Event* event, void* handle) {
    auto stream = stream_of(handle);
    if (!stream || event->device != stream->device) return InvalidHandle;
    if (Code wrong = stream->refuse_recording()) return wrong;
    auto signal = std::make_shared<Signal>();
    {
        std::lock_guard<std::mutex> held(event->lock);
        event->last = signal;
    }
    return stream->enqueue([=] { return signal->reach(), Success; });
}

EXPORTED Code hipEventQuery(Event* event) {
    auto signal = event->recorded();
    if (Code failed = Code(devices()[event->device]->failed.load())) return failed;
    return !signal || signal->is_reached() ? Success : NotReady;
}

EXPORTED Code hipEventSynchronize(Event* event) {
    if (auto signal = event->recorded()) signal->wait();
    return Code(devices()[event->device]->failed.load());
}

EXPORTED Code hipEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    auto first = from->recorded(), last = to->recorded();
    if (!first || !last || !from->has_time || !to->has_time) return InvalidHandle;
    if (!first->is_reached() || !last->is_reached()) return NotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(last->at - first->at).count();
    return Success;
}

EXPORTED Code hipStreamWaitEvent(void* handle, Event* event, unsigned flags) {
    auto stream = stream_of(handle);
    if (!stream || flags != 0) return InvalidValue;
    if (Code wrong = stream->refuse_recording()) return wrong;
    auto signal = event->recorded();
    if (!signal) return Success;
    return stream->enqueue([=] { return signal->wait(), Success; });
}

// --- graphs ----------------------------------------------------------------------------------------------

EXPORTED Code hipStreamBeginCapture(void* handle, unsigned mode) {
    auto stream = stream_of(handle);
    if (!stream || mode != 1) return InvalidValue;
    std::lock_guard<std::mutex> held(stream->lock);
    if (stream->recording) return InvalidValue;
    stream->recording.emplace();
    stream->spoilt = false;
    return Success;
}

EXPORTED Code hipStreamEndCapture(void* handle, Tasks** graph) {
    auto stream = stream_of(handle);
    if (!stream) return InvalidHandle;
    std::lock_guard<std::mutex> held(stream->lock);
    *graph = nullptr;
    if (!stream->recording) return InvalidValue;
    auto recorded = std::move(*stream->recording);
    stream->recording.reset();
    if (stream->spoilt) return CaptureInvalidated;
    *graph = new Tasks(std::move(recorded));
    return Success;
}

EXPORTED Code hipGraphInstantiateWithFlags(std::shared_ptr<Tasks>** out, const Tasks* graph, unsigned long long flags) {
    if (flags != 0) return InvalidValue;
    *out = new std::shared_ptr<Tasks>(new Tasks(*graph));
    return Success;
}

EXPORTED Code hipGraphLaunch(std::shared_ptr<Tasks>* executable, void* handle) {
    if (Code wrong = ready()) return wrong;
    auto stream = stream_of(handle);
    if (!stream || stream->device != current()) return InvalidHandle;
    return stream->enqueue([tasks = *executable] {
        for (const Task& task : *tasks) {
            if (Code wrong = task()) return wrong;
        }
        return Success;
    });
}

EXPORTED Code hipGraphExecDestroy(std::shared_ptr<Tasks>* executable) {
    delete executable;
    return Success;
}

EXPORTED Code hipGraphDestroy(Tasks* graph) {
    delete graph;
    return Success;
}
