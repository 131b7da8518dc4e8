// The group of a block that does not compute: one warp brings keys, values and tiles of queries into shared memory, the others add finished
// sums of dq to those in global memory.
#pragma once
#include "attention_backward_groups.h"

namespace groups {

// A number of rows that is known at compile time.
template <u32 ROWS_BROUGHT>
struct Rows {
    static constexpr u32 COUNT = ROWS_BROUGHT;
};

// wait_for by a whole warp. One of its threads then starts copies that close the gate again, so all threads must have passed before that.
DEVICE void wait_together(const Gate& gate, u32 parity) {
    wait_for(gate, parity);
    warp_barrier();
}

// Brings all tiles, by the first warp: with the copy engine, or with its threads where rows are not aligned.
template <u32 P>
DEVICE void bring(const Arguments& arguments, Memory<P> memory) {
    typedef Memory<P> M;
    constexpr u32 QUERIES = M::QUERIES;
    const AttentionInputs& inputs = arguments.inputs;
    typename M::State& state = memory.state();
    const bool one = lane_of_warp() == 0;
    const bool by_engine = arguments.by_engine != 0;
    u32 count = 0;
#pragma unroll 1
    for (u32 round = 0;; round++) {
        const u32 taken = one ? take_number(arguments.taken) : 0;
        const Item item = item_of(arguments, __float_as_uint(shuffle(__uint_as_float(taken), 0)));
        if (item.first_key == NO_POSITION) {
            wait_together(state.keys_empty, round % 2 ^ 1);
            if (one) state.item = item;
            if (one || (EVERY_THREAD_ARRIVES && !by_engine)) arrive(state.keys_full);
            return;
        }
        // Addresses kept from tile to tile would take registers that copying threads lack.
        const auto sample_row = [&] { return static_cast<u64>(formed_anew(item.sample)) * inputs.positions; };
        const auto sums_at = [&](u32 tile) {
            const u64 pair = formed_anew(item.sample) * inputs.heads + item.head;
            return pair * arguments.padded + tile * QUERIES;
        };
        // ROWS rows of the item's head, from `first` on, and the bytes of other copies that the gate is to wait for.
        const auto bring_rows = [&](auto rows, activation* to, const TileMap& map, const activation* from, u64 stride,
                                    Gate& full, u32 head, u32 first, u32 further_bytes) {
            constexpr u32 ROWS_BROUGHT = decltype(rows)::COUNT;
            if (!by_engine) {
                copy_rows<P, ROWS_BROUGHT, WARP>(to, from + formed_anew(head) * inputs.width, stride, first, inputs.positions, inputs, false);
                warp_barrier();
                if (one) {
                    arrive_expecting(full, further_bytes);
                } else if (EVERY_THREAD_ARRIVES) {
                    arrive(full);
                }
                return;
            }
            if (!one) return;
            arrive_expecting(full, ROWS_BROUGHT * P * sizeof(activation) + further_bytes);
#pragma unroll
            for (u32 panel = 0; panel < M::PANELS; panel++) {
                copy_tile(Panel(to + panel * ROWS_BROUGHT * PANEL_COLUMNS), map, full, panel * PANEL_COLUMNS, first,
                          head, item.sample);
            }
        };
        const Walk<P> walk(arguments, item);
        u32 tile = walk.last_before(walk.end);
        u32 next = NO_POSITION;
        const auto bring_queries = [&] {
            const PipelineState<M::QUERY_STAGES> at(count);
            next = walk.last_before(tile);
            Step step = walk.step(inputs, tile);
            if (round % 2 != 0) step.traits |= Step::IS_ODD;
            if (next == NO_POSITION) step.traits |= Step::IS_LAST;
            Gate& full = state.queries_full[at.stage];
            wait_together(state.queries_empty[at.stage], at.parity ^ 1);
            if (one) state.steps[at.stage] = step;
            constexpr u32 BYTES = QUERIES * sizeof(float);
            bring_rows(Rows<QUERIES>(), memory.queries(at.stage), arguments.q_map,
                       inputs.q + sample_row() * inputs.q_stride, inputs.q_stride, full, item.head, tile * QUERIES,
                       BYTES);
            if (one) copy_bytes(state.sums[at.stage], arguments.sums + sums_at(tile), BYTES, full);
        };
        const auto bring_douts = [&] {
            const PipelineState<M::DOUT_STAGES> at(count);
            Gate& full = state.douts_full[at.stage];
            wait_together(state.douts_empty[at.stage], at.parity ^ 1);
            constexpr u32 BYTES = QUERIES * sizeof(float);
            bring_rows(Rows<QUERIES>(), memory.douts(at.stage), arguments.dout_map,
                       arguments.dout + sample_row() * arguments.dout_stride, arguments.dout_stride, full, item.head, tile * QUERIES,
                       BYTES);
            if (one) copy_bytes(state.deltas[at.stage], arguments.deltas + sums_at(tile), BYTES, full);
        };

        // The inputs of the first scores come first.
        bool is_first = true;
#pragma unroll 1
        do {
            bring_queries();
            if (is_first) {
                wait_together(state.keys_empty, round % 2 ^ 1);
                if (one) state.item = item;
                bring_rows(Rows<KEY_ROWS>(), memory.keys(), arguments.k_map, inputs.k + item.sample * inputs.k_sample,
                           inputs.k_stride, state.keys_full, inputs.shared_head(item.head), item.first_key, 0);
            }
            bring_douts();
            if (is_first) {
                wait_together(state.values_empty, round % 2 ^ 1);
                bring_rows(Rows<KEY_ROWS>(), memory.values(), arguments.v_map, inputs.v + item.sample * inputs.v_sample,
                           inputs.v_stride, state.values_full, inputs.shared_head(item.head), item.first_key, 0);
            }
            is_first = false;
            count++;
            tile = next;
        } while (tile != NO_POSITION);
    }
}

// Adds the sums of dq that were computed here to those in global memory, of every ADDING-th tile from tile `slot` on, by one thread. Tiles
// of keys are added to a tile of queries one after the other, by rising keys, so that the order of a sum depends on the head's sequence
// alone. Blocks begin items in that order too, and each walks from the last queries down: by the time that a tile is to be added, earlier
// keys have mostly been added.
template <u32 P>
DEVICE void add_sums(const Arguments& arguments, Memory<P> memory, u32 slot) {
    typedef Memory<P> M;
    typename M::State& state = memory.state();
#pragma unroll 1
    for (u32 count = slot;; count += ADDING) {
        wait_for(state.additions_full[slot], count / ADDING % 2);
        const Addition addition = state.additions[count % ANNOUNCED];
        if (addition.rank == NO_POSITION) return;
        u32* const added = arguments.added + addition.tile;
        float* const to = arguments.dq_sums + static_cast<u64>(addition.tile) * M::TILE_SUMS;
        if (addition.rank == 0) {
            store_floats(to, memory.addition(slot), M::TILE_SUMS);
        } else {
            while (seen(added) != addition.rank) rest();
            show_to_copies();
            add_floats(to, memory.addition(slot), M::TILE_SUMS);
        }
        wait_until_read();
        arrive(state.additions_empty[slot]);
        wait_until_there();
        publish(added, addition.rank + 1);
    }
}

}  // namespace groups
