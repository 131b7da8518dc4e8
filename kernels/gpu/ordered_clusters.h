// Products of ordered_groups.h whose segments are shared by the blocks of a cluster: each leaves the sums of its segments in its own shared
// memory, and then adds up a share of the elements, in ascending order of segments, out of the memory of all of them.
//
// Where a device has no clusters, blocks leave these sums in global memory (SegmentSums::APART), and another kernel adds them.
#pragma once
#include "ordered_groups.h"

#if ON_NVIDIA
// KERNEL_OF_CLUSTERS: KERNEL_OF_MAPS, of so many blocks a cluster, which follow one another in x.
#define KERNEL_OF_CLUSTERS(name, threads, blocks, cluster_blocks, Arguments)                         \
    extern "C" __global__ void __cluster_dims__(cluster_blocks, 1, 1) __launch_bounds__(threads, blocks) \
        name(const __grid_constant__ Arguments arguments)

namespace ordered_groups {

// Waits for all threads of the cluster. What they wrote to shared memory before is seen by all of them behind it.
DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Where an address of this block's shared memory lies in that of another block of the cluster.
DEVICE u32 place_in_cluster(const void* shared, u32 block) {
    u32 place;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_place(shared)), "r"(block));
    return place;
}
// Of the shared memory of any block of the cluster.
DEVICE Pack<4> load_from_cluster(u32 place) {
    Pack<4> found;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(found.at[0]), "=f"(found.at[1]), "=f"(found.at[2]), "=f"(found.at[3])
                 : "r"(place));
    return found;
}

// The sums of MOST segments of a block's results, where its stages were. Rows are so far apart that a warp's stores meet in no bank.
template <class M, u32 MOST>
struct LeftSums {
    static constexpr u32 STRIDE = M::COLUMNS + 8;
    static_assert(MOST * M::STAGE_ROWS * STRIDE * sizeof(float) <= M::STAGES * M::STAGE_BYTES,
                  "sums lie where stages were");

    float* start;

    __device__ __forceinline__ float* at(u32 segment, u32 row, u32 rows, u32 column) const {
        return start + (segment * rows + row) * STRIDE + column;
    }
};

// A group's rows of the block's item.
template <u32 PARTS, u32 MOST, u32 TILES, class M>
DEVICE void share(const Arguments& arguments, M memory) {
    const OrderedProduct& product = arguments.product;
    constexpr u32 THREADS_COMPUTING = M::GROUPS * GROUP_THREADS;
    Reader<M> reader(arguments, memory);
    const Item item = item_of(arguments, blockIdx.x);
    const u32 part = blockIdx.x % PARTS;
    const u32 first_row = item.row_block * M::ROWS, first_column = item.column_block * M::COLUMNS;
    const u32 rows = min(M::ROWS, product.rows - first_row);
    const LeftSums<M, MOST> left{reinterpret_cast<float*>(memory.a(0))};
    Accumulator sums[MOST][TILES];
    await_previous();
#pragma unroll
    for (u32 own = 0; own < MOST; own++) {
        if (item.first_segment + own < item.end_segment) reader.form(sums[own], item.first_segment + own);
    }
    // Now no group reads a stage any more.
    meet(1, THREADS_COMPUTING);
#pragma unroll
    for (u32 own = 0; own < MOST; own++) {
        if (item.first_segment + own >= item.end_segment) continue;
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
            const u32 row = threadIdx.x / WARP * TILE + tile_row(slot);
            if (row >= rows) continue;
            float* const to = left.at(own, row, rows, first_tile_column());
#pragma unroll
            for (u32 n = 0; n < TILES; n++) {
#pragma unroll
                for (u32 pair = 0; pair < HELD / HELD_ROWS / 2; pair++) {
                    const u32 i = HELD_ROWS == 2 ? 4 * pair + 2 * slot : 2 * pair;
                    const Pack<2> both{{sums[own][n].at[i], sums[own][n].at[i + 1]}};
                    store_pack<2>(to + n * TILE + column_step(i), both);
                }
            }
        }
    }
    meet_cluster();
    constexpr u32 OF_ROW = M::COLUMNS / 4;
#pragma unroll 1
    for (u32 four = part * THREADS_COMPUTING + threadIdx.x; four < rows * OF_ROW; four += PARTS * THREADS_COMPUTING) {
        const u32 row = four / OF_ROW, column = four % OF_ROW * 4;
        Pack<4> found[PARTS][MOST];
#pragma unroll
        for (u32 other = 0; other < PARTS; other++) {
            const u32 first = other * product.segments / PARTS, end = (other + 1) * product.segments / PARTS;
#pragma unroll
            for (u32 own = 0; own < MOST; own++) {
                // -0.0 changes nothing that it is added to.
                found[other][own] = filled<4>(-0.0f);
                if (first + own < end) {
                    found[other][own] = load_from_cluster(place_in_cluster(left.at(own, row, rows, column), other));
                }
            }
        }
        Pack<4> total = found[0][0];
#pragma unroll
        for (u32 i = 1; i < PARTS * MOST; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) total.at[j] += found[i / MOST][i % MOST].at[j];
        }
        store_results(product, first_row + row, first_column + column, total.at[0], total.at[1]);
        store_results(product, first_row + row, first_column + column + 2, total.at[2], total.at[3]);
    }
    // A block's shared memory is there until the others have read it.
    meet_cluster();
}

// PARTS blocks share the segments, of which a block has at most MOST. The launch has no other blocks than those of items.
template <u32 GROUPS, u32 TILES, u32 STAGES, u32 PARTS, u32 MOST, u32 BLOCKS, u32 A_ROWS = GROUPS * GROUP_ROWS>
DEVICE void multiply_in_clusters(const Arguments& arguments) {
    typedef Memory<GROUPS, TILES, STAGES, A_ROWS> M;
    SHARED_ALIGNED(activation, start, PANEL_ALIGNMENT);
    const M memory{start};
    make_gates(memory);
    release_next();
    copy_and_compute<BLOCKS>(arguments, memory, [&] { share<PARTS, MOST, TILES>(arguments, memory); });
    if (threadIdx.x >= GROUPS * GROUP_THREADS) {
        meet_cluster();
        meet_cluster();
    }
}

}  // namespace ordered_groups
#endif
