// Common parts of attention by groups of warps (attention_forward_groups.h): items of work, and the shared memory of a block.
#pragma once
#include "group_rows.h"

namespace groups {

constexpr u32 COMPUTING = 2;
constexpr u32 THREADS = (1 + COMPUTING) * GROUP_THREADS;
constexpr u32 ROWS = COMPUTING * GROUP_ROWS;
constexpr u32 KEYS = 128, KEY_TILES = KEYS / TILE;
constexpr u32 CHECKING_WARPS = GROUP_WARPS - 1;
// Registers of a thread in each kind of group: two computing groups leave this few to the group that copies.
constexpr u32 COPYING_REGISTERS = 40, COMPUTING_REGISTERS = 232;
// Named barriers: one for each computing group, which waits there until the group before it has started its products; one for the copying
// threads; and one for each computing group around the writing of its slope.
constexpr u32 SCHEDULER = 1, COPYING = SCHEDULER + COMPUTING, SLOPE = COPYING + 1;

struct Arguments {
    TileMap q_map, k_map, v_map;  // where the copy engine reads tiles
    AttentionForward attention;   // its tiles are of ROWS queries
    u32* taken;                   // items taken so far: 0 before a launch and after it
    u32 section;                  // (sample, head) pairs whose keys and values are read together
    u32 pairs;                    // all (sample, head) pairs
    u32 by_engine;                // whether the copy engine brings tiles
    u32 unused[3];
};

// ROWS queries of a head, and the keys that they attend to.
struct alignas(16) Item {
    u32 head, sample, tile;
    u32 begin, end;           // keys that some query attends to, from the beginning of a tile; empty where there is no item
    u32 all_first, all_last;  // keys that all attend to
    u32 unused;

    __device__ __forceinline__ bool is_unmasked(u32 first) const {
        return first >= all_first && first + KEYS - 1 <= all_last;
    }
};

// The factors of a product that adds `slope` j to the score of each key j of a tile, before scores are scaled: `slope` is a head's divided by
// the scale. Terms 0, 1 and 2 of the left factor are three parts of it in bf16, whose sum is the slope to the bit (but for the smallest floats),
// the same for all rows; those of the right factor are j. Other terms are 0. So each product of two terms is exact.
struct SlopeFactor {
    // Eight rows of terms 0 to 7, then of terms 8 to 15: the instruction reads them for every eight rows. Chunks are not permuted.
    static constexpr u32 ROWS = 8, TERMS = 8, ELEMENTS = 2 * ROWS * TERMS;

    activation* start;

    __device__ __forceinline__ void clear(u32 threads) const {
        for (u32 i = threadIdx.x; i < ELEMENTS; i += threads) start[i] = rounded(0.0f);
    }
    // Writes a slope, by a warp; the group must meet before it multiplies.
    __device__ __forceinline__ void set(float slope) const {
        const u32 row = lane_of_warp();
        if (row < ROWS) {
            float rest = slope;
#pragma unroll
            for (u32 term = 0; term < 3; term++) {
                const activation part = rounded(rest);
                start[row * TERMS + term] = part;
                rest -= widen(part);
            }
        }
        show_to_products();
    }
};
struct KeyNumbers {
    // The instruction reads these as terms 8 to 15 too, for which the left factor has zeros. Chunks are not permuted.
    static constexpr u32 TERMS = 8, ELEMENTS = KEYS * TERMS;
    static_assert(KEYS <= 256, "bf16 has whole numbers up to 256");

    activation* start;

    __device__ __forceinline__ void fill(u32 threads) const {
        for (u32 i = threadIdx.x; i < ELEMENTS; i += threads) {
            start[i] = rounded(i % TERMS < 3 ? static_cast<float>(i / TERMS) : 0.0f);
        }
    }

    // Starts scores += slope j.
    __device__ __forceinline__ void multiply(Accumulator (&scores)[KEY_TILES], const SlopeFactor& slope) const {
#if ON_NVIDIA
        constexpr u32 EIGHT_ROWS = 8 * TERMS * sizeof(activation);
        multiply_group<LeftStored::BY_ROW, Stored::BY_COLUMN>(scores, unpermuted_at(slope.start, EIGHT_ROWS, 0),
                                                              unpermuted_at(start, 0, EIGHT_ROWS), 1);
#else
        for (u32 n = 0; n < KEY_TILES; n++) {
            for (u32 i = 0; i < HELD; i++) {
                const activation* const left = slope.start + tile_row(row_slot(i)) % SlopeFactor::ROWS * TERMS;
                const activation* const right = start + (n * TILE + tile_column(i)) * TERMS;
                for (u32 term = 0; term < TILE; term++) {
                    const u32 of_half = term / TERMS * SlopeFactor::ROWS * TERMS + term % TERMS;
                    scores[n].at[i] = fmaf(widen(left[of_half]), widen(right[term % TERMS]), scores[n].at[i]);
                }
            }
        }
#endif
    }
};

template <u32 P>
struct Memory {
    static constexpr u32 PANELS = P / PANEL_COLUMNS;
    // A tile of values is free later than one of keys, by a tile's softmax: another buffer leaves its copy as much time.
    static constexpr u32 KEY_STAGES = P == 64 ? 4 : 2, VALUE_STAGES = P == 64 ? 4 : 3;
    static constexpr u32 ROW_BYTES = PANEL_COLUMNS * sizeof(activation);
    static constexpr u32 QUERY_BYTES = ROWS * P * sizeof(activation);
    static constexpr u32 TILE_BYTES = KEYS * P * sizeof(activation);

    struct State {
        Gate queries_full, queries_empty;  // also guard the item's description
        Gate keys_full[KEY_STAGES], keys_empty[KEY_STAGES];
        // Values are clean once numbers that are not finite have been cleared, in tiles that some row does not fully attend to.
        Gate values_full[VALUE_STAGES], values_clean[VALUE_STAGES], values_empty[VALUE_STAGES];
        u32 cleared[VALUE_STAGES];  // the tile, counted from 1, in which a number was not finite
        Item item;
        alignas(16) activation slopes[COMPUTING][SlopeFactor::ELEMENTS];
        activation key_numbers[KeyNumbers::ELEMENTS];
    };
    // In front of the results, not behind them: compute-sanitizer takes a factor of a product for packed, and asks for twice the memory of
    // the keys' numbers.
    static constexpr u32 STATE_AT = QUERY_BYTES + (KEY_STAGES + VALUE_STAGES) * TILE_BYTES;
    static constexpr u32 RESULTS_AT =
        STATE_AT + (sizeof(State) + PANEL_ALIGNMENT - 1) / PANEL_ALIGNMENT * PANEL_ALIGNMENT;
    static constexpr u32 BYTES = RESULTS_AT + QUERY_BYTES;

    activation* start;

    __device__ __forceinline__ State& state() const {
        return *reinterpret_cast<State*>(start + STATE_AT / sizeof(activation));
    }
    __device__ __forceinline__ activation* queries(u32 panel) const {
        return start + panel * ROWS * PANEL_COLUMNS;
    }
    __device__ __forceinline__ activation* keys(u32 stage) const {
        return start + (QUERY_BYTES + stage * TILE_BYTES) / sizeof(activation);
    }
    __device__ __forceinline__ activation* values(u32 stage) const { return keys(KEY_STAGES + stage); }
    __device__ __forceinline__ KeyNumbers key_numbers() const { return {state().key_numbers}; }
    __device__ __forceinline__ SlopeFactor slope(u32 group) const { return {state().slopes[group]}; }
    // Panels of TILE rows, where a computing warp (0 to 7) places its results on their way to global memory.
    __device__ __forceinline__ activation* results(u32 warp) const {
        return start + RESULTS_AT / sizeof(activation) + warp * TILE * P;
    }
};

// --- items ------------------------------------------------------------------------------------------------

DEVICE u32 count_items(const Arguments& arguments) {
    return arguments.pairs * arguments.attention.inputs.tiles;
}

// Takes the next item, by one thread. The last block to find none resets the count.
DEVICE u32 take_item(const Arguments& arguments) {
    const u32 all = count_items(arguments);
    const u32 number = take_number(arguments.taken);
    if (number == all + gridDim.x - 1) *arguments.taken = 0;
    return number;
}

// Item `number`, by a whole warp. The longer half of the walks of each section comes first, while the cache holds the section's keys and
// values; then the shorter half of all walks, so that blocks end together.
DEVICE Item item_of(const Arguments& arguments, u32 number) {
    const AttentionInputs& inputs = arguments.attention.inputs;
    const u32 pairs = arguments.pairs, longer = inputs.tiles - inputs.tiles / 2;
    Item item = {};
    if (number >= count_items(arguments)) return item;
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
    item.tile = inputs.tiles - 1 - rank;
    const u32 past = inputs.past ? inputs.past[item.sample] : 0;
    const u32 first = item.tile * ROWS, last = min(first + ROWS, inputs.positions) - 1;
    CommonMaskRange range;
    if (inputs.starts) {
        range = common_mask_range(inputs, item.sample, past, first, ROWS);
    } else {
        const MaskRange of_first = mask_range_of(inputs, item.sample, first, past);
        const MaskRange of_last = mask_range_of(inputs, item.sample, last, past);
        range = {{of_last.first, of_first.last}, {of_first.first, of_last.last}};
    }
    item.end = min(range.some.last + 1, inputs.keys);
    item.begin = min(range.some.first, item.end - 1) / KEYS * KEYS;
    item.all_first = range.all.first;
    item.all_last = range.all.last;
    return item;
}

}  // namespace groups
