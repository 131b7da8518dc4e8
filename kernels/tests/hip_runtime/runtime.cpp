// libamdhip64 for tests, on machines without GPUs: HIP's interface as far as the program calls it, with the CPU below.
//
// It does what the documentation of HIP promises and no more. A stream is a thread, so what is enqueued runs later;
// pinned memory is read when its copy runs; memory holds poison before it is written and after it is freed. What a real
// runtime would refuse or leave undefined is refused: streams and kernels of another device than the thread has
// set, ranges outside an allocation, memory of a peer that was not opened, what spoils a recording.
//
// EMULATED_HIP_DEVICES lists the machine's GPUs by architecture, EMULATED_HIP_BYTES says how much memory each has, and
// EMULATED_HIP_LOST_AFTER after how many launches each is lost, EMULATED_HIP_HANGS_AFTER after how many a kernel never ends.
// HIP_VISIBLE_DEVICES is what it always is.
#include <algorithm>
#include <atomic>

#include "memory.h"
#include "module.h"
#include "runtime.h"
#include "stream.h"

namespace {

std::vector<std::string> words(const std::string& list) {
    std::vector<std::string> found;
    for (size_t from = 0; from < list.size();) {
        const size_t end = std::min(list.find(',', from), list.size());
        found.push_back(list.substr(from, end - from));
        from = end + 1;
    }
    return found;
}

const char* setting(const char* name, const char* otherwise) {
    const char* found = std::getenv(name);
    return found ? found : otherwise;
}

std::vector<std::unique_ptr<Device>> make_devices() {
    const auto machine = words(setting("EMULATED_HIP_DEVICES", "gfx942:sramecc+:xnack-,gfx942:sramecc+:xnack-,warp32"));
    std::vector<int> visible;
    if (const char* list = std::getenv("HIP_VISIBLE_DEVICES")) {
        for (const std::string& word : words(list)) visible.push_back(std::atoi(word.c_str()));
    } else {
        for (size_t index = 0; index < machine.size(); index++) visible.push_back(int(index));
    }
    std::vector<std::unique_ptr<Device>> found;
    for (int index : visible) {
        // As in HIP, a number that names no device hides the devices behind it.
        if (index < 0 || index >= int(machine.size())) break;
        auto device = std::make_unique<Device>();
        device->index = index;
        device->architecture = machine[index];
        device->wave = machine[index].rfind("gfx9", 0) == 0 ? 64 : 32;
        device->shared_bytes = device->wave == 64 ? 64 << 10 : 99 << 10;
        device->bytes = std::strtoull(setting("EMULATED_HIP_BYTES", "17179869184"), nullptr, 10);
        device->launches_until_lost = std::strtol(setting("EMULATED_HIP_LOST_AFTER", "-1"), nullptr, 10);
        device->launches_until_hung = std::strtol(setting("EMULATED_HIP_HANGS_AFTER", "-1"), nullptr, 10);
        found.push_back(std::move(device));
    }
    return found;
}

}  // namespace

// Never destroyed: threads of streams may outlive the end of main.
std::vector<std::unique_ptr<Device>>& devices() {
    static auto* all = new std::vector<std::unique_ptr<Device>>(make_devices());
    return *all;
}

int& current() {
    static thread_local int device = 0;
    return device;
}

EXPORTED Code hipInit(unsigned flags) {
    if (flags != 0) return InvalidValue;
    return devices().empty() ? NoDevice : Success;
}

EXPORTED Code hipRuntimeGetVersion(int* version) {
    *version = 70051831;
    return Success;
}

EXPORTED Code hipGetDeviceCount(int* count) {
    *count = int(devices().size());
    return devices().empty() ? NoDevice : Success;
}

EXPORTED Code hipDeviceGet(int* device, int ordinal) {
    if (!is_device(ordinal)) return InvalidDevice;
    *device = ordinal;
    return Success;
}

EXPORTED Code hipGetDevice(int* device) {
    *device = current();
    return Success;
}

EXPORTED Code hipSetDevice(int device) {
    if (!is_device(device)) return InvalidDevice;
    current() = device;
    return Success;
}

EXPORTED Code hipDeviceGetName(char* name, int bytes, int device) {
    if (!is_device(device)) return InvalidDevice;
    std::snprintf(name, bytes, "emulated AMD GPU");
    return Success;
}

EXPORTED Code hipDeviceGetUuid(char* uuid, int device) {
    if (!is_device(device)) return InvalidDevice;
    char text[17];
    std::snprintf(text, sizeof text, "emulated-gpu-%03d", devices()[device]->index);
    std::memcpy(uuid, text, 16);
    return Success;
}

EXPORTED Code hipDeviceGetAttribute(int* value, unsigned attribute, int device) {
    if (!is_device(device)) return InvalidDevice;
    switch (attribute) {
        // Few, and the same on every host: chains of scans are then cut into segments.
        case 63: *value = 2; return Success;
        case 74: *value = devices()[device]->shared_bytes; return Success;
        case 87: *value = devices()[device]->wave; return Success;
        default: return InvalidValue;
    }
}

// As of HIP 6; older runtimes have another struct, under the name without a suffix.
EXPORTED Code hipGetDevicePropertiesR0600(char* properties, int device) {
    if (!is_device(device)) return InvalidDevice;
    std::memset(properties, 0, 1472);
    std::snprintf(properties, 256, "emulated AMD GPU");
    std::snprintf(properties + 1160, 256, "%s", devices()[device]->architecture.c_str());
    return Success;
}

EXPORTED Code hipDeviceCanAccessPeer(int* can, int device, int peer) {
    if (!is_device(device) || !is_device(peer)) return InvalidDevice;
    *can = device != peer;
    return Success;
}

EXPORTED const char* hipGetErrorString(Code code) {
    switch (code) {
        case Success: return "no error";
        case InvalidValue: return "invalid argument";
        case OutOfMemory: return "out of memory";
        case NoDevice: return "no ROCm-capable device is detected";
        case InvalidDevice: return "invalid device ordinal";
        case NoBinaryForGpu: return "no kernel image is available for execution on the device";
        case InvalidHandle: return "invalid resource handle";
        case NotFound: return "named symbol not found";
        case NotReady: return "device not ready";
        case LaunchFailure: return "unspecified launch failure";
        case CaptureUnsupported: return "operation not permitted when stream is capturing";
        case CaptureInvalidated: return "operation failed due to a previous error during capture";
        case CaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
        default: return "unknown error";
    }
}
