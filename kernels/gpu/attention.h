// Common parts of the attention kernels: which keys a query attends to, and how tiles of rows are loaded into shared
// memory.
//
// A block has ROWS rows of one head of one sample, a warp 16 of them. It walks tiles of the other side's rows, which
// begin at whole multiples of their size from the sample's first position. A row's bits depend only on the keys that it
// attends to: a masked score adds exactly 0 to its sums, and numbers that are not finite are cleared first, as their
// product with that 0 would not be 0 (clear_not_finite).
#pragma once

constexpr u32 WARPS = 4;
constexpr u32 THREADS = WARPS * WARP;
constexpr u32 ROWS = WARPS * TILE;

// The inputs that forward and backward share.
struct AttentionInputs {
    const activation* q;  // [b t, h p], as k and v
    const activation* k;
    const activation* v;
    const float* slopes;  // [h], or null
    const u32* starts;    // [b t], or null
    const u32* past;      // [b], or null: the position of each sample's first query
    u64 q_stride;
    u64 k_stride;
    u64 v_stride;
    u64 k_sample;  // elements between samples
    u64 v_sample;
    u32 positions;  // t: queries of a sample
    u32 keys;       // of a sample
    u32 heads;
    u32 width;   // p
    u32 window;  // the most positions that a query attends to
    u32 tiles;   // of ROWS rows in a sample
    float scale;
    u32 wide;  // whether rows are loaded 16 bytes at a time
    u32 group;  // heads of queries that share one of keys and values
    u32 unused;

    // The head of keys and values that belongs to a head of queries.
    __device__ __forceinline__ u32 shared_head(u32 head) const { return head / group; }
};

// The number of rows of keys or values that are in shared memory at once.
template <u32 P>
constexpr u32 KEYS = P * sizeof(activation) <= 256 ? 64 : 16384 / (P * sizeof(activation));

// Where the rows of a block, for MATRICES matrices, are kept while they serve as left factors again and again. AMD's
// compute units have 64 KiB of shared memory, which tiles of the other side need, and enough registers for a lane's
// part of these rows.
enum class Own { IN_SHARED, IN_REGISTERS, IN_GLOBAL };
template <u32 P, u32 MATRICES>
constexpr Own OWN = WARP == 64 ? (MATRICES * P * sizeof(activation) <= 1024 ? Own::IN_REGISTERS : Own::IN_GLOBAL)
                               : (P * sizeof(activation) <= 256 ? Own::IN_SHARED : Own::IN_GLOBAL);
template <u32 P, u32 MATRICES>
constexpr u32 OWN_SHARED_BYTES = OWN<P, MATRICES> == Own::IN_SHARED ? MATRICES * ROWS * P * sizeof(activation) : 0;

constexpr u32 NO_POSITION = 0xffffffffu;

// The head and the sample of a block, and its tile of rows. Long walks come first, so that no block begins one at the
// end.
struct BlockPlace {
    u32 head;
    u32 sample;
    u32 tile;

    __device__ __forceinline__ BlockPlace(const AttentionInputs& inputs, bool longest_is_last) {
        const u32 heads_of_all = gridDim.x / inputs.tiles;
        const u32 index = formed_anew(blockIdx.x);
        const u32 pair = index % heads_of_all;
        const u32 rank = index / heads_of_all;
        head = pair % inputs.heads;
        sample = pair / inputs.heads;
        tile = longest_is_last ? inputs.tiles - 1 - rank : rank;
    }
};

// The keys that a query attends to: from `first` to `last`.
struct MaskRange {
    u32 first;
    u32 last;

    __device__ __forceinline__ bool holds(u32 key) const { return key >= first && key <= last; }
};

DEVICE MaskRange mask_range_of(const AttentionInputs& inputs, u32 sample, u32 query, u32 past) {
    const u32 position = past + query;
    u32 first = position >= inputs.window ? position - inputs.window + 1 : 0;
    if (inputs.starts) {
        const u64 row = static_cast<u64>(sample) * inputs.positions + query;
        first = max(first, inputs.starts[row]);
    }
    return {first, position};
}

// The keys of the lane's rows, where the warp's rows begin at `first`. Rows past the last get the keys of the last.
DEVICE void mask_ranges_of_rows(const AttentionInputs& inputs, u32 sample, u32 first,
                                MaskRange (&range)[HELD_ROWS]) {
    const u32 past = inputs.past ? inputs.past[sample] : 0;
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const u32 query = min(first + tile_row(slot), inputs.positions - 1);
        range[slot] = mask_range_of(inputs, sample, query, past);
    }
}
DEVICE void mask_ranges_of_rows(const AttentionInputs& inputs, MaskRange (&range)[HELD_ROWS]) {
    const BlockPlace block(inputs, true);
    const u32 first = block.tile * ROWS + threadIdx.x / WARP * TILE;
    mask_ranges_of_rows(inputs, block.sample, first, range);
}

// The keys of all rows of a warp or a block together.
struct CommonMaskRange {
    MaskRange all;   // keys that every row attends to, if first is not after last
    MaskRange some;  // keys that at least one row attends to

    enum Coverage { NONE, PARTIAL, FULL };

    // How much of the keys `first .. first + count` the rows attend to: NONE only where all of these come after the
    // last such key.
    __device__ __forceinline__ Coverage coverage(u32 first, u32 count) const {
        const u32 last = first + count - 1;
        if (first > some.last) return NONE;
        return first >= all.first && last <= all.last ? FULL : PARTIAL;
    }
};

// The keys of queries `first .. first + count` of a sample, as far as these exist. Every lane of a warp takes part.
DEVICE CommonMaskRange common_mask_range(const AttentionInputs& inputs, u32 sample, u32 past, u32 first,
                                          u32 count) {
    CommonMaskRange range{{0, NO_POSITION}, {NO_POSITION, 0}};
    const u32 end = min(first + count, inputs.positions);
    for (u32 query = first + lane_of_warp(); query < end; query += WARP) {
        const MaskRange own = mask_range_of(inputs, sample, query, past);
        range.all.first = max(range.all.first, own.first);
        range.all.last = min(range.all.last, own.last);
        range.some.first = min(range.some.first, own.first);
        range.some.last = max(range.some.last, own.last);
    }
    range.all.first = warp_greatest(range.all.first);
    range.all.last = warp_least(range.all.last);
    range.some.first = warp_least(range.some.first);
    range.some.last = warp_greatest(range.some.last);
    return range;
}

// Copies rows `first .. first + COUNT` of `from` to shared memory, with zeros from `limit` on and in the padding of a
// row. The rows are complete once the thread's copies have ended and the block has passed a barrier.
template <u32 COUNT, u32 P>
DEVICE void load_rows(SharedRows<P> to, const activation* from, u64 stride, u32 first, u32 limit,
                      u32 width, bool wide) {
    constexpr u32 CHUNK = SharedRows<P>::CHUNK, CHUNKS = SharedRows<P>::CHUNKS;
    static_assert(THREADS % CHUNKS == 0, "a thread's chunks are below one another");
    constexpr u32 PASS_ROWS = THREADS / CHUNKS, PASSES = (COUNT + PASS_ROWS - 1) / PASS_ROWS;
    const u32 column = threadIdx.x % CHUNKS * CHUNK;
    u32 row = threadIdx.x / CHUNKS;
    if (COUNT % PASS_ROWS != 0 && row >= COUNT) return;
    static_assert(COUNT % PASS_ROWS == 0 || PASSES == 1, "all passes but a lone one are whole");
    const activation* source = from + (first + row) * stride + column;
#pragma unroll 2
    for (u32 pass = 0; pass < PASSES; pass++, row += PASS_ROWS, source += PASS_ROWS * stride) {
        activation* const place = to.chunk(row, column);
        const bool inside = first + row < limit && column < width;
        if (inside && wide) {
            copy_async_16(place, source);
        } else {
            store4(reinterpret_cast<float*>(place), make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            const u32 count = inside ? min(CHUNK, width - column) : 0;
#pragma unroll 1
            for (u32 element = 0; element < count; element++) place[element] = source[element];
        }
    }
}

// Columns `column .. column + TILE` of the lane's rows, which begin at `rows`, as a left factor.
DEVICE Factor load_factor(const activation* const (&rows)[HELD_ROWS], u32 column, u32 all, bool wide) {
    // Without this, AMD's compiler computes once which columns exist, and keeps every answer in scalar registers, which
    // it lacks.
    const u32 width = ON_AMD ? formed_anew(all) : all;
    Factor factor;
    if (wide && column + TILE <= width) {
#pragma unroll
        for (u32 pair = 0; pair < HELD / 2; pair++) {
            load_pair(factor, pair, rows[row_slot(2 * pair)] + column + tile_column(2 * pair));
        }
        return factor;
    }
#pragma unroll
    for (u32 pair = 0; pair < HELD / 2; pair++) {
        const u32 own = column + tile_column(2 * pair);
        const activation* const at = rows[row_slot(2 * pair)] + own;
        const float first = own < width ? widen(at[0]) : 0.0f;
        const float second = own + 1 < width ? widen(at[1]) : 0.0f;
        set_pair(factor, pair, first, second);
    }
    return factor;
}

// Two neighbours of a row of results, of which the first `width - column` exist.
DEVICE void store_neighbours(activation* row, u32 column, u32 width, float first, float second,
                             bool wide) {
    if (wide && column < width) {
        store_pack<2>(row + column, Pack<2>{{first, second}});
        return;
    }
    if (column < width) narrow(row[column], first);
    if (column + 1 < width) narrow(row[column + 1], second);
}

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Replaces numbers that are not finite by zeros, in the thread's share of rows that a product takes as its right
// factor: a masked 0 times those would not be 0. Returns whether there were any.
template <u32 COUNT, u32 P>
DEVICE bool clear_own_share(SharedRows<P> rows) {
    bool found = false;
#pragma unroll 1
    for (u32 i = threadIdx.x * 2; i < COUNT * P; i += THREADS * 2) {
        activation* const pair = rows.start + i;
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            if (is_finite(widen(pair[j]))) continue;
            found = true;
            narrow(pair[j], 0.0f);
        }
    }
    return found;
}
// The same for all rows, by the whole block.
template <u32 COUNT, u32 P>
DEVICE void clear_not_finite(SharedRows<P> rows) {
#if WARP == 32
    __syncthreads_or(clear_own_share<COUNT>(rows));
#else
    clear_own_share<COUNT>(rows);
    __syncthreads();
#endif
}
// The same; returns, to the whole block, whether there were any. Wide warps combine their answers in `free`, shared
// memory of one word for each warp: the compiler's own way takes so much shared memory that one block fewer fits.
template <u32 COUNT, u32 P>
DEVICE bool clear_not_finite(SharedRows<P> rows, activation* free) {
    const bool found = clear_own_share<COUNT>(rows);
#if WARP == 32
    return __syncthreads_or(found) != 0;
#else
    u32* const of_warps = reinterpret_cast<u32*>(free);
    const u32 of_warp = warp_greatest(found ? 1 : 0);
    if (lane_of_warp() == 0) of_warps[threadIdx.x / WARP] = of_warp;
    __syncthreads();
    u32 of_block = 0;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) of_block |= of_warps[warp];
    __syncthreads();
    return of_block != 0;
#endif
}
