// Products of 64 x 16 elements by 16 x N, the work of a group of four warps: with Hopper's warpgroup instructions,
// which read the right factor from shared memory and run asynchronously, or tile by tile where the emulator imitates
// them (GROUP_PRODUCTS of dialect.h). Also the means to feed such products: tiles that the copy engine brings on its
// own, and gates that threads wait at.
//
// A group's results and left factors lie in registers as those of its warps in tile_product.h do: a warp has 16 rows.
// An element of a product depends on its row of the left factor and its column of the right one alone, as there.
#pragma once
#include "group_instructions.h"

constexpr u32 GROUP_WARPS = 4;
constexpr u32 GROUP_THREADS = GROUP_WARPS * WARP;
constexpr u32 GROUP_ROWS = GROUP_WARPS * TILE;

// Columns of a panel: rows of right factors and of queries are cut into panels of 128 bytes a row, one behind the
// other. SharedRows permutes the chunks of a panel as the instructions expect.
constexpr u32 PANEL_COLUMNS = 64;
typedef SharedRows<PANEL_COLUMNS> Panel;
// The alignment of panels, in bytes: the permutation depends on the address.
constexpr u32 PANEL_ALIGNMENT = 1024;

// A value that is the same in every lane of a warp, made known as such to the compiler, which then keeps it out of the
// lanes' registers.
DEVICE bool of_warp(bool x) {
#if ON_NVIDIA
    return __any_sync(0xffffffffu, x);
#else
    return x;
#endif
}

// --- gates ------------------------------------------------------------------------------------------------

// Of threads that have met, one arrives at a gate for all of them. compute-sanitizer's racecheck does not follow that, and reports what the
// others read or wrote before: for it, every one arrives.
#ifndef EVERY_THREAD_ARRIVES
#define EVERY_THREAD_ARRIVES 0
#endif
// The arrivals of THREADS threads that have met.
template <u32 THREADS>
constexpr u32 ARRIVALS_OF = EVERY_THREAD_ARRIVES ? THREADS : 1;
constexpr u32 WARP_ARRIVALS = ARRIVALS_OF<WARP>;

#if ON_NVIDIA
// Opens whenever the set number of arrivals, and all bytes that they announced, have come, and closes again at once. A
// thread waits for every opening of a gate; the parity tells an opening from the next.
struct Gate {
    u64 state;
};

DEVICE u32 shared_place(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}
DEVICE void make_gate(Gate& gate, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_place(&gate)), "r"(arrivals)
                 : "memory");
}
// Called after all gates of a block are made, by the thread that made them.
DEVICE void gates_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(Gate& gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_place(&gate)) : "memory");
}
// Arrives, and makes the gate wait for a number of bytes of copy_tile.
DEVICE void arrive_expecting(Gate& gate, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_place(&gate)), "r"(bytes)
                 : "memory");
}
// Waits for openings 0, 2, 4 ... (parity 0) or 1, 3, 5 ... of a gate. The caller knows that all earlier ones have
// happened.
DEVICE void wait_for(const Gate& gate, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred passed;\n"
        "LOOK:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 passed, [%0], %1;\n"
        "@passed bra PASSED;\n"
        "bra LOOK;\n"
        "PASSED:\n"
        "}" ::"r"(shared_place(&gate)),
        "r"(parity)
        : "memory");
}
// Whether that opening has happened, without waiting.
DEVICE bool has_opened(const Gate& gate, u32 parity) {
    u32 passed;
    asm volatile(
        "{\n"
        ".reg .pred passed;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 passed, [%1], %2;\n"
        "selp.u32 %0, 1, 0, passed;\n"
        "}"
        : "=r"(passed)
        : "r"(shared_place(&gate)), "r"(parity)
        : "memory");
    return passed != 0;
}

// Barrier `barrier` (1 to 15) of `threads` threads of the block, some of which may arrive without waiting.
DEVICE void meet(u32 barrier, u32 threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void pass_by(u32 barrier, u32 threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes this thread's writes to shared memory visible to products and copies, once the thread has arrived at a gate or
// barrier.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sets the number of registers of each thread of the group from here on.
template <u32 REGISTERS>
DEVICE void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <u32 REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
#else
using emulator::arrive;
using emulator::arrive_expecting;
using emulator::Gate;
using emulator::make_gate;
using emulator::meet;
using emulator::pass_by;
DEVICE void gates_are_made() {}
DEVICE void wait_for(const Gate& gate, u32 parity) { emulator::wait_for_gate(gate, parity); }
DEVICE bool has_opened(const Gate& gate, u32 parity) { return gate.passages % 2 != parity; }
DEVICE void show_to_products() {}
template <u32 REGISTERS>
DEVICE void give_registers_back() {}
template <u32 REGISTERS>
DEVICE void take_registers() {}
#endif

// --- asynchronous copies of tiles -------------------------------------------------------------------------

// Rows in global memory, as tiles of 64 columns for copy_tile: TileMap of driver.rs.
#if ON_NVIDIA
struct alignas(64) TileMap {
    u64 words[16];
};
#else
struct TileMap {
    u64 first, row_bytes, head_bytes, sample_bytes;
    u64 columns, rows, heads, samples;
    u64 tile_rows;
    u64 unused[7];
};
#endif

// Starts the copy of the tile that begins at `column` and `row` of a head, with zeros for elements outside. The gate
// counts its bytes.
DEVICE void copy_tile(Panel to, const TileMap& map, Gate& gate, u32 column, u32 row, u32 head,
                      u32 sample) {
#if ON_NVIDIA
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_place(to.start)),
        "l"(&map), "r"(shared_place(&gate)), "r"(column), "r"(row), "r"(head), "r"(sample)
        : "memory");
#else
    const u64 first = map.first + head * map.head_bytes + sample * map.sample_bytes;
    for (u32 i = 0; i < map.tile_rows; i++) {
        const u64 from = first + (row + i) * map.row_bytes;
        for (u32 j = 0; j < PANEL_COLUMNS; j++) {
            const bool inside = row + i < map.rows && column + j < map.columns;
            *to.at(i, j) = inside ? reinterpret_cast<const activation*>(from)[column + j] : rounded(0.0f);
        }
    }
    emulator::copied(gate, map.tile_rows * PANEL_COLUMNS * sizeof(activation));
#endif
}

// Starts a copy of bytes, a whole multiple of 16 from and to multiples of 16. The gate counts them.
DEVICE void copy_bytes(void* to, const void* from, u32 bytes, Gate& gate) {
#if ON_NVIDIA
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_place(to)),
        "l"(from), "r"(bytes), "r"(shared_place(&gate))
        : "memory");
#else
    memcpy(to, from, bytes);
    emulator::copied(gate, bytes);
#endif
}

// Starts to store floats from shared memory, or to add each to the one in global memory.
DEVICE void store_floats(float* to, const float* from, u32 count) {
#if ON_NVIDIA
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_place(from)), "r"(count * 4)
                 : "memory");
#else
    memcpy(to, from, count * sizeof(float));
#endif
}
DEVICE void add_floats(float* to, const float* from, u32 count) {
#if ON_NVIDIA
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_place(from)), "r"(count * 4)
                 : "memory");
#else
    for (u32 i = 0; i < count; i++) to[i] += from[i];
#endif
}
// The first waits until this thread's stores and additions have read their source; the second until they are complete,
// so that the thread may publish them.
DEVICE void wait_until_read() {
#if ON_NVIDIA
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
DEVICE void wait_until_there() {
#if ON_NVIDIA
    asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
#endif
}
// Lets this thread's copies add to data that another block has published.
DEVICE void show_to_copies() {
#if ON_NVIDIA
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// --- products -----------------------------------------------------------------------------------------------

#if ON_NVIDIA
// Keeps the compiler from moving accesses to results across the place where products begin or have ended.
template <u32 TILES>
DEVICE void hold(Accumulator (&sum)[TILES]) {
#pragma unroll
    for (u32 n = 0; n < TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < HELD; i++) asm volatile("" : "+f"(sum[n].at[i])::"memory");
    }
}

// Marks results whose first product adds to nothing: the compiler need not keep their old values in registers.
template <u32 TILES>
DEVICE void forget(Accumulator (&sum)[TILES]) {
#pragma unroll
    for (u32 n = 0; n < TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < HELD; i++) asm volatile("" : "=f"(sum[n].at[i]));
    }
}
// Keeps left factors in registers unchanged until the products that read them have ended.
template <u32 TILES>
DEVICE void keep(const Factor (&left)[TILES]) {
#pragma unroll
    for (u32 n = 0; n < TILES; n++) {
#pragma unroll
        for (u32 pair = 0; pair < HELD / 2; pair++) asm volatile("" ::"r"(left[n].pairs[pair]) : "memory");
    }
}
#else
template <u32 TILES>
DEVICE void hold(Accumulator (&sum)[TILES]) {}
template <u32 TILES>
DEVICE void forget(Accumulator (&sum)[TILES]) {}
template <u32 TILES>
DEVICE void keep(const Factor (&left)[TILES]) {}
#endif

#if ON_NVIDIA
// The descriptor of rows of a factor whose terms are contiguous eight by eight, eight rows below one another, unpermuted, in units of 16 bytes:
// where they begin, and the distances to the next eight terms and to the next eight rows.
DEVICE u64 unpermuted_at(const activation* start, u32 terms_bytes, u32 rows_bytes) {
    return static_cast<u64>((shared_place(start) & 0x3ffffu) >> 4) | static_cast<u64>(terms_bytes / 16) << 16 |
           static_cast<u64>(rows_bytes / 16) << 32;
}
// The descriptor of panels: where they begin; the distance from a panel to the next, where rows of the factor or columns of the result come
// from several (else unused); the distance from eight rows to the next eight; and that chunks are permuted within 128 bytes.
DEVICE u64 panels_at(const activation* start, u32 panel_bytes) {
    return unpermuted_at(start, panel_bytes, 8 * PANEL_COLUMNS * sizeof(activation)) | 1ull << 62;
}
#endif

// Left factors in shared memory, for a group's 64 rows: panels of ROWS rows.
template <LeftStored STORED, u32 ROWS>
struct LeftPanels {
    DEVICE constexpr u32 bytes_before(u32 step) {
        return STORED == LeftStored::BY_TERM ? step * TILE * 128 : step / 4 * ROWS * 128 + step % 4 * 32;
    }
#if ON_NVIDIA
    u64 descriptor;

    __device__ __forceinline__ explicit LeftPanels(const activation* start) : descriptor(panels_at(start, ROWS * 128)) {}
    __device__ __forceinline__ LeftPanels after(u32 bytes) const {
        LeftPanels other = *this;
        other.descriptor += bytes / 16;
        return other;
    }
#else
    activation* start;

    explicit LeftPanels(activation* start) : start(start) {}
    LeftPanels after(u32 bytes) const { return LeftPanels(start + bytes / sizeof(activation)); }

    // Terms 16 step .. 16 step + 16 of the warp's rows.
    Factor factor(u32 step) const {
        const u32 row = threadIdx.x / WARP % GROUP_WARPS * TILE;
        if (STORED == LeftStored::BY_ROW) {
            const Panel panel(start + step * TILE / PANEL_COLUMNS * ROWS * PANEL_COLUMNS);
            return load_factor(panel, row, step * TILE % PANEL_COLUMNS);
        }
        const Panel panel(start);
        Factor factor;
        for (u32 pair = 0; pair < HELD / 2; pair++) {
            const u32 own = row + tile_row(row_slot(2 * pair)), term = step * TILE + tile_column(2 * pair);
            set_pair(factor, pair, widen(*panel.at(term, own)), widen(*panel.at(term + 1, own)));
        }
        return factor;
    }
#endif
};

// Right factors in shared memory: panels of ROWS rows.
template <Stored STORED, u32 ROWS>
struct RightPanels {
#if ON_NVIDIA
    u64 descriptor;

    __device__ __forceinline__ explicit RightPanels(const activation* start)
        : descriptor(panels_at(start, STORED == Stored::BY_TERM ? ROWS * 128 : 16)) {}

    // The factor that lies `bytes` further on.
    __device__ __forceinline__ RightPanels after(u32 bytes) const {
        RightPanels other = *this;
        other.descriptor += bytes / 16;
        return other;
    }
#else
    activation* start;

    explicit RightPanels(activation* start) : start(start) {}
    RightPanels after(u32 bytes) const { return RightPanels(start + bytes / sizeof(activation)); }
#endif

    DEVICE constexpr u32 bytes_before(u32 step) {
        return STORED == Stored::BY_TERM ? step * TILE * 128 : step / 4 * ROWS * 128 + step % 4 * 32;
    }

    // Starts sum (+)= left right over terms 16 step .. 16 step + 16. The group must have called begin_products since it
    // last used `sum`.
    template <u32 TILES>
    __device__ __forceinline__ void multiply(Accumulator (&sum)[TILES], const Factor& left, u32 step,
                                             bool adds) const {
#if ON_NVIDIA
        multiply_group<STORED>(sum, left, descriptor + bytes_before(step) / 16, adds ? 1 : 0);
#else
        for (u32 n = 0; n < TILES; n++) {
            if (!adds) sum[n] = zero_tile();
            const u32 column = STORED == Stored::BY_TERM ? n * TILE : step * TILE;
            const Panel panel(start + column / PANEL_COLUMNS * ROWS * PANEL_COLUMNS);
            const u32 of_panel = column % PANEL_COLUMNS;
            if (STORED == Stored::BY_TERM) {
                multiply_add<STORED>(sum[n], left, panel, step * TILE, of_panel);
            } else {
                multiply_add<STORED>(sum[n], left, panel, of_panel, n * TILE);
            }
        }
#endif
    }
    // The same with the left factor in shared memory too.
    template <u32 TILES, LeftStored LEFT, u32 LEFT_ROWS>
    __device__ __forceinline__ void multiply(Accumulator (&sum)[TILES], const LeftPanels<LEFT, LEFT_ROWS>& left,
                                             u32 step, bool adds) const {
#if ON_NVIDIA
        multiply_group<LEFT, STORED>(sum, left.descriptor + left.bytes_before(step) / 16,
                                     descriptor + bytes_before(step) / 16, adds ? 1 : 0);
#else
        multiply(sum, left.factor(step), step, adds);
#endif
    }
};

DEVICE void begin_products() {
#if ON_NVIDIA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Ends a batch of the group's products.
DEVICE void end_batch() {
#if ON_NVIDIA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits for all but the newest `PENDING` batches. `hold` must follow for their results.
template <int PENDING>
DEVICE void wait_for_products() {
#if ON_NVIDIA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
