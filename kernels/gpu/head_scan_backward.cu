// The gradients of the scan of heads, in the chunks of head_scan.h. A walk forwards forms the states again and leaves dz and each
// head's part of dC; one backwards carries G, the gradient of the state behind a chunk, and leaves dx, the raw step sizes' gradients
// and each head's part of dB. scan_sums.cu adds the parts.
//
// With dy = dout silu(z), u, S, E, L and h of head_scan.h, and sums over i >= j of the chunk:
//
//   dC_i = E_i (h . dy_i) + sum over j <= i of S_ij (dy_i . u_j) B_j
//   dB_j = S_Lj (G . u_j) + sum of S_ij (dy_i . u_j) C_i
//   du_j = S_Lj (G . B_j) + sum of S_ij (C_i . B_j) dy_i;   dx_j = delta_j du_j + D dy_j
//   G'   = E_L G + sum over i of E_i dy_i C_i
//   ddelta_t = A q_t + x_t . du_t;   dA = sum over t of delta_t q_t
//
// q_t, the gradient by the logarithm of a decay, sums all that passes from a position before t to t or to one behind it:
//
//   q_t = sum over j < t <= i of S_ij (C_i . B_j)(dy_i . u_j) + sum over i >= t of E_i dy_i . (C_i . h)
//         + sum over j < t of S_Lj u_j . (G . B_j) + E_L (G . h)
//
// The last needs states that the second walk does not have. But G . h' is E_L (G . h) and the sum before it over all of the chunk, so
// it is what is left of G . h', which the chunk behind knows. That loses digits only where E_L is small, and then it is small beside
// the others; below NEGLIGIBLE it is nothing. So that errors do not add up over a long document, the first walk saves states in places,
// and there G . h' is formed anew.
#include "head_scan.h"

namespace {

constexpr float NEGLIGIBLE = 9.313225746154785e-10f;  // 2^-30

struct Shared {
    float b[LENGTH][STATE_ROW], c[LENGTH][STATE_ROW];
    float state[CHANNELS][STATE_ROW];  // h, or G
    float x[LENGTH][CHANNEL_ROW], dy[LENGTH][CHANNEL_ROW];
    float weights[LENGTH][PAIR_ROW];  // S, then [i, j] S_ij (dy_i . u_j), or [j, i] of the same
    float mixes[LENGTH][PAIR_ROW];    // [i, j] S_ij (C_i . B_j) delta_j, or [j, i] S_ij (C_i . B_j)
    Steps steps;
    float halves[2][2][LENGTH];        // sums of a row over either half of the channels
    float pairs[HEAD_THREADS / 32][LENGTH]; // the first sum of q, of some rows i each
    float rows[2][LENGTH];             // S_Lj u_j . (G . B_j), and `passed`
    float partial[HEAD_THREADS / WARP];
};

DEVICE void put_dy(ChannelRows* dy, const HeadScanBackwardArguments& arguments, const Head& my, const Chunk& chunk) {
    const HeadScanInputs& in = arguments.in;
    for_each_four<LENGTH, CHANNELS, HEAD_THREADS>([&](u32 i, u32 column) {
        const u32 row = chunk.row + i, columns = i < chunk.count ? my.channels : 0;
        const float* const dout = arguments.dout + (row * arguments.dout_stride + my.channel);
        const float4 gradient = four_of(dout, column, columns, in.wide != 0);
        const float4 z = four_of(place(in.z, row, my.channel), column, columns, in.wide != 0);
        store4(&dy[i][column], make_float4(gradient.x * silu(z.x), gradient.y * silu(z.y), gradient.z * silu(z.z),
                                           gradient.w * silu(z.w)));
    });
}

// A head's part of dC or of dB at the thread's rows and states: what was there of the channels before, and these.
DEVICE void put_share(const HeadScanBackwardArguments& arguments, const Head& my, const Chunk& chunk, const SharePart& at,
                      u32 part, const float (&share)[SHARE_ROWS][4]) {
#pragma unroll
    for (u32 r = 0; r < SHARE_ROWS; r++) {
        const u32 i = at.row + r * SHARE_STEP;
        if (i >= chunk.count) continue;
        const u64 row = static_cast<u64>(chunk.row + i) * arguments.in.heads + my.head;
        float* const to = arguments.shares + row * STATES + at.state;
        float before[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (part > 0) unpack(before, load4(to));
        store4(to, make_float4(before[0] + share[r][0], before[1] + share[r][1], before[2] + share[r][2],
                               before[3] + share[r][3]));
    }
}

// Leaves the sum of a row over the eight lanes that have its channels of a half.
DEVICE void put_half(float (&halves)[2][LENGTH], const YPart& at, u32 row, float sum) {
#pragma unroll
    for (u32 mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
    if (threadIdx.x % 8 == 0) halves[at.half][row] = sum;
}

// Row `row` of what put_half left.
DEVICE float of_halves(const float (&halves)[2][LENGTH], u32 row) { return halves[0][row] + halves[1][row]; }

DEVICE void chunk_forward(const HeadScanBackwardArguments& arguments, Shared& shared, const Head& my, const Chunk& chunk,
                          u32 part, float (&state)[STATE_CHANNELS][4]) {
    const HeadScanInputs& in = arguments.in;
    const u32 channels = in_lanes(my.channels);
    const StatePart of_state = state_part();
    const SharePart of_share = share_part();
    const PairPart pair = pair_part();
    const YPart at = y_part();
    __syncthreads();  // all have done with the chunk before
    put_state(shared.state, state, of_state);
    put_inputs(shared.b, shared.c, shared.x, in, my, chunk);
    put_dy(shared.dy, arguments, my, chunk);
    put_steps(shared.steps, in, my, chunk);
    __syncthreads();  // the chunk is there
    put_decays(shared.weights, shared.steps);
    float cb[1][PAIRS], dyx[1][PAIRS], y[Y_ROWS][Y_COLUMNS];
    set_zero(cb);
    set_zero(dyx);
    set_zero(y);
    add_dots<STATES, 1, PAIR_LANES>(cb, shared.c + pair.row, shared.b + pair.column);
    add_dots<CHANNELS, 1, PAIR_LANES>(dyx, shared.dy + pair.row, shared.x + pair.column);
    add_dots<STATES, 16, 16>(y, shared.c + at.row, shared.state + at.channel);
    __syncthreads();  // decays are there
#pragma unroll
    for (u32 c = 0; c < PAIRS; c++) {
        const u32 j = pair.column + c * PAIR_LANES;
        const float weight = shared.weights[pair.row][j] * shared.steps.delta[j];
        shared.mixes[pair.row][j] = weight * cb[0][c];
        shared.weights[pair.row][j] = weight * dyx[0][c];
    }
#pragma unroll
    for (u32 r = 0; r < Y_ROWS; r++) {
        const u32 i = at.row + r * 16;
        float passed = 0.0f;
#pragma unroll
        for (u32 c = 0; c < Y_COLUMNS; c++) {
            y[r][c] *= shared.steps.from_start[i];
            passed = fmaf(shared.dy[i][at.channel + c * 16], y[r][c], passed);
        }
        put_half(shared.halves[0], at, i, passed);
    }
    __syncthreads();  // weights and sums are there
    if (threadIdx.x < chunk.count) {
        const u64 own = static_cast<u64>(chunk.row + threadIdx.x) * in.heads + my.head;
        arguments.passed[own * parts_of(in) + part] = of_halves(shared.halves[0], threadIdx.x);
    }
    add_mix<Triangle::LOWER, 16, 16>(y, shared.mixes + at.row, &shared.x[0][at.channel]);
    const float skip = in.d[my.head];
#pragma unroll
    for (u32 r = 0; r < Y_ROWS; r++) {
        const u32 i = at.row + r * 16, row = chunk.row + i;
#pragma unroll
        for (u32 c = 0; c < Y_COLUMNS; c++) {
            const u32 channel = at.channel + c * 16;
            if (i >= chunk.count || channel >= channels) continue;
            const float z = widen(*place(in.z, row, my.channel + channel));
            const float dout = arguments.dout[row * arguments.dout_stride + my.channel + channel];
            const float whole = fmaf(skip, shared.x[i][channel], y[r][c]);
            *place(arguments.dz, row, my.channel + channel) = rounded(dout * whole * silu_derivative(z));
        }
    }
    float share[SHARE_ROWS][4];
    set_zero(share);
    add_rows<Triangle::WHOLE, CHANNELS>(share, shared.dy + of_share.read, &shared.state[0][of_share.state]);
#pragma unroll
    for (u32 r = 0; r < SHARE_ROWS; r++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) share[r][j] *= shared.steps.from_start[of_share.read + r * SHARE_STEP];
    }
    add_rows<Triangle::LOWER, LENGTH>(share, shared.weights + of_share.read, &shared.b[0][of_share.state]);
    put_share(arguments, my, chunk, of_share, part, share);
    take_state(state, shared.state, of_state);
    move_on(state, shared.steps.from_start[LENGTH - 1], shared.steps.into_end, &shared.x[0][of_state.channel],
            &shared.b[0][of_state.state]);
}

// What the walk backwards of a head's channels carries from chunk to chunk, beside G.
struct Carried {
    float state_gradient;         // G . h, behind the chunk
    float da, dd, ddelta_bias;    // a thread's sums
};

// The lanes' sums over those before them, of lanes of the same row, and their total.
DEVICE float before_in_row(float x, float& total) {
    const u32 lane = in_lanes(threadIdx.x % WARP), within = lane % PAIR_LANES;
#pragma unroll
    for (u32 step = 1; step < PAIR_LANES; step *= 2) {
        const float other = shuffle(x, (lane - step) % WARP);
        if (within >= step) x += other;
    }
    total = shuffle(x, lane | (PAIR_LANES - 1));
    const float before = shuffle(x, (lane - 1) % WARP);
    return within == 0 ? 0.0f : before;
}

// The first sum of q, of the team's rows: over j < t of each row i >= t.
DEVICE void put_pairs(Shared& shared, const PairPart& pair, const float (&products)[PAIRS]) {
    float before = 0.0f;
#pragma unroll
    for (u32 c = 0; c < PAIRS; c++) {
        const u32 t = pair.column + c * PAIR_LANES;
        float total;
        const float within = before_in_row(products[c], total);
        float sum = t <= pair.row ? before + within : 0.0f;
        before += total;
#pragma unroll
        for (u32 mask = PAIR_LANES; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
        if (threadIdx.x % 32 < PAIR_LANES) shared.pairs[threadIdx.x / 32][t] = sum;
    }
}

// q of the thread's position, from what `shared` has of all; carries what is behind the chunk on to what is before it.
DEVICE float gradient_of_decay(const Shared& shared, Carried& carried) {
    const u32 t = threadIdx.x;
    float within = 0.0f;
#pragma unroll
    for (u32 team = 0; team < HEAD_THREADS / 32; team++) within += shared.pairs[team][t];
    float from_all = 0.0f, from_before = 0.0f, to_all = 0.0f, to_behind = 0.0f;
#pragma unroll 4
    for (u32 j = 0; j < LENGTH; j++) {
        from_all += shared.rows[0][j];
        if (j < t) from_before += shared.rows[0][j];
    }
#pragma unroll 4
    for (u32 i = LENGTH; i-- > 0;) {
        to_all += shared.rows[1][i];
        if (i >= t) to_behind += shared.rows[1][i];
    }
    const bool reaches_through = shared.steps.from_start[LENGTH - 1] > NEGLIGIBLE;
    const float through = reaches_through ? carried.state_gradient - from_all : 0.0f;
    carried.state_gradient = through + to_all;
    return within + to_behind + (from_before + through);
}

DEVICE void chunk_backward(const HeadScanBackwardArguments& arguments, Shared& shared, const Head& my, const Chunk& chunk,
                           u32 part, float (&gradient)[STATE_CHANNELS][4], Carried& carried) {
    const HeadScanInputs& in = arguments.in;
    const u32 thread = in_lanes(threadIdx.x), channels = in_lanes(my.channels);
    const StatePart of_state = state_part();
    const SharePart of_share = share_part();
    const PairPart pair = pair_part();
    const YPart at = y_part();
    const u64 own = static_cast<u64>(chunk.row + thread) * in.heads + my.head;
    __syncthreads();  // all have done with the chunk behind
    put_state(shared.state, gradient, of_state);
    put_inputs(shared.b, shared.c, shared.x, in, my, chunk);
    put_dy(shared.dy, arguments, my, chunk);
    const OwnStep step = put_steps(shared.steps, in, my, chunk);
    __syncthreads();  // the chunk is there
    put_decays(shared.weights, shared.steps);
    float cb[1][PAIRS], dyx[1][PAIRS], du[Y_ROWS][Y_COLUMNS];
    set_zero(cb);
    set_zero(dyx);
    set_zero(du);
    add_dots<STATES, 1, PAIR_LANES>(cb, shared.c + pair.row, shared.b + pair.column);
    add_dots<CHANNELS, 1, PAIR_LANES>(dyx, shared.dy + pair.row, shared.x + pair.column);
    add_dots<STATES, 16, 16>(du, shared.b + at.row, shared.state + at.channel);
    __syncthreads();  // decays are there
    float products[PAIRS], weights[PAIRS];
#pragma unroll
    for (u32 c = 0; c < PAIRS; c++) {
        const u32 j = pair.column + c * PAIR_LANES;
        const float mix = shared.weights[pair.row][j] * cb[0][c];
        weights[c] = shared.weights[pair.row][j] * (shared.steps.delta[j] * dyx[0][c]);
        products[c] = weights[c] * cb[0][c];
        shared.mixes[j][pair.row] = mix;
    }
    put_pairs(shared, pair, products);
#pragma unroll
    for (u32 r = 0; r < Y_ROWS; r++) {
        const u32 j = at.row + r * 16;
        float sum = 0.0f;
#pragma unroll
        for (u32 c = 0; c < Y_COLUMNS; c++) {
            const float x = shared.x[j][at.channel + c * 16];
            du[r][c] *= shared.steps.to_end[j];
            sum = fmaf(x, du[r][c], sum);
            carried.dd = fmaf(x, shared.dy[j][at.channel + c * 16], carried.dd);
        }
        put_half(shared.halves[0], at, j, shared.steps.delta[j] * sum);
    }
    __syncthreads();  // all have read the decays
#pragma unroll
    for (u32 c = 0; c < PAIRS; c++) shared.weights[pair.column + c * PAIR_LANES][pair.row] = weights[c];
    add_mix<Triangle::UPPER, 16, 16>(du, shared.mixes + at.row, &shared.dy[0][at.channel]);
    const float skip = in.d[my.head];
#pragma unroll
    for (u32 r = 0; r < Y_ROWS; r++) {
        const u32 j = at.row + r * 16, row = chunk.row + j;
        float sum = 0.0f;
#pragma unroll
        for (u32 c = 0; c < Y_COLUMNS; c++) {
            const u32 channel = at.channel + c * 16;
            sum = fmaf(shared.x[j][channel], du[r][c], sum);
            if (j >= chunk.count || channel >= channels) continue;
            const float dx = fmaf(shared.steps.delta[j], du[r][c], skip * shared.dy[j][channel]);
            *place(arguments.dx, row, my.channel + channel) = rounded(dx);
        }
        put_half(shared.halves[1], at, j, sum);
    }
    if (thread < LENGTH) {
        shared.rows[0][thread] = of_halves(shared.halves[0], thread);
        shared.rows[1][thread] = thread < chunk.count ? arguments.passed[own * parts_of(in) + part] : 0.0f;
    }
    __syncthreads();  // weights and sums are there
    float share[SHARE_ROWS][4];
    set_zero(share);
    add_rows<Triangle::WHOLE, CHANNELS>(share, shared.x + of_share.read, &shared.state[0][of_share.state]);
#pragma unroll
    for (u32 r = 0; r < SHARE_ROWS; r++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) share[r][j] *= shared.steps.into_end[of_share.read + r * SHARE_STEP];
    }
    add_rows<Triangle::UPPER, LENGTH>(share, shared.weights + of_share.read, &shared.c[0][of_share.state]);
    put_share(arguments, my, chunk, of_share, part, share);
    take_state(gradient, shared.state, of_state);
    move_on(gradient, shared.steps.from_start[LENGTH - 1], shared.steps.from_start, &shared.dy[0][of_state.channel],
            &shared.c[0][of_state.state]);
    if (thread >= LENGTH) return;
    const float q = gradient_of_decay(shared, carried);
    if (thread >= chunk.count) return;
    float ddelta = fmaf(my.rate * LN_2, q, of_halves(shared.halves[1], thread));
    carried.da = fmaf(step.delta, q, carried.da);
    carried.ddelta_bias = fmaf(ddelta, step.slope, carried.ddelta_bias);
    if (part > 0) ddelta += arguments.totals[own];
    if (part + 1 < in_lanes(parts_of(in))) {
        arguments.totals[own] = ddelta;
    } else {
        *place(arguments.ddelta_raw, chunk.row + thread, my.head) = rounded(ddelta * step.slope);
    }
}

// Whether the states are saved where a chunk begins at `position` of a document that began at `document`. At its beginning they are
// zero. Such positions are at least SAVED_POSITIONS apart, those of neighbouring documents too.
DEVICE bool is_saved(u32 document, u32 position) {
    return position != document && (position - document) % SAVED_POSITIONS == 0;
}
// Those that a thread holds.
DEVICE float* saved_place(const HeadScanBackwardArguments& arguments, u32 part, u32 position) {
    const u64 walk = static_cast<u64>(in_lanes(blockIdx.x)) * parts_of(arguments.in) + part;
    const u64 place = walk * (arguments.in.positions / SAVED_POSITIONS) + (position / SAVED_POSITIONS - 1);
    return arguments.saved + (place * (CHANNELS * STATES) + threadIdx.x * 4);
}
DEVICE void save_state(float* to, const float (&state)[STATE_CHANNELS][4]) {
#pragma unroll
    for (u32 r = 0; r < STATE_CHANNELS; r++) {
        store4(to + r * (HEAD_THREADS * 4), make_float4(state[r][0], state[r][1], state[r][2], state[r][3]));
    }
}
// G . h, of all threads.
DEVICE float dot_with_saved(const float* from, const float (&gradient)[STATE_CHANNELS][4], float* partial) {
    float sum = 0.0f;
#pragma unroll
    for (u32 r = 0; r < STATE_CHANNELS; r++) {
        float h[4];
        unpack(h, load4(from + r * (HEAD_THREADS * 4)));
#pragma unroll
        for (u32 j = 0; j < 4; j++) sum = fmaf(gradient[r][j], h[j], sum);
    }
    return block_sum<HEAD_THREADS>(sum, partial);
}

}  // namespace

// A block for a head of a sample: all of its channels.
KERNEL(head_scan_backward_states, 256, 2, HeadScanBackwardArguments) {
    SHARED(Shared, shared);
    const HeadScanInputs& in = arguments.in;
    for (u32 part = 0; part < parts_of(in); part++) {
        const Head my = head_of(in, blockIdx.x, part);
        const Documents documents(in, my.sample);
        float state[STATE_CHANNELS][4];
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

// The same, behind it.
KERNEL(head_scan_backward_gradients, 256, 2, HeadScanBackwardArguments) {
    SHARED(Shared, shared);
    const HeadScanInputs& in = arguments.in;
    Carried carried = {};
    for (u32 part = 0; part < parts_of(in); part++) {
        const Head my = head_of(in, blockIdx.x, part);
        const Documents documents(in, my.sample);
        float gradient[STATE_CHANNELS][4];
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
    __syncthreads();  // all have done with the first chunk
    const float da = block_sum<HEAD_THREADS>(carried.da, shared->partial);
    const float dd = block_sum<HEAD_THREADS>(carried.dd, shared->partial);
    const float ddelta_bias = block_sum<HEAD_THREADS>(carried.ddelta_bias, shared->partial);
    if (threadIdx.x > 0) return;
    const Head my = head_of(in, blockIdx.x, 0);
    float* const to = arguments.parameters + (static_cast<u64>(my.sample) * 3 * in.heads + my.head);
    to[0] = da * (my.rate * LN_2);
    to[in.heads] = dd;
    to[2 * in.heads] = ddelta_bias;
}
SHARED_BYTES(head_scan_backward_gradients, sizeof(Shared));
