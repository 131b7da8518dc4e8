// Sums of gradients: of grains into a lane, whole or in parts, of uses of a parameter, and of squares.
//
// Floor: every element read and written once. accumulate (8 + 4 bytes a grain), add_parts (8 + 4 a part) and
// mean_gradient (4 + 4 a use) are bound by memory alone; so is sums_of_squares (4), whose additions in f64 take less
// than a third of an H200's at its memory's speed.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 256;
// Packs that a thread has in flight.
constexpr u32 BATCH = 4;

template <u32 N>
using Elements = Tile<THREADS, BATCH, N>;

struct Accumulate {
    float* lane;             // [elements]; added to
    const float* gradients;  // [grains, elements]
    u64 elements;
    u64 grains;
};

// lane[i] = lane[i] + gradients[g, i] for each g in order.
template <u32 N, Access ACCESS>
DEVICE void accumulate(const Accumulate& arguments, const Elements<N>& tile) {
    Pack<N> sums[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        sums[i] = load<N, ACCESS>(arguments.lane + tile.pack(i), tile.count(i));
    }
    const float* gradients = arguments.gradients;
    for (u64 grain = 0; grain < arguments.grains; grain++, gradients += arguments.elements) {
        Pack<N> terms[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            terms[i] = load<N, ACCESS>(gradients + tile.pack(i), tile.count(i));
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
            for (u32 j = 0; j < N; j++) sums[i].at[j] += terms[i].at[j];
        }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        store<N, ACCESS>(arguments.lane + tile.pack(i), sums[i], tile.count(i));
    }
}

template <u32 N>
DEVICE void accumulate(const Accumulate& arguments) {
    const Elements<N> tile(arguments.elements);
    if (tile.whole()) {
        accumulate<N, Access::WIDE>(arguments, tile);
    } else {
        accumulate<N, Access::SINGLE>(arguments, tile);
    }
}

// Packs of four where operands are aligned to them.
KERNEL(accumulate_wide, THREADS, 4, Accumulate) { accumulate<4>(arguments); }
KERNEL(accumulate_single, THREADS, 4, Accumulate) { accumulate<1>(arguments); }

struct AddParts {
    float* lane;         // [rows, columns], rows `lane_stride` apart; added to
    const float* parts;  // [grains, parts_per_grain, rows, columns]
    u64 lane_stride;
    u32 elements;  // rows columns
    u32 columns;
    u32 entries;  // parts of all grains
    u32 parts_per_grain;
};

template <u32 N>
DEVICE void add_to(Pack<N>& sums, const Pack<N>& terms) {
#pragma unroll
    for (u32 j = 0; j < N; j++) sums.at[j] += terms.at[j];
}

// lane[i] = lane[i] + (((0 + parts[g, 0, i]) + parts[g, 1, i]) + ...) for each g in order. A thread has a pack, which lies in one row.
template <u32 N>
DEVICE void add_parts(const AddParts& arguments) {
    const u32 first = (blockIdx.x * THREADS + threadIdx.x) * N;
    if (first >= arguments.elements) return;
    const u64 row = first / arguments.columns;
    float* const at = arguments.lane + row * arguments.lane_stride + first % arguments.columns;
    const float* part = arguments.parts + first;
    Pack<N> lane = load_pack<N>(at);
    Pack<N> of_grain = filled<N>(0.0f);
    u32 left = arguments.parts_per_grain;
#pragma unroll 4
    for (u32 entry = 0; entry < arguments.entries; entry++, part += arguments.elements) {
        add_to(of_grain, load_pack<N>(part));
        if (--left == 0) {
            add_to(lane, of_grain);
            of_grain = filled<N>(0.0f);
            left = arguments.parts_per_grain;
        }
    }
    store_pack<N>(at, lane);
}

KERNEL(add_parts_wide, THREADS, 4, AddParts) { add_parts<4>(arguments); }
KERNEL(add_parts_single, THREADS, 4, AddParts) { add_parts<1>(arguments); }

constexpr u32 USES = 8;

struct MeanGradient {
    float* out;               // [elements]
    const float* uses[USES];  // [elements] each; the first may be `out`
    u64 elements;
    u32 use_count;  // at least 1
    float count;    // the divisor of the sum
};

template <u32 N, Access ACCESS>
DEVICE void mean_gradient(const MeanGradient& arguments, const Elements<N>& tile) {
    Pack<N> sums[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        sums[i] = load<N, ACCESS>(arguments.uses[0] + tile.pack(i), tile.count(i));
    }
#pragma unroll
    for (u32 use = 1; use < USES; use++) {
        if (use >= arguments.use_count) break;
        Pack<N> terms[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            terms[i] = load<N, ACCESS>(arguments.uses[use] + tile.pack(i), tile.count(i));
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
            for (u32 j = 0; j < N; j++) sums[i].at[j] += terms[i].at[j];
        }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
        for (u32 j = 0; j < N; j++) sums[i].at[j] /= arguments.count;
        store<N, ACCESS>(arguments.out + tile.pack(i), sums[i], tile.count(i));
    }
}

template <u32 N>
DEVICE void mean_gradient(const MeanGradient& arguments) {
    const Elements<N> tile(arguments.elements);
    if (tile.whole()) {
        mean_gradient<N, Access::WIDE>(arguments, tile);
    } else {
        mean_gradient<N, Access::SINGLE>(arguments, tile);
    }
}

KERNEL(mean_gradient_wide, THREADS, 4, MeanGradient) { mean_gradient<4>(arguments); }
KERNEL(mean_gradient_single, THREADS, 4, MeanGradient) { mean_gradient<1>(arguments); }

// --- sums of squares ----------------------------------------------------------------------------------

// Ranges are cut into pieces of one size, from their own first element, so that a sum depends on nothing but its range.
struct Piece {
    u64 start;
    u64 count;
};

struct SquaresOfPieces {
    double* partials;     // [pieces]
    const float* x;
    const Piece* pieces;  // [pieces]
};

// The squares of the thread's packs of four i, i + THREADS, ... of `count` elements, with a sum for each of the four.
template <Access ACCESS>
DEVICE void add_squares(double (&sums)[4], const float* x, u32 count) {
    constexpr u32 STEP = THREADS * 4;
    auto add = [&](const Pack<4>& pack) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const double value = pack.at[j];
            // The square of an fp32 is exact in f64.
            sums[j] += value * value;
        }
    };
    u32 first = threadIdx.x * 4;
    for (; first + (BATCH - 1) * STEP + 4 <= count; first += BATCH * STEP) {
        Pack<4> packs[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) packs[i] = load<4, ACCESS>(x + first + i * STEP, 4);
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) add(packs[i]);
    }
    for (; first < count; first += STEP) add(load<4, Access::SINGLE>(x + first, count - first));
}

// A block for each piece: the four sums of each thread, then the threads'.
KERNEL(squares_of_pieces, THREADS, 4, SquaresOfPieces) {
    __shared__ double partial[THREADS / WARP];
    const Piece piece = arguments.pieces[blockIdx.x];
    const float* const x = arguments.x + piece.start;
    double sums[4] = {0.0, 0.0, 0.0, 0.0};
    if (reinterpret_cast<u64>(x) % 16 == 0) {
        add_squares<Access::WIDE>(sums, x, static_cast<u32>(piece.count));
    } else {
        add_squares<Access::SINGLE>(sums, x, static_cast<u32>(piece.count));
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
