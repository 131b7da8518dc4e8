// Common parts of the selective scan's kernels: sizes, rows of activations, softplus, and the arguments of forward and
// backward.
//
// Decays are computed as 2^(delta rate), rate = A log2(e) = -exp(a_log) log2(e): one exponential a state.
#pragma once
#include "dialect.h"
#include "documents.h"

// Positions between saved states, and channels that share one partial sum of dB and dC. Mirrored by
// gpu/launch/scan.rs.
constexpr u32 CHECKPOINT = 16;
constexpr u32 BLOCK_CHANNELS = 32;
constexpr u32 SCAN_THREADS = 128;

// How blocks share the work of the kernels for sixteen states, a chained scan. 32 channels of a sample are a chain, cut
// into segments of whole tiles; a block takes the next work item, a segment of a chain. Items are numbered by segment
// first, then by chain, so an item waits only for items that were taken earlier, by blocks that are running.
// Without segments, a multiprocessor with one more chain than the others would end later by the time of a whole chain
// (measured at 2.5 chains a multiprocessor: 11 % backward). Which block walks a segment changes no bit.
struct ScanWorkItems {
    u32* words;     // [1 + chains]: items taken, then the number of finished segments of each chain; scan_pack zeroes them
    u32 chains, segments;
    u32 positions;  // of a segment
    u32 unused;
};

// rows[b t, columns], `stride` elements apart.
struct ScanRows {
    const activation* first;
    u64 stride;
};
struct ScanRowsOut {
    activation* first;
    u64 stride;
};
DEVICE const activation* place(const ScanRows& rows, u32 row, u32 column) {
    return rows.first + (static_cast<u64>(row) * rows.stride + column);
}
DEVICE activation* place(const ScanRowsOut& rows, u32 row, u32 column) {
    return rows.first + (static_cast<u64>(row) * rows.stride + column);
}

struct ScanForwardArguments {
    ScanRowsOut out;            // [b t, e]
    float* checkpoints;         // [b, ceil(t / CHECKPOINT), e, n]: the states before each sixteenth position
    activation* y;              // [b t, e], y before the gate, rounded; `out` is computed from it
    ScanRows delta_raw, x, z;   // [b t, e]
    ScanRows bc;                // [b t, 2 n]; any states
    const float* packed_bc;     // as scan_pack writes it; sixteen states
    const float* delta_bias;    // [e]
    const float* a_log;         // [e, n]
    const float* d;             // [e]
    ScanWorkItems work;         // sixteen states
    u32 positions, channels, states;
    u32 lanes;                  // threads of a channel; any states
    const u32* start_bits;      // of documents.h, or null
    static constexpr bool GOES_ON = false;
};

// The arguments of generation for a piece of sequences.
struct ScanPieceArguments {
    ScanRowsOut out;           // [b t, e]
    float* state;              // [b, e, n], advanced
    const u32* lengths;        // [b]: the new positions of each sample; null where all have t
    ScanRows delta_raw, x, z;  // [b t, e]
    ScanRows bc;               // [b t, 2 n]
    const float *delta_bias, *a_log, *d;
    u32 samples, positions, channels, states;
    u32 lanes;  // threads of a channel; any states
    u32 wide;   // whether `state`, `a_log` and all rows are aligned for access of 16 bytes
    static constexpr bool GOES_ON = true;
};
DEVICE u32 positions_of(const ScanPieceArguments& arguments, u32 sample) {
    return arguments.lengths ? min(arguments.lengths[sample], arguments.positions) : arguments.positions;
}

struct ScanBackwardArguments {
    ScanRowsOut ddelta_raw, dx, dz;  // [b t, e]
    ScanRowsOut regated;             // [b t, e], or none where `first` is null
    float* dbc;                      // [b, ceil(e / 32), t, 2 n]: partial sums over 32 channels
    float* parameters;               // [b, e n + 2 e]: da_log, dd and ddelta_bias of each sample
    float* carried;                  // [chains, 4, 128, 4]: the values that a chain hands to its next segment
    ScanRows dout;                   // [b t, e]
    ScanRows delta_raw, x, z, bc;
    const float* checkpoints;
    const activation* y;
    const float *packed_bc, *delta_bias, *a_log, *d;
    ScanWorkItems work;
    u32 positions, channels, states, lanes;
    const u32* start_bits;
};

// Whether a document begins with position `i`, among positions whose bits are given: no state enters from the position
// before, and no gradient goes back to it.
DEVICE bool begins(u32 bits, u32 i) { return DOCUMENTS && (bits >> i & 1); }
// `x`, or zero where a document begins, without a predicate register: the backward walk has none left.
DEVICE float unless_begins(u32 bits, u32 i, float x) {
    return DOCUMENTS ? __uint_as_float(__float_as_uint(x) & ((bits >> i & 1) - 1)) : x;
}

// A segment of a chain; `segment` counts in the order of the walk.
struct ScanWorkItem {
    u32 chain, segment;
};
// The next work item, given to every thread through `shared`; returns false after the last.
DEVICE bool next_work_item(ScanWorkItem& item, const ScanWorkItems& work, u32& shared) {
    __syncthreads();  // no thread needs the last item's shared memory
    if (threadIdx.x == 0) shared = take_number(work.words);
    __syncthreads();
    item.chain = shared % work.chains;
    item.segment = shared / work.chains;
    return item.segment < work.segments;
}
// Waits until the chain has been walked up to this segment.
DEVICE void await_previous_segment(const ScanWorkItem& item, const ScanWorkItems& work) {
    if (threadIdx.x == 0) {
        while (seen(work.words + 1 + item.chain) < item.segment) rest();
    }
    __syncthreads();
}
// Publishes this block's writes to the block of the chain's next segment.
DEVICE void publish_segment(const ScanWorkItem& item, const ScanWorkItems& work) {
    __syncthreads();
    if (threadIdx.x == 0) publish(work.words + 1 + item.chain, item.segment + 1);
}

// Elements of a sample's B and C as scan_pack writes them, [t, 8, 4]: (B B C C) of two neighbouring states. Zeros
// follow up to a whole tile.
constexpr u32 PACKED_POSITIONS = 32;
DEVICE u64 packed_elements(u32 positions) {
    const u64 tiles = (positions + PACKED_POSITIONS - 1) / PACKED_POSITIONS;
    return tiles * PACKED_POSITIONS * 32;
}

// e^x for a parameter: the rounding error of x log2(e) is corrected.
DEVICE float exp_careful(float x) {
    const float high = x * LOG2_E;
    const float low = fmaf(x, 1.925963033500012e-8f, fmaf(x, LOG2_E, -high));
    const float y = exp2_fast(high);
    return fmaf(y, low * LN_2, y);
}
DEVICE float rate_of(float a_log) { return exp_careful(a_log) * -LOG2_E; }

// log(1 + x), x >= 0: below 1/2 a minimax polynomial without constant term (relative error 3e-8), because 1 + x would
// lose bits of x there.
DEVICE float log1p_positive(float x) {
    float p = 0.03872343440334549f;
    p = fmaf(p, x, -0.11377193717470159f);
    p = fmaf(p, x, 0.1845469967019596f);
    p = fmaf(p, x, -0.2475308275419061f);
    p = fmaf(p, x, 0.3331393864787846f);
    p = fmaf(p, x, -0.49999418412235724f);
    p = fmaf(p, x, 0.9999999712127954f);
    return x < 0.5f ? p * x : log2_fast(1.0f + x) * LN_2;
}

// softplus(x) = log(1 + e^x), and its derivative, the sigmoid; above 20, x itself and 1.
DEVICE float softplus(float x, float& slope) {
    const float e = exp_fast(fminf(x, 20.0f));
    const float y = log1p_positive(e);
    slope = x > 20.0f ? 1.0f : e * reciprocal_fast(1.0f + e);
    return x > 20.0f ? x : y;
}
DEVICE float softplus(float x) {
    const float y = log1p_positive(exp_fast(fminf(x, 20.0f)));
    return x > 20.0f ? x : y;
}

// The forward output from the saved y: forward and backward both call this, so `regated` has the bits of the output.
DEVICE float gated(float y, float z, float sigmoid_z) { return y * (z * sigmoid_z); }

// --- a thread's columns of a row: 4 or 8 neighbouring elements -----------------------------------------
// ALIGNED: rows and columns allow 16-byte (4 bf16: 8-byte) access.

// From global to shared memory; complete after copy_async_commit and copy_async_wait.
template <u32 COUNT, bool ALIGNED>
DEVICE void fetch_columns(activation* shared, const activation* global) {
    constexpr u32 BYTES = COUNT * sizeof(activation);
    if (!ALIGNED) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) shared[i] = global[i];
    } else if (BYTES == 8) {
        copy_async_8(shared, global);
    } else {
#pragma unroll
        for (u32 i = 0; i < BYTES / 16; i++) {
            copy_async_16(shared + i * 16 / sizeof(activation), global + i * 16 / sizeof(activation));
        }
    }
}

template <u32 COUNT>
DEVICE void zero_columns(activation* shared) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) shared[i] = rounded(0.0f);
}

// Four neighbouring numbers; WIDE: with one access.
DEVICE void take4(float (&out)[4], const float* from, bool wide) {
    if (wide) {
        unpack(out, load4(from));
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) out[j] = from[j];
}
DEVICE void put4(float* to, const float (&from)[4], bool wide) {
    if (wide) {
        store4(to, make_float4(from[0], from[1], from[2], from[3]));
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) to[j] = from[j];
}

DEVICE void take_columns(float (&out)[4], const activation* shared) { unpack(out, load4(shared)); }
DEVICE void take_columns(float (&out)[8], const activation* shared) {
#if ACTIVATION_BF16
    const uint4 pairs = *reinterpret_cast<const uint4*>(shared);
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        out[2 * i] = first_of(words[i]);
        out[2 * i + 1] = second_of(words[i]);
    }
#else
    unpack(out, load4(shared));
    unpack(out + 4, load4(shared + 4));
#endif
}

// A thread's columns of a row in registers, as words.
template <u32 COUNT>
struct HeldColumns {
#if ACTIVATION_BF16
    u32 pairs[COUNT / 2];
#else
    float at[COUNT];
#endif
};
// From global memory.
template <bool ALIGNED>
DEVICE void hold_columns(HeldColumns<4>& held, const activation* global) {
#if ACTIVATION_BF16
    if (ALIGNED) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(global);
        held.pairs[0] = pairs.x;
        held.pairs[1] = pairs.y;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        held.pairs[i] = global[2 * i].bits | static_cast<u32>(global[2 * i + 1].bits) << 16;
    }
#else
    if (ALIGNED) {
        unpack(held.at, load4(global));
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) held.at[i] = global[i];
#endif
}
DEVICE void take_columns(float (&out)[4], const HeldColumns<4>* held) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#if ACTIVATION_BF16
        out[i] = i % 2 ? second_of(held->pairs[i / 2]) : first_of(held->pairs[i / 2]);
#else
        out[i] = held->at[i];
#endif
    }
}

// Rounds to activations.
template <u32 COUNT>
DEVICE void round_columns(float (&x)[COUNT]) {
#if ACTIVATION_BF16
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 2) {
        const u32 pair = bf16_pair(x[i], x[i + 1]);
        x[i] = first_of(pair);
        x[i + 1] = second_of(pair);
    }
#endif
}

DEVICE void put_aligned(activation* global, const float (&x)[4]) {
    store4(global, make_float4(x[0], x[1], x[2], x[3]));
}
DEVICE void put_aligned(activation* global, const float (&x)[8]) {
#if ACTIVATION_BF16
    *reinterpret_cast<uint4*>(global) = make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]),
                                                   bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
#else
    store4(global, make_float4(x[0], x[1], x[2], x[3]));
    store4(global + 4, make_float4(x[4], x[5], x[6], x[7]));
#endif
}
template <bool ALIGNED, u32 COUNT>
DEVICE void put_columns(activation* global, const float (&x)[COUNT]) {
    if (ALIGNED) {
        put_aligned(global, x);
    } else {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) global[i] = rounded(x[i]);
    }
}
