// The gradients of the scan of heads, in the chunks of head_scan.h. A forward walk recomputes the states and writes dz and each head's
// part of dC. A backward walk carries G, the gradient of the state after a chunk, and writes dx, the gradients of the raw step sizes and
// each head's part of dB. scan_sums.cu adds the parts.
//
// With dy = dout silu(z), u, S, E, L and h of head_scan.h, and sums over i >= j of the chunk:
//
//   dC_i = E_i (h . dy_i) + sum over j <= i of S_ij (dy_i . u_j) B_j
//   dB_j = S_Lj (G . u_j) + sum of S_ij (dy_i . u_j) C_i
//   du_j = S_Lj (G . B_j) + sum of S_ij (C_i . B_j) dy_i;   dx_j = delta_j du_j + D dy_j
//   G'   = E_L G + sum over i of E_i dy_i C_i
//   ddelta_t = A q_t + x_t . du_t;   dA = sum over t of delta_t q_t
//
// q_t, the gradient by the logarithm of the decay at t, sums the contributions of positions before t to t and to the positions after it:
//
//   q_t = sum over j < t <= i of S_ij (C_i . B_j)(dy_i . u_j) + sum over i >= t of E_i dy_i . (C_i . h)
//         + sum over j < t of S_Lj u_j . (G . B_j) + E_L (G . h)
//
// The last term needs states, which the backward walk does not have. But G . h' = E_L (G . h) + sum over j <= L of S_Lj u_j . (G . B_j), so
// the term is G . h', known from the next chunk, less that sum. The difference loses digits only where E_L is small, and there the term
// is small beside the others; for E_L up to NEGLIGIBLE it counts as zero. The forward walk saves the state every SAVED_POSITIONS
// positions of a document, and the backward walk recomputes G . h' there, so that errors do not add up over a long document.
#include "head_scan_chunk.h"

namespace {

typedef SplitRows<LENGTH, CHANNELS> SplitChannels;

constexpr float NEGLIGIBLE = 9.313225746154785e-10f;  // 2^-30

struct Shared {
    activation b[ROWS_OR_FACTORS], c[ROWS_OR_FACTORS];
    activation state[PARTS * CHANNELS * STATES];  // h, or G
    activation x[LENGTH * CHANNELS];
    activation dy[PARTS * LENGTH * CHANNELS];
    Steps steps;
    float pairs[PAIRS][TILE], rows[PAIRS][TILE];  // of put_pair_sums
    // S_Lj u_j . (G . B_j) and x . du, summed over the channels of each half.
    float from_state[HALVES][LENGTH], of_delta[HALVES][LENGTH];
    float passed[LENGTH];
    float partial[WARPS];
};

DEVICE void put_dy(const SplitChannels& dy, const HeadScanBackwardArguments& arguments, const Head& my, const Chunk& chunk) {
    const HeadScanInputs& in = arguments.in;
    constexpr u32 FOURS = CHANNELS / 4, STEP = CHUNK_THREADS / FOURS, STEPS = LENGTH / STEP;
    static_assert(CHUNK_THREADS % FOURS == 0 && LENGTH % STEP == 0, "a thread has whole rows' steps of one column");
    const u32 first = threadIdx.x / FOURS, column = threadIdx.x % FOURS * 4;
    float4 gradient[STEPS], z[STEPS];
    // All loads are issued before the first is used.
    const auto load = [&](bool wide) {
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            const u32 i = first + step * STEP, row = chunk.row + i, columns = i < chunk.count ? my.channels : 0;
            const float* const dout = arguments.dout + (row * arguments.dout_stride + my.channel);
            gradient[step] = four_of(dout, column, columns, wide);
            z[step] = four_of(place(in.z, row, my.channel), column, columns, wide);
        }
    };
    if (in.wide != 0) {
        load(true);
    } else {
        load(false);
    }
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 i = first + step * STEP;
        const float4 dout = gradient[step], gate = z[step];
        dy.put_pair(i, column, dout.x * silu(gate.x), dout.y * silu(gate.y));
        dy.put_pair(i, column + 2, dout.z * silu(gate.z), dout.w * silu(gate.w));
    }
}

// Tiles of states that form_share computes at once.
constexpr u32 SHARE_TILES = STATE_TILES / HALVES < 4 ? STATE_TILES / HALVES : 4;

// A head's part of dC or of dB, weights[row] (left[own rows] . state) + mixes values[positions], added to the sum over the channels of
// earlier parts.
template <Triangle TRIANGLE, class Left>
DEVICE void form_share(const HeadScanBackwardArguments& arguments, const Head& my, const Chunk& chunk, u32 part, const Left& left,
                       const SplitStates& state, const float (&weights)[LENGTH], float* mixes, const StateRows& values) {
    const u32 own = own_tile(), tiles = tiles_of(chunk);
#pragma unroll 1
    for (u32 step = 0; step < STATE_TILES / HALVES; step += SHARE_TILES) {
        const u32 first = (own_half() * (STATE_TILES / HALVES) + step) * TILE;
        Accumulator share[SHARE_TILES];
        set_zero(share);
#pragma unroll 1
        for (u32 k = 0; k < CHANNELS; k += TILE) {
            const auto factor = load_factor(left, own * TILE, k);
#pragma unroll
            for (u32 s = 0; s < SHARE_TILES; s++) {
                multiply_add<Stored::BY_TERM>(share[s], factor, state, k, first + s * TILE);
            }
        }
        scale_rows(share, own, weights);
        const auto weights_of = [&](const TilePair& pair) { return take_factor(mixes, pair_index(pair)); };
        add_mixed<TRIANGLE>(share, weights_of, values, first, own, tiles);
        for_each_row(own, [&](u32 slot, u32 position) {
            if (position >= chunk.count) return;
            const u64 row = static_cast<u64>(chunk.row + position) * arguments.in.heads + my.head;
            float* const to = arguments.shares + (row * STATES + (first + first_tile_column()));
            if (part > 0) {
                for_each_pair<SHARE_TILES>(slot, [&](u32 s, u32 i, u32 column) {
                    const Pack<2> before = load_pack<2>(to + column);
                    share[s].at[i] += before.at[0];
                    share[s].at[i + 1] += before.at[1];
                });
            }
            for_each_pair<SHARE_TILES>(slot, [&](u32 s, u32 i, u32 column) {
                store_pack<2>(to + column, Pack<2>{{share[s].at[i], share[s].at[i + 1]}});
            });
        });
    }
}

// Sums each row over the lanes that share it, and calls `body` with the row and its sum in one of these lanes.
template <class Body>
DEVICE void put_row_sums(u32 own, const float (&sums)[HELD_ROWS], Body body) {
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        const float sum = row_sum(sums[slot]);
        if (first_tile_column() == 0) body(own * TILE + tile_row(slot), sum);
    }
}

DEVICE void chunk_forward(const HeadScanBackwardArguments& arguments, Shared& shared, const Head& my, const Chunk& chunk,
                          u32 part, State& state) {
    const HeadScanInputs& in = arguments.in;
    const StateRows b(shared.b), c(shared.c);
    const ChannelRows x(shared.x);
    const SplitChannels dy{shared.dy};
    const SplitStates h{shared.state};
    const Steps& steps = shared.steps;
    const u32 own = own_tile(), tiles = tiles_of(chunk);
    __syncthreads();  // all threads have finished the previous chunk
    put_inputs(b, c, x, in, my, chunk);
    put_state(h, state);
    put_dy(dy, arguments, my, chunk);
    put_steps(shared.steps, in, my, chunk);
    copy_async_wait<0>();
    __syncthreads();  // the chunk is loaded
    put_decays(shared.steps);
    Accumulator y[OUT_TILES];
    set_zero(y);
    if (own < tiles) add_states(y, c, h, own);
    __syncthreads();  // decays are written
    const GroupPairs pairs(arguments.pairs, in, my, chunk);
    float* const of_gradients = reinterpret_cast<float*>(shared.c);  // S_ij (dy_i . x_j) delta_j
    for_each_own_pair(tiles, [&](const TilePair& pair) {
        const Accumulator products = pair_products<CHANNELS>(dy, x, pair.later, pair.earlier);
        put_factor(of_gradients, pair_index(pair), as_split(elementwise_product(products, weights_of_earlier(steps, pair))));
    });
    __syncthreads();  // weights are written
    if (own < tiles) {
        const u32 first = out_channel() + first_tile_column();
        float passed[HELD_ROWS] = {};
        scale_rows(y, own, steps.from_start);
        for_each_row(own, [&](u32 slot, u32 position) {
            for_each_pair<OUT_TILES>(slot, [&](u32 tile, u32 i, u32 column) {
                const Pack<2> of_dy = dy.pair(position, first + column);
                passed[slot] = fmaf(of_dy.at[1], y[tile].at[i + 1], fmaf(of_dy.at[0], y[tile].at[i], passed[slot]));
            });
        });
        put_row_sums(own, passed, [&](u32 position, float sum) {
            if (position >= chunk.count) return;
            const u64 row = static_cast<u64>(chunk.row + position) * in.heads + my.head;
            arguments.passed[(row * parts_of(in) + part) * HALVES + own_half()] = sum;
        });
        const auto mixes = [&](const TilePair& pair) {
            return as_split(elementwise_product(load_pairs<Triangle::LOWER>(pairs, pair), weights_of_earlier(steps, pair)));
        };
        add_mixed<Triangle::LOWER>(y, mixes, x, out_channel(), own, tiles);
        const float skip = in.d[my.head];
        for_each_row(own, [&](u32 slot, u32 position) {
            if (position >= chunk.count) return;
            const u32 row = chunk.row + position;
            const bool wide = in.wide != 0;
            RowPairs<OUT_TILES> of_z(place(in.z, row, my.channel), first, my.channels, wide);
            RowPairs<OUT_TILES> of_dout(arguments.dout + (row * arguments.dout_stride + my.channel), first, my.channels, wide);
            activation* const to = place(arguments.dz, row, my.channel);
            for_each_pair<OUT_TILES>(slot, [&](u32 tile, u32 i, u32 column) {
                const u32 channel = first + column;
                if (channel >= my.channels) return;
                const Pack<2> z = of_z.at(tile, i), dout = of_dout.at(tile, i);
                const Pack<2> of_x = load_pack<2>(x.at(position, channel));
                float dz[2];
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    dz[k] = dout.at[k] * fmaf(skip, of_x.at[k], y[tile].at[i + k]) * silu_derivative(z.at[k]);
                }
                put_two(to, channel, my.channels, arguments.wide_out != 0, dz[0], dz[1]);
            });
        });
        warp_barrier();  // without it the compiler hoists the loads of form_share and runs out of registers
        form_share<Triangle::LOWER>(arguments, my, chunk, part, dy, h, steps.from_start, of_gradients, b);
    }
    move_on(state, steps, steps.into_end, x, b, tiles);
}

// What the backward walk of a head's channels carries from chunk to chunk, beside G.
struct Carried {
    float state_gradient;         // G . h', at the end of the chunk
    float da, dd, ddelta_bias;    // a thread's sums
};

// Four lanes share a row of a tile and hold neighbouring runs of RUN columns: one run each, or one in each half of the row.
constexpr u32 RUN = WARP == 32 ? 2 : 4, RUNS = WARP == 32 ? 2 : 1;
DEVICE constexpr u32 run_element(u32 run, u32 slot, u32 k) { return WARP == 32 ? run * 4 + slot * 2 + k : k; }

// The sum of the runs after a lane's own in its row; `total` receives the sum of the row's four runs.
DEVICE float behind_in_row(float own, float& total) {
    const u32 lane = lane_of_warp(), place = WARP == 32 ? lane % 4 : lane / 16;
    const float near = shuffle_xor(own, WARP == 32 ? 1 : 16), both = own + near;
    const float far = shuffle_xor(both, WARP == 32 ? 2 : 32);
    total = both + far;
    return (place < 2 ? far : 0.0f) + (place % 2 == 0 ? near : 0.0f);
}

// What a pair of tiles adds to the first sum of q. The products (C_i . B_j)(S_ij dy_i . u_j) have a row for each j and a column for each i.
// `sums` receives the sum over j < t <= i for each position t of the later tile, and `of_rows` the sum over all i for each position j of
// the earlier tile.
DEVICE void put_pair_sums(float* sums, float* of_rows, const Accumulator& products, const Accumulator& weights, const TilePair& pair) {
    float behind[HELD_ROWS] = {};
#pragma unroll
    for (u32 run = RUNS; run-- > 0;) {
        float of_columns[RUN] = {};
#pragma unroll
        for (u32 slot = 0; slot < HELD_ROWS; slot++) {
            const u32 j = pair.earlier * TILE + tile_row(slot);
            float suffix[RUN], sum = 0.0f, total;
#pragma unroll
            for (u32 k = RUN; k-- > 0;) {
                const u32 i = run_element(run, slot, k);
                sum = fmaf(products.at[i], weights.at[i], sum);
                suffix[k] = sum;
            }
            const float rest = behind[slot] + behind_in_row(sum, total);
            behind[slot] += total;
#pragma unroll
            for (u32 k = 0; k < RUN; k++) {
                if (pair.later * TILE + tile_column(run_element(run, slot, k)) > j) of_columns[k] += suffix[k] + rest;
            }
        }
#pragma unroll
        for (u32 k = 0; k < RUN; k++) {
#pragma unroll
            for (u32 mask = WARP == 32 ? 4 : 1; mask < (WARP == 32 ? 32 : 16); mask *= 2) {
                of_columns[k] += shuffle_xor(of_columns[k], mask);
            }
            if (tile_row(0) == 0) sums[tile_column(run_element(run, 0, k))] = of_columns[k];
        }
    }
#pragma unroll
    for (u32 slot = 0; slot < HELD_ROWS; slot++) {
        if (first_tile_column() == 0) of_rows[tile_row(slot)] = behind[slot];
    }
}

// The first sum of q_t, over the pairs in which the tile of t is the later tile, lies between both, or is the earlier tile.
DEVICE float sum_of_pairs(const Shared& shared, u32 t, u32 tiles) {
    const u32 own = t / TILE;
    float sum = 0.0f, of_row = 0.0f;
#pragma unroll
    for (u32 index = 0; index < PAIRS; index++) {
        const TilePair pair = tile_pair(index);
        if (pair.later >= tiles) continue;
        if (pair.later == own) sum += shared.pairs[index][t % TILE];
        if (pair.earlier < own && own < pair.later) sum += shared.pairs[index][0];
        if (pair.earlier == own && own < pair.later) of_row += shared.rows[index][t % TILE];
    }
    return sum + prefix_sums<TILE>(of_row).before;
}

// q of the thread's position, from the sums in `shared`; moves carried.state_gradient from the end of the chunk to its beginning.
DEVICE float gradient_of_decay(const Shared& shared, Carried& carried, u32 tiles) {
    constexpr u32 LANES = LENGTH < WARP ? LENGTH : WARP;
    const u32 t = threadIdx.x % LENGTH;
    const float within = sum_of_pairs(shared, t, tiles);
    float from_all = 0.0f, from_before = 0.0f, to_all = 0.0f, to_behind = 0.0f;
#pragma unroll
    for (u32 first = 0; first < LENGTH; first += LANES) {
        const u32 position = first + t % LANES;
        float of_position = shared.from_state[0][position];
        if (HALVES > 1) of_position += shared.from_state[HALVES - 1][position];
        const PrefixSums from = prefix_sums<LANES>(of_position), to = prefix_sums<LANES>(shared.passed[position]);
        const bool own = first == t / LANES * LANES;
        if (first <= t) from_before += own ? from.before : from.all;
        if (first + LANES > t) to_behind += own ? to.from : to.all;
        from_all += from.all;
        to_all += to.all;
    }
    const bool reaches_through = shared.steps.from_start[LENGTH - 1] > NEGLIGIBLE;
    const float through = reaches_through ? carried.state_gradient - from_all : 0.0f;
    carried.state_gradient = through + to_all;
    return within + to_behind + (from_before + through);
}

DEVICE void chunk_backward(const HeadScanBackwardArguments& arguments, Shared& shared, const Head& my, const Chunk& chunk,
                           u32 part, State& gradient, Carried& carried) {
    const HeadScanInputs& in = arguments.in;
    const StateRows b(shared.b), c(shared.c);
    const ChannelRows x(shared.x);
    const SplitChannels dy{shared.dy};
    const SplitStates g{shared.state};
    const Steps& steps = shared.steps;
    const u32 own = own_tile(), tiles = tiles_of(chunk), thread = in_lanes(threadIdx.x);
    __syncthreads();  // all threads have finished the next chunk
    put_inputs(b, c, x, in, my, chunk);
    put_state(g, gradient);
    put_dy(dy, arguments, my, chunk);
    put_steps(shared.steps, in, my, chunk);
    if (thread < LENGTH) {
        const u64 row = static_cast<u64>(chunk.row + thread) * in.heads + my.head;
        float passed = 0.0f;
#pragma unroll
        for (u32 half = 0; half < HALVES; half++) {
            shared.from_state[half][thread] = 0.0f;
            if (thread < chunk.count) passed += arguments.passed[(row * parts_of(in) + part) * HALVES + half];
        }
        shared.passed[thread] = passed;
    }
    copy_async_wait<0>();
    __syncthreads();  // the chunk is loaded
    put_decays(shared.steps);
    Accumulator du[OUT_TILES];
    set_zero(du);
    if (own < tiles) add_states(du, b, g, own);
    __syncthreads();  // decays are written
    const GroupPairs pairs(arguments.pairs, in, my, chunk);
    float* const of_gradients = reinterpret_cast<float*>(shared.b);  // S_ij (dy_i . x_j) delta_j, transposed
    for_each_own_pair(tiles, [&](const TilePair& pair) {
        const u32 index = pair_index(pair);
        const Accumulator products = load_pairs<Triangle::UPPER>(pairs, pair);
        Accumulator weights = elementwise_product(pair_products<CHANNELS>(x, dy, pair.earlier, pair.later),
                                                  decays_between<Triangle::UPPER>(steps, pair));
#pragma unroll
        for (u32 i = 0; i < HELD; i++) weights.at[i] *= steps.delta[pair.earlier * TILE + tile_row(row_slot(i))];
        put_pair_sums(shared.pairs[index], shared.rows[index], products, weights, pair);
        put_factor(of_gradients, index, as_split(weights));
    });
    __syncthreads();  // weights are written
    if (own < tiles) {
        scale_rows(du, own, steps.to_end);
        const u32 first = out_channel() + first_tile_column();
        float from_state[HELD_ROWS] = {};
        for_each_row(own, [&](u32 slot, u32 position) {
            for_each_pair<OUT_TILES>(slot, [&](u32 tile, u32 i, u32 column) {
                const Pack<2> of_x = load_pack<2>(x.at(position, first + column)), of_dy = dy.pair(position, first + column);
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    from_state[slot] = fmaf(of_x.at[k], du[tile].at[i + k], from_state[slot]);
                    carried.dd = fmaf(of_x.at[k], of_dy.at[k], carried.dd);
                }
            });
        });
        put_row_sums(own, from_state, [&](u32 j, float sum) { shared.from_state[own_half()][j] = steps.delta[j] * sum; });
        const auto mixes = [&](const TilePair& pair) {
            const Accumulator decays = decays_between<Triangle::UPPER>(steps, pair);
            return as_split(elementwise_product(load_pairs<Triangle::UPPER>(pairs, pair), decays));
        };
        add_mixed<Triangle::UPPER>(du, mixes, dy, out_channel(), own, tiles);
        const float skip = in.d[my.head];
        float of_delta[HELD_ROWS] = {};
        for_each_row(own, [&](u32 slot, u32 position) {
            const float delta = steps.delta[position];
            activation* const to = place(arguments.dx, chunk.row + position, my.channel);
            const u32 channels = position < chunk.count ? my.channels : 0;
            for_each_pair<OUT_TILES>(slot, [&](u32 tile, u32 i, u32 column) {
                const u32 channel = first + column;
                const Pack<2> of_x = load_pack<2>(x.at(position, channel)), of_dy = dy.pair(position, channel);
                float dx[2];
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    of_delta[slot] = fmaf(of_x.at[k], du[tile].at[i + k], of_delta[slot]);
                    dx[k] = fmaf(delta, du[tile].at[i + k], skip * of_dy.at[k]);
                }
                put_two(to, channel, channels, arguments.wide_out != 0, dx[0], dx[1]);
            });
        });
        put_row_sums(own, of_delta, [&](u32 j, float sum) { shared.of_delta[own_half()][j] = sum; });
        form_share<Triangle::UPPER>(arguments, my, chunk, part, x, g, steps.into_end, of_gradients, c);
    }
    __syncthreads();  // sums are written
    move_on(gradient, steps, steps.from_start, dy, c, tiles);
    if (in_warp(threadIdx.x / WARP) * WARP >= LENGTH) return;
    const float q = gradient_of_decay(shared, carried, tiles);
    if (thread >= chunk.count) return;
    float of_delta = shared.of_delta[0][thread];
    if (HALVES > 1) of_delta += shared.of_delta[HALVES - 1][thread];
    float ddelta = fmaf(my.rate * LN_2, q, of_delta);
    carried.da = fmaf(steps.delta[thread], q, carried.da);
    carried.ddelta_bias = fmaf(ddelta, steps.slope[thread], carried.ddelta_bias);
    const u64 row = static_cast<u64>(chunk.row + thread) * in.heads + my.head;
    if (part > 0) ddelta += arguments.totals[row];
    if (part + 1 < in_lanes(parts_of(in))) {
        arguments.totals[row] = ddelta;
    } else {
        *place(arguments.ddelta_raw, chunk.row + thread, my.head) = rounded(ddelta * steps.slope[thread]);
    }
}

// Whether the state before `position`, where a chunk of the document from `document` on begins, is saved. At the document's beginning
// the state is zero. Saved positions are at least SAVED_POSITIONS apart, also across documents.
DEVICE bool is_saved(u32 document, u32 position) {
    return position != document && (position - document) % SAVED_POSITIONS == 0;
}
// Where a thread saves its share of the state before `position`.
DEVICE float* saved_place(const HeadScanBackwardArguments& arguments, u32 part, u32 position) {
    const u64 walk = static_cast<u64>(in_lanes(blockIdx.x)) * parts_of(arguments.in) + part;
    const u64 place = walk * (arguments.in.positions / SAVED_POSITIONS) + (position / SAVED_POSITIONS - 1);
    return arguments.saved + (place * (CHANNELS * STATES) + threadIdx.x);
}
DEVICE void save_state(float* to, State& state) {
    for_each_element(state, [&](float& element, u32 i) { to[i * CHUNK_THREADS] = element; });
}
// G . h, summed over all threads.
DEVICE float dot_with_saved(const float* from, State& gradient, float* partial) {
    float sum = 0.0f;
    for_each_element(gradient, [&](float& element, u32 i) { sum = fmaf(element, from[i * CHUNK_THREADS], sum); });
    return block_sum<CHUNK_THREADS>(sum, partial);
}

}  // namespace

// The forward walk. A block computes all channels of a head of a sample.
KERNEL(head_scan_backward_states, CHUNK_THREADS, 2, HeadScanBackwardArguments) {
    SHARED(Shared, shared);
    const HeadScanInputs& in = arguments.in;
    for (u32 part = 0; part < parts_of(in); part++) {
        const Head my = head_of(in, blockIdx.x, part);
        const Documents documents(in, my.sample);
        State state;
        for (u32 first = 0, document = 0; first < in.positions;) {
            const u32 end = documents.end_of_chunk(first);
            if (documents.begins(first)) {
                document = first;
                set_zero(state);
            }
            if (is_saved(document, first)) save_state(saved_place(arguments, part, first), state);
            chunk_forward(arguments, *shared, my, chunk_of(in, my, first, end), part, state);
            first = end;
        }
    }
}
SHARED_BYTES(head_scan_backward_states, sizeof(Shared));

// The backward walk, launched after the forward walk with the same blocks.
KERNEL(head_scan_backward_gradients, CHUNK_THREADS, 2, HeadScanBackwardArguments) {
    SHARED(Shared, shared);
    const HeadScanInputs& in = arguments.in;
    Carried carried = {};
    for (u32 part = 0; part < parts_of(in); part++) {
        const Head my = head_of(in, blockIdx.x, part);
        const Documents documents(in, my.sample);
        State gradient;
        u32 document = in.positions;
        for (u32 end = in.positions; end > 0;) {
            if (document >= end) {
                document = documents.document_of(end - 1);
                set_zero(gradient);
                carried.state_gradient = 0.0f;
            } else if (is_saved(document, end)) {
                const float* const saved = saved_place(arguments, part, end);
                carried.state_gradient = dot_with_saved(saved, gradient, shared->partial);
            }
            const u32 first = document + (end - 1 - document) / LENGTH * LENGTH;
            chunk_backward(arguments, *shared, my, chunk_of(in, my, first, end), in_lanes(part), gradient, carried);
            end = first;
        }
    }
    __syncthreads();  // all threads have finished the first chunk
    const float da = block_sum<CHUNK_THREADS>(carried.da, shared->partial);
    const float dd = block_sum<CHUNK_THREADS>(carried.dd, shared->partial);
    const float ddelta_bias = block_sum<CHUNK_THREADS>(carried.ddelta_bias, shared->partial);
    if (threadIdx.x > 0) return;
    const Head my = head_of(in, blockIdx.x, 0);
    float* const to = arguments.parameters + (static_cast<u64>(my.sample) * 3 * in.heads + my.head);
    to[0] = da * (my.rate * LN_2);
    to[in.heads] = dd;
    to[2 * in.heads] = ddelta_bias;
}
SHARED_BYTES(head_scan_backward_gradients, sizeof(Shared));
