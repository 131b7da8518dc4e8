// The gradients of causal depthwise convolution and SiLU. With a[row] the convolution before SiLU, formed again from x:
//
//   g[row]       = dout[row] silu'(a[row])
//   dx[row]      = sum over j of weight[e, j] g[row + (k - 1) - j], inside the sample
//   dweight[e, j] = sum over the grain's rows of g[row] x[row - (k - 1) + j];   dbias[e] = sum of g[row]
//
// Floor: dout and x read, dx written once, 6 bytes an element of bf16: 0.070 ms at (2, 4096, 5376) and
// 3.75 TB/s. Arithmetic is about 27 instructions an element: 0.045 ms.
//
// A thread walks a run of positions of two channels, and k - 1 more, whose g it needs for the last dx. Sums
// over positions are those of a run, then of the runs of a block in order, then (a second kernel) of the
// blocks of a grain in order.
#include "dialect.h"
#include "pack.h"
#include "causal_conv1d.h"

struct CausalConv1dSiluBackward {
    activation* dx;          // [b t, e], rows dx_stride apart
    float* partials;         // [tiles of all samples, TAPS + 1, e]: of the taps, then of the bias
    const activation* dout;  // [b t, e], rows dout_stride apart
    const activation* x;     // [b t, e], rows x_stride apart
    const float* weight;     // [e, k]
    const float* bias;       // [e], or null
    u32 dx_stride;
    u32 dout_stride;
    u32 x_stride;
    u32 positions;  // t
    u32 channels;   // e
    u32 width;      // k
};

// Sums over positions: of the taps' gradients, and of the bias's.
template <u32 TAPS, u32 LANES>
struct TapSums {
    Pack<LANES> at[TAPS + 1];
};

template <u32 TAPS, u32 LANES, u32 BATCH>
DEVICE TapSums<TAPS, LANES> walk(const CausalConv1dSiluBackward& arguments, const Run& run) {
    constexpr u32 BEFORE = TAPS - 1;
    TapSums<TAPS, LANES> sums;
#pragma unroll
    for (u32 tap = 0; tap <= TAPS; tap++) sums.at[tap] = filled<LANES>(0.0f);
    if (run.first >= run.last) return sums;
    const Filter<TAPS, LANES> filter(arguments.weight, arguments.bias, run.channel, arguments.width);
    const activation* const x = arguments.x + run.sample_row * arguments.x_stride + run.channel;
    const activation* const dout =
        arguments.dout + run.sample_row * arguments.dout_stride + run.channel;
    activation* const dx = arguments.dx + run.sample_row * arguments.dx_stride + run.channel;

    // A batch of positions after the BEFORE before it. What lies before the run belongs to another thread, and
    // is multiplied with nothing here.
    Pack<LANES> inputs[BEFORE + BATCH];
    Pack<LANES> gradients[BEFORE + BATCH];
    load_before<TAPS>(inputs, x, arguments.x_stride, run.first);
#pragma unroll
    for (u32 i = 0; i < BEFORE; i++) gradients[i] = filled<LANES>(0.0f);
    for (u32 first = run.first; first < run.last + BEFORE; first += BATCH) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 position = min(first + i, arguments.positions - 1);
            inputs[BEFORE + i] = load_row<LANES>(x, position, arguments.x_stride);
            gradients[BEFORE + i] = load_row<LANES>(dout, position, arguments.dout_stride);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 position = first + i;
            const bool inside = position < arguments.positions;
            const bool own = position < run.last;
            const bool ends = position >= run.first + BEFORE && position - BEFORE < run.last;
            Pack<LANES> dx_ended;
#pragma unroll
            for (u32 lane = 0; lane < LANES; lane++) {
                const float convolved = filter.convolve(inputs + i, lane);
                const float dout_here = gradients[BEFORE + i].at[lane];
                const float g = inside ? dout_here * silu_derivative(convolved) : 0.0f;
                gradients[BEFORE + i].at[lane] = g;
                if (own) {
#pragma unroll
                    for (u32 tap = 0; tap < TAPS; tap++) {
                        float& sum = sums.at[tap].at[lane];
                        sum = fmaf(g, inputs[i + tap].at[lane], sum);
                    }
                    sums.at[TAPS].at[lane] += g;
                }
                // All that position - BEFORE takes part in is known now.
                float sum = 0.0f;
#pragma unroll
                for (u32 tap = 0; tap < TAPS; tap++) {
                    sum = fmaf(filter.weight[tap].at[lane], gradients[i + BEFORE - tap].at[lane], sum);
                }
                dx_ended.at[lane] = sum;
            }
            if (ends) {
                const u64 row = static_cast<u64>(position - BEFORE) * arguments.dx_stride;
                store_pack<LANES>(dx + row, dx_ended);
            }
        }
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) {
            inputs[i] = inputs[BATCH + i];
            gradients[i] = gradients[BATCH + i];
        }
    }
    return sums;
}

template <u32 TAPS, u32 LANES, u32 BATCH>
DEVICE void backward(const CausalConv1dSiluBackward& arguments) {
    constexpr u32 CHANNELS = CONV_CHANNEL_THREADS * LANES;
    __shared__ float of_runs[CONV_RUNS][TAPS + 1][CHANNELS];
    const Run run = run_of_thread<LANES>(arguments.positions, arguments.channels);
    const TapSums<TAPS, LANES> sums = walk<TAPS, LANES, BATCH>(arguments, run);
#pragma unroll
    for (u32 tap = 0; tap <= TAPS; tap++) {
#pragma unroll
        for (u32 lane = 0; lane < LANES; lane++) {
            of_runs[threadIdx.x / CONV_CHANNEL_THREADS][tap][run.channel - run.block_channel + lane] =
                sums.at[tap].at[lane];
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < (TAPS + 1) * CHANNELS; i += CONV_THREADS) {
        const u32 tap = i / CHANNELS;
        const u32 channel = run.block_channel + i % CHANNELS;
        if (channel >= arguments.channels) continue;
        float sum = of_runs[0][tap][i % CHANNELS];
#pragma unroll
        for (u32 other = 1; other < CONV_RUNS; other++) sum += of_runs[other][tap][i % CHANNELS];
        const u64 row = static_cast<u64>(run.tile) * (TAPS + 1) + tap;
        arguments.partials[row * arguments.channels + channel] = sum;
    }
}

// Two channels a thread, whose rows are aligned to them. A run and its end are whole batches of 5.
KERNEL(causal_conv1d_silu_backward_wide, CONV_THREADS, 3, CausalConv1dSiluBackward) {
    backward<4, 2, 5>(arguments);
}
KERNEL(causal_conv1d_silu_backward_single, CONV_THREADS, 2, CausalConv1dSiluBackward) {
    backward<4, 1, 5>(arguments);
}
// Up to 16 taps.
KERNEL(causal_conv1d_silu_backward_long, CONV_THREADS, 1, CausalConv1dSiluBackward) {
    backward<16, 1, 8>(arguments);
}

struct CausalConv1dSumPartials {
    float* dweight;         // [grains, e, k]
    float* dbias;           // [grains, e], or null
    const float* partials;  // [tiles of all samples, taps + 1, e]
    u32 channels;           // e
    u32 width;              // k
    u32 taps;               // of the partials, the first taps - k of them padding
    u32 tiles;              // of all samples
    u32 tiles_per_grain;
    u32 grains;
};

// A thread for each tap, or the bias, of each channel of each grain: its tiles in order, from +0.0.
KERNEL(causal_conv1d_sum_partials, 256, 1, CausalConv1dSumPartials) {
    const u32 width = arguments.width;
    const u64 element = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
    const u32 channel = static_cast<u32>(element % arguments.channels);
    const u32 tap = static_cast<u32>(element / arguments.channels % (width + 1));
    const u64 grain = element / arguments.channels / (width + 1);
    if (grain >= arguments.grains) return;
    const u32 first = static_cast<u32>(grain) * arguments.tiles_per_grain;
    const u32 last = min(first + arguments.tiles_per_grain, arguments.tiles);
    const u64 tile_stride = static_cast<u64>(arguments.taps + 1) * arguments.channels;
    const float* const partials = arguments.partials +
                                  static_cast<u64>(tap + arguments.taps - width) * arguments.channels +
                                  channel;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 tile = first; tile < last; tile++) sum += partials[tile * tile_stride];
    if (tap < width) {
        arguments.dweight[(grain * arguments.channels + channel) * width + tap] = sum;
    } else if (arguments.dbias) {
        arguments.dbias[grain * arguments.channels + channel] = sum;
    }
}
