// A chunk of positions of the scan of heads: its layout in shared memory, and its products (head_scan.h has the formulas).
//
// Two warps compute the results of sixteen positions of the chunk, each for half of the channels or of the states. A warp also holds a
// share of the states in its registers, which all positions of the chunk update. The products run on matrix cores: B, C and x are
// multiplied as stored; factors computed in fp32 (states, weights of pairs, gradients) are split (split_product.h).
//
// The products C_i . B_j are the same for all heads of a group: a kernel of its own computes them once.
//
// The decay between two positions is a product of at most three factors: within the tile of the later position, over the tiles between,
// and within the tile of the earlier position.
#pragma once
#include "head_scan.h"
#include "split_product.h"

constexpr u32 TILES = LENGTH / TILE;  // of positions
constexpr u32 CHANNEL_TILES = CHANNELS / TILE, STATE_TILES = STATES / TILE;
constexpr u32 HALVES = CHANNEL_TILES > 1 ? 2 : 1;  // warps of a tile of positions
constexpr u32 OUT_TILES = CHANNEL_TILES / HALVES;  // of channels, of a warp
constexpr u32 WARPS = TILES * HALVES, CHUNK_THREADS = WARPS * WARP;

typedef SharedRows<STATES> StateRows;
typedef SharedRows<CHANNELS> ChannelRows;
typedef SplitRows<CHANNELS, STATES> SplitStates;

// --- steps and decays ---------------------------------------------------------------------------------------

struct Steps {
    float delta[LENGTH], slope[LENGTH], decay[LENGTH];
    float through[LENGTH];           // the product of the decays of the tile up to this position
    float behind[LENGTH];            // the product of the decays of the tile after this position
    float from_start[LENGTH];        // E_i
    float to_end[LENGTH];            // S_Lj
    float into_end[LENGTH];          // S_Lj delta_j
    float within[LENGTH][TILE + 4];  // [i, j % TILE] S_ij of two positions of a tile
};

// The first LENGTH threads write a chunk's steps and decays.
DEVICE void put_steps(Steps& steps, const HeadScanInputs& in, const Head& my, const Chunk& chunk) {
    const u32 i = threadIdx.x;
    if (i >= LENGTH) return;
    Step step = {0.0f, 0.0f};
    if (i < chunk.count) step = form_step(in, my, chunk.row + i);
    steps.delta[i] = step.delta;
    steps.slope[i] = step.slope;
    steps.decay[i] = decay_of(step.delta * my.rate);
}

// The product of the decays of the tiles `first .. end`.
DEVICE float of_tiles(const float (&of_tile)[TILES], u32 first, u32 end) {
    float product = 1.0f;
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        if (tile >= first && tile < end) product *= of_tile[tile];
    }
    return product;
}
DEVICE float of_tiles(const Steps& steps, u32 first, u32 end) {
    float of_tile[TILES];
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) of_tile[tile] = steps.through[tile * TILE + TILE - 1];
    return of_tiles(of_tile, first, end);
}

// The first LENGTH threads write the products of decays within a tile; the next LENGTH write those that reach over several tiles.
DEVICE void put_decays(Steps& steps) {
    static_assert(CHUNK_THREADS >= 2 * LENGTH, "a position has two threads");
    const u32 thread = formed_anew(threadIdx.x), j = thread % LENGTH, own = j / TILE, first = own * TILE;
    if (thread >= 2 * LENGTH) return;
    const bool inside = thread < LENGTH;
    float product = 1.0f, through = 1.0f;
#pragma unroll
    for (u32 i = 0; i < TILE; i++) {
        const float decay = steps.decay[first + i];
        if (first + i <= j) through *= decay;
        if (first + i > j) product *= decay;
        if (inside) steps.within[first + i][j % TILE] = first + i < j ? 0.0f : product;
    }
    if (inside) {
        steps.through[j] = through;
        steps.behind[j] = product;
        return;
    }
    float of_tile[TILES];
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        of_tile[tile] = 1.0f;
#pragma unroll
        for (u32 i = 0; i < TILE; i++) of_tile[tile] *= steps.decay[tile * TILE + i];
    }
    const float to_end = of_tiles(of_tile, own + 1, TILES) * product;
    steps.from_start[j] = of_tiles(of_tile, 0, own) * through;
    steps.to_end[j] = to_end;
    steps.into_end[j] = to_end * steps.delta[j];
}

// The triangle of pairs of positions: LOWER has row >= column, UPPER row <= column.
enum class Triangle { LOWER, UPPER };

// Pairs of tiles of positions of a chunk, each tile paired with itself included.
constexpr u32 PAIRS = TILES * (TILES + 1) / 2;
struct TilePair {
    u32 later, earlier;
};
DEVICE u32 pair_index(const TilePair& pair) { return pair.later * (pair.later + 1) / 2 + pair.earlier; }
DEVICE TilePair tile_pair(u32 index) {
    u32 later = 0;
#pragma unroll
    for (u32 tile = 1; tile < TILES; tile++) later += index >= tile * (tile + 1) / 2;
    return {later, index - pair_index({later, 0})};
}

// Activations of a buffer that holds rows of B or C and, once the rows have been read, the factors of all pairs of tiles.
constexpr u32 FACTORS = PAIRS * PARTS * TILE * TILE;
constexpr u32 ROWS_OR_FACTORS = LENGTH * STATES > FACTORS ? LENGTH * STATES : FACTORS;

// Calls `body` with each pair of tiles that this warp computes.
template <class Body>
DEVICE void for_each_own_pair(u32 tiles, Body body) {
#pragma unroll 1
    for (u32 index = in_warp(threadIdx.x / WARP); index < PAIRS; index += WARPS) {
        const TilePair pair = tile_pair(index);
        if (pair.later < tiles) body(pair);
    }
}

// --- tiles --------------------------------------------------------------------------------------------------

// The tile of positions whose results the warp computes, and which half of the channels or states.
DEVICE u32 own_tile() { return in_warp(threadIdx.x / WARP / HALVES); }
DEVICE u32 own_half() { return in_warp(threadIdx.x / WARP % HALVES); }
// The first channel of that half.
DEVICE u32 out_channel() { return own_half() * (OUT_TILES * TILE); }
DEVICE u32 tiles_of(const Chunk& chunk) { return in_warp((chunk.count + TILE - 1) / TILE); }

template <u32 COUNT>
DEVICE void set_zero(Accumulator (&tiles)[COUNT]) {
#pragma unroll
    for (u32 tile = 0; tile < COUNT; tile++) tiles[tile] = zero_tile();
}
// Multiplies each tile's rows, which are the warp's own positions, by their weights.
template <u32 COUNT>
DEVICE void scale_rows(Accumulator (&tiles)[COUNT], u32 own, const float (&weights)[LENGTH]) {
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const float of_row = weights[own * TILE + tile_row(slot)];
#pragma unroll
        for (u32 tile = 0; tile < COUNT; tile++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) {
                if (row_slot(i) == slot) tiles[tile].at[i] *= of_row;
            }
        }
    }
}

// left[rows of `own`] . right[rows of `other`], over INNER columns.
template <u32 INNER, class Left, class Right>
DEVICE Accumulator pair_products(const Left& left, const Right& right, u32 own, u32 other) {
    Accumulator pairs = zero_tile();
#pragma unroll 2
    for (u32 k = 0; k < INNER; k += TILE) {
        multiply_add<Stored::BY_COLUMN>(pairs, load_factor(left, own * TILE, k), right, k, other * TILE);
    }
    return pairs;
}

// C_i . B_j of a chunk in memory.
struct GroupPairs {
    const float* first;  // the products of the chunk's first row
    u32 stride, count;

    __device__ __forceinline__ GroupPairs(const float* pairs, const HeadScanInputs& in, const Head& my, const Chunk& chunk)
        : first(pairs + (static_cast<u64>(chunk.row) * in.groups + my.group) * LENGTH), stride(in.groups * LENGTH), count(chunk.count) {}
};
// C_i . B_j of two tiles of positions: i is a row of the result and j a column, or, for UPPER, the reverse. Zeros after the chunk.
template <Triangle TRIANGLE>
DEVICE Accumulator load_pairs(const GroupPairs& pairs, const TilePair& pair) {
    const u32 later = pair.later * TILE, earlier = pair.earlier * TILE;
    Accumulator tile;
#pragma unroll
    for (u32 i = 0; i < HELD; i += 2) {
        const u32 row = tile_row(row_slot(i)), column = tile_column(i);
        Pack<2> two = filled<2>(0.0f);
        if (TRIANGLE == Triangle::LOWER) {
            if (later + row < pairs.count) two = load_pack<2>(pairs.first + ((later + row) * pairs.stride + earlier + column));
        } else {
            const float* const from = pairs.first + ((later + column) * pairs.stride + earlier + row);
            if (later + column < pairs.count) two.at[0] = *from;
            if (later + column + 1 < pairs.count) two.at[1] = from[pairs.stride];
        }
        tile.at[i] = two.at[0];
        tile.at[i + 1] = two.at[1];
    }
    return tile;
}

// S_ij of two tiles of positions, j <= i: i is a row of the result and j a column, or, for UPPER, the reverse.
template <Triangle TRIANGLE>
DEVICE Accumulator decays_between(const Steps& steps, const TilePair& pair) {
    const bool lower = TRIANGLE == Triangle::LOWER;
    const u32 rows = (lower ? pair.later : pair.earlier) * TILE, columns = (lower ? pair.earlier : pair.later) * TILE;
    Accumulator decays;
    if (pair.later == pair.earlier) {
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            const u32 row = tile_row(row_slot(i)), column = tile_column(i);
            decays.at[i] = lower ? steps.within[rows + row][column] : steps.within[columns + column][row];
        }
        return decays;
    }
    const float between = of_tiles(steps, pair.earlier + 1, pair.later);
#pragma unroll
    for (u32 i = 0; i < HELD; i += 2) {
        const u32 row = rows + tile_row(row_slot(i)), column = columns + tile_column(i);
        const Pack<2> of_columns = load_pack<2>(lower ? &steps.behind[column] : &steps.through[column]);
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const float later = lower ? steps.through[row] : of_columns.at[k];
            decays.at[i + k] = later * (between * (lower ? of_columns.at[k] : steps.behind[row]));
        }
    }
    return decays;
}
// S_ij delta_j; i is a row of the tile.
DEVICE Accumulator weights_of_earlier(const Steps& steps, const TilePair& pair) {
    Accumulator weights = decays_between<Triangle::LOWER>(steps, pair);
#pragma unroll
    for (u32 i = 0; i < HELD; i += 2) {
        const Pack<2> delta = load_pack<2>(&steps.delta[pair.earlier * TILE + tile_column(i)]);
        weights.at[i] *= delta.at[0];
        weights.at[i + 1] *= delta.at[1];
    }
    return weights;
}

DEVICE Accumulator elementwise_product(Accumulator tile, const Accumulator& by) {
#pragma unroll
    for (u32 i = 0; i < HELD; i++) tile.at[i] *= by.at[i];
    return tile;
}

// out[c] += left[own rows] . state[channels of tile c of the half]; `left` is B or C.
DEVICE void add_states(Accumulator (&out)[OUT_TILES], const StateRows& left, const SplitStates& state, u32 own) {
#pragma unroll 2
    for (u32 k = 0; k < STATES; k += TILE) {
        const Factor factor = load_factor(left, own * TILE, k);
#pragma unroll
        for (u32 c = 0; c < OUT_TILES; c++) {
            multiply_add<Stored::BY_COLUMN>(out[c], factor, state, k, out_channel() + c * TILE);
        }
    }
}

// out[c] += weights(pair)[own rows, positions] values[positions, columns of tile c], summed over the tiles of positions that TRIANGLE
// pairs with the own tile, the last first. The columns begin at `column`.
template <Triangle TRIANGLE, u32 COUNT, class Weights, class Values>
DEVICE void add_mixed(Accumulator (&out)[COUNT], Weights weights, const Values& values, u32 column, u32 own, u32 tiles) {
    const bool lower = TRIANGLE == Triangle::LOWER;
    const u32 first = lower ? 0 : own, end = lower ? own + 1 : tiles;
#pragma unroll 1
    for (u32 other = end; other-- > first;) {
        const SplitFactor factor = weights(lower ? TilePair{own, other} : TilePair{other, own});
#pragma unroll
        for (u32 c = 0; c < COUNT; c++) {
            multiply_add<Stored::BY_TERM>(out[c], factor, values, other * TILE, column + c * TILE);
        }
    }
}

// Sums over COUNT neighbouring lanes: over the lanes before this one, over this one and those after it, and over all.
struct PrefixSums {
    float before, from, all;
};
template <u32 COUNT>
DEVICE PrefixSums prefix_sums(float value) {
    PrefixSums sums = {0.0f, value, value};
#pragma unroll
    for (u32 mask = 1; mask < COUNT; mask *= 2) {
        const float others = shuffle_xor(sums.all, mask);
        if (threadIdx.x & mask) {
            sums.before += others;
        } else {
            sums.from += others;
        }
        sums.all += others;
    }
    return sums;
}

// --- states -------------------------------------------------------------------------------------------------

// A warp's share: all states of some channels, or some of the states of sixteen channels.
constexpr u32 OWN_CHANNELS = CHANNEL_TILES > WARPS ? CHANNEL_TILES / WARPS : 1;
constexpr u32 SHARED_BY = CHANNEL_TILES < WARPS ? WARPS / CHANNEL_TILES : 1;
constexpr u32 OWN_STATES = STATE_TILES / SHARED_BY;
static_assert(OWN_CHANNELS * OWN_STATES * WARPS == CHANNEL_TILES * STATE_TILES, "every tile has a warp");

struct State {
    Accumulator tile[OWN_CHANNELS][OWN_STATES];
};
DEVICE u32 own_channel() { return in_warp(threadIdx.x / WARP / SHARED_BY) * OWN_CHANNELS * TILE; }
DEVICE u32 own_state() { return in_warp(threadIdx.x / WARP % SHARED_BY) * OWN_STATES * TILE; }

template <class Body>
DEVICE void for_each_element(State& state, Body body) {
#pragma unroll
    for (u32 c = 0; c < OWN_CHANNELS; c++) {
#pragma unroll
        for (u32 s = 0; s < OWN_STATES; s++) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) body(state.tile[c][s].at[i], (c * OWN_STATES + s) * HELD + i);
        }
    }
}
DEVICE void set_zero(State& state) {
    for_each_element(state, [](float& element, u32) { element = 0.0f; });
}

DEVICE void put_state(const SplitStates& to, const State& state) {
#pragma unroll
    for (u32 c = 0; c < OWN_CHANNELS; c++) {
#pragma unroll
        for (u32 s = 0; s < OWN_STATES; s++) {
            const Accumulator& tile = state.tile[c][s];
#pragma unroll
            for (u32 i = 0; i < HELD; i += 2) {
                const u32 row = own_channel() + c * TILE + tile_row(row_slot(i));
                const u32 column = own_state() + s * TILE + tile_column(i);
                to.put_pair(row, column, tile.at[i], tile.at[i + 1]);
            }
        }
    }
}

// state[c, s] = E_L state[c, s] + sum over the positions i of weights[i] channels[i, c] states[i, s].
template <class Channels>
DEVICE void move_on(State& state, const Steps& steps, const float (&weights)[LENGTH], const Channels& channels,
                    const StateRows& states, u32 tiles) {
    const float keep = steps.from_start[LENGTH - 1];
    for_each_element(state, [&](float& element, u32) { element *= keep; });
#pragma unroll 1
    for (u32 tile = 0; tile < TILES && tile < tiles; tile++) {
#pragma unroll
        for (u32 c = 0; c < OWN_CHANNELS; c++) {
            const SplitFactor factor = weighted(load_transposed(channels, tile * TILE, own_channel() + c * TILE),
                                                [&](u32 i) { return weights[tile * TILE + i]; });
#pragma unroll
            for (u32 s = 0; s < OWN_STATES; s++) {
                multiply_add<Stored::BY_TERM>(state.tile[c][s], factor, states, tile * TILE, own_state() + s * TILE);
            }
        }
    }
}

// --- rows of inputs -----------------------------------------------------------------------------------------

// Copies the first `rows` rows of LENGTH; zeros after them and after `columns`. Complete once every thread has waited for its copies and
// passed a barrier.
template <u32 COLUMNS>
DEVICE void put_rows(const SharedRows<COLUMNS>& to, const activation* from, u64 stride, u32 rows, u32 columns, bool wide) {
    constexpr u32 CHUNK = SharedRows<COLUMNS>::CHUNK, CHUNKS = SharedRows<COLUMNS>::CHUNKS, STEP = CHUNK_THREADS / CHUNKS;
    static_assert(CHUNK_THREADS % CHUNKS == 0, "a thread has chunks of one column");
    const u32 first = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * CHUNK;
    const activation* source = from + (first * stride + column);
    const u32 count = column < columns ? min(CHUNK, columns - column) : 0, end = count > 0 ? rows : 0;
    if (wide) {
#pragma unroll
        for (u32 step = 0; step < LENGTH; step += STEP) {
            const u32 row = first + step;
            if (LENGTH % STEP > 0 && row >= LENGTH) break;
            activation* const place = to.chunk(row, column);
            if (row < end) {
                copy_async_16(place, source);
            } else {
                store4(reinterpret_cast<float*>(place), make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            }
            source += STEP * stride;
        }
        return;
    }
#pragma unroll 1
    for (u32 row = first; row < LENGTH; row += STEP, source += STEP * stride) {
        activation* const place = to.chunk(row, column);
        store4(reinterpret_cast<float*>(place), make_float4(0.0f, 0.0f, 0.0f, 0.0f));
#pragma unroll 1
        for (u32 element = 0; element < count && row < end; element++) place[element] = source[element];
    }
}

// B, C and x of a chunk.
DEVICE void put_inputs(const StateRows& b, const StateRows& c, const ChannelRows& x, const HeadScanInputs& in, const Head& my,
                       const Chunk& chunk) {
    const bool wide = in.wide != 0;
    put_rows(b, place(in.bc, chunk.row, column_of_b(in, my)), in.bc.stride, chunk.count, in.states, wide);
    put_rows(c, place(in.bc, chunk.row, column_of_c(in, my)), in.bc.stride, chunk.count, in.states, wide);
    put_rows(x, place(in.x, chunk.row, my.channel), in.x.stride, chunk.count, my.channels, wide);
    copy_async_commit();
}

// Two neighbouring elements of a row from `column` on; zeros after `columns`.
template <class T>
DEVICE Pack<2> two_of(const T* row, u32 column, u32 columns, bool wide) {
    if (wide && column < columns) return load_pack<2>(row + column);
    return Pack<2>{{column < columns ? widen(row[column]) : 0.0f, column + 1 < columns ? widen(row[column + 1]) : 0.0f}};
}
template <class T>
DEVICE void put_two(T* row, u32 column, u32 columns, bool wide, float first, float second) {
    if (wide && column < columns) {
        store_pack<2>(row + column, Pack<2>{{first, second}});
        return;
    }
    if (column < columns) narrow(row[column], first);
    if (column + 1 < columns) narrow(row[column + 1], second);
}

// Calls `body` with each of a lane's rows: its index among the lane's rows, and its position.
template <class Body>
DEVICE void for_each_row(u32 own, Body body) {
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) body(slot, own * TILE + tile_row(slot));
}
// Calls `body` with each pair of a lane's elements of a row of COUNT tiles: the tile, the element, and its column, counted from the
// lane's first.
template <u32 COUNT, class Body>
DEVICE void for_each_pair(u32 slot, Body body) {
#pragma unroll
    for (u32 tile = 0; tile < COUNT; tile++) {
#pragma unroll
        for (u32 i = 0; i < HELD; i += 2) {
            if (row_slot(i) == slot) body(tile, i, tile * TILE + column_step(i));
        }
    }
}

// A lane's pairs of elements of a row of COUNT tiles, from column `first` on; zeros after `columns`. All loads are issued before any is
// used.
template <u32 COUNT>
struct RowPairs {
    static constexpr u32 OF_TILE = HELD / 2 / HELD_ROWS;
    Pack<2> pairs[COUNT * OF_TILE];

    template <class T>
    __device__ __forceinline__ RowPairs(const T* row, u32 first, u32 columns, bool wide) {
        if (wide) {
            for_each_pair<COUNT>(0, [&](u32 tile, u32 i, u32 column) {
                at(tile, i) = first + column < columns ? load_pack<2>(row + first + column) : filled<2>(0.0f);
            });
        } else {
            for_each_pair<COUNT>(0, [&](u32 tile, u32 i, u32 column) {
                at(tile, i) = two_of(row, first + column, columns, false);
            });
        }
    }
    __device__ __forceinline__ Pack<2>& at(u32 tile, u32 i) { return pairs[tile * OF_TILE + i / (2 * HELD_ROWS)]; }
};
