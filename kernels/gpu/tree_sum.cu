// Sums along a binary tree, whose terms may lie in the memory of other devices.
//
// Floor: every term read and the sum written once. Terms of a peer come over the link, whose speed bounds the sum: the
// loads in flight must cover its latency, and a few tens of blocks are enough for that, so that other kernels can run
// meanwhile. A grid therefore walks the elements. While a launch begins or ends the link is idle, so one launch
// computes several sums.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 512;
constexpr u32 TERMS = 32;
constexpr u32 SUMS = 8;
// The most sums that wait for a term to their right.
constexpr u32 WAITING = 12;

struct TreeSum {
    float* out;                 // [elements]; may be one of the terms
    const float* terms[TERMS];  // [elements] each
    u64 elements;
    u32 term_count;   // at least 2
    u8 joins[TERMS];  // the number of additions of the last two sums after this term
};

struct TreeSums {
    TreeSum sums[SUMS];
    u32 count;
};

// Adds neighbours until one sum is left: the tree over a power of two of terms.
template <u32 COUNT, u32 N>
DEVICE void fold(Pack<N> (&terms)[COUNT]) {
#pragma unroll
    for (u32 width = 1; width < COUNT; width *= 2) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 2 * width) {
#pragma unroll
            for (u32 j = 0; j < N; j++) terms[i].at[j] += terms[i + width].at[j];
        }
    }
}

// COUNT terms, a power of two, each as large as its sibling.
template <u32 COUNT, u32 BATCH, u32 N, Access ACCESS>
DEVICE void sum_whole_tree(const TreeSum& arguments, u64 start) {
    Pack<N> terms[BATCH][COUNT];
    const u64 elements = arguments.elements;
    auto place = [&](u32 i) { return start + (i * THREADS + threadIdx.x) * N; };
    auto count = [&](u32 i) { return place(i) < elements ? elements - place(i) : 0; };
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
        for (u32 term = 0; term < COUNT; term++) {
            terms[i][term] = load<N, ACCESS>(arguments.terms[term] + place(i), count(i));
        }
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        fold(terms[i]);
        store<N, ACCESS>(arguments.out + place(i), terms[i][0], count(i));
    }
}

// Any tree. The waiting sums are a stack whose top is always element 0: no index is computed, so all stay in registers.
template <u32 N, Access ACCESS>
DEVICE void sum_any_tree(const TreeSum& arguments, u64 start) {
    Pack<N> sums[WAITING] = {};
    const u64 place = start + threadIdx.x * N;
    const u64 count = place < arguments.elements ? arguments.elements - place : 0;
    for (u32 term = 0; term < arguments.term_count; term++) {
#pragma unroll
        for (u32 i = WAITING - 1; i > 0; i--) sums[i] = sums[i - 1];
        sums[0] = load<N, ACCESS>(arguments.terms[term] + place, count);
        for (u32 join = 0; join < arguments.joins[term]; join++) {
#pragma unroll
            for (u32 j = 0; j < N; j++) sums[0].at[j] = sums[1].at[j] + sums[0].at[j];
#pragma unroll
            for (u32 i = 1; i + 1 < WAITING; i++) sums[i] = sums[i + 1];
        }
    }
    store<N, ACCESS>(arguments.out + place, sums[0], count);
}

// The tiles of all sums are numbered in one sequence: a block goes from one sum to the next without waiting for others.
template <u32 TILE, class Whole, class Part>
DEVICE void walk(const TreeSums& arguments, Whole whole, Part part) {
    u64 tile = blockIdx.x;
    for (u32 i = 0; i < arguments.count; i++) {
        const TreeSum& sum = arguments.sums[i];
        const u64 tiles = (sum.elements + TILE - 1) / TILE;
        for (; tile < tiles; tile += gridDim.x) {
            const u64 start = tile * TILE;
            if (start + TILE <= sum.elements) {
                whole(sum, start);
            } else {
                part(sum, start);
            }
        }
        tile -= tiles;
    }
}

template <u32 COUNT, u32 BATCH, u32 N>
DEVICE void whole_tree(const TreeSums& arguments) {
    walk<THREADS * BATCH * N>(
        arguments,
        [&](const TreeSum& sum, u64 start) { sum_whole_tree<COUNT, BATCH, N, Access::WIDE>(sum, start); },
        [&](const TreeSum& sum, u64 start) { sum_whole_tree<COUNT, BATCH, N, Access::SINGLE>(sum, start); });
}

template <u32 N>
DEVICE void any_tree(const TreeSums& arguments) {
    walk<THREADS * N>(
        arguments,
        [&](const TreeSum& sum, u64 start) { sum_any_tree<N, Access::WIDE>(sum, start); },
        [&](const TreeSum& sum, u64 start) { sum_any_tree<N, Access::SINGLE>(sum, start); });
}

// Packs of four where operands are aligned to them.
KERNEL(tree_sum_of_2_wide, THREADS, 2, TreeSums) { whole_tree<2, 4, 4>(arguments); }
KERNEL(tree_sum_of_2_single, THREADS, 2, TreeSums) { whole_tree<2, 4, 1>(arguments); }
KERNEL(tree_sum_of_4_wide, THREADS, 2, TreeSums) { whole_tree<4, 2, 4>(arguments); }
KERNEL(tree_sum_of_4_single, THREADS, 2, TreeSums) { whole_tree<4, 2, 1>(arguments); }
KERNEL(tree_sum_of_8_wide, THREADS, 2, TreeSums) { whole_tree<8, 1, 4>(arguments); }
KERNEL(tree_sum_of_8_single, THREADS, 2, TreeSums) { whole_tree<8, 1, 1>(arguments); }
KERNEL(tree_sum_of_any_wide, THREADS, 1, TreeSums) { any_tree<4>(arguments); }
KERNEL(tree_sum_of_any_single, THREADS, 1, TreeSums) { any_tree<1>(arguments); }
