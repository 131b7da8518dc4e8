// Common parts of the attention gradients by groups of warps (attention_backward_groups_kernels.h): items of work, and the shared memory of
// a block.
#pragma once
#include "group_rows.h"

namespace groups {

constexpr u32 COMPUTING = 2;
constexpr u32 BLOCK_THREADS = (1 + COMPUTING) * GROUP_THREADS;
constexpr u32 KEY_ROWS = COMPUTING * GROUP_ROWS;
// Registers of a thread in each kind of group: two computing groups leave this few to the group that copies.
constexpr u32 COPYING_REGISTERS = 40, COMPUTING_REGISTERS = 232;
// The named barrier of the computing groups.
constexpr u32 COMPUTING_MEET = 1;
// The warps that do not compute: the first brings tiles; each of the others adds the sums of every ADDING-th tile to dq, since an addition
// ends long after it has begun.
constexpr u32 ADDING_WARP = 1, ADDING = 2;

struct Arguments {
    TileMap q_map, k_map, v_map, dout_map;  // where the copy engine reads tiles
    activation* dq;                         // [b t, h p], as dk and dv
    activation* dk;
    activation* dv;
    float* dq_sums;  // [b h, query tiles, COMPUTING, group_rows_of(P) x 64], in the order of an accumulator's lanes
    u32* added;      // [b h, query tiles]: how many tiles of keys have been added to the sums
    const activation* dout;
    const float* sums;       // [b h, padded t]: as Preparation leaves them
    const float* deltas;     // [b h, padded t]
    const u32* firsts;       // [b, padded t]: the first key that each query attends to
    const u32* tile_firsts;  // [b, query tiles, 2], only with starts: the least and the greatest first key of a tile
    AttentionInputs inputs;  // its tiles are of KEY_ROWS keys
    u64 gradient_stride;
    u64 dout_stride;
    u32* taken;  // items taken so far: 0 before a launch
    u32 padded;  // t rounded up to whole tiles of keys
    u32 query_tiles;
    u32 section;  // (sample, head) pairs that are walked together
    u32 pairs;    // all (sample, head) pairs
    u32 by_engine;
    u32 wide_gradients;  // whether rows of gradients are stored 16 bytes at a time
};

// KEY_ROWS keys of a head.
struct alignas(16) Item {
    u32 head, sample;
    u32 first_key;  // NO_POSITION where there is no item
    float slope;    // of biases, in units of log2
};

// A tile of queries that the keys of an item walk.
struct alignas(16) Step {
    u32 first_query;
    u32 traits;
    u32 tile;  // of all heads
    u32 rank;  // how many tiles of keys are added to the sums of its dq before this one

    static constexpr u32 IS_WHOLE = 1;  // all its queries attend to all keys of the item
    static constexpr u32 IS_LAST = 2;   // the last tile of the item
    static constexpr u32 IS_ODD = 4;    // the item has an odd number among those of the block
};

// Sums of dq that are ready to be added, as their step describes.
struct alignas(8) Addition {
    u32 tile;
    u32 rank;  // NO_POSITION: the end
};

// A group announces an addition before it knows that the one of two tiles earlier has been read, so more places are needed than
// buffers of sums.
constexpr u32 ANNOUNCED = 4;

template <u32 P>
struct Memory {
    static constexpr u32 QUERIES = P == 64 ? 128 : 64;
    static constexpr u32 PANELS = P / PANEL_COLUMNS, QUERY_PANELS = QUERIES / PANEL_COLUMNS;
    static constexpr u32 QUERY_STAGES = 2, DOUT_STAGES = 2;
    static constexpr u32 OWN_BYTES = KEY_ROWS * P * sizeof(activation);
    static constexpr u32 TILE_BYTES = QUERIES * P * sizeof(activation);
    static constexpr u32 DS_BYTES = KEY_ROWS * QUERIES * sizeof(activation);
    // The part of the sums of dq that a group computes: 64 columns of all queries, or all columns of 64 queries.
    static constexpr u32 GROUP_SUMS = GROUP_ROWS * PANEL_COLUMNS, TILE_SUMS = COMPUTING * GROUP_SUMS;

    struct State {
        float sums[QUERY_STAGES][QUERIES];
        float deltas[DOUT_STAGES][QUERIES];
        Step steps[QUERY_STAGES];
        Item item;
        Addition additions[ANNOUNCED];
        Gate keys_full, keys_empty;  // also guard the item's description
        Gate values_full, values_empty;
        Gate queries_full[QUERY_STAGES], queries_empty[QUERY_STAGES];
        Gate douts_full[DOUT_STAGES], douts_empty[DOUT_STAGES];
        Gate additions_full[ADDING], additions_empty[ADDING];
    };
    static constexpr u32 QUERIES_AT = 2 * OWN_BYTES;
    static constexpr u32 DOUTS_AT = QUERIES_AT + QUERY_STAGES * TILE_BYTES;
    static constexpr u32 DS_AT = DOUTS_AT + DOUT_STAGES * TILE_BYTES;
    static constexpr u32 ADDITIONS_AT = DS_AT + 2 * DS_BYTES;
    static constexpr u32 STATE_AT = ADDITIONS_AT + ADDING * TILE_SUMS * sizeof(float);
    static constexpr u32 BYTES = STATE_AT + sizeof(State);

    activation* start;

    __device__ __forceinline__ activation* at(u32 bytes) const { return start + bytes / sizeof(activation); }
    __device__ __forceinline__ State& state() const { return *reinterpret_cast<State*>(at(STATE_AT)); }
    __device__ __forceinline__ activation* keys() const { return start; }
    // At the end of an item each computing warp places its gradients here on their way to global memory, over its own values.
    __device__ __forceinline__ activation* values() const { return at(OWN_BYTES); }
    __device__ __forceinline__ activation* queries(u32 stage) const { return at(QUERIES_AT + stage * TILE_BYTES); }
    __device__ __forceinline__ activation* douts(u32 stage) const { return at(DOUTS_AT + stage * TILE_BYTES); }
    // ds, a row for each key: two tiles, used alternately, so that one is written while the other is multiplied.
    __device__ __forceinline__ activation* ds(u32 slot) const { return at(DS_AT + slot * DS_BYTES); }
    // Sums of dq of both groups: two tiles, used alternately.
    __device__ __forceinline__ float* addition(u32 slot) const {
        return reinterpret_cast<float*>(at(ADDITIONS_AT)) + slot * TILE_SUMS;
    }
};

// --- items ------------------------------------------------------------------------------------------------

// Item `number`. The longer half of the walks of each section comes first, while the cache holds the section's queries and sums of dq; then
// the shorter half of all walks, so that blocks end together. The items of a head are in order of rising keys: the items that an item waits
// for (add_sums) are taken before it.
DEVICE Item item_of(const Arguments& arguments, u32 number) {
    const AttentionInputs& inputs = arguments.inputs;
    const u32 pairs = arguments.pairs, longer = inputs.tiles - inputs.tiles / 2;
    Item item = {0, 0, NO_POSITION, 0.0f};
    if (number >= pairs * inputs.tiles) return item;
    u32 pair, rank;
    if (number < longer * pairs) {
        const u32 of_section = arguments.section * longer;
        const u32 first = number / of_section * arguments.section;
        const u32 here = min(arguments.section, pairs - first);
        pair = first + number % of_section % here;
        rank = number % of_section / here;
    } else {
        const u32 rest = number - longer * pairs;
        pair = rest % pairs;
        rank = longer + rest / pairs;
    }
    item.head = pair % inputs.heads;
    item.sample = pair / inputs.heads;
    item.first_key = rank * KEY_ROWS;
    if (inputs.slopes) item.slope = inputs.slopes[item.head] * LOG2_E;
    return item;
}

// The tiles of queries that an item's keys walk, from the last to the first: all tiles that attend to some of the keys.
template <u32 P>
struct Walk {
    static constexpr u32 QUERIES = Memory<P>::QUERIES;

    u32 first_key, last_key;
    u32 first, end;  // tiles
    u32 tile_of_all;  // the number, among all heads, of the sample's first tile
    const u32* tile_firsts;

    __device__ __forceinline__ Walk(const Arguments& arguments, const Item& item) {
        const AttentionInputs& inputs = arguments.inputs;
        first_key = item.first_key;
        last_key = first_key + KEY_ROWS - 1;
        first = first_key / QUERIES;
        tile_of_all = (item.sample * inputs.heads + item.head) * arguments.query_tiles;
        // The last query that attends to the last key is window - 1 positions later.
        const u32 last_query = inputs.positions - 1;
        end = (inputs.window < inputs.positions ? min(last_query, last_key + inputs.window - 1) : last_query) / QUERIES + 1;
        tile_firsts = inputs.starts ? arguments.tile_firsts + static_cast<u64>(item.sample) * arguments.query_tiles * 2 : nullptr;
    }

    // The last tile before `before` that attends to some key; NO_POSITION where there is none. Every lane of a warp takes part.
    __device__ __forceinline__ u32 last_before(u32 before) const {
        if (!tile_firsts) return before > first ? before - 1 : NO_POSITION;
#pragma unroll 1
        for (; before > first; before -= min(before, static_cast<u32>(WARP))) {
            const u32 tile = before - 1 - lane_of_warp();
            const bool attends = tile < before && tile >= first && tile_firsts[2 * tile] <= last_key;
            const u32 found = warp_greatest(attends ? tile + 1 : 0);
            if (found > 0) return found - 1;
        }
        return NO_POSITION;
    }

    __device__ __forceinline__ Step step(const AttentionInputs& inputs, u32 tile) const {
        const u32 first_query = tile * QUERIES, end_query = first_query + QUERIES;
        u32 least, greatest;
        if (tile_firsts) {
            least = tile_firsts[2 * tile];
            greatest = tile_firsts[2 * tile + 1];
        } else {
            least = mask_range_of(inputs, 0, first_query, 0).first;
            greatest = mask_range_of(inputs, 0, min(end_query, inputs.positions) - 1, 0).first;
        }
        const bool whole = first_query >= last_key && greatest <= first_key && end_query <= inputs.positions;
        return {first_query, whole ? Step::IS_WHOLE : 0, tile_of_all + tile, first_key / KEY_ROWS - least / KEY_ROWS};
    }
};

}  // namespace groups
