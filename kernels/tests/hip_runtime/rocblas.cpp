// librocblas for tests: products on the CPU, in the order of a stream of the runtime beside it.
//
// Of its three solutions the first cannot form products of one row, and the second adds the terms of late rows backwards: the
// program must pass over both. The third, and the first where it can, add one term after the other by fused multiply-adds.
#include <cstddef>
#include <functional>

#include "product.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED unsigned hipGetDevice(int* device);
EXPORTED unsigned emulated_hip_enqueue(void* stream, const std::function<void()>* work);

namespace {

enum Status { Success = 0, InvalidHandle = 1, NotImplemented = 2, InvalidPointer = 3, InvalidSize = 4, InternalError = 6, InvalidValue = 11 };

constexpr int AS_IT_IS = 111, TRANSPOSED = 112, FP32 = 151, BF16 = 168, BY_INDEX = 1;
constexpr int OF_MANY_ROWS = 3, ROW_DEPENDENT = 7, IN_ORDER = 11;
const char VERSION[] = "5.0.0.emulated";

struct Handle {
    int device;
    void* stream;
};

bool is_operation(int operation) { return operation == AS_IT_IS || operation == TRANSPOSED; }

// Checks the operands of a product, for both functions.
Status check(Handle* handle, int left, int right, int m, int n, int k, const float* alpha, const void* a, int a_type, int a_stride,
             const void* b, int b_type, int b_stride, const float* beta, const void* c, int c_type, int c_stride, void* d, int d_type,
             int d_stride, int compute_type, int algorithm) {
    int device = -1;
    hipGetDevice(&device);
    if (!handle || handle->device != device) return InvalidHandle;
    if (!a || !b || !c || !d || !alpha || !beta) return InvalidPointer;
    if (!is_operation(left) || !is_operation(right) || algorithm != BY_INDEX) return InvalidValue;
    if (m < 0 || n < 0 || k < 0 || a_stride < (left == AS_IT_IS ? m : k) || b_stride < (right == AS_IT_IS ? k : n)) return InvalidSize;
    if (c_stride != d_stride || d_stride < m || *alpha != 1 || (*beta != 0 && *beta != 1)) return InvalidValue;
    const bool is_of_fp32 = a_type == FP32 && b_type == FP32 && d_type == FP32;
    const bool is_of_bf16 = a_type == BF16 && b_type == BF16 && (d_type == FP32 || d_type == BF16);
    return (is_of_fp32 || is_of_bf16) && c_type == d_type && compute_type == FP32 ? Success : NotImplemented;
}

}  // namespace

EXPORTED Status rocblas_create_handle(Handle** out) {
    *out = new Handle{-1, nullptr};
    return hipGetDevice(&(*out)->device) == 0 ? Success : InternalError;
}

EXPORTED Status rocblas_destroy_handle(Handle* handle) {
    delete handle;
    return Success;
}

EXPORTED Status rocblas_set_stream(Handle* handle, void* stream) {
    handle->stream = stream;
    return Success;
}

EXPORTED Status rocblas_set_workspace(Handle* handle, void* workspace, size_t bytes) {
    return handle && workspace && bytes ? Success : InvalidPointer;
}

EXPORTED Status rocblas_set_atomics_mode(Handle* handle, int mode) { return handle && mode == 0 ? Success : InvalidValue; }

EXPORTED Status rocblas_get_version_string_size(size_t* bytes) {
    *bytes = sizeof VERSION;
    return Success;
}

EXPORTED Status rocblas_get_version_string(char* text, size_t bytes) {
    if (bytes < sizeof VERSION) return InvalidSize;
    std::memcpy(text, VERSION, sizeof VERSION);
    return Success;
}

EXPORTED const char* rocblas_status_to_string(Status status) {
    switch (status) {
        case Success: return "rocblas_status_success";
        case InvalidHandle: return "rocblas_status_invalid_handle";
        case NotImplemented: return "rocblas_status_not_implemented";
        case InvalidPointer: return "rocblas_status_invalid_pointer";
        case InvalidSize: return "rocblas_status_invalid_size";
        case InvalidValue: return "rocblas_status_invalid_value";
        default: return "rocblas_status_internal_error";
    }
}

EXPORTED Status rocblas_gemm_ex_get_solutions(Handle* handle, int left, int right, int m, int n, int k, const float* alpha, const void* a,
                                              int a_type, int a_stride, const void* b, int b_type, int b_stride, const float* beta,
                                              const void* c, int c_type, int c_stride, void* d, int d_type, int d_stride,
                                              int compute_type, int algorithm, unsigned flags, int* solutions, int* count) {
    const Status wrong = check(handle, left, right, m, n, k, alpha, a, a_type, a_stride, b, b_type, b_stride, beta, c, c_type,
                               c_stride, d, d_type, d_stride, compute_type, algorithm);
    if (wrong) return wrong;
    if (flags || !count) return InvalidValue;
    std::vector<int> known = {ROW_DEPENDENT, IN_ORDER};
    if (n > 1) known.insert(known.begin(), OF_MANY_ROWS);
    if (!solutions) {
        *count = int(known.size());
        return Success;
    }
    if (*count < int(known.size())) return InvalidSize;
    std::memcpy(solutions, known.data(), known.size() * sizeof(int));
    return Success;
}

EXPORTED Status rocblas_gemm_ex(Handle* handle, int left, int right, int m, int n, int k, const float* alpha, const void* a, int a_type,
                                int a_stride, const void* b, int b_type, int b_stride, const float* beta, const void* c, int c_type,
                                int c_stride, void* d, int d_type, int d_stride, int compute_type, int algorithm, int solution,
                                unsigned flags) {
    const Status wrong = check(handle, left, right, m, n, k, alpha, a, a_type, a_stride, b, b_type, b_stride, beta, c, c_type,
                               c_stride, d, d_type, d_stride, compute_type, algorithm);
    if (wrong) return wrong;
    const bool is_known = solution == ROW_DEPENDENT || solution == IN_ORDER || (solution == OF_MANY_ROWS && n > 1);
    if (!is_known || flags) return InvalidValue;
    const Product product{m, n, k, {a, a_type == BF16, left == TRANSPOSED, a_stride}, {b, b_type == BF16, right == TRANSPOSED, b_stride},
                          *beta, c, d, d_type == BF16, d_stride, solution == ROW_DEPENDENT ? LATE_ROWS_BACKWARDS : FORWARDS};
    const std::function<void()> work = [product] { product.compute(); };
    return emulated_hip_enqueue(handle->stream, &work) == 0 ? Success : InternalError;
}
