// The gradients of attention (defined in attention_backward.cu) by groups of warps that multiply together (group_product.h): for bf16 and
// heads of 33 to 128 columns.
//
// One walk: an item of work is 128 keys of a head, which walk all tiles of queries that attend to them. The item owns its rows of dk and
// dv. The sums of dq are fp32 in global memory: items add to them one after the other by rising keys, each after the item before it has
// published its addition (attention_backward_groups_copy.h). So each tile of queries has one order of addition, whichever block takes which
// item. Probabilities and ds are rounded to activations for their products, as in attention_backward.cu.
//
// A first kernel computes the deltas of all rows; a last one rounds dq from its sums.
#pragma once
#include "group_product.h"
#include "attention_backward_groups.h"
#include "attention_backward_groups_copy.h"
#include "attention_backward_groups_walk.h"

namespace groups {

constexpr u32 PREPARING_THREADS = 128, PREPARED_ROWS = 32;

struct Preparation {
    float* sums;    // [b h, padded t]: log_sum_exp in units of log2, with the queries' part of the biases
    float* deltas;  // [b h, padded t]
    u32* added;     // [b h, query tiles]
    u32* firsts;    // [b, padded t]: the first key that each query attends to
    u32* taken;     // one number
    const activation* dout;
    const activation* out;
    const float* log_sum_exp;  // [b, h, t]
    AttentionInputs inputs;    // wide: whether rows of dout and out are
    u64 dout_stride;
    u64 out_stride;
    u32 padded;
    u32 tile_queries;
};

// Half a warp for each head of each row, rows past the last included: their probabilities become 0. A lane has the same eight columns
// whether rows are aligned or not.
DEVICE void prepare(const Preparation& arguments) {
    const AttentionInputs& inputs = arguments.inputs;
    const u32 blocks_of_pair = arguments.padded / PREPARED_ROWS;
    const u32 pair = blockIdx.x / blocks_of_pair, first = blockIdx.x % blocks_of_pair * PREPARED_ROWS;
    const u32 tiles = arguments.padded / arguments.tile_queries;
    if (threadIdx.x == 0 && first % arguments.tile_queries == 0) {
        arguments.added[static_cast<u64>(pair) * tiles + first / arguments.tile_queries] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *arguments.taken = 0;
    if (threadIdx.x < PREPARED_ROWS && pair % inputs.heads == 0) {
        const u32 sample = pair / inputs.heads, query = first + threadIdx.x;
        arguments.firsts[static_cast<u64>(sample) * arguments.padded + query] =
            mask_range_of(inputs, sample, min(query, inputs.positions - 1), 0).first;
    }
    const u32 lane = threadIdx.x % 16, column = lane * 8;
    const u32 first_column = pair % inputs.heads * inputs.width + column;
#pragma unroll
    for (u32 i = 0; i < PREPARED_ROWS; i += PREPARING_THREADS / 16) {
        const u32 position = first + i + threadIdx.x / 16;
        const bool inside = position < inputs.positions;
        float delta = 0.0f;
        if (inside && column < inputs.width) {
            const u64 row = static_cast<u64>(pair / inputs.heads) * inputs.positions + position;
            const activation* const dout = arguments.dout + row * arguments.dout_stride + first_column - column;
            const activation* const out = arguments.out + row * arguments.out_stride + first_column - column;
            const uint4 x = load_chunk(dout, column, inputs.width, inputs.wide != 0);
            const uint4 y = load_chunk(out, column, inputs.width, inputs.wide != 0);
            const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                delta = fmaf(first_of(xs[j]), first_of(ys[j]), delta);
                delta = fmaf(second_of(xs[j]), second_of(ys[j]), delta);
            }
        }
#pragma unroll
        for (u32 mask = 8; mask > 0; mask /= 2) delta += shuffle_xor(delta, mask);
        if (lane != 0) continue;
        float sum = __uint_as_float(0x7f800000u);
        if (inside) {
            sum = arguments.log_sum_exp[static_cast<u64>(pair) * inputs.positions + position] * LOG2_E;
            // Biases are relative to the tile's first query; the walk adds the part of the keys.
            if (inputs.slopes) {
                const float distance = static_cast<float>(position % arguments.tile_queries);
                sum = fmaf(inputs.slopes[pair % inputs.heads] * LOG2_E, distance, sum);
            }
            // If this is not a number, every result that the row contributes to must show it.
            if (!is_finite(delta)) sum = delta - delta;
        }
        const u64 place = static_cast<u64>(pair) * arguments.padded + position;
        arguments.sums[place] = sum;
        arguments.deltas[place] = delta;
    }
}

struct TileFirsts {
    u32* tile_firsts;  // [b, tiles, 2]
    const u32* firsts;
    u32 tile_queries;
    u32 unused;
};

// The least and the greatest of the first keys of a tile's queries, by a warp.
DEVICE void find_tile_firsts(const TileFirsts& arguments) {
    u32 least = NO_POSITION, greatest = 0;
    for (u32 i = threadIdx.x; i < arguments.tile_queries; i += WARP) {
        const u32 first = arguments.firsts[blockIdx.x * arguments.tile_queries + i];
        least = min(least, first);
        greatest = max(greatest, first);
    }
    least = warp_least(least);
    greatest = warp_greatest(greatest);
    if (threadIdx.x == 0) {
        arguments.tile_firsts[2 * blockIdx.x] = least;
        arguments.tile_firsts[2 * blockIdx.x + 1] = greatest;
    }
}

// dq of a tile of queries from its sums, a thread for each of an accumulator's lanes; rows are assembled in shared memory.
template <u32 P>
DEVICE void round_dq(const Arguments& arguments) {
    typedef Memory<P> M;
    const AttentionInputs& inputs = arguments.inputs;
    SHARED(activation, rows);
    const u32 pair = blockIdx.x / arguments.query_tiles, tile = blockIdx.x % arguments.query_tiles;
    const u32 group = threadIdx.x / GROUP_THREADS;
    const u64 place = static_cast<u64>(blockIdx.x) * COMPUTING + group;
    const float4* const from = reinterpret_cast<const float4*>(arguments.dq_sums + place * M::GROUP_SUMS) +
                               threadIdx.x % GROUP_THREADS;
    // The group's share: half the columns, or half the queries.
    const u32 first_row = (M::PANELS == 1 ? group * GROUP_ROWS : 0) + threadIdx.x / WARP % GROUP_WARPS * TILE;
    const Panel panel(rows + (M::PANELS == 1 ? 0 : group * M::QUERIES * PANEL_COLUMNS));
#pragma unroll
    for (u32 part = 0; part < PANEL_COLUMNS / 8; part++) {
        const float4 four = from[part * GROUP_THREADS];
        const float at[4] = {four.x, four.y, four.z, four.w};
        const u32 column = part / 2 * TILE + tile_column(part % 2 * 4);
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
            const u32 both = bf16_pair(at[2 * slot] * inputs.scale, at[2 * slot + 1] * inputs.scale);
            *reinterpret_cast<u32*>(panel.at(first_row + tile_row(slot), column)) = both;
        }
    }
    __syncthreads();
    const u64 first = static_cast<u64>(pair / inputs.heads) * inputs.positions + tile * M::QUERIES;
    store_panels<P, M::QUERIES, COMPUTING * GROUP_THREADS>(
        arguments.dq + first * arguments.gradient_stride + pair % inputs.heads * inputs.width, arguments.gradient_stride,
        rows, 0, min(M::QUERIES, inputs.positions - min(inputs.positions, tile * M::QUERIES)), inputs.width,
        arguments.wide_gradients != 0, threadIdx.x);
}

}  // namespace groups

KERNEL(attention_backward_prepare, groups::PREPARING_THREADS, 1, groups::Preparation) {
    groups::prepare(arguments);
}
KERNEL(attention_backward_tile_firsts, WARP, 1, groups::TileFirsts) { groups::find_tile_firsts(arguments); }

#define BACKWARD_GROUPS(P)                                                                              \
    KERNEL_OF_MAPS(attention_backward_groups_##P, groups::BLOCK_THREADS, 1, groups::Arguments) {        \
        groups::backward<P>(arguments);                                                                 \
    }                                                                                                   \
    SHARED_BYTES(attention_backward_groups_##P, groups::Memory<P>::BYTES);                              \
    KERNEL(attention_backward_round_dq_##P, groups::COMPUTING * GROUP_THREADS, 4, groups::Arguments) {  \
        groups::round_dq<P>(arguments);                                                                 \
    }                                                                                                   \
    SHARED_BYTES(attention_backward_round_dq_##P, groups::Memory<P>::TILE_BYTES);
#if HEAD_WIDTH == 64
BACKWARD_GROUPS(64)
#else
BACKWARD_GROUPS(128)
#endif
