// Attention, forward, by groups of warps that multiply together (group_product.h): for bf16 and heads of up to 128 columns.
//
// A block has three groups. One brings tiles of 128 keys and values into rings of buffers in shared memory; each of the other two computes
// the results of 64 queries. Blocks are persistent and take one item of work after the other: 128 queries of a head, long walks first. A
// group's tiles form one pipeline over all its items: while the probabilities of a tile are multiplied with the values, the scores of the
// next tile are computed, in the same item or the next. The two groups alternate, so that one computes its softmax while the other
// multiplies.
//
// A row's bits depend only on the keys that it attends to, as in attention.h: tiles begin at whole multiples of 128 from the sample's first
// position, and biases are relative to an origin that depends on the row's position alone.
#pragma once
#include "attention_groups.h"
#include "attention_groups_copy.h"

namespace groups {

// What is added to scores.
enum class Biases {
    NONE,
    SLOPES,  // minus a head's slope times the distance from key to query
};

// The rows of a group, and their running softmax.
struct Rows {
    u32 head, sample, first;
    bool cleared;  // whether some value that they may attend to was not finite
    Softmax softmax;

    // The first row's position: a query comes after all keys of a cache.
    __device__ __forceinline__ u32 position(const AttentionInputs& inputs) const {
        return first + (inputs.past ? inputs.past[sample] : 0);
    }
    __device__ __forceinline__ u32 first_of_warp() const {
        return first + threadIdx.x / WARP % GROUP_WARPS * TILE;
    }
};

// The origin of a row's biases: the same in any cut of a sequence, and close enough that biases stay small where they matter.
DEVICE u32 bias_origin(u32 position) { return position / GROUP_ROWS * GROUP_ROWS; }

// Adds values that were cleared because they are not finite to the results of the rows that attend to them, while these are staged. The sum
// is not finite either way, so probabilities are left out.
template <u32 P>
DEVICE void add_not_finite(const AttentionInputs& inputs, const Rows& rows, activation* staged) {
    const u32 past = inputs.past ? inputs.past[rows.sample] : 0;
    const activation* const v = inputs.v + rows.sample * inputs.v_sample + inputs.shared_head(rows.head) * inputs.width;
#pragma unroll 1
    for (u32 row = 0; row < TILE; row++) {
        const u32 query = rows.first_of_warp() + row;
        if (query >= inputs.positions) return;
        const MaskRange range = mask_range_of(inputs, rows.sample, query, past);
        const u32 end = min(range.last + 1, inputs.keys);
#pragma unroll 1
        for (u32 key = range.first; key < end; key++) {
#pragma unroll 1
            for (u32 column = lane_of_warp(); column < inputs.width; column += WARP) {
                const float x = widen(v[key * inputs.v_stride + column]);
                if (is_finite(x)) continue;
                const Panel panel(staged + column / PANEL_COLUMNS * TILE * PANEL_COLUMNS);
                activation& result = *panel.at(row, column % PANEL_COLUMNS);
                narrow(result, widen(result) + x);
            }
        }
    }
}

// Divides results by the sums of their probabilities, and stores them through shared memory, so that lanes write 16 bytes each to whole
// rows.
template <u32 P>
DEVICE void store(const AttentionForward& arguments, const Rows& rows, const Accumulator (&out)[P / TILE],
                  activation* staged) {
    const AttentionInputs& inputs = arguments.inputs;
    const u32 first_row = rows.first_of_warp();
    // The rows staged last must have been read before.
    warp_barrier();
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const float sum = row_sum(rows.softmax.sum[slot]);
        const float reciprocal = reciprocal_fast(sum);
#pragma unroll
        for (u32 n = 0; n < P / TILE; n++) {
            const Panel panel(staged + n * TILE / PANEL_COLUMNS * TILE * PANEL_COLUMNS);
#pragma unroll
            for (u32 i = 0; i < HELD; i += 2) {
                if (row_slot(i) != slot) continue;
                const u32 pair = bf16_pair(out[n].at[i] * reciprocal, out[n].at[i + 1] * reciprocal);
                *reinterpret_cast<u32*>(panel.at(tile_row(slot), n * TILE % PANEL_COLUMNS + tile_column(i))) = pair;
            }
        }
        const u32 query = first_row + tile_row(slot);
        if (arguments.log_sum_exp && query < inputs.positions && tile_column(0) == 0) {
            // Corrects for the origin of the biases, which is not the row's own position.
            const float slope = inputs.slopes ? inputs.slopes[rows.head] * LOG2_E : 0.0f;
            const u32 position = rows.position(inputs) + query - rows.first;
            const float bias = slope * static_cast<float>(position - bias_origin(position));
            const u64 pair = static_cast<u64>(rows.sample) * inputs.heads + rows.head;
            arguments.log_sum_exp[pair * inputs.positions + query] =
                (rows.softmax.maximum[slot] - bias + log2_fast(sum)) * LN_2;
        }
    }
    warp_barrier();
    if (rows.cleared) {
        add_not_finite<P>(inputs, rows, staged);
        warp_barrier();
    }
    const u64 sample_row = static_cast<u64>(rows.sample) * inputs.positions + first_row;
    activation* const to = arguments.out + sample_row * arguments.out_stride + rows.head * inputs.width;
    const u32 count = first_row < inputs.positions ? min(TILE, inputs.positions - first_row) : 0;
    // Addresses kept from one item to the next would take registers that tiles need.
    const u32 lane = formed_anew(lane_of_warp());
    if (arguments.wide_out) {
        constexpr u32 CHUNKS = P / Panel::CHUNK;
        const u32 column = lane % CHUNKS * Panel::CHUNK;
        const Panel panel(staged + column / PANEL_COLUMNS * TILE * PANEL_COLUMNS, lane);
        if (column >= inputs.width) return;
#pragma unroll 2
        for (u32 row = lane / CHUNKS; row < count; row += WARP / CHUNKS) {
            const uint4 chunk = *reinterpret_cast<const uint4*>(panel.chunk(row, column % PANEL_COLUMNS));
            *reinterpret_cast<uint4*>(to + row * arguments.out_stride + column) = chunk;
        }
        return;
    }
#pragma unroll 1
    for (u32 row = 0; row < count; row++) {
#pragma unroll 1
        for (u32 column = lane; column < inputs.width; column += WARP) {
            const Panel panel(staged + column / PANEL_COLUMNS * TILE * PANEL_COLUMNS, lane);
            to[row * arguments.out_stride + column] = *panel.at(row, column % PANEL_COLUMNS);
        }
    }
}

// The rows' biases of a tile's first key, `slope` (j - the row's origin): this differs from j - i by a constant in each row.
DEVICE void biases_of_tile(float (&bias)[HELD_ROWS], const AttentionInputs& inputs, const Rows& rows, u32 first, float slope) {
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        // Without a cache the group's rows begin at their origin, so that all have the same biases.
        u32 origin = rows.first;
        if (inputs.past) {
            origin = bias_origin(rows.position(inputs) + threadIdx.x / WARP % GROUP_WARPS * TILE + tile_row(slot));
        }
        bias[slot] = slope * static_cast<float>(static_cast<int>(first - origin));
    }
}

// The score of a masked key.
DEVICE void mask_out(Accumulator (&scores)[KEY_TILES], const AttentionInputs& inputs, const Rows& rows,
                        u32 first) {
    MaskRange range[HELD_ROWS];
    mask_ranges_of_rows(inputs, rows.sample, rows.first_of_warp(), range);
    u32 from_first[HELD_ROWS], last_from_first[HELD_ROWS];
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        from_first[slot] = first + first_tile_column() - range[slot].first;
        last_from_first[slot] = range[slot].last - range[slot].first;
    }
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            const u32 slot = row_slot(i);
            // A key before the first counts as one far behind the last.
            if (from_first[slot] + n * TILE + column_step(i) > last_from_first[slot]) scores[n].at[i] = -INFINITE;
        }
    }
}

template <Biases BIASES, u32 P>
DEVICE void compute(const Arguments& arguments, Memory<P> memory) {
    typedef Memory<P> M;
    constexpr u32 STEPS = P / TILE;
    const AttentionForward& attention = arguments.attention;
    const AttentionInputs& inputs = attention.inputs;
    typename M::State& state = memory.state();
    const u32 group = threadIdx.x / GROUP_THREADS - 1;
    const bool arrives = EVERY_THREAD_ARRIVES || lane_of_warp() == 0;
    const RightPanels<Stored::BY_COLUMN, KEYS> all_keys(memory.keys(0));
    const RightPanels<Stored::BY_TERM, KEYS> all_values(memory.values(0));
    // Scores are scaled before they are compared where the scale does not keep their order.
    const bool scaled_first = !(inputs.scale > 0.0f);
    const float scale = inputs.scale * LOG2_E;

    u32 count = 0, round = 0, first = 0;
    Item item;
    Rows rows;
    float slope = 0.0f;  // in units of scores
    float decay[HELD_ROWS];
    Factor queries[STEPS], probabilities[KEY_TILES];
    Accumulator scores[KEY_TILES], out[STEPS];

    const auto take_queries = [&] {
        wait_for(state.queries_full, round % 2);
        round++;
        item = state.item;
        if (of_warp(item.end == 0)) return false;
        const u32 row = group * GROUP_ROWS + threadIdx.x / WARP % GROUP_WARPS * TILE;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            const Panel panel(memory.queries(step * TILE / PANEL_COLUMNS));
            queries[step] = load_factor(panel, row, step * TILE % PANEL_COLUMNS);
        }
        if (BIASES == Biases::SLOPES) {
            slope = inputs.slopes[item.head] / inputs.scale;
            // The products with the last slope have ended in all warps. The group meets again before those with this one.
            meet(SLOPE + group, GROUP_THREADS);
            if (threadIdx.x / WARP % GROUP_WARPS == 0) memory.slope(group).set(slope);
        }
        warp_barrier();
        if (arrives) arrive(state.queries_empty);
        first = item.begin;
        return true;
    };
    const auto begin_rows = [&] {
        rows.head = item.head;
        rows.sample = item.sample;
        rows.first = item.tile * ROWS + group * GROUP_ROWS;
        rows.cleared = false;
        rows.softmax = Softmax();
    };
    const auto wait_for_keys = [&](u32 tile) {
        const PipelineState<M::KEY_STAGES> at(tile);
        wait_for(state.keys_full[at.stage], at.parity);
    };
    const auto begin_scores = [&](u32 tile) {
        const auto keys = all_keys.after(tile % M::KEY_STAGES * M::TILE_BYTES);
        hold(scores);
        begin_products();
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) keys.multiply(scores, queries[step], step, step > 0);
        if (BIASES == Biases::SLOPES) memory.key_numbers().multiply(scores, memory.slope(group));
        end_batch();
    };
    // Whether all rows attend to the whole tile whose probabilities are waiting.
    bool is_whole = false;
    const auto begin_results = [&](u32 tile) {
        const PipelineState<M::VALUE_STAGES> at(tile);
        wait_for((is_whole ? state.values_full : state.values_clean)[at.stage], at.parity);
        rows.cleared |= !is_whole && state.cleared[at.stage] == tile + 1;
        const auto values = all_values.after(at.stage * M::TILE_BYTES);
        hold(out);
        begin_products();
#pragma unroll
        for (u32 step = 0; step < KEY_TILES; step++) values.multiply(out, probabilities[step], step, true);
        end_batch();
    };
    const auto end_scores = [&](u32 tile) {
        hold(scores);
        if (arrives) arrive(state.keys_empty[tile % M::KEY_STAGES]);
    };
    const auto end_results = [&](u32 tile) {
        hold(out);
        if (arrives) arrive(state.values_empty[tile % M::VALUE_STAGES]);
    };
    // Turns the scores of the keys from `first` on into probabilities.
    const auto weigh = [&] {
        if (scaled_first) {
#pragma unroll
            for (u32 n = 0; n < KEY_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < HELD; i++) scores[n].at[i] *= scale;
            }
        }
        is_whole = item.is_unmasked(first);
        if (!is_whole) mask_out(scores, inputs, rows, first);
        float offsets[HELD_ROWS];
        if (BIASES == Biases::SLOPES) biases_of_tile(offsets, inputs, rows, first, slope * scale);
        rows.softmax.take<4>(scores, scaled_first ? 1.0f : scale, decay, BIASES == Biases::SLOPES ? offsets : nullptr);
    };
    const auto round_probabilities = [&] {
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n++) probabilities[n] = as_factor(scores[n]);
    };
    const auto clear_results = [&] {
#pragma unroll
        for (u32 n = 0; n < STEPS; n++) out[n] = zero_tile();
    };
    // Whether the item has another tile. The compiler does not know that sums are never negative, so the answer depends on the
    // exponentials: otherwise the compiler would make these wait for the results of the tile before, which are still being computed.
    const auto has_another = [&] {
        bool is_negative = false;
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) is_negative |= rows.softmax.sum[slot] < 0.0f;
        return of_warp(first + KEYS + (is_negative ? 1 : 0) < item.end);
    };

    if (group == COMPUTING - 1) pass_by(SCHEDULER, COMPUTING * GROUP_THREADS);
    if (!take_queries()) return;
    if (BIASES == Biases::SLOPES) meet(SLOPE + group, GROUP_THREADS);
    begin_rows();
    clear_results();
    wait_for_keys(0);
    begin_scores(0);
    wait_for_products<0>();
    end_scores(0);
    weigh();
    bool goes_on = has_another();
    if (goes_on) wait_for_keys(1);
    round_probabilities();
    // Rows whose last tile is the one whose probabilities are waiting: they are stored once their results are finished.
    bool has_ended = false;
    Rows ended = rows;
    const auto settle = [&] {
        if (has_ended) {
            store<P>(attention, ended, out, memory.results(threadIdx.x / WARP - GROUP_WARPS));
            clear_results();
            return;
        }
#pragma unroll
        for (u32 n = 0; n < STEPS; n++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) out[n].at[i] *= decay[row_slot(i)];
        }
    };
    const auto signal_next_group = [&] { pass_by(SCHEDULER + (group + 1) % COMPUTING, COMPUTING * GROUP_THREADS); };
#pragma unroll 1
    for (;; count++) {
        // The probabilities of tile `count` are finished; the next scores are computed while these are multiplied with the values.
        const bool begins = !goes_on;
        if (begins) {
            if (!take_queries()) break;
            wait_for_keys(count + 1);
        } else {
            first += KEYS;
        }
        meet(SCHEDULER + group, COMPUTING * GROUP_THREADS);
        begin_scores(count + 1);
        // Storing takes longer than computing the scores.
        const bool stores = has_ended;
        if (stores) signal_next_group();
        settle();
        begin_results(count);
        if (!stores) signal_next_group();
        wait_for_products<1>();
        end_scores(count + 1);
        has_ended = begins;
        if (begins) {
            ended = rows;
            begin_rows();
        }
        // Asked before the softmax, so that the answer is there after it.
        const PipelineState<M::KEY_STAGES> next(count + 2);
        const bool keys_are_there = has_opened(state.keys_full[next.stage], next.parity);
        weigh();
        hold(scores);
        goes_on = has_another();
        if (goes_on && !of_warp(keys_are_there)) wait_for_keys(count + 2);
        wait_for_products<0>();
        end_results(count);
        round_probabilities();
    }
    settle();
    begin_results(count);
    wait_for_products<0>();
    hold(out);
    store<P>(attention, rows, out, memory.results(threadIdx.x / WARP - GROUP_WARPS));
}

template <Biases BIASES, u32 P>
DEVICE void forward(const Arguments& arguments) {
    typedef Memory<P> M;
    SHARED_ALIGNED(activation, start, PANEL_ALIGNMENT);
    const M memory{start};
    if (threadIdx.x == 0) {
        typename M::State& state = memory.state();
        constexpr u32 READERS = COMPUTING * GROUP_WARPS * WARP_ARRIVALS, CHECKERS = CHECKING_WARPS * WARP_ARRIVALS;
        const u32 copiers = arguments.by_engine ? 1 : ARRIVALS_OF<GROUP_THREADS>;
        make_gate(state.queries_full, copiers);
        make_gate(state.queries_empty, READERS + CHECKERS);
        for (u32 stage = 0; stage < M::KEY_STAGES; stage++) {
            make_gate(state.keys_full[stage], copiers);
            make_gate(state.keys_empty[stage], READERS);
        }
        for (u32 stage = 0; stage < M::VALUE_STAGES; stage++) {
            make_gate(state.values_full[stage], copiers);
            make_gate(state.values_clean[stage], CHECKERS);
            make_gate(state.values_empty[stage], READERS + CHECKERS);
            state.cleared[stage] = 0;
        }
        gates_are_made();
    }
    if (BIASES == Biases::SLOPES) {
        memory.key_numbers().fill(THREADS);
        for (u32 group = 0; group < COMPUTING; group++) memory.slope(group).clear(THREADS);
        show_to_products();
    }
    __syncthreads();
    if (threadIdx.x < GROUP_THREADS) {
        give_registers_back<COPYING_REGISTERS>();
        if (!arguments.by_engine) {
            copy_by_threads(arguments, memory);
        } else if (threadIdx.x < WARP) {
            copy_by_engine(arguments, memory);
        } else {
            check_values(arguments, memory);
        }
    } else {
        take_registers<COMPUTING_REGISTERS>();
        compute<BIASES>(arguments, memory);
    }
}

}  // namespace groups

#define FORWARD_GROUPS(name, BIASES)                                    \
    KERNEL_OF_MAPS(name, groups::THREADS, 1, groups::Arguments) {       \
        groups::forward<groups::Biases::BIASES, HEAD_WIDTH>(arguments); \
    }                                                                   \
    SHARED_BYTES(name, groups::Memory<HEAD_WIDTH>::BYTES);

#if HEAD_WIDTH == 64 && HAS_SLOPES
FORWARD_GROUPS(attention_forward_groups_slopes_64, SLOPES)
#elif HEAD_WIDTH == 64
FORWARD_GROUPS(attention_forward_groups_64, NONE)
#elif HAS_SLOPES
FORWARD_GROUPS(attention_forward_groups_slopes_128, SLOPES)
#else
FORWARD_GROUPS(attention_forward_groups_128, NONE)
#endif
