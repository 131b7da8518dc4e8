// Products whose order over k is stated, `out[m, n] = a[m, k] weight[n, k]^T`: an element of `out` has the same bits
// among any other rows and from any kernel of ordered_product.cu.
//
// k is cut into segments of SEGMENT terms. The sum of a segment begins with +0.0; sums of segments are added in ascending order,
// (s0 + s1) + s2 and so on, in fp32, and the whole is rounded once, or added to what `out` holds and then rounded.
//
// For bf16, a segment takes 16 consecutive terms at a time: a step, which is one instruction of the matrix cores. Terms
// past k, up to a multiple of STEP_TERMS, count as zeros in every kernel.
//
// For fp32, a segment's terms are added one by one, each by a fused multiply-add.
#pragma once

constexpr u32 SEGMENT = 512;

struct OrderedProduct {
    void* out;                 // [m, n], activations, or fp32 if out_is_fp32
    float* segment_sums;       // [segments, m, n], or null where each block computes all segments
    const activation* a;       // [m, k]
    const activation* weight;  // [n, k]
    u64 out_stride;
    u64 a_stride;
    u64 weight_stride;
    u64 group_of_warp;  // for few rows: four bits for each warp of a block
    u32 rows;      // m
    u32 columns;   // n
    u32 terms;     // k
    u32 segments;  // of k
    u32 adds;      // whether the product is added to out
    u32 out_is_fp32;
    u32 pairs;       // whether two neighbours of a row of out, from an even column, are aligned to both
    u32 groups;      // for few rows: groups of columns of a block, each the tiles of a warp
    u32 walkers;     // and the warps that share the segments of each
    u32 row_blocks;  // blocks of rows
    u32 zero;        // always 0, which the compiler does not know
    u32 unused;
};

// Whether a block computes all segments, or only that of blockIdx.y, whose sum it leaves in segment_sums.
DEVICE bool walks_all(const OrderedProduct& product) { return product.segment_sums == nullptr; }

// The type of `out`.
template <class T>
DEVICE void finish(const OrderedProduct& product, T* at, float sum) {
    narrow(*at, product.adds ? widen(*at) + sum : sum);
}
DEVICE void store_result(const OrderedProduct& product, u32 row, u32 column, float sum) {
    if (row >= product.rows || column >= product.columns) return;
    const u64 place = row * product.out_stride + column;
    if (product.out_is_fp32) {
        finish(product, static_cast<float*>(product.out) + place, sum);
    } else {
        finish(product, static_cast<activation*>(product.out) + place, sum);
    }
}
DEVICE void store_segment_sum(const OrderedProduct& product, u32 segment, u32 row, u32 column, float sum) {
    if (row >= product.rows || column >= product.columns) return;
    const u64 all_rows = static_cast<u64>(segment) * product.rows + row;
    product.segment_sums[all_rows * product.columns + column] = sum;
}

#if ACTIVATION_BF16
constexpr u32 STEP_TERMS = 64;
constexpr u32 BLOCK_TERMS = 32;
constexpr u32 CHUNK = 8, HALF = CHUNK / 2;

// Tiles of results: 16 rows by 8 columns (NVIDIA) or 16 (AMD), four elements a lane.
constexpr u32 TILE_COLUMNS = WARP == 32 ? 8 : 16;
constexpr u32 SUMS = TILE * TILE_COLUMNS / WARP;
// Rows of `a` of which a lane loads 16 bytes.
constexpr u32 SLOTS = WARP == 32 ? 2 : 1;

typedef Pairs<CHUNK> Chunk;

// The lane's row among a tile's rows of `a` in slot 0 (slot 1 is eight further on), and its row of `weight`.
DEVICE u32 operand_row() { return WARP == 32 ? lane_of_warp() / 4 : lane_of_warp() % 16; }
// The four terms of a step that the lane has of its rows: terms 4 i .. 4 i + 4.
DEVICE u32 operand_part() { return WARP == 32 ? lane_of_warp() % 4 : lane_of_warp() / 16; }
// The eight terms of 32 that the lane loads as 16 bytes: the lanes of parts 0 to 3 have chunks 0, 2, 1 and 3, so that
// of any two neighbours the first has the terms that both need for the first step, and the second those for the second
// step.
DEVICE u32 operand_chunk() { return operand_part() % 2 * 2 + operand_part() / 2; }

// Elements of a tile of results.
struct Sums {
    float at[SUMS];
};
DEVICE u32 sum_row(u32 i) { return WARP == 32 ? lane_of_warp() / 4 + i / 2 * 8 : lane_of_warp() % 16; }
DEVICE u32 sum_column(u32 i) {
    return WARP == 32 ? lane_of_warp() % 4 * 2 + i % 2 : lane_of_warp() / 16 * 4 + i;
}
DEVICE Sums zero_sums() {
    Sums sums;
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) sums.at[i] = 0.0f;
    return sums;
}
DEVICE Chunk zero_chunk() {
    Chunk chunk;
#pragma unroll
    for (u32 i = 0; i < CHUNK / 2; i++) chunk.at[i] = 0;
    return chunk;
}

// Separates the words of one load. NVIDIA's compiler otherwise keeps them together, and would move them before every
// instruction that needs words of two loads side by side.
DEVICE void take_apart(const OrderedProduct& product, Chunk& chunk) {
#if ON_NVIDIA
#pragma unroll
    for (u32 i = 0; i < CHUNK / 2; i++) chunk.at[i] ^= product.zero;
#endif
}

// Neighbouring lanes exchange halves of the chunks that they loaded: then a lane has its part of the first step and of
// the second one.
DEVICE void exchange_halves(Chunk& chunk) {
    const bool is_first = operand_part() % 2 == 0;
#pragma unroll
    for (u32 i = 0; i < HALF / 2; i++) {
        const u32 given = is_first ? chunk.at[HALF / 2 + i] : chunk.at[i];
        const u32 taken = __float_as_uint(shuffle_xor(__uint_as_float(given), WARP == 32 ? 1 : 16));
        chunk.at[i] = is_first ? chunk.at[i] : taken;
        chunk.at[HALF / 2 + i] = is_first ? taken : chunk.at[HALF / 2 + i];
    }
}
// The lane's part of step STEP, from its first term on.
template <u32 STEP>
DEVICE void load_part(Chunk& chunk, const bf16* at) {
    const Pairs<HALF> pairs = load_pairs<HALF>(at);
#pragma unroll
    for (u32 i = 0; i < HALF / 2; i++) chunk.at[STEP * HALF / 2 + i] = pairs.at[i];
}

// sums += a weight^T over one of the two steps of 32 terms.
template <u32 STEP>
DEVICE void multiply_add(Sums& sums, const Chunk (&a)[SLOTS], const Chunk& weight) {
    constexpr u32 FIRST = 2 * STEP, SECOND = FIRST + 1;
#if defined(EMULATOR)
    // The elements that a lane holds of both, for the others to read.
    __shared__ Chunk lent[32][WARP][SLOTS + 1];
    Chunk(&of_warp)[WARP][SLOTS + 1] = lent[threadIdx.x / WARP];
    for (u32 slot = 0; slot < SLOTS; slot++) of_warp[lane_of_warp()][slot] = a[slot];
    of_warp[lane_of_warp()][SLOTS] = weight;
    warp_barrier();
    for (u32 i = 0; i < SUMS; i++) {
        const u32 row = sum_row(i), column = sum_column(i);
        for (u32 term = 0; term < 16; term += 2) {
            const u32 q = term / 4, pair = term % 4 == 0 ? FIRST : SECOND;
            const u32 row_lane = WARP == 32 ? row % 8 * 4 + q : q * 16 + row;
            const u32 column_lane = WARP == 32 ? column * 4 + q : q * 16 + column;
            const u32 x = of_warp[row_lane][WARP == 32 ? row / 8 : 0].at[pair];
            const u32 y = of_warp[column_lane][SLOTS].at[pair];
            sums.at[i] = fmaf(first_of(x), first_of(y), sums.at[i]);
            sums.at[i] = fmaf(second_of(x), second_of(y), sums.at[i]);
        }
    }
    warp_barrier();
#elif ON_NVIDIA
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums.at[0]), "+f"(sums.at[1]), "+f"(sums.at[2]), "+f"(sums.at[3])
        : "r"(a[0].at[FIRST]), "r"(a[1].at[FIRST]), "r"(a[0].at[SECOND]), "r"(a[1].at[SECOND]),
          "r"(weight.at[FIRST]), "r"(weight.at[SECOND]));
#else
    // Each product is computed transposed, so that a lane has neighbours of a row.
    union {
        u32 pairs[2];
        short4_vector all;
    } x, y;
    x.pairs[0] = weight.at[FIRST];
    x.pairs[1] = weight.at[SECOND];
    y.pairs[0] = a[0].at[FIRST];
    y.pairs[1] = a[0].at[SECOND];
    float4_vector c;
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) c[i] = sums.at[i];
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x.all, y.all, c, 0, 0, 0);
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) sums.at[i] = c[i];
#endif
}
// The same over all 32 terms of several tiles: with several tiles, no instruction waits for the sums of the one before.
template <u32 DOWN, u32 ACROSS>
DEVICE void multiply_add(Sums (&sums)[DOWN][ACROSS], const Chunk (&a)[DOWN][SLOTS],
                         const Chunk (&weight)[ACROSS]) {
#pragma unroll
    for (u32 down = 0; down < DOWN; down++) {
#pragma unroll
        for (u32 across = 0; across < ACROSS; across++) {
            multiply_add<0>(sums[down][across], a[down], weight[across]);
        }
    }
#pragma unroll
    for (u32 down = 0; down < DOWN; down++) {
#pragma unroll
        for (u32 across = 0; across < ACROSS; across++) {
            multiply_add<1>(sums[down][across], a[down], weight[across]);
        }
    }
}

// `at`, computed here and not again.
DEVICE const bf16* settled(const bf16* at) {
#if ON_NVIDIA
    asm volatile("" : "+l"(at));
#endif
    return at;
}

// 16 bytes of a weight that no other block reads, loaded at this place and not later.
DEVICE Chunk load_once(const bf16* global) {
#if ON_NVIDIA
    Chunk chunk;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(chunk.at[0]), "=r"(chunk.at[1]), "=r"(chunk.at[2]), "=r"(chunk.at[3])
        : "l"(global));
    return chunk;
#else
    return load_pairs<CHUNK>(global);
#endif
}

// Two neighbours of a row of results, from an even column.
DEVICE void store_results(const OrderedProduct& product, u32 row, u32 column, float first, float second) {
    if (!product.pairs || row >= product.rows || column + 1 >= product.columns) {
        store_result(product, row, column, first);
        store_result(product, row, column + 1, second);
        return;
    }
    const u64 place = row * product.out_stride + column;
    Pack<2> both{{first, second}};
    const auto add = [&](const Pack<2>& found) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) both.at[i] = found.at[i] + both.at[i];
    };
    if (product.out_is_fp32) {
        float* const at = static_cast<float*>(product.out) + place;
        if (product.adds) add(load_pack<2>(at));
        store_pack<2>(at, both);
    } else {
        bf16* const at = static_cast<bf16*>(product.out) + place;
        if (product.adds) add(load_pack<2>(at));
        store_pack<2>(at, both);
    }
}
#endif
