// Products of tiles of 16 x 16 elements, a warp's work: by matrix cores where activations are bf16, in fp32 by fused
// multiply-adds (NVIDIA) or the matrix cores' own fp32 (AMD).
//
// A warp holds a tile in its registers: HELD elements a lane, in HELD_ROWS rows. Element i of a lane stands in row
// tile_row(row_slot(i)) and column tile_column(i) of the tile, in an accumulator and in a left factor alike: so a
// result becomes the left factor of the next product without exchange between lanes. Elements 2 i and 2 i + 1 are
// neighbours in a row. AMD's instruction lays out a result like the transpose of a left factor, so there each product
// is computed transposed. Right factors come from shared memory.
//
// An element of a product depends on its row of the left factor and its column of the right one alone: neither on its
// place in the tile nor on other elements.
#pragma once

constexpr u32 TILE = 16;
constexpr u32 HELD = TILE * TILE / WARP;
constexpr u32 HELD_ROWS = WARP == 32 ? 2 : 1;

DEVICE u32 lane_of_warp() { return threadIdx.x % WARP; }

// The index of the row, among the lane's rows, that element `i` stands in.
DEVICE constexpr u32 row_slot(u32 i) { return WARP == 32 ? i / 2 % 2 : 0; }
DEVICE u32 tile_row(u32 slot) {
    return WARP == 32 ? lane_of_warp() / 4 + 8 * slot : lane_of_warp() % 16;
}
DEVICE u32 first_tile_column() {
    return WARP == 32 ? lane_of_warp() % 4 * 2 : lane_of_warp() / 16 * 4;
}
DEVICE constexpr u32 column_step(u32 i) { return WARP == 32 ? i / 4 * 8 + i % 2 : i; }
DEVICE u32 tile_column(u32 i) { return first_tile_column() + column_step(i); }

struct Accumulator {
    float at[HELD];
};
DEVICE Accumulator zero_tile() {
    Accumulator zero;
#pragma unroll
    for (u32 i = 0; i < HELD; i++) zero.at[i] = 0.0f;
    return zero;
}

// The left factor of a product.
#if ACTIVATION_BF16
struct Factor {
    u32 pairs[HELD / 2];
};
DEVICE void set_pair(Factor& factor, u32 pair, float first, float second) {
    factor.pairs[pair] = bf16_pair(first, second);
}
// Two neighbours, the first at a place aligned to both.
DEVICE void load_pair(Factor& factor, u32 pair, const bf16* at) {
    factor.pairs[pair] = *reinterpret_cast<const u32*>(at);
}
#else
struct Factor {
    float at[HELD];
};
DEVICE void set_pair(Factor& factor, u32 pair, float first, float second) {
    factor.at[2 * pair] = first;
    factor.at[2 * pair + 1] = second;
}
DEVICE void load_pair(Factor& factor, u32 pair, const float* at) {
    const float2 both = *reinterpret_cast<const float2*>(at);
    set_pair(factor, pair, both.x, both.y);
}
#endif

// A result as the left factor of the next product, rounded to activations.
DEVICE Factor as_factor(const Accumulator& tile) {
    Factor factor;
#pragma unroll
    for (u32 i = 0; i < HELD; i += 2) set_pair(factor, i / 2, tile.at[i], tile.at[i + 1]);
    return factor;
}

// --- over the lanes of a warp -------------------------------------------------------------------------

// The sum or the maximum over the lanes that share a row: all of them get the same bits.
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, WARP == 32 ? 1 : 16);
    return x + shuffle_xor(x, WARP == 32 ? 2 : 32);
}
DEVICE float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, WARP == 32 ? 1 : 16));
    return fmaxf(x, shuffle_xor(x, WARP == 32 ? 2 : 32));
}
DEVICE u32 warp_least(u32 x) {
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) {
        x = min(x, __float_as_uint(shuffle_xor(__uint_as_float(x), mask)));
    }
    return x;
}
DEVICE u32 warp_greatest(u32 x) { return ~warp_least(~x); }

// --- rows in shared memory ----------------------------------------------------------------------------

// Rows of COLUMNS activations. Chunks of 16 bytes are permuted within a row, so that neither eight rows of a column nor
// eight columns of a row lie in the same bank.
template <u32 COLUMNS>
struct SharedRows {
    static constexpr u32 CHUNK = 16 / sizeof(activation);
    static constexpr u32 CHUNKS = COLUMNS / CHUNK;
    static constexpr u32 PERMUTED = CHUNKS < 8 ? CHUNKS : 8;

    activation* start;
    u32 lane;  // the thread's own in its warp

    __device__ __forceinline__ explicit SharedRows(activation* memory, u32 lane = lane_of_warp())
        : start(memory), lane(lane) {}

    // The chunk that holds `column`, a whole multiple of CHUNK.
    __device__ __forceinline__ activation* chunk(u32 row, u32 column) const {
        const u32 place = column / CHUNK ^ row / (8 / PERMUTED) % PERMUTED;
        return start + row * COLUMNS + place * CHUNK;
    }
    __device__ __forceinline__ activation* at(u32 row, u32 column) const {
        return chunk(row, column - column % CHUNK) + column % CHUNK;
    }
};

// How a right factor lies in shared memory.
enum class Stored {
    BY_TERM,    // a row holds one term of the sums, for all columns
    BY_COLUMN,  // a row holds a column of the factor
};

// The element of term `term` and column `column`.
template <Stored STORED, u32 COLUMNS>
DEVICE float right_element(SharedRows<COLUMNS> right, u32 term, u32 column) {
    return widen(*(STORED == Stored::BY_TERM ? right.at(term, column) : right.at(column, term)));
}

#if ON_NVIDIA && ACTIVATION_BF16
// Four matrices of 8 x 8: lane l gives row l % 8 of matrix l / 8, and gets its pair of each matrix.
template <Stored STORED>
DEVICE void load_matrices(u32 (&matrices)[4], const bf16* row) {
    const u32 place = static_cast<u32>(__cvta_generic_to_shared(row));
    if (STORED == Stored::BY_TERM) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                     : "r"(place)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                     : "r"(place)
                     : "memory");
    }
}
#endif

// The tile that begins at `row` and `column`, as a left factor.
template <u32 COLUMNS>
DEVICE Factor load_factor(const SharedRows<COLUMNS>& rows, u32 row, u32 column) {
    Factor factor;
#if ON_NVIDIA && ACTIVATION_BF16
    const u32 matrix = rows.lane / 8;
    const bf16* const of_lane =
        rows.chunk(row + matrix % 2 * 8 + rows.lane % 8, column + matrix / 2 * 8);
    load_matrices<Stored::BY_COLUMN>(factor.pairs, of_lane);
#else
#pragma unroll
    for (u32 pair = 0; pair < HELD / 2; pair++) {
        const u32 own = row + tile_row(row_slot(2 * pair));
        load_pair(factor, pair, rows.at(own, column + tile_column(2 * pair)));
    }
#endif
    return factor;
}

// The transpose of the tile that begins at `row` and `column`, as a left factor: a lane's row is a column in memory.
template <u32 COLUMNS>
DEVICE Factor load_transposed(const SharedRows<COLUMNS>& rows, u32 row, u32 column) {
    Factor factor;
#if ON_NVIDIA && ACTIVATION_BF16
    const u32 matrix = rows.lane / 8;
    const bf16* const of_lane = rows.chunk(row + matrix / 2 * 8 + rows.lane % 8, column + matrix % 2 * 8);
    load_matrices<Stored::BY_TERM>(factor.pairs, of_lane);
#else
#pragma unroll
    for (u32 pair = 0; pair < HELD / 2; pair++) {
        const u32 own = column + tile_row(row_slot(2 * pair)), first = row + tile_column(2 * pair);
        set_pair(factor, pair, widen(*rows.at(first, own)), widen(*rows.at(first + 1, own)));
    }
#endif
    return factor;
}

#if ON_AMD
typedef short short4_vector __attribute__((ext_vector_type(4)));
typedef float float4_vector __attribute__((ext_vector_type(4)));
#endif

#if ON_NVIDIA && ACTIVATION_BF16
// Sixteen terms of sixteen columns of a right factor, in registers.
struct RightFactor {
    u32 pairs[4];
};
template <Stored STORED, u32 COLUMNS>
DEVICE void load_right(RightFactor& factor, const SharedRows<COLUMNS>& right, u32 term, u32 column) {
    const u32 lane = right.lane, matrix = lane / 8;
    const u32 next_term = term + matrix % 2 * 8, next_column = column + matrix / 2 * 8;
    if (STORED == Stored::BY_TERM) {
        load_matrices<STORED>(factor.pairs, right.chunk(next_term + lane % 8, next_column));
    } else {
        load_matrices<STORED>(factor.pairs, right.chunk(next_column + lane % 8, next_term));
    }
}
DEVICE void multiply_add(Accumulator& sum, const Factor& left, const RightFactor& right) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float* const at = sum.at + 4 * half;
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(at[0]), "+f"(at[1]), "+f"(at[2]), "+f"(at[3])
            : "r"(left.pairs[0]), "r"(left.pairs[1]), "r"(left.pairs[2]), "r"(left.pairs[3]),
              "r"(right.pairs[2 * half]), "r"(right.pairs[2 * half + 1]));
    }
}
#endif

// sum += left right, over terms `term .. term + TILE` and columns `column .. column + TILE` of the right factor.
template <Stored STORED, u32 COLUMNS>
DEVICE void multiply_add(Accumulator& sum, const Factor& left, const SharedRows<COLUMNS>& right, u32 term,
                         u32 column) {
    const u32 lane = right.lane;
#if defined(EMULATOR)
    // The lane's elements of the left factor, for the others to read.
    __shared__ float lent[16][WARP][HELD];
    float(&mine)[HELD] = lent[threadIdx.x / WARP][lane];
    for (u32 i = 0; i < HELD; i++) {
#if ACTIVATION_BF16
        mine[i] = i % 2 ? second_of(left.pairs[i / 2]) : first_of(left.pairs[i / 2]);
#else
        mine[i] = left.at[i];
#endif
    }
    warp_barrier();
    for (u32 i = 0; i < HELD; i++) {
        const u32 row = tile_row(row_slot(i));
        for (u32 k = 0; k < TILE; k++) {
            const u32 from = WARP == 32 ? row % 8 * 4 + k % 8 / 2 : k / 4 * 16 + row;
            const u32 held = WARP == 32 ? k / 8 * 4 + row / 8 * 2 + k % 2 : k % 4;
            const float x = lent[threadIdx.x / WARP][from][held];
            const float y = right_element<STORED>(right, term + k, column + tile_column(i));
            sum.at[i] = fmaf(x, y, sum.at[i]);
        }
    }
    warp_barrier();
#elif ON_NVIDIA && ACTIVATION_BF16
    RightFactor factor;
    load_right<STORED>(factor, right, term, column);
    multiply_add(sum, left, factor);
#elif ON_NVIDIA
    // Four terms at a time: those that one lane of each row holds of the left factor.
#pragma unroll 1
    for (u32 of_lane = 0; of_lane < 4; of_lane++) {
#pragma unroll
        for (u32 held = 0; held < 4; held++) {
            const u32 k = held / 2 * 8 + of_lane * 2 + held % 2;
            float x[HELD_ROWS];
#pragma unroll
            for (u32 slot = 0; slot < HELD_ROWS; slot++) {
                x[slot] = shuffle(left.at[held / 2 * 4 + slot * 2 + held % 2], lane / 4 * 4 + of_lane);
            }
#pragma unroll
            for (u32 i = 0; i < HELD; i++) {
                const float y = right_element<STORED>(right, term + k, column + tile_column(i));
                sum.at[i] = fmaf(x[row_slot(i)], y, sum.at[i]);
            }
        }
    }
#else
    // The lane's elements of the right factor: terms 4 (lane / 16) + j of column lane % 16.
    const u32 first = term + lane / 16 * 4, own = column + lane % 16;
#if ACTIVATION_BF16
    u32 pairs[2];
    if (STORED == Stored::BY_TERM) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            pairs[i] = right.at(first + 2 * i, own)->bits |
                       static_cast<u32>(right.at(first + 2 * i + 1, own)->bits) << 16;
        }
    } else {
        const uint2 words = *reinterpret_cast<const uint2*>(right.at(own, first));
        pairs[0] = words.x;
        pairs[1] = words.y;
    }
    union {
        u32 pairs[2];
        short4_vector all;
    } a, b;
    float4_vector c;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        a.pairs[i] = pairs[i];
        b.pairs[i] = left.pairs[i];
    }
#pragma unroll
    for (u32 i = 0; i < HELD; i++) c[i] = sum.at[i];
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a.all, b.all, c, 0, 0, 0);
#else
    float4_vector c;
#pragma unroll
    for (u32 i = 0; i < HELD; i++) c[i] = sum.at[i];
    // Each instruction takes four terms, one from each lane of a row: terms j, 4 + j, 8 + j and 12 + j.
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        const float y = right_element<STORED>(right, first + j, own);
        c = __builtin_amdgcn_mfma_f32_16x16x4f32(y, left.at[j], c, 0, 0, 0);
    }
#endif
#pragma unroll
    for (u32 i = 0; i < HELD; i++) sum.at[i] = c[i];
#endif
}
