// One position of the selective scan of each sequence for generation, of channels with sixteen states in blocks of 32
// channels: the bits are those of a piece (scan_piece.cu) of one position. A thread has four states of a channel.
//
// scan_step_projected also computes the raw steps of time, delta_raw[b, e] = low[b, r] weight[e, r]^T, with the bits of
// ordered_product.h: with few samples, the time of a token is the latency of one kernel after the other, and this saves
// one kernel. A warp computes them for its own channels, whose weights are loaded before the kernel ahead has ended.
//
// Floor, per channel and sample: 128 bytes of state, which at 128 samples of 5,120 channels are 28 us on an H100.
#include "scan.h"
#include "pack.h"
#include "tile_product.h"
#include "ordered_product.h"

namespace {

// A thread's channel of a sample, and which four of its states. Blocks are whole.
struct Own {
    u32 row, channel, quad;
    u64 item;  // row channels + channel

    __device__ __forceinline__ explicit Own(const ScanPieceArguments& arguments) {
        item = (static_cast<u64>(blockIdx.x) * SCAN_THREADS + threadIdx.x) / 4;
        row = static_cast<u32>(item / arguments.channels);
        channel = static_cast<u32>(item % arguments.channels);
        quad = threadIdx.x % 4;
    }
};

// `of_delta()` returns the raw step of time, once the kernel ahead has ended.
template <class Delta>
DEVICE void step(const ScanPieceArguments& arguments, const Own& my, Delta& of_delta) {
    const bool wide = arguments.wide != 0;
    float* const state = arguments.state + my.item * 16 + my.quad * 4;
    float h[4], rate[4];
    fetch_ahead(state);
    take4(rate, arguments.a_log + static_cast<u64>(my.channel) * 16 + my.quad * 4, wide);
    const float delta_bias = arguments.delta_bias[my.channel], skip = arguments.d[my.channel];
    await_previous();
    take4(h, state, wide);
    const float x = widen(*place(arguments.x, my.row, my.channel));
    const float z = widen(*place(arguments.z, my.row, my.channel));
    const float delta = softplus(of_delta() + delta_bias);
    const float driven = delta * x;
    float y = 0.0f;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        const float b = widen(*place(arguments.bc, my.row, my.quad * 4 + j));
        const float c = widen(*place(arguments.bc, my.row, 16 + my.quad * 4 + j));
        h[j] = fmaf(exp2_fast(delta * rate_of(rate[j])), h[j], driven * b);
        y = fmaf(c, h[j], y);
    }
    // In the order of a piece: the first two, the last two, both.
    y += shuffle_xor(y, 1);
    y += shuffle_xor(y, 2);
    put4(state, h, wide);
    if (my.quad != 0) return;
    const float saved = widen(rounded(fmaf(skip, x, y)));
    *place(arguments.out, my.row, my.channel) = rounded(gated(saved, z, sigmoid(z)));
}

}  // namespace

KERNEL(scan_step, SCAN_THREADS, 1, ScanPieceArguments) {
    release_next();
    const Own my(arguments);
    auto of_delta = [&] { return widen(*place(arguments.delta_raw, my.row, my.channel)); };
    step(arguments, my, of_delta);
}

#if ACTIVATION_BF16
struct ScanStepArguments {
    ScanPieceArguments scan;    // its delta_raw is unused
    const activation* low;      // [b, r], rows low_stride apart, aligned to 16 bytes
    const activation* weight;   // [e, r], rows weight_stride apart, aligned to 16 bytes
    u64 low_stride;
    u64 weight_stride;
    u32 terms;                  // r, a multiple of CHUNK
    u32 unused;
};

namespace {

// The most terms whose weights fit registers: mirrored by gpu/launch/scan_step.rs.
constexpr u32 MOST_TERMS = 256;

// The raw steps of time of a warp's channels, which all belong to one sample: a tile of a product of one row.
struct Projection {
    static constexpr u32 BLOCKS = MOST_TERMS / BLOCK_TERMS;
    static_assert(MOST_TERMS <= SEGMENT && WARP / 4 == TILE_COLUMNS, "one segment and one tile a warp");

    const ScanStepArguments& arguments;
    const activation* low;
    Chunk weight[BLOCKS];

    __device__ __forceinline__ Projection(const ScanStepArguments& given, const Own& my)
        : arguments(given), low(settled(given.low + my.row * given.low_stride)) {
        const u32 column = my.channel / TILE_COLUMNS * TILE_COLUMNS + operand_row();
        const activation* const from = settled(given.weight + column * given.weight_stride);
        const u32 term = operand_chunk() * CHUNK;
#pragma unroll
        for (u32 i = 0; i < BLOCKS; i++) {
            weight[i] = zero_chunk();
            if (term + i * BLOCK_TERMS < given.terms) weight[i] = load_once(from + term + i * BLOCK_TERMS);
        }
    }

    __device__ __forceinline__ float operator()() {
        Chunk rows[BLOCKS][1][SLOTS];
        const u32 term = operand_chunk() * CHUNK;
#pragma unroll
        for (u32 i = 0; i < BLOCKS; i++) {
#pragma unroll
            for (u32 slot = 0; slot < SLOTS; slot++) rows[i][0][slot] = zero_chunk();
            const bool is_there = operand_row() == 0 && term + i * BLOCK_TERMS < arguments.terms;
            if (is_there) rows[i][0][0] = load_pairs<CHUNK>(low + term + i * BLOCK_TERMS);
        }
        // Zeros follow up to a multiple of STEP_TERMS, as in every such product.
        const u32 end = (arguments.terms + STEP_TERMS - 1) / STEP_TERMS * STEP_TERMS;
        Sums sums[1][1] = {{zero_sums()}};
#pragma unroll
        for (u32 i = 0; i < BLOCKS; i++) {
            if (i * BLOCK_TERMS >= end) break;
            Chunk its[1] = {weight[i]};
            exchange_halves(its[0]);
            exchange_halves(rows[i][0][0]);
            multiply_add(sums, rows[i], its);
        }
        // A lane has neighbouring elements of the only row, and selects that of its channel.
        const u32 column = threadIdx.x % WARP / 4;
        const u32 of_lane = WARP == 32 ? 2 : SUMS, lane = WARP == 32 ? column / 2 : column / 4 * 16;
        float found = 0.0f;
#pragma unroll
        for (u32 i = 0; i < of_lane; i++) {
            const float its = shuffle(sums[0][0].at[i], lane);
            if (column % of_lane == i) found = its;
        }
        return widen(rounded(found));
    }
};

}  // namespace

KERNEL(scan_step_projected, SCAN_THREADS, 1, ScanStepArguments) {
    release_next();
    const Own my(arguments.scan);
    Projection of_delta(arguments, my);
    step(arguments.scan, my, of_delta);
}
#endif
