// Runs kernels on the CPU: each GPU thread is a fiber, each running block has one operating-system thread, and a warp
// has WARP (32 or 64) lanes.
//
// Execution changes from one fiber to another at barriers and shuffles; between them a thread runs alone. With a seed,
// the order in which the fibers of a block run is random, and a warp or a thread is held back for as long as any other
// can continue, so that a missing barrier shows as a wrong result. A barrier that some threads never reach ends the
// launch, which returns the error. Dynamic shared memory is poisoned with NaN before every block.
//
// Not modelled: caches and the memory model, races between two barriers of one thread, copies that really overlap,
// the rounding of a device's approximate functions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef WARP
#error "the emulator needs WARP, 32 or 64"
#endif
#if !defined(__x86_64__)
#error "the emulator switches fibers on x86-64 alone"
#endif

// Libraries of other warp widths live in the same process, so all other symbols are hidden.
#define EXPORTED __attribute__((used, visibility("default")))
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))
// One operating-system thread runs one block at a time, so thread-local data belongs to the block.
#define __shared__ static thread_local

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Continues on another stack. `saved_stack` is where this one continues later.
extern "C" void emulator_switch(void** saved_stack, void* next_stack);

namespace emulator {

struct Launch;

struct Index {
    unsigned x, y, z;
};

struct Warp {
    // Two, used alternately, so that a lane may leave its next value while others still read the last ones.
    uint64_t slots[2][WARP];
    unsigned live = 0, arrived = 0;
    // Counts the barriers that the warp has passed.
    unsigned generation = 0;
};

struct Fiber {
    void* stack = nullptr;
    unsigned index = 0;
    bool done = false;
    // Whether the thread has waited for the kernel before this one.
    bool has_waited = false;
    // The barrier generation whose end the fiber waits for.
    const unsigned* waits_for = nullptr;
    unsigned waits_since = 0;
};

// A barrier of some of a block's threads.
struct Named {
    unsigned arrived = 0, generation = 0;
};

struct Block {
    const Launch* launch = nullptr;
    Index index{}, grid{};
    unsigned threads = 0;
    Warp* warps = nullptr;
    float4* shared = nullptr;
    void* scheduler_stack = nullptr;
    Fiber* current = nullptr;
    // The error of this block.
    const char* failure = nullptr;
    unsigned live = 0, arrived = 0, generation = 0;
    int votes = 0, vote_result = 0;
    Named named[16];
    // The line of the barrier that threads wait at.
    int line = 0;
};

inline thread_local Block* block = nullptr;

inline void yield_fiber() {
    Block* here = block;
    emulator_switch(&here->current->stack, here->scheduler_stack);
}

inline void pass_warp(Warp& warp) {
    warp.arrived = 0;
    warp.generation++;
}
inline void pass_block() {
    block->arrived = 0;
    block->vote_result = block->votes;
    block->votes = 0;
    block->generation++;
}

inline void wait_for(const unsigned& generation) {
    Fiber& fiber = *block->current;
    fiber.waits_for = &generation;
    fiber.waits_since = generation;
    while (*fiber.waits_for == fiber.waits_since) yield_fiber();
    fiber.waits_for = nullptr;
}

// Ends the block from inside a thread, which is not resumed.
inline void fail(const char* what) {
    block->failure = what;
    yield_fiber();
}

inline int block_barrier(int vote, int line) {
    if (block->arrived == 0) block->line = line;
    if (block->line != line) fail("threads meet at different barriers");
    block->votes += vote != 0;
    if (++block->arrived == block->live) {
        pass_block();
    } else {
        wait_for(block->generation);
    }
    return block->vote_result;
}

// For a thread that waits for another block: ends it if a block has failed, as it would wait for ever.
void rest();

inline unsigned lane() { return block->current->index % WARP; }
inline Warp& warp() { return block->warps[block->current->index / WARP]; }

inline void warp_barrier() {
    Warp& mine = warp();
    if (++mine.arrived == mine.live) {
        pass_warp(mine);
    } else {
        wait_for(mine.generation);
    }
}

// The value of another lane. Every live lane of the warp takes part.
template <class T>
T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a lane has one slot of 8 bytes");
    Warp& mine = warp();
    uint64_t* slots = mine.slots[mine.generation % 2];
    std::memcpy(&slots[lane()], &value, sizeof(T));
    warp_barrier();
    T found;
    std::memcpy(&found, &slots[from % WARP], sizeof(T));
    return found;
}

// --- gates and named barriers, for parts of a block -------------------------------------------------------

// Opens when `count` threads have arrived and all bytes that they announced have been copied.
struct Gate {
    unsigned passages;
    unsigned missing_chunks : 14;  // of 16 bytes
    unsigned arrived : 9, count : 9;
};
static_assert(sizeof(Gate) == sizeof(uint64_t), "a gate is as large as a device's");

inline void pass_if_complete(Gate& gate) {
    if (gate.arrived < gate.count || gate.missing_chunks != 0) return;
    gate.arrived = 0;
    gate.passages++;
}
inline void make_gate(Gate& gate, unsigned arrivals) {
    gate = Gate();
    gate.count = arrivals;
    if (gate.count != arrivals) fail("a gate waits for fewer threads than that");
}
inline void arrive(Gate& gate) {
    if (gate.arrived == gate.count) fail("more threads arrive at a gate than it waits for");
    gate.arrived++;
    pass_if_complete(gate);
}
inline void arrive_expecting(Gate& gate, unsigned bytes) {
    gate.missing_chunks += bytes / 16;
    arrive(gate);
}
inline void copied(Gate& gate, unsigned bytes) {
    gate.missing_chunks -= bytes / 16;
    pass_if_complete(gate);
}
inline void wait_for_gate(const Gate& gate, unsigned parity) {
    while (gate.passages % 2 == parity) wait_for(gate.passages);
}

inline void pass_by(unsigned barrier, unsigned threads) {
    Named& named = block->named[barrier];
    if (++named.arrived < threads) return;
    named.arrived = 0;
    named.generation++;
}
inline void meet(unsigned barrier, unsigned threads) {
    const unsigned before = block->named[barrier].generation;
    pass_by(barrier, threads);
    if (block->named[barrier].generation == before) wait_for(block->named[barrier].generation);
}

// Kernels run one after the other here, so there is nothing to wait for.
inline void await_previous() { block->current->has_waited = true; }

inline void* dynamic_shared() { return block->shared; }

}  // namespace emulator

#define threadIdx (emulator::Index{emulator::block->current->index, 0, 0})
#define blockIdx (emulator::block->index)
#define blockDim (emulator::Index{emulator::block->threads, 1, 1})
#define gridDim (emulator::block->grid)

inline void __syncthreads(int line = __builtin_LINE()) { emulator::block_barrier(0, line); }
inline int __syncthreads_or(int vote, int line = __builtin_LINE()) {
    return emulator::block_barrier(vote, line) != 0;
}
inline int __syncthreads_count(int vote, int line = __builtin_LINE()) {
    return emulator::block_barrier(vote, line);
}
inline void __syncwarp() { emulator::warp_barrier(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return emulator::exchange(value, emulator::lane() ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned from) {
    return emulator::exchange(value, from);
}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
    unsigned long long found = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (value < found &&
           !__atomic_compare_exchange_n(at, &found, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return found;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
using std::max;
using std::min;
