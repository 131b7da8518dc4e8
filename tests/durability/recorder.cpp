// Writes down what a program does to the files below one folder, in the order in which it is done.
//
// Loaded before the C library (LD_PRELOAD). A line is the number of a process, a tab, an operation, a tab, a path, and for some a
// tab and one thing more:
//
//   make PATH          a file or folder gets its name
//   write PATH         bytes of a file change
//   sync PATH BYTES    the file's bytes are kept, so many; of a folder, its names
//   rename PATH PATH   said before it is done
//   remove PATH        said before it is done
//
// RECORDED_FOLDER names the folder, RECORD the file that the lines are appended to. A process that has written as many lines as
// KILLED_AT says is killed, so that a test can do it at any moment, and at the same one again.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <string>

namespace {

template <class F>
F next(const char* name) {
    void* symbol = dlsym(RTLD_NEXT, name);
    if (!symbol) abort();
    return reinterpret_cast<F>(symbol);
}

#define NEXT(name) static const auto original = next<decltype(&name)>(#name)

void record(const char* operation, const std::string& path, const std::string& more = "") {
    static const char* folder = getenv("RECORDED_FOLDER");
    static const int record = [] {
        const char* path = getenv("RECORD");
        return path ? int(syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) : -1;
    }();
    if (record < 0 || !folder || path.rfind(folder, 0) != 0) return;
    std::string line = std::to_string(getpid()) + '\t' + operation + '\t' + path;
    if (!more.empty()) line += '\t' + more;
    line += '\n';
    // One append of a line is whole, whatever other threads and processes append.
    if (syscall(SYS_write, record, line.data(), line.size()) != ssize_t(line.size())) abort();
    static std::atomic<long> left{getenv("KILLED_AT") ? atol(getenv("KILLED_AT")) : LONG_MAX};
    if (--left == 0) kill(getpid(), SIGKILL);
}

std::string of_descriptor(int descriptor) {
    char path[PATH_MAX];
    const ssize_t length =
        readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
    return length < 0 ? "" : std::string(path, length);
}

std::string absolute(int folder, const char* path) {
    if (path[0] == '/') return path;
    std::string base;
    if (folder == AT_FDCWD) {
        char current[PATH_MAX];
        base = getcwd(current, sizeof current) ? current : "";
    } else {
        base = of_descriptor(folder);
    }
    return base + '/' + path;
}

void record_write(int descriptor, ssize_t result) {
    if (result >= 0) record("write", of_descriptor(descriptor));
}

template <class Open>
int record_open(int folder, const char* path, int flags, Open open) {
    const bool is_new = (flags & O_CREAT) && faccessat(folder, path, F_OK, 0) != 0;
    const int descriptor = open();
    if (descriptor >= 0 && is_new) record("make", absolute(folder, path));
    if (descriptor >= 0 && (flags & O_TRUNC)) record("write", absolute(folder, path));
    return descriptor;
}

mode_t mode_of(int flags, va_list arguments) {
    return (flags & (O_CREAT | __O_TMPFILE)) ? mode_t(va_arg(arguments, int)) : 0;
}

int record_sync(int descriptor, int result) {
    struct stat found;
    if (result == 0 && fstat(descriptor, &found) == 0)
        record("sync", of_descriptor(descriptor), std::to_string(found.st_size));
    return result;
}

}  // namespace

#define OPEN(name)                                                                  \
    extern "C" int name(const char* path, int flags, ...) {                         \
        NEXT(name);                                                                 \
        va_list arguments;                                                          \
        va_start(arguments, flags);                                                 \
        const mode_t mode = mode_of(flags, arguments);                              \
        va_end(arguments);                                                          \
        return record_open(AT_FDCWD, path, flags, [&] { return original(path, flags, mode); }); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                \
    extern "C" int name(int folder, const char* path, int flags, ...) {             \
        NEXT(name);                                                                 \
        va_list arguments;                                                          \
        va_start(arguments, flags);                                                 \
        const mode_t mode = mode_of(flags, arguments);                              \
        va_end(arguments);                                                          \
        return record_open(folder, path, flags, [&] { return original(folder, path, flags, mode); }); \
    }
OPENAT(openat)
OPENAT(openat64)

#define WRITE(type, name, parameters, arguments)   \
    extern "C" type name parameters {              \
        NEXT(name);                                \
        const type result = original arguments;    \
        record_write(descriptor, result);          \
        return result;                             \
    }
WRITE(ssize_t, write, (int descriptor, const void* bytes, size_t size), (descriptor, bytes, size))
WRITE(ssize_t, writev, (int descriptor, const iovec* pieces, int count), (descriptor, pieces, count))
WRITE(ssize_t, pwrite, (int descriptor, const void* bytes, size_t size, off_t at), (descriptor, bytes, size, at))
WRITE(ssize_t, pwrite64, (int descriptor, const void* bytes, size_t size, off64_t at), (descriptor, bytes, size, at))
WRITE(ssize_t, sendfile, (int descriptor, int from, off_t* at, size_t size), (descriptor, from, at, size))
WRITE(ssize_t, sendfile64, (int descriptor, int from, off64_t* at, size_t size), (descriptor, from, at, size))
WRITE(ssize_t, copy_file_range, (int from, off64_t* from_at, int descriptor, off64_t* at, size_t size, unsigned flags),
      (from, from_at, descriptor, at, size, flags))
WRITE(int, ftruncate, (int descriptor, off_t size), (descriptor, size))
WRITE(int, ftruncate64, (int descriptor, off64_t size), (descriptor, size))

extern "C" int fsync(int descriptor) {
    NEXT(fsync);
    return record_sync(descriptor, original(descriptor));
}

extern "C" int fdatasync(int descriptor) {
    NEXT(fdatasync);
    return record_sync(descriptor, original(descriptor));
}

extern "C" int mkdir(const char* path, mode_t mode) {
    NEXT(mkdir);
    const int result = original(path, mode);
    if (result == 0) record("make", absolute(AT_FDCWD, path));
    return result;
}

extern "C" int rename(const char* from, const char* to) {
    NEXT(rename);
    record("rename", absolute(AT_FDCWD, from), absolute(AT_FDCWD, to));
    return original(from, to);
}

extern "C" int unlink(const char* path) {
    NEXT(unlink);
    record("remove", absolute(AT_FDCWD, path));
    return original(path);
}

extern "C" int rmdir(const char* path) {
    NEXT(rmdir);
    record("remove", absolute(AT_FDCWD, path));
    return original(path);
}

extern "C" int unlinkat(int folder, const char* path, int flags) {
    NEXT(unlinkat);
    record("remove", absolute(folder, path));
    return original(folder, path, flags);
}
