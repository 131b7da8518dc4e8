// libhiprtc over NVRTC: its names, and the options that it takes. A test tool.
//
// Kernels are compiled with the options that the program gives NVRTC itself. Nothing tells them of AMD (no __HIP__), so that they take
// what they have for NVIDIA.
#include <string>
#include <vector>

#include "library.h"

using Answer = int;
using Program = void*;

namespace {

constexpr Answer INVALID_OPTION = 5, INTERNAL_ERROR = 11;

}  // namespace

#define TWINS(TWIN)                                                                                                  \
    TWIN(hiprtcVersion, nvrtcVersion, (int* major, int* minor), (major, minor))                                      \
    TWIN(hiprtcCreateProgram, nvrtcCreateProgram,                                                                    \
         (Program * program, const char* source, const char* name, int headers, const char** texts,                  \
          const char** names),                                                                                       \
         (program, source, name, headers, texts, names))                                                             \
    TWIN(hiprtcDestroyProgram, nvrtcDestroyProgram, (Program * program), (program))                                  \
    TWIN(hiprtcGetProgramLogSize, nvrtcGetProgramLogSize, (Program program, size_t* bytes), (program, bytes))        \
    TWIN(hiprtcGetProgramLog, nvrtcGetProgramLog, (Program program, char* log), (program, log))                      \
    TWIN(hiprtcGetCodeSize, nvrtcGetCUBINSize, (Program program, size_t* bytes), (program, bytes))                   \
    TWIN(hiprtcGetCode, nvrtcGetCUBIN, (Program program, char* code), (program, code))

namespace {

struct Nvrtc {
    Library library{"libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"};
#define FIELD(hip, cuda, parameters, arguments) Answer(*cuda) parameters;
    TWINS(FIELD)
#undef FIELD
    Answer (*nvrtcCompileProgram)(Program, int, const char* const*);
    const char* (*nvrtcGetErrorString)(Answer);

    Nvrtc() {
#define FIND(hip, cuda, parameters, arguments) library.find(cuda, #cuda);
        TWINS(FIND)
#undef FIND
        library.find(nvrtcCompileProgram, "nvrtcCompileProgram");
        library.find(nvrtcGetErrorString, "nvrtcGetErrorString");
    }
};

Nvrtc& nvrtc() {
    static Nvrtc* opened = new Nvrtc;
    return *opened;
}

bool is_missing() { return nvrtc().library.what_is_wrong() != nullptr; }

bool begins(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// An option of hiprtc as those of NVRTC; false where it has none.
bool translate(const std::string& option, std::vector<std::string>& into) {
    const std::string architecture = "--offload-arch=";
    if (begins(option, architecture.c_str())) {
        into.push_back("--gpu-architecture=" + option.substr(architecture.size()));
    } else if (begins(option, "-D")) {
        into.push_back(option);
    } else if (begins(option, "-std=")) {
        into.push_back("-" + option);
    } else if (option == "-ffp-contract=off") {
        into.push_back("--fmad=false");
    } else {
        // NVRTC optimises without being told to.
        return option == "-O3";
    }
    return true;
}

}  // namespace

#define DEFINED(hip, cuda, parameters, arguments) \
    EXPORTED Answer hip parameters { return is_missing() ? INTERNAL_ERROR : nvrtc().cuda arguments; }
TWINS(DEFINED)
#undef DEFINED

EXPORTED Answer hiprtcCompileProgram(Program program, int count, const char** options) {
    if (is_missing()) return INTERNAL_ERROR;
    // The options that hiprtc has by default.
    std::vector<std::string> translated{"--device-as-default-execution-space"};
    for (int i = 0; i < count; i++) {
        if (!translate(options[i], translated)) return INVALID_OPTION;
    }
    std::vector<const char*> texts;
    for (const std::string& option : translated) texts.push_back(option.c_str());
    return nvrtc().nvrtcCompileProgram(program, int(texts.size()), texts.data());
}

EXPORTED const char* hiprtcGetErrorString(Answer answer) {
    if (const char* wrong = nvrtc().library.what_is_wrong()) return wrong;
    return nvrtc().nvrtcGetErrorString(answer);
}
