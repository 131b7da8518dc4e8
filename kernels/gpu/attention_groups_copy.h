// The group of a block that brings queries, keys and values into shared memory for the computing groups (attention_forward_groups.h): with
// the copy engine, while its other warps clear values that are not finite, or with all its threads.
#pragma once
#include "attention_groups.h"

namespace groups {

// Replaces numbers that are not finite by zeros, in a tile of values that not every row attends to, as clear_not_finite does: for tiles of
// the copy engine, by the warps that have nothing to copy.
template <u32 P>
DEVICE void check_values(const Arguments& arguments, Memory<P> memory) {
    typedef Memory<P> M;
    typename M::State& state = memory.state();
    const bool arrives = EVERY_THREAD_ARRIVES || lane_of_warp() == 0;
    u32 count = 0;
#pragma unroll 1
    for (u32 round = 0;; round++) {
        wait_for(state.queries_full, round % 2);
        const Item item = state.item;
        warp_barrier();
        if (arrives) arrive(state.queries_empty);
        if (item.end == 0) return;
#pragma unroll 1
        for (u32 first = item.begin; first < item.end; first += KEYS, count++) {
            const PipelineState<M::VALUE_STAGES> at(count);
            wait_for(state.values_full[at.stage], at.parity);
            if (!item.is_unmasked(first)) {
                u32* const pairs = reinterpret_cast<u32*>(memory.values(at.stage));
                bool found = false;
#pragma unroll 1
                for (u32 i = threadIdx.x - WARP; i < M::TILE_BYTES / 16; i += CHECKING_WARPS * WARP) {
                    const uint4 four = reinterpret_cast<const uint4*>(pairs)[i];
                    if ((finite_of(four.x) & finite_of(four.y) & finite_of(four.z) & finite_of(four.w)) == 0xffffffffu) continue;
                    found = true;
#pragma unroll 1
                    for (u32 j = 4 * i; j < 4 * i + 4; j++) pairs[j] &= finite_of(pairs[j]);
                }
                if (found) {
                    state.cleared[at.stage] = count + 1;
                    show_to_products();
                }
            }
            warp_barrier();
            if (arrives) {
                arrive(state.values_clean[at.stage]);
                arrive(state.values_empty[at.stage]);
            }
        }
    }
}

// Starts all copies of the copy engine, by the first warp.
template <u32 P>
DEVICE void copy_by_engine(const Arguments& arguments, Memory<P> memory) {
    typedef Memory<P> M;
    typename M::State& state = memory.state();
    const bool one = lane_of_warp() == 0;
    u32 count = 0, round = 0;
    // Takes an item, and starts the copy of its queries once those of the item before are in registers.
    const auto begin_item = [&] {
        const u32 taken = one ? take_item(arguments) : 0;
        const Item item = item_of(arguments, __float_as_uint(shuffle(__uint_as_float(taken), 0)));
        if (one) {
            wait_for(state.queries_empty, round % 2 ^ 1);
            state.item = item;
            if (item.end == 0) {
                arrive(state.queries_full);
            } else {
                arrive_expecting(state.queries_full, M::QUERY_BYTES);
#pragma unroll
                for (u32 panel = 0; panel < M::PANELS; panel++) {
                    copy_tile(Panel(memory.queries(panel)), arguments.q_map, state.queries_full,
                              panel * PANEL_COLUMNS, item.tile * ROWS, item.head, item.sample);
                }
            }
        }
        round++;
        return item;
    };
    Item item = begin_item();
#pragma unroll 1
    while (item.end != 0) {
        const auto copy = [&](activation* to, const TileMap& map, Gate& full, Gate& empty, u32 parity, u32 first) {
            wait_for(empty, parity ^ 1);
            arrive_expecting(full, M::TILE_BYTES);
#pragma unroll
            for (u32 panel = 0; panel < M::PANELS; panel++) {
                copy_tile(Panel(to + panel * KEYS * PANEL_COLUMNS), map, full, panel * PANEL_COLUMNS,
                          first, arguments.attention.inputs.shared_head(item.head), item.sample);
            }
        };
        // The next item is taken a few tiles before it is needed, but only after every buffer of the rings is in use: so the wait for a
        // free description delays no copy.
        constexpr u32 AHEAD = 3;
        Item next;
        bool has_next = false;
        // A tile's values are copied after the next tile's keys, in the order of their use.
#pragma unroll 1
        for (u32 first = item.begin; first < item.end + KEYS; first += KEYS, count++) {
            if (!has_next && first >= item.begin + M::KEY_STAGES * KEYS && first + AHEAD * KEYS >= item.end) {
                next = begin_item();
                has_next = true;
            }
            if (one && first < item.end) {
                const PipelineState<M::KEY_STAGES> at(count);
                copy(memory.keys(at.stage), arguments.k_map, state.keys_full[at.stage],
                     state.keys_empty[at.stage], at.parity, first);
            }
            if (one && first > item.begin) {
                const PipelineState<M::VALUE_STAGES> at(count - 1);
                copy(memory.values(at.stage), arguments.v_map, state.values_full[at.stage],
                     state.values_empty[at.stage], at.parity, first - KEYS);
            }
        }
        count--;
        item = has_next ? next : begin_item();
    }
}

// The same without the copy engine, for rows that are not aligned: all warps copy.
template <u32 P>
DEVICE void copy_by_threads(const Arguments& arguments, Memory<P> memory) {
    typedef Memory<P> M;
    typename M::State& state = memory.state();
    const AttentionInputs& inputs = arguments.attention.inputs;
    const u32 warp = threadIdx.x / WARP;
    const bool one = lane_of_warp() == 0;
    u32 count = 0;
#pragma unroll 1
    for (u32 round = 0;; round++) {
        // The copying threads read the item's description from the same place as the computing ones: it is overwritten only after all of
        // them have read it.
        wait_for(state.queries_empty, round % 2 ^ 1);
        if (warp == 0) {
            const u32 taken = one ? take_item(arguments) : 0;
            const Item item = item_of(arguments, __float_as_uint(shuffle(__uint_as_float(taken), 0)));
            if (one) state.item = item;
        }
        meet(COPYING, GROUP_THREADS);
        const Item item = state.item;
        meet(COPYING, GROUP_THREADS);
        if (warp != 0 && (EVERY_THREAD_ARRIVES || one)) arrive(state.queries_empty);
        const u32 column = item.head * inputs.width;
        const u32 shared_column = inputs.shared_head(item.head) * inputs.width;
        if (item.end != 0) {
            const activation* const q =
                inputs.q + static_cast<u64>(item.sample) * inputs.positions * inputs.q_stride + column;
            copy_rows<P, ROWS>(memory.queries(0), q, inputs.q_stride, item.tile * ROWS, inputs.positions,
                               inputs, false);
        }
        meet(COPYING, GROUP_THREADS);
        if (EVERY_THREAD_ARRIVES || threadIdx.x == 0) arrive(state.queries_full);
        if (item.end == 0) return;
#pragma unroll 1
        for (u32 first = item.begin; first < item.end + KEYS; first += KEYS, count++) {
            if (first < item.end) {
                const PipelineState<M::KEY_STAGES> at(count);
                wait_for(state.keys_empty[at.stage], at.parity ^ 1);
                copy_rows<P, KEYS>(memory.keys(at.stage), inputs.k + item.sample * inputs.k_sample + shared_column,
                                   inputs.k_stride, first, inputs.keys, inputs, false);
                meet(COPYING, GROUP_THREADS);
                if (EVERY_THREAD_ARRIVES || threadIdx.x == 0) arrive(state.keys_full[at.stage]);
            }
            if (first > item.begin) {
                const PipelineState<M::VALUE_STAGES> at(count - 1);
                wait_for(state.values_empty[at.stage], at.parity ^ 1);
                const bool found =
                    copy_rows<P, KEYS>(memory.values(at.stage), inputs.v + item.sample * inputs.v_sample + shared_column,
                                       inputs.v_stride, first - KEYS, inputs.keys, inputs,
                                       !item.is_unmasked(first - KEYS));
                if (found) state.cleared[at.stage] = count;
                meet(COPYING, GROUP_THREADS);
                if (EVERY_THREAD_ARRIVES || threadIdx.x == 0) arrive(state.values_full[at.stage]);
                if (warp != 0 && (EVERY_THREAD_ARRIVES || one)) {
                    arrive(state.values_clean[at.stage]);
                    arrive(state.values_empty[at.stage]);
                }
            }
        }
        count--;
    }
}

}  // namespace groups
