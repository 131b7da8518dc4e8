// Products in the stated order (ordered_product.h) of more than a few rows, by groups of warps that multiply together (group_product.h):
// 64 rows of `a` a group, and the same columns of `out` for all groups of a block.
//
// One warp of the block brings both factors with the copy engine, 64 terms at a time, into a ring of stages. Blocks
// take one item of work after the other, so that the next item's terms are copied while the results of the last one are
// stored. A step of an instruction is 16 consecutive terms, whose order inside the step is left to the hardware: this
// instruction gives the bits of that of one warp.
#pragma once
#include "group_product.h"

namespace ordered_groups {

constexpr u32 SEGMENT_STAGES = SEGMENT / STEP_TERMS;
static_assert(STEP_TERMS == PANEL_COLUMNS, "a stage holds a panel of each factor");

struct Arguments {
    TileMap a_map, weight_map;  // tiles of a block's rows and of its columns, 64 terms each
    OrderedProduct product;
    u32 items;          // of all blocks: results of a block's size, times parts of the segments
    u32 column_blocks;  // of results
    u32 section;        // blocks of rows that read the same columns at about the same time
    u32 parts;          // number of parts that the segments are divided into
};

// What a block does with the sums of its segments.
enum class SegmentSums {
    ADDED,  // computes all segments, and adds them
    APART,  // leaves each in segment_sums
};

enum class Output {
    OVERWRITE,
    ADD,
};

// Results of a block's size.
struct Item {
    u32 row_block, column_block;
    u32 first_segment, end_segment;
};

DEVICE Item item_of(const Arguments& arguments, u32 number) {
    const OrderedProduct& product = arguments.product;
    Item item = {0, number, 0, product.segments};
    // The divisions take longer than all other work before the first copy.
    if (arguments.parts > 1) {
        const u32 part = number % arguments.parts;
        item.column_block = number / arguments.parts;
        item.first_segment = part * product.segments / arguments.parts;
        item.end_segment = (part + 1) * product.segments / arguments.parts;
    }
    if (product.row_blocks > 1) {
        // Sections of rows: their blocks stay in the cache that all multiprocessors share, while all columns are read
        // once.
        const u32 of_section = arguments.section * arguments.column_blocks;
        const u32 first = item.column_block / of_section * arguments.section;
        const u32 here = min(arguments.section, product.row_blocks - first);
        const u32 inside = item.column_block % of_section;
        item.row_block = first + inside % here;
        item.column_block = inside / here;
    }
    return item;
}

// The place of a stage in the ring, and the parity of its gates.
template <u32 STAGES>
struct Place {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        stage++;
        if (stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
};

// A stage holds A_ROWS rows of a block. Where a block has no more than these, the products of the other rows read the
// memory that follows, and are not stored.
template <u32 GROUPS_, u32 TILES, u32 STAGES_, u32 A_ROWS = GROUPS_ * GROUP_ROWS>
struct Memory {
    static constexpr u32 GROUPS = GROUPS_, STAGES = STAGES_, ROWS = GROUPS * GROUP_ROWS, STAGE_ROWS = A_ROWS;
    static constexpr u32 COLUMNS = TILES * TILE;
    static constexpr u32 A_ELEMENTS = A_ROWS * STEP_TERMS, STAGE_ELEMENTS = A_ELEMENTS + COLUMNS * STEP_TERMS;
    static constexpr u32 STAGE_BYTES = STAGE_ELEMENTS * sizeof(activation);
    static_assert(A_ROWS == ROWS || (GROUPS == 1 && A_ROWS % 8 == 0), "rows that are not there are behind all others");

    struct State {
        Gate full[STAGES], empty[STAGES];
    };
    // A group reads 64 rows of the last stage too.
    static constexpr u32 READ_BYTES = ROWS * STEP_TERMS * sizeof(activation);
    static constexpr u32 PAST_BYTES = READ_BYTES > STAGE_BYTES + sizeof(State) ? READ_BYTES - STAGE_BYTES - sizeof(State) : 0;
    static constexpr u32 BYTES = STAGES * STAGE_BYTES + sizeof(State) + PAST_BYTES;

    activation* start;

    __device__ __forceinline__ State& state() const {
        return *reinterpret_cast<State*>(start + STAGES * STAGE_ELEMENTS);
    }
    __device__ __forceinline__ activation* a(u32 stage) const { return start + stage * STAGE_ELEMENTS; }
    __device__ __forceinline__ activation* weight(u32 stage) const { return a(stage) + A_ELEMENTS; }
};

DEVICE u32 all_stages(const OrderedProduct& product) { return (product.terms + STEP_TERMS - 1) / STEP_TERMS; }

// Copies both factors with the copy engine, by one thread of a warp.
template <class M>
DEVICE void copy(const Arguments& arguments, M memory) {
    const OrderedProduct& product = arguments.product;
    typename M::State& state = memory.state();
    const bool one = lane_of_warp() == 0;
    const auto copy_weight = [&](const Item& item, u32 step, u32 stage) {
        arrive_expecting(state.full[stage], M::STAGE_BYTES);
        copy_tile(Panel(memory.weight(stage)), arguments.weight_map, state.full[stage], step * STEP_TERMS,
                  item.column_block * M::COLUMNS, 0, 0);
    };
    const auto copy_a = [&](const Item& item, u32 step, u32 stage) {
        copy_tile(Panel(memory.a(stage)), arguments.a_map, state.full[stage], step * STEP_TERMS,
                  item.row_block * M::ROWS, 0, 0);
    };
    u32 number = blockIdx.x;
    Item item = item_of(arguments, number);
    u32 step = item.first_segment * SEGMENT_STAGES;
    u32 end = min(item.end_segment * SEGMENT_STAGES, all_stages(product));
    // The first weights are requested before the rows of `a` are available.
    const u32 ahead = min(M::STAGES, end - step);
    Place<M::STAGES> place;
    if (one) {
#pragma unroll 1
        for (u32 i = 0; i < ahead; i++) copy_weight(item, step + i, i);
    }
    await_previous();
    if (!one) return;
#pragma unroll 1
    for (u32 i = 0; i < ahead; i++, step++, place.advance()) copy_a(item, step, i);
#pragma unroll 1
    while (true) {
#pragma unroll 1
        for (; step < end; step++, place.advance()) {
            wait_for(state.empty[place.stage], place.parity ^ 1);
            copy_weight(item, step, place.stage);
            copy_a(item, step, place.stage);
        }
        number += gridDim.x;
        if (number >= arguments.items) return;
        item = item_of(arguments, number);
        step = item.first_segment * SEGMENT_STAGES;
        end = min(item.end_segment * SEGMENT_STAGES, all_stages(product));
    }
}

// Stores the lane's elements of results that begin at a row and a column, or adds them to `out`: pairs of neighbours,
// of which both or neither are columns of `out`.
template <class T, Output OUTPUT, u32 TILES>
DEVICE void store(const OrderedProduct& product, T* out, u64 stride, u32 first_row, u32 first_column,
                  const Accumulator (&results)[TILES]) {
    // Values of `out` are loaded for several tiles at once, so that all are waited for once.
    constexpr u32 BATCH = 4, PAIRS = HELD / HELD_ROWS / 2;
    // Addresses kept from one item to the next would take registers that sums need.
    const u32 own_column = formed_anew(first_column + first_tile_column());
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const u32 row = formed_anew(first_row + tile_row(slot));
        const u32 columns_left = row < product.rows && own_column < product.columns ? product.columns - own_column : 0;
        T* const own = out + row * stride + own_column;
        const auto element = [&](u32 pair) { return HELD_ROWS == 2 ? 4 * pair + 2 * slot : 2 * pair; };
#pragma unroll
        for (u32 first = 0; first < TILES; first += BATCH) {
            Pack<2> found[BATCH][PAIRS];
            if constexpr (OUTPUT == Output::ADD) {
#pragma unroll
                for (u32 n = first; n < TILES && n < first + BATCH; n++) {
#pragma unroll
                    for (u32 pair = 0; pair < PAIRS; pair++) {
                        const u32 column = n * TILE + column_step(element(pair));
                        found[n - first][pair] = filled<2>(0.0f);
                        if (column < columns_left) found[n - first][pair] = load_pack<2>(own + column);
                    }
                }
            }
#pragma unroll
            for (u32 n = first; n < TILES && n < first + BATCH; n++) {
#pragma unroll
                for (u32 pair = 0; pair < PAIRS; pair++) {
                    const u32 i = element(pair), column = n * TILE + column_step(i);
                    Pack<2> sum{{results[n].at[i], results[n].at[i + 1]}};
                    if constexpr (OUTPUT == Output::ADD) {
                        sum.at[0] = found[n - first][pair].at[0] + sum.at[0];
                        sum.at[1] = found[n - first][pair].at[1] + sum.at[1];
                    }
                    if (column < columns_left) store_pack<2>(own + column, sum);
                }
            }
        }
    }
}
template <class T, u32 TILES>
DEVICE void store_or_add(const OrderedProduct& product, T* out, u32 first_row, u32 first_column,
                         const Accumulator (&results)[TILES]) {
    if (product.adds) {
        store<T, Output::ADD>(product, out, product.out_stride, first_row, first_column, results);
    } else {
        store<T, Output::OVERWRITE>(product, out, product.out_stride, first_row, first_column, results);
    }
}

// The position of a group in the sequence of stages.
template <class M>
struct Reader {
    const OrderedProduct& product;
    typename M::State& state;
    const LeftPanels<LeftStored::BY_ROW, M::ROWS> all_a;
    const RightPanels<Stored::BY_COLUMN, M::COLUMNS> all_weights;
    const bool arrives = EVERY_THREAD_ARRIVES || lane_of_warp() == 0;
    Place<M::STAGES> place;

    __device__ __forceinline__ Reader(const Arguments& arguments, M memory)
        : product(arguments.product),
          state(memory.state()),
          all_a(memory.a(0) + threadIdx.x / GROUP_THREADS * GROUP_ROWS * STEP_TERMS),
          all_weights(memory.weight(0)) {}

    // The sums of the next segment.
    template <u32 TILES>
    __device__ __forceinline__ void form(Accumulator (&sums)[TILES], u32 segment) {
        const u32 first = segment * SEGMENT_STAGES, end = min(first + SEGMENT_STAGES, all_stages(product));
        u32 last_stage = 0;
        forget(sums);
#pragma unroll 1
        for (u32 step = first; step < end; step++) {
            wait_for(state.full[place.stage], place.parity);
            const auto a = all_a.after(place.stage * M::STAGE_BYTES);
            const auto weights = all_weights.after(place.stage * M::STAGE_BYTES);
            hold(sums);
            begin_products();
            weights.multiply(sums, a, 0, step > first);
#pragma unroll
            for (u32 i = 1; i < STEP_TERMS / TILE; i++) weights.multiply(sums, a, i, true);
            end_batch();
            if (step > first) {
                wait_for_products<1>();
                if (arrives) arrive(state.empty[last_stage]);
            }
            last_stage = place.stage;
            place.advance();
        }
        wait_for_products<0>();
        hold(sums);
        if (arrives) arrive(state.empty[last_stage]);
    }
};

// The rows of a group in the block's items.
template <SegmentSums SUMS, u32 TILES, class M>
DEVICE void compute(const Arguments& arguments, M memory) {
    const OrderedProduct& product = arguments.product;
    Reader<M> reader(arguments, memory);
    Accumulator sums[TILES], total[SUMS == SegmentSums::ADDED ? TILES : 1];
    await_previous();
#pragma unroll 1
    for (u32 number = blockIdx.x; number < arguments.items; number += gridDim.x) {
        const Item item = item_of(arguments, number);
        const u32 first_row = item.row_block * M::ROWS + threadIdx.x / WARP * TILE;
        const u32 first_column = item.column_block * M::COLUMNS;
        if constexpr (SUMS == SegmentSums::ADDED) {
            // -0.0 changes no number that it is added to.
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < HELD; i++) total[n].at[i] = -0.0f;
            }
        }
#pragma unroll 1
        for (u32 segment = item.first_segment; segment < item.end_segment; segment++) {
            reader.form(sums, segment);
            if constexpr (SUMS == SegmentSums::APART) {
                float* const apart =
                    product.segment_sums + static_cast<u64>(segment) * product.rows * product.columns;
                store<float, Output::OVERWRITE>(product, apart, product.columns, first_row, first_column, sums);
            } else {
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                    for (u32 i = 0; i < HELD; i++) total[n].at[i] += sums[n].at[i];
                }
            }
        }
        if constexpr (SUMS == SegmentSums::ADDED) {
            if (product.out_is_fp32) {
                store_or_add(product, static_cast<float*>(product.out), first_row, first_column, total);
            } else {
                store_or_add(product, static_cast<bf16*>(product.out), first_row, first_column, total);
            }
        }
    }
}

// With one group, the copying warp is alone behind it; with several, it is filled up to a group of four warps, which
// can give registers to the computing groups.
template <u32 GROUPS>
constexpr u32 THREADS = GROUPS * GROUP_THREADS + (GROUPS == 1 ? WARP : GROUP_THREADS);

// Registers of a thread where BLOCKS blocks share a multiprocessor: at the start, and after the roles are assigned.
template <u32 GROUPS, u32 BLOCKS>
struct Registers {
    static constexpr u32 UNIT = 8;
    static constexpr u32 FIRST = 65536 / (BLOCKS * THREADS<GROUPS>) / UNIT * UNIT;
    static constexpr u32 LEAST = 24;
    static constexpr u32 COMPUTING = (FIRST * (GROUPS + 1) - LEAST) / GROUPS / UNIT * UNIT;
    static constexpr u32 COPYING = FIRST * (GROUPS + 1) - GROUPS * COMPUTING;
};

template <class M>
DEVICE void make_gates(M memory) {
    if (threadIdx.x == 0) {
        typename M::State& state = memory.state();
        for (u32 stage = 0; stage < M::STAGES; stage++) {
            make_gate(state.full[stage], 1);
            make_gate(state.empty[stage], M::GROUPS * GROUP_WARPS * WARP_ARRIVALS);
        }
        gates_are_made();
    }
    __syncthreads();
}

// The roles of the block's threads: one warp copies, groups compute. The other warps of the copying group only await
// the kernel before.
template <u32 BLOCKS, class M, class Compute>
DEVICE void copy_and_compute(const Arguments& arguments, M memory, Compute compute_all) {
    constexpr u32 GROUPS = M::GROUPS;
    typedef Registers<GROUPS, BLOCKS> R;
    if (threadIdx.x >= GROUPS * GROUP_THREADS) {
        if constexpr (GROUPS > 1) give_registers_back<R::COPYING>();
        if (threadIdx.x < GROUPS * GROUP_THREADS + WARP) {
            copy(arguments, memory);
        } else {
            await_previous();
        }
    } else {
        if constexpr (GROUPS > 1) take_registers<R::COMPUTING>();
        compute_all();
    }
}

// GROUPS groups, each with TILES tiles of 16 columns; BLOCKS blocks share a multiprocessor.
template <u32 GROUPS, u32 TILES, u32 STAGES, SegmentSums SUMS, u32 BLOCKS, u32 A_ROWS = GROUPS * GROUP_ROWS>
DEVICE void multiply(const Arguments& arguments) {
    typedef Memory<GROUPS, TILES, STAGES, A_ROWS> M;
    SHARED_ALIGNED(activation, start, PANEL_ALIGNMENT);
    const M memory{start};
    make_gates(memory);
    release_next();
    copy_and_compute<BLOCKS>(arguments, memory, [&] { compute<SUMS, TILES>(arguments, memory); });
}

}  // namespace ordered_groups
