// Cross-entropy of rows of logits, and its gradient in place:
//
//   losses[row] = logsumexp(s logits[row, ..v]) - s logits[row, target];   dlogits = s (softmax - one_hot(target))
//
// Floor: logits read and written once, 4 bytes a logit of bf16: 0.25 ms for 4,096 rows of 65,024 at 4.3 TB/s. The
// gradient reads them a second time: a row is 130 KB, so the rows in work stay in the second-level cache.
//
// The terms of the other tokens are summed without the target's: if the target is nearly certain, their part of the
// loss and of its gradient would be lost in the rounding of 1.
#include "dialect.h"
#include "pack.h"

// Logits that a thread loads at once: 16 bytes.
constexpr u32 LOGITS = 16 / sizeof(activation);
// Packs that a thread has in flight.
constexpr u32 BATCH = 4;

// The negative of the greatest finite number: below every logit but an infinite one, so that no difference from it is
// of two infinities.
#define LOWEST (-3.402823466e38f)
#define IGNORED_TARGET 0xffffffffu

typedef Pack<LOGITS> Logits;

struct CrossEntropy {
    float* losses;        // [rows]
    activation* logits;   // [rows, row_stride]
    const u32* targets;   // [rows]
    Fault* fault;         // receives targets outside the vocabulary
    u64 row_stride;       // at least v; what lies past v is padding
    u32 vocab_size;       // v
    u32 with_gradient;    // whether the logits become their gradient
    float scale;          // s, above 0
    u32 padding;
};

template <u32 THREADS>
DEVICE float block_max(float x) {
    __shared__ float partial[THREADS < WARP ? 1 : THREADS / WARP];
    x = warp_max(x);
    if (THREADS == WARP) return x;
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
#pragma unroll
    for (u32 warp = 0; warp < THREADS / WARP; warp++) x = fmaxf(x, partial[warp]);
    return x;
}

// A running sum of exponentials, relative to the greatest logit so far.
struct Exponentials {
    float greatest;
    float sum;

    // A NaN never is the greatest, but it makes the sum a NaN.
    __device__ __forceinline__ void rescale(float to) {
        sum *= exp_fast(greatest - to);
        greatest = to;
    }
    __device__ __forceinline__ void add(const Logits& logits) {
        float highest = greatest;
#pragma unroll
        for (u32 i = 0; i < LOGITS; i++) highest = fmaxf(highest, logits.at[i]);
        if (highest > greatest) rescale(highest);
        float terms = 0.0f;
#pragma unroll
        for (u32 i = 0; i < LOGITS; i++) terms += exp_fast(logits.at[i] - greatest);
        sum += terms;
    }
};

// Calls `each(first column, pack)` for the thread's packs of a row, scaled: pack i of every THREADS. Columns past v
// hold minus infinity; where rows are aligned, they are at least whole packs.
template <u32 THREADS, Access ACCESS, class Each>
DEVICE void for_each_pack(const activation* row, u32 vocab_size, float scale, Each each) {
    constexpr u32 STEP = THREADS * LOGITS;
    const float nothing = __uint_as_float(0xff800000u);
    auto take = [&](u32 column, Logits pack) {
#pragma unroll
        for (u32 i = 0; i < LOGITS; i++) pack.at[i] *= scale;
        if (ACCESS == Access::WIDE && column + LOGITS > vocab_size) {
#pragma unroll
            for (u32 i = 0; i < LOGITS; i++) {
                if (column + i >= vocab_size) pack.at[i] = nothing;
            }
        }
        each(column, pack);
    };
    u32 column = threadIdx.x * LOGITS;
    for (; column + (BATCH - 1) * STEP < vocab_size; column += BATCH * STEP) {
        Logits packs[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 here = column + i * STEP;
            packs[i] = load<LOGITS, ACCESS>(row + here, vocab_size - here, nothing);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) take(column + i * STEP, packs[i]);
    }
    for (; column < vocab_size; column += STEP) {
        take(column, load<LOGITS, ACCESS>(row + column, vocab_size - column, nothing));
    }
}

template <u32 THREADS>
DEVICE void fill_zero(activation* row, u64 from, u64 to) {
    for (u64 column = from + threadIdx.x; column < to; column += THREADS) narrow(row[column], 0.0f);
}

template <u32 THREADS, Access ACCESS>
DEVICE void cross_entropy(const CrossEntropy& arguments) {
    const u64 row = blockIdx.x;
    const u32 vocab_size = arguments.vocab_size;
    activation* const logits = arguments.logits + row * arguments.row_stride;
    u32 target = arguments.targets[row];
    if (target == IGNORED_TARGET) {
        if (threadIdx.x == 0) arguments.losses[row] = 0.0f;
        if (arguments.with_gradient) fill_zero<THREADS>(logits, 0, arguments.row_stride);
        return;
    }
    if (target >= vocab_size) {
        if (threadIdx.x == 0) report_token(arguments.fault, blockIdx.x, target);
        target = 0;
    }
    const float scale = arguments.scale;
    const float target_logit = widen(logits[target]) * scale;

    Exponentials others{fmaxf(target_logit, LOWEST), 0.0f};
    for_each_pack<THREADS, ACCESS>(logits, vocab_size, scale, [&](u32 column, Logits& pack) {
        if (target - column < LOGITS) {
#pragma unroll
            for (u32 i = 0; i < LOGITS; i++) {
                if (column + i == target) pack.at[i] = __uint_as_float(0xff800000u);
            }
        }
        others.add(pack);
    });
    __shared__ float partial[THREADS < WARP ? 1 : THREADS / WARP];
    const float greatest = block_max<THREADS>(others.greatest);
    others.rescale(greatest);
    const float sum_of_others = block_sum<THREADS>(others.sum, partial);
    const float target_term = exp_fast(target_logit - greatest);
    const float sum = sum_of_others + target_term;
    if (threadIdx.x == 0) {
        // If the target is the greatest, its term is 1, or NaN if the logit is infinite.
        arguments.losses[row] = target_logit == greatest
                                    ? log1pf(sum_of_others / target_term)
                                    : (greatest - target_logit) + logf(sum);
    }
    if (!arguments.with_gradient) return;

    // By now every thread has read the target's logit: block_sum is a barrier or, where the block is one warp, its
    // shuffles wait for all lanes, each with a sum that depends on its read of the logit.
    const float reciprocal = 1.0f / sum;
    for_each_pack<THREADS, ACCESS>(logits, vocab_size, scale, [&](u32 column, Logits& pack) {
#pragma unroll
        for (u32 i = 0; i < LOGITS; i++) {
            const float probability = exp_fast(pack.at[i] - greatest) * reciprocal;
            pack.at[i] = (column + i == target ? -sum_of_others / sum : probability) * scale;
        }
        // The padding of a whole pack receives the exponential of minus infinity, which is the zero that padding must
        // hold.
        store<LOGITS, ACCESS>(logits + column, pack, vocab_size - column);
    });
    const u32 whole = (vocab_size + LOGITS - 1) / LOGITS * LOGITS;
    const u32 stored = ACCESS == Access::WIDE ? whole : vocab_size;
    fill_zero<THREADS>(logits, stored, arguments.row_stride);
}

// A block for each row.
KERNEL(cross_entropy_wide, 512, 2, CrossEntropy) {
    cross_entropy<512, Access::WIDE>(arguments);
}
KERNEL(cross_entropy_single, 512, 2, CrossEntropy) {
    cross_entropy<512, Access::SINGLE>(arguments);
}
// For small vocabularies.
KERNEL(cross_entropy_short_wide, 64, 12, CrossEntropy) {
    cross_entropy<64, Access::WIDE>(arguments);
}
KERNEL(cross_entropy_short_single, 64, 12, CrossEntropy) {
    cross_entropy<64, Access::SINGLE>(arguments);
}
