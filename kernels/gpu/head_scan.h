// What the kernels of the scan of heads over whole sequences share: sizes, arguments, and a chunk of positions in shared memory.
//
// They take the chunks of Dao and Gu, 2024 (section 6), in fp32. With u_j = delta_j x_j, S_ij the product of the decays of the
// positions j+1 .. i of a chunk, E_i that of all up to i, h the state before the chunk and L its last position:
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
constexpr u32 HEAD_THREADS = 256;
constexpr u32 CHANNELS = STATES < 256 ? 64 : WARP == 32 ? 32 : 16;
// Positions of a chunk: what fits the 64 KiB of AMD's compute units.
constexpr u32 LENGTH = WARP == 32 && STATES < 256 ? 32 : 16;

// Positions of a document between the states that backward saves for itself.
constexpr u32 SAVED_POSITIONS = 128;

// Rows in shared memory, so long that neighbouring rows begin four banks apart.
constexpr u32 STATE_ROW = STATES + 4, CHANNEL_ROW = CHANNELS + 4, PAIR_ROW = LENGTH + 4;

typedef float StateRows[STATE_ROW];
typedef float ChannelRows[CHANNEL_ROW];
typedef float PairRows[PAIR_ROW];

struct HeadScanInputs {
    ScanRows delta_raw;  // [b t, h]
    ScanRows x, z;       // [b t, h p]
    ScanRows bc;         // [b t, 2 g n]: B of all groups, then C
    const float *delta_bias, *a_log, *d;  // [h]
    const u32* beginnings;                // of documents.h, or null
    float least, most;                    // step sizes
    u32 positions, heads, width, groups, states;
    u32 wide;  // whether four neighbouring elements of every row may be read at once
};

struct HeadScanForwardArguments {
    float* out;  // [b t, h p]
    u64 out_stride;
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
    float* passed;      // [b t, h, parts of a head]: E_i dy_i . (C_i . h), what a state before the chunk brings to the loss at a position
    float* totals;      // [b t, h]: ddelta of the channels so far, where a head has more than CHANNELS
    float* parameters;  // [b, 3 h]: da_log, dd and ddelta_bias of each sample
    const float* dout;  // [b t, h p]
    u64 dout_stride;
    HeadScanInputs in;
};

// --- the threads' parts -----------------------------------------------------------------------------------

// Of positions by channels: row i + 16 r, channel c + 16 s. Lanes that read rows of the same matrix read neighbouring ones.
constexpr u32 Y_ROWS = LENGTH / 16, Y_COLUMNS = CHANNELS / 16;
struct YPart {
    u32 row, channel, half;
};
DEVICE YPart y_part() {
    const u32 thread = threadIdx.x, team = thread / 32;
    return {thread / 8 % 4 + team / 2 * 4, thread % 8 + team % 2 * 8, team % 2};
}

// Of channels by states: `STATE_CHANNELS` neighbouring channels, four neighbouring states.
constexpr u32 STATE_CHANNELS = CHANNELS * STATES / (4 * HEAD_THREADS);
constexpr u32 STATE_TEAMS = STATES / 32;  // teams of 32 threads side by side
struct StatePart {
    u32 channel, state;
};
DEVICE StatePart state_part() {
    const u32 thread = threadIdx.x, team = thread / 32;
    return {(thread / 8 % 4 + team / STATE_TEAMS * 4) * STATE_CHANNELS, (thread % 8 + team % STATE_TEAMS * 8) * 4};
}

// Of positions by states: row i + SHARE_STEP r, four neighbouring states. Where there are few of both some threads have none: their
// row is behind the chunk, and they read the last.
constexpr u32 SHARE_STEP = 4 * HEAD_THREADS / STATES;
constexpr u32 SHARE_ROWS = LENGTH > SHARE_STEP ? LENGTH / SHARE_STEP : 1;
struct SharePart {
    u32 row, state;
    u32 read;
};
DEVICE SharePart share_part() {
    const u32 thread = threadIdx.x, team = thread / 32, row = thread / 8 % 4 + team / STATE_TEAMS * 4;
    return {row, (thread % 8 + team % STATE_TEAMS * 8) * 4, min(row, LENGTH - 1)};
}

// Of pairs of positions: row i, columns j + PAIR_LANES c.
constexpr u32 PAIRS = LENGTH * LENGTH / HEAD_THREADS, PAIR_LANES = LENGTH / PAIRS;
struct PairPart {
    u32 row, column;
};
DEVICE PairPart pair_part() { return {threadIdx.x / PAIR_LANES, threadIdx.x % PAIR_LANES}; }

// --- products of what is in shared memory ------------------------------------------------------------------

DEVICE float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// out[r][c] += a[r A_STEP] . b[c B_STEP], of rows of INNER elements.
template <u32 INNER, u32 A_STEP, u32 B_STEP, u32 ROWS, u32 COLUMNS, u32 A, u32 B>
DEVICE void add_dots(float (&out)[ROWS][COLUMNS], const float (*a)[A], const float (*b)[B]) {
#pragma unroll 4
    for (u32 k = 0; k < INNER; k += 4) {
        float4 left[ROWS];
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) left[r] = load4(&a[r * A_STEP][k]);
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            const float4 right = load4(&b[c * B_STEP][k]);
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) out[r][c] = dot4(left[r], right, out[r][c]);
        }
    }
}

// Which elements of a matrix of pairs are not zero, [to, from]: none is read that is known to be zero.
enum class Triangle { WHOLE, LOWER, UPPER };
template <Triangle TRIANGLE, u32 STEP>
DEVICE constexpr bool reaches(u32 r, u32 k) {
    return TRIANGLE == Triangle::WHOLE || (TRIANGLE == Triangle::LOWER ? k < (r + 1) * STEP : k + 4 > r * STEP);
}

// out[r][c] += sum over k of weights[r STEP][k] v[k][c V_STEP], k up to LENGTH.
template <Triangle TRIANGLE, u32 STEP, u32 V_STEP, u32 ROWS, u32 COLUMNS>
DEVICE void add_mix(float (&out)[ROWS][COLUMNS], const PairRows* weights, const float* v) {
#pragma unroll
    for (u32 k = 0; k < LENGTH; k += 4) {
        float weight[ROWS][4];
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (reaches<TRIANGLE, STEP>(r, k)) unpack(weight[r], load4(&weights[r * STEP][k]));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) {
                const float value = v[(k + i) * CHANNEL_ROW + c * V_STEP];
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
                    if (reaches<TRIANGLE, STEP>(r, k)) out[r][c] = fmaf(weight[r][i], value, out[r][c]);
                }
            }
        }
    }
}

// out[r][0 .. 4] += sum over k of a[r SHARE_STEP][k] v[k][0 .. 4], k up to INNER.
template <Triangle TRIANGLE, u32 INNER, u32 ROWS, u32 A>
DEVICE void add_rows(float (&out)[ROWS][4], const float (*a)[A], const float* v) {
#pragma unroll 8
    for (u32 k = 0; k < INNER; k += 4) {
        float factor[ROWS][4];
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (reaches<TRIANGLE, SHARE_STEP>(r, k)) unpack(factor[r], load4(&a[r * SHARE_STEP][k]));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float row[4];
            unpack(row, load4(v + (k + i) * STATE_ROW));
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    if (reaches<TRIANGLE, SHARE_STEP>(r, k)) out[r][j] = fmaf(factor[r][i], row[j], out[r][j]);
                }
            }
        }
    }
}

// state = keep state + sum over the positions i of weights[i] a[i] (of a channel) v[i] (of a state).
DEVICE void move_on(float (&state)[STATE_CHANNELS][4], float keep, const float* weights, const float* a, const float* v) {
#pragma unroll
    for (u32 r = 0; r < STATE_CHANNELS; r++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) state[r][j] *= keep;
    }
#pragma unroll 4
    for (u32 i = 0; i < LENGTH; i++) {
        const Pack<STATE_CHANNELS> channels = load_pack<STATE_CHANNELS>(a + i * CHANNEL_ROW);
        float row[4];
        unpack(row, load4(v + i * STATE_ROW));
        const float weight = weights[i];
#pragma unroll
        for (u32 j = 0; j < 4; j++) row[j] *= weight;
#pragma unroll
        for (u32 r = 0; r < STATE_CHANNELS; r++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) state[r][j] = fmaf(channels.at[r], row[j], state[r][j]);
        }
    }
}

DEVICE void put_state(StateRows* to, const float (&state)[STATE_CHANNELS][4], const StatePart& my) {
#pragma unroll
    for (u32 r = 0; r < STATE_CHANNELS; r++) {
        store4(&to[my.channel + r][my.state], make_float4(state[r][0], state[r][1], state[r][2], state[r][3]));
    }
}

// From there, so that no registers hold it meanwhile.
DEVICE void take_state(float (&state)[STATE_CHANNELS][4], const StateRows* from, const StatePart& my) {
#pragma unroll
    for (u32 r = 0; r < STATE_CHANNELS; r++) unpack(state[r], load4(&from[my.channel + r][my.state]));
}

template <u32 ROWS, u32 COLUMNS>
DEVICE void set_zero(float (&values)[ROWS][COLUMNS]) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) values[r][c] = 0.0f;
    }
}

// --- a chunk ------------------------------------------------------------------------------------------------

// A head of a sample, and which of its channels the block has.
struct Head {
    u32 sample, head;
    u32 channel, channels;  // the first, among those of all heads, and how many
    u32 b, c;               // the columns of B and C in bc
    float rate;             // A log2(e)
};
// What all lanes have in common, in a register of each: AMD's compiler would keep it in a scalar register, of which it lacks some.
DEVICE u32 in_lanes(u32 x) { return ON_AMD ? formed_anew(x) : x; }

DEVICE Head head_of(const HeadScanInputs& in, u32 index, u32 part) {
    Head my;
    my.sample = in_lanes(index / in.heads);
    my.head = in_lanes(index % in.heads);
    my.channel = in_lanes(my.head * in.width + part * CHANNELS);
    my.channels = in_lanes(min(CHANNELS, in.width - part * CHANNELS));
    const u32 group = my.head / (in.heads / in.groups);
    my.b = in_lanes(group * in.states);
    my.c = in_lanes((in.groups + group) * in.states);
    my.rate = rate_of(in.a_log[my.head]);
    return my;
}
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

// What a chunk's positions have in common for all channels and states.
struct Steps {
    float delta[LENGTH], decay[LENGTH];
    float from_start[LENGTH];  // E_i
    float to_end[LENGTH];      // S_Li
    float into_end[LENGTH];    // S_Li delta_i
};

// A thread's own position of a chunk, where it has one: the step size, and its derivative by what is biased.
struct OwnStep {
    float delta, slope;
};
DEVICE OwnStep form_step(const HeadScanInputs& in, const Head& my, u32 row) {
    OwnStep step;
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

// The first LENGTH threads leave a chunk's steps and decays.
DEVICE OwnStep put_steps(Steps& steps, const HeadScanInputs& in, const Head& my, const Chunk& chunk) {
    OwnStep step = {0.0f, 0.0f};
    const u32 i = threadIdx.x;
    if (i < LENGTH) {
        if (i < chunk.count) step = form_step(in, my, chunk.row + i);
        steps.delta[i] = step.delta;
        steps.decay[i] = decay_of(step.delta * my.rate);
    }
    return step;
}

// The first LENGTH threads leave the products of decays: a thread those from its position on.
DEVICE void put_decays(PairRows* products, Steps& steps) {
    const u32 j = threadIdx.x;
    if (j >= LENGTH) return;
    float product = 1.0f, from_start = 1.0f;
#pragma unroll 4
    for (u32 i = 0; i < LENGTH; i++) {
        const float decay = steps.decay[i];
        if (i <= j) from_start *= decay;
        if (i > j) product *= decay;
        products[i][j] = i < j ? 0.0f : product;
    }
    steps.from_start[j] = from_start;
    steps.to_end[j] = product;
    steps.into_end[j] = product * steps.delta[j];
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

// B, C and x of a chunk.
DEVICE void put_inputs(StateRows* b, StateRows* c, ChannelRows* x, const HeadScanInputs& in, const Head& my,
                       const Chunk& chunk) {
    const bool wide = in.wide != 0;
    for_each_four<LENGTH, STATES, HEAD_THREADS>([&](u32 i, u32 column) {
        const u32 columns = i < chunk.count ? in.states : 0;
        store4(&b[i][column], four_of(place(in.bc, chunk.row + i, my.b), column, columns, wide));
        store4(&c[i][column], four_of(place(in.bc, chunk.row + i, my.c), column, columns, wide));
    });
    for_each_four<LENGTH, CHANNELS, HEAD_THREADS>([&](u32 i, u32 column) {
        const u32 columns = i < chunk.count ? my.channels : 0;
        store4(&x[i][column], four_of(place(in.x, chunk.row + i, my.channel), column, columns, wide));
    });
}
