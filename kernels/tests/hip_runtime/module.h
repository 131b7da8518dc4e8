// Kernels: libraries of the host that hiprtc has made, and their launch.
#pragma once
#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include "runtime.h"

namespace {

struct Module {
    int device;
    void* library;
};

using Kernel = void (*)(const void*);
// Answers null, or what went wrong.
using Entry = const char* (*)(Kernel, const void*, const unsigned*, unsigned, size_t, uint64_t, unsigned, bool);

struct Function {
    int device;
    std::string name;
    Kernel kernel;
    Entry entry;
    unsigned argument_bytes, most_threads;
};

constexpr unsigned MOST_BLOCKS_IN_Y_AND_Z = 65535;

// A random order of threads: what kernels may not depend on.
constexpr uint64_t SEED = 1;

// The bytes of an image, which names its own size.
size_t image_bytes(const void* image) {
    const auto* header = static_cast<const Elf64_Ehdr*>(image);
    if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return 0;
    return header->e_shoff + size_t(header->e_shnum) * header->e_shentsize;
}

// The library of an image: opened once, and never closed, because launches that were enqueued may not have run.
void* opened(const std::string& image) {
    static std::mutex lock;
    static std::map<std::string, void*> libraries;
    std::lock_guard<std::mutex> held(lock);
    void*& library = libraries[image];
    if (library) return library;
    // The loader tells libraries apart by their names, so that each has one of its own.
    char name[] = "/tmp/kernels-XXXXXX";
    const int file = mkstemp(name);
    if (file < 0) return nullptr;
    if (write(file, image.data(), image.size()) == ssize_t(image.size())) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    close(file);
    unlink(name);
    return library;
}

}  // namespace

EXPORTED Code hipModuleLoadData(Module** out, const void* image) {
    if (Code wrong = ready()) return wrong;
    const size_t bytes = image_bytes(image);
    if (bytes == 0) return NoBinaryForGpu;
    void* library = opened(std::string(static_cast<const char*>(image), bytes));
    if (!library) return NoBinaryForGpu;
    const auto* target = static_cast<const char*>(dlsym(library, "emulated_target"));
    if (!target || devices()[current()]->target() != target) return NoBinaryForGpu;
    *out = new Module{current(), library};
    return Success;
}

EXPORTED Code hipModuleUnload(Module* module) {
    delete module;
    return Success;
}

EXPORTED Code hipModuleGetFunction(Function** out, Module* module, const char* name) {
    auto symbol = [&](const std::string& name) { return dlsym(module->library, name.c_str()); };
    void* kernel = symbol(name);
    void* entry = symbol("emulator_launch");
    const auto* bytes = static_cast<const unsigned*>(symbol(std::string(name) + "_argument_bytes"));
    const auto* threads = static_cast<const unsigned*>(symbol(std::string(name) + "_threads"));
    if (!kernel || !entry || !bytes || !threads) return NotFound;
    *out = new Function{module->device, name, Kernel(kernel), Entry(entry), *bytes, *threads};
    return Success;
}

EXPORTED Code hipFuncGetAttribute(int* value, unsigned attribute, Function*) {
    *value = 0;
    return attribute == 1 ? Success : InvalidValue;
}

EXPORTED Code hipModuleLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned threads,
                                    unsigned threads_y, unsigned threads_z, unsigned shared, void* handle,
                                    void** arguments, void** extra) {
    if (Code wrong = ready()) return wrong;
    auto stream = stream_of(handle);
    if (!stream || stream->device != current() || function->device != current()) return InvalidHandle;
    const bool has_blocks = x && y && z && y <= MOST_BLOCKS_IN_Y_AND_Z && z <= MOST_BLOCKS_IN_Y_AND_Z;
    const bool has_threads = threads && threads <= function->most_threads && threads_y == 1 && threads_z == 1;
    const bool has_room = int(shared) <= devices()[current()]->shared_bytes;
    if (extra || !has_blocks || !has_threads || !has_room) return InvalidValue;
    // Of its own alignment.
    auto copied = std::make_shared<std::vector<uint64_t>>((function->argument_bytes + 7) / 8);
    std::memcpy(copied->data(), arguments[0], function->argument_bytes);
    Device& device = *devices()[current()];
    return stream->enqueue([=, &device] {
        if (device.failed) return Success;
        if (device.launches_until_hung >= 0 && device.launches_until_hung-- == 0) Signal().wait();
        if (device.launches_until_lost >= 0 && device.launches_until_lost-- == 0) {
            std::fprintf(stderr, "emulated GPU %d: lost\n", device.index);
            return LaunchFailure;
        }
        const unsigned grid[3] = {x, y, z};
        const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
        // HIP has no launches that begin early, so that no thread must wait.
        const char* wrong =
            function->entry(function->kernel, copied->data(), grid, threads, shared, SEED, workers, false);
        if (!wrong) return Success;
        std::fprintf(stderr, "emulated GPU %d: %s: %s\n", device.index, function->name.c_str(), wrong);
        return LaunchFailure;
    });
}
