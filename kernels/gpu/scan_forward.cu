// The forward selective scan of channels with sixteen states, in blocks of 32 channels.
//
// A block walks 32 channels of a sample, position after position: a second pass would cost another exponential a state.
// A sequence is cut into segments (scan.h); each continues from the states that the segment before saved. A lane
// holds 4 states of a channel. Positions go in tiles of 32: asynchronous copies bring the raw tile while the one before
// is walked; each thread turns 8 channels of one position into (delta, delta x), the block walks, and the same thread
// sums the four lanes' parts of y, adds the skip, saves y, gates and stores.
//
// AMD has waves of 64. Its compute units have 64 KiB of shared memory, and copies into it hold up the thread that makes
// them. There the next tile waits in registers, each row in the thread that prepares it; lanes add their parts of y
// among themselves; and a tile has 16 positions: so six blocks fit instead of one. No sum has another order.
//
// Floor, per state and position: 1 + 2/16 exponentials and the like, and 5 operations (8.25 issued with loads). At (2,
// 4096, 5376) on an H200: 0.19 ms of exponentials, 0.06 ms of bytes; shared memory, about 0.21 ms, is the tightest
// limit. Measured: 0.34 ms.
#include "scan_walk.h"

namespace {

// A segment of a chain.
template <bool ALIGNED>
DEVICE void walk_work_item(const ScanForwardArguments& arguments, ForwardShared& shared,
                           const ScanWorkItem& item) {
    const u32 thread = threadIdx.x, positions = arguments.positions;
    const u32 blocks = arguments.channels / BLOCK_CHANNELS;
    const u32 sample = item.chain / blocks;
    const u32 first_channel = item.chain % blocks * BLOCK_CHANNELS;
    const u32 begin = item.segment * arguments.work.positions;
    const u32 end = min(begin + arguments.work.positions, positions);
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

    // The addresses at which this thread reads its part of the next tile, and writes that of this one.
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
    static_assert(TILE * 32 == SCAN_THREADS * 4, "a thread has four of a tile's B and C");
    float4 next_bc;
    auto fetch = [&](u32, u32 first) {
        Incoming& incoming = tiles.next;
        if (first + row < end) {
            hold_columns<ALIGNED>(incoming.raw[X], x);
            hold_columns<ALIGNED>(incoming.raw[DELTA], delta_raw);
            hold_columns<ALIGNED>(incoming.raw[Z], z);
        }
        next_bc = load4(bc);
        x += TILE * arguments.x.stride;
        delta_raw += TILE * arguments.delta_raw.stride;
        z += TILE * arguments.z.stride;
        bc += TILE * 32;
    };
    auto advance_all = [&] {
        store4(&shared.bc[0][0][0] + thread * 4, next_bc);
        advance(tiles);
    };
#else
    auto fetch = [&](u32 buffer, u32 first) {
        activation* raw = &shared.raw[buffer][0][row][column];
        constexpr u32 ARRAY = TILE * BLOCK_CHANNELS;
        // Past the end the buffer holds old data: the walk reads it last, and nothing of it is kept.
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
    auto advance_all = [] {};
#endif

    static_assert(WORD_POSITIONS % TILE == 0, "a tile is within a word");
    const u32* const documents =
        DOCUMENTS ? start_bits_of(arguments.start_bits, sample * positions, positions) : nullptr;
    u32 start_bits = DOCUMENTS ? bits_from(documents, begin, positions) : 0;
    fetch(0, begin);
    __syncthreads();  // skip and bias are loaded
    copy_async_wait<0>();
    prepare(shared, tiles, 0, row, column);
    advance_all();
    if (item.segment > 0) {
        await_previous_segment(item, arguments.work);
        unpack(h, load4(checkpoint));
    }
    for (u32 first = begin, buffer = 0; first < end; first += TILE, buffer ^= 1) {
        __syncthreads();  // all parts of the tile are loaded
        if (first + TILE < end) fetch(buffer ^ 1, first + TILE);
        const u32 next_start_bits = DOCUMENTS ? bits_from(documents, first + TILE, positions) : 0;
        const auto save = [&](u32 i) {
            if (i > 0 && i >= positions - first) return;
            store4(checkpoint + i / CHECKPOINT * checkpoint_stride, make_float4(h[0], h[1], h[2], h[3]));
        };
        walk(h, shared, save, rate, walk_role, WAITS_IN_REGISTERS ? 0 : buffer, start_bits);
        start_bits = next_start_bits;
        checkpoint += TILE / CHECKPOINT * checkpoint_stride;
        __syncthreads();  // all threads have walked
        copy_async_wait<0>();
        float raw_y[COLUMNS], gated_y[COLUMNS];
        finish(raw_y, gated_y, shared, tiles, buffer, row, column);
        // Before the stores, so that its latencies and those of finish overlap.
        // After the last tile this prepares the last tile again, which is not read.
        prepare(shared, tiles, buffer ^ 1, row, column);
        advance_all();
        if (first + row < end) {
            put_columns<true>(y, raw_y);
            put_columns<ALIGNED>(out, gated_y);
        }
        y += tile_elements;
        out += TILE * arguments.out.stride;
    }
    if (end == positions) return;
    // The next segment saves these states again when it begins.
    store4(checkpoint, make_float4(h[0], h[1], h[2], h[3]));
    publish_segment(item, arguments.work);
}

template <bool ALIGNED>
DEVICE void forward(const ScanForwardArguments& arguments) {
    SHARED(ForwardShared, memory);
    ScanWorkItem item;
    while (next_work_item(item, arguments.work, memory->words[0])) {
        walk_work_item<ALIGNED>(arguments, *memory, item);
    }
}

}  // namespace

#if DOCUMENTS
KERNEL(scan_forward_documents, 128, 3, ScanForwardArguments) { forward<true>(arguments); }
KERNEL(scan_forward_unaligned_documents, 128, 3, ScanForwardArguments) { forward<false>(arguments); }
SHARED_BYTES(scan_forward_documents, sizeof(ForwardShared));
SHARED_BYTES(scan_forward_unaligned_documents, sizeof(ForwardShared));
#else
// Four blocks would fit; with three as the limit, the compiler hides more latency (measured, 1 %).
KERNEL(scan_forward, 128, 3, ScanForwardArguments) { forward<true>(arguments); }

// Views whose rows or columns are not aligned: the same bits.
KERNEL(scan_forward_unaligned, 128, 4, ScanForwardArguments) { forward<false>(arguments); }
SHARED_BYTES(scan_forward, sizeof(ForwardShared));
SHARED_BYTES(scan_forward_unaligned, sizeof(ForwardShared));
#endif
