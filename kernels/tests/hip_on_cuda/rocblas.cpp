// librocblas over cuBLASLt: what the program calls of it, with the algorithms among which it chooses on NVIDIA's GPUs. A test tool.
//
// A solution is an algorithm of cuBLASLt, by a number that follows from what it is made of. Those of a product are what the library
// proposes for the rows that the program pins an algorithm for, so that both ways to a GPU choose from one list: a product whose right
// factor is transposed here is a weight's gradient, over a grain, and any other may have any number of rows.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "library.h"

EXPORTED unsigned hipGetDevice(int* device);

namespace {

enum Status {
    Success = 0,
    InvalidHandle = 1,
    NotImplemented = 2,
    InvalidPointer = 3,
    InvalidSize = 4,
    MemoryError = 5,
    InternalError = 6,
    InvalidValue = 11,
    ArchitectureMismatch = 15,
};

constexpr int AS_IT_IS = 111, TRANSPOSED = 112, FP32 = 151, BF16 = 168, BY_INDEX = 1;

// As kernels/src/gpu/vendor/product.rs and kernels/src/cuda/matmul.rs have them.
constexpr int64_t CANONICAL_ROWS = 4096, CANONICAL_TERMS = 1024;
constexpr size_t WORKSPACE_BYTES = size_t(32) << 20;
constexpr int CANDIDATES = 32;

// cuBLASLt's numbers.
constexpr int ALLOC_FAILED = 3, INVALID_ARGUMENT = 7, ARCH_MISMATCH = 8, NOT_SUPPORTED = 15;
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

Status status(int answer) {
    switch (answer) {
        case 0: return Success;
        case ALLOC_FAILED: return MemoryError;
        case INVALID_ARGUMENT: return InvalidValue;
        case ARCH_MISMATCH: return ArchitectureMismatch;
        case NOT_SUPPORTED: return NotImplemented;
        default: return InternalError;
    }
}

struct Handle {
    int device;
    // cuBLASLt's, which all handles of a device share.
    Made library;
    void* stream = nullptr;
    void* workspace = nullptr;
    size_t workspace_bytes = 0;
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
        if (!wrong) tried(cublas().cublasLtMatrixLayoutCreate(layout, type == BF16 ? R_16BF : R_32F, rows, columns, stride));
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
int solutions_of(const Handle& handle, const Product& chosen, const Alignments& aligned, std::vector<int>& out) {
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

std::shared_ptr<Plan> plan_of(const Product& product, int solution) {
    std::lock_guard<std::mutex> held(lock);
    auto known = plans.find({product, solution});
    if (known != plans.end()) return known->second;
    auto algorithm = algorithms.find({product.canonical(), solution});
    if (algorithm == algorithms.end()) return nullptr;
    if (plans.size() >= KEPT_PLANS) plans.clear();
    std::shared_ptr<Plan> plan(new Plan{Descriptors(product), algorithm->second});
    return plans[{product, solution}] = plan;
}

bool is_operation(int operation) { return operation == AS_IT_IS || operation == TRANSPOSED; }

}  // namespace

// What both functions of products take.
#define PRODUCT_PARAMETERS                                                                                                 \
    Handle *handle, int left, int right, int m, int n, int k, const float *alpha, const void *a, int a_type, int a_stride, \
        const void *b, int b_type, int b_stride, const float *beta, const void *c, int c_type, int c_stride, void *d,      \
        int d_type, int d_stride, int compute_type, int algorithm
#define PRODUCT_ARGUMENTS                                                                                               \
    handle, left, right, m, n, k, alpha, a, a_type, a_stride, b, b_type, b_stride, beta, c, c_type, c_stride, d, d_type, \
        d_stride, compute_type, algorithm

// What is wrong with a product, whatever is to become of it.
static Status check(PRODUCT_PARAMETERS) {
    int device = -1;
    if (hipGetDevice(&device) || !handle || handle->device != device) return InvalidHandle;
    if (!a || !b || !c || !d || !alpha || !beta) return InvalidPointer;
    if (!is_operation(left) || !is_operation(right) || algorithm != BY_INDEX) return InvalidValue;
    const bool has_room = a_stride >= (left == AS_IT_IS ? m : k) && b_stride >= (right == AS_IT_IS ? k : n) && d_stride >= m;
    if (m < 0 || n < 0 || k < 0 || !has_room) return InvalidSize;
    if (c != d || c_stride != d_stride) return InvalidValue;
    const bool is_known = a_type == b_type && (a_type == FP32 || a_type == BF16) && (d_type == FP32 || d_type == BF16);
    return is_known && c_type == d_type && compute_type == FP32 ? Success : NotImplemented;
}

EXPORTED Status rocblas_create_handle(Handle** out) {
    if (cublas().library.what_is_wrong()) return InternalError;
    int device = -1;
    if (hipGetDevice(&device)) return InternalError;
    std::lock_guard<std::mutex> held(lock);
    Made& library = libraries[device];
    if (int wrong = library ? 0 : cublas().cublasLtCreate(&library)) return status(wrong);
    *out = new Handle{device, library};
    return Success;
}

EXPORTED Status rocblas_destroy_handle(Handle* handle) {
    delete handle;
    return handle ? Success : InvalidHandle;
}

EXPORTED Status rocblas_set_stream(Handle* handle, void* stream) {
    if (!handle) return InvalidHandle;
    handle->stream = stream;
    return Success;
}

EXPORTED Status rocblas_set_workspace(Handle* handle, void* workspace, size_t bytes) {
    if (!handle) return InvalidHandle;
    handle->workspace = workspace;
    handle->workspace_bytes = bytes;
    return Success;
}

// No algorithm that is proposed splits k, so none adds by atomics.
EXPORTED Status rocblas_set_atomics_mode(Handle* handle, int mode) {
    if (!handle) return InvalidHandle;
    return mode == 0 ? Success : NotImplemented;
}

static std::string version() {
    return cublas().library.what_is_wrong() ? "over no cuBLASLt" : "over cuBLASLt " + std::to_string(cublas().cublasLtGetVersion());
}

EXPORTED Status rocblas_get_version_string_size(size_t* bytes) {
    *bytes = version().size() + 1;
    return Success;
}

EXPORTED Status rocblas_get_version_string(char* text, size_t bytes) {
    const std::string said = version();
    if (bytes <= said.size()) return InvalidSize;
    std::memcpy(text, said.c_str(), said.size() + 1);
    return Success;
}

EXPORTED Status rocblas_gemm_ex_get_solutions(PRODUCT_PARAMETERS, unsigned flags, int* list, int* count) {
    if (Status wrong = check(PRODUCT_ARGUMENTS)) return wrong;
    if (flags != 0 || !count) return InvalidValue;
    const Product product{handle->device, left, right, m, n, k, {a_type, b_type, d_type}, {a_stride, b_stride, d_stride}};
    const Alignments aligned{alignment(a), alignment(b), alignment(d)};
    std::vector<int> able;
    if (int wrong = solutions_of(*handle, product.canonical(), aligned, able)) return status(wrong);
    const Descriptors descriptors(product);
    if (descriptors.wrong) return status(descriptors.wrong);
    std::erase_if(able, [&](int solution) {
        std::lock_guard<std::mutex> held(lock);
        return !descriptors.accepts(*handle, algorithms.at({product.canonical(), solution}));
    });
    if (list) std::copy_n(able.begin(), std::min(able.size(), size_t(*count)), list);
    if (!list) *count = int(able.size());
    return Success;
}

EXPORTED Status rocblas_gemm_ex(PRODUCT_PARAMETERS, int solution, unsigned flags) {
    if (Status wrong = check(PRODUCT_ARGUMENTS)) return wrong;
    if (flags != 0) return InvalidValue;
    const Product product{handle->device, left, right, m, n, k, {a_type, b_type, d_type}, {a_stride, b_stride, d_stride}};
    const auto plan = plan_of(product, solution);
    if (!plan) return InvalidValue;
    const Descriptors& of = plan->descriptors;
    if (of.wrong) return status(of.wrong);
    return status(cublas().cublasLtMatmul(handle->library, of.operation, alpha, a, of.left, b, of.right, beta, c, of.out, d, of.out,
                                          &plan->algorithm, handle->workspace, handle->workspace_bytes, handle->stream));
}

EXPORTED const char* rocblas_status_to_string(Status status) {
    if (const char* wrong = cublas().library.what_is_wrong()) return wrong;
    switch (status) {
        case Success: return "rocblas_status_success";
        case InvalidHandle: return "rocblas_status_invalid_handle";
        case NotImplemented: return "rocblas_status_not_implemented";
        case InvalidPointer: return "rocblas_status_invalid_pointer";
        case InvalidSize: return "rocblas_status_invalid_size";
        case MemoryError: return "rocblas_status_memory_error";
        case InvalidValue: return "rocblas_status_invalid_value";
        case ArchitectureMismatch: return "rocblas_status_arch_mismatch";
        default: return "rocblas_status_internal_error";
    }
}
