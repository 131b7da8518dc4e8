// The backward selective scan of channels with sixteen states, in blocks of 32 channels.
//
// A block walks a segment (scan.h) of 32 channels of a sample, last tile first, and continues from the values that the
// segment before left. A lane holds 2 states of 2 neighbouring channels. A tile is 16 positions, in two pieces of 8: from
// the saved states a forward walk reaches the piece; the piece's decays and states are computed and stay in registers,
// and the backward walk uses them. With g the gradient of a state, a its decay,
// q = a g h_before:
//
//   g = C dy + a_next g_next      dC = dy h    dB = g delta x       (summed over channels)
//   dx = D dy + delta (g . B)     ddelta = x (g . B) + q . A        (summed over states)
//   dA = sum over t of delta q
//
// Sums over channels: the lane's two, then a reduce-scatter over the lanes of a warp, then warps through
// shared memory, then one partial sum a block in device memory, which scan_sum_dbc adds in order. Sums over
// states: the lane's two, then two neighbouring lanes', then through shared memory to the thread that finishes 4 channels
// of one position.
//
// AMD has waves of 64. Its compute units have 64 KiB of shared memory, and copies into it hold up the thread that makes
// them. There the next tile waits in registers, and sums over states go over the lanes of a warp alone, by the same tree,
// so that three blocks fit instead of one.
//
// Floor, per state and position: 1 + 3/16 exponentials and the like, 12 operations, and 3 for the sums over channels
// (about 27 issued). At (2, 4096, 5376) on an H200: 0.6 ms of issue, 0.55 ms of shared memory, 0.23 ms of bytes. Measured:
// 0.86 ms, and 0.05 ms around it.
#include "scan_backward.h"

namespace {

// Walks back over the piece of a tile that begins at `first`, with the tile's saved states given. `start_bits`: of
// documents in the tile.
DEVICE void walk_back(Carried& carried, BackwardShared& shared, const Walker& walker, const float* states,
                      u32 buffer, u32 first, u32 start_bits) {
    const float* steps = shared.steps + steps_at(0, walker.channel);
    const float* bc = &shared.bc[buffer][0][walker.group * 4];
    const float* dy = &shared.dy[0][walker.channel];
    float saved[4];
#if WARP == 64
#pragma unroll
    for (u32 j = 0; j < 4; j++) saved[j] = states[j];
#else
    unpack(saved, load4(states));
#endif
#pragma unroll 1
    for (u32 start = 0; start < first; start += PIECE) {
#pragma unroll
        for (u32 i = 0; i < PIECE; i++) {
            float decay[4];
            step(saved, decay, saved, carried.rate, steps, bc, start + i,
                 start_bits);
        }
    }
    float decay[PIECE][4], h[PIECE][4];
#pragma unroll
    for (u32 i = 0; i < PIECE; i++) {
        step(h[i], decay[i], i == 0 ? saved : h[i == 0 ? 0 : i - 1], carried.rate, steps, bc,
             first + i, start_bits);
    }
#pragma unroll
    for (u32 group = PIECE / GROUP; group-- > 0;) {
        float db[GROUP * 2], dc[GROUP * 2];
        float4 sums[GROUP];
#pragma unroll
        for (u32 k = GROUP; k-- > 0;) {
            const u32 i = group * GROUP + k;
            const float4 d = load4(steps + (first + i) * STEPS_ROW);
            const float4 coefficients = load4(bc + (first + i) * 32);
            const float2 dy_i =
                *reinterpret_cast<const float2*>(dy + (first + i) * BLOCK_CHANNELS);
            float g[4], q[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const float c = of_state(j, coefficients.z, coefficients.w);
                g[j] = fmaf(of_channel(j, dy_i.x, dy_i.y), c, carried.future[j]);
                carried.future[j] = decay[i][j] * g[j];
                const float before = i == 0 ? saved[j] : h[i == 0 ? 0 : i - 1][j];
                q[j] = unless_begins(start_bits, first + i, carried.future[j] * before);
                carried.future[j] = unless_begins(start_bits, first + i, carried.future[j]);
                carried.da[j] = fmaf(of_channel(j, d.x, d.y), q[j], carried.da[j]);
            }
            const float* rate = carried.rate;
            sums[k] = make_float4(fmaf(rate[1], q[1], rate[0] * q[0]),
                                  fmaf(g[1], coefficients.y, g[0] * coefficients.x),
                                  fmaf(rate[3], q[3], rate[2] * q[2]),
                                  fmaf(g[3], coefficients.y, g[2] * coefficients.x));
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                db[k * 2 + j] = fmaf(d.w, g[j + 2], d.z * g[j]);
                dc[k * 2 + j] = fmaf(dy_i.y, h[i][j + 2], dy_i.x * h[i][j]);
            }
        }
        ReduceScatter<GROUP * 2, PAIRS / 2>::run(db, walker.pair);
        ReduceScatter<GROUP * 2, PAIRS / 2>::run(dc, walker.pair);
        // Stored last: a store would keep later loads from being moved before it.
        store_sums(shared, walker, first + group * GROUP, sums);
        constexpr u32 KEPT = GROUP * 2 / PAIRS;
        const u32 kept = walker.pair * KEPT;
        float* out = shared.dbc[walker.warp] + (first + group * GROUP + kept / 2) * DBC_ROW +
                     walker.group * 4 + kept % 2;
        if (KEPT == 2) {
            store4(out, make_float4(db[0], db[1], dc[0], dc[1]));
        } else {
            out[0] = db[0];
            out[2] = dc[0];
        }
    }
}

// Sums over a thread's positions.
struct ChannelSums {
    float dd[COLUMNS], ddelta_bias[COLUMNS];
};

// The values that a thread computes for its 4 channels at one position before the walk: the slope of delta, for
// afterwards, and the terms that do not depend on the walk.
struct Prepared {
    float slope[COLUMNS], dz[COLUMNS], regated[COLUMNS];
};

// The place of a thread's part of a tile.
#if WARP == 64
typedef HeldColumns<COLUMNS> RawColumns;
#else
typedef activation RawColumns;
#endif
struct Raw {
    const RawColumns *x, *delta, *dout, *z, *y;
};

// Writes (delta, delta x) and dy of `row` of a tile to shared memory.
DEVICE void prepare(Prepared& out, BackwardShared& shared, const Raw& raw, u32 row, u32 column) {
    float x[COLUMNS], delta[COLUMNS], dout[COLUMNS], z[COLUMNS], y[COLUMNS];
    float bias[COLUMNS], dy[COLUMNS];
    take_columns(x, raw.x);
    take_columns(delta, raw.delta);
    take_columns(dout, raw.dout);
    take_columns(z, raw.z);
    take_columns(y, raw.y);
    unpack(bias, load4(shared.bias + column));
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
        delta[i] = softplus(delta[i] + bias[i], out.slope[i]);
        const float s = sigmoid(z[i]);
        dy[i] = dout[i] * (z[i] * s);
        out.dz[i] = dout[i] * y[i] * s * fmaf(z[i], 1.0f - s, 1.0f);
        out.regated[i] = gated(y[i], z[i], s);
    }
    float* steps = shared.steps + steps_at(row, column);
    store4(steps, make_float4(delta[0], delta[1], delta[0] * x[0], delta[1] * x[1]));
    store4(steps + 4, make_float4(delta[2], delta[3], delta[2] * x[2], delta[3] * x[3]));
    store4(&shared.dy[row][column], make_float4(dy[0], dy[1], dy[2], dy[3]));
}

// dx and ddelta_raw of a thread's 4 channels at one position.
struct Finished {
    float dx[COLUMNS], ddelta_raw[COLUMNS];
};

DEVICE void finish(Finished& out, ChannelSums& channels, const BackwardShared& shared,
                   const float (&slope)[COLUMNS], const RawColumns* raw_x, u32 row, u32 column) {
    float x[COLUMNS], dy[COLUMNS], skip[COLUMNS];
    take_columns(x, raw_x);
    unpack(dy, load4(&shared.dy[row][column]));
    unpack(skip, load4(shared.skip + column));
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i += 2) {
        const float2 both_delta =
            *reinterpret_cast<const float2*>(shared.steps + steps_at(row, column + i));
        const float delta[2] = {both_delta.x, both_delta.y};
        const float4 both = take_sums(shared, row, column + i);
        const float qa[2] = {both.x, both.z}, gb[2] = {both.y, both.w};
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const u32 at = i + k;
            out.dx[at] = fmaf(delta[k], gb[k], skip[at] * dy[at]);
            out.ddelta_raw[at] = fmaf(x[at], gb[k], LN_2 * qa[k]) * slope[at];
            channels.dd[at] = fmaf(dy[at], x[at], channels.dd[at]);
            channels.ddelta_bias[at] += out.ddelta_raw[at];
        }
    }
}

// dd and ddelta_bias of the block's channels: the sums of its threads' rows, in order.
DEVICE void sum_channels(float* out, u32 channels, BackwardShared& shared, const ChannelSums& sums,
                         u32 row, u32 column) {
    float* parts = &shared.dbc[0][0];
    constexpr u32 SECOND = TILE * BLOCK_CHANNELS;
    static_assert(sizeof(shared.dbc) >= 2 * SECOND * sizeof(float), "room for the sums");
    __syncthreads();  // all have read the last tile's
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
        parts[row * BLOCK_CHANNELS + column + i] = sums.dd[i];
        parts[SECOND + row * BLOCK_CHANNELS + column + i] = sums.ddelta_bias[i];
    }
    __syncthreads();
    if (threadIdx.x >= BLOCK_CHANNELS) return;
    float dd = 0.0f, ddelta_bias = 0.0f;
    for (u32 i = 0; i < TILE; i++) {
        dd += parts[i * BLOCK_CHANNELS + threadIdx.x];
        ddelta_bias += parts[SECOND + i * BLOCK_CHANNELS + threadIdx.x];
    }
    out[threadIdx.x] = dd;
    out[channels + threadIdx.x] = ddelta_bias;
}

// The values that a chain hands to its next segment: 16 numbers of each thread.
DEVICE float* carried_place(const ScanBackwardArguments& arguments, u32 chain) {
    return arguments.carried + (static_cast<u64>(chain) * 4 * SCAN_THREADS + threadIdx.x) * 4;
}
DEVICE void load_carried(Carried& carried, ChannelSums& sums, const float* from) {
    unpack(carried.future, load4(from));
    unpack(carried.da, load4(from + 4 * SCAN_THREADS));
    unpack(sums.dd, load4(from + 8 * SCAN_THREADS));
    unpack(sums.ddelta_bias, load4(from + 12 * SCAN_THREADS));
}
DEVICE void store_carried(float* to, const Carried& carried, const ChannelSums& sums) {
    const float* parts[4] = {carried.future, carried.da, sums.dd, sums.ddelta_bias};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const float* part = parts[i];
        store4_whole(to + i * 4 * SCAN_THREADS, make_float4(part[0], part[1], part[2], part[3]));
    }
}

// A segment of a chain, last tile first.
template <bool ALIGNED>
DEVICE void walk_work_item(const ScanBackwardArguments& arguments, BackwardShared& shared,
                           const ScanWorkItem& item) {
    const u32 thread = threadIdx.x, positions = arguments.positions, channels = arguments.channels;
    const u32 blocks = channels / BLOCK_CHANNELS, sample = item.chain / blocks;
    const u32 first_channel = item.chain % blocks * BLOCK_CHANNELS;
    const u32 first_row = sample * positions;
    const u32 begin = (arguments.work.segments - 1 - item.segment) * arguments.work.positions;
    const u32 end = min(begin + arguments.work.positions, positions);
    const Walker walk_role = walker();
    const u32 row = thread / 8, column = thread % 8 * COLUMNS, channel = first_channel + column;
    // States of the lane's first channel; those of its second are 16 further on.
    const u64 held = static_cast<u64>(first_channel + walk_role.channel) * 16 + walk_role.group * 2;

    Carried carried;
    ChannelSums sums;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        carried.rate[j] = rate_of(arguments.a_log[held + j / 2 * 16 + j % 2]);
        carried.future[j] = carried.da[j] = 0.0f;
        sums.dd[j] = sums.ddelta_bias[j] = 0.0f;
    }
    if (thread < BLOCK_CHANNELS) {
        shared.skip[thread] = arguments.d[first_channel + thread];
        shared.bias[thread] = arguments.delta_bias[first_channel + thread];
    }
    const u64 state_elements = static_cast<u64>(channels) * 16;
    float* dbc = arguments.dbc + (static_cast<u64>(item.chain) * positions + row) * 32 +
                 thread % 8 * 4;
    const float* bc = arguments.packed_bc + sample * packed_elements(positions) + thread * 4;
    // Pointers are computed again for each tile where that is cheap: the walk needs every register.
    const u32 first_chunk = sample * ((positions + TILE - 1) / TILE);

#if WARP == 64
    // The tile that is walked now, and the next one.
    Incoming walked, incoming;
    auto fetch = [&](u32, u32 first) {
        if (first + row < positions) {
            const u32 from = first_row + first + row;
            hold_columns<ALIGNED>(incoming.x, place(arguments.x, from, channel));
            hold_columns<ALIGNED>(incoming.raw[DELTA], place(arguments.delta_raw, from, channel));
            hold_columns<ALIGNED>(incoming.raw[DOUT], place(arguments.dout, from, channel));
            hold_columns<ALIGNED>(incoming.raw[Z], place(arguments.z, from, channel));
            hold_columns<true>(incoming.raw[Y], arguments.y + (static_cast<u64>(from) * channels + channel));
        } else {
            // With x and dout zero, a position past the end gives zero to every sum and every state.
            incoming = {};
        }
        incoming.start_bits =
            DOCUMENTS ? bits_from(start_bits_of(arguments.start_bits, first_row, positions), first, positions) : 0;
        const float* states =
            arguments.checkpoints + (first_chunk + first / TILE) * state_elements + held;
        const float2 low = *reinterpret_cast<const float2*>(states);
        const float2 high = *reinterpret_cast<const float2*>(states + 16);
        incoming.states[0] = low.x;
        incoming.states[1] = low.y;
        incoming.states[2] = high.x;
        incoming.states[3] = high.y;
        incoming.bc = load4(bc + first * 32);
    };
    // The tile that was fetched becomes the tile to be walked.
    auto take_tile = [&](Prepared& out, u32) {
        const auto& raw = incoming.raw;
        prepare(out, shared, Raw{&incoming.x, &raw[DELTA], &raw[DOUT], &raw[Z], &raw[Y]}, row, column);
        store4(&shared.bc[0][0][0] + thread * 4, incoming.bc);
        walked = incoming;
    };
    auto x_of = [&](u32) -> const RawColumns* { return &walked.x; };
    auto states_of = [&](u32) -> const float(&)[4] { return walked.states; };
    auto start_bits_of_tile = [&](u32) { return walked.start_bits; };
#else
    auto fetch = [&](u32 buffer, u32 first) {
        // A copy of 8 bytes takes as long as one of 16: where four columns are 8 bytes, a thread copies eight columns,
        // and each half of the threads copies its share of the arrays.
        constexpr u32 SHARES = ALIGNED && sizeof(activation) == 2 ? 2 : 1;
        constexpr u32 COPIED = COLUMNS * SHARES, ROW_THREADS = BLOCK_CHANNELS / COPIED;
        constexpr u32 ARRAY = TILE * BLOCK_CHANNELS;
        const u32 to_row = thread / ROW_THREADS % TILE, to_column = thread % ROW_THREADS * COPIED;
        const bool has_first = SHARES == 1 || thread < SCAN_THREADS / 2, has_second = SHARES == 1 || !has_first;
        activation* x = &shared.x[buffer][to_row][to_column];
        activation* raw = &shared.raw[0][to_row][to_column];
        if (first + to_row < positions) {
            const u32 from = first_row + first + to_row, from_channel = first_channel + to_column;
            if (has_first) {
                fetch_columns<COPIED, ALIGNED>(x, place(arguments.x, from, from_channel));
                fetch_columns<COPIED, ALIGNED>(raw + DOUT * ARRAY, place(arguments.dout, from, from_channel));
                fetch_columns<COPIED, true>(raw + Y * ARRAY,
                                            arguments.y + (static_cast<u64>(from) * channels + from_channel));
            }
            if (has_second) {
                fetch_columns<COPIED, ALIGNED>(raw + DELTA * ARRAY, place(arguments.delta_raw, from, from_channel));
                fetch_columns<COPIED, ALIGNED>(raw + Z * ARRAY, place(arguments.z, from, from_channel));
            }
        } else {
            // With x and dout zero, a position past the end gives zero to every sum and every state.
            if (has_first) zero_columns<COPIED>(x);
#pragma unroll
            for (u32 array = 0; array < ARRAYS; array++) {
                const bool is_first = array == DOUT || array == Y;
                if (is_first ? has_first : has_second) zero_columns<COPIED>(raw + array * ARRAY);
            }
        }
        if (DOCUMENTS && thread == 0) {
            shared.words[1 + buffer] = bits_from(
                start_bits_of(arguments.start_bits, first_row, positions), first, positions);
        }
        const float* states =
            arguments.checkpoints + (first_chunk + first / TILE) * state_elements + held;
        copy_async_8(&shared.states[buffer][thread].x, states);
        copy_async_8(&shared.states[buffer][thread].z, states + 16);
        copy_async_16(&shared.bc[buffer][0][0] + thread * 4, bc + first * 32);
        copy_async_commit();
    };
    auto take_tile = [&](Prepared& out, u32 buffer) {
        const auto& raw = shared.raw;
        prepare(out, shared,
                Raw{&shared.x[buffer][row][column], &raw[DELTA][row][column], &raw[DOUT][row][column],
                    &raw[Z][row][column], &raw[Y][row][column]},
                row, column);
    };
    auto x_of = [&](u32 buffer) { return &shared.x[buffer][row][column]; };
    auto states_of = [&](u32 buffer) { return &shared.states[buffer][threadIdx.x].x; };
    auto start_bits_of_tile = [&](u32 buffer) { return DOCUMENTS ? shared.words[1 + buffer] : 0; };
#endif
    static_assert(TILE * 32 == SCAN_THREADS * 4, "a thread copies four of a tile's B and C");

    Prepared prepared;
    auto prepare_tile = [&](u32 buffer, u32 first) {
        take_tile(prepared, buffer);
        if (first + row >= positions) return;
        const u32 to = first_row + first + row;
        put_columns<ALIGNED>(place(arguments.dz, to, channel), prepared.dz);
        if (arguments.regated.first) {
            put_columns<ALIGNED>(place(arguments.regated, to, channel), prepared.regated);
        }
    };

    static_assert(WORD_POSITIONS % TILE == 0, "a tile is within a word");
    const u32 last = (end - 1) / TILE * TILE;
    fetch(0, last);
    copy_async_wait<0>();
    __syncthreads();  // skip and bias are loaded, and all copies complete
    prepare_tile(0, last);
    if (item.segment > 0) {
        await_previous_segment(item, arguments.work);
        load_carried(carried, sums, carried_place(arguments, item.chain));
    }
    for (u32 first = last, buffer = 0;; first -= TILE, buffer ^= 1) {
        __syncthreads();  // all parts of the tile are loaded
        const u32 start_bits = start_bits_of_tile(buffer);
        if (first > begin) fetch(buffer ^ 1, first - TILE);
        // Unrolled, so that a piece's first loads are moved up into the piece before (measured, 5 %). On AMD that takes
        // more registers than allow two waves on a SIMD.
#if WARP == 64
#pragma unroll 1
#else
#pragma unroll
#endif
        for (u32 piece = TILE / PIECE; piece-- > 0;) {
            walk_back(carried, shared, walk_role, states_of(buffer), WAITS_IN_REGISTERS ? 0 : buffer, piece * PIECE, start_bits);
        }
        copy_async_wait<0>();
        __syncthreads();  // all have walked, and all copies are complete
        Finished out;
        finish(out, sums, shared, prepared.slope, x_of(buffer), row, column);
        if (first + row < positions) {
            const u32 to = first_row + first + row;
            put_columns<ALIGNED>(place(arguments.dx, to, channel), out.dx);
            put_columns<ALIGNED>(place(arguments.ddelta_raw, to, channel), out.ddelta_raw);
            float4 sum = load4(shared.dbc[0] + row * DBC_ROW + thread % 8 * 4);
#pragma unroll
            for (u32 warp = 1; warp < WARPS; warp++) {
                const float4 part = load4(shared.dbc[warp] + row * DBC_ROW + thread % 8 * 4);
                sum.x += part.x;
                sum.y += part.y;
                sum.z += part.z;
                sum.w += part.w;
            }
            store4_whole(dbc + static_cast<u64>(first) * 32, sum);
        }
        if (first == begin) break;
        prepare_tile(buffer ^ 1, first - TILE);
    }
    if (begin > 0) {
        store_carried(carried_place(arguments, item.chain), carried, sums);
        publish_segment(item, arguments.work);
        return;
    }
    float* parameters = arguments.parameters + sample * (state_elements + 2 * channels);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        parameters[held + j / 2 * 16 + j % 2] = carried.da[j] * (carried.rate[j] * LN_2);
    }
    sum_channels(parameters + state_elements + first_channel, channels, shared, sums, row, column);
}

template <bool ALIGNED>
DEVICE void backward(const ScanBackwardArguments& arguments) {
    SHARED(BackwardShared, memory);
    ScanWorkItem item;
    // One work item a block: a loop over items costs registers that the walk needs.
    if (next_work_item(item, arguments.work, memory->words[0])) {
        walk_work_item<ALIGNED>(arguments, *memory, item);
    }
}

}  // namespace

#if DOCUMENTS
KERNEL(scan_backward_documents, 128, 3, ScanBackwardArguments) { backward<true>(arguments); }
KERNEL(scan_backward_unaligned_documents, 128, 3, ScanBackwardArguments) { backward<false>(arguments); }
SHARED_BYTES(scan_backward_documents, sizeof(BackwardShared));
SHARED_BYTES(scan_backward_unaligned_documents, sizeof(BackwardShared));
#else
KERNEL(scan_backward, 128, 3, ScanBackwardArguments) { backward<true>(arguments); }

// Views whose rows or columns are not aligned: the same bits.
KERNEL(scan_backward_unaligned, 128, 3, ScanBackwardArguments) { backward<false>(arguments); }
SHARED_BYTES(scan_backward, sizeof(BackwardShared));
SHARED_BYTES(scan_backward_unaligned, sizeof(BackwardShared));
#endif
