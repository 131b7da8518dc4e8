// The walk of sixteen states that the forward scan of whole sequences and that of pieces share: the tile of positions
// of a block of 32 channels in shared memory, the threads' roles, and the steps. scan_forward.cu gives the reasons.
#pragma once
#include "scan.h"

namespace {

constexpr bool WAITS_IN_REGISTERS = WARP == 64;
constexpr u32 TILE = WAITS_IN_REGISTERS ? 16 : 32;  // positions
constexpr u32 COLUMNS = TILE / 4;             // channels that a thread prepares and finishes
constexpr u32 ROW_THREADS = BLOCK_CHANNELS / COLUMNS;
constexpr u32 GROUP = 2;                      // positions whose operands are loaded together
constexpr u32 WARPS = SCAN_THREADS / WARP;
constexpr u32 WARP_CHANNELS = WARP / 4;
// Padded so that neither walking nor preparing meets a bank conflict.
constexpr u32 STEPS_ROW = BLOCK_CHANNELS / 8 * 20;
constexpr u32 SECTION = WARP + WARP_CHANNELS;
constexpr u32 Y_ROW = WAITS_IN_REGISTERS ? BLOCK_CHANNELS + 4 : WARPS * SECTION + 4;
constexpr u32 BUFFERS = WAITS_IN_REGISTERS ? 1 : 2;

enum Array { X, DELTA, Z, ARRAYS };

// A thread's part of a tile as loaded from memory.
struct Incoming {
    HeldColumns<COLUMNS> raw[ARRAYS];
};

struct ForwardShared {
    float steps[TILE * STEPS_ROW];            // (delta, delta x) of each channel
    float bc[BUFFERS][TILE][32];              // [8][B2 C2]
    float y[TILE * Y_ROW];                    // [warps][4 lanes, channels]: parts of C . h; of wide warps the sums
    float skip[BLOCK_CHANNELS], bias[BLOCK_CHANNELS];
#if WARP == 32
    activation raw[2][ARRAYS][TILE][BLOCK_CHANNELS];
#endif
    // The first word is next_work_item's. The array comes last, so that the arrays before it begin at multiples of 128
    // bytes.
    u32 words[4];
};
// The size that the launcher requests.
static_assert(sizeof(ForwardShared) == (WARP == 64 ? 9744 : ACTIVATION_BF16 ? 51984 : 64272),
              "shared bytes of forward");

// One position as a lane needs it: its channel's step, and (B B C C) of states 0, 1 and 2, 3.
struct Step {
    float2 delta;
    float4 low, high;
};

// The threads' two roles. Lanes that differ in their lowest or highest bit share a channel: then shared reads of 16
// bytes cost half (measured, 5 %).
struct Walker {
    u32 quad, channel, y_at;
};
DEVICE Walker walker() {
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Walker walker;
    if (WAITS_IN_REGISTERS) {
        // The lanes of a channel are neighbours, which add their parts without shared memory.
        walker.quad = lane % 4;
        walker.channel = walker.y_at = warp * WARP_CHANNELS + lane / 4;
        return walker;
    }
    walker.quad = (lane & 1) | (lane / (WARP / 2)) * 2;
    const u32 within = (lane / 2) % WARP_CHANNELS;
    walker.channel = warp * WARP_CHANNELS + within;
    walker.y_at = warp * SECTION + walker.quad * WARP_CHANNELS + within;
    return walker;
}

DEVICE void load_group(Step (&steps)[GROUP], const float* delta, const float* bc, u32 first) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        steps[i].delta = *reinterpret_cast<const float2*>(delta + (first + i) * STEPS_ROW);
        steps[i].low = load4(bc + (first + i) * 32);
        steps[i].high = load4(bc + (first + i) * 32 + 4);
    }
}

// decay = 2^(delta rate), drive = delta x B.
DEVICE void decay_group(float (&decay)[GROUP][4], float (&drive)[GROUP][4],
                        const Step (&steps)[GROUP], const float (&rate)[4]) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        const float b[4] = {steps[i].low.x, steps[i].low.y, steps[i].high.x, steps[i].high.y};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            decay[i][j] = exp2_fast(steps[i].delta.x * rate[j]);
            drive[i][j] = steps[i].delta.y * b[j];
        }
    }
}

// Writes the parts of y of a group, whose first position is `first`, to shared memory.
DEVICE void store_parts(ForwardShared& shared, const Walker& walker, float (&y)[GROUP], u32 first) {
    if (WAITS_IN_REGISTERS) {
        // In the order that finish uses elsewhere: the first two, the last two, both.
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            y[i] += shuffle_xor(y[i], 1);
            y[i] += shuffle_xor(y[i], 2);
        }
        static_assert(GROUP == 2, "one of the four lanes stores each position");
        if (walker.quad < 2) shared.y[(first + walker.quad) * Y_ROW + walker.y_at] = walker.quad ? y[1] : y[0];
        return;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) shared.y[(first + i) * Y_ROW + walker.y_at] = y[i];
}

// One position, given its decays and drives: advances h, and returns the lane's part of y.
DEVICE float move_on(float (&h)[4], const Step& step, const float (&decay)[4], const float (&drive)[4], bool is_beginning) {
    const float c[4] = {step.low.z, step.low.w, step.high.z, step.high.w};
    float y = 0.0f;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        const float before = is_beginning ? 0.0f : h[j];
        h[j] = fmaf(decay[j], before, drive[j]);
        y = fmaf(c[j], h[j], y);
    }
    return y;
}

// Advances h over a tile, in three stages: operands of the group after the next are loaded, decays of the next
// computed, and this one stepped. `save(i)` stores h before position i, a multiple of CHECKPOINT; `start_bits`: of
// documents.
template <class Save>
DEVICE void walk(float (&h)[4], ForwardShared& shared, const Save& save, const float (&rate)[4], const Walker& walker,
                 u32 buffer, u32 start_bits) {
    const float* delta = shared.steps + walker.channel / 8 * 20 + walker.channel % 8 * 2;
    const float* bc = &shared.bc[buffer][0][walker.quad * 8];
    Step steps[3][GROUP];
    float decay[2][GROUP][4], drive[2][GROUP][4];
    load_group(steps[0], delta, bc, 0);
    load_group(steps[1], delta, bc, GROUP);
    decay_group(decay[0], drive[0], steps[0], rate);
#pragma unroll
    for (u32 group = 0; group < TILE / GROUP; group++) {
        const u32 first = group * GROUP;
        if (first % CHECKPOINT == 0) save(first);
        if (first + 2 * GROUP < TILE) {
            load_group(steps[(group + 2) % 3], delta, bc, first + 2 * GROUP);
        }
        if (first + GROUP < TILE) {
            const u32 next = (group + 1) % 2;
            decay_group(decay[next], drive[next], steps[(group + 1) % 3], rate);
        }
        float y[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            y[i] = move_on(h, steps[group % 3][i], decay[group % 2][i], drive[group % 2][i],
                           begins(start_bits, first + i));
        }
        // Stored last: a store would keep later loads from being moved before it.
        store_parts(shared, walker, y, first);
    }
}

// The first `count` positions of a tile in which the sequence ends: the same operations.
DEVICE void walk_some(float (&h)[4], ForwardShared& shared, const float (&rate)[4], const Walker& walker, u32 buffer,
                      u32 count) {
    const float* delta = shared.steps + walker.channel / 8 * 20 + walker.channel % 8 * 2;
    const float* bc = &shared.bc[buffer][0][walker.quad * 8];
#pragma unroll 1
    for (u32 first = 0; first < count; first += GROUP) {
        Step steps[GROUP];
        float decay[GROUP][4], drive[GROUP][4], y[GROUP];
        load_group(steps, delta, bc, first);
        decay_group(decay, drive, steps, rate);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            y[i] = 0.0f;
            if (first + i < count) y[i] = move_on(h, steps[i], decay[i], drive[i], false);
        }
        store_parts(shared, walker, y, first);
    }
}

// The tile that is walked and the next one, where tiles wait in registers.
#if WARP == 64
struct Tiles {
    Incoming walked, next;
};
DEVICE const HeldColumns<COLUMNS>* raw_of_walked(const Tiles& tiles, const ForwardShared&, Array array, u32, u32, u32) {
    return &tiles.walked.raw[array];
}
DEVICE const HeldColumns<COLUMNS>* raw_of_next(const Tiles& tiles, const ForwardShared&, Array array, u32, u32, u32) {
    return &tiles.next.raw[array];
}
// Starts to load a thread's part of the next tile; a tile in shared memory is complete after copy_async_wait.
template <bool ALIGNED>
DEVICE void hold_next(Tiles& tiles, ForwardShared&, Array array, u32, u32, u32, const activation* from) {
    hold_columns<ALIGNED>(tiles.next.raw[array], from);
}
// The next tile becomes the tile to be walked.
DEVICE void advance(Tiles& tiles) { tiles.walked = tiles.next; }
#else
struct Tiles {};
DEVICE const activation* raw_of_walked(const Tiles&, const ForwardShared& shared, Array array, u32 buffer, u32 row,
                                       u32 column) {
    return &shared.raw[buffer][array][row][column];
}
DEVICE const activation* raw_of_next(const Tiles& tiles, const ForwardShared& shared, Array array, u32 buffer,
                                     u32 row, u32 column) {
    return raw_of_walked(tiles, shared, array, buffer, row, column);
}
template <bool ALIGNED>
DEVICE void hold_next(Tiles&, ForwardShared& shared, Array array, u32 buffer, u32 row, u32 column,
                      const activation* from) {
    fetch_columns<COLUMNS, ALIGNED>(&shared.raw[buffer][array][row][column], from);
}
DEVICE void advance(Tiles&) {}
#endif

// (delta, delta x) of a thread's channels at `row` of the next tile.
DEVICE void prepare(ForwardShared& shared, const Tiles& tiles, u32 buffer, u32 row, u32 column) {
    float x[COLUMNS], delta[COLUMNS], bias[COLUMNS];
    take_columns(x, raw_of_next(tiles, shared, X, buffer, row, column));
    take_columns(delta, raw_of_next(tiles, shared, DELTA, buffer, row, column));
    unpack(bias, load4(shared.bias + column));
    if constexpr (COLUMNS > 4) unpack(bias + 4, load4(shared.bias + column + 4));
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) delta[i] = softplus(delta[i] + bias[i]);
    float* out = shared.steps + row * STEPS_ROW + column / 8 * 20;
    if (COLUMNS < 8) out += column % 8 * 2;
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i += 2) {
        store4(out + 2 * i,
               make_float4(delta[i], delta[i] * x[i], delta[i + 1], delta[i + 1] * x[i + 1]));
    }
}

// y and the gated output of a thread's channels.
DEVICE void finish(float (&y)[COLUMNS], float (&out)[COLUMNS], const ForwardShared& shared,
                   const Tiles& tiles, u32 buffer, u32 row, u32 column) {
    float x[COLUMNS], z[COLUMNS];
    take_columns(x, raw_of_walked(tiles, shared, X, buffer, row, column));
    take_columns(z, raw_of_walked(tiles, shared, Z, buffer, row, column));
    const float* parts = WAITS_IN_REGISTERS ? shared.y + row * Y_ROW + column
                                            : shared.y + row * Y_ROW + column / WARP_CHANNELS * SECTION +
                                                  column % WARP_CHANNELS;
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i += 4) {
        constexpr u32 PARTS = WAITS_IN_REGISTERS ? 1 : 4;
        float part[4][4], skip[4];
#pragma unroll
        for (u32 quad = 0; quad < PARTS; quad++) {
            unpack(part[quad], load4(parts + quad * WARP_CHANNELS + i));
        }
        unpack(skip, load4(shared.skip + column + i));
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const float sum =
                PARTS == 1 ? part[0][k] : (part[0][k] + part[1][k]) + (part[2][k] + part[3][k]);
            y[i + k] = fmaf(skip[k], x[i + k], sum);
        }
    }
    round_columns(y);
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) out[i] = gated(y[i], z[i], sigmoid(z[i]));
}

}  // namespace
