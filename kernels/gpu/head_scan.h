// What the kernels of the scan of heads share: sizes, arguments, documents and steps.
//
// Those over whole sequences take the chunks of Dao and Gu, 2024 (section 6); head_scan_chunk.h has their products. With
// u_j = delta_j x_j, S_ij the product of the decays of the positions j+1 .. i of a chunk, E_i that of all up to i, h the state before
// the chunk and L its last position:
//
//   y_i = E_i (C_i . h) + sum over j <= i of S_ij (C_i . B_j) u_j
//   h'  = E_L h + sum over j of S_Lj u_j B_j
//
// So a state costs two operations a position, and none of them waits for the position before. Decays are multiplied, never
// subtracted as logarithms, so that strong ones lose no digits. A chunk ends where a document does, so that what a document's rows
// become does not depend on where in its sample it begins; rows past the end of a chunk have a step of zero and inputs of zero.
//
// A module is compiled for each class of STATES, to which states are padded; a block has at most CHANNELS channels of a head.
#pragma once
#include "scan.h"
#include "pack.h"

// Mirrored by gpu/launch/head_scan.rs.
constexpr u32 STATES = HEAD_STATES;
// What fits the shared memory of a block: 99 KiB at least on NVIDIA's, 64 KiB on AMD's.
constexpr u32 CHANNELS = STATES == 256 ? 16 : WARP == 32 && ACTIVATION_BF16 ? 64 : 32;
// Positions of a chunk.
constexpr u32 LENGTH = WARP == 32 ? (ACTIVATION_BF16 && STATES < 256 ? 64 : 32) : (ACTIVATION_BF16 || STATES < 256 ? 32 : 16);

// Positions of a document between the states that backward saves for itself.
constexpr u32 SAVED_POSITIONS = 128;

struct HeadScanInputs {
    ScanRows delta_raw;  // [b t, h]
    ScanRows x, z;       // [b t, h p]
    ScanRows bc;         // [b t, 2 g n]: B of all groups, then C
    const float *delta_bias, *a_log, *d;  // [h]
    const u32* beginnings;                // of documents.h, or null
    float least, most;                    // step sizes
    u32 positions, heads, width, groups, states;
    u32 wide;  // whether 16 bytes of every row may be read at once
};

// C_i . B_j of all heads of a group.
struct HeadScanPairsArguments {
    float* pairs;  // [b t, g, LENGTH]: of a row i, those of the positions j of its chunk, up to the end of its own tile
    HeadScanInputs in;
};

struct HeadScanForwardArguments {
    float* out;  // [b t, h p]
    u64 out_stride;
    const float* pairs;  // of HeadScanPairsArguments
    HeadScanInputs in;
};

// What generation gives of a piece of sequences.
struct HeadScanPieceArguments {
    float* out;          // [b t, h p]
    u64 out_stride;
    float* state;        // [b, h, p, n], moved on
    const u32* lengths;  // [b]: positions that there are of each sample; null where there are t
    u32 wide_state;      // whether four neighbouring states may be read and written at once
    u32 unused;
    HeadScanInputs in;
};

struct HeadScanBackwardArguments {
    ScanRowsOut ddelta_raw, dx, dz;
    float* shares;      // [b t, h, STATES]: each head's part of dC, then of dB
    float* saved;       // [b, h, parts of a head, t / SAVED_POSITIONS, CHANNELS STATES]: states, as threads hold them
    float* passed;      // [b t, h, parts of a head, halves of a part]: E_i dy_i . (C_i . h), what a state before the chunk brings to the loss at a position
    float* totals;      // [b t, h]: ddelta of the channels so far, where a head has more than CHANNELS
    float* parameters;  // [b, 3 h]: da_log, dd and ddelta_bias of each sample
    const float* pairs; // of HeadScanPairsArguments
    const float* dout;  // [b t, h p]
    u64 dout_stride;
    u32 wide_out;  // whether two neighbours of every row of dx and dz may be written at once
    u32 unused;
    HeadScanInputs in;
};

// --- a chunk ------------------------------------------------------------------------------------------------

// A head of a sample, and which of its channels the block has.
struct Head {
    u32 sample, head;
    u32 channel, channels;  // the first, among those of all heads, and how many
    u32 group;
    float rate;             // A log2(e)
};
// What all lanes have in common, in a register of each: AMD's compiler would keep it in a scalar register, of which it lacks some.
DEVICE u32 in_lanes(u32 x) { return ON_AMD ? formed_anew(x) : x; }
// What all lanes of a warp have in common and branch by: in a scalar register of AMD's, so that no branch costs a mask of lanes.
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

// `count` rows of a document.
struct Chunk {
    u32 count;
    u32 row;  // the first, of all samples
};
DEVICE Chunk chunk_of(const HeadScanInputs& in, const Head& my, u32 first, u32 end) {
    return {in_lanes(end - first), in_lanes(my.sample * in.positions + first)};
}

// Documents of a sample.
struct Documents {
    const u32* bits;  // null: the sample is one
    u32 positions;

    __device__ __forceinline__ Documents(const HeadScanInputs& in, u32 sample) : bits(nullptr), positions(in.positions) {
        if (in.beginnings) bits = beginnings_of(in.beginnings, sample * in.positions, in.positions);
    }
    __device__ __forceinline__ bool begins(u32 position) const {
        return position == 0 || (bits && (bits[position / WORD_POSITIONS] >> (position % WORD_POSITIONS) & 1));
    }
    // Behind the chunk that begins at `first`.
    __device__ __forceinline__ u32 end_of_chunk(u32 first) const {
        const u32 most = min(first + LENGTH, positions);
        if (!bits) return most;
        u32 end = first + 1;
        while (end < most && !begins(end)) end++;
        return end;
    }
    // The first chunk that begins at `position` or behind it, where it begins before `end`.
    __device__ __forceinline__ u32 first_chunk(u32 position, u32 end) const {
        const u32 behind = (position - document_of(position)) % LENGTH;
        const u32 most = min(behind == 0 ? position : position + (LENGTH - behind), end);
        u32 first = position;
        while (first < most && !begins(first)) first++;
        return first;
    }
    // Where the document begins that `position` is in.
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

// A position's step size, and its derivative by what is biased.
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

// 2^x of an x that is not positive, within an ulp where it is near 1: a state is the product of thousands of decays, which exp2_fast
// may miss by two ulp to the same side each. Taylor's polynomial about 0, whose next term is below 1e-9.
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

// Four elements of a row from `column` on, zeros behind `columns`.
template <class T>
DEVICE float4 four_of(const T* row, u32 column, u32 columns, bool wide) {
    if (wide) return column < columns ? load4(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float x[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = column + i < columns ? widen(row[column + i]) : 0.0f;
    return make_float4(x[0], x[1], x[2], x[3]);
}

// Calls `body` with each row and each first of four columns of [ROWS, COLUMNS], shared out among BLOCK threads.
template <u32 ROWS, u32 COLUMNS, u32 BLOCK, class Body>
DEVICE void for_each_four(Body body) {
    constexpr u32 FOURS = COLUMNS / 4, ALL = ROWS * FOURS;
#pragma unroll
    for (u32 first = 0; first < ALL; first += BLOCK) {
        const u32 i = first + threadIdx.x;
        if (ALL % BLOCK == 0 || i < ALL) body(i / FOURS, i % FOURS * 4);
    }
}
