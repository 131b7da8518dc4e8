// The forward scan of heads over whole sequences, in chunks (head_scan_chunk.h).
//
// A block has up to CHANNELS channels of a head of a sample, and walks the chunks of the sample. Every head of a group reads the same B
// and C of a chunk, from the cache that all multiprocessors share.
//
// Floor, per channel, state and position: 2 products of two parts each; per channel and pair of positions: one product of two parts.
#include "head_scan_chunk.h"

namespace {

struct Shared {
    activation b[LENGTH * STATES], c[ROWS_OR_FACTORS];
    activation state[PARTS * CHANNELS * STATES];
    activation x[LENGTH * CHANNELS];
    Steps steps;
};

DEVICE void chunk_forward(const HeadScanForwardArguments& arguments, Shared& shared, const Head& my, const Chunk& chunk,
                          State& state) {
    const HeadScanInputs& in = arguments.in;
    const StateRows b(shared.b), c(shared.c);
    const ChannelRows x(shared.x);
    const SplitStates h{shared.state};
    const Steps& steps = shared.steps;
    const u32 own = own_tile(), tiles = tiles_of(chunk);
    __syncthreads();  // all threads have finished the previous chunk
    put_inputs(b, c, x, in, my, chunk);
    put_state(h, state);
    put_steps(shared.steps, in, my, chunk);
    copy_async_wait<0>();
    __syncthreads();  // the chunk is loaded
    put_decays(shared.steps);
    Accumulator y[OUT_TILES];
    set_zero(y);
    if (own < tiles) add_states(y, c, h, own);
    __syncthreads();  // decays are written
    float* const factors = reinterpret_cast<float*>(shared.c);  // S_ij (C_i . B_j) delta_j
    const GroupPairs pairs(arguments.pairs, in, my, chunk);
    for_each_own_pair(tiles, [&](const TilePair& pair) {
        const Accumulator products = load_pairs<Triangle::LOWER>(pairs, pair);
        put_factor(factors, pair_index(pair), as_split(elementwise_product(products, weights_of_earlier(steps, pair))));
    });
    __syncthreads();  // weights are written
    if (own < tiles) {
        scale_rows(y, own, steps.from_start);
        const auto mixes = [&](const TilePair& pair) { return take_factor(factors, pair_index(pair)); };
        add_mixed<Triangle::LOWER>(y, mixes, x, out_channel(), own, tiles);
        const float skip = in.d[my.head];
        const u32 first = out_channel() + first_tile_column();
        for_each_row(own, [&](u32 slot, u32 position) {
            if (position >= chunk.count) return;
            const u32 row = chunk.row + position;
            RowPairs<OUT_TILES> of_z(place(in.z, row, my.channel), first, my.channels, in.wide != 0);
            float* const to = arguments.out + (row * arguments.out_stride + my.channel);
            for_each_pair<OUT_TILES>(slot, [&](u32 tile, u32 i, u32 column) {
                const u32 channel = first + column;
                if (channel >= my.channels) return;
                const Pack<2> z = of_z.at(tile, i);
                const Pack<2> of_x = load_pack<2>(x.at(position, channel));
                float out[2];
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    out[k] = gated(fmaf(skip, of_x.at[k], y[tile].at[i + k]), z.at[k], sigmoid(z.at[k]));
                }
                put_two(to, channel, my.channels, in.wide != 0, out[0], out[1]);
            });
        });
    }
    move_on(state, steps, steps.into_end, x, b, tiles);
}

struct PairsShared {
    activation b[LENGTH * STATES], c[LENGTH * STATES];
};

DEVICE void chunk_pairs(const HeadScanPairsArguments& arguments, PairsShared& shared, const Head& my, const Chunk& chunk) {
    const HeadScanInputs& in = arguments.in;
    const StateRows b(shared.b), c(shared.c);
    __syncthreads();  // all threads have finished the previous rows
    put_rows(b, place(in.bc, chunk.row, column_of_b(in, my)), in.bc.stride, chunk.count, in.states, in.wide != 0);
    put_rows(c, place(in.bc, chunk.row, column_of_c(in, my)), in.bc.stride, chunk.count, in.states, in.wide != 0);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // rows are loaded
    float* const to = arguments.pairs + (static_cast<u64>(chunk.row) * in.groups + my.group) * LENGTH;
    for_each_own_pair(tiles_of(chunk), [&](const TilePair& pair) {
        const Accumulator products = pair_products<STATES>(c, b, pair.later, pair.earlier);
#pragma unroll
        for (u32 i = 0; i < HELD; i += 2) {
            const u32 row = pair.later * TILE + tile_row(row_slot(i)), column = pair.earlier * TILE + tile_column(i);
            if (row >= chunk.count) continue;
            store_pack<2>(to + (row * in.groups * LENGTH + column), Pack<2>{{products.at[i], products.at[i + 1]}});
        }
    });
}

}  // namespace

// A block computes one group of heads, for the chunks that begin in LENGTH neighbouring positions of a sample.
KERNEL(head_scan_pairs, CHUNK_THREADS, 2, HeadScanPairsArguments) {
    SHARED(PairsShared, shared);
    const HeadScanInputs& in = arguments.in;
    const u32 runs = (in.positions + LENGTH - 1) / LENGTH;
    const u32 of_group = blockIdx.x / runs, run = blockIdx.x % runs * LENGTH;
    const Head my = head_of(in, of_group * (in.heads / in.groups), 0);
    const Documents documents(in, my.sample);
    const u32 end_of_run = min(run + LENGTH, in.positions);
    for (u32 first = documents.first_chunk(run, end_of_run); first < end_of_run;) {
        const u32 end = documents.end_of_chunk(first);
        chunk_pairs(arguments, *shared, my, chunk_of(in, my, first, end));
        first = end;
    }
}
SHARED_BYTES(head_scan_pairs, sizeof(PairsShared));

// A block computes a part of the channels of a head of a sample.
KERNEL(head_scan_forward, CHUNK_THREADS, 2, HeadScanForwardArguments) {
    SHARED(Shared, shared);
    const HeadScanInputs& in = arguments.in;
    const u32 parts = parts_of(in);
    const Head my = head_of(in, blockIdx.x / parts, blockIdx.x % parts);
    const Documents documents(in, my.sample);
    State state;
    for (u32 first = 0; first < in.positions;) {
        const u32 end = documents.end_of_chunk(first);
        if (documents.begins(first)) set_zero(state);
        chunk_forward(arguments, *shared, my, chunk_of(in, my, first, end), state);
        first = end;
    }
}
SHARED_BYTES(head_scan_forward, sizeof(Shared));
