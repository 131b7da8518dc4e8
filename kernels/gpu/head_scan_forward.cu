// The forward scan of heads over whole sequences, in chunks (head_scan.h).
//
// A block has up to 64 channels of a head of a sample, whose states it holds in registers, and walks the chunks of the sample. B and C
// of a chunk are read by every head of a group: from the cache that all multiprocessors share.
//
// Floor, per state and position: 2 operations, and for pairs of positions within a chunk about 0.75 at 64 channels and 128 states.
#include "head_scan.h"

namespace {

struct Shared {
    float b[LENGTH][STATE_ROW], c[LENGTH][STATE_ROW];
    float h[CHANNELS][STATE_ROW];
    float x[LENGTH][CHANNEL_ROW];
    float weights[LENGTH][PAIR_ROW];  // S, then S_ij (C_i . B_j) delta_j
    Steps steps;
};

DEVICE void chunk_forward(const HeadScanForwardArguments& arguments, Shared& shared, const Head& my, const Chunk& chunk,
                          float (&state)[STATE_CHANNELS][4]) {
    const HeadScanInputs& in = arguments.in;
    const StatePart of_state = state_part();
    const PairPart pair = pair_part();
    const YPart at = y_part();
    __syncthreads();  // all have done with the chunk before
    put_state(shared.h, state, of_state);
    put_inputs(shared.b, shared.c, shared.x, in, my, chunk);
    put_steps(shared.steps, in, my, chunk);
    __syncthreads();  // the chunk is there
    put_decays(shared.weights, shared.steps);
    float cb[1][PAIRS], y[Y_ROWS][Y_COLUMNS];
    set_zero(cb);
    set_zero(y);
    add_dots<STATES, 1, PAIR_LANES>(cb, shared.c + pair.row, shared.b + pair.column);
    add_dots<STATES, 16, 16>(y, shared.c + at.row, shared.h + at.channel);
    __syncthreads();  // decays are there
#pragma unroll
    for (u32 c = 0; c < PAIRS; c++) {
        const u32 j = pair.column + c * PAIR_LANES;
        shared.weights[pair.row][j] *= cb[0][c] * shared.steps.delta[j];
    }
#pragma unroll
    for (u32 r = 0; r < Y_ROWS; r++) {
        const float from_start = shared.steps.from_start[at.row + r * 16];
#pragma unroll
        for (u32 c = 0; c < Y_COLUMNS; c++) y[r][c] *= from_start;
    }
    __syncthreads();  // weights are there
    add_mix<Triangle::LOWER, 16, 16>(y, shared.weights + at.row, &shared.x[0][at.channel]);
    const float skip = in.d[my.head];
#pragma unroll
    for (u32 r = 0; r < Y_ROWS; r++) {
        const u32 i = at.row + r * 16, row = chunk.row + i;
#pragma unroll
        for (u32 c = 0; c < Y_COLUMNS; c++) {
            const u32 channel = at.channel + c * 16;
            if (i >= chunk.count || channel >= my.channels) continue;
            const float z = widen(*place(in.z, row, my.channel + channel));
            const float whole = fmaf(skip, shared.x[i][channel], y[r][c]);
            arguments.out[row * arguments.out_stride + my.channel + channel] = gated(whole, z, sigmoid(z));
        }
    }
    take_state(state, shared.h, of_state);
    move_on(state, shared.steps.from_start[LENGTH - 1], shared.steps.into_end, &shared.x[0][of_state.channel],
            &shared.b[0][of_state.state]);
}

}  // namespace

// A block for some channels of a head of a sample.
KERNEL(head_scan_forward, 256, 2, HeadScanForwardArguments) {
    SHARED(Shared, shared);
    const HeadScanInputs& in = arguments.in;
    const u32 parts = parts_of(in);
    const Head my = head_of(in, blockIdx.x / parts, blockIdx.x % parts);
    const Documents documents(in, my.sample);
    float state[STATE_CHANNELS][4];
    for (u32 first = 0; first < in.positions;) {
        const u32 end = documents.end_of_chunk(first);
        if (documents.begins(first)) set_zero(state);
        chunk_forward(arguments, *shared, my, chunk_of(in, my, first, end), state);
        first = end;
    }
}
SHARED_BYTES(head_scan_forward, sizeof(Shared));
