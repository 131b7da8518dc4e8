// Runs kernels on the CPU: each GPU thread is a fiber, each running block has one operating-system thread, and a warp
// has WARP (32 or 64) lanes.
//
// Execution changes from one fiber to another at barriers and shuffles; between them a thread runs alone. With a seed,
// the order in which the fibers of a block run is random, and a warp or a thread is held back for as long as any other
// can continue, so that a missing barrier shows as a wrong result. A barrier that some threads never reach ends the
// launch, which returns the error. Dynamic shared memory is poisoned with NaN before every block.
//
// Not modelled: caches and the memory model, races between two barriers inside one turn, copies that really overlap,
// the rounding of a device's approximate functions.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

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

// Pushes the callee-saved registers, stores the stack pointer, and continues from another one.
extern "C" void emulator_switch(void** saved_stack, void* next_stack);
asm(R"(
.text
.p2align 4
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

namespace emulator {

struct Index {
    unsigned x, y, z;
};

struct Warp {
    // Two, used in turn, so that a lane may leave its next value while others still read the last ones.
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

struct Launch {
    void (*kernel)(const void*);
    const void* arguments;
    Index grid;
    unsigned threads;
    size_t shared_bytes;
    uint64_t seed;
    // Whether the kernel may begin before the one ahead of it has ended, so that all of its threads must wait for that
    // one.
    bool must_wait;
    // Whether a block of the launch has failed.
    std::atomic<bool>* failed;
};

constexpr size_t FIBER_STACK_BYTES = size_t(64) << 10;

// Memory for the fibers' stacks, which a thread keeps between launches. It is not cleared: most of it is never touched.
struct Stacks {
    std::unique_ptr<char[]> memory;
    size_t bytes = 0;

    char* reserve(size_t wanted) {
        if (bytes < wanted) {
            memory.reset(new char[wanted]);
            bytes = wanted;
        }
        return memory.get();
    }
};
inline thread_local Stacks stacks_of_thread;

// A barrier of some of a block's threads.
struct Named {
    unsigned arrived = 0, generation = 0;
};

struct Block {
    const Launch* launch = nullptr;
    Index index{};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<float4> shared;
    char* stacks = nullptr;
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
inline void rest() {
    if (block->launch->failed->load()) fail("waits for a block that failed");
    std::this_thread::yield();
}

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
    uint16_t missing_chunks;  // of 16 bytes
    uint8_t arrived, count;
};

inline void pass_if_complete(Gate& gate) {
    if (gate.arrived < gate.count || gate.missing_chunks != 0) return;
    gate.arrived = 0;
    gate.passages++;
}
inline void make_gate(Gate& gate, unsigned arrivals) {
    gate = {0, 0, 0, static_cast<uint8_t>(arrivals)};
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

inline void* dynamic_shared() { return block->shared.data(); }

inline void run_fiber() {
    Block* here = block;
    here->launch->kernel(here->launch->arguments);
    Fiber& fiber = *here->current;
    if (here->launch->must_wait && !fiber.has_waited) {
        fail("a thread ends that has not waited for the kernel before");
    }
    fiber.done = true;
    // A thread that has ended no longer counts at barriers.
    Warp& mine = here->warps[fiber.index / WARP];
    if (--mine.live == mine.arrived && mine.arrived > 0) pass_warp(mine);
    if (--here->live == here->arrived && here->arrived > 0) pass_block();
    emulator_switch(&fiber.stack, here->scheduler_stack);
    std::abort();  // The scheduler never resumes a fiber that has ended.
}

inline void prepare(Block& here) {
    const unsigned threads = here.launch->threads;
    here.fibers.assign(threads, {});
    here.warps.assign((threads + WARP - 1) / WARP, {});
    here.live = threads;
    here.arrived = here.generation = 0;
    here.votes = 0;
    std::fill(std::begin(here.named), std::end(here.named), Named{});
    here.failure = nullptr;
    std::fill(here.shared.begin(), here.shared.end(), float4{NAN, NAN, NAN, NAN});
    for (unsigned index = 0; index < threads; index++) {
        Fiber& fiber = here.fibers[index];
        fiber.index = index;
        here.warps[index / WARP].live++;
        const auto top =
            reinterpret_cast<uintptr_t>(here.stacks) + (index + 1) * FIBER_STACK_BYTES;
        void** stack = reinterpret_cast<void**>(top & ~uintptr_t(15));
        // The frame that emulator_switch returns through: six registers, then the entry; one word
        // above it keeps the stack aligned as after a call.
        *--stack = nullptr;
        *--stack = reinterpret_cast<void*>(&run_fiber);
        for (int saved = 0; saved < 6; saved++) *--stack = nullptr;
        fiber.stack = stack;
    }
}

// SplitMix64 (Steele, Lea and Flood, 2014): orders are drawn very often, so the generator must be fast.
struct Random {
    uint64_t state;

    uint64_t next() {
        uint64_t mixed = state += 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
        return mixed ^ (mixed >> 31);
    }
    // A number below `bound`, which is far below 2^32.
    unsigned below(unsigned bound) { return (next() >> 32) * bound >> 32; }
    void shuffle(std::vector<unsigned>& order) {
        for (unsigned left = order.size(); left > 1; left--) {
            std::swap(order[left - 1], order[below(left)]);
        }
    }
};

// The threads that run only when no other can continue: without a barrier between them, the others are then as far
// ahead as possible.
struct HeldBack {
    unsigned first = 0, end = 0;

    static HeldBack random_warp_or_thread(unsigned threads, Random& random) {
        const unsigned thread = random.below(threads), warp = thread / WARP * WARP;
        if (random.below(2)) return {thread, thread + 1};
        return {warp, warp + WARP};
    }
    bool is_none() const { return first == end; }
    bool holds(unsigned index) const { return index >= first && index < end; }
};

// Runs the block that `here.index` names, until its threads end or an error occurs: then its fibers are abandoned, and
// nothing of them outlives the block.
inline void run_block(Block& here) {
    block = &here;
    prepare(here);
    const uint64_t place = here.index.x + 7919u * here.index.y + 104729u * here.index.z;
    Random random{here.launch->seed + place};
    std::vector<unsigned> order(here.fibers.size());
    for (unsigned index = 0; index < order.size(); index++) order[index] = index;
    HeldBack held;
    while (here.live > 0) {
        if (here.launch->seed != 0) random.shuffle(order);
        bool progress = false;
        for (unsigned index : order) {
            Fiber& fiber = here.fibers[index];
            if (fiber.done || held.holds(index)) continue;
            if (fiber.waits_for && *fiber.waits_for == fiber.waits_since) continue;
            progress = true;
            here.current = &fiber;
            emulator_switch(&here.scheduler_stack, fiber.stack);
            if (here.failure) return;
        }
        if (!progress && held.is_none()) {
            here.failure = "some threads wait at a barrier that others never reach";
            return;
        }
        if (!progress) {
            held = {};
        } else if (here.launch->seed != 0 && held.is_none()) {
            held = HeldBack::random_warp_or_thread(here.fibers.size(), random);
        }
    }
}

// The error of the first block that failed, if any.
inline std::string run(const Launch& launch, unsigned workers) {
    const uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    std::atomic<uint64_t> next{0};
    std::mutex failing;
    std::string failure;
    auto work = [&] {
        Block here;
        here.launch = &launch;
        here.shared.resize(launch.shared_bytes / sizeof(float4) + 1);
        here.stacks = stacks_of_thread.reserve((launch.threads + 1) * FIBER_STACK_BYTES);
        for (uint64_t place; (place = next++) < blocks;) {
            here.index.x = place % launch.grid.x;
            here.index.y = place / launch.grid.x % launch.grid.y;
            here.index.z = place / launch.grid.x / launch.grid.y;
            run_block(here);
            if (!here.failure) continue;
            next = blocks;
            std::lock_guard<std::mutex> lock(failing);
            if (!failure.empty()) continue;
            failure = "block (" + std::to_string(here.index.x) + ", " +
                      std::to_string(here.index.y) + ", " + std::to_string(here.index.z) +
                      "): " + here.failure;
            launch.failed->store(true);
        }
    };
    std::vector<std::thread> others;
    for (unsigned other = 1; other < std::min<uint64_t>(workers, blocks); other++) {
        others.emplace_back(work);
    }
    work();
    for (std::thread& other : others) other.join();
    return failure;
}

}  // namespace emulator

// The entry of a module's library. Returns null, or the error, which stays valid until this thread's next launch.
extern "C" EXPORTED inline const char* emulator_launch(
    void (*kernel)(const void*), const void* arguments, const unsigned* grid, unsigned threads,
    size_t shared_bytes, uint64_t seed, unsigned workers, bool must_wait) {
    static thread_local std::string failure;
    std::atomic<bool> failed{false};
    const emulator::Index size{grid[0], grid[1], grid[2]};
    const emulator::Launch launch{kernel, arguments, size, threads, shared_bytes, seed, must_wait, &failed};
    failure = emulator::run(launch, workers);
    return failure.empty() ? nullptr : failure.c_str();
}

#define threadIdx (emulator::Index{emulator::block->current->index, 0, 0})
#define blockIdx (emulator::block->index)
#define blockDim (emulator::Index{emulator::block->launch->threads, 1, 1})
#define gridDim (emulator::block->launch->grid)

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
    return std::atomic_ref<unsigned>(*at).fetch_add(value);
}
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
    std::atomic_ref<unsigned long long> place(*at);
    unsigned long long found = place.load();
    while (value < found && !place.compare_exchange_weak(found, value)) {
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
