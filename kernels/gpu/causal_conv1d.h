// What the forward and the backward convolution share: the runs of positions that threads walk, filters in registers,
// and SiLU.
#pragma once

// A block is 32 threads of neighbouring channels for each of 4 neighbouring runs of positions.
constexpr u32 CONV_CHANNEL_THREADS = 32;
constexpr u32 CONV_RUNS = 4;
constexpr u32 CONV_THREADS = CONV_CHANNEL_THREADS * CONV_RUNS;

// The part of a block that one thread computes.
struct Run {
    u64 sample_row;  // The sample's first row.
    u32 column;      // The thread's first channel, counted from the block's.
    u32 channel;     // The first channel among all; a valid one even if the thread has none.
    u32 first;       // Its first position inside the sample; past the end if it has no channel.
    u32 last;
    u32 index;  // The number of its run in the block.
    u32 tile;   // The block's tile of positions, counted over all samples.
    u32 block_channel;
};

// Blocks are numbered by sample, by tile of positions, by tile of channels. A tile is CONV_RUNS runs of
// RUN_POSITIONS, cut from a sample's first position, so that its sums are the sample's own.
template <u32 LANES, u32 RUN_POSITIONS>
DEVICE Run run_of_thread(u32 positions, u32 channels) {
    constexpr u32 CHANNELS = CONV_CHANNEL_THREADS * LANES;
    constexpr u32 TILE_POSITIONS = CONV_RUNS * RUN_POSITIONS;
    const u32 channel_tiles = (channels + CHANNELS - 1) / CHANNELS;
    const u32 position_tiles = (positions + TILE_POSITIONS - 1) / TILE_POSITIONS;
    Run run;
    run.tile = blockIdx.x / channel_tiles;
    run.block_channel = blockIdx.x % channel_tiles * CHANNELS;
    run.column = threadIdx.x % CONV_CHANNEL_THREADS * LANES;
    run.channel = min(run.block_channel + run.column, channels - LANES);
    run.index = threadIdx.x / CONV_CHANNEL_THREADS;
    const u32 sample = run.tile / position_tiles;
    run.sample_row = static_cast<u64>(sample) * positions;
    const u32 first = run.tile % position_tiles * TILE_POSITIONS + run.index * RUN_POSITIONS;
    run.first = min(first, positions);
    const bool has_channel = run.block_channel + run.column < channels;
    run.last = has_channel ? min(first + RUN_POSITIONS, positions) : run.first;
    return run;
}

// SiLU of a convolution c and its derivative are computed from c' = -log2(e) c, which a filter scaled by that factor
// yields at no cost: e^-c is 2^c', and constants that are needed anyway absorb the scale again.
#define LN_2_SQUARED 0.4804530139182014f

// silu(c) = c' / (-log2(e) (1 + 2^c')).
DEVICE float silu_of_scaled(float c) {
    return c * reciprocal_fast(fmaf(exp2_fast(c), -LOG2_E, -LOG2_E));
}
// -ln(2) silu'(c) = s (c' ln(2)^2 (1 - s) - ln(2)), s = 1 / (1 + 2^c').
DEVICE float scaled_silu_derivative(float c) {
    const float s = reciprocal_fast(1.0f + exp2_fast(c));
    return s * fmaf(c, fmaf(-LN_2_SQUARED, s, LN_2_SQUARED), -LN_2);
}

// The taps of LANES channels, oldest first, and their biases, times -log2(e). Taps that a shorter filter lacks
// are zero.
template <u32 TAPS, u32 LANES>
struct Filter {
    Pack<LANES> weight[TAPS];
    Pack<LANES> bias;

    __device__ __forceinline__ Filter(const float* weight_at, const float* bias_at, u32 channel,
                                      u32 width) {
#pragma unroll
        for (u32 lane = 0; lane < LANES; lane++) {
            const float* const taps = weight_at + static_cast<u64>(channel + lane) * width;
#pragma unroll
            for (u32 tap = 0; tap < TAPS; tap++) {
                const bool present = tap + width >= TAPS;
                weight[tap].at[lane] = present ? -LOG2_E * taps[tap + width - TAPS] : 0.0f;
            }
            bias.at[lane] = bias_at ? -LOG2_E * bias_at[channel + lane] : 0.0f;
        }
    }

    // The convolution of TAPS inputs, oldest first, times -log2(e).
    __device__ __forceinline__ float convolve(const Pack<LANES>* inputs, u32 lane) const {
        float sum = bias.at[lane];
#pragma unroll
        for (u32 tap = 0; tap < TAPS; tap++) {
            sum = fmaf(weight[tap].at[lane], inputs[tap].at[lane], sum);
        }
        return sum;
    }
};

// LANES activations of a row as memory holds them: of bf16, half of the registers that fp32 takes.
#if ACTIVATION_BF16
template <u32 LANES>
struct alignas(2 * LANES) Row {
    u32 pairs[LANES / 2];

    __device__ __forceinline__ float widened(u32 lane) const {
        return lane % 2 ? second_of(pairs[lane / 2]) : first_of(pairs[lane / 2]);
    }
};
template <>
struct Row<1> {
    bf16 only;

    __device__ __forceinline__ float widened(u32) const { return widen(only); }
};
#else
template <u32 LANES>
struct alignas(4 * LANES) Row {
    float at[LANES];

    __device__ __forceinline__ float widened(u32 lane) const { return at[lane]; }
};
#endif
template <u32 LANES>
DEVICE Pack<LANES> widened(const Row<LANES>& row) {
    Pack<LANES> pack;
#pragma unroll
    for (u32 lane = 0; lane < LANES; lane++) pack.at[lane] = row.widened(lane);
    return pack;
}

// Sets the COUNT inputs before the first position of a document to zero.
template <u32 COUNT, u32 LANES>
DEVICE void forget(Pack<LANES>* inputs) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) inputs[i] = filled<LANES>(0.0f);
}
// Among the COUNT inputs before a run, sets those to zero that precede the beginning of a document; its bits are given.
template <u32 COUNT, u32 LANES>
DEVICE void forget_before(Pack<LANES>* inputs, u32 start_bits) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) inputs[i] = or_zero(!(start_bits >> i >> 1), inputs[i]);
}

// What one thread reads of a sample's rows: LANES channels, rows `stride` elements apart.
template <u32 LANES>
struct Rows {
    const activation* sample;  // The thread's first channel of the first row.
    u32 stride;
    u32 positions;

    __device__ __forceinline__ const Row<LANES>* at(u32 position) const {
        return reinterpret_cast<const Row<LANES>*>(sample + static_cast<u64>(position) * stride);
    }

    // Calls `use(i, place)` for each of BATCH rows from position `first`; after the last row, for that row again. No
    // load depends on whether its result is wanted, so that all loads of a batch are in flight at once.
    template <u32 BATCH, class Use>
    __device__ __forceinline__ void each(u32 first, const Use& use) const {
        if (first + BATCH <= positions) {
            const activation* const start = sample + static_cast<u64>(first) * stride;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                use(i, reinterpret_cast<const Row<LANES>*>(start + static_cast<u64>(i) * stride));
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) use(i, at(min(first + i, positions - 1)));
        }
    }
    template <u32 BATCH>
    __device__ __forceinline__ void load(Row<LANES> (&rows)[BATCH], u32 first) const {
        each<BATCH>(first, [&](u32 i, const Row<LANES>* place) { rows[i] = *place; });
    }

    // The BEFORE rows before position `first`; those before the sample are zero.
    template <u32 BEFORE>
    __device__ __forceinline__ void load_before(Pack<LANES>* inputs, u32 first) const {
        Row<LANES> rows[BEFORE];
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) rows[i] = *at(first + i >= BEFORE ? first + i - BEFORE : 0);
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) inputs[i] = or_zero(first + i >= BEFORE, widened(rows[i]));
    }
};
