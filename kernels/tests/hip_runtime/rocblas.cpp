// librocblas for tests: products on the CPU, in the order of a stream of the runtime beside it.
//
// Of its three solutions the first cannot form products of one row, and the second adds the terms of late rows backwards: the
// program must pass over both. The third, and the first where it can, add one term after the other by fused multiply-adds.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED unsigned hipGetDevice(int* device);
EXPORTED unsigned emulated_hip_enqueue(void* stream, const std::function<void()>* work);

namespace {

enum Status { Success = 0, InvalidHandle = 1, NotImplemented = 2, InvalidPointer = 3, InvalidSize = 4, InternalError = 6, InvalidValue = 11 };

constexpr int AS_IT_IS = 111, TRANSPOSED = 112, FP32 = 151, BF16 = 168, BY_INDEX = 1;
constexpr int OF_MANY_ROWS = 3, ROW_DEPENDENT = 7, IN_ORDER = 11;
constexpr int FIRST_LATE_ROW = 64;
const char VERSION[] = "5.0.0.emulated";

struct Handle {
    int device;
    void* stream;
};

struct Matrix {
    const void* first;
    bool is_bf16, is_transposed;
    int64_t stride;

    // Column by column.
    float at(int64_t row, int64_t column) const {
        const int64_t place = is_transposed ? column + row * stride : row + column * stride;
        if (!is_bf16) return static_cast<const float*>(first)[place];
        const uint32_t bits = uint32_t(static_cast<const uint16_t*>(first)[place]) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

void store(void* first, bool is_bf16, int64_t place, float value) {
    if (!is_bf16) {
        static_cast<float*>(first)[place] = value;
        return;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    static_cast<uint16_t*>(first)[place] = is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// sums[i] += factor terms[i], each rounded once.
__attribute__((target_clones("default", "arch=x86-64-v3"))) void add_scaled(float* sums, const float* terms, float factor, int64_t count) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++) sums[i] = __builtin_fmaf(factor, terms[i], sums[i]);
}

struct Product {
    int64_t m, n, k;
    Matrix a, b;
    float beta;
    void* out;
    bool out_is_bf16;
    int64_t out_stride;
    bool is_row_dependent;

    // The caller's rows are the columns here.
    void compute() const {
        std::vector<float> terms(m * k), sums(m);
        for (int64_t term = 0; term < k; term++) {
            for (int64_t row = 0; row < m; row++) terms[term * m + row] = a.at(row, term);
        }
        for (int64_t column = 0; column < n; column++) {
            std::fill(sums.begin(), sums.end(), 0.0f);
            const bool is_backwards = is_row_dependent && column >= FIRST_LATE_ROW;
            for (int64_t step = 0; step < k; step++) {
                const int64_t term = is_backwards ? k - 1 - step : step;
                add_scaled(sums.data(), &terms[term * m], b.at(term, column), m);
            }
            const Matrix before{out, out_is_bf16, false, out_stride};
            for (int64_t row = 0; row < m; row++) {
                const float sum = beta == 0 ? sums[row] : sums[row] + before.at(row, column);
                store(out, out_is_bf16, row + column * out_stride, sum);
            }
        }
    }
};

bool is_operation(int operation) { return operation == AS_IT_IS || operation == TRANSPOSED; }

// What is wrong with a product, whatever is to become of it.
Status check(Handle* handle, int left, int right, int m, int n, int k, const float* alpha, const void* a, int a_type, int a_stride,
             const void* b, int b_type, int b_stride, const float* beta, const void* c, int c_type, int c_stride, void* d, int d_type,
             int d_stride, int compute_type, int algorithm) {
    int device = -1;
    hipGetDevice(&device);
    if (!handle || handle->device != device) return InvalidHandle;
    if (!a || !b || !c || !d || !alpha || !beta) return InvalidPointer;
    if (!is_operation(left) || !is_operation(right) || algorithm != BY_INDEX) return InvalidValue;
    if (m < 0 || n < 0 || k < 0 || a_stride < (left == AS_IT_IS ? m : k) || b_stride < (right == AS_IT_IS ? k : n)) return InvalidSize;
    if (c != d || c_stride != d_stride || d_stride < m || *alpha != 1 || (*beta != 0 && *beta != 1)) return InvalidValue;
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
                          *beta, d, d_type == BF16, d_stride, solution == ROW_DEPENDENT};
    const std::function<void()> work = [product] { product.compute(); };
    return emulated_hip_enqueue(handle->stream, &work) == 0 ? Success : InternalError;
}
