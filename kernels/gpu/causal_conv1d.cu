// Causal depthwise convolution and SiLU, forward, and pieces of sequences for generation:
//
//   out[b t, e] = silu(bias[e] + sum over j of weight[e, j] x[row - (k - 1) + j])
//
// Floor: x read and out written once, 4 bytes an element of bf16: 0.047 ms at (2, 4096, 5376) and
// 3.75 TB/s. Exponential and reciprocal cost half of that (16 a clock and multiprocessor).
//
// A thread walks a run of positions of a few channels. It loads the next batch of rows while it works on one, and
// keeps the k - 1 inputs before it in registers, so x is read 1 + (k - 1) / 32 times, the excess from the cache. A
// filter is padded with taps of zero at its old end to 4 or 16 taps.
#include "dialect.h"
#include "documents.h"
#include "pack.h"
#include "causal_conv1d.h"

struct CausalConv1dSiluForward {
    activation* out;      // [b t, e], rows out_stride apart
    const activation* x;  // [b t, e], rows x_stride apart
    const float* weight;  // [e, k]
    const float* bias;    // [e], or null
    u32 out_stride;
    u32 x_stride;
    u32 positions;  // t
    u32 channels;   // e
    u32 width;      // k
    u32 samples;    // b
    const u32* start_bits;  // of documents.h, or null
};

constexpr u32 RUN_POSITIONS = 32;

// What a thread holds while it walks its run in batches of BATCH positions.
template <u32 TAPS, u32 LANES, u32 BATCH>
struct Walk {
    static constexpr u32 BEFORE = TAPS - 1;

    activation* out;  // The thread's first channel of the sample's first row.
    u32 out_stride;
    u32 last;
    Filter<TAPS, LANES> filter;
    // The inputs of a batch, after the BEFORE inputs that precede it.
    Pack<LANES> inputs[BEFORE + BATCH];
#if DOCUMENTS
    u32 start_bits;  // The bits of the run.
#endif

    // WHOLE: the run has all positions of the batch. A conditional store is a branch, which the other threads wait for.
    template <bool WHOLE>
    __device__ __forceinline__ void convolve(u32 first) {
        activation* const start = out + static_cast<u64>(first) * out_stride;
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#if DOCUMENTS
            if (start_bits >> ((first + i) % RUN_POSITIONS) & 1) forget<BEFORE>(inputs + i);
#endif
            Pack<LANES> activated;
#pragma unroll
            for (u32 lane = 0; lane < LANES; lane++) {
                activated.at[lane] = silu_of_scaled(filter.convolve(inputs + i, lane));
            }
            if (WHOLE || first + i < last) {
                store_pack<LANES>(start + static_cast<u64>(i) * out_stride, activated);
            }
        }
    }

    __device__ __forceinline__ void batch(const Row<LANES> (&rows)[BATCH], u32 first) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) inputs[BEFORE + i] = widened(rows[i]);
        if (first + BATCH <= last) {
            convolve<true>(first);
        } else {
            convolve<false>(first);
        }
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) inputs[i] = inputs[BATCH + i];
    }
};

template <u32 TAPS, u32 LANES>
DEVICE void forward(const CausalConv1dSiluForward& arguments) {
    constexpr u32 BATCH = 8;
    const Run run = run_of_thread<LANES, RUN_POSITIONS>(arguments.positions, arguments.channels);
    if (run.first >= run.last) return;
    const Rows<LANES> x = {arguments.x + run.sample_row * arguments.x_stride + run.channel,
                           arguments.x_stride, arguments.positions};
    Row<LANES> even[BATCH], odd[BATCH];
    x.load(even, run.first);
    Walk<TAPS, LANES, BATCH> walk = {
        arguments.out + run.sample_row * arguments.out_stride + run.channel,
        arguments.out_stride,
        run.last,
        Filter<TAPS, LANES>(arguments.weight, arguments.bias, run.channel, arguments.width),
        {},
    };
    x.template load_before<TAPS - 1>(walk.inputs, run.first);
#if DOCUMENTS
    static_assert(RUN_POSITIONS == WORD_POSITIONS, "a run has a word");
    const u32* const start_bits =
        start_bits_of(arguments.start_bits, run.sample_row, arguments.positions);
    walk.start_bits = bits_from(start_bits, run.first, arguments.positions);
    forget_before<TAPS - 1>(walk.inputs, bits_before<TAPS - 1>(start_bits, run.first));
#endif
    // Two batches in one iteration, so that neither has to be moved to the registers of the other.
    for (u32 first = run.first; first < run.last; first += 2 * BATCH) {
        const u32 second = first + BATCH;
        if (second < run.last) x.load(odd, second);
        walk.batch(even, first);
        if (second >= run.last) break;
        if (second + BATCH < run.last) x.load(even, second + BATCH);
        walk.batch(odd, second);
    }
}

#if DOCUMENTS
KERNEL(causal_conv1d_silu_forward_wide_documents, CONV_THREADS, ACTIVATION_BF16 ? 6 : 5,
       CausalConv1dSiluForward) {
    forward<4, 2>(arguments);
}
KERNEL(causal_conv1d_silu_forward_single_documents, CONV_THREADS, 4, CausalConv1dSiluForward) {
    forward<4, 1>(arguments);
}
KERNEL(causal_conv1d_silu_forward_long_documents, CONV_THREADS, 4, CausalConv1dSiluForward) {
    forward<16, 1>(arguments);
}
#else
// Two channels a thread, in rows aligned to pairs. Two batches of fp32 take twice the registers of bf16.
KERNEL(causal_conv1d_silu_forward_wide, CONV_THREADS, ACTIVATION_BF16 ? 8 : 5, CausalConv1dSiluForward) {
    forward<4, 2>(arguments);
}
KERNEL(causal_conv1d_silu_forward_single, CONV_THREADS, 4, CausalConv1dSiluForward) {
    forward<4, 1>(arguments);
}
// Up to 16 taps.
KERNEL(causal_conv1d_silu_forward_long, CONV_THREADS, 4, CausalConv1dSiluForward) {
    forward<16, 1>(arguments);
}

struct CausalConv1dSiluPiece {
    activation* out;      // [b t, e], rows out_stride apart
    activation* state;    // [b, k - 1, e], the inputs before the piece, oldest first; advanced
    const activation* x;  // [b t, e], rows x_stride apart
    const float* weight;  // [e, k]
    const float* bias;    // [e], or null
    const u32* lengths;   // [b]: the new positions of each sample; null where all have t
    u64 out_stride;
    u64 x_stride;
    u32 positions;  // t
    u32 channels;   // e
    u32 width;      // k
    u32 blocks;     // of a section
    u64 elements;   // b e
};

constexpr u32 PIECE_THREADS = 256;
// Positions of a thread: at least as many as a filter reaches back, so that only a sample's first section reads the
// state.
constexpr u32 SECTION = 16;

// A thread for each channel of each sample and section of positions. An element's sum has one order, whatever the piece.
template <u32 TAPS>
DEVICE void advance(const CausalConv1dSiluPiece& arguments) {
    static_assert(SECTION >= TAPS - 1, "later sections see inputs alone");
    const u32 section = blockIdx.x / arguments.blocks;
    const u64 element = static_cast<u64>(blockIdx.x % arguments.blocks) * PIECE_THREADS + threadIdx.x;
    const bool inside = element < arguments.elements;
    const u64 own = inside ? element : 0;
    const u32 sample = static_cast<u32>(own / arguments.channels), channel = static_cast<u32>(own % arguments.channels);
    const u32 held = arguments.width - 1;
    const u64 channels = arguments.channels;
    activation* const state = arguments.state + static_cast<u64>(sample) * held * channels + channel;
    release_next();
    float weight[TAPS];
#pragma unroll
    for (u32 tap = 0; tap < TAPS; tap++) {
        weight[tap] = tap <= held ? arguments.weight[channel * arguments.width + tap] : 0.0f;
    }
    const float bias = arguments.bias ? arguments.bias[channel] : 0.0f;
    fetch_ahead(state);
    await_previous();
    if (!inside) return;
    const u32 there = arguments.lengths ? min(arguments.lengths[sample], arguments.positions) : arguments.positions;
    const u32 first = section * SECTION, end = min(first + SECTION, there);
    if (first >= end) return;
    const u64 first_row = static_cast<u64>(sample) * arguments.positions;
    const activation* const x = arguments.x + first_row * arguments.x_stride + channel;
    activation* const out = arguments.out + first_row * arguments.out_stride + channel;

    float window[TAPS];
#pragma unroll
    for (u32 tap = 0; tap < TAPS; tap++) {
        // The inputs before the section, and room for the newest.
        const u32 at = first + tap;
        window[tap] = 0.0f;
        if (tap < held) window[tap] = widen(at < held ? state[at * channels] : x[(at - held) * arguments.x_stride]);
    }
    for (u32 position = first; position < end; position++) {
        const float newest = widen(x[position * arguments.x_stride]);
        float sum = bias;
#pragma unroll
        for (u32 tap = 0; tap < TAPS; tap++) {
            if (tap > held) continue;
            if (tap == held) window[tap] = newest;
            sum = fmaf(weight[tap], window[tap], sum);
        }
#pragma unroll
        for (u32 tap = 0; tap + 1 < TAPS; tap++) window[tap] = window[tap + 1];
        narrow(out[position * arguments.out_stride], silu(sum));
    }
    if (section > 0) return;
    if (end == there) {
        // The newest inputs are in registers: no store waits for a load. Taps are compared again here, to keep no
        // result since before.
        const u32 count = formed_anew(held);
#pragma unroll
        for (u32 tap = 0; tap < TAPS; tap++) {
            if (tap < count) narrow(state[tap * channels], window[tap]);
        }
        return;
    }
    // Inputs that stay in the state move to older places.
    for (u32 tap = 0; tap < held; tap++) {
        const u32 at = there + tap;
        state[tap * channels] = at < held ? state[at * channels] : x[(at - held) * arguments.x_stride];
    }
}

constexpr u32 STEP_SAMPLES = 2;

// A piece of one position by filters of four taps: a thread has four neighbouring channels of two samples, whose
// weights it loads once. Floor: 12 bytes of bf16 a channel and sample for the state, 4 for input and output.
KERNEL(causal_conv1d_silu_step, PIECE_THREADS, 1, CausalConv1dSiluPiece) {
    constexpr u32 TAPS = 4, HELD_TAPS = TAPS - 1, OWN = 4;
    const u64 channels = arguments.channels;
    const u32 fours = arguments.channels / OWN;
    const u32 item = blockIdx.x * PIECE_THREADS + threadIdx.x;
    const u32 channel = item % fours * OWN;
    const u64 first = static_cast<u64>(item / fours) * STEP_SAMPLES;
    const u64 samples = arguments.elements / channels;
    activation* const state = arguments.state + channel;
    release_next();
#pragma unroll
    for (u32 i = 0; i < STEP_SAMPLES; i++) {
#pragma unroll
        for (u32 tap = 0; tap < HELD_TAPS; tap++) {
            if (first + i < samples) fetch_ahead(state + ((first + i) * HELD_TAPS + tap) * channels);
        }
    }
    float weight[OWN][TAPS], bias[OWN] = {};
#pragma unroll
    for (u32 own = 0; own < OWN; own++) unpack(weight[own], load4(arguments.weight + (channel + own) * TAPS));
    if (arguments.bias) unpack(bias, load4(arguments.bias + channel));
    await_previous();
    float window[STEP_SAMPLES][TAPS][OWN];
#pragma unroll
    for (u32 i = 0; i < STEP_SAMPLES; i++) {
        // Past the last sample the first is loaded again and not stored: no load waits for a condition.
        const u64 sample = first + i < samples ? first + i : 0;
#pragma unroll
        for (u32 tap = 0; tap < HELD_TAPS; tap++) {
            unpack(window[i][tap], load4_streaming(state + (sample * HELD_TAPS + tap) * channels));
        }
        unpack(window[i][HELD_TAPS], load4(arguments.x + sample * arguments.x_stride + channel));
    }
#pragma unroll
    for (u32 i = 0; i < STEP_SAMPLES; i++) {
        const u64 sample = first + i;
        if (sample >= samples) return;
        float out[OWN];
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            float sum = bias[own];
#pragma unroll
            for (u32 tap = 0; tap < TAPS; tap++) sum = fmaf(weight[own][tap], window[i][tap][own], sum);
            out[own] = silu(sum);
        }
#pragma unroll
        for (u32 tap = 0; tap < HELD_TAPS; tap++) {
            store4_streaming(state + (sample * HELD_TAPS + tap) * channels, packed(window[i][tap + 1]));
        }
        store4(arguments.out + sample * arguments.out_stride + channel, packed(out));
    }
}

KERNEL(causal_conv1d_silu_piece, PIECE_THREADS, 1, CausalConv1dSiluPiece) { advance<4>(arguments); }
// Up to 16 taps.
KERNEL(causal_conv1d_silu_piece_long, PIECE_THREADS, 1, CausalConv1dSiluPiece) { advance<16>(arguments); }
#endif
