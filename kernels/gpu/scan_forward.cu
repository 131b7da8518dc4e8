// The forward selective scan of channels with sixteen states, in blocks of 32 channels.
//
// A block walks 32 channels of a sample, position after position: no second pass (an exponential more a
// state). A sequence is cut into turns (scan.h), each of which goes on from the states that the one before
// saved. A lane holds 4 states of a channel. Positions go in tiles of 32: the raw tile arrives by
// asynchronous copies while the one before is walked; each thread turns 8 channels of one position into
// (delta, delta x), the block walks, and the same thread sums the four lanes' parts of y, adds the skip,
// saves y, gates and stores.
//
// Waves of 64 are AMD's, whose compute units have 64 KiB of shared memory and whose copies into it hold up the thread that
// makes them. There the next tile waits in registers, each of them in the thread that prepares it; lanes add their parts of y
// among themselves; and a tile has 16 positions: so six blocks fit where one would. No sum has another order.
//
// Floor, per state and position: 1 + 2/16 exponentials and the like, and 5 operations (8.25 issued with
// loads). At (2, 4096, 5376) on an H200: 0.19 ms of exponentials, 0.06 ms of bytes; shared memory,
// about 0.21 ms, is the nearest wall. Measured: 0.34 ms.
#include "scan.h"

namespace {

constexpr bool WAITS_IN_REGISTERS = WARP == 64;
constexpr u32 TILE = WAITS_IN_REGISTERS ? 16 : 32;  // positions
constexpr u32 COLUMNS = TILE / 4;             // channels that a thread prepares and finishes
constexpr u32 ROW_THREADS = BLOCK_CHANNELS / COLUMNS;
constexpr u32 GROUP = 2;                      // positions whose operands are loaded together
constexpr u32 WARPS = SCAN_THREADS / WARP;
constexpr u32 WARP_CHANNELS = WARP / 4;
// Padded so that neither walking nor preparing meets a bank conflict.
constexpr u32 STEPS_ROW = BLOCK_CHANNELS / 8 * 20;
constexpr u32 SECTION = WARP + WARP_CHANNELS;
constexpr u32 Y_ROW = WAITS_IN_REGISTERS ? BLOCK_CHANNELS + 4 : WARPS * SECTION + 4;
constexpr u32 BUFFERS = WAITS_IN_REGISTERS ? 1 : 2;

enum Array { X, DELTA, Z, ARRAYS };

// A thread's part of a tile as it comes from memory.
struct Incoming {
    HeldColumns<COLUMNS> raw[ARRAYS];
    float4 bc;
};

struct ForwardShared {
    float steps[TILE * STEPS_ROW];            // (delta, delta x) of each channel
    float bc[BUFFERS][TILE][32];              // [8][B2 C2]
    float y[TILE * Y_ROW];                    // [warps][4 lanes, channels]: parts of C . h; of wide warps the sums
    float skip[BLOCK_CHANNELS], bias[BLOCK_CHANNELS];
#if WARP == 32
    activation raw[2][ARRAYS][TILE][BLOCK_CHANNELS];
#endif
    // What take_turn needs, in the first. Last, so that the arrays before it begin at multiples of 128 bytes.
    u32 turn[4];
};
// What the launcher asks for.
static_assert(sizeof(ForwardShared) == (WARP == 64 ? 9744 : ACTIVATION_BF16 ? 51984 : 64272),
              "shared bytes of forward");

// One position as a lane needs it: its channel's step, and (B B C C) of states 0, 1 and 2, 3.
struct Step {
    float2 delta;
    float4 low, high;
};

// The threads' two roles. Lanes that differ in their lowest or highest bit share a channel: then reads
// of 16 bytes that they have in common cost half (measured, 5 %).
struct Walker {
    u32 quad, channel, y_at;
};
DEVICE Walker walker() {
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Walker walker;
    if (WAITS_IN_REGISTERS) {
        // The lanes of a channel are neighbours, which add what they have without shared memory.
        walker.quad = lane % 4;
        walker.channel = walker.y_at = warp * WARP_CHANNELS + lane / 4;
        return walker;
    }
    walker.quad = (lane & 1) | (lane / (WARP / 2)) * 2;
    const u32 within = (lane / 2) % WARP_CHANNELS;
    walker.channel = warp * WARP_CHANNELS + within;
    walker.y_at = warp * SECTION + walker.quad * WARP_CHANNELS + within;
    return walker;
}

DEVICE void load_group(Step (&steps)[GROUP], const float* delta, const float* bc, u32 first) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        steps[i].delta = *reinterpret_cast<const float2*>(delta + (first + i) * STEPS_ROW);
        steps[i].low = load4(bc + (first + i) * 32);
        steps[i].high = load4(bc + (first + i) * 32 + 4);
    }
}

// decay = 2^(delta rate), drive = delta x B.
DEVICE void decay_group(float (&decay)[GROUP][4], float (&drive)[GROUP][4],
                        const Step (&steps)[GROUP], const float (&rate)[4]) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        const float b[4] = {steps[i].low.x, steps[i].low.y, steps[i].high.x, steps[i].high.y};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            decay[i][j] = exp2_fast(steps[i].delta.x * rate[j]);
            drive[i][j] = steps[i].delta.y * b[j];
        }
    }
}

// Leaves the parts of y of a group, whose first position is `first`, in shared memory.
DEVICE void store_parts(ForwardShared& shared, const Walker& walker, float (&y)[GROUP], u32 first) {
    if (WAITS_IN_REGISTERS) {
        // As finish adds them elsewhere: the first two, the last two, both.
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            y[i] += shuffle_xor(y[i], 1);
            y[i] += shuffle_xor(y[i], 2);
        }
        static_assert(GROUP == 2, "one of the four lanes stores each position");
        if (walker.quad < 2) shared.y[(first + walker.quad) * Y_ROW + walker.y_at] = walker.quad ? y[1] : y[0];
        return;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) shared.y[(first + i) * Y_ROW + walker.y_at] = y[i];
}

// Moves h over a tile, in three stages: operands of the group after the next are loaded, decays of the
// next formed, and this one stepped. `left`: positions of the sample from the tile's first; `beginnings`: of documents.
DEVICE void walk(float (&h)[4], ForwardShared& shared, float* checkpoint, u64 checkpoint_stride,
                 const float (&rate)[4], const Walker& walker, u32 buffer, u32 left, u32 beginnings) {
    const float* delta = shared.steps + walker.channel / 8 * 20 + walker.channel % 8 * 2;
    const float* bc = &shared.bc[buffer][0][walker.quad * 8];
    Step steps[3][GROUP];
    float decay[2][GROUP][4], drive[2][GROUP][4];
    load_group(steps[0], delta, bc, 0);
    load_group(steps[1], delta, bc, GROUP);
    decay_group(decay[0], drive[0], steps[0], rate);
#pragma unroll
    for (u32 group = 0; group < TILE / GROUP; group++) {
        const u32 first = group * GROUP;
        if (first % CHECKPOINT == 0 && (first == 0 || first < left)) {
            store4(checkpoint + first / CHECKPOINT * checkpoint_stride,
                   make_float4(h[0], h[1], h[2], h[3]));
        }
        if (first + 2 * GROUP < TILE) {
            load_group(steps[(group + 2) % 3], delta, bc, first + 2 * GROUP);
        }
        if (first + GROUP < TILE) {
            const u32 next = (group + 1) % 2;
            decay_group(decay[next], drive[next], steps[(group + 1) % 3], rate);
        }
        float y[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const Step& step = steps[group % 3][i];
            const float c[4] = {step.low.z, step.low.w, step.high.z, step.high.w};
            y[i] = 0.0f;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const float before = begins(beginnings, first + i) ? 0.0f : h[j];
                h[j] = fmaf(decay[group % 2][i][j], before, drive[group % 2][i][j]);
                y[i] = fmaf(c[j], h[j], y[i]);
            }
        }
        // Stored last: a store would keep later loads from moving up.
        store_parts(shared, walker, y, first);
    }
}

// The tile that is walked and the one that comes next, where they wait in registers.
#if WARP == 64
struct Tiles {
    Incoming walked, next;
};
DEVICE const HeldColumns<COLUMNS>* raw_of_walked(const Tiles& tiles, const ForwardShared&, Array array, u32, u32, u32) {
    return &tiles.walked.raw[array];
}
DEVICE const HeldColumns<COLUMNS>* raw_of_next(const Tiles& tiles, const ForwardShared&, Array array, u32, u32, u32) {
    return &tiles.next.raw[array];
}
// The next tile is to be walked.
DEVICE void advance(Tiles& tiles, ForwardShared& shared) {
    static_assert(TILE * 32 == SCAN_THREADS * 4, "a thread has four of a tile's B and C");
    store4(&shared.bc[0][0][0] + threadIdx.x * 4, tiles.next.bc);
    tiles.walked = tiles.next;
}
#else
struct Tiles {};
DEVICE const activation* raw_of_walked(const Tiles&, const ForwardShared& shared, Array array, u32 buffer, u32 row,
                                       u32 column) {
    return &shared.raw[buffer][array][row][column];
}
DEVICE const activation* raw_of_next(const Tiles& tiles, const ForwardShared& shared, Array array, u32 buffer,
                                     u32 row, u32 column) {
    return raw_of_walked(tiles, shared, array, buffer, row, column);
}
DEVICE void advance(Tiles&, ForwardShared&) {}
#endif

// (delta, delta x) of a thread's channels at `row` of the next tile.
DEVICE void prepare(ForwardShared& shared, const Tiles& tiles, u32 buffer, u32 row, u32 column) {
    float x[COLUMNS], delta[COLUMNS], bias[COLUMNS];
    take_columns(x, raw_of_next(tiles, shared, X, buffer, row, column));
    take_columns(delta, raw_of_next(tiles, shared, DELTA, buffer, row, column));
    unpack(bias, load4(shared.bias + column));
    if constexpr (COLUMNS > 4) unpack(bias + 4, load4(shared.bias + column + 4));
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) delta[i] = softplus(delta[i] + bias[i]);
    float* out = shared.steps + row * STEPS_ROW + column / 8 * 20;
    if (COLUMNS < 8) out += column % 8 * 2;
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i += 2) {
        store4(out + 2 * i,
               make_float4(delta[i], delta[i] * x[i], delta[i + 1], delta[i + 1] * x[i + 1]));
    }
}

// y and the gated output of a thread's channels.
DEVICE void finish(float (&y)[COLUMNS], float (&out)[COLUMNS], const ForwardShared& shared,
                   const Tiles& tiles, u32 buffer, u32 row, u32 column) {
    float x[COLUMNS], z[COLUMNS];
    take_columns(x, raw_of_walked(tiles, shared, X, buffer, row, column));
    take_columns(z, raw_of_walked(tiles, shared, Z, buffer, row, column));
    const float* parts = WAITS_IN_REGISTERS ? shared.y + row * Y_ROW + column
                                            : shared.y + row * Y_ROW + column / WARP_CHANNELS * SECTION +
                                                  column % WARP_CHANNELS;
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i += 4) {
        constexpr u32 PARTS = WAITS_IN_REGISTERS ? 1 : 4;
        float part[4][4], skip[4];
#pragma unroll
        for (u32 quad = 0; quad < PARTS; quad++) {
            unpack(part[quad], load4(parts + quad * WARP_CHANNELS + i));
        }
        unpack(skip, load4(shared.skip + column + i));
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const float sum =
                PARTS == 1 ? part[0][k] : (part[0][k] + part[1][k]) + (part[2][k] + part[3][k]);
            y[i + k] = fmaf(skip[k], x[i + k], sum);
        }
    }
    round_columns(y);
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) out[i] = gated(y[i], z[i], sigmoid(z[i]));
}

// A segment of a chain.
template <bool ALIGNED>
DEVICE void walk_turn(const ScanForwardArguments& arguments, ForwardShared& shared,
                      const ScanTurn& turn) {
    const u32 thread = threadIdx.x, positions = arguments.positions;
    const u32 blocks = arguments.channels / BLOCK_CHANNELS;
    const u32 sample = turn.chain / blocks;
    const u32 first_channel = turn.chain % blocks * BLOCK_CHANNELS;
    const u32 begin = turn.segment * arguments.turns.positions;
    const u32 end = min(begin + arguments.turns.positions, positions);
    const Walker walk_role = walker();
    const u32 row = thread / ROW_THREADS, column = thread % ROW_THREADS * COLUMNS;
    const u32 channel = first_channel + column;
    const u32 first_row = sample * positions + begin + row;

    float rate[4], h[4];
    const u32 walked = first_channel + walk_role.channel;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        rate[j] = rate_of(arguments.a_log[static_cast<u64>(walked) * 16 + walk_role.quad * 4 + j]);
        h[j] = 0.0f;
    }
    if (thread < BLOCK_CHANNELS) {
        shared.skip[thread] = arguments.d[first_channel + thread];
        shared.bias[thread] = arguments.delta_bias[first_channel + thread];
    }
    const u32 chunks = (positions + CHECKPOINT - 1) / CHECKPOINT;
    const u64 checkpoint_stride = static_cast<u64>(arguments.channels) * 16;
    float* checkpoint = arguments.checkpoints +
                        (sample * chunks + begin / CHECKPOINT) * checkpoint_stride +
                        static_cast<u64>(walked) * 16 + walk_role.quad * 4;

    // Where this thread's part of the next tile is read, and of this one written.
    const u64 tile_elements = static_cast<u64>(TILE) * arguments.channels;
    const activation* x = place(arguments.x, first_row, channel);
    const activation* delta_raw = place(arguments.delta_raw, first_row, channel);
    const activation* z = place(arguments.z, first_row, channel);
    const float* bc = arguments.packed_bc + sample * packed_elements(positions) +
                      static_cast<u64>(begin) * 32 + thread * 4;
    activation* out = place(arguments.out, first_row, channel);
    activation* y = arguments.y + (static_cast<u64>(first_row) * arguments.channels + channel);
    Tiles tiles = {};
#if WARP == 64
    auto fetch = [&](u32, u32 first) {
        Incoming& incoming = tiles.next;
        if (first + row < end) {
            hold_columns<ALIGNED>(incoming.raw[X], x);
            hold_columns<ALIGNED>(incoming.raw[DELTA], delta_raw);
            hold_columns<ALIGNED>(incoming.raw[Z], z);
        }
        incoming.bc = load4(bc);
        x += TILE * arguments.x.stride;
        delta_raw += TILE * arguments.delta_raw.stride;
        z += TILE * arguments.z.stride;
        bc += TILE * 32;
    };
#else
    auto fetch = [&](u32 buffer, u32 first) {
        activation* raw = &shared.raw[buffer][0][row][column];
        constexpr u32 ARRAY = TILE * BLOCK_CHANNELS;
        // Past the end there is whatever was there: the walk meets it last, and none of it is kept.
        if (first + row < end) {
            fetch_columns<COLUMNS, ALIGNED>(raw + X * ARRAY, x);
            fetch_columns<COLUMNS, ALIGNED>(raw + DELTA * ARRAY, delta_raw);
            fetch_columns<COLUMNS, ALIGNED>(raw + Z * ARRAY, z);
        }
#pragma unroll
        for (u32 i = 0; i < TILE * 8 / SCAN_THREADS; i++) {
            const u32 at = (thread + i * SCAN_THREADS) * 4;
            copy_async_16(&shared.bc[buffer][0][0] + at, bc + i * SCAN_THREADS * 4);
        }
        copy_async_commit();
        x += TILE * arguments.x.stride;
        delta_raw += TILE * arguments.delta_raw.stride;
        z += TILE * arguments.z.stride;
        bc += TILE * 32;
    };
#endif

    static_assert(WORD_POSITIONS % TILE == 0, "a tile is within a word");
    const u32* const documents =
        DOCUMENTS ? beginnings_of(arguments.beginnings, sample * positions, positions) : nullptr;
    u32 beginnings = DOCUMENTS ? bits_from(documents, begin, positions) : 0;
    fetch(0, begin);
    __syncthreads();  // skip and bias are there
    copy_async_wait<0>();
    prepare(shared, tiles, 0, row, column);
    advance(tiles, shared);
    if (turn.segment > 0) {
        await_turn(turn, arguments.turns);
        unpack(h, load4(checkpoint));
    }
    for (u32 first = begin, buffer = 0; first < end; first += TILE, buffer ^= 1) {
        __syncthreads();  // everyone's part of the tile is there
        if (first + TILE < end) fetch(buffer ^ 1, first + TILE);
        const u32 next_beginnings = DOCUMENTS ? bits_from(documents, first + TILE, positions) : 0;
        walk(h, shared, checkpoint, checkpoint_stride, rate, walk_role, WAITS_IN_REGISTERS ? 0 : buffer, positions - first,
             beginnings);
        beginnings = next_beginnings;
        checkpoint += TILE / CHECKPOINT * checkpoint_stride;
        __syncthreads();  // everyone has walked
        copy_async_wait<0>();
        float raw_y[COLUMNS], gated_y[COLUMNS];
        finish(raw_y, gated_y, shared, tiles, buffer, row, column);
        // Before the stores, so that its latencies and those of finish overlap.
        // After the last tile this prepares what was there before, for nobody.
        prepare(shared, tiles, buffer ^ 1, row, column);
        advance(tiles, shared);
        if (first + row < end) {
            put_columns<true>(y, raw_y);
            put_columns<ALIGNED>(out, gated_y);
        }
        y += tile_elements;
        out += TILE * arguments.out.stride;
    }
    if (end == positions) return;
    // The next turn saves these states again as it begins.
    store4(checkpoint, make_float4(h[0], h[1], h[2], h[3]));
    end_turn(turn, arguments.turns);
}

template <bool ALIGNED>
DEVICE void forward(const ScanForwardArguments& arguments) {
    SHARED(ForwardShared, memory);
    ScanTurn turn;
    while (take_turn(turn, arguments.turns, memory->turn[0])) {
        walk_turn<ALIGNED>(arguments, *memory, turn);
    }
}

}  // namespace

#if DOCUMENTS
KERNEL(scan_forward_documents, 128, 3, ScanForwardArguments) { forward<true>(arguments); }
KERNEL(scan_forward_unaligned_documents, 128, 3, ScanForwardArguments) { forward<false>(arguments); }
SHARED_BYTES(scan_forward_documents, sizeof(ForwardShared));
SHARED_BYTES(scan_forward_unaligned_documents, sizeof(ForwardShared));
#else
// Four blocks have room; asked for three, the compiler hides more (measured, 1 %).
KERNEL(scan_forward, 128, 3, ScanForwardArguments) { forward<true>(arguments); }

// Views whose rows or columns are not aligned: the same bits.
KERNEL(scan_forward_unaligned, 128, 4, ScanForwardArguments) { forward<false>(arguments); }
SHARED_BYTES(scan_forward, sizeof(ForwardShared));
SHARED_BYTES(scan_forward_unaligned, sizeof(ForwardShared));
#endif
