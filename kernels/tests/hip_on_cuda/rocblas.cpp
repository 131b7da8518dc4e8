// librocblas over cuBLASLt: what the program calls of it, with the algorithms among which it chooses on NVIDIA's GPUs. A test tool.
//
// A solution is an algorithm of cuBLASLt, by its number.
#include <cstring>

#include "cublaslt.h"

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

constexpr int FP32 = 151, BF16 = 168, BY_INDEX = 1;

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

}  // namespace

// The parameters that both functions of products share.
#define PRODUCT_PARAMETERS                                                                                                 \
    Handle *handle, int left, int right, int m, int n, int k, const float *alpha, const void *a, int a_type, int a_stride, \
        const void *b, int b_type, int b_stride, const float *beta, const void *c, int c_type, int c_stride, void *d,      \
        int d_type, int d_stride, int compute_type, int algorithm
#define PRODUCT_ARGUMENTS                                                                                               \
    handle, left, right, m, n, k, alpha, a, a_type, a_stride, b, b_type, b_stride, beta, c, c_type, c_stride, d, d_type, \
        d_stride, compute_type, algorithm

// Checks the operands of a product, for both functions.
static Status check(PRODUCT_PARAMETERS) {
    int device = -1;
    if (hipGetDevice(&device) || !handle || handle->device != device) return InvalidHandle;
    if (!a || !b || !c || !d || !alpha || !beta) return InvalidPointer;
    if (!is_operation(left) || !is_operation(right) || algorithm != BY_INDEX) return InvalidValue;
    const bool has_room = a_stride >= (left == AS_IT_IS ? m : k) && b_stride >= (right == AS_IT_IS ? k : n) && d_stride >= m;
    if (m < 0 || n < 0 || k < 0 || !has_room) return InvalidSize;
    if (c_stride != d_stride) return InvalidValue;
    const bool is_known = a_type == b_type && (a_type == FP32 || a_type == BF16) && (d_type == FP32 || d_type == BF16);
    return is_known && c_type == d_type && compute_type == FP32 ? Success : NotImplemented;
}

static int64_t type_of(int type) { return type == BF16 ? R_16BF : R_32F; }

EXPORTED Status rocblas_create_handle(Handle** out) { return status(make(out)); }

EXPORTED Status rocblas_destroy_handle(Handle* handle) {
    end(handle);
    return handle ? Success : InvalidHandle;
}

EXPORTED Status rocblas_set_stream(Handle* handle, void* stream) {
    if (!handle) return InvalidHandle;
    handle->stream = stream;
    return Success;
}

EXPORTED Status rocblas_set_workspace(Handle* handle, void* workspace, size_t bytes) {
    if (!handle) return InvalidHandle;
    return workspace && bytes ? Success : InvalidPointer;
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
    const Product product{handle->device, left, right, m, n, k, {type_of(a_type), type_of(b_type), type_of(d_type)},
                          {a_stride, b_stride, d_stride}};
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
    const Product product{handle->device, left, right, m, n, k, {type_of(a_type), type_of(b_type), type_of(d_type)},
                          {a_stride, b_stride, d_stride}};
    const auto plan = plan_of(product, solution);
    if (!plan) return InvalidValue;
    return status(multiply(*handle, *plan, alpha, a, b, beta, c, d, handle->stream));
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
