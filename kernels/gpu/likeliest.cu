// The most likely token of each row of logits: the lowest column among the greatest of scale logits[row, column]. A row
// with a number that is not finite gets NO_TOKEN.
#include "dialect.h"
#include "pack.h"

#define NO_TOKEN 0xffffffffu

constexpr u32 THREADS = 1024;
// Columns that a thread loads at once of aligned rows, and such loads that are in flight.
constexpr u32 COLUMNS = 4, AHEAD = 4;

struct Likeliest {
    u32* tokens;         // [rows]
    const void* logits;  // [rows, columns], fp32 or of the activations' type
    u64 row_stride;
    u32 columns;
    float scale;
    u32 wide;  // whether each row begins at a multiple of COLUMNS elements
    u32 unused;
};

// The greatest of the logits that a thread has seen: each by rising column, or once more.
struct Greatest {
    float logit = 0.0f;
    u32 column = NO_TOKEN;
    float of_zeros = 0.0f;  // the sum of zero times each logit: not a number if one was infinite or not a number

    __device__ __forceinline__ void see(float next, u32 next_column) {
        of_zeros = fmaf(next, 0.0f, of_zeros);
        // Negative and positive zeros are equal, and the first of equals stays.
        if (next > logit || column == NO_TOKEN) {
            logit = next;
            column = next_column;
        }
    }

    // Orders threads by logit, then by column, the lower column above; numbers that are not finite are above all others, and threads
    // without a column below.
    __device__ __forceinline__ u64 rank() const {
        if (column == NO_TOKEN) return 0;
        if (of_zeros != 0.0f) return ~0ull;
        const u32 bits = __float_as_uint(logit + 0.0f);
        const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        return static_cast<u64>(ordered) << 32 | ~column;
    }
};

// One block a row.
template <class Logit>
DEVICE void likeliest_of(const Likeliest& arguments) {
    __shared__ u64 ranks[THREADS];
    const Logit* const row = static_cast<const Logit*>(arguments.logits) + blockIdx.x * arguments.row_stride;
    Greatest own;
    u32 column = 0;
    if (arguments.wide) {
        constexpr u32 STEP = THREADS * COLUMNS;
#pragma unroll 1
        for (u32 first = threadIdx.x * COLUMNS; first + COLUMNS <= arguments.columns; first += AHEAD * STEP) {
            Pack<COLUMNS> packs[AHEAD];
            // Behind the row the first columns once more: to see them twice changes nothing.
            const auto column_of = [&](u32 i) {
                const u32 next = first + i * STEP;
                return next + COLUMNS <= arguments.columns ? next : first;
            };
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) packs[i] = load_pack<COLUMNS>(row + column_of(i));
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
#pragma unroll
                for (u32 j = 0; j < COLUMNS; j++) own.see(packs[i].at[j] * arguments.scale, column_of(i) + j);
            }
        }
        column = arguments.columns / COLUMNS * COLUMNS;
    }
#pragma unroll 8
    for (column += threadIdx.x; column < arguments.columns; column += THREADS) {
        own.see(load_pack<1>(row + column).at[0] * arguments.scale, column);
    }
    u64 rank = own.rank();
    ranks[threadIdx.x] = rank;
#pragma unroll 1
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        const u64 other = ranks[threadIdx.x + half];
        rank = other > rank ? other : rank;
        ranks[threadIdx.x] = rank;
    }
    if (threadIdx.x == 0) arguments.tokens[blockIdx.x] = rank == ~0ull ? NO_TOKEN : ~static_cast<u32>(rank);
}

KERNEL(likeliest, THREADS, 1, Likeliest) { likeliest_of<float>(arguments); }
KERNEL(likeliest_of_activations, THREADS, 1, Likeliest) { likeliest_of<activation>(arguments); }
