// The backward selective scan of sixteen states: its shared memory, the states and channels of each lane, and the sums
// over lanes; see scan_backward.cu.
#pragma once
#include "scan.h"

namespace {

constexpr u32 TILE = CHECKPOINT;
constexpr u32 PIECE = 8;                      // positions whose states stay in registers
constexpr u32 GROUP = 4;                      // positions whose sums over channels go together
constexpr u32 COLUMNS = 4;                    // channels that a thread prepares and finishes
constexpr u32 WARPS = SCAN_THREADS / WARP;
constexpr u32 WARP_CHANNELS = WARP / 4;
constexpr u32 PAIRS = WARP_CHANNELS / 2;      // pairs of channels of a warp
constexpr bool WAITS_IN_REGISTERS = WARP == 64;
constexpr u32 BUFFERS = WAITS_IN_REGISTERS ? 1 : 2;
// Sums over groups of states that lanes leave to shared memory. Of eight groups, two lanes add theirs: on an H200 the
// backward pass takes 8 % longer if none do, 0 to 3 % if four do, and 2 % if all eight do.
constexpr u32 SUM_GROUPS = WAITS_IN_REGISTERS ? 1 : 4;
// Padded against bank conflicts.
constexpr u32 STEPS_ROW = BLOCK_CHANNELS * 2 + BLOCK_CHANNELS / 16 * 4;
constexpr u32 WARP_SUMS = SUM_GROUPS * PAIRS + (WAITS_IN_REGISTERS ? 0 : 4);
constexpr u32 SUMS_ROW = WARPS * WARP_SUMS + (WAITS_IN_REGISTERS ? 0 : 1);
constexpr u32 DBC_ROW = WARP == 32 ? 48 : 36;

enum Array { DELTA, DOUT, Z, Y, ARRAYS };

// A thread's part of a tile as loaded from memory.
struct Incoming {
    HeldColumns<COLUMNS> raw[ARRAYS], x;
    float4 bc;
    float states[4];
    u32 start_bits;
};

struct BackwardShared {
    float steps[TILE * STEPS_ROW];            // (delta, delta, delta x, delta x) of two channels
    float dy[TILE][BLOCK_CHANNELS];
    float bc[BUFFERS][TILE][32];              // [8][B2 C2]
    float4 sums[TILE][SUMS_ROW];              // (q . A, g . B) of two channels
    float dbc[WARPS][TILE * DBC_ROW + 16];    // [8][dB2 dC2]
#if WARP == 32
    float4 states[2][SCAN_THREADS];
#endif
    float skip[BLOCK_CHANNELS], bias[BLOCK_CHANNELS];
#if WARP == 32
    activation x[2][TILE][BLOCK_CHANNELS];
    activation raw[ARRAYS][TILE][BLOCK_CHANNELS];
#endif
    // The first word is next_work_item's, the next two are the start bits of two tiles. They come last, so that the arrays
    // before them begin at multiples of 128 bytes.
    u32 words[4];
};
// The size that the launcher requests.
static_assert(sizeof(BackwardShared) ==
                  (WARP == 64 ? 17808 : 48400 + (ACTIVATION_BF16 ? 6144 : 12288)),
              "shared bytes of backward");

// The place of (delta, delta, delta x, delta x) of channel `channel`, an even one, and the next.
DEVICE u32 steps_at(u32 position, u32 channel) {
    return position * STEPS_ROW + channel * 2 + channel / 16 * 4;
}

// The place of a lane: states 2 group and 2 group + 1 of channels `channel` and `channel + 1`.
struct Walker {
    u32 warp, group, pair, channel;
};
DEVICE Walker walker() {
    const u32 lane = threadIdx.x % WARP;
    Walker walker;
    walker.warp = threadIdx.x / WARP;
    if (WAITS_IN_REGISTERS) {
        // Most values are exchanged with the lanes that differ in bits 0, 1 and 3, which AMD's arithmetic units read
        // directly.
        walker.group = (lane >> 1 & 1) | (lane >> 2 & 1) << 1 | (lane >> 5) << 2;
        walker.pair = (lane >> 4 & 1) | (lane >> 3 & 1) << 1 | (lane & 1) << 2;
    } else {
        walker.group = (lane & 1) | (lane >> 2 & 3) << 1;
        walker.pair = (lane >> 1 & 1) | (lane >> 4) << 1;
    }
    walker.channel = walker.warp * WARP_CHANNELS + 2 * walker.pair;
    return walker;
}
// The mask that changes bit `bit` of a lane's pair.
DEVICE constexpr u32 pair_mask(u32 bit) {
    if (WAITS_IN_REGISTERS) return bit == 4 ? 1 : bit == 2 ? 8 : 16;
    return bit == 1 ? 2 : bit * 8;
}

// The mask that changes bit `bit` of a lane's group.
DEVICE constexpr u32 group_mask(u32 bit) {
    if (WAITS_IN_REGISTERS) return bit == 4 ? 32 : bit * 2;
    return bit == 1 ? 1 : bit * 2;
}

// Adds COUNT sums of two lanes that differ in `mask`, of which each lane keeps half; `upper` keeps the upper half.
template <u32 COUNT>
DEVICE void halve(float* values, bool upper, u32 mask) {
#pragma unroll
    for (u32 i = 0; i < COUNT / 2; i++) {
        const float given = upper ? values[i] : values[i + COUNT / 2];
        const float kept = upper ? values[i + COUNT / 2] : values[i];
        values[i] = kept + shuffle_xor(given, mask);
    }
}
// Sums over the lanes of a warp that differ in their pair, each lane keeping COUNT / PAIRS of the
// COUNT sums: those from `pair * COUNT / PAIRS`.
template <u32 COUNT, u32 BIT>
struct ReduceScatter {
    DEVICE void run(float* values, u32 pair) {
        halve<COUNT>(values, pair & BIT, pair_mask(BIT));
        ReduceScatter<COUNT / 2, BIT / 2>::run(values, pair);
    }
};
template <u32 COUNT>
struct ReduceScatter<COUNT, 0> {
    DEVICE void run(float*, u32) {}
};

// Arrays of 4 are [channel of the pair][state of the group], as float4 of steps and (B B C C) are read: the values of
// each channel and each state.
DEVICE float of_channel(u32 j, float first, float second) { return j < 2 ? first : second; }
DEVICE float of_state(u32 j, float first, float second) { return j & 1 ? second : first; }

// h at `position` of a tile from that of the position before, and its decay; `start_bits`: of documents in the tile.
DEVICE void step(float (&h)[4], float (&decay)[4], const float (&before)[4],
                 const float (&rate)[4], const float* steps, const float* bc, u32 position, u32 start_bits) {
    const float4 d = load4(steps + position * STEPS_ROW);
    const float2 b = *reinterpret_cast<const float2*>(bc + position * 32);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        decay[j] = exp2_fast(of_channel(j, d.x, d.y) * rate[j]);
        h[j] = fmaf(decay[j], unless_begins(start_bits, position, before[j]), of_channel(j, d.z, d.w) * of_state(j, b.x, b.y));
    }
}

// The values that a lane carries from tile to tile.
struct Carried {
    float rate[4];
    // a_next g_next.
    float future[4];
    float da[4];
};

// The place of a pair of channels in a warp's part of a row of sums: moved, so that writing and reading meet no bank
// conflict.
DEVICE u32 place_of_pair(u32 pair, u32 channel) { return WAITS_IN_REGISTERS ? pair : pair ^ (channel / 16 & 1); }

// For GROUP positions from `first` on: lanes add the sums of neighbouring groups of states, each keeping some of the
// positions, as far as SUM_GROUPS says; take_sums adds the rest, in the same order.
DEVICE void store_sums(BackwardShared& shared, const Walker& walker, u32 first, const float4 (&sums)[GROUP]) {
    static_assert(GROUP == 4, "the bits of a group choose a position, and a channel where they are left");
    float all[GROUP * 4];
#pragma unroll
    for (u32 k = 0; k < GROUP; k++) unpack(all + k * 4, sums[k]);
    const u32 channel = walker.channel, at = walker.warp * WARP_SUMS + place_of_pair(walker.pair, channel);
    halve<GROUP * 4>(all, walker.group & 1, group_mask(1));
    const u32 position = first + (walker.group & 1) * 2;
    if (WAITS_IN_REGISTERS) {
        halve<8>(all, walker.group & 2, group_mask(2));
        halve<4>(all, walker.group & 4, group_mask(4));
        float2* both = reinterpret_cast<float2*>(shared.sums[position + (walker.group >> 1 & 1)] + at);
        both[walker.group >> 2] = make_float2(all[0], all[1]);
        return;
    }
#pragma unroll
    for (u32 k = 0; k < GROUP / 2; k++) {
        const float* kept = all + k * 4;
        shared.sums[position + k][at + (walker.group >> 1) * PAIRS] = make_float4(kept[0], kept[1], kept[2], kept[3]);
    }
}
// The sums of channels `column` and `column + 1`, an even channel, over all states.
DEVICE float4 take_sums(const BackwardShared& shared, u32 position, u32 column) {
    const float4* row = shared.sums[position] + column / WARP_CHANNELS * WARP_SUMS;
    const u32 pair = place_of_pair(column % WARP_CHANNELS / 2, column);
    float4 part[SUM_GROUPS];
#pragma unroll
    for (u32 group = 0; group < SUM_GROUPS; group++) part[group] = row[group * PAIRS + pair];
#pragma unroll
    for (u32 width = 1; width < SUM_GROUPS; width *= 2) {
#pragma unroll
        for (u32 group = 0; group < SUM_GROUPS; group += 2 * width) {
            part[group].x += part[group + width].x;
            part[group].y += part[group + width].y;
            part[group].z += part[group + width].z;
            part[group].w += part[group + width].w;
        }
    }
    return part[0];
}

}  // namespace
