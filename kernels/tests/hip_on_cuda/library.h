// A library of NVIDIA's, opened by its name when it is first needed: none is linked, so that what is missing can be said.
#pragma once
#include <dlfcn.h>

#include <initializer_list>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

class Library {
public:
    // Opens the first of `names` that is there, in the order in which the program looks for it too.
    explicit Library(std::initializer_list<const char*> names) {
        for (const char* each : names) {
            handle = dlopen(each, RTLD_NOW | RTLD_LOCAL);
            name = each;
            if (handle) break;
            if (wrong.empty()) wrong = dlerror();
        }
        if (handle) wrong.clear();
    }

    template <class F>
    void find(F& function, const char* symbol) {
        function = handle ? reinterpret_cast<F>(dlsym(handle, symbol)) : nullptr;
        if (handle && !function && wrong.empty()) wrong = name + " has no " + symbol;
    }

    bool is_there() const { return handle != nullptr; }
    // What is wrong with it, in words that stay; null where nothing is.
    const char* what_is_wrong() const { return wrong.empty() ? nullptr : wrong.c_str(); }

private:
    void* handle = nullptr;
    std::string name, wrong;
};
