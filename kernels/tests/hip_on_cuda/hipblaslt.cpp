// libhipblaslt over cuBLASLt: what the program calls of it, with the algorithms among which it chooses on NVIDIA's GPUs. A test tool.
//
// An algorithm is one of cuBLASLt, which serves any product. The interface does not say how operands will be aligned, so cuBLASLt is
// asked for the best first, and an algorithm refuses operands that are less aligned than those that it was proposed for.
#include <cstring>
#include <deque>

#include "cublaslt.h"

namespace {

enum Status {
    Success = 0,
    AllocFailed = 2,
    InvalidValue = 3,
    ExecutionFailed = 5,
    InternalError = 6,
    NotSupported = 7,
    ArchMismatch = 8,
};

// The types have the numbers of cuBLASLt.
constexpr int COMPUTE_FP32 = 2, LEFT_OPERATION = 0, RIGHT_OPERATION = 1, MOST_WORKSPACE_BYTES = 1;
constexpr uint32_t ALIGNMENTS[] = {16, 8, 4, 2};

struct ProposedAlgorithm {
    // The same in every process.
    int number;
    // The alignment that it was proposed for.
    uint32_t alignment;
    // Its index among the algorithms that this process has proposed.
    uint64_t place;
    size_t most_workspace_bytes;
};

std::mutex proposing;
// Algorithms of cuBLASLt, which stay where they are, and the plans that were made with each.
struct Proposed {
    Algorithm algorithm;
    std::map<Product, std::shared_ptr<Plan>> plans;
};
std::deque<Proposed> all_proposed;

struct HipProposal {
    ProposedAlgorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
};

struct Operation {
    int left = AS_IT_IS, right = AS_IT_IS;
};

Status status(int answer) {
    switch (answer) {
        case 0: return Success;
        case ALLOC_FAILED: return AllocFailed;
        case INVALID_ARGUMENT: return InvalidValue;
        case ARCH_MISMATCH: return ArchMismatch;
        case EXECUTION_FAILED: return ExecutionFailed;
        case NOT_SUPPORTED: return NotSupported;
        default: return InternalError;
    }
}

// Checks the operands of a product, before it is known whether the product is proposed or formed.
Status check(const Handle* handle, const Operation* operation, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
    int device = -1;
    if (hipGetDevice(&device) || !handle || handle->device != device) return InvalidValue;
    if (!operation || !a || !b || !c || !d || !is_operation(operation->left) || !is_operation(operation->right)) return InvalidValue;
    const bool is_one = c->type == d->type && c->rows == d->rows && c->columns == d->columns && c->stride == d->stride;
    return is_one ? Success : NotSupported;
}

Product product_of(const Handle& handle, const Operation& operation, const Layout& a, const Layout& b, const Layout& d) {
    const int64_t k = operation.left == TRANSPOSED ? a.rows : a.columns;
    return {handle.device,
            operation.left,
            operation.right,
            int64_t(d.rows),
            int64_t(d.columns),
            k,
            {a.type, b.type, d.type},
            {a.stride, b.stride, d.stride}};
}

}  // namespace

EXPORTED Status hipblasLtCreate(Handle** out) { return status(make(out)); }

EXPORTED Status hipblasLtDestroy(Handle* handle) {
    end(handle);
    return handle ? Success : InvalidValue;
}

EXPORTED Status hipblasLtGetVersion(Handle* handle, int* version) {
    if (!handle || !version) return InvalidValue;
    // As cuBLASLt numbers itself.
    *version = int(cublas().cublasLtGetVersion());
    return Success;
}

EXPORTED Status hipblasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if (type != R_32F && type != R_16BF) return NotSupported;
    *out = new Layout{type, rows, columns, stride};
    return Success;
}

EXPORTED Status hipblasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return layout ? Success : InvalidValue;
}

EXPORTED Status hipblasLtMatmulDescCreate(Operation** out, int compute_type, int scale_type) {
    if (compute_type != COMPUTE_FP32 || scale_type != R_32F) return NotSupported;
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

EXPORTED Status hipblasLtMatmulPreferenceCreate(uint64_t** out) {
    *out = new uint64_t{0};
    return Success;
}

EXPORTED Status hipblasLtMatmulPreferenceDestroy(uint64_t* preference) {
    delete preference;
    return preference ? Success : InvalidValue;
}

EXPORTED Status hipblasLtMatmulPreferenceSetAttribute(uint64_t* preference, int attribute, const uint64_t* value, size_t bytes) {
    if (!preference || !value || bytes != sizeof *value || attribute != MOST_WORKSPACE_BYTES) return InvalidValue;
    *preference = *value;
    return Success;
}

EXPORTED Status hipblasLtMatmulAlgoGetHeuristic(Handle* handle, Operation* operation, Layout* a, Layout* b, Layout* c, Layout* d,
                                                uint64_t* preference, int room, HipProposal* proposals, int* count) {
    if (Status wrong = check(handle, operation, a, b, c, d)) return wrong;
    if (!preference || room <= 0 || !proposals || !count) return InvalidValue;
    const Product product = product_of(*handle, *operation, *a, *b, *d).canonical();
    *count = 0;
    int wrong = 0;
    std::lock_guard<std::mutex> held(proposing);
    for (uint32_t aligned : ALIGNMENTS) {
        std::vector<Algorithm> found;
        wrong = ask(*handle, product, {aligned, aligned, aligned}, found);
        if (wrong) break;
        for (const Algorithm& algorithm : found) {
            if (*count == room) break;
            proposals[*count] = HipProposal{};
            proposals[(*count)++].algorithm = {number(algorithm), aligned, all_proposed.size(), *preference};
            all_proposed.push_back({algorithm, {}});
        }
    }
    return *count ? Success : status(wrong);
}

EXPORTED Status hipblasLtMatmul(Handle* handle, Operation* operation, const float* alpha, const void* a, Layout* of_a, const void* b,
                                Layout* of_b, const float* beta, const void* c, Layout* of_c, void* d, Layout* of_d,
                                const ProposedAlgorithm* algorithm, void*, size_t, void* stream) {
    if (Status wrong = check(handle, operation, of_a, of_b, of_c, of_d)) return wrong;
    if (!alpha || !a || !b || !beta || !c || !d || !algorithm) return InvalidValue;
    for (const void* address : {a, b, static_cast<const void*>(d)}) {
        if (alignment(address) < algorithm->alignment) return NotSupported;
    }
    const Product product = product_of(*handle, *operation, *of_a, *of_b, *of_d);
    std::shared_ptr<Plan> plan;
    {
        std::lock_guard<std::mutex> held(proposing);
        if (algorithm->place >= all_proposed.size()) return InvalidValue;
        Proposed& proposed = all_proposed[algorithm->place];
        std::shared_ptr<Plan>& known = proposed.plans[product];
        if (!known) known = plan_by(product, proposed.algorithm);
        plan = known;
    }
    return status(multiply(*handle, *plan, alpha, a, b, beta, c, d, stream));
}
