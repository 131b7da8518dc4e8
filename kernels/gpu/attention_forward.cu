// Attention, forward: softmax(scale q k^T - slopes (i - j)) v over the keys that each query attends to, in tiles of
// keys with a running maximum and sum (Milakov and Gimelshein, 2018; Dao et al., 2022); for training, and for
// generation, where keys and values come from a cache. A row is computed by the same sequence of tiles in both.
//
// Scores are kept in units of log2, so that exp2 suffices. Probabilities are rounded to activations for their product
// with the values; their sum is not rounded.
#include "dialect.h"
#include "pack.h"
#include "tile_product.h"
#include "attention.h"
#if GROUP_PRODUCTS
#include "group_product.h"
#endif

struct AttentionForward {
    activation* out;     // [b t, h p]
    float* log_sum_exp;  // [b, h, t], or null
    AttentionInputs inputs;
    u64 out_stride;
    u64 wide_out;  // whether rows of out are stored two elements at a time
};

#define INFINITE __uint_as_float(0x7f800000u)

// A lane's elements of a tile and a row, divided over at most four independent chains.
DEVICE constexpr u32 chain_of(u32 i) { return i / 4 * 2 + i % 2; }

// The running softmax of the lane's rows.
struct Softmax {
    float maximum[HELD_ROWS];
    float sum[HELD_ROWS];  // over the lane's own columns

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
            maximum[slot] = -INFINITE;
            sum[slot] = 0.0f;
        }
    }

    // Turns the scores, which times `factor` (above 0) are in units of log2, into probabilities; all earlier results
    // are to be multiplied by `decay`. A row without keys in this tile stays as it is. A row's scores in a lane are
    // compared and summed in CHAINS chains. `offsets` of the rows, or null, are added to the
    // scaled scores, in units of log2.
    template <u32 CHAINS, u32 TILES>
    __device__ __forceinline__ void take(Accumulator (&scores)[TILES], float factor, float (&decay)[HELD_ROWS],
                                         const float* offsets = nullptr) {
        float greatest[HELD_ROWS][CHAINS], sums[HELD_ROWS][CHAINS], down[HELD_ROWS];
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
#pragma unroll
            for (u32 chain = 0; chain < CHAINS; chain++) {
                greatest[slot][chain] = -INFINITE;
                sums[slot][chain] = 0.0f;
            }
        }
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) {
                float& of_chain = greatest[row_slot(i)][chain_of(i) % CHAINS];
                of_chain = fmaxf(of_chain, scores[n].at[i]);
            }
        }
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
#pragma unroll
            for (u32 chain = 1; chain < CHAINS; chain++) {
                greatest[slot][0] = fmaxf(greatest[slot][0], greatest[slot][chain]);
            }
            const float of_tile = row_max(greatest[slot][0]);
            const float next = fmaxf(maximum[slot], offsets ? fmaf(of_tile, factor, offsets[slot]) : of_tile * factor);
            const float used = next == -INFINITE ? 0.0f : next;
            decay[slot] = exp2_fast(maximum[slot] - used);
            down[slot] = offsets ? offsets[slot] - used : -used;
            maximum[slot] = next;
            sums[slot][0] = sum[slot] * decay[slot];
        }
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) {
                float& score = scores[n].at[i];
                score = exp2_fast(fmaf(score, factor, down[row_slot(i)]));
                sums[row_slot(i)][chain_of(i) % CHAINS] += score;
            }
        }
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
            sum[slot] = sums[slot][0];
#pragma unroll
            for (u32 chain = 1; chain < CHAINS; chain++) sum[slot] += sums[slot][chain];
        }
    }
};

// Adds the values of rows `first .. end` that were cleared because they are not finite to the rows that attend to them.
// The result is not finite either way, so probabilities are left out.
template <u32 STEPS>
DEVICE void add_not_finite(Accumulator (&out)[STEPS], const activation* v,
                           const AttentionInputs& inputs, const MaskRange (&range)[HELD_ROWS], u32 first,
                           u32 end) {
#pragma unroll 1
    for (u32 key = first; key < end; key++) {
        const activation* const row = v + key * inputs.v_stride;
        const u32 first_column = formed_anew(first_tile_column());
#pragma unroll
        for (u32 n = 0; n < STEPS; n++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) {
                const u32 column = n * TILE + first_column + column_step(i);
                if (column >= inputs.width || !range[row_slot(i)].holds(key)) continue;
                const float x = widen(row[column]);
                if (!is_finite(x)) out[n].at[i] += x;
            }
        }
    }
}

template <u32 STEPS>
DEVICE void store_results(const AttentionForward& arguments, const Accumulator (&out)[STEPS],
                          const Softmax& softmax) {
    const AttentionInputs& inputs = arguments.inputs;
    const BlockPlace block(inputs, true);
    const u64 sample_row = static_cast<u64>(block.sample) * inputs.positions;
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const u32 query = block.tile * ROWS + threadIdx.x / WARP * TILE + tile_row(slot);
        const float sum = row_sum(softmax.sum[slot]);
        if (query >= inputs.positions) continue;
        const float reciprocal = 1.0f / sum;
        activation* const row = arguments.out + (sample_row + query) * arguments.out_stride +
                                block.head * inputs.width;
#pragma unroll
        for (u32 n = 0; n < STEPS; n++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i += 2) {
                if (row_slot(i) != slot) continue;
                store_neighbours(row, n * TILE + tile_column(i), inputs.width,
                                 out[n].at[i] * reciprocal, out[n].at[i + 1] * reciprocal,
                                 arguments.wide_out != 0);
            }
        }
        if (arguments.log_sum_exp && tile_column(0) == 0) {
            const u64 pair = static_cast<u64>(block.sample) * inputs.heads + block.head;
            arguments.log_sum_exp[pair * inputs.positions + query] =
                (softmax.maximum[slot] + log2_fast(sum)) * LN_2;
        }
    }
}

template <u32 P>
DEVICE void forward(const AttentionForward& arguments) {
    constexpr u32 STEPS = P / TILE, KEY_TILES = KEYS<P> / TILE;
    // Where the queries do not fit, they are read from global memory for every tile of keys.
    constexpr Own QUERIES = OWN<P, 1>;
    const AttentionInputs& inputs = arguments.inputs;
    SHARED(activation, memory);
    activation* const keys_memory = memory;
    activation* const values_memory = memory + KEYS<P> * P;
    activation* const queries_memory = memory + 2 * KEYS<P> * P;
    const BlockPlace block(inputs, true);
    const u32 past = inputs.past ? inputs.past[block.sample] : 0;
    const u32 width = inputs.width, first_column = block.head * width;
    const u32 shared_column = inputs.shared_head(block.head) * width;
    const bool wide = inputs.wide != 0;

    // Rows past the last are not stored.
    const u32 block_first = block.tile * ROWS;
    const u32 warp_first = block_first + threadIdx.x / WARP * TILE;
    const u64 sample_row = static_cast<u64>(block.sample) * inputs.positions;
    // The address for the lane's first row: the others follow at a fixed distance.
    const u32 position = past + warp_first + tile_row(0);
    const CommonMaskRange warp_range = common_mask_range(inputs, block.sample, past, warp_first, TILE);
    const CommonMaskRange block_range = common_mask_range(inputs, block.sample, past, block_first, ROWS);
    const u32 begin = block_range.some.first / KEYS<P> * KEYS<P>;
    const u32 end = min(block_range.some.last + 1, inputs.keys);

    const activation* q_rows[HELD_ROWS];
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const u32 query = min(warp_first + tile_row(slot), inputs.positions - 1);
        q_rows[slot] = inputs.q + (sample_row + query) * inputs.q_stride + first_column;
    }
    const activation* const k = inputs.k + block.sample * inputs.k_sample + shared_column;
    const activation* const v = inputs.v + block.sample * inputs.v_sample + shared_column;
    Factor held_queries[QUERIES == Own::IN_REGISTERS ? STEPS : 1];
    if constexpr (QUERIES == Own::IN_REGISTERS) {
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            held_queries[step] = load_factor(q_rows, step * TILE, width, wide);
        }
    }
    if (QUERIES == Own::IN_SHARED) {
        const activation* const q = inputs.q + sample_row * inputs.q_stride + first_column;
        load_rows<ROWS>(SharedRows<P>(queries_memory), q, inputs.q_stride, block_first, inputs.positions, width, wide);
    }
    load_rows<KEYS<P>>(SharedRows<P>(keys_memory), k, inputs.k_stride, begin, end, width, wide);
    copy_async_commit();

    // Slopes are in units of log2, and so are scores if there are slopes, or if the scale does not preserve their
    // order.
    const float slope = inputs.slopes ? inputs.slopes[block.head] * LOG2_E : 0.0f;
    const bool scaled_first = inputs.slopes || !(inputs.scale > 0.0f);
    const float scale = inputs.scale * LOG2_E;

    Softmax softmax;
    Accumulator out[STEPS];
#pragma unroll
    for (u32 n = 0; n < STEPS; n++) out[n] = zero_tile();

    for (u32 first = begin; first < end; first += KEYS<P>) {
        // Addresses in shared memory kept from one round to the next would take registers that tiles need.
        const u32 lane = formed_anew(lane_of_warp());
        const SharedRows<P> keys(keys_memory, lane), values(values_memory, lane);
        const SharedRows<P> queries(queries_memory, lane);
        copy_async_wait<0>();
        __syncthreads();
        load_rows<KEYS<P>>(values, v, inputs.v_stride, first, end, width, wide);
        copy_async_commit();
        const CommonMaskRange::Coverage coverage = warp_range.coverage(first, KEYS<P>);
        Accumulator scores[KEY_TILES];
        if (coverage != CommonMaskRange::NONE) {
#pragma unroll
            for (u32 n = 0; n < KEY_TILES; n++) scores[n] = zero_tile();
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                Factor query;
                if constexpr (QUERIES == Own::IN_REGISTERS) {
                    query = held_queries[step];
                } else if constexpr (QUERIES == Own::IN_SHARED) {
                    query = load_factor(queries, threadIdx.x / WARP * TILE, step * TILE);
                } else {
                    query = load_factor(q_rows, step * TILE, width, wide);
                }
#pragma unroll
                for (u32 n = 0; n < KEY_TILES; n++) {
                    multiply_add<Stored::BY_COLUMN>(scores[n], query, keys, step * TILE, n * TILE);
                }
            }
        }
        copy_async_wait<0>();
        __syncthreads();
        const auto load_next_keys = [&] {
            if (first + KEYS<P> < end) {
                load_rows<KEYS<P>>(keys, k, inputs.k_stride, first + KEYS<P>, end, width, wide);
                copy_async_commit();
            }
        };
        // A copy that overlaps with arithmetic begins as early as possible.
        if (WARP == 32) load_next_keys();
        // Some rows do not attend to some of the values.
        const bool cleared = block_range.coverage(first, KEYS<P>) == CommonMaskRange::PARTIAL &&
                             clear_not_finite<KEYS<P>>(values, keys_memory);
        if (WARP == 64) load_next_keys();
        if (coverage == CommonMaskRange::NONE) continue;

        if (scaled_first) {
#pragma unroll
            for (u32 n = 0; n < KEY_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < HELD; i++) {
                    const u32 own = position + tile_row(row_slot(i)) - tile_row(0);
                    const int distance = static_cast<int>(own - first - n * TILE - tile_column(i));
                    const float bias = -slope * static_cast<float>(distance);
                    scores[n].at[i] = fmaf(scores[n].at[i], scale, bias);
                }
            }
        }
        if (coverage == CommonMaskRange::PARTIAL) {
            MaskRange range[HELD_ROWS];
            mask_ranges_of_rows(inputs, range);
#pragma unroll
            for (u32 n = 0; n < KEY_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < HELD; i++) {
                    const u32 key = first + n * TILE + tile_column(i);
                    if (!range[row_slot(i)].holds(key)) scores[n].at[i] = -INFINITE;
                }
            }
        }
        float decay[HELD_ROWS];
        softmax.take<1>(scores, scaled_first ? 1.0f : scale, decay);
#pragma unroll
        for (u32 n = 0; n < STEPS; n++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) out[n].at[i] *= decay[row_slot(i)];
        }
#pragma unroll
        for (u32 m = 0; m < KEY_TILES; m++) {
            const Factor probabilities = as_factor(scores[m]);
#pragma unroll
            for (u32 n = 0; n < STEPS; n++) {
                multiply_add<Stored::BY_TERM>(out[n], probabilities, values, m * TILE, n * TILE);
            }
        }
        if (cleared) {
            MaskRange range[HELD_ROWS];
            mask_ranges_of_rows(inputs, range);
            add_not_finite(out, v, inputs, range, first, min(end, first + KEYS<P>));
        }
    }

    store_results(arguments, out, softmax);
}

template <u32 P>
constexpr u32 FORWARD_SHARED_BYTES = 2 * KEYS<P> * P * sizeof(activation) + OWN_SHARED_BYTES<P, 1>;
// The number of blocks that fit a multiprocessor by their registers.
#if HEAD_WIDTH == 32
KERNEL(attention_forward_32, THREADS, ACTIVATION_BF16 ? 4 : 2, AttentionForward) { forward<32>(arguments); }
SHARED_BYTES(attention_forward_32, FORWARD_SHARED_BYTES<32>);
#elif HEAD_WIDTH == 256
KERNEL(attention_forward_256, THREADS, 1, AttentionForward) { forward<256>(arguments); }
SHARED_BYTES(attention_forward_256, FORWARD_SHARED_BYTES<256>);
#elif GROUP_PRODUCTS
#include "attention_forward_groups.h"
#elif HEAD_WIDTH == 64
KERNEL(attention_forward_64, THREADS, ACTIVATION_BF16 ? 3 : 2, AttentionForward) { forward<64>(arguments); }
SHARED_BYTES(attention_forward_64, FORWARD_SHARED_BYTES<64>);
#else
KERNEL(attention_forward_128, THREADS, ACTIVATION_BF16 ? 3 : 1, AttentionForward) { forward<128>(arguments); }
SHARED_BYTES(attention_forward_128, FORWARD_SHARED_BYTES<128>);
#endif
