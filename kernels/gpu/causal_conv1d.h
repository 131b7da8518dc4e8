// What the forward and the backward convolution share: the runs of positions that threads walk, and
// filters in registers.
#pragma once

// A block is 32 threads of neighbouring channels for each of 8 neighbouring runs of 32 positions.
constexpr u32 CONV_CHANNEL_THREADS = 32;
constexpr u32 CONV_RUNS = 8;
constexpr u32 CONV_THREADS = CONV_CHANNEL_THREADS * CONV_RUNS;
constexpr u32 CONV_RUN_POSITIONS = 32;
// Positions of a block: cut from a sample's first, so that its sums are the sample's own.
constexpr u32 CONV_TILE_POSITIONS = CONV_RUNS * CONV_RUN_POSITIONS;

// What one thread does of its block.
struct Run {
    u64 sample_row;  // The sample's first row.
    u32 channel;     // The thread's first channel.
    u32 first;       // Its positions inside the sample; none where it has no channel.
    u32 last;
    u32 tile;  // The block's tile of positions, counted over all samples.
    u32 block_channel;
};

// Blocks are numbered by sample, by tile of positions, by tile of channels.
template <u32 LANES>
DEVICE Run run_of_thread(u32 positions, u32 channels) {
    constexpr u32 CHANNELS = CONV_CHANNEL_THREADS * LANES;
    const u32 channel_tiles = (channels + CHANNELS - 1) / CHANNELS;
    const u32 position_tiles = (positions + CONV_TILE_POSITIONS - 1) / CONV_TILE_POSITIONS;
    Run run;
    run.tile = blockIdx.x / channel_tiles;
    run.block_channel = blockIdx.x % channel_tiles * CHANNELS;
    run.channel = run.block_channel + threadIdx.x % CONV_CHANNEL_THREADS * LANES;
    const u32 sample = run.tile / position_tiles;
    run.sample_row = static_cast<u64>(sample) * positions;
    const u32 first = run.tile % position_tiles * CONV_TILE_POSITIONS +
                      threadIdx.x / CONV_CHANNEL_THREADS * CONV_RUN_POSITIONS;
    run.first = min(first, positions);
    run.last = run.channel < channels ? min(first + CONV_RUN_POSITIONS, positions) : run.first;
    return run;
}

// The taps of LANES channels, oldest first; those that a shorter filter lacks are zero.
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
                weight[tap].at[lane] = present ? taps[tap + width - TAPS] : 0.0f;
            }
            bias.at[lane] = bias_at ? bias_at[channel + lane] : 0.0f;
        }
    }

    // The convolution of TAPS inputs, oldest first.
    __device__ __forceinline__ float convolve(const Pack<LANES>* inputs, u32 lane) const {
        float sum = bias.at[lane];
#pragma unroll
        for (u32 tap = 0; tap < TAPS; tap++) {
            sum = fmaf(weight[tap].at[lane], inputs[tap].at[lane], sum);
        }
        return sum;
    }
};

// Row `position` of a sample. No load depends on whether its result is wanted: callers give a position that is
// there, so that all loads of a batch are in flight at once.
template <u32 LANES>
DEVICE Pack<LANES> load_row(const activation* sample, u32 position, u32 stride) {
    return load_pack<LANES>(sample + static_cast<u64>(position) * stride);
}

// The TAPS - 1 rows before position `first`; those before the sample are zero.
template <u32 TAPS, u32 LANES>
DEVICE void load_before(Pack<LANES>* inputs, const activation* x, u32 stride, u32 first) {
#pragma unroll
    for (u32 i = 0; i < TAPS - 1; i++) {
        const bool inside = first + i >= TAPS - 1;
        const u32 position = inside ? first + i - (TAPS - 1) : 0;
        inputs[i] = or_zero(inside, load_row<LANES>(x, position, stride));
    }
}
