// Runs the blocks of a launch on the CPU: fibers, their order, and the threads that blocks run on. Compiled once for each
// width of a warp, and linked to all kernels.
#include "emulator.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// Pushes the callee-saved registers, stores the stack pointer, and continues from another one.
asm(R"(
.text
.p2align 4
.globl emulator_switch
.hidden emulator_switch
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
static thread_local Stacks stacks_of_thread;

// A block, and the memory that it keeps for the next one of its launch.
struct RunningBlock : Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> all_warps;
    std::vector<float4> all_shared;
    char* stacks = nullptr;

    explicit RunningBlock(const Launch& its) {
        launch = &its;
        grid = its.grid;
        threads = its.threads;
        fibers.resize(threads);
        all_warps.resize((threads + WARP - 1) / WARP);
        all_shared.resize(its.shared_bytes / sizeof(float4) + 1);
        warps = all_warps.data();
        shared = all_shared.data();
        stacks = stacks_of_thread.reserve((threads + 1) * FIBER_STACK_BYTES);
    }
};

void rest() {
    if (block->launch->failed->load()) fail("waits for a block that failed");
    std::this_thread::yield();
}

static void run_fiber() {
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

static void prepare(RunningBlock& here) {
    std::fill(here.all_warps.begin(), here.all_warps.end(), Warp{});
    here.live = here.threads;
    here.arrived = here.generation = 0;
    here.votes = 0;
    std::fill(std::begin(here.named), std::end(here.named), Named{});
    here.failure = nullptr;
    std::fill(here.all_shared.begin(), here.all_shared.end(), float4{NAN, NAN, NAN, NAN});
    for (unsigned index = 0; index < here.threads; index++) {
        Fiber& fiber = here.fibers[index] = {};
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
static void run_block(RunningBlock& here) {
    block = &here;
    prepare(here);
    const uint64_t place = here.index.x + 7919u * here.index.y + 104729u * here.index.z;
    Random random{here.launch->seed + place};
    std::vector<unsigned> order(here.threads);
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
            held = HeldBack::random_warp_or_thread(here.threads, random);
        }
    }
}

// The error of the first block that failed, if any.
static std::string run(const Launch& launch, unsigned workers) {
    const uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    std::atomic<uint64_t> next{0};
    std::mutex failing;
    std::string failure;
    auto work = [&] {
        RunningBlock here(launch);
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
extern "C" EXPORTED const char* emulator_launch(
    void (*kernel)(const void*), const void* arguments, const unsigned* grid, unsigned threads,
    size_t shared_bytes, uint64_t seed, unsigned workers, bool must_wait) {
    static thread_local std::string failure;
    std::atomic<bool> failed{false};
    const emulator::Index size{grid[0], grid[1], grid[2]};
    const emulator::Launch launch{kernel, arguments, size, threads, shared_bytes, seed, must_wait, &failed};
    failure = emulator::run(launch, workers);
    return failure.empty() ? nullptr : failure.c_str();
}

