// Shared by the kernels of the scan of heads: sizes, arguments, documents and steps.
//
// The kernels over whole sequences compute by chunks, as in Dao and Gu, 2024 (section 6); head_scan_chunk.h has the products of a chunk.
// With u_j = delta_j x_j, S_ij the product of the decays of the positions j+1 .. i of a chunk, E_i the product of the decays from the
// chunk's first position to i, h the state before the chunk and L the chunk's last position:
//
//   y_i = E_i (C_i . h) + sum over j <= i of S_ij (C_i . B_j) u_j
//   h'  = E_L h + sum over j of S_Lj u_j B_j
//
// A state costs two operations a position, and no position waits for the one before it. Decays are multiplied, never subtracted as
// logarithms, so strong decays lose no digits. A chunk ends where a document ends, so the results of a document do not depend on where
// in its sample it begins. Rows past the end of a chunk have a step size of zero and inputs of zero.
//
// A module is compiled for each value of STATES, and states are padded to the next value; a block has at most CHANNELS channels of a head.
#pragma once
#include "scan.h"
#include "pack.h"

// Mirrored by gpu/launch/head_scan.rs.
constexpr u32 STATES = HEAD_STATES;
// As many channels as fit the shared memory of a block: at least 99 KiB on NVIDIA GPUs, 64 KiB on AMD GPUs.
constexpr u32 CHANNELS = STATES == 256 ? 16 : WARP == 32 && ACTIVATION_BF16 ? 64 : 32;
// Positions of a chunk.
constexpr u32 LENGTH = WARP == 32 ? (ACTIVATION_BF16 && STATES < 256 ? 64 : 32) : (ACTIVATION_BF16 || STATES < 256 ? 32 : 16);

// Positions of a document between the states that the backward kernels save.
constexpr u32 SAVED_POSITIONS = 128;

struct HeadScanInputs {
    ScanRows delta_raw;  // [b t, h]
    ScanRows x, z;       // [b t, h p]
    ScanRows bc;         // [b t, 2 g n]: B of all groups, then C
    const float *delta_bias, *a_log, *d;  // [h]
    const u32* start_bits;                // of documents.h, or null
    float least, most;                    // bounds of the step sizes
    u32 positions, heads, width, groups, states;
    u32 wide;  // whether 16 bytes of every row may be read at once
};

// C_i . B_j, which the heads of a group share.
struct HeadScanPairsArguments {
    float* pairs;  // [b t, g, LENGTH]: row i has C_i . B_j for the positions j of its chunk, up to the end of the tile of i
    HeadScanInputs in;
};

struct HeadScanForwardArguments {
    float* out;  // [b t, h p]
    u64 out_stride;
    const float* pairs;  // of HeadScanPairsArguments
    HeadScanInputs in;
};

// The arguments of generation for a piece of sequences.
struct HeadScanPieceArguments {
    float* out;          // [b t, h p]
    u64 out_stride;
    float* state;        // [b, h, p, n], advanced
    const u32* lengths;  // [b]: the new positions of each sample; null where all have t
    u32 wide_state;      // whether four neighbouring states may be read and written at once
    u32 unused;
    HeadScanInputs in;
};

struct HeadScanBackwardArguments {
    ScanRowsOut ddelta_raw, dx, dz;
    float* shares;      // [b t, h, STATES]: each head's part of dC, then of dB
    float* saved;       // [b, h, parts of a head, t / SAVED_POSITIONS, CHANNELS STATES]: states, in the order of the threads' registers
    float* passed;      // [b t, h, parts of a head, halves of a part]: E_i dy_i . (C_i . h), the part of dy_i . y_i from the state before the chunk
    float* totals;      // [b t, h]: ddelta, summed over the parts so far, where a head has more than CHANNELS channels
    float* parameters;  // [b, 3 h]: da_log, dd and ddelta_bias of each sample
    const float* pairs; // of HeadScanPairsArguments
    const float* dout;  // [b t, h p]
    u64 dout_stride;
    u32 wide_out;  // whether two neighbours of every row of dx and dz may be written at once
    u32 unused;
    HeadScanInputs in;
};

// --- a chunk ------------------------------------------------------------------------------------------------

// A head of a sample, and the block's channels of it.
struct Head {
    u32 sample, head;
    u32 channel, channels;  // the block's first channel, counted over all heads, and the number of its channels
    u32 group;
    float rate;             // A log2(e)
};
// Keeps a value that is equal in all lanes in a vector register: AMD's compiler would choose a scalar register, and spill others.
DEVICE u32 in_lanes(u32 x) { return ON_AMD ? formed_anew(x) : x; }
// Keeps a value that is equal in all lanes of a warp in a scalar register of AMD's, so that a branch on it needs no mask of lanes.
DEVICE u32 in_warp(u32 x) {
#if ON_AMD
    return __builtin_amdgcn_readfirstlane(x);
#else
    return x;
#endif
}

DEVICE Head head_of(const HeadScanInputs& in, u32 index, u32 part) {
    Head my;
    my.sample = in_lanes(index / in.heads);
    my.head = in_lanes(index % in.heads);
    my.channel = in_lanes(my.head * in.width + part * CHANNELS);
    my.channels = in_lanes(min(CHANNELS, in.width - part * CHANNELS));
    my.group = in_lanes(my.head / (in.heads / in.groups));
    my.rate = rate_of(in.a_log[my.head]);
    return my;
}
// The columns of B and of C in bc.
DEVICE u32 column_of_b(const HeadScanInputs& in, const Head& my) { return my.group * in.states; }
DEVICE u32 column_of_c(const HeadScanInputs& in, const Head& my) { return (in.groups + my.group) * in.states; }
DEVICE u32 parts_of(const HeadScanInputs& in) { return (in.width + CHANNELS - 1) / CHANNELS; }

struct Chunk {
    u32 count;  // rows, all of one document
    u32 row;    // the first row, counted over all samples
};
DEVICE Chunk chunk_of(const HeadScanInputs& in, const Head& my, u32 first, u32 end) {
    return {in_lanes(end - first), in_lanes(my.sample * in.positions + first)};
}

// Documents of a sample.
struct Documents {
    const u32* bits;  // null: the sample is one document
    u32 positions;

    __device__ __forceinline__ Documents(const HeadScanInputs& in, u32 sample) : bits(nullptr), positions(in.positions) {
        if (in.start_bits) bits = start_bits_of(in.start_bits, sample * in.positions, in.positions);
    }
    __device__ __forceinline__ bool begins(u32 position) const {
        return position == 0 || (bits && (bits[position / WORD_POSITIONS] >> (position % WORD_POSITIONS) & 1));
    }
    // The end of the chunk that begins at `first`.
    __device__ __forceinline__ u32 end_of_chunk(u32 first) const {
        const u32 most = min(first + LENGTH, positions);
        if (!bits) return most;
        u32 end = first + 1;
        while (end < most && !begins(end)) end++;
        return end;
    }
    // The first position from `position` on at which a chunk begins; `end` if there is none before it.
    __device__ __forceinline__ u32 first_chunk(u32 position, u32 end) const {
        const u32 behind = (position - document_of(position)) % LENGTH;
        const u32 most = min(behind == 0 ? position : position + (LENGTH - behind), end);
        u32 first = position;
        while (first < most && !begins(first)) first++;
        return first;
    }
    // The first position of the document that holds `position`.
    __device__ __forceinline__ u32 document_of(u32 position) const {
        if (!bits) return 0;
        u32 word = position / WORD_POSITIONS;
        u32 found = bits[word] & (0xffffffffu >> (WORD_POSITIONS - 1 - position % WORD_POSITIONS));
        while (found == 0 && word > 0) found = bits[--word];
        u32 highest = 0;
        for (u32 left = found; left > 1; left >>= 1) highest++;
        return found == 0 ? 0 : word * WORD_POSITIONS + highest;
    }
};

// A position's step size, and its derivative by the raw step size.
struct Step {
    float delta, slope;
};
DEVICE Step form_step(const HeadScanInputs& in, const Head& my, u32 row) {
    Step step;
    const float raw = widen(*place(in.delta_raw, row, my.head));
    const float free = softplus(raw + in.delta_bias[my.head], step.slope);
    step.delta = fminf(in.most, fmaxf(in.least, free));
    if (free < in.least || free > in.most) step.slope = 0.0f;
    return step;
}

// 2^x for x <= 0, accurate to an ulp where the result is near 1: a state is multiplied by thousands of decays, and exp2_fast may err by
// two ulp to the same side in each. Taylor's polynomial about 0, whose next term is below 1e-9.
DEVICE float decay_of(float x) {
    if (x < -0.25f) return exp2_fast(x);
    float p = 1.5403530393e-4f;
    p = fmaf(p, x, 1.3333558146e-3f);
    p = fmaf(p, x, 9.6181291076e-3f);
    p = fmaf(p, x, 5.5504108665e-2f);
    p = fmaf(p, x, 2.4022650696e-1f);
    p = fmaf(p, x, LN_2);
    return fmaf(p, x, 1.0f);
}

// Four elements of a row from `column` on; zeros after `columns`.
template <class T>
DEVICE float4 four_of(const T* row, u32 column, u32 columns, bool wide) {
    if (wide) return column < columns ? load4(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float x[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = column + i < columns ? widen(row[column + i]) : 0.0f;
    return make_float4(x[0], x[1], x[2], x[3]);
}

// Calls `body` with each row and every fourth column of [ROWS, COLUMNS], divided among BLOCK threads.
template <u32 ROWS, u32 COLUMNS, u32 BLOCK, class Body>
DEVICE void for_each_four(Body body) {
    constexpr u32 FOURS = COLUMNS / 4, ALL = ROWS * FOURS;
#pragma unroll
    for (u32 first = 0; first < ALL; first += BLOCK) {
        const u32 i = first + threadIdx.x;
        if (ALL % BLOCK == 0 || i < ALL) body(i / FOURS, i % FOURS * 4);
    }
}
