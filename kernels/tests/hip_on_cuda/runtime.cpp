// libamdhip64 over NVIDIA's driver: what the program calls of HIP, on an NVIDIA GPU. A test tool.
//
// The two interfaces are twins: nearly every function is passed on as it is. Of its own has HIP that a thread is given a device by its
// number, the numbers of a device's attributes, and that kernels need no leave to use all shared memory. Devices are of the
// architecture that NVIDIA calls them by (sm_90a), in warps of 32.
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "library.h"

using Code = unsigned;

namespace {

constexpr Code SUCCESS = 0, INVALID_VALUE = 1, INSUFFICIENT_DRIVER = 35, NO_DEVICE = 100, INVALID_DEVICE = 101;

// Attributes of devices and functions, by the numbers of CUDA's driver interface.
constexpr int WARP = 10, MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, MOST_SHARED_BYTES = 97;
constexpr int FIXED_SHARED_BYTES = 1, MOST_DYNAMIC_SHARED_BYTES = 8;

// HIP 7.0, as it numbers itself.
constexpr int VERSION = 70051831;

using Device = int;
using Address = unsigned long long;
using Text = const char*;

}  // namespace

// HIP's name, CUDA's, and the arguments that both take. These need no device to be the thread's own:
#define OF_THE_DRIVER(TWIN)                                                                                          \
    TWIN(hipDeviceGet, cuDeviceGet, (Device * device, int ordinal), (device, ordinal))                               \
    TWIN(hipDeviceGetName, cuDeviceGetName, (char* name, int bytes, Device device), (name, bytes, device))           \
    TWIN(hipDeviceGetUuid, cuDeviceGetUuid_v2, (void* uuid, Device device), (uuid, device))                          \
    TWIN(hipDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int* can, Device device, Device peer), (can, device, peer)) \
    TWIN(hipDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, (void** pool, Device device), (pool, device))

// And these do.
#define OF_A_CONTEXT(TWIN)                                                                                           \
    TWIN(hipDeviceSynchronize, cuCtxSynchronize, (), ())                                                             \
    TWIN(hipMemGetInfo, cuMemGetInfo_v2, (size_t* free, size_t* total), (free, total))                               \
    TWIN(hipMemPoolTrimTo, cuMemPoolTrimTo, (void* pool, size_t kept), (pool, kept))                                 \
    TWIN(hipMemPoolSetAttribute, cuMemPoolSetAttribute, (void* pool, unsigned attribute, void* value),               \
         (pool, attribute, value))                                                                                   \
    TWIN(hipMemPoolSetAccess, cuMemPoolSetAccess, (void* pool, const void* access, size_t count),                    \
         (pool, access, count))                                                                                      \
    TWIN(hipMallocAsync, cuMemAllocAsync, (Address * at, size_t bytes, void* stream), (at, bytes, stream))           \
    TWIN(hipFreeAsync, cuMemFreeAsync, (Address at, void* stream), (at, stream))                                     \
    TWIN(hipHostMalloc, cuMemHostAlloc, (void** at, size_t bytes, unsigned flags), (at, bytes, flags))               \
    TWIN(hipHostFree, cuMemFreeHost, (void* at), (at))                                                               \
    TWIN(hipMemsetD8Async, cuMemsetD8Async, (Address at, unsigned char value, size_t bytes, void* stream),           \
         (at, value, bytes, stream))                                                                                 \
    TWIN(hipMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (Address to, const void* from, size_t bytes, void* stream),       \
         (to, from, bytes, stream))                                                                                  \
    TWIN(hipMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void* to, Address from, size_t bytes, void* stream),             \
         (to, from, bytes, stream))                                                                                  \
    TWIN(hipMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (Address to, Address from, size_t bytes, void* stream),           \
         (to, from, bytes, stream))                                                                                  \
    TWIN(hipStreamCreateWithFlags, cuStreamCreate, (void** stream, unsigned flags), (stream, flags))                 \
    TWIN(hipStreamSynchronize, cuStreamSynchronize, (void* stream), (stream))                                        \
    TWIN(hipStreamDestroy, cuStreamDestroy_v2, (void* stream), (stream))                                             \
    TWIN(hipStreamWaitEvent, cuStreamWaitEvent, (void* stream, void* event, unsigned flags),                         \
         (stream, event, flags))                                                                                     \
    TWIN(hipStreamBeginCapture, cuStreamBeginCapture_v2, (void* stream, unsigned mode), (stream, mode))              \
    TWIN(hipStreamEndCapture, cuStreamEndCapture, (void* stream, void** graph), (stream, graph))                     \
    TWIN(hipEventCreateWithFlags, cuEventCreate, (void** event, unsigned flags), (event, flags))                     \
    TWIN(hipEventRecord, cuEventRecord, (void* event, void* stream), (event, stream))                                \
    TWIN(hipEventQuery, cuEventQuery, (void* event), (event))                                                        \
    TWIN(hipEventSynchronize, cuEventSynchronize, (void* event), (event))                                            \
    TWIN(hipEventElapsedTime, cuEventElapsedTime_v2, (float* milliseconds, void* from, void* to),                    \
         (milliseconds, from, to))                                                                                   \
    TWIN(hipEventDestroy, cuEventDestroy_v2, (void* event), (event))                                                 \
    TWIN(hipGraphInstantiateWithFlags, cuGraphInstantiateWithFlags,                                                  \
         (void** executable, void* graph, unsigned long long flags), (executable, graph, flags))                     \
    TWIN(hipGraphLaunch, cuGraphLaunch, (void* executable, void* stream), (executable, stream))                      \
    TWIN(hipGraphExecDestroy, cuGraphExecDestroy, (void* executable), (executable))                                  \
    TWIN(hipGraphDestroy, cuGraphDestroy, (void* graph), (graph))                                                    \
    TWIN(hipModuleLoadData, cuModuleLoadData, (void** module, const void* image), (module, image))                   \
    TWIN(hipModuleUnload, cuModuleUnload, (void* module), (module))                                                  \
    TWIN(hipFuncGetAttribute, cuFuncGetAttribute, (int* value, int attribute, void* function),                       \
         (value, attribute, function))

// Further CUDA functions that are called below.
#define WITHOUT_TWIN(CALLED)                                                                                         \
    CALLED(cuInit, (unsigned))                                                                                       \
    CALLED(cuDeviceGetCount, (int*))                                                                                 \
    CALLED(cuDeviceGetAttribute, (int*, int, Device))                                                                \
    CALLED(cuDevicePrimaryCtxRetain, (void**, Device))                                                               \
    CALLED(cuCtxGetCurrent, (void**))                                                                                \
    CALLED(cuCtxSetCurrent, (void*))                                                                                 \
    CALLED(cuGetErrorString, (Code, Text*))                                                                          \
    CALLED(cuModuleGetFunction, (void**, void*, Text))                                                               \
    CALLED(cuFuncSetAttribute, (void*, int, int))                                                                    \
    CALLED(cuLaunchKernel, (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**))

namespace {

struct Cuda {
    Library library{"libcuda.so.1"};
#define FIELD(hip, cuda, parameters, arguments) Code(*cuda) parameters;
    OF_THE_DRIVER(FIELD)
    OF_A_CONTEXT(FIELD)
#undef FIELD
#define FIELD(cuda, parameters) Code(*cuda) parameters;
    WITHOUT_TWIN(FIELD)
#undef FIELD
    Code started;
    int devices = 0;
    std::mutex lock;
    // The primary context of each device, once a thread has needed it. They stay: so does HIP's.
    std::vector<void*> contexts;

    Cuda() {
#define FIND(hip, cuda, parameters, arguments) library.find(cuda, #cuda);
        OF_THE_DRIVER(FIND)
        OF_A_CONTEXT(FIND)
#undef FIND
#define FIND(cuda, parameters) library.find(cuda, #cuda);
        WITHOUT_TWIN(FIND)
#undef FIND
        started = start();
    }

    Code start() {
        if (library.what_is_wrong()) return library.is_there() ? INSUFFICIENT_DRIVER : NO_DEVICE;
        if (Code wrong = cuInit(0)) return wrong;
        if (Code wrong = cuDeviceGetCount(&devices)) return wrong;
        contexts.resize(devices);
        return devices == 0 ? NO_DEVICE : SUCCESS;
    }

    Code context(Device device, void** out) {
        std::lock_guard<std::mutex> held(lock);
        void*& context = contexts[device];
        Code retained = context ? SUCCESS : cuDevicePrimaryCtxRetain(&context, device);
        *out = context;
        return retained;
    }
};

// Never destroyed: threads may outlive the end of main.
Cuda& cuda() {
    static Cuda* opened = new Cuda;
    return *opened;
}

thread_local Device set_device = 0;

// Makes the context of the thread's device its current one: what every call that needs one begins with.
Code bind() {
    Cuda& driver = cuda();
    if (driver.started) return driver.started;
    void *wanted = nullptr, *current = nullptr;
    if (Code wrong = driver.context(set_device, &wanted)) return wrong;
    if (Code wrong = driver.cuCtxGetCurrent(&current)) return wrong;
    return current == wanted ? SUCCESS : driver.cuCtxSetCurrent(wanted);
}

Code attribute(int* value, int attribute, Device device) {
    return cuda().started ? cuda().started : cuda().cuDeviceGetAttribute(value, attribute, device);
}

}  // namespace

#define DEFINED(hip, cuda_name, parameters, arguments)                               \
    EXPORTED Code hip parameters {                                                   \
        return cuda().started ? cuda().started : cuda().cuda_name arguments;         \
    }
OF_THE_DRIVER(DEFINED)
#undef DEFINED
#define DEFINED(hip, cuda_name, parameters, arguments) \
    EXPORTED Code hip parameters {                     \
        if (Code wrong = bind()) return wrong;         \
        return cuda().cuda_name arguments;             \
    }
OF_A_CONTEXT(DEFINED)
#undef DEFINED

EXPORTED Code hipInit(unsigned flags) { return flags == 0 ? cuda().started : INVALID_VALUE; }

EXPORTED Code hipRuntimeGetVersion(int* version) {
    *version = VERSION;
    return SUCCESS;
}

EXPORTED Code hipGetDeviceCount(int* count) {
    *count = cuda().devices;
    return cuda().started;
}

EXPORTED Code hipGetDevice(Device* device) {
    *device = set_device;
    return bind();
}

EXPORTED Code hipSetDevice(Device device) {
    if (cuda().started) return cuda().started;
    if (device < 0 || device >= cuda().devices) return INVALID_DEVICE;
    set_device = device;
    return bind();
}

EXPORTED Code hipDeviceGetAttribute(int* value, unsigned number, Device device) {
    switch (number) {
        case 63: return attribute(value, MULTIPROCESSORS, device);
        case 74: return attribute(value, MOST_SHARED_BYTES, device);
        case 87: return attribute(value, WARP, device);
        default: return INVALID_VALUE;
    }
}

// As of HIP 6: of the struct, the name and what NVRTC compiles for, of one architecture and not of its family.
EXPORTED Code hipGetDevicePropertiesR0600(char* properties, Device device) {
    int major = 0, minor = 0;
    if (Code wrong = attribute(&major, MAJOR, device)) return wrong;
    if (Code wrong = attribute(&minor, MINOR, device)) return wrong;
    std::memset(properties, 0, 1472);
    std::snprintf(properties + 1160, 256, "sm_%d%d%s", major, minor, major >= 9 ? "a" : "");
    return cuda().cuDeviceGetName(properties, 256, device);
}

// Kernels may ask for all shared memory that their own leaves, as they may on AMD's GPUs.
EXPORTED Code hipModuleGetFunction(void** out, void* module, const char* name) {
    if (Code wrong = bind()) return wrong;
    int most = 0, fixed = 0;
    if (Code wrong = cuda().cuModuleGetFunction(out, module, name)) return wrong;
    if (Code wrong = attribute(&most, MOST_SHARED_BYTES, set_device)) return wrong;
    if (Code wrong = cuda().cuFuncGetAttribute(&fixed, FIXED_SHARED_BYTES, *out)) return wrong;
    return cuda().cuFuncSetAttribute(*out, MOST_DYNAMIC_SHARED_BYTES, most - fixed);
}

EXPORTED Code hipModuleLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                                    unsigned threads_y, unsigned threads_z, unsigned shared, void* stream,
                                    void** arguments, void** extra) {
    // The contents of `extra` differ between CUDA and HIP.
    if (extra) return INVALID_VALUE;
    if (Code wrong = bind()) return wrong;
    return cuda().cuLaunchKernel(function, x, y, z, threads_x, threads_y, threads_z, shared, stream, arguments, nullptr);
}

EXPORTED Text hipGetErrorString(Code code) {
    static const Text wrong = cuda().library.what_is_wrong();
    // Without a driver there is no other to ask.
    static const std::string said = wrong ? std::string("HIP has no NVIDIA GPU below it: ") + wrong : "";
    if (wrong) return said.c_str();
    Text text = nullptr;
    return cuda().cuGetErrorString(code, &text) == SUCCESS && text ? text : "unknown error";
}
