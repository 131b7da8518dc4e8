// Memory: every range that is copied or cleared must lie inside one allocation that the device reaches.
#pragma once
#include "runtime.h"

namespace memory {

constexpr size_t ALIGNMENT = 256;
constexpr int ON_HOST = -1;
// What memory holds before it is written, and after it is freed; as much of it as costs no time.
constexpr int POISON = 0xcb;
constexpr size_t POISONED_BYTES = size_t(4) << 20;

struct Allocation {
    char* first;
    size_t bytes;
    int device;
};

// Memory that goes when the streams of its device have passed where they were.
struct Leaving {
    Allocation allocation;
    std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> after;
};

// What is large is kept when it is freed, because the system takes long to give it again.
constexpr size_t LARGE_BYTES = size_t(1) << 20, MOST_SPARE = 32;

inline std::mutex lock;
inline std::map<uintptr_t, Allocation> allocations;
inline std::vector<Leaving> leaving;
inline std::multimap<size_t, char*> spare;
// Which device reaches the pool of which.
inline std::set<std::pair<int, int>> granted;

inline void release(const Allocation& allocation) {
    std::memset(allocation.first, POISON, std::min(allocation.bytes, POISONED_BYTES));
    if (allocation.bytes >= LARGE_BYTES && spare.size() < MOST_SPARE) {
        spare.emplace(allocation.bytes, allocation.first);
    } else {
        std::free(allocation.first);
    }
    if (allocation.device != ON_HOST) devices()[allocation.device]->used -= allocation.bytes;
}

inline void release_what_can_go() {
    std::vector<Leaving> still;
    for (Leaving& each : leaving) {
        bool is_over = true;
        for (auto& [stream, position] : each.after) is_over = is_over && stream->is_past(position);
        if (is_over) {
            release(each.allocation);
        } else {
            still.push_back(std::move(each));
        }
    }
    leaving = std::move(still);
}

inline Code allocate(void** out, size_t bytes, int device) {
    std::lock_guard<std::mutex> held(lock);
    release_what_can_go();
    if (bytes > SIZE_MAX / 2) return OutOfMemory;
    const size_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
    if (device != ON_HOST && devices()[device]->used + whole > devices()[device]->bytes) return OutOfMemory;
    char* first = nullptr;
    if (auto kept = spare.find(whole); kept != spare.end()) {
        first = kept->second;
        spare.erase(kept);
    } else {
        first = static_cast<char*>(std::aligned_alloc(ALIGNMENT, whole));
    }
    if (!first) return OutOfMemory;
    std::memset(first, POISON, std::min(whole, POISONED_BYTES));
    if (device != ON_HOST) devices()[device]->used += whole;
    allocations[reinterpret_cast<uintptr_t>(first)] = {first, whole, device};
    *out = first;
    return Success;
}

// The allocation that holds all of a range.
inline std::optional<Allocation> find(const void* at, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    const auto address = reinterpret_cast<uintptr_t>(at);
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return std::nullopt;
    const Allocation& found = std::prev(after)->second;
    if (address - reinterpret_cast<uintptr_t>(found.first) + bytes > found.bytes) return std::nullopt;
    return found;
}

inline bool is_pinned(const void* at, size_t bytes) {
    auto found = find(at, bytes);
    return found && found->device == ON_HOST;
}

// Whether the current device reaches a range of device memory.
inline bool reaches(const void* at, size_t bytes) {
    auto found = find(at, bytes);
    if (!found || found->device == ON_HOST) return false;
    std::lock_guard<std::mutex> held(lock);
    return found->device == current() || granted.count({current(), found->device});
}

}  // namespace memory

EXPORTED Code hipMemGetInfo(size_t* free, size_t* total) {
    if (Code wrong = ready()) return wrong;
    std::lock_guard<std::mutex> held(memory::lock);
    memory::release_what_can_go();
    const Device& device = *devices()[current()];
    *total = device.bytes;
    *free = device.bytes - device.used;
    return Success;
}

EXPORTED Code hipMallocAsync(void** out, size_t bytes, void* handle) {
    if (Code wrong = ready()) return wrong;
    auto stream = stream_of(handle);
    if (!stream || stream->device != current()) return InvalidHandle;
    if (Code wrong = stream->refuse_recording()) return wrong;
    return memory::allocate(out, bytes, current());
}

// On the legacy stream, which waits for the others of its device: a recording among them is spoilt.
EXPORTED Code hipFreeAsync(void* at, void* handle) {
    if (Code wrong = ready()) return wrong;
    if (handle) return InvalidHandle;
    memory::Leaving leaves{};
    Code answer = Success;
    for (auto& stream : streams_on(current())) {
        if (stream->refuse_recording()) answer = CaptureImplicit;
        leaves.after.emplace_back(stream, stream->position());
    }
    if (answer) return answer;
    std::lock_guard<std::mutex> held(memory::lock);
    auto found = memory::allocations.find(reinterpret_cast<uintptr_t>(at));
    if (found == memory::allocations.end() || found->second.device != current()) return InvalidValue;
    leaves.allocation = found->second;
    memory::allocations.erase(found);
    memory::leaving.push_back(std::move(leaves));
    return Success;
}

EXPORTED Code hipHostMalloc(void** out, size_t bytes, unsigned flags) {
    if (Code wrong = ready()) return wrong;
    return flags == 1 ? memory::allocate(out, bytes, memory::ON_HOST) : InvalidValue;
}

EXPORTED Code hipHostFree(void* at) {
    std::lock_guard<std::mutex> held(memory::lock);
    auto found = memory::allocations.find(reinterpret_cast<uintptr_t>(at));
    if (found == memory::allocations.end() || found->second.device != memory::ON_HOST) return InvalidValue;
    memory::release(found->second);
    memory::allocations.erase(found);
    return Success;
}

EXPORTED Code hipMemsetD8Async(void* at, unsigned char value, size_t bytes, void* handle) {
    if (Code wrong = ready()) return wrong;
    auto stream = stream_of(handle);
    if (!stream || stream->device != current()) return InvalidHandle;
    if (!memory::reaches(at, bytes)) return InvalidValue;
    return stream->enqueue([=] { return std::memset(at, value, bytes), Success; });
}

EXPORTED Code hipMemcpyHtoDAsync(void* to, void* from, size_t bytes, void* handle) {
    if (Code wrong = ready()) return wrong;
    auto stream = stream_of(handle);
    if (!stream || stream->device != current()) return InvalidHandle;
    if (!memory::reaches(to, bytes)) return InvalidValue;
    if (Code wrong = stream->refuse_recording()) return wrong;
    if (memory::is_pinned(from, bytes)) {
        return stream->enqueue([=] { return std::memcpy(to, from, bytes), Success; });
    }
    // Pageable memory is the caller's again when the call returns.
    const char* first = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
    return stream->enqueue([=] { return std::memcpy(to, staged->data(), bytes), Success; });
}

EXPORTED Code hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, void* handle) {
    if (Code wrong = ready()) return wrong;
    auto stream = stream_of(handle);
    if (!stream || stream->device != current()) return InvalidHandle;
    if (!memory::reaches(from, bytes)) return InvalidValue;
    if (Code wrong = stream->refuse_recording()) return wrong;
    return stream->enqueue([=] { return std::memcpy(to, from, bytes), Success; });
}

EXPORTED Code hipMemcpyDtoDAsync(void* to, void* from, size_t bytes, void* handle) {
    if (Code wrong = ready()) return wrong;
    auto stream = stream_of(handle);
    if (!stream || stream->device != current()) return InvalidHandle;
    if (!memory::reaches(to, bytes) || !memory::reaches(from, bytes)) return InvalidValue;
    return stream->enqueue([=] { return std::memmove(to, from, bytes), Success; });
}

// --- pools: each device has one, which is named by the device ------------------------------------------

EXPORTED Code hipDeviceGetDefaultMemPool(void** pool, int device) {
    if (!is_device(device)) return InvalidDevice;
    *pool = devices()[device].get();
    return Success;
}

static int owner_of(void* pool) {
    for (int device = 0; is_device(device); device++) {
        if (devices()[device].get() == pool) return device;
    }
    return -1;
}

EXPORTED Code hipMemPoolTrimTo(void* pool, size_t) { return owner_of(pool) < 0 ? InvalidValue : Success; }

EXPORTED Code hipMemPoolSetAttribute(void* pool, unsigned attribute, void* value) {
    const bool is_known = attribute == 4 && value;
    return owner_of(pool) < 0 || !is_known ? InvalidValue : Success;
}

struct Access {
    unsigned place;
    int device;
    unsigned rights;
};

EXPORTED Code hipMemPoolSetAccess(void* pool, const Access* access, size_t count) {
    const int owner = owner_of(pool);
    if (owner < 0) return InvalidValue;
    for (size_t i = 0; i < count; i++) {
        if (access[i].place != 1 || access[i].rights != 3) return InvalidValue;
        if (!is_device(access[i].device)) return InvalidDevice;
        std::lock_guard<std::mutex> held(memory::lock);
        memory::granted.insert({access[i].device, owner});
    }
    return Success;
}
