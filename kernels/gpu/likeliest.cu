// The most likely token of each row of logits: the lowest column among the greatest of scale logits[row, column]. A row
// with a number that is not finite gets NO_TOKEN.
#include "dialect.h"

#define NO_TOKEN 0xffffffffu

constexpr u32 THREADS = 1024;

struct Likeliest {
    u32* tokens;         // [rows]
    const void* logits;  // [rows, columns], fp32 or of the activations' type
    u64 row_stride;
    u32 columns;
    float scale;
};

// Orders logits by value, then by column, the lower column above; numbers that are not finite are above all others.
DEVICE u64 rank_of(float logit, u32 column) {
    // A negative zero equals a positive one.
    const u32 bits = __float_as_uint(logit + 0.0f);
    if ((bits & 0x7f800000u) == 0x7f800000u) return ~0ull;
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | ~column;
}

// One block a row; `widened` converts a logit to fp32.
template <class Logit, class Widened>
DEVICE void likeliest_of(const Likeliest& arguments, Widened widened) {
    __shared__ u64 greatest[THREADS];
    const Logit* const row = static_cast<const Logit*>(arguments.logits) + blockIdx.x * arguments.row_stride;
    u64 own = 0;
#pragma unroll 8
    for (u32 column = threadIdx.x; column < arguments.columns; column += THREADS) {
        const u64 rank = rank_of(widened(row[column]) * arguments.scale, column);
        own = rank > own ? rank : own;
    }
    greatest[threadIdx.x] = own;
#pragma unroll 1
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        const u64 other = greatest[threadIdx.x + half];
        own = other > own ? other : own;
        greatest[threadIdx.x] = own;
    }
    if (threadIdx.x == 0) arguments.tokens[blockIdx.x] = own == ~0ull ? NO_TOKEN : ~static_cast<u32>(own);
}

KERNEL(likeliest, THREADS, 1, Likeliest) {
    likeliest_of<float>(arguments, [](float logit) { return logit; });
}
KERNEL(likeliest_of_activations, THREADS, 1, Likeliest) {
    likeliest_of<activation>(arguments, [](activation logit) { return widen(logit); });
}
