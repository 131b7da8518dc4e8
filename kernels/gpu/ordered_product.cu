// Products with a stated order over k (ordered_product.h): for few rows, which read each weight once and are bound by
// that; for many rows, tile by tile; and the addition of segments that several blocks have computed. All give an
// element the same bits.
#include "dialect.h"
#include "pack.h"
#include "tile_product.h"
#include "ordered_product.h"

#if ACTIVATION_BF16
// --- few rows ----------------------------------------------------------------------------------------------

constexpr u32 FEW_THREADS = 10 * WARP;
// The most sums of segments, in columns, that a block holds.
constexpr u32 HELD_SEGMENTS = 40;

template <u32 ROWS, u32 TILES>
constexpr u32 FEW_SHARED_BYTES = HELD_SEGMENTS * ROWS * TILES * TILE_COLUMNS * sizeof(float);

// For up to ROWS rows a warp computes TILES tiles of one segment after the other, with BATCH loads of each tile and row
// in flight; the block adds the segments at the end. `walkers` warps of a block share their columns.
template <u32 ROWS, u32 TILES, u32 BATCH>
DEVICE void multiply_few(const OrderedProduct& product) {
    constexpr u32 COLUMNS = TILES * TILE_COLUMNS, RESULTS = ROWS * COLUMNS;
    // In warps of 32 a lane has two rows, of which only one is needed for up to eight rows.
    constexpr u32 OWN_SLOTS = WARP == 32 ? ROWS / 8 : 1;
    SHARED(float, held);  // [groups, segments, ROWS, COLUMNS]
    const u32 warp = threadIdx.x / WARP, group = product.group_of_warp >> 4 * warp & 15;
    // A division takes longer than all other work before the first load.
    const bool has_one = product.row_blocks == 1;
    const u32 row_block = has_one ? 0 : blockIdx.x % product.row_blocks;
    const u32 first_group = (has_one ? blockIdx.x : blockIdx.x / product.row_blocks) * product.groups;
    const u32 first_row = row_block * ROWS, first_column = (first_group + group) * COLUMNS;
    release_next();
    // The first weights are requested before the rows of `a` are available.
    bool is_first = true;
    const bf16* rows[OWN_SLOTS];
    bool has_row[OWN_SLOTS];
#pragma unroll
    for (u32 slot = 0; slot < OWN_SLOTS; slot++) {
        const u32 row = operand_row() + 8 * slot;
        has_row[slot] = row < ROWS && first_row + row < product.rows;
        rows[slot] = settled(product.a + (has_row[slot] ? first_row + row : 0) * product.a_stride);
    }
    const bf16* weights[TILES];
    bool has_column[TILES];
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        const u32 column = first_column + tile * TILE_COLUMNS + operand_row();
        has_column[tile] = column < product.columns;
        weights[tile] = settled(product.weight + (has_column[tile] ? column : 0) * product.weight_stride);
    }
#pragma unroll 1
    for (u32 segment = warp - group * product.walkers; segment < product.segments; segment += product.walkers) {
        const u32 start = segment * SEGMENT, end = min(start + SEGMENT, product.terms);
        const u32 steps_end = start + (end - start + STEP_TERMS - 1) / STEP_TERMS * STEP_TERMS;
        Sums sums[1][TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) sums[0][tile] = zero_sums();
#pragma unroll 1
        for (u32 first = start; first < steps_end; first += BATCH * BLOCK_TERMS) {
            const u32 term = first + operand_chunk() * CHUNK;
            Chunk a[BATCH][1][SLOTS], weight[BATCH][TILES];
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const bf16* const at = weights[tile] + term;
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) {
                    weight[i][tile] = zero_chunk();
                    if (!has_column[tile]) continue;
                    if (term + i * BLOCK_TERMS < end) weight[i][tile] = load_once(at + i * BLOCK_TERMS);
                }
            }
            if (is_first) await_previous();
            is_first = false;
#pragma unroll
            for (u32 slot = 0; slot < SLOTS; slot++) {
                const bf16* const at = rows[slot % OWN_SLOTS] + term;
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) {
                    Chunk& chunk = a[i][0][slot];
                    chunk = zero_chunk();
                    if (slot >= OWN_SLOTS || !has_row[slot % OWN_SLOTS]) continue;
                    if (term + i * BLOCK_TERMS < end) chunk = load_pairs<CHUNK>(at + i * BLOCK_TERMS);
                }
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (first + i * BLOCK_TERMS >= steps_end) break;
#pragma unroll
                for (u32 tile = 0; tile < TILES; tile++) exchange_halves(weight[i][tile]);
#pragma unroll
                for (u32 slot = 0; slot < OWN_SLOTS; slot++) exchange_halves(a[i][0][slot]);
                multiply_add(sums, a[i], weight[i]);
            }
        }
        float* const of_segment = held + (group * product.segments + segment) * RESULTS;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (u32 i = 0; i < SUMS; i++) {
                if (sum_row(i) >= ROWS) continue;
                of_segment[sum_row(i) * COLUMNS + tile * TILE_COLUMNS + sum_column(i)] = sums[0][tile].at[i];
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < product.groups * RESULTS; i += blockDim.x) {
        const u32 row = first_row + i % RESULTS / COLUMNS;
        const u32 column = (first_group + i / RESULTS) * COLUMNS + i % COLUMNS;
        if (row >= product.rows || column >= product.columns) continue;
        const float* const at = held + i / RESULTS * product.segments * RESULTS + i % RESULTS;
        float total = at[0];
#pragma unroll 4
        for (u32 segment = 1; segment < product.segments; segment++) total += at[segment * RESULTS];
        store_result(product, row, column, total);
    }
}

// More loads in flight wait less, but leave room for fewer warps: for columns that few warps share, or that take few
// steps.
SHARED_BYTES(ordered_few_8, (FEW_SHARED_BYTES<8, 1>));
KERNEL(ordered_few_8, FEW_THREADS, 3, OrderedProduct) { multiply_few<8, 1, 4>(arguments); }
SHARED_BYTES(ordered_few_8_deep, (FEW_SHARED_BYTES<8, 1>));
KERNEL(ordered_few_8_deep, FEW_THREADS, 2, OrderedProduct) { multiply_few<8, 1, 8>(arguments); }
// One load of each: for grids with a multiprocessor for every block.
SHARED_BYTES(ordered_few_8_whole, (FEW_SHARED_BYTES<8, 1>));
KERNEL(ordered_few_8_whole, FEW_THREADS, 1, OrderedProduct) { multiply_few<8, 1, 16>(arguments); }
// 16 columns, so that rows are not read more often than weights; but one tile where few warps share all columns.
constexpr u32 FEW_16_TILES = WARP == 32 ? 2 : 1;
SHARED_BYTES(ordered_few_16, (FEW_SHARED_BYTES<16, FEW_16_TILES>));
KERNEL(ordered_few_16, FEW_THREADS, 2, OrderedProduct) { multiply_few<16, FEW_16_TILES, 2>(arguments); }
SHARED_BYTES(ordered_few_16_deep, (FEW_SHARED_BYTES<16, 1>));
KERNEL(ordered_few_16_deep, FEW_THREADS, 2, OrderedProduct) { multiply_few<16, 1, 4>(arguments); }

// --- many rows ---------------------------------------------------------------------------------------------

constexpr u32 TILES_THREADS = 256;
// Where copies do not overlap with arithmetic, two stages suffice.
constexpr u32 STAGES = WARP == 32 ? 3 : 2;

// COUNT rows of STEP_TERMS terms in shared memory. Chunks of 16 bytes are permuted within a row, so that neither the
// chunks of a row nor a step's two chunks of four rows lie in the same bank.
template <u32 COUNT>
struct OperandRows {
    static constexpr u32 CHUNKS = STEP_TERMS / CHUNK;

    bf16* start;

    // For the first eight rows and for all at multiples of eight further on.
    static __device__ __forceinline__ u32 place(u32 row, u32 chunk) {
        return row * STEP_TERMS + (chunk ^ (row % 4 * 2 | row / 4 % 2)) * CHUNK;
    }

    // Terms `term .. term + STEP_TERMS` of rows `first .. first + COUNT` of `from`, with zeros from `terms` on. Rows
    // from `limit` on are copies of the last row: their results are not stored.
    template <Access ACCESS>
    __device__ __forceinline__ void copy(const bf16* from, u64 stride, u32 first, u32 limit, u32 term,
                                         u32 terms) const {
        constexpr u32 PASS_ROWS = TILES_THREADS / CHUNKS;
        static_assert(COUNT % PASS_ROWS == 0 && PASS_ROWS % 8 == 0, "passes are whole");
        const u32 own_chunk = threadIdx.x % CHUNKS, own = term + own_chunk * CHUNK;
        const u32 own_row = formed_anew(threadIdx.x / CHUNKS);
        bf16* const to = start + place(own_row, own_chunk);
#pragma unroll
        for (u32 row = 0; row < COUNT; row += PASS_ROWS) {
            const bf16* const source = from + min(first + row + own_row, limit - 1) * stride + own;
            if (ACCESS == Access::WIDE && own < terms) {
                copy_async_16(to + row * STEP_TERMS, source);
                continue;
            }
            store_pairs<CHUNK>(to + row * STEP_TERMS, zero_chunk());
            if (ACCESS == Access::WIDE) continue;
            const u32 count = own < terms ? min(CHUNK, terms - own) : 0;
#pragma unroll 1
            for (u32 i = 0; i < count; i++) to[row * STEP_TERMS + i] = source[i];
        }
    }
};

template <u32 ROWS, u32 COLUMNS>
constexpr u32 TILES_SHARED_BYTES = STAGES * (ROWS + COLUMNS) * STEP_TERMS * sizeof(bf16);

// A block's ROWS rows by COLUMNS columns of results.
template <u32 ROWS, u32 COLUMNS, Access ACCESS>
DEVICE void multiply_tiles(const OrderedProduct& product) {
    constexpr u32 WARP_ROWS = 32, COLUMN_WARPS = TILES_THREADS / WARP / (ROWS / WARP_ROWS);
    constexpr u32 WARP_COLUMNS = COLUMNS / COLUMN_WARPS;
    constexpr u32 DOWN = WARP_ROWS / TILE, ACROSS = WARP_COLUMNS / TILE_COLUMNS;
    constexpr u32 SEGMENT_STEPS = SEGMENT / STEP_TERMS;
    SHARED(bf16, memory);
    release_next();
    await_previous();
    const auto a_of = [=](u32 stage) {
        return OperandRows<ROWS>{memory + stage * (ROWS + COLUMNS) * STEP_TERMS};
    };
    const auto weight_of = [=](u32 stage) {
        return OperandRows<COLUMNS>{memory + (stage * (ROWS + COLUMNS) + ROWS) * STEP_TERMS};
    };
    const u32 first_row = blockIdx.x % product.row_blocks * ROWS;
    const u32 first_column = blockIdx.x / product.row_blocks * COLUMNS;
    const u32 own_row = threadIdx.x / WARP / COLUMN_WARPS * WARP_ROWS;
    const u32 own_column = threadIdx.x / WARP % COLUMN_WARPS * WARP_COLUMNS;
    const u32 all_steps = (product.terms + STEP_TERMS - 1) / STEP_TERMS;
    const u32 start = walks_all(product) ? 0 : blockIdx.y * SEGMENT_STEPS;
    const u32 end = walks_all(product) ? all_steps : min(start + SEGMENT_STEPS, all_steps);
    const auto copy = [&](u32 step, u32 stage) {
        if (step < end) {
            const u32 term = step * STEP_TERMS;
            a_of(stage).template copy<ACCESS>(product.a, product.a_stride, first_row, product.rows, term,
                                              product.terms);
            weight_of(stage).template copy<ACCESS>(product.weight, product.weight_stride, first_column,
                                                   product.columns, term, product.terms);
        }
        copy_async_commit();
    };
    Sums total[DOWN][ACROSS], sums[DOWN][ACROSS];
#pragma unroll
    for (u32 down = 0; down < DOWN; down++) {
#pragma unroll
        for (u32 across = 0; across < ACROSS; across++) sums[down][across] = zero_sums();
    }
#pragma unroll
    for (u32 stage = 0; stage < STAGES - 1; stage++) copy(start + stage, stage);
    u32 stage = 0, next_stage = STAGES - 1;
#pragma unroll 1
    for (u32 segment = start; segment < end; segment += SEGMENT_STEPS) {
#pragma unroll 1
        for (u32 step = segment; step < min(segment + SEGMENT_STEPS, end); step++) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            copy(step + STAGES - 1, next_stage);
            const bf16* const a = a_of(stage).start + own_row * STEP_TERMS;
            const bf16* const weight = weight_of(stage).start + own_column * STEP_TERMS;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // The lane's part of the first step, and of the second one.
                const auto place = [=](u32 step) {
                    const u32 chunk = half * 4 + step * 2 + operand_part() / 2;
                    return OperandRows<8>::place(operand_row(), chunk) + operand_part() % 2 * HALF;
                };
                Chunk right[ACROSS];
#pragma unroll
                for (u32 across = 0; across < ACROSS; across++) {
                    const bf16* const rows = weight + across * TILE_COLUMNS * STEP_TERMS;
                    load_part<0>(right[across], rows + place(0));
                    load_part<1>(right[across], rows + place(1));
                }
                Chunk left[DOWN][SLOTS];
#pragma unroll
                for (u32 down = 0; down < DOWN; down++) {
#pragma unroll
                    for (u32 slot = 0; slot < SLOTS; slot++) {
                        const bf16* const rows = a + (down * TILE + slot * 8) * STEP_TERMS;
                        load_part<0>(left[down][slot], rows + place(0));
                        load_part<1>(left[down][slot], rows + place(1));
                        take_apart(product, left[down][slot]);
                    }
                }
                multiply_add(sums, left, right);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        }
        const bool is_first = segment == start;
#pragma unroll
        for (u32 down = 0; down < DOWN; down++) {
#pragma unroll
            for (u32 across = 0; across < ACROSS; across++) {
#pragma unroll
                for (u32 i = 0; i < SUMS; i++) {
                    const float sum = sums[down][across].at[i];
                    total[down][across].at[i] = is_first ? sum : total[down][across].at[i] + sum;
                }
                sums[down][across] = zero_sums();
            }
        }
    }
#pragma unroll
    for (u32 down = 0; down < DOWN; down++) {
#pragma unroll
        for (u32 across = 0; across < ACROSS; across++) {
#pragma unroll
            for (u32 i = 0; i < SUMS; i += 2) {
                const u32 row = formed_anew(first_row + own_row + down * TILE + sum_row(i));
                const u32 column =
                    formed_anew(first_column + own_column + across * TILE_COLUMNS + sum_column(i));
                const float* const at = total[down][across].at;
                if (walks_all(product)) {
                    store_results(product, row, column, at[i], at[i + 1]);
                } else {
                    store_segment_sum(product, blockIdx.y, row, column, at[i]);
                    store_segment_sum(product, blockIdx.y, row, column + 1, at[i + 1]);
                }
            }
        }
    }
}

SHARED_BYTES(ordered_tiles_single, (TILES_SHARED_BYTES<64, 128>));
KERNEL(ordered_tiles_single, TILES_THREADS, 1, OrderedProduct) {
    multiply_tiles<64, 128, Access::SINGLE>(arguments);
}
SHARED_BYTES(ordered_tiles_wide, (TILES_SHARED_BYTES<64, 128>));
KERNEL(ordered_tiles_wide, TILES_THREADS, 2, OrderedProduct) {
    multiply_tiles<64, 128, Access::WIDE>(arguments);
}
#else
// --- fp32 --------------------------------------------------------------------------------------------------

constexpr u32 TILES_THREADS = 256;
constexpr u32 TILES_SIDE = 64;
constexpr u32 STEP_TERMS = 16;
// Elements of a thread: this many rows, and this many columns, each 16 apart.
constexpr u32 OWN = TILES_SIDE / 16;

// Rows of an operand are one term longer than a step, so that they begin in different banks.
typedef float Operands[TILES_SIDE][STEP_TERMS + 1];
SHARED_BYTES(ordered_tiles_fp32, 2 * sizeof(Operands));

// 64 rows by 64 columns a block, whose operands pass through shared memory 16 terms at a time.
KERNEL(ordered_tiles_fp32, TILES_THREADS, 2, OrderedProduct) {
    SHARED(Operands, operands);
    const OrderedProduct& product = arguments;
    release_next();
    await_previous();
    const u32 first_row = blockIdx.x % product.row_blocks * TILES_SIDE;
    const u32 first_column = blockIdx.x / product.row_blocks * TILES_SIDE;
    const u32 own_row = threadIdx.x / 16, own_column = threadIdx.x % 16;
    const u32 start = walks_all(product) ? 0 : blockIdx.y * SEGMENT;
    const u32 end = walks_all(product) ? product.terms : min(start + SEGMENT, product.terms);
    float total[OWN][OWN], sums[OWN][OWN];
#pragma unroll 1
    for (u32 first = start; first < end; first += STEP_TERMS) {
        const u32 term = first + threadIdx.x % STEP_TERMS;
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 place = i * 16 + own_row;
            const u32 row = min(first_row + place, product.rows - 1);
            const u32 column = min(first_column + place, product.columns - 1);
            const u32 own = min(term, end - 1);
            operands[0][place][term - first] = product.a[row * product.a_stride + own];
            operands[1][place][term - first] = product.weight[column * product.weight_stride + own];
        }
        __syncthreads();
        const bool begins = first % SEGMENT == 0;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
#pragma unroll
            for (u32 j = 0; j < OWN; j++) sums[i][j] = begins ? 0.0f : sums[i][j];
        }
        const u32 count = min(STEP_TERMS, end - first);
#pragma unroll 4
        for (u32 k = 0; k < count; k++) {
            float x[OWN], y[OWN];
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                x[i] = operands[0][i * 16 + own_row][k];
                y[i] = operands[1][i * 16 + own_column][k];
            }
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
#pragma unroll
                for (u32 j = 0; j < OWN; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
            }
        }
        const u32 next = first + STEP_TERMS;
        if (next % SEGMENT != 0 && next < end) continue;
        const bool is_first = first < start + SEGMENT;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
#pragma unroll
            for (u32 j = 0; j < OWN; j++) total[i][j] = is_first ? sums[i][j] : total[i][j] + sums[i][j];
        }
    }
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
#pragma unroll
        for (u32 j = 0; j < OWN; j++) {
            const u32 row = first_row + i * 16 + own_row, column = first_column + j * 16 + own_column;
            if (walks_all(product)) {
                store_result(product, row, column, total[i][j]);
            } else {
                store_segment_sum(product, blockIdx.y, row, column, total[i][j]);
            }
        }
    }
}
#endif

// --- the sum of segments -------------------------------------------------------------------------------------

constexpr u32 ADD_THREADS = 256;

// Adds the segments of each element that blocks have computed separately: a row of blockIdx.y, N neighbours a thread.
template <u32 N>
DEVICE void add_segments(const OrderedProduct& product) {
    // Sums that are loaded at once.
    constexpr u32 BATCH = 8;
    const u32 row = blockIdx.y, column = (blockIdx.x * ADD_THREADS + threadIdx.x) * N;
    const u64 elements = static_cast<u64>(product.rows) * product.columns;
    release_next();
    await_previous();
    if (column >= product.columns) return;
    const float* const sums = product.segment_sums + static_cast<u64>(row) * product.columns + column;
    Pack<N> total = load_pack<N>(sums);
#pragma unroll 1
    for (u32 first = 1; first < product.segments; first += BATCH) {
        Pack<N> sum[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            sum[i] = filled<N>(0.0f);
            if (first + i < product.segments) sum[i] = load_pack<N>(sums + (first + i) * elements);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            if (first + i >= product.segments) break;
#pragma unroll
            for (u32 j = 0; j < N; j++) total.at[j] += sum[i].at[j];
        }
    }
    if constexpr (N == 1) {
        store_result(product, row, column, total.at[0]);
    } else {
        store_results(product, row, column, total.at[0], total.at[1]);
    }
}

KERNEL(ordered_add_segments, ADD_THREADS, 4, OrderedProduct) { add_segments<1>(arguments); }
#if ACTIVATION_BF16
// For rows of an even number of columns.
KERNEL(ordered_add_pairs, ADD_THREADS, 4, OrderedProduct) { add_segments<2>(arguments); }
#endif

#if GROUP_PRODUCTS && ACTIVATION_BF16
// --- where groups of warps multiply together ------------------------------------------------------------------

#include "ordered_groups.h"
#include "ordered_staged.h"

using ordered_groups::SegmentSums;

// Parameters: ROWS rows of a stage, GROUPS groups of 64 rows, TILES tiles of 16 columns, and the blocks that share a
// multiprocessor.
#define GROUPS_KERNEL(name, ROWS, GROUPS, TILES, STAGES, SUMS, BLOCKS)                                       \
    SHARED_BYTES(name, (ordered_groups::Memory<GROUPS, TILES, STAGES, ROWS>::BYTES));                        \
    KERNEL_OF_MAPS(name, ordered_groups::THREADS<GROUPS>, BLOCKS, ordered_groups::Arguments) {               \
        ordered_groups::multiply<GROUPS, TILES, STAGES, SUMS, BLOCKS, ROWS>(arguments);                      \
    }

// With few rows, shared memory serves to have many weights in flight: as many stages as a multiprocessor has room for.
GROUPS_KERNEL(ordered_groups_16x80, 16, 1, 5, 18, SegmentSums::ADDED, 1)
GROUPS_KERNEL(ordered_groups_32x80, 32, 1, 5, 15, SegmentSums::ADDED, 1)
GROUPS_KERNEL(ordered_groups_64x80, 64, 1, 5, 12, SegmentSums::ADDED, 1)
GROUPS_KERNEL(ordered_groups_128x80, 128, 2, 5, 8, SegmentSums::ADDED, 1)
// With many rows, each multiprocessor has one block, which takes one item after the other.
GROUPS_KERNEL(ordered_groups_128x160, 128, 2, 10, 6, SegmentSums::ADDED, 1)
// With too few columns for all multiprocessors, blocks share the segments.
GROUPS_KERNEL(ordered_groups_apart_64x192, 64, 1, 12, 3, SegmentSums::APART, 2)
GROUPS_KERNEL(ordered_groups_apart_64x16, 64, 1, 1, 8, SegmentSums::APART, 2)

constexpr u32 STAGED_THREADS = ordered_staged::MOST_WARPS * WARP;
KERNEL(ordered_staged_16, STAGED_THREADS, 3, ordered_staged::Arguments) { ordered_staged::multiply<1>(arguments); }
KERNEL(ordered_staged_32, STAGED_THREADS, 2, ordered_staged::Arguments) { ordered_staged::multiply<2>(arguments); }
#endif
