// The gradients of attention. Probabilities are recomputed tile by tile from the log-sum-exp that forward saved:
//
//   p_ij  = exp(s_ij - log_sum_exp_i)            delta_i = dout_i . out_i
//   ds_ij = p_ij (dout_i . v_j - delta_i)
//   dv_j  = sum over i of p_ij dout_i            dk_j = scale sum over i of ds_ij q_i
//   dq_i  = scale sum over j of ds_ij k_j
//
// Two walks, so that each sum has one owner and one order: a block of keys walks the queries for dk and dv, a block of queries
// walks the keys for dq. Probabilities and ds are rounded to activations for their products. Where groups of warps multiply
// together, heads of 33 to 128 columns use one walk instead (attention_backward_groups_kernels.h).
#include "dialect.h"
#include "pack.h"
#include "tile_product.h"
#include "attention.h"

// Rows of the other side in shared memory at once, and tiles of them: the next is loaded while this one is used,
// where copies overlap with arithmetic.
template <u32 P>
constexpr u32 WALKED = P * sizeof(activation) <= 256 ? 32 : 16;
constexpr u32 STAGES = WARP == 32 ? 2 : 1;

struct AttentionBackward {
    activation* dq;  // [b t, h p], as dk and dv
    activation* dk;
    activation* dv;
    const activation* dout;  // [b t, h p]
    const float* sums;       // [b h, padded t]: log_sum_exp in units of log2
    const float* deltas;     // [b h, padded t]
    AttentionInputs inputs;
    u64 gradient_stride;
    u64 dout_stride;
    u32 padded;  // t rounded up to whole blocks
    u32 wide_gradients;
};

struct AttentionDeltas {
    float* sums;    // [b h, padded t]
    float* deltas;  // [b h, padded t]
    const activation* dout;
    const activation* out;
    const float* log_sum_exp;  // [b, h, t]
    u64 dout_stride;
    u64 out_stride;
    u32 positions;
    u32 padded;
    u32 heads;
    u32 width;
};

// A warp for each head of each row, rows past the last included: their probabilities come to 0.
KERNEL(attention_deltas, THREADS, 1, AttentionDeltas) {
    const u32 position = blockIdx.x % (arguments.padded / WARPS) * WARPS + threadIdx.x / WARP;
    const u32 pair = blockIdx.x / (arguments.padded / WARPS);
    const u64 place = static_cast<u64>(pair) * arguments.padded + position;
    float sum = __uint_as_float(0x7f800000u), delta = 0.0f;
    if (position < arguments.positions) {
        const u64 row = static_cast<u64>(pair / arguments.heads) * arguments.positions + position;
        const u32 first_column = pair % arguments.heads * arguments.width;
        const activation* const dout = arguments.dout + row * arguments.dout_stride + first_column;
        const activation* const out = arguments.out + row * arguments.out_stride + first_column;
        for (u32 column = lane_of_warp(); column < arguments.width; column += WARP) {
            delta = fmaf(widen(dout[column]), widen(out[column]), delta);
        }
        delta = warp_sum(delta);
        sum = arguments.log_sum_exp[static_cast<u64>(pair) * arguments.positions + position] * LOG2_E;
        // If this is not a number, every result that the row contributes to must show it.
        if (!is_finite(delta)) sum = delta - delta;
    }
    if (lane_of_warp() == 0) {
        arguments.sums[place] = sum;
        arguments.deltas[place] = delta;
    }
}

// Rows of one of two matrices that stay for the whole walk.
template <u32 P>
struct OwnRows {
    static constexpr Own OF_TWO = OWN<P, 2>;
    static constexpr u32 ELEMENTS = OF_TWO == Own::IN_SHARED ? ROWS * P : 0;

    const activation* rows;  // the sample's first, in the block's head
    activation* memory;
    u64 stride;
    Factor held[OF_TWO == Own::IN_REGISTERS ? P / TILE : 1];

    // `first`: the first of the block's rows in the sample.
    __device__ __forceinline__ void load(u32 first, u32 limit, u32 width, bool wide) {
        if constexpr (OF_TWO == Own::IN_SHARED) {
            load_rows<ROWS>(SharedRows<P>(memory), rows, stride, first, limit, width, wide);
        } else if constexpr (OF_TWO == Own::IN_REGISTERS) {
#pragma unroll
            for (u32 step = 0; step < P / TILE; step++) {
                held[step] = from_global(first + threadIdx.x / WARP * TILE, step * TILE, limit, width, wide);
            }
        }
    }
    __device__ __forceinline__ Factor from_global(u32 first, u32 column, u32 limit, u32 width, bool wide) const {
        const activation* at[HELD_ROWS];
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
            at[slot] = rows + min(first + tile_row(slot), limit - 1) * stride;
        }
        return load_factor(at, column, width, wide);
    }
    // The warp's rows, which begin at `first` of the sample, as a left factor.
    __device__ __forceinline__ Factor factor(u32 lane, u32 first, u32 column, u32 limit, u32 width,
                                             bool wide) const {
        if constexpr (OF_TWO == Own::IN_SHARED) {
            return load_factor(SharedRows<P>(memory, lane), threadIdx.x / WARP * TILE, column);
        } else if constexpr (OF_TWO == Own::IN_REGISTERS) {
            return held[column / TILE];
        } else {
            return from_global(first, column, limit, width, wide);
        }
    }
};

// Stores the warp's rows of a gradient, times `factor`.
template <u32 STEPS>
DEVICE void store_gradient(activation* gradient, const AttentionBackward& arguments,
                           const BlockPlace& block, const Accumulator (&sums)[STEPS],
                           float factor) {
    const AttentionInputs& inputs = arguments.inputs;
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const u32 own = block.tile * ROWS + threadIdx.x / WARP * TILE + tile_row(slot);
        if (own >= inputs.positions) continue;
        const u64 sample_row = static_cast<u64>(block.sample) * inputs.positions;
        activation* const row = gradient + (sample_row + own) * arguments.gradient_stride +
                                block.head * inputs.width;
#pragma unroll
        for (u32 n = 0; n < STEPS; n++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i += 2) {
                if (row_slot(i) != slot) continue;
                store_neighbours(row, n * TILE + tile_column(i), inputs.width,
                                 sums[n].at[i] * factor, sums[n].at[i + 1] * factor,
                                 arguments.wide_gradients != 0);
            }
        }
    }
}

// --- dq: queries walk the keys ---------------------------------------------------------------------

template <u32 P>
DEVICE void backward_queries(const AttentionBackward& arguments) {
    constexpr u32 STEPS = P / TILE, COUNT = WALKED<P>, TILES = COUNT / TILE;
    const AttentionInputs& inputs = arguments.inputs;
    SHARED(activation, memory);
    const BlockPlace block(inputs, true);
    const u32 width = inputs.width, first_column = block.head * width;
    const u32 shared_column = inputs.shared_head(block.head) * width;
    const bool wide = inputs.wide != 0;
    const u32 block_first = block.tile * ROWS;
    const u32 warp_first = block_first + threadIdx.x / WARP * TILE;
    const u64 sample_row = static_cast<u64>(block.sample) * inputs.positions;

    activation* const own_memory = memory + STAGES * 2 * COUNT * P;
    OwnRows<P> q{inputs.q + sample_row * inputs.q_stride + first_column, own_memory,
                       inputs.q_stride};
    OwnRows<P> dout{arguments.dout + sample_row * arguments.dout_stride + first_column,
                          own_memory + OwnRows<P>::ELEMENTS, arguments.dout_stride};
    const activation* const k = inputs.k + block.sample * inputs.k_sample + shared_column;
    const activation* const v = inputs.v + block.sample * inputs.v_sample + shared_column;

    const CommonMaskRange warp_range = common_mask_range(inputs, block.sample, 0, warp_first, TILE);
    const CommonMaskRange block_range = common_mask_range(inputs, block.sample, 0, block_first, ROWS);
    const u32 begin = block_range.some.first / COUNT * COUNT;
    const u32 end = block_range.some.last + 1;

    const u32 position = warp_first + tile_row(0);
    const u64 pair = static_cast<u64>(block.sample) * inputs.heads + block.head;
    float sum[HELD_ROWS], delta[HELD_ROWS];
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const u64 place = pair * arguments.padded + warp_first + tile_row(slot);
        sum[slot] = arguments.sums[place];
        delta[slot] = arguments.deltas[place];
    }
    const float slope = inputs.slopes ? inputs.slopes[block.head] * LOG2_E : 0.0f;
    const float scale = inputs.scale * LOG2_E;

    q.load(block_first, inputs.positions, width, wide);
    dout.load(block_first, inputs.positions, width, wide);
    load_rows<COUNT>(SharedRows<P>(memory), k, inputs.k_stride, begin, end, width, wide);
    load_rows<COUNT>(SharedRows<P>(memory + COUNT * P), v, inputs.v_stride, begin, end, width, wide);
    copy_async_commit();

    Accumulator dq[STEPS];
#pragma unroll
    for (u32 n = 0; n < STEPS; n++) dq[n] = zero_tile();
    u32 stage = 0;
    for (u32 first = begin; first < end; first += COUNT) {
        const u32 lane = formed_anew(lane_of_warp());
        activation* const here = memory + stage * 2 * COUNT * P;
        const SharedRows<P> keys(here, lane), values(here + COUNT * P, lane);
        stage = (stage + 1) % STAGES;
        activation* const next = memory + stage * 2 * COUNT * P;
        const bool more = first + COUNT < end;
        copy_async_wait<0>();
        __syncthreads();
        if (STAGES > 1 && more) {
            load_rows<COUNT>(SharedRows<P>(next), k, inputs.k_stride, first + COUNT, end, width, wide);
            load_rows<COUNT>(SharedRows<P>(next + COUNT * P), v, inputs.v_stride, first + COUNT, end,
                             width, wide);
            copy_async_commit();
        }
        const CommonMaskRange::Coverage coverage = warp_range.coverage(first, COUNT);
        Accumulator scores[TILES], ds[TILES];
        if (coverage != CommonMaskRange::NONE) {
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
                scores[n] = zero_tile();
                ds[n] = zero_tile();
            }
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                const Factor of_q =
                    q.factor(lane, warp_first, step * TILE, inputs.positions, width, wide);
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    multiply_add<Stored::BY_COLUMN>(scores[n], of_q, keys, step * TILE, n * TILE);
                }
                const Factor of_dout =
                    dout.factor(lane, warp_first, step * TILE, inputs.positions, width, wide);
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    multiply_add<Stored::BY_COLUMN>(ds[n], of_dout, values, step * TILE, n * TILE);
                }
            }
        }
        // Some rows do not attend to some of the keys, which are now the right factor. All scores are finished.
        if (block_range.coverage(first, COUNT) == CommonMaskRange::PARTIAL) {
            __syncthreads();
            clear_not_finite<COUNT>(keys);
        }
        if (coverage != CommonMaskRange::NONE) {
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < HELD; i++) {
                    const u32 slot = row_slot(i);
                    float shift = -sum[slot];
                    if (inputs.slopes) {
                        const u32 own = position + tile_row(slot) - tile_row(0);
                        const int distance =
                            static_cast<int>(own - first - n * TILE - tile_column(i));
                        shift = fmaf(-slope, static_cast<float>(distance), shift);
                    }
                    const float p = exp2_fast(fmaf(scores[n].at[i], scale, shift));
                    ds[n].at[i] = p * (ds[n].at[i] - delta[slot]);
                }
            }
            if (coverage == CommonMaskRange::PARTIAL) {
                MaskRange range[HELD_ROWS];
                mask_ranges_of_rows(inputs, range);
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                    for (u32 i = 0; i < HELD; i++) {
                        const u32 key = first + n * TILE + tile_column(i);
                        if (!range[row_slot(i)].holds(key)) ds[n].at[i] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (u32 m = 0; m < TILES; m++) {
                const Factor factor = as_factor(ds[m]);
#pragma unroll
                for (u32 n = 0; n < STEPS; n++) {
                    multiply_add<Stored::BY_TERM>(dq[n], factor, keys, m * TILE, n * TILE);
                }
            }
        }
        if (STAGES == 1 && more) {
            __syncthreads();
            load_rows<COUNT>(SharedRows<P>(next), k, inputs.k_stride, first + COUNT, end, width, wide);
            load_rows<COUNT>(SharedRows<P>(next + COUNT * P), v, inputs.v_stride, first + COUNT, end,
                             width, wide);
            copy_async_commit();
        }
    }
    store_gradient(arguments.dq, arguments, BlockPlace(inputs, true), dq, inputs.scale);
}

// --- dk and dv: keys walk the queries ----------------------------------------------------------------

// Which gradients a block computes. With wide heads there is no room for both.
enum class Gradients { OF_BOTH, OF_KEYS, OF_VALUES };

// Which queries of a tile attend to the keys of a warp or a block.
struct QueryMaskRange {
    u32 least_first;     // the least of the first keys that the queries attend to
    u32 greatest_first;

    // The queries `first .. first + count`. Every lane of a warp takes part.
    __device__ __forceinline__ QueryMaskRange(const AttentionInputs& inputs, u32 sample, u32 first,
                                          u32 count) {
        const u32 last = min(first + count, inputs.positions) - 1;
        if (inputs.starts) {
            const u32 own = mask_range_of(inputs, sample, min(first + lane_of_warp(), last), 0).first;
            least_first = warp_least(own);
            greatest_first = warp_greatest(own);
        } else {
            least_first = mask_range_of(inputs, sample, first, 0).first;
            greatest_first = mask_range_of(inputs, sample, last, 0).first;
        }
    }

    __device__ __forceinline__ CommonMaskRange::Coverage coverage(u32 first, u32 count, u32 first_key,
                                                                u32 last_key) const {
        if (first + count <= first_key || least_first > last_key) return CommonMaskRange::NONE;
        return first >= last_key && greatest_first <= first_key ? CommonMaskRange::FULL
                                                                : CommonMaskRange::PARTIAL;
    }
};

template <u32 P, Gradients GRADIENTS>
DEVICE void backward_keys(const AttentionBackward& arguments) {
    constexpr bool OF_KEYS = GRADIENTS != Gradients::OF_VALUES;
    constexpr bool OF_VALUES = GRADIENTS != Gradients::OF_KEYS;
    constexpr u32 STEPS = P / TILE, COUNT = WALKED<P>, TILES = COUNT / TILE;
    constexpr u32 KEY_STEPS = OF_KEYS ? STEPS : 1, VALUE_STEPS = OF_VALUES ? STEPS : 1;
    // A stage holds one tile of q and one of dout, and the log-sum-exp and deltas of their rows.
    constexpr u32 SUMS = 2 * COUNT * sizeof(float) / sizeof(activation);
    constexpr u32 STAGE = 2 * COUNT * P + SUMS;
    const AttentionInputs& inputs = arguments.inputs;
    SHARED(activation, memory);
    const BlockPlace block(inputs, false);
    const u32 width = inputs.width, first_column = block.head * width;
    const u32 shared_column = inputs.shared_head(block.head) * width;
    const bool wide = inputs.wide != 0;
    const u32 block_first = block.tile * ROWS, block_last = block_first + ROWS - 1;
    const u32 warp_first = block_first + threadIdx.x / WARP * TILE, warp_last = warp_first + TILE - 1;
    const u64 sample_row = static_cast<u64>(block.sample) * inputs.positions;

    activation* const own_memory = memory + STAGES * STAGE;
    OwnRows<P> k{inputs.k + block.sample * inputs.k_sample + shared_column, own_memory,
                       inputs.k_stride};
    OwnRows<P> v{inputs.v + block.sample * inputs.v_sample + shared_column,
                       own_memory + OwnRows<P>::ELEMENTS, inputs.v_stride};
    const activation* const q = inputs.q + sample_row * inputs.q_stride + first_column;
    const activation* const dout =
        arguments.dout + sample_row * arguments.dout_stride + first_column;
    const u64 pair = static_cast<u64>(block.sample) * inputs.heads + block.head;
    const float* const sums = arguments.sums + pair * arguments.padded;
    const float* const deltas = arguments.deltas + pair * arguments.padded;

    const u32 limit = inputs.positions;
    // The last query that attends to the last key is window - 1 positions later.
    const u32 end = inputs.window < limit ? min(limit, block_last + inputs.window) : limit;
    const float slope = inputs.slopes ? inputs.slopes[block.head] * LOG2_E : 0.0f;
    const float scale = inputs.scale * LOG2_E;

    const auto load_stage = [&](u32 stage, u32 first) {
        activation* const to = memory + stage * STAGE;
        load_rows<COUNT>(SharedRows<P>(to), q, inputs.q_stride, first, limit, width, wide);
        load_rows<COUNT>(SharedRows<P>(to + COUNT * P), dout, arguments.dout_stride, first, limit,
                         width, wide);
        float* const to_sums = reinterpret_cast<float*>(to + 2 * COUNT * P);
        const u32 chunk = threadIdx.x * 4;
        if (chunk < COUNT) copy_async_16(to_sums + chunk, sums + first + chunk);
        if (chunk < COUNT) copy_async_16(to_sums + COUNT + chunk, deltas + first + chunk);
        copy_async_commit();
    };
    k.load(block_first, limit, width, wide);
    v.load(block_first, limit, width, wide);
    load_stage(0, block_first);

    Accumulator dk[KEY_STEPS], dv[VALUE_STEPS];
#pragma unroll
    for (u32 n = 0; n < KEY_STEPS; n++) dk[n] = zero_tile();
#pragma unroll
    for (u32 n = 0; n < VALUE_STEPS; n++) dv[n] = zero_tile();
    u32 stage = 0;
    for (u32 first = block_first; first < end; first += COUNT) {
        const u32 lane = formed_anew(lane_of_warp());
        activation* const here = memory + stage * STAGE;
        const SharedRows<P> queries(here, lane), douts(here + COUNT * P, lane);
        const float* const own_sums = reinterpret_cast<const float*>(here + 2 * COUNT * P);
        stage = (stage + 1) % STAGES;
        const bool more = first + COUNT < end;
        copy_async_wait<0>();
        __syncthreads();
        if (STAGES > 1 && more) load_stage(stage, first + COUNT);
        const QueryMaskRange range(inputs, block.sample, first, COUNT);
        const CommonMaskRange::Coverage coverage = range.coverage(first, COUNT, warp_first, warp_last);
        // Some queries do not attend to some of the keys: both tiles are right factors. A row's sum shows if it is finite.
        if (range.coverage(first, COUNT, block_first, block_last) == CommonMaskRange::PARTIAL) {
            clear_not_finite<COUNT>(queries);
            clear_not_finite<COUNT>(douts);
        }
        if (coverage != CommonMaskRange::NONE) {
            Accumulator p[TILES], ds[TILES];
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
                p[n] = zero_tile();
                ds[n] = zero_tile();
            }
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                const Factor of_k = k.factor(lane, warp_first, step * TILE, limit, width, wide);
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    multiply_add<Stored::BY_COLUMN>(p[n], of_k, queries, step * TILE, n * TILE);
                }
                if (!OF_KEYS) continue;
                const Factor of_v = v.factor(lane, warp_first, step * TILE, limit, width, wide);
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    multiply_add<Stored::BY_COLUMN>(ds[n], of_v, douts, step * TILE, n * TILE);
                }
            }
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < HELD; i++) {
                    const u32 own = n * TILE + tile_column(i);
                    float shift = -own_sums[own];
                    if (inputs.slopes) {
                        const u32 key = warp_first + tile_row(row_slot(i));
                        const int distance = static_cast<int>(first + own - key);
                        shift = fmaf(-slope, static_cast<float>(distance), shift);
                    }
                    p[n].at[i] = exp2_fast(fmaf(p[n].at[i], scale, shift));
                    ds[n].at[i] = p[n].at[i] * (ds[n].at[i] - own_sums[COUNT + own]);
                }
            }
            if (coverage == CommonMaskRange::PARTIAL) {
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                    for (u32 i = 0; i < HELD; i++) {
                        const u32 query = first + n * TILE + tile_column(i);
                        const u32 key = warp_first + tile_row(row_slot(i));
                        const u32 there = min(query, limit - 1);
                        const u32 first_key = mask_range_of(inputs, block.sample, there, 0).first;
                        if (key >= first_key && key <= query) continue;
                        p[n].at[i] = 0.0f;
                        ds[n].at[i] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (u32 m = 0; m < TILES; m++) {
                const Factor of_p = as_factor(p[m]), of_ds = as_factor(ds[m]);
#pragma unroll
                for (u32 n = 0; n < STEPS; n++) {
                    if constexpr (OF_VALUES) {
                        multiply_add<Stored::BY_TERM>(dv[n], of_p, douts, m * TILE, n * TILE);
                    }
                    if constexpr (OF_KEYS) {
                        multiply_add<Stored::BY_TERM>(dk[n], of_ds, queries, m * TILE, n * TILE);
                    }
                }
            }
        }
        if (STAGES == 1 && more) {
            __syncthreads();
            load_stage(stage, first + COUNT);
        }
    }
    const BlockPlace place(inputs, false);
    if constexpr (OF_KEYS) store_gradient(arguments.dk, arguments, place, dk, inputs.scale);
    if constexpr (OF_VALUES) store_gradient(arguments.dv, arguments, place, dv, 1.0f);
}

#define BACKWARD_QUERIES(P, blocks)                                         \
    KERNEL(attention_backward_q_##P, THREADS, blocks, AttentionBackward) {  \
        backward_queries<P>(arguments);                                     \
    }                                                                       \
    SHARED_BYTES(attention_backward_q_##P, BACKWARD_SHARED_BYTES<P>);
#define BACKWARD_KEYS(name, P, blocks, gradients)                           \
    KERNEL(attention_backward_##name##_##P, THREADS, blocks, AttentionBackward) { \
        backward_keys<P, Gradients::gradients>(arguments);                  \
    }                                                                       \
    SHARED_BYTES(attention_backward_##name##_##P, BACKWARD_SHARED_BYTES<P>);

// A stage of either walk holds a tile of each of two matrices, and the log-sum-exp and deltas of its rows.
template <u32 P>
constexpr u32 BACKWARD_SHARED_BYTES =
    STAGES * 2 * WALKED<P> * (P * sizeof(activation) + sizeof(float)) + OWN_SHARED_BYTES<P, 2>;

#if HEAD_WIDTH == 32
BACKWARD_QUERIES(32, 2)
BACKWARD_KEYS(kv, 32, 2, OF_BOTH)
#elif HEAD_WIDTH == 256
BACKWARD_QUERIES(256, 1)
BACKWARD_KEYS(k, 256, 1, OF_KEYS)
BACKWARD_KEYS(v, 256, 1, OF_VALUES)
#elif GROUP_PRODUCTS
#include "attention_backward_groups_kernels.h"
#elif HEAD_WIDTH == 64
BACKWARD_QUERIES(64, 2)
BACKWARD_KEYS(kv, 64, 2, OF_BOTH)
#else
BACKWARD_QUERIES(128, 2)
BACKWARD_KEYS(kv, 128, 1, OF_BOTH)
#endif
