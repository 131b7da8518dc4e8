// Products of fp32 values by matrix cores that take activations: tile_product.h with factors that are sums of
// activations.
//
// A split value is a sum of PARTS activations. With fp32 activations it is the value itself; with bf16 it is the
// rounded value and the rounded rest, which together differ from the value by at most 2^-18 of it. A product of two
// split factors leaves out the product of both rests, which is smaller still.
#pragma once
#include "pack.h"
#include "tile_product.h"

constexpr u32 PARTS = ACTIVATION_BF16 ? 2 : 1;

struct SplitFactor {
    Factor part[PARTS];
};

DEVICE void set_pair(SplitFactor& split, u32 pair, float first, float second) {
    set_pair(split.part[0], pair, first, second);
#if ACTIVATION_BF16
    const u32 high = split.part[0].pairs[pair];
    set_pair(split.part[1], pair, first - first_of(high), second - second_of(high));
#endif
}

DEVICE float element(const Factor& factor, u32 i) {
#if ACTIVATION_BF16
    return i % 2 ? second_of(factor.pairs[i / 2]) : first_of(factor.pairs[i / 2]);
#else
    return factor.at[i];
#endif
}
DEVICE float element(const SplitFactor& factor, u32 i) {
    float sum = element(factor.part[0], i);
#pragma unroll
    for (u32 part = 1; part < PARTS; part++) sum += element(factor.part[part], i);
    return sum;
}

// A result as the left factor of the next product.
DEVICE SplitFactor as_split(const Accumulator& tile) {
    SplitFactor split;
#pragma unroll
    for (u32 i = 0; i < HELD; i += 2) set_pair(split, i / 2, tile.at[i], tile.at[i + 1]);
    return split;
}

// Left factors in shared memory, as the lanes of a warp hold them: TILE TILE words of four bytes each.
DEVICE activation* place_of_factor(float* factors, u32 index, u32 part) {
    activation* const first = reinterpret_cast<activation*>(factors + index * (TILE * TILE));
    return first + (part * (TILE * TILE) + lane_of_warp() * HELD);
}
DEVICE void put_factor(float* factors, u32 index, const SplitFactor& split) {
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
#if ACTIVATION_BF16
        Pairs<HELD> words;
#pragma unroll
        for (u32 i = 0; i < HELD / 2; i++) words.at[i] = split.part[part].pairs[i];
        store_pairs<HELD>(place_of_factor(factors, index, part), words);
#else
        Pack<HELD> words;
#pragma unroll
        for (u32 i = 0; i < HELD; i++) words.at[i] = split.part[part].at[i];
        store_pack<HELD>(place_of_factor(factors, index, part), words);
#endif
    }
}
DEVICE SplitFactor take_factor(float* factors, u32 index) {
    SplitFactor split;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
#if ACTIVATION_BF16
        const Pairs<HELD> words = load_pairs<HELD>(place_of_factor(factors, index, part));
#pragma unroll
        for (u32 i = 0; i < HELD / 2; i++) split.part[part].pairs[i] = words.at[i];
#else
        const Pack<HELD> words = load_pack<HELD>(place_of_factor(factors, index, part));
#pragma unroll
        for (u32 i = 0; i < HELD; i++) split.part[part].at[i] = words.at[i];
#endif
    }
    return split;
}

// Each element of a factor times `weight(column of the tile)`.
template <class Left, class Weight>
DEVICE SplitFactor weighted(const Left& factor, Weight weight) {
    SplitFactor split;
#pragma unroll
    for (u32 i = 0; i < HELD; i += 2) {
        const u32 column = tile_column(i);
        set_pair(split, i / 2, element(factor, i) * weight(column), element(factor, i + 1) * weight(column + 1));
    }
    return split;
}

// Rows of COLUMNS split values in shared memory, ROWS of them: one part behind the other.
template <u32 ROWS, u32 COLUMNS>
struct SplitRows {
    activation* memory;

    __device__ __forceinline__ SharedRows<COLUMNS> part(u32 index) const {
        return SharedRows<COLUMNS>(memory + index * (ROWS * COLUMNS));
    }
    // Two neighbours of a row, from an even column on.
    __device__ __forceinline__ void put_pair(u32 row, u32 column, float first, float second) const {
#if ACTIVATION_BF16
        const u32 high = bf16_pair(first, second);
        store_pairs<2>(part(0).at(row, column), Pairs<2>{{high}});
        store_pack<2>(part(1).at(row, column), Pack<2>{{first - first_of(high), second - second_of(high)}});
#else
        store_pack<2>(part(0).at(row, column), Pack<2>{{first, second}});
#endif
    }
    __device__ __forceinline__ Pack<2> pair(u32 row, u32 column) const {
        Pack<2> sum = load_pack<2>(part(0).at(row, column));
#pragma unroll
        for (u32 index = 1; index < PARTS; index++) {
            const Pack<2> rest = load_pack<2>(part(index).at(row, column));
            sum.at[0] += rest.at[0];
            sum.at[1] += rest.at[1];
        }
        return sum;
    }
};
template <u32 ROWS, u32 COLUMNS>
DEVICE SplitFactor load_transposed(const SplitRows<ROWS, COLUMNS>& rows, u32 row, u32 column) {
    SplitFactor split;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) split.part[part] = load_transposed(rows.part(part), row, column);
    return split;
}
template <u32 ROWS, u32 COLUMNS>
DEVICE SplitFactor load_factor(const SplitRows<ROWS, COLUMNS>& rows, u32 row, u32 column) {
    SplitFactor split;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) split.part[part] = load_factor(rows.part(part), row, column);
    return split;
}

// --- sum += left right, as multiply_add of tile_product.h ----------------------------------------------------

template <Stored STORED, u32 COLUMNS>
DEVICE void multiply_add(Accumulator& sum, const SplitFactor& left, const SharedRows<COLUMNS>& right, u32 term, u32 column) {
#if ON_NVIDIA && ACTIVATION_BF16
    RightFactor factor;
    load_right<STORED>(factor, right, term, column);
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) multiply_add(sum, left.part[part], factor);
#else
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) multiply_add<STORED>(sum, left.part[part], right, term, column);
#endif
}
template <Stored STORED, u32 ROWS, u32 COLUMNS>
DEVICE void multiply_add(Accumulator& sum, const Factor& left, const SplitRows<ROWS, COLUMNS>& right, u32 term, u32 column) {
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) multiply_add<STORED>(sum, left, right.part(part), term, column);
}
template <Stored STORED, u32 ROWS, u32 COLUMNS>
DEVICE void multiply_add(Accumulator& sum, const SplitFactor& left, const SplitRows<ROWS, COLUMNS>& right, u32 term,
                         u32 column) {
    multiply_add<STORED>(sum, left, right.part(0), term, column);
#pragma unroll
    for (u32 part = 1; part < PARTS; part++) multiply_add<STORED>(sum, left.part[0], right.part(part), term, column);
}
