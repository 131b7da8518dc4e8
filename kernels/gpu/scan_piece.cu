// The selective scan of pieces of sequences for generation, of channels with sixteen states in blocks of 32 channels:
// several positions of each sequence, walked as in training (scan_walk.h). scan_step.cu has the case of one position.
// Sums over states have the same order in both, so the cut of a sequence into pieces changes no bit.
//
// A block walks 32 channels of a sample from its state over all positions of the piece. B and C of the next tile wait
// in registers, each in the thread that widens it, so that no other kernel has to run before.
//
// Floor: that of scan_forward.cu. At batch 1 the latency of one position after the other bounds a piece.
#include "scan_walk.h"

namespace {

// A thread's B and C of one row of a tile, as it packs them: (B B C C) of two neighbouring states.
struct Coefficients {
    activation held[COLUMNS];
};
DEVICE void hold(Coefficients& coefficients, const activation* row, u32 part) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
        const u32 is_c = i / 2 % 2, state = part * (COLUMNS / 2) + i / 4 * 2 + i % 2;
        coefficients.held[i] = row[is_c * 16 + state];
    }
}
DEVICE void put(float* to, const Coefficients& coefficients) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i += 4) {
        const activation* const held = coefficients.held + i;
        store4(to + i, make_float4(widen(held[0]), widen(held[1]), widen(held[2]), widen(held[3])));
    }
}

template <bool ALIGNED>
DEVICE void walk_piece(const ScanPieceArguments& arguments) {
    SHARED(ForwardShared, memory);
    ForwardShared& shared = *memory;
    const u32 thread = threadIdx.x, positions = arguments.positions, channels = arguments.channels;
    const u32 blocks = channels / BLOCK_CHANNELS;
    const u32 sample = blockIdx.x / blocks, first_channel = blockIdx.x % blocks * BLOCK_CHANNELS;
    const u32 end = positions_of(arguments, sample);
    const Walker walk_role = walker();
    const u32 part = thread % ROW_THREADS, row = thread / ROW_THREADS, column = part * COLUMNS;
    const u32 channel = first_channel + column, first_row = sample * positions + row;

    const u64 walked = first_channel + walk_role.channel;
    float* const state = arguments.state + (sample * static_cast<u64>(channels) + walked) * 16 + walk_role.quad * 4;
    const bool wide = arguments.wide != 0;
    float rate[4], h[4];
    take4(h, state, wide);
    take4(rate, arguments.a_log + walked * 16 + walk_role.quad * 4, wide);
#pragma unroll
    for (u32 j = 0; j < 4; j++) rate[j] = rate_of(rate[j]);
    if (thread < BLOCK_CHANNELS) {
        shared.skip[thread] = arguments.d[first_channel + thread];
        shared.bias[thread] = arguments.delta_bias[first_channel + thread];
    }

    // The addresses at which this thread reads its part of the next tile, and writes that of this one.
    const activation* x = place(arguments.x, first_row, channel);
    const activation* delta_raw = place(arguments.delta_raw, first_row, channel);
    const activation* z = place(arguments.z, first_row, channel);
    const activation* bc = place(arguments.bc, first_row, 0);
    activation* out = place(arguments.out, first_row, channel);
    Tiles tiles = {};
    Coefficients coefficients = {};
    auto fetch = [&](u32 buffer, u32 first) {
        // Past the end the buffer holds old data, which no step reads.
        if (first + row < end) {
            hold_next<ALIGNED>(tiles, shared, X, buffer, row, column, x);
            hold_next<ALIGNED>(tiles, shared, DELTA, buffer, row, column, delta_raw);
            hold_next<ALIGNED>(tiles, shared, Z, buffer, row, column, z);
            hold(coefficients, bc, part);
        }
        if (!WAITS_IN_REGISTERS) copy_async_commit();
        x += TILE * arguments.x.stride;
        delta_raw += TILE * arguments.delta_raw.stride;
        z += TILE * arguments.z.stride;
        bc += TILE * arguments.bc.stride;
    };
    // The next tile becomes the tile to be walked: no thread is walking now.
    auto take_next = [&](u32 buffer) {
        prepare(shared, tiles, buffer, row, column);
        put(&shared.bc[0][row][part * COLUMNS], coefficients);
        advance(tiles);
    };

    fetch(0, 0);
    __syncthreads();  // skip and bias are loaded
    copy_async_wait<0>();
    take_next(0);
    for (u32 first = 0, buffer = 0; first < end; first += TILE, buffer ^= 1) {
        __syncthreads();  // all parts of the tile are loaded
        if (first + TILE < end) fetch(buffer ^ 1, first + TILE);
        if (first + TILE <= end) {
            walk(h, shared, [](u32) {}, rate, walk_role, 0, 0);
        } else {
            walk_some(h, shared, rate, walk_role, 0, end - first);
        }
        __syncthreads();  // all threads have walked
        copy_async_wait<0>();
        float y[COLUMNS], gated_y[COLUMNS];
        finish(y, gated_y, shared, tiles, buffer, row, column);
        // After the last tile this prepares old data, which is not walked.
        take_next(buffer ^ 1);
        if (first + row < end) put_columns<ALIGNED>(out, gated_y);
        out += TILE * arguments.out.stride;
    }
    put4(state, h, wide);
}

}  // namespace

KERNEL(scan_piece, 128, 3, ScanPieceArguments) { walk_piece<true>(arguments); }
// Views whose rows or columns are not aligned: the same bits.
KERNEL(scan_piece_unaligned, 128, 3, ScanPieceArguments) { walk_piece<false>(arguments); }
SHARED_BYTES(scan_piece, sizeof(ForwardShared));
SHARED_BYTES(scan_piece_unaligned, sizeof(ForwardShared));
