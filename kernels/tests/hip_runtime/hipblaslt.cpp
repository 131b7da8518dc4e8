// libhipblaslt for tests: products on the CPU, in the order of a stream of the runtime beside it.
//
// It proposes six algorithms, of which the program must pass over the first five: one that needs a workspace though there is none, one
// that refuses a single row when it is launched, and operands that are not aligned to 16 bytes, one whose bits depend on where a row
// stands, one that gives other bits every second time, and one that rounds a sum twice, where it is of bf16 or added to what is there. The last adds one term after the other, from
// the last to the first: rocBLAS beside it adds them from the first, so that their bits differ.
//
// It makes handles for waves of 64 alone, and none where EMULATED_HIPBLASLT_REFUSES is "handles"; where that is "products", it has no
// algorithm for any. A handle serves one stream.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>

#include "product.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED unsigned hipGetDevice(int* device);
EXPORTED unsigned hipDeviceGetAttribute(int* value, unsigned attribute, int device);
EXPORTED unsigned emulated_hip_enqueue(void* stream, const std::function<void()>* work);

namespace {

enum Status { Success = 0, NotInitialized = 1, InvalidValue = 3, InternalError = 6, NotSupported = 7, ArchMismatch = 8 };

constexpr int AS_IT_IS = 111, TRANSPOSED = 112, FP32 = 0, BF16 = 14, COMPUTE_FP32 = 2, WAVE = 87;
constexpr int LEFT_OPERATION = 0, RIGHT_OPERATION = 1, MOST_WORKSPACE_BYTES = 1;
// The numbers of the algorithms, in the order in which they are proposed.
constexpr int WITH_WORKSPACE = 31, OF_MANY_ROWS = 5, ROW_DEPENDENT = 17, UNREPEATABLE = 2, ROUNDS_TWICE = 23, IN_ORDER = 13;
constexpr int ALL[] = {WITH_WORKSPACE, OF_MANY_ROWS, ROW_DEPENDENT, UNREPEATABLE, ROUNDS_TWICE, IN_ORDER};
constexpr size_t NEEDED_BYTES = 4096;

struct Algorithm {
    uint8_t data[16];
    size_t most_workspace_bytes;
};

struct Proposal {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

struct Handle {
    int device;
    // The first stream that it has served.
    std::atomic<void*> stream{nullptr};
    std::atomic<unsigned> runs{0};
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
};

struct Operation {
    int left = AS_IT_IS, right = AS_IT_IS;
};

struct Preference {
    uint64_t workspace_bytes = 0;
};

bool refuses(const char* what) {
    const char* said = std::getenv("EMULATED_HIPBLASLT_REFUSES");
    return said && said == std::string(what);
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

bool is_operation(int operation) { return operation == AS_IT_IS || operation == TRANSPOSED; }

// Checks the operands of a product, before it is known whether the product is proposed or formed.
Status check(const Handle* handle, const Operation* operation, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
    int device = -1;
    hipGetDevice(&device);
    if (!handle) return NotInitialized;
    if (handle->device != device || !operation || !a || !b || !c || !d) return InvalidValue;
    if (!is_operation(operation->left) || !is_operation(operation->right)) return InvalidValue;
    for (const Layout* each : {a, b, c, d}) {
        if (each->stride < int64_t(each->rows)) return InvalidValue;
    }
    const bool left = operation->left == TRANSPOSED, right = operation->right == TRANSPOSED;
    const uint64_t m = left ? a->columns : a->rows, k = left ? a->rows : a->columns;
    const uint64_t n = right ? b->rows : b->columns;
    if (k != (right ? b->columns : b->rows) || m != d->rows || n != d->columns) return InvalidValue;
    if (c->type != d->type || c->rows != d->rows || c->columns != d->columns || c->stride != d->stride) return InvalidValue;
    const bool is_of_fp32 = a->type == FP32 && b->type == FP32 && d->type == FP32;
    const bool is_of_bf16 = a->type == BF16 && b->type == BF16 && (d->type == FP32 || d->type == BF16);
    return is_of_fp32 || is_of_bf16 ? Success : NotSupported;
}

Order order_of(int number, unsigned run, bool has_roundings) {
    switch (number) {
        case ROW_DEPENDENT: return LATE_ROWS_BACKWARDS;
        case UNREPEATABLE: return run % 2 ? FORWARDS : BACKWARDS;
        case ROUNDS_TWICE: return has_roundings ? IN_PARTS : BACKWARDS;
        default: return BACKWARDS;
    }
}

}  // namespace

EXPORTED Status hipblasLtCreate(Handle** out) {
    int device = -1, wave = 0;
    if (hipGetDevice(&device) || hipDeviceGetAttribute(&wave, WAVE, device)) return InternalError;
    if (wave != 64 || refuses("handles")) return ArchMismatch;
    *out = new Handle{device};
    return Success;
}

EXPORTED Status hipblasLtDestroy(Handle* handle) {
    if (!handle) return InvalidValue;
    delete handle;
    return Success;
}

EXPORTED Status hipblasLtGetVersion(Handle* handle, int* version) {
    if (!handle || !version) return InvalidValue;
    *version = 100203;
    return Success;
}

EXPORTED Status hipblasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *out = new Layout{type, rows, columns, stride};
    return Success;
}

EXPORTED Status hipblasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return layout ? Success : InvalidValue;
}

EXPORTED Status hipblasLtMatmulDescCreate(Operation** out, int compute_type, int scale_type) {
    if (compute_type != COMPUTE_FP32 || scale_type != FP32) return InvalidValue;
    *out = new Operation;
    return Success;
}

EXPORTED Status hipblasLtMatmulDescDestroy(Operation* operation) {
    delete operation;
    return operation ? Success : InvalidValue;
}

EXPORTED Status hipblasLtMatmulDescSetAttribute(Operation* operation, int attribute, const int* value, size_t bytes) {
    if (!operation || !value || bytes != sizeof *value) return InvalidValue;
    switch (attribute) {
        case LEFT_OPERATION: operation->left = *value; return Success;
        case RIGHT_OPERATION: operation->right = *value; return Success;
        default: return InvalidValue;
    }
}

EXPORTED Status hipblasLtMatmulPreferenceCreate(Preference** out) {
    *out = new Preference;
    return Success;
}

EXPORTED Status hipblasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return preference ? Success : InvalidValue;
}

EXPORTED Status hipblasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const uint64_t* value, size_t bytes) {
    if (!preference || !value || bytes != sizeof *value || attribute != MOST_WORKSPACE_BYTES) return InvalidValue;
    preference->workspace_bytes = *value;
    return Success;
}

EXPORTED Status hipblasLtMatmulAlgoGetHeuristic(Handle* handle, Operation* operation, Layout* a, Layout* b, Layout* c, Layout* d,
                                                Preference* preference, int room, Proposal* proposals, int* count) {
    if (Status wrong = check(handle, operation, a, b, c, d)) return wrong;
    if (!preference || room <= 0 || !proposals || !count) return InvalidValue;
    *count = 0;
    if (refuses("products")) return Success;
    for (int number : ALL) {
        if (*count == room) break;
        Proposal& proposal = proposals[(*count)++];
        proposal = Proposal{};
        std::memcpy(proposal.algorithm.data, &number, sizeof number);
        proposal.algorithm.most_workspace_bytes = preference->workspace_bytes;
        proposal.workspace_bytes = number == WITH_WORKSPACE ? NEEDED_BYTES : 0;
    }
    return Success;
}

EXPORTED Status hipblasLtMatmul(Handle* handle, Operation* operation, const float* alpha, const void* a, Layout* of_a, const void* b,
                                Layout* of_b, const float* beta, const void* c, Layout* of_c, void* d, Layout* of_d,
                                const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
    if (Status wrong = check(handle, operation, of_a, of_b, of_c, of_d)) return wrong;
    if (!alpha || !a || !b || !beta || !c || !d || !algorithm) return InvalidValue;
    if (*alpha != 1 || (*beta != 0 && *beta != 1)) return InvalidValue;
    void* served = nullptr;
    if (!handle->stream.compare_exchange_strong(served, stream) && served != stream) return InternalError;
    int number = 0;
    std::memcpy(&number, algorithm->data, sizeof number);
    if (std::find(std::begin(ALL), std::end(ALL), number) == std::end(ALL)) return InvalidValue;
    if (number == WITH_WORKSPACE && (!workspace || workspace_bytes < NEEDED_BYTES)) return InvalidValue;
    const bool left = operation->left == TRANSPOSED, right = operation->right == TRANSPOSED;
    const int64_t m = of_d->rows, n = of_d->columns, k = left ? of_a->rows : of_a->columns;
    if (number == OF_MANY_ROWS && (n == 1 || !is_aligned(a) || !is_aligned(b) || !is_aligned(d))) return InternalError;
    const Order order = order_of(number, handle->runs++, of_d->type == BF16 || *beta != 0);
    const Product product{m, n, k, {a, of_a->type == BF16, left, of_a->stride}, {b, of_b->type == BF16, right, of_b->stride},
                          *beta, c, d, of_d->type == BF16, of_d->stride, order};
    const std::function<void()> work = [product] { product.compute(); };
    return emulated_hip_enqueue(stream, &work) == 0 ? Success : InternalError;
}
