// Sums of gradients: of grains into a lane, of uses of a parameter, and of squares.
//
// Floor: every element read and written once. accumulate (8 + 4 bytes a grain) and mean_gradient (4 + 4 a use)
// move bytes and nothing else; so does sums_of_squares (4), whose additions in f64 stay below a third of an
// H200's at its memory's speed.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 256;
// Packs that a thread has in flight.
constexpr u32 BATCH = 4;

// The first element of pack `i` of the thread; neighbouring threads have neighbouring packs.
template <u32 N>
DEVICE u64 pack_start(u32 i) {
    return ((static_cast<u64>(blockIdx.x) * BATCH + i) * THREADS + threadIdx.x) * N;
}

// Elements of a pack that begins at `start`: none past the end.
DEVICE u64 count_from(u64 start, u64 elements) { return start < elements ? elements - start : 0; }

struct Accumulate {
    float* lane;             // [elements]; added to
    const float* gradients;  // [grains, elements]
    u64 elements;
    u64 grains;
};

// lane[i] = lane[i] + gradients[g, i] for each g in order.
template <u32 N>
DEVICE void accumulate(const Accumulate& arguments) {
    const u64 elements = arguments.elements;
    Pack<N> sums[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        const u64 start = pack_start<N>(i);
        sums[i] = load_first<N, Access::WIDE>(arguments.lane + start, count_from(start, elements));
    }
    const float* gradients = arguments.gradients;
    for (u64 grain = 0; grain < arguments.grains; grain++, gradients += elements) {
        Pack<N> terms[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u64 start = pack_start<N>(i);
            terms[i] = load_first<N, Access::WIDE>(gradients + start, count_from(start, elements));
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
            for (u32 j = 0; j < N; j++) sums[i].at[j] += terms[i].at[j];
        }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        const u64 start = pack_start<N>(i);
        store_first<N, Access::WIDE>(arguments.lane + start, sums[i], count_from(start, elements));
    }
}

KERNEL(accumulate_wide, THREADS, 4, Accumulate) { accumulate<4>(arguments); }
KERNEL(accumulate_single, THREADS, 4, Accumulate) { accumulate<1>(arguments); }

constexpr u32 USES = 8;

struct MeanGradient {
    float* out;               // [elements]
    const float* uses[USES];  // [elements] each; the first may be `out`
    u64 elements;
    u32 use_count;  // at least 1
    float count;    // what the sum is divided by
};

template <u32 N>
DEVICE void mean_gradient(const MeanGradient& arguments) {
    const u64 elements = arguments.elements;
    Pack<N> sums[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        const u64 start = pack_start<N>(i);
        sums[i] = load_first<N, Access::WIDE>(arguments.uses[0] + start, count_from(start, elements));
    }
#pragma unroll
    for (u32 use = 1; use < USES; use++) {
        if (use >= arguments.use_count) break;
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u64 start = pack_start<N>(i);
            const Pack<N> terms = load_first<N, Access::WIDE>(arguments.uses[use] + start,
                                                              count_from(start, elements));
#pragma unroll
            for (u32 j = 0; j < N; j++) sums[i].at[j] += terms.at[j];
        }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        const u64 start = pack_start<N>(i);
#pragma unroll
        for (u32 j = 0; j < N; j++) sums[i].at[j] /= arguments.count;
        store_first<N, Access::WIDE>(arguments.out + start, sums[i], count_from(start, elements));
    }
}

KERNEL(mean_gradient_wide, THREADS, 4, MeanGradient) { mean_gradient<4>(arguments); }
KERNEL(mean_gradient_single, THREADS, 4, MeanGradient) { mean_gradient<1>(arguments); }

// --- sums of squares ----------------------------------------------------------------------------------

// Ranges are cut into pieces of one size, from their own first element: so a sum depends on nothing but its
// range.
struct Piece {
    u64 start;
    u64 count;
};

struct SquaresOfPieces {
    double* partials;     // [pieces]
    const float* x;
    const Piece* pieces;  // [pieces]
};

// A block for each piece. Thread i sums the packs of four i, i + THREADS, ..., each of the four by itself; then
// the four, then the threads.
KERNEL(squares_of_pieces, THREADS, 4, SquaresOfPieces) {
    __shared__ double partial[THREADS / WARP];
    const Piece piece = arguments.pieces[blockIdx.x];
    const float* const x = arguments.x + piece.start;
    const bool aligned = reinterpret_cast<u64>(x) % 16 == 0;
    double sums[4] = {0.0, 0.0, 0.0, 0.0};
    for (u32 first = threadIdx.x * 4; first < piece.count; first += BATCH * THREADS * 4) {
        Pack<4> packs[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u64 start = first + i * THREADS * 4;
            const u64 count = count_from(start, piece.count);
            packs[i] = aligned ? load_first<4, Access::WIDE>(x + start, count)
                               : load_first<4, Access::SINGLE>(x + start, count);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const double value = packs[i].at[j];
                // The square of an fp32 is exact in f64.
                sums[j] += value * value;
            }
        }
    }
    const double sum = block_sum<THREADS>((sums[0] + sums[1]) + (sums[2] + sums[3]), partial);
    if (threadIdx.x == 0) arguments.partials[blockIdx.x] = sum;
}

struct SumsOfPieces {
    double* sums;            // [ranges]
    const double* partials;  // [pieces]
    const u64* first_piece;  // [ranges + 1]
};

// A block for each range: thread i sums the pieces i, i + SUM_THREADS, ...; then the threads.
constexpr u32 SUM_THREADS = 64;
KERNEL(sums_of_pieces, SUM_THREADS, 1, SumsOfPieces) {
    __shared__ double partial[SUM_THREADS / WARP];
    const u64 first = arguments.first_piece[blockIdx.x];
    const u64 last = arguments.first_piece[blockIdx.x + 1];
    double sum = 0.0;
    for (u64 piece = first + threadIdx.x; piece < last; piece += SUM_THREADS) {
        sum += arguments.partials[piece];
    }
    sum = block_sum<SUM_THREADS>(sum, partial);
    if (threadIdx.x == 0) arguments.sums[blockIdx.x] = sum;
}
