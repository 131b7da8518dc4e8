// What librocblas and libhipblaslt over cuBLASLt share: its algorithms, by numbers that follow from what they are made of.
//
// The algorithms of a product are what cuBLASLt proposes for the rows that the program pins one for, so that every way to a GPU chooses
// from one list: a product whose right factor is transposed here is a weight's gradient, over a grain, and any other may have any number
// of rows.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "library.h"

EXPORTED unsigned hipGetDevice(int* device);
EXPORTED unsigned hipStreamCreateWithFlags(void** stream, unsigned flags);
EXPORTED unsigned hipStreamSynchronize(void* stream);
EXPORTED unsigned hipStreamDestroy(void* stream);
EXPORTED unsigned hipMallocAsync(unsigned long long* at, size_t bytes, void* stream);
EXPORTED unsigned hipFreeAsync(unsigned long long at, void* stream);

namespace {

// By the numbers of rocBLAS and hipBLAS.
constexpr int AS_IT_IS = 111, TRANSPOSED = 112;

// As kernels/src/gpu/vendor/product/key.rs, kernels/src/gpu/algorithm.rs and kernels/src/cuda/matmul.rs have them.
constexpr int64_t CANONICAL_ROWS = 4096, CANONICAL_TERMS = 1024;
constexpr size_t WORKSPACE_BYTES = size_t(32) << 20;
constexpr int CANDIDATES = 32;

// cuBLASLt's numbers.
constexpr int MISSING = 1, ALLOC_FAILED = 3, INVALID_ARGUMENT = 7, ARCH_MISMATCH = 8, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15;
constexpr int COMPUTE_32F = 68, R_32F = 0, R_16BF = 14, DESC_TRANSA = 3, DESC_TRANSB = 4;
constexpr int PREF_MAX_WORKSPACE_BYTES = 1, PREF_REDUCTION_SCHEME_MASK = 3, PREF_MIN_ALIGNMENT_A_BYTES = 5;
constexpr int CONFIG_SPLITK_NUM = 2;
// The bytes of each number that an algorithm is made of.
constexpr std::array<size_t, 9> CONFIG_BYTES{4, 4, 4, 4, 4, 4, 4, 2, 2};

struct Algorithm {
    uint64_t data[8];
};

struct Proposal {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

using Made = void*;

#define FUNCTIONS(CALLED)                                                                                             \
    CALLED(cublasLtCreate, int, (Made*))                                                                              \
    CALLED(cublasLtGetVersion, size_t, ())                                                                            \
    CALLED(cublasLtMatmulDescCreate, int, (Made*, int, int))                                                          \
    CALLED(cublasLtMatmulDescDestroy, int, (Made))                                                                    \
    CALLED(cublasLtMatmulDescSetAttribute, int, (Made, int, const void*, size_t))                                     \
    CALLED(cublasLtMatrixLayoutCreate, int, (Made*, int, uint64_t, uint64_t, int64_t))                                \
    CALLED(cublasLtMatrixLayoutDestroy, int, (Made))                                                                  \
    CALLED(cublasLtMatmulPreferenceCreate, int, (Made*))                                                              \
    CALLED(cublasLtMatmulPreferenceDestroy, int, (Made))                                                              \
    CALLED(cublasLtMatmulPreferenceSetAttribute, int, (Made, int, const void*, size_t))                               \
    CALLED(cublasLtMatmulAlgoGetHeuristic, int, (Made, Made, Made, Made, Made, Made, Made, int, Proposal*, int*))     \
    CALLED(cublasLtMatmulAlgoCheck, int, (Made, Made, Made, Made, Made, Made, const Algorithm*, Proposal*))           \
    CALLED(cublasLtMatmulAlgoConfigGetAttribute, int, (const Algorithm*, int, void*, size_t, size_t*))                \
    CALLED(cublasLtMatmul, int,                                                                                       \
           (Made, Made, const void*, const void*, Made, const void*, Made, const void*, const void*, Made, void*,     \
            Made, const Algorithm*, void*, size_t, void*))

struct CublasLt {
    Library library{"libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"};
#define FIELD(name, answer, parameters) answer(*name) parameters;
    FUNCTIONS(FIELD)
#undef FIELD

    CublasLt() {
#define FIND(name, answer, parameters) library.find(name, #name);
        FUNCTIONS(FIND)
#undef FIND
    }
};

CublasLt& cublas() {
    static CublasLt* opened = new CublasLt;
    return *opened;
}

// What each library keeps for one stream.
struct Handle {
    int device;
    // cuBLASLt's, which all handles of a device share.
    Made library;
    void* stream = nullptr;
    // Its own: the program gives AMD's libraries none, so that they split no sums, which cuBLASLt is told otherwise.
    unsigned long long workspace = 0;
};

// A product without addresses, column by column: what an algorithm is chosen for, and what descriptors are made of.
struct Product {
    int64_t device, left, right, m, n, k;
    std::array<int64_t, 3> types, strides;

    bool operator<(const Product& other) const {
        const auto all = [](const Product& of) {
            return std::tie(of.device, of.left, of.right, of.m, of.n, of.k, of.types, of.strides);
        };
        return all(*this) < all(other);
    }

    // Whether it is of the same kind, and of other sizes perhaps.
    bool is_like(const Product& other) const {
        const auto kind = [](const Product& of) { return std::tie(of.device, of.left, of.right, of.types); };
        return kind(*this) == kind(other);
    }

    // For what an algorithm is chosen.
    Product canonical() const {
        Product chosen = *this;
        if (right == TRANSPOSED) {
            chosen.k = std::min(k, CANONICAL_TERMS);
        } else {
            chosen.n = CANONICAL_ROWS;
        }
        return chosen;
    }
};

struct Descriptors {
    Made operation = nullptr, left = nullptr, right = nullptr, out = nullptr;
    int wrong = 0;

    explicit Descriptors(const Product& product) {
        const auto& [device, left_operation, right_operation, m, n, k, types, strides] = product;
        tried(cublas().cublasLtMatmulDescCreate(&operation, COMPUTE_32F, R_32F));
        set(DESC_TRANSA, left_operation);
        set(DESC_TRANSB, right_operation);
        make(&left, types[0], left_operation, m, k, strides[0]);
        make(&right, types[1], right_operation, k, n, strides[1]);
        make(&out, types[2], AS_IT_IS, m, n, strides[2]);
    }
    Descriptors(const Descriptors&) = delete;
    ~Descriptors() {
        if (operation) cublas().cublasLtMatmulDescDestroy(operation);
        for (Made layout : {left, right, out}) {
            if (layout) cublas().cublasLtMatrixLayoutDestroy(layout);
        }
    }

    bool accepts(const Handle& handle, const Algorithm& algorithm) const {
        Proposal found{};
        const int answer = cublas().cublasLtMatmulAlgoCheck(handle.library, operation, left, right, out, out, &algorithm, &found);
        return answer == 0 && found.workspace_bytes <= WORKSPACE_BYTES;
    }

private:
    void tried(int answer) {
        if (!wrong) wrong = answer;
    }
    void set(int attribute, int64_t operation_of) {
        const int transposed = operation_of == TRANSPOSED;
        if (!wrong) tried(cublas().cublasLtMatmulDescSetAttribute(operation, attribute, &transposed, sizeof transposed));
    }
    void make(Made* layout, int64_t type, int64_t operation_of, int64_t rows, int64_t columns, int64_t stride) {
        if (operation_of == TRANSPOSED) std::swap(rows, columns);
        if (!wrong) tried(cublas().cublasLtMatrixLayoutCreate(layout, int(type), rows, columns, stride));
    }
};

// A number of an algorithm; all ones where the library does not tell it.
uint32_t part(const Algorithm& algorithm, int name) {
    uint32_t value = 0;
    size_t written = 0;
    const int answer = cublas().cublasLtMatmulAlgoConfigGetAttribute(&algorithm, name, &value, CONFIG_BYTES[name], &written);
    return answer == 0 ? value : ~0u;
}

// FNV-1a of what an algorithm is made of: the same in every process, and never negative.
int number(const Algorithm& algorithm) {
    uint32_t hash = 2166136261u;
    for (size_t name = 0; name < CONFIG_BYTES.size(); name++) {
        const uint32_t value = part(algorithm, int(name));
        for (int byte = 0; byte < 4; byte++) hash = (hash ^ (value >> 8 * byte & 0xff)) * 16777619u;
    }
    return int(hash & 0x7fffffffu);
}

// The bytes that the library may take of each operand at once: those that its address is a multiple of, up to 16.
using Alignments = std::array<uint32_t, 3>;

uint32_t alignment(const void* address) {
    const auto place = reinterpret_cast<uintptr_t>(address) | 16;
    return uint32_t(place & ~(place - 1));
}

std::mutex lock;
std::map<int, Made> libraries;
// By what an algorithm is chosen for, which may be made of the same numbers for other products.
std::map<std::pair<Product, Alignments>, std::vector<int>> proposed;
std::map<std::pair<Product, int>, Algorithm> algorithms;

struct Plan {
    Descriptors descriptors;
    Algorithm algorithm;
};
constexpr size_t KEPT_PLANS = 4096;
std::map<std::pair<Product, int>, std::shared_ptr<Plan>> plans;

// The library's order of algorithms for a product, those that split k left out.
int ask(const Handle& handle, const Product& product, const Alignments& aligned, std::vector<Algorithm>& found) {
    const Descriptors of(product);
    if (of.wrong) return of.wrong;
    Made preference = nullptr;
    if (int wrong = cublas().cublasLtMatmulPreferenceCreate(&preference)) return wrong;
    int wrong = 0;
    const auto set = [&](int attribute, const auto& value) {
        if (!wrong) wrong = cublas().cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
    };
    set(PREF_MAX_WORKSPACE_BYTES, uint64_t(WORKSPACE_BYTES));
    set(PREF_REDUCTION_SCHEME_MASK, 0u);
    for (int operand = 0; operand < 4; operand++) set(PREF_MIN_ALIGNMENT_A_BYTES + operand, aligned[std::min(operand, 2)]);
    std::vector<Proposal> proposals(CANDIDATES);
    int count = 0;
    if (!wrong) {
        wrong = cublas().cublasLtMatmulAlgoGetHeuristic(handle.library, of.operation, of.left, of.right, of.out, of.out,
                                                        preference, CANDIDATES, proposals.data(), &count);
    }
    cublas().cublasLtMatmulPreferenceDestroy(preference);
    for (int i = 0; i < count && !wrong; i++) {
        const uint32_t parts = part(proposals[i].algorithm, CONFIG_SPLITK_NUM);
        if (proposals[i].state == 0 && parts <= 1) found.push_back(proposals[i].algorithm);
    }
    return wrong;
}

// The solutions of a product, for whatever rows it is chosen.
[[maybe_unused]] int solutions_of(const Handle& handle, const Product& chosen, const Alignments& aligned, std::vector<int>& out) {
    std::lock_guard<std::mutex> held(lock);
    auto known = proposed.find({chosen, aligned});
    if (known == proposed.end()) {
        std::vector<Algorithm> found;
        if (int wrong = ask(handle, chosen, aligned, found)) return wrong;
        std::vector<int> numbers;
        for (const Algorithm& algorithm : found) {
            numbers.push_back(number(algorithm));
            algorithms.insert({{chosen, numbers.back()}, algorithm});
        }
        known = proposed.insert({{chosen, aligned}, numbers}).first;
    }
    out = known->second;
    return 0;
}

// The plan of an algorithm for a product, whatever product it was proposed for.
std::shared_ptr<Plan> plan_by(const Product& product, const Algorithm& algorithm) {
    return std::shared_ptr<Plan>(new Plan{Descriptors(product), algorithm});
}

[[maybe_unused]] std::shared_ptr<Plan> plan_of(const Product& product, int solution) {
    std::lock_guard<std::mutex> held(lock);
    auto known = plans.find({product, solution});
    if (known != plans.end()) return known->second;
    auto algorithm = algorithms.find({product.canonical(), solution});
    // A solution serves any product of its kind, whatever sizes it was proposed for.
    const auto serves = [&](const auto& known) { return known.first.second == solution && known.first.first.is_like(product); };
    if (algorithm == algorithms.end()) algorithm = std::find_if(algorithms.begin(), algorithms.end(), serves);
    if (algorithm == algorithms.end()) return nullptr;
    if (plans.size() >= KEPT_PLANS) plans.clear();
    std::shared_ptr<Plan> plan = plan_by(product, algorithm->second);
    return plans[{product, solution}] = plan;
}

// Memory for a handle, in the order of a stream of its own: any other may be recorded just now. False where there is none.
bool has_room(Handle& handle, bool wanted) {
    constexpr unsigned NON_BLOCKING = 1;
    void* stream = nullptr;
    if (hipStreamCreateWithFlags(&stream, NON_BLOCKING)) return false;
    const unsigned wrong =
        wanted ? hipMallocAsync(&handle.workspace, WORKSPACE_BYTES, stream) : hipFreeAsync(handle.workspace, stream);
    const bool is_done = !wrong && !hipStreamSynchronize(stream);
    hipStreamDestroy(stream);
    return is_done;
}

// A handle of the thread's device, or what was answered in place of it.
int make(Handle** out) {
    if (cublas().library.what_is_wrong()) return MISSING;
    int device = -1;
    if (hipGetDevice(&device)) return MISSING;
    std::lock_guard<std::mutex> held(lock);
    Made& library = libraries[device];
    if (int wrong = library ? 0 : cublas().cublasLtCreate(&library)) return wrong;
    std::unique_ptr<Handle> handle(new Handle{device, library});
    if (!has_room(*handle, true)) return ALLOC_FAILED;
    *out = handle.release();
    return 0;
}

void end(Handle* handle) {
    if (handle) has_room(*handle, false);
    delete handle;
}

int multiply(const Handle& handle, const Plan& plan, const void* alpha, const void* a, const void* b, const void* beta, const void* c,
             void* d, void* stream) {
    const Descriptors& of = plan.descriptors;
    if (of.wrong) return of.wrong;
    return cublas().cublasLtMatmul(handle.library, of.operation, alpha, a, of.left, b, of.right, beta, c, of.out, d, of.out,
                                   &plan.algorithm, reinterpret_cast<void*>(handle.workspace), WORKSPACE_BYTES, stream);
}

bool is_operation(int operation) { return operation == AS_IT_IS || operation == TRANSPOSED; }

}  // namespace
