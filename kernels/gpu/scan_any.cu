// The selective scan of any number of channels and up to 256 states, forward and backward, and in single steps for
// generation. scan_forward.cu, scan_backward.cu and scan_piece.cu have the common case; this file is for all others,
// and prefers simplicity to speed.
//
// A channel has 4 to 32 neighbouring lanes of a warp, as many as its states need (`lanes`, a power of two), and lane i
// holds states i, i + lanes and so on; while it walks one of them, the values of the others wait in shared memory.
// Positions go in chunks of CHECKPOINT. Every thread of a block reaches every barrier and shuffle; past the last
// channel, state or position, steps and rates are zero.
//
// Floor, per state and position: one exponential and 5 operations forward, one and about 20 operations backward; B and
// C are read from the cache for each channel, which is the tightest limit.
#include "scan.h"

namespace {

constexpr u32 MAX_STATES_PER_LANE = 8;
constexpr u32 WARPS = SCAN_THREADS / WARP;

// A thread's place. `slot`: the channel within the block's `slots`.
struct Place {
    u32 lanes, lane, slots, slot, states_per_lane;
};
DEVICE Place place_of(u32 lanes, u32 states) {
    Place place;
    place.lanes = lanes;
    place.lane = threadIdx.x % lanes;
    place.slots = SCAN_THREADS / lanes;
    place.slot = threadIdx.x / lanes;
    place.states_per_lane = (states + lanes - 1) / lanes;
    return place;
}

// Sums over the lanes of a channel, in each of them.
template <u32 COUNT>
DEVICE void sum_lanes(float (&values)[COUNT], u32 lanes) {
    for (u32 mask = 1; mask < lanes; mask *= 2) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) values[i] += shuffle_xor(values[i], mask);
    }
}

// B or C of a chunk's positions; past the end, those of the last position.
DEVICE void load_coefficients(float (&out)[CHECKPOINT], const ScanRows& bc, u32 first_row, u32 count,
                              u32 column, bool held) {
#pragma unroll
    for (u32 i = 0; i < CHECKPOINT; i++) {
        out[i] = held ? widen(*place(bc, first_row + min(i, count - 1), column)) : 0.0f;
    }
}

struct ForwardShared {
    float2 steps[CHECKPOINT * BLOCK_CHANNELS];  // [positions, slots] (delta, delta x)
    float y[CHECKPOINT * BLOCK_CHANNELS];       // [positions, slots] C . h
    float h[MAX_STATES_PER_LANE * SCAN_THREADS];
    float rate[MAX_STATES_PER_LANE * SCAN_THREADS];
};
static_assert(sizeof(ForwardShared) == 14336, "shared bytes of forward");

struct BackwardShared {
    float2 steps[CHECKPOINT * BLOCK_CHANNELS];
    float dy[CHECKPOINT * BLOCK_CHANNELS];
    float slope[CHECKPOINT * BLOCK_CHANNELS];
    float2 sums[CHECKPOINT * BLOCK_CHANNELS];   // (q . A, g . B)
    float dbc[WARPS][CHECKPOINT * 2 * 32];      // [positions, B and C, lanes]
    float rate[MAX_STATES_PER_LANE * SCAN_THREADS];
    float future[MAX_STATES_PER_LANE * SCAN_THREADS];
    float da[MAX_STATES_PER_LANE * SCAN_THREADS];
};
static_assert(sizeof(BackwardShared) == (WARP == 32 ? 40960 : 32768), "shared bytes of backward");

// Elements of the saved states before a chunk of a sample.
DEVICE u64 checkpoint_at(u32 sample, u32 chunk, u32 positions, u64 state_elements) {
    const u64 chunks = (positions + CHECKPOINT - 1) / CHECKPOINT;
    return (sample * chunks + chunk) * state_elements;
}

DEVICE u32 positions_of(const ScanForwardArguments& arguments, u32) { return arguments.positions; }

// Advances channels of a sample from their present states. In training these are zero; the states before each chunk are
// saved, and y before the gate. In generation they are the saved states, and the states at the end of the sample's
// positions are stored.
template <class Arguments>
DEVICE void forward(const Arguments& arguments) {
    constexpr bool GOES_ON = Arguments::GOES_ON;
    SHARED(ForwardShared, memory);
    ForwardShared& shared = *memory;
    const u32 thread = threadIdx.x, positions = arguments.positions, states = arguments.states;
    const u32 channels = arguments.channels;
    const Place my = place_of(arguments.lanes, states);
    const u32 blocks = (channels + my.slots - 1) / my.slots;
    const u32 sample = blockIdx.x / blocks, first_channel = blockIdx.x % blocks * my.slots;
    const u32 channel = first_channel + my.slot;
    const u64 state_elements = static_cast<u64>(channels) * states;
    const u32* documents = nullptr;
    if constexpr (DOCUMENTS && !GOES_ON) documents = start_bits_of(arguments.start_bits, sample * positions, positions);
    const u32 end = positions_of(arguments, sample);
    for (u32 r = 0; r < my.states_per_lane; r++) {
        const u32 state = r * my.lanes + my.lane;
        const bool held = channel < channels && state < states;
        const u64 at = static_cast<u64>(channel) * states + state;
        shared.rate[r * SCAN_THREADS + thread] = held ? rate_of(arguments.a_log[at]) : 0.0f;
        shared.h[r * SCAN_THREADS + thread] = 0.0f;
        if constexpr (GOES_ON) {
            if (held) shared.h[r * SCAN_THREADS + thread] = arguments.state[sample * state_elements + at];
        }
    }
    for (u32 first = 0; first < end; first += CHECKPOINT) {
        // In generation, AMD's compiler would otherwise keep the conditions on `count` for all positions at once, in
        // scalar registers, which it lacks.
        const u32 here = min(CHECKPOINT, end - first), count = GOES_ON && ON_AMD ? formed_anew(here) : here;
        const u32 first_row = sample * positions + first;
        const u32 start_bits = DOCUMENTS && !GOES_ON ? bits_from(documents, first, positions) : 0;
        for (u32 i = thread; i < CHECKPOINT * my.slots; i += SCAN_THREADS) {
            const u32 position = i / my.slots, its = first_channel + i % my.slots;
            float2 step = make_float2(0.0f, 0.0f);
            if (position < count && its < channels) {
                const u32 row = first_row + position;
                step.x = softplus(widen(*place(arguments.delta_raw, row, its)) +
                                  arguments.delta_bias[its]);
                step.y = step.x * widen(*place(arguments.x, row, its));
            }
            shared.steps[i] = step;
        }
        __syncthreads();
        float y[CHECKPOINT];
#pragma unroll
        for (u32 i = 0; i < CHECKPOINT; i++) y[i] = 0.0f;
        for (u32 r = 0; r < my.states_per_lane; r++) {
            const u32 state = r * my.lanes + my.lane;
            const bool held = channel < channels && state < states;
            const float rate = shared.rate[r * SCAN_THREADS + thread];
            float h = shared.h[r * SCAN_THREADS + thread];
            if constexpr (!GOES_ON) {
                if (held) {
                    const u64 at = checkpoint_at(sample, first / CHECKPOINT, positions, state_elements);
                    arguments.checkpoints[at + static_cast<u64>(channel) * states + state] = h;
                }
            }
            float b[CHECKPOINT], c[CHECKPOINT];
            load_coefficients(b, arguments.bc, first_row, count, state, held);
            load_coefficients(c, arguments.bc, first_row, count, states + state, held);
#pragma unroll
            for (u32 i = 0; i < CHECKPOINT; i++) {
                const float2 step = shared.steps[i * my.slots + my.slot];
                const float before = begins(start_bits, i) ? 0.0f : h;
                const float moved = fmaf(exp2_fast(step.x * rate), before, step.y * b[i]);
                // Past the end not even the sign of a zero changes.
                h = !GOES_ON || i < (ON_AMD ? formed_anew(count) : count) ? moved : h;
                y[i] = fmaf(c[i], h, y[i]);
            }
            shared.h[r * SCAN_THREADS + thread] = h;
        }
        sum_lanes(y, my.lanes);
        if (my.lane == 0) {
#pragma unroll
            for (u32 i = 0; i < CHECKPOINT; i++) shared.y[i * my.slots + my.slot] = y[i];
        }
        __syncthreads();
        for (u32 i = thread; i < count * my.slots; i += SCAN_THREADS) {
            const u32 row = first_row + i / my.slots, its = first_channel + i % my.slots;
            if (its >= channels) continue;
            const float x = widen(*place(arguments.x, row, its));
            const float z = widen(*place(arguments.z, row, its));
            const activation saved = rounded(fmaf(arguments.d[its], x, shared.y[i]));
            if constexpr (!GOES_ON) arguments.y[static_cast<u64>(row) * channels + its] = saved;
            *place(arguments.out, row, its) = rounded(gated(widen(saved), z, sigmoid(z)));
        }
    }
    if constexpr (GOES_ON) {
        for (u32 r = 0; r < my.states_per_lane; r++) {
            const u32 state = r * my.lanes + my.lane;
            if (channel >= channels || state >= states) continue;
            const u64 at = sample * state_elements + static_cast<u64>(channel) * states + state;
            arguments.state[at] = shared.h[r * SCAN_THREADS + thread];
        }
    }
}

// The backward scan of as many channels as the block has slots, from `first_channel`. Sums over channels are added to
// those of the block's `earlier` channels.
DEVICE void backward_slots(BackwardShared& shared, const ScanBackwardArguments& arguments,
                           const Place& my, u32 sample, u32 first_channel, float* dbc, bool earlier) {
    const u32 thread = threadIdx.x, positions = arguments.positions, states = arguments.states;
    const u32 channels = arguments.channels, channel = first_channel + my.slot;
    const u64 state_elements = static_cast<u64>(channels) * states;
    const u32* const documents =
        DOCUMENTS ? start_bits_of(arguments.start_bits, sample * positions, positions) : nullptr;
    for (u32 r = 0; r < my.states_per_lane; r++) {
        const u32 state = r * my.lanes + my.lane, at = r * SCAN_THREADS + thread;
        const bool held = channel < channels && state < states;
        const u64 from = static_cast<u64>(channel) * states + state;
        shared.rate[at] = held ? rate_of(arguments.a_log[from]) : 0.0f;
        shared.future[at] = shared.da[at] = 0.0f;
    }
    float dd = 0.0f, ddelta_bias = 0.0f;
    for (u32 chunk = (positions + CHECKPOINT - 1) / CHECKPOINT; chunk-- > 0;) {
        const u32 first = chunk * CHECKPOINT, count = min(CHECKPOINT, positions - first);
        const u32 first_row = sample * positions + first;
        const u32 start_bits = DOCUMENTS ? bits_from(documents, first, positions) : 0;
        for (u32 i = thread; i < CHECKPOINT * my.slots; i += SCAN_THREADS) {
            const u32 position = i / my.slots, its = first_channel + i % my.slots;
            float2 step = make_float2(0.0f, 0.0f);
            float dy = 0.0f, slope = 0.0f;
            if (position < count && its < channels) {
                const u32 row = first_row + position;
                const float raw = widen(*place(arguments.delta_raw, row, its));
                step.x = softplus(raw + arguments.delta_bias[its], slope);
                step.y = step.x * widen(*place(arguments.x, row, its));
                dy = widen(*place(arguments.dout, row, its)) *
                     silu(widen(*place(arguments.z, row, its)));
            }
            shared.steps[i] = step;
            shared.dy[i] = dy;
            shared.slope[i] = slope;
        }
        __syncthreads();
        float qa[CHECKPOINT], gb[CHECKPOINT];
#pragma unroll
        for (u32 i = 0; i < CHECKPOINT; i++) qa[i] = gb[i] = 0.0f;
        for (u32 r = 0; r < my.states_per_lane; r++) {
            const u32 state = r * my.lanes + my.lane, at = r * SCAN_THREADS + thread;
            const bool held = channel < channels && state < states;
            const float rate = shared.rate[at];
            float b[CHECKPOINT], c[CHECKPOINT], decay[CHECKPOINT], h[CHECKPOINT + 1];
            load_coefficients(b, arguments.bc, first_row, count, state, held);
            load_coefficients(c, arguments.bc, first_row, count, states + state, held);
            const u64 saved = checkpoint_at(sample, chunk, positions, state_elements) +
                              static_cast<u64>(channel) * states + state;
            h[0] = held ? arguments.checkpoints[saved] : 0.0f;
#pragma unroll
            for (u32 i = 0; i < CHECKPOINT; i++) {
                const float2 step = shared.steps[i * my.slots + my.slot];
                decay[i] = exp2_fast(step.x * rate);
                h[i + 1] = fmaf(decay[i], begins(start_bits, i) ? 0.0f : h[i], step.y * b[i]);
            }
            float future = shared.future[at], da = shared.da[at];
#pragma unroll
            for (u32 i = CHECKPOINT; i-- > 0;) {
                const float2 step = shared.steps[i * my.slots + my.slot];
                const float dy = shared.dy[i * my.slots + my.slot];
                const float g = fmaf(dy, c[i], future);
                gb[i] = fmaf(g, b[i], gb[i]);
                future = decay[i] * g;
                const float q = future * (begins(start_bits, i) ? 0.0f : h[i]);
                if (begins(start_bits, i)) future = 0.0f;
                qa[i] = fmaf(rate, q, qa[i]);
                da = fmaf(step.x, q, da);
                // From here on b and c hold the channel's dB and dC.
                b[i] = step.y * g;
                c[i] = dy * h[i + 1];
            }
            shared.future[at] = future;
            shared.da[at] = da;
            for (u32 mask = my.lanes; mask < WARP; mask *= 2) {
#pragma unroll
                for (u32 i = 0; i < CHECKPOINT; i++) {
                    b[i] += shuffle_xor(b[i], mask);
                    c[i] += shuffle_xor(c[i], mask);
                }
            }
            if (thread % WARP < my.lanes) {
                float* parts = shared.dbc[thread / WARP] + my.lane;
#pragma unroll
                for (u32 i = 0; i < CHECKPOINT; i++) {
                    parts[2 * i * my.lanes] = b[i];
                    parts[(2 * i + 1) * my.lanes] = c[i];
                }
            }
            __syncthreads();
            for (u32 i = thread; i < count * 2 * my.lanes; i += SCAN_THREADS) {
                const u32 its = r * my.lanes + i % my.lanes;
                if (its >= states) continue;
                float sum = shared.dbc[0][i];
                for (u32 warp = 1; warp < WARPS; warp++) sum += shared.dbc[warp][i];
                const u32 position = first + i / my.lanes / 2, is_c = i / my.lanes % 2;
                float* out = dbc + (static_cast<u64>(position) * 2 + is_c) * states + its;
                *out = earlier ? *out + sum : sum;
            }
            __syncthreads();
        }
        sum_lanes(qa, my.lanes);
        sum_lanes(gb, my.lanes);
        if (my.lane == 0) {
#pragma unroll
            for (u32 i = 0; i < CHECKPOINT; i++) {
                shared.sums[i * my.slots + my.slot] = make_float2(qa[i], gb[i]);
            }
        }
        __syncthreads();
        // The number of slots divides that of threads, so all elements of a thread belong to one channel.
        for (u32 i = thread; i < count * my.slots; i += SCAN_THREADS) {
            const u32 row = first_row + i / my.slots, its = first_channel + i % my.slots;
            if (its >= channels) continue;
            const float x = widen(*place(arguments.x, row, its));
            const float z = widen(*place(arguments.z, row, its)), s = sigmoid(z);
            const float dout = widen(*place(arguments.dout, row, its));
            const float y = widen(arguments.y[static_cast<u64>(row) * channels + its]);
            const float2 sums = shared.sums[i];
            const float dy = shared.dy[i];
            const float ddelta_raw = fmaf(x, sums.y, LN_2 * sums.x) * shared.slope[i];
            *place(arguments.dx, row, its) =
                rounded(fmaf(shared.steps[i].x, sums.y, arguments.d[its] * dy));
            *place(arguments.ddelta_raw, row, its) = rounded(ddelta_raw);
            *place(arguments.dz, row, its) =
                rounded(dout * y * s * fmaf(z, 1.0f - s, 1.0f));
            if (arguments.regated.first) {
                *place(arguments.regated, row, its) = rounded(gated(y, z, s));
            }
            dd = fmaf(dy, x, dd);
            ddelta_bias += ddelta_raw;
        }
        __syncthreads();
    }

    float* parameters = arguments.parameters + sample * (state_elements + 2 * static_cast<u64>(channels));
    for (u32 r = 0; r < my.states_per_lane; r++) {
        const u32 state = r * my.lanes + my.lane, at = r * SCAN_THREADS + thread;
        if (channel >= channels || state >= states) continue;
        parameters[static_cast<u64>(channel) * states + state] =
            shared.da[at] * (shared.rate[at] * LN_2);
    }
    shared.sums[thread] = make_float2(dd, ddelta_bias);
    __syncthreads();
    if (thread < my.slots && first_channel + thread < channels) {
        float2 sum = shared.sums[thread];
        for (u32 i = my.slots + thread; i < SCAN_THREADS; i += my.slots) {
            sum.x += shared.sums[i].x;
            sum.y += shared.sums[i].y;
        }
        parameters[state_elements + first_channel + thread] = sum.x;
        parameters[state_elements + channels + first_channel + thread] = sum.y;
    }
    __syncthreads();
}

// A block has 32 channels, one group of slots after the other, for any number of states, so that partial sums of dB and
// dC are over 32 channels.
DEVICE void backward(const ScanBackwardArguments& arguments) {
    SHARED(BackwardShared, memory);
    const Place my = place_of(arguments.lanes, arguments.states);
    const u32 blocks = (arguments.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
    const u32 sample = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK_CHANNELS;
    const u32 end = min(first + BLOCK_CHANNELS, arguments.channels);
    float* dbc = arguments.dbc +
                 static_cast<u64>(blockIdx.x) * arguments.positions * 2 * arguments.states;
    for (u32 channel = first; channel < end; channel += my.slots) {
        backward_slots(*memory, arguments, my, sample, channel, dbc, channel > first);
    }
}

}  // namespace

#if DOCUMENTS
KERNEL(scan_forward_any_documents, 128, 1, ScanForwardArguments) { forward(arguments); }
KERNEL(scan_backward_any_documents, 128, 1, ScanBackwardArguments) { backward(arguments); }
SHARED_BYTES(scan_forward_any_documents, sizeof(ForwardShared));
SHARED_BYTES(scan_backward_any_documents, sizeof(BackwardShared));
#else
KERNEL(scan_forward_any, 128, 1, ScanForwardArguments) { forward(arguments); }
KERNEL(scan_backward_any, 128, 1, ScanBackwardArguments) { backward(arguments); }
SHARED_BYTES(scan_forward_any, sizeof(ForwardShared));
SHARED_BYTES(scan_backward_any, sizeof(BackwardShared));

KERNEL(scan_piece_any, 128, 1, ScanPieceArguments) { forward(arguments); }
SHARED_BYTES(scan_piece_any, sizeof(ForwardShared));

// The same bits where every sample has one new position: the walk in chunks is left out.
KERNEL(scan_step_any, 128, 1, ScanPieceArguments) {
    const u32 channels = arguments.channels, states = arguments.states;
    const Place my = place_of(arguments.lanes, states);
    const u64 item = static_cast<u64>(blockIdx.x) * my.slots + my.slot;
    const bool inside = item < static_cast<u64>(arguments.samples) * channels;
    const u32 row = inside ? static_cast<u32>(item / channels) : 0;
    const u32 channel = inside ? static_cast<u32>(item % channels) : 0;
    release_next();
    await_previous();
    const float x = widen(*place(arguments.x, row, channel));
    const float delta = softplus(widen(*place(arguments.delta_raw, row, channel)) +
                                 arguments.delta_bias[channel]);
    float y[1] = {0.0f};
    for (u32 state = my.lane; inside && state < states; state += my.lanes) {
        float& held = arguments.state[item * states + state];
        const float rate = rate_of(arguments.a_log[static_cast<u64>(channel) * states + state]);
        const float b = widen(*place(arguments.bc, row, state));
        const float h = fmaf(exp2_fast(delta * rate), held, delta * x * b);
        y[0] = fmaf(widen(*place(arguments.bc, row, states + state)), h, y[0]);
        held = h;
    }
    sum_lanes(y, my.lanes);
    if (!inside || my.lane != 0) return;
    const float z = widen(*place(arguments.z, row, channel));
    const float saved = widen(rounded(fmaf(arguments.d[channel], x, y[0])));
    *place(arguments.out, row, channel) = rounded(gated(saved, z, sigmoid(z)));
}
#endif
