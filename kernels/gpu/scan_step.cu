// One position of the selective scan of each sequence for generation, of channels with sixteen states in blocks of 32
// channels: the bits are those of a piece (scan_piece.cu) of one position. A thread has four states of a channel, of two samples at
// once where there are many: then twice as much is on its way, and the rates of the states are read half as often.
//
// scan_step_projected also computes the raw steps of time, delta_raw[b, e] = low[b, r] weight[e, r]^T, with the bits of
// ordered_product.h: with few samples, the time of a token is the latency of one kernel after the other, and this saves
// one kernel. A warp computes them for its own channels, whose weights are loaded before the kernel ahead has ended.
//
// Floor, per channel and sample: 128 bytes of state, which at 128 samples of 5,120 channels are 20 us on an H200; a copy in place
// of as many bytes takes 21.5 there.
#include "scan.h"
#include "pack.h"
#include "tile_product.h"
#include "ordered_product.h"

namespace {

// A thread's channel of SAMPLES samples, and which four of its states. Blocks are whole.
template <u32 SAMPLES>
struct Own {
    u32 row, channel, quad;  // the first sample

    __device__ __forceinline__ explicit Own(const ScanPieceArguments& arguments) {
        const u64 item = (static_cast<u64>(blockIdx.x) * SCAN_THREADS + threadIdx.x) / 4;
        row = static_cast<u32>(item / arguments.channels) * SAMPLES;
        channel = static_cast<u32>(item % arguments.channels);
        quad = threadIdx.x % 4;
    }
};

// What a step reads of a sample.
struct Sample {
    float h[4], b[4], c[4];
    float x, z, delta_raw;
};

DEVICE void take_activations(float (&out)[4], const activation* from, bool wide) {
    if (wide) {
        unpack(out, load4(from));
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) out[j] = widen(from[j]);
}

// `delta_of(row)` returns a raw step of time, once the kernel ahead has ended.
template <u32 SAMPLES, class Delta>
DEVICE void step(const ScanPieceArguments& arguments, const Own<SAMPLES>& my, Delta& delta_of) {
    const bool wide = SAMPLES > 1 || arguments.wide != 0;
    const u64 of_sample = static_cast<u64>(arguments.channels) * 16;
    float* const state = arguments.state + my.row * of_sample + my.channel * 16 + my.quad * 4;
#pragma unroll
    for (u32 i = 0; i < SAMPLES; i++) {
        if (my.row + i < arguments.samples) fetch_ahead(state + i * of_sample);
    }
    float rate[4];
    take4(rate, arguments.a_log + static_cast<u64>(my.channel) * 16 + my.quad * 4, wide);
    const float delta_bias = arguments.delta_bias[my.channel], skip = arguments.d[my.channel];
#pragma unroll
    for (u32 j = 0; j < 4; j++) rate[j] = rate_of(rate[j]);
    await_previous();
    Sample samples[SAMPLES];
#pragma unroll
    for (u32 i = 0; i < SAMPLES; i++) {
        // The last sample once more where there is no other.
        const u32 row = min(my.row + i, arguments.samples - 1);
        const float* const from = state + (row - my.row) * of_sample;
        if (wide) {
            unpack(samples[i].h, load4_streaming(from));
        } else {
            take4(samples[i].h, from, false);
        }
        take_activations(samples[i].b, place(arguments.bc, row, my.quad * 4), wide);
        take_activations(samples[i].c, place(arguments.bc, row, 16 + my.quad * 4), wide);
        samples[i].x = widen(*place(arguments.x, row, my.channel));
        samples[i].z = widen(*place(arguments.z, row, my.channel));
        samples[i].delta_raw = delta_of(row);
    }
#pragma unroll
    for (u32 i = 0; i < SAMPLES; i++) {
        const Sample& sample = samples[i];
        const float delta = softplus(sample.delta_raw + delta_bias), driven = delta * sample.x;
        float h[4], y = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            h[j] = fmaf(exp2_fast(delta * rate[j]), sample.h[j], driven * sample.b[j]);
            y = fmaf(sample.c[j], h[j], y);
        }
        // In the order of a piece: the first two, the last two, both.
        y += shuffle_xor(y, 1);
        y += shuffle_xor(y, 2);
        if (my.row + i >= arguments.samples) break;
        float* const to = state + i * of_sample;
        if (wide) {
            store4_streaming(to, make_float4(h[0], h[1], h[2], h[3]));
        } else {
            put4(to, h, false);
        }
        if (my.quad != 0) continue;
        const float saved = widen(rounded(fmaf(skip, sample.x, y)));
        *place(arguments.out, my.row + i, my.channel) = rounded(gated(saved, sample.z, sigmoid(sample.z)));
    }
}

template <u32 SAMPLES>
DEVICE void step_of(const ScanPieceArguments& arguments) {
    release_next();
    const Own<SAMPLES> my(arguments);
    auto delta_of = [&](u32 row) { return widen(*place(arguments.delta_raw, row, my.channel)); };
    step(arguments, my, delta_of);
}

}  // namespace

KERNEL(scan_step, SCAN_THREADS, 1, ScanPieceArguments) { step_of<1>(arguments); }
// For aligned rows.
KERNEL(scan_step_of_two, SCAN_THREADS, ACTIVATION_BF16 ? 12 : 10, ScanPieceArguments) { step_of<2>(arguments); }

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

    __device__ __forceinline__ Projection(const ScanStepArguments& given, const Own<1>& my)
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

    __device__ __forceinline__ float operator()(u32) {
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
    const Own<1> my(arguments.scan);
    Projection delta_of(arguments, my);
    step(arguments.scan, my, delta_of);
}
#endif
