// libhiprtc for tests: g++ makes libraries of the host of the kernels' sources, by the header that stands for a device. Built
// with EMULATOR_HEADER, the path of that header, and EMULATOR_LAUNCHERS, the folder of what they are linked to: 32.o and 64.o,
// emulator_launch.cpp for either width of a warp.
//
// Options that hiprtc does not know are refused, and for an architecture that it does not know it ends the process: as
// the real one does. EMULATED_HIP_REFUSED_SOURCES is part of the names of sources that it finds wrong.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum Result { Success = 0, InvalidInput = 3, InvalidOption = 5, CompilationFailed = 6, InternalError = 11 };

struct Text {
    std::string name, text;
};

struct Program {
    Text source;
    std::vector<Text> headers;
    std::string log, code;
};

const char* const ARGUMENTS =
    "-std=c++20 -O1 -fPIC -shared -pthread -fno-gnu-unique -fvisibility=hidden -Wl,-Bsymbolic -ffp-contract=off "
    "-Wall -Werror -Wno-unknown-pragmas -Wno-unused-function -DEMULATOR";

std::string read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::filesystem::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

std::string emulator() {
    const std::filesystem::path launchers = EMULATOR_LAUNCHERS;
    return read(EMULATOR_HEADER) + read(launchers / "32.o") + read(launchers / "64.o");
}

bool begins(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

std::string in_quotes(const std::string& word) { return " '" + word + "'"; }

// FNV-1a.
unsigned hash(unsigned sum, const std::string& text) {
    for (unsigned char byte : text) sum = (sum ^ byte) * 16777619u;
    return sum;
}

// A call of the C library otherwise, for the same bits.
const char* fused() { return __builtin_cpu_supports("fma") ? " -mfma" : ""; }

}  // namespace

// The code depends on the header and the options too, so caches must tell versions apart.
EXPORTED Result hiprtcVersion(int* major, int* minor) {
    *major = 7;
    *minor = int(hash(hash(hash(2166136261u, emulator()), ARGUMENTS), fused()) >> 1);
    return Success;
}

EXPORTED const char* hiprtcGetErrorString(Result result) {
    switch (result) {
        case Success: return "HIPRTC_SUCCESS";
        case InvalidInput: return "HIPRTC_ERROR_INVALID_INPUT";
        case InvalidOption: return "HIPRTC_ERROR_INVALID_OPTION";
        case CompilationFailed: return "HIPRTC_ERROR_COMPILATION";
        default: return "HIPRTC_ERROR_INTERNAL_ERROR";
    }
}

EXPORTED Result hiprtcCreateProgram(Program** out, const char* source, const char* name, int headers, const char** texts,
                                    const char** names) {
    if (!out || !source || !name) return InvalidInput;
    auto* program = new Program{{name, source}, {}, {}, {}};
    for (int i = 0; i < headers; i++) program->headers.push_back({names[i], texts[i]});
    *out = program;
    return Success;
}

EXPORTED Result hiprtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return Success;
}

EXPORTED Result hiprtcCompileProgram(Program* program, int count, const char** options) {
    std::string definitions, target;
    for (int i = 0; i < count; i++) {
        const std::string option = options[i];
        if (begins(option, "--offload-arch=")) {
            target = option.substr(15, option.find(':') - 15);
        } else if (begins(option, "-D")) {
            definitions += in_quotes(option);
        } else if (option != "-std=c++17" && option != "-O3" && option != "-ffp-contract=off") {
            program->log = "error: unknown option " + option;
            return InvalidOption;
        }
    }
    if (target != "gfx90a" && target != "gfx942" && target != "warp32") {
        std::fprintf(stderr, "hiprtc: no such architecture: %s\n", target.c_str());
        std::abort();
    }
    const char* const refused = std::getenv("EMULATED_HIP_REFUSED_SOURCES");
    if (refused && program->source.name.find(refused) != std::string::npos) {
        program->log = program->source.name + ":1:1: error: refused for a test";
        return CompilationFailed;
    }
    char name[] = "/tmp/hiprtc-XXXXXX";
    if (!mkdtemp(name)) return InternalError;
    const std::filesystem::path folder = name;
    for (const Text& header : program->headers) write(folder / header.name, header.text);
    write(folder / "emulator.h", read(EMULATOR_HEADER));
    const char* const said = "extern \"C\" __attribute__((used, visibility(\"default\"))) const char emulated_target[] = \"";
    write(folder / program->source.name, program->source.text + "\n" + said + target + "\";\n");
    const std::string warp = begins(target, "gfx9") ? "64" : "32";
    const std::string command = "cd" + in_quotes(name) + " && g++ " + ARGUMENTS + fused() + " -DWARP=" + warp + definitions +
                                " -x c++" + in_quotes(program->source.name) + " -x none" +
                                in_quotes(EMULATOR_LAUNCHERS "/" + warp + ".o") + " -o kernels.so 2> log";
    const bool is_compiled = std::system(command.c_str()) == 0;
    program->log = read(folder / "log");
    program->code = is_compiled ? read(folder / "kernels.so") : "";
    std::filesystem::remove_all(folder);
    return is_compiled ? Success : CompilationFailed;
}

EXPORTED Result hiprtcGetProgramLogSize(Program* program, size_t* bytes) {
    *bytes = program->log.size() + 1;
    return Success;
}

EXPORTED Result hiprtcGetProgramLog(Program* program, char* log) {
    std::memcpy(log, program->log.c_str(), program->log.size() + 1);
    return Success;
}

EXPORTED Result hiprtcGetCodeSize(Program* program, size_t* bytes) {
    *bytes = program->code.size();
    return Success;
}

EXPORTED Result hiprtcGetCode(Program* program, char* code) {
    std::memcpy(code, program->code.data(), program->code.size());
    return Success;
}
