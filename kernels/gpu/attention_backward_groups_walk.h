// The computing groups of a block for the gradients of attention: keys walk the queries, with five products a tile.
//
//   scores  = k q^T          a group's 64 keys are the rows, in all products but the last
//   dp      = v dout^T
//   dv     += p dout
//   dk     += ds q
//   dq     += ds^T k         over all keys of the block; its two groups divide queries or columns
//
// Products run asynchronously, and one is in flight nearly all the time while a group does something else: dp while scores become
// probabilities (where registers suffice), dv while dp becomes ds, dk while the groups wait for each other's ds, the next tile's scores
// while the sums of dq are handed on.
#pragma once
#include "attention_backward_groups.h"

namespace groups {

// Replaces numbers that are not finite by zeros, in rows that some queries do not attend to, as clear_not_finite does, by all computing
// groups.
DEVICE void clear_rows(activation* rows, u32 bytes) {
    u32* const pairs = reinterpret_cast<u32*>(rows);
    bool found = false;
#pragma unroll 1
    for (u32 i = threadIdx.x - GROUP_THREADS; i < bytes / 16; i += COMPUTING * GROUP_THREADS) {
        const uint4 four = reinterpret_cast<const uint4*>(pairs)[i];
        if ((finite_of(four.x) & finite_of(four.y) & finite_of(four.z) & finite_of(four.w)) == 0xffffffffu) continue;
        found = true;
#pragma unroll 1
        for (u32 j = 4 * i; j < 4 * i + 4; j++) pairs[j] &= finite_of(pairs[j]);
    }
    if (found) show_to_products();
}

// The lane's first row among the item's keys; the other is eight further on.
DEVICE u32 own_row() {
    const u32 thread = formed_anew(threadIdx.x) - GROUP_THREADS;
    return thread / WARP * TILE + thread % WARP / 4;
}

// Two first keys, loaded here, shortly before their use, for lack of registers.
DEVICE uint2 load_here(const u32* firsts) {
#if ON_NVIDIA
    uint2 two;
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(two.x), "=r"(two.y) : "l"(firsts) : "memory");
    return two;
#else
    return make_uint2(firsts[0], firsts[1]);
#endif
}

// Turns a tile's scores into probabilities. `sums` has the log-sum-exp of its queries, their own part of the biases included; `bias` is the
// bias of the lane's first key.
template <u32 TILES>
DEVICE void weigh(Accumulator (&scores)[TILES], const float* sums, float scale, float slope, float bias) {
    const float own[2] = {bias, fmaf(slope, 8.0f, bias)};
#pragma unroll
    for (u32 n = 0; n < TILES; n++) {
#pragma unroll
        for (u32 half = 0; half < HELD / 4; half++) {
            const u32 column = n * TILE + column_step(4 * half) + first_tile_column();
            const float2 two = *reinterpret_cast<const float2*>(sums + column);
#pragma unroll
            for (u32 i = 4 * half; i < 4 * half + 4; i++) {
                const float shift = own[row_slot(i)] - (i % 2 ? two.y : two.x);
                scores[n].at[i] = exp2_fast(fmaf(scores[n].at[i], scale, shift));
            }
        }
    }
}

// Sets the probabilities of masked keys to zero. `firsts`: the first keys that the tile's queries attend to; `key`: the lane's first.
template <u32 TILES>
DEVICE void mask_out(Accumulator (&p)[TILES], const u32* firsts, u32 first_query, u32 key) {
#pragma unroll
    for (u32 n = 0; n < TILES; n++) {
#pragma unroll
        for (u32 half = 0; half < HELD / 4; half++) {
            const u32 column = n * TILE + column_step(4 * half) + first_tile_column();
            const uint2 two = load_here(firsts + column);
#pragma unroll
            for (u32 i = 4 * half; i < 4 * half + 4; i++) {
                const u32 first = i % 2 ? two.y : two.x, query = first_query + column + i % 2;
                // A key before the first counts as one far behind the query.
                if (key + 8 * row_slot(i) - first > query - first) p[n].at[i] = 0.0f;
            }
        }
    }
}

// ds from dp, and from the probabilities as rounded for dv: there are not enough registers to keep the unrounded ones. A masked element
// gets 0 even where dp is not a number.
template <u32 TILES>
DEVICE void differentiate(Accumulator (&ds)[TILES], const Factor (&p)[TILES], const float* deltas, bool is_whole) {
#pragma unroll
    for (u32 n = 0; n < TILES; n++) {
#pragma unroll
        for (u32 half = 0; half < HELD / 4; half++) {
            const u32 column = n * TILE + column_step(4 * half) + first_tile_column();
            const float2 two = *reinterpret_cast<const float2*>(deltas + column);
#pragma unroll
            for (u32 i = 4 * half; i < 4 * half + 4; i++) {
                const u32 pair = p[n].pairs[i / 2];
                const float own = i % 2 ? second_of(pair) : first_of(pair);
                ds[n].at[i] = own * (ds[n].at[i] - (i % 2 ? two.y : two.x));
                if (!is_whole && own == 0.0f) ds[n].at[i] = 0.0f;
            }
        }
    }
}

// Stores `count` rows of a gradient from panels of PANEL_ROWS rows in shared memory, where `row` is the first, by STORING threads, 16 bytes
// at a time to whole rows.
template <u32 P, u32 PANEL_ROWS, u32 STORING>
DEVICE void store_panels(activation* to, u64 stride, activation* panels, u32 row, u32 count, u32 width, bool wide,
                         u32 thread) {
    const u32 lane = thread % WARP;
    if (wide) {
        constexpr u32 CHUNKS = P / Panel::CHUNK;
        const u32 column = thread % CHUNKS * Panel::CHUNK;
        const Panel panel(panels + column / PANEL_COLUMNS * PANEL_ROWS * PANEL_COLUMNS, lane);
        if (column >= width) return;
#pragma unroll 2
        for (u32 i = thread / CHUNKS; i < count; i += STORING / CHUNKS) {
            const uint4 chunk = *reinterpret_cast<const uint4*>(panel.chunk(row + i, column % PANEL_COLUMNS));
            *reinterpret_cast<uint4*>(to + i * stride + column) = chunk;
        }
        return;
    }
#pragma unroll 1
    for (u32 i = thread / WARP; i < count; i += STORING / WARP) {
#pragma unroll 1
        for (u32 column = lane; column < width; column += WARP) {
            const Panel panel(panels + column / PANEL_COLUMNS * PANEL_ROWS * PANEL_COLUMNS, lane);
            to[i * stride + column] = *panel.at(row + i, column % PANEL_COLUMNS);
        }
    }
}

// A warp's 16 rows of a gradient, times `factor`, through its rows of panels in shared memory. `row`: the warp's first row in the panels,
// the gradient of key `first`.
template <u32 P>
DEVICE void store_rows(activation* gradient, const Arguments& arguments, const Item& item, const Accumulator (&sums)[P / TILE],
                       float factor, activation* panels, u32 row, u32 first) {
    const AttentionInputs& inputs = arguments.inputs;
#pragma unroll
    for (u32 n = 0; n < P / TILE; n++) {
        const Panel panel(panels + n * TILE / PANEL_COLUMNS * KEY_ROWS * PANEL_COLUMNS);
#pragma unroll
        for (u32 i = 0; i < HELD; i += 2) {
            const u32 pair = bf16_pair(sums[n].at[i] * factor, sums[n].at[i + 1] * factor);
            *reinterpret_cast<u32*>(panel.at(row + tile_row(row_slot(i)), n * TILE % PANEL_COLUMNS + tile_column(i))) = pair;
        }
    }
    warp_barrier();
    const u64 sample_row = static_cast<u64>(item.sample) * inputs.positions + first;
    const u32 count = first < inputs.positions ? min(TILE, inputs.positions - first) : 0;
    store_panels<P, KEY_ROWS, WARP>(gradient + sample_row * arguments.gradient_stride + item.head * inputs.width,
                                    arguments.gradient_stride, panels, row, count, inputs.width,
                                    arguments.wide_gradients != 0, formed_anew(lane_of_warp()));
    warp_barrier();
}

template <u32 P>
DEVICE void compute(const Arguments& arguments, Memory<P> memory) {
    typedef Memory<P> M;
    constexpr u32 STEPS = P / TILE, QUERY_TILES = M::QUERIES / TILE, KEY_TILES = KEY_ROWS / TILE;
    constexpr u32 DQ_TILES = PANEL_COLUMNS / TILE;
    const AttentionInputs& inputs = arguments.inputs;
    typename M::State& state = memory.state();
    const u32 group = threadIdx.x / GROUP_THREADS - 1;
    const bool arrives = EVERY_THREAD_ARRIVES || lane_of_warp() == 0;
    constexpr u32 GROUP_BYTES = GROUP_ROWS * PANEL_COLUMNS * sizeof(activation);
    const auto own_keys = LeftPanels<LeftStored::BY_ROW, KEY_ROWS>(memory.keys()).after(group * GROUP_BYTES);
    const auto own_values = LeftPanels<LeftStored::BY_ROW, KEY_ROWS>(memory.values()).after(group * GROUP_BYTES);
    const RightPanels<Stored::BY_COLUMN, M::QUERIES> queries_of_scores(memory.queries(0));
    const RightPanels<Stored::BY_COLUMN, M::QUERIES> douts_of_dp(memory.douts(0));
    const RightPanels<Stored::BY_TERM, M::QUERIES> queries_of_dk(memory.queries(0)), douts_of_dv(memory.douts(0));
    // The group's share of dq: half the columns, or half the queries.
    constexpr u32 PANEL_BYTES = KEY_ROWS * PANEL_COLUMNS * sizeof(activation);
    const auto ds_of_dq = LeftPanels<LeftStored::BY_TERM, KEY_ROWS>(memory.ds(0)).after(M::PANELS == 1 ? group * PANEL_BYTES : 0);
    const auto keys_of_dq = RightPanels<Stored::BY_TERM, KEY_ROWS>(memory.keys()).after(M::PANELS == 1 ? 0 : group * PANEL_BYTES);
    const float scale = inputs.scale * LOG2_E;

    u32 count = 0;
    Accumulator scores[QUERY_TILES], dp[QUERY_TILES];  // they become probabilities and ds
    Accumulator dk[STEPS], dv[STEPS], dq[DQ_TILES];

    // Waits for the queries of tile `count`.
    const auto take_queries = [&] {
        const PipelineState<M::QUERY_STAGES> at(count);
        wait_for(state.queries_full[at.stage], at.parity);
        if (of_warp((state.steps[at.stage].traits & Step::IS_WHOLE) == 0)) {
            // Queries and their output gradients are right factors.
            const PipelineState<M::DOUT_STAGES> of_douts(count);
            wait_for(state.douts_full[of_douts.stage], of_douts.parity);
            clear_rows(memory.queries(at.stage), M::TILE_BYTES);
            clear_rows(memory.douts(of_douts.stage), M::TILE_BYTES);
            meet(COMPUTING_MEET, COMPUTING * GROUP_THREADS);
        }
    };
    const auto begin_scores = [&] {
        const auto queries = queries_of_scores.after(count % M::QUERY_STAGES * M::TILE_BYTES);
        forget(scores);
        begin_products();
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) queries.multiply(scores, own_keys, k, k > 0);
        end_batch();
    };
    const auto hand_on = [&](u32 now) {
        const PipelineState<ADDING> slot(formed_anew(now));
        wait_for(state.additions_empty[slot.stage], slot.parity ^ 1);
        float4* const to = reinterpret_cast<float4*>(memory.addition(slot.stage) + group * M::GROUP_SUMS) +
                           threadIdx.x % GROUP_THREADS;
#pragma unroll
        for (u32 n = 0; n < DQ_TILES; n++) {
#pragma unroll
            for (u32 half = 0; half < HELD / 4; half++) {
                const float* const at = dq[n].at + 4 * half;
                to[(n * (HELD / 4) + half) * GROUP_THREADS] = make_float4(at[0], at[1], at[2], at[3]);
            }
        }
        show_to_products();
        warp_barrier();
        if (arrives) arrive(state.additions_full[slot.stage]);
    };
#pragma unroll 1
    for (u32 parity = 0;;) {
        wait_for(state.keys_full, parity);
        if (of_warp(state.item.first_key == NO_POSITION)) break;
        // The last tile of the walk does not attend to all keys, which are a right factor.
        clear_rows(memory.keys(), M::OWN_BYTES);
        meet(COMPUTING_MEET, COMPUTING * GROUP_THREADS);
#pragma unroll
        for (u32 n = 0; n < STEPS; n++) dk[n] = dv[n] = zero_tile();
        take_queries();
        begin_scores();
        wait_for(state.values_full, parity);
#pragma unroll 1
        for (;;) {
            const PipelineState<M::QUERY_STAGES> of_queries(count);
            const PipelineState<M::DOUT_STAGES> of_douts(count);
            const Step& step = state.steps[of_queries.stage];
            const bool is_whole = of_warp((step.traits & Step::IS_WHOLE) != 0);
            wait_for(state.douts_full[of_douts.stage], of_douts.parity);
            const auto begin_dp = [&] {
            forget(dp);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < STEPS; k++) {
                douts_of_dp.after(of_douts.stage * M::TILE_BYTES).multiply(dp, own_values, k, k > 0);
            }
            end_batch();
            };
            // With narrow heads a tile has so many queries that registers do not suffice for both.
            constexpr bool BOTH = M::QUERIES == 64;
            if (BOTH) {
                begin_dp();
                wait_for_products<1>();
            } else {
                wait_for_products<0>();
            }
            hold(scores);
            const u32 key = state.item.first_key + own_row();
            const float bias = state.item.slope * static_cast<float>(static_cast<int>(key - step.first_query));
            weigh(scores, state.sums[of_queries.stage], scale, state.item.slope, bias);
            if (!is_whole) {
                const u64 at = static_cast<u64>(state.item.sample) * arguments.padded + step.first_query;
                mask_out(scores, arguments.firsts + at, step.first_query, key);
            }
            Factor p[QUERY_TILES];
#pragma unroll
            for (u32 n = 0; n < QUERY_TILES; n++) p[n] = as_factor(scores[n]);
            if (!BOTH) begin_dp();
            hold(dv);
            begin_products();
#pragma unroll
            for (u32 n = 0; n < QUERY_TILES; n++) {
                douts_of_dv.after(of_douts.stage * M::TILE_BYTES).multiply(dv, p[n], n, true);
            }
            end_batch();
            wait_for_products<1>();
            hold(dp);
            differentiate(dp, p, state.deltas[of_douts.stage], is_whole);
            // Addresses kept since the beginning of the tile would take registers that tiles need.
            const u32 now = formed_anew(count);
            Factor ds[QUERY_TILES];
            // A row's chunks are permuted by the row's number modulo eight, which here depends only on the lane (SharedRows).
            const u32 own = own_row(), lane = lane_of_warp();
            const u32 of_lane = own * PANEL_COLUMNS + own % 8 * Panel::CHUNK + lane % 4 * 2;
#pragma unroll
            for (u32 n = 0; n < QUERY_TILES; n++) {
                ds[n] = as_factor(dp[n]);
                activation* const panel = memory.ds(now % 2) + n * TILE / PANEL_COLUMNS * KEY_ROWS * PANEL_COLUMNS;
#pragma unroll
                for (u32 pair = 0; pair < HELD / 2; pair++) {
                    const u32 chunk = (n * TILE % PANEL_COLUMNS + column_step(2 * pair)) / Panel::CHUNK;
                    const u32 place = (of_lane ^ chunk * Panel::CHUNK) + row_slot(2 * pair) * 8 * PANEL_COLUMNS;
                    *reinterpret_cast<u32*>(panel + place) = ds[n].pairs[pair];
                }
            }
            show_to_products();
            hold(dk);
            begin_products();
#pragma unroll
            for (u32 n = 0; n < QUERY_TILES; n++) {
                queries_of_dk.after(now % M::QUERY_STAGES * M::TILE_BYTES).multiply(dk, ds[n], n, true);
            }
            end_batch();
            meet(COMPUTING_MEET, COMPUTING * GROUP_THREADS);
            forget(dq);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < KEY_TILES; k++) {
                keys_of_dq.multiply(dq, ds_of_dq.after(now % 2 * M::DS_BYTES), k, k > 0);
            }
            end_batch();
            const Step& ended = state.steps[now % M::QUERY_STAGES];
            parity = (ended.traits & Step::IS_ODD) != 0 ? 0 : 1;
            const bool is_last = of_warp((ended.traits & Step::IS_LAST) != 0);
            count++;
            wait_for_products<0>();
            hold(dv);
            keep(p);
            hold(dk);
            keep(ds);
            hold(dq);
            if (threadIdx.x == GROUP_THREADS) {
                state.additions[now % ANNOUNCED] = {ended.tile, ended.rank};
            }
            warp_barrier();
            if (arrives) {
                arrive(state.queries_empty[now % M::QUERY_STAGES]);
                arrive(state.douts_empty[now % M::DOUT_STAGES]);
            }
            if (is_last) {
                hand_on(now);
                break;
            }
            take_queries();
            begin_scores();
            hand_on(now);
        }
        const Item item = state.item;
        warp_barrier();
        if (arrives) arrive(state.keys_empty);
        // A warp's own values are no longer needed: its gradients overwrite them.
        const u32 row = own_row() / TILE * TILE;
        store_rows<P>(arguments.dv, arguments, item, dv, 1.0f, memory.values(), row, item.first_key + row);
        store_rows<P>(arguments.dk, arguments, item, dk, inputs.scale, memory.values(), row, item.first_key + row);
        show_to_products();
        warp_barrier();
        if (arrives) arrive(state.values_empty);
    }
    // Tells all adding warps that the additions have ended.
#pragma unroll 1
    for (u32 end = count + ADDING; count < end; count++) {
        const PipelineState<ADDING> slot(count);
        wait_for(state.additions_empty[slot.stage], slot.parity ^ 1);
        if (threadIdx.x == GROUP_THREADS) state.additions[count % ANNOUNCED].rank = NO_POSITION;
        warp_barrier();
        if (arrives) arrive(state.additions_full[slot.stage]);
    }
}

template <u32 P>
DEVICE void backward(const Arguments& arguments) {
    typedef Memory<P> M;
    SHARED_ALIGNED(activation, start, PANEL_ALIGNMENT);
    const M memory{start};
    if (threadIdx.x == 0) {
        typename M::State& state = memory.state();
        constexpr u32 READERS = COMPUTING * GROUP_WARPS * WARP_ARRIVALS;
        const u32 copiers = arguments.by_engine ? 1 : WARP_ARRIVALS;
        make_gate(state.keys_full, copiers);
        make_gate(state.keys_empty, READERS);
        make_gate(state.values_full, copiers);
        make_gate(state.values_empty, READERS);
        for (u32 stage = 0; stage < M::QUERY_STAGES; stage++) {
            make_gate(state.queries_full[stage], copiers);
            make_gate(state.queries_empty[stage], READERS);
        }
        for (u32 stage = 0; stage < M::DOUT_STAGES; stage++) {
            make_gate(state.douts_full[stage], copiers);
            make_gate(state.douts_empty[stage], READERS);
        }
        for (u32 slot = 0; slot < ADDING; slot++) {
            make_gate(state.additions_full[slot], READERS);
            make_gate(state.additions_empty[slot], 1);
        }
        gates_are_made();
    }
    __syncthreads();
    const u32 warp = threadIdx.x / WARP;
    if (threadIdx.x < GROUP_THREADS) {
        give_registers_back<COPYING_REGISTERS>();
        if (warp == 0) {
            bring(arguments, memory);
        } else if (warp - ADDING_WARP < ADDING && lane_of_warp() == 0) {
            add_sums(arguments, memory, warp - ADDING_WARP);
        }
    } else {
        take_registers<COMPUTING_REGISTERS>();
        compute(arguments, memory);
    }
}

}  // namespace groups
