// Rotary positions (RoFormer, Su et al., 2021): pairs of elements, half a head apart, turned by the angles of their
// row's position; and their gradients, which are first added over the heads of queries that share keys and values.
//
// Cosines and sines come from a table that the host has computed, so that they are the same on every device.
//
// Floor: 4 bytes an element of bf16 forward; backward, the bytes of three gradients of h heads, and of the results. A thread
// has neighbouring pairs, a load of 16 bytes from either half, of several heads, which share their angles.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 128;
// Neighbouring pairs of a head that a thread has.
constexpr u32 PAIRS = 16 / sizeof(activation);
// Heads that a thread loads before it turns any.
constexpr u32 IN_FLIGHT = 4;

struct Rotary {
    activation* rows;    // [b t, (h + g) p], or [b t, 3 h p] backward, rows row_stride apart
    const float* table;  // [limit, p]: the cosines of p / 2 angles, then their sines
    const u32* starts;   // [b t], or null: the position of the first token of the row's document
    const u32* past;     // [b], or null: the number of positions of each sample before its rows
    u64 row_stride;
    u64 row_count;  // b t
    u32 positions;  // t
    u32 limit;
    u32 half;  // p / 2
    u32 heads;  // h, of queries
    u32 shared_heads;  // g, of keys and values
    u32 unused;
};

// Neighbouring pairs: the elements of the first half, and those of the second.
struct Halves {
    Pack<PAIRS> first, second;
};
// Their cosines and sines.
struct Angles {
    Pack<PAIRS> cosines, sines;
};
DEVICE Halves turned(const Halves& x, const Angles& by) {
    Halves y;
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        y.first.at[i] = fmaf(-x.second.at[i], by.sines.at[i], x.first.at[i] * by.cosines.at[i]);
        y.second.at[i] = fmaf(x.first.at[i], by.sines.at[i], x.second.at[i] * by.cosines.at[i]);
    }
    return y;
}

// The threads that share the pairs of a row.
DEVICE u32 parts_of_row(const Rotary& arguments) { return (arguments.half - 1) / PAIRS + 1; }

// Where the pairs of a thread lie: from `pair` on in the heads of `row`, of which `count` are left there.
template <Access ACCESS>
struct Place {
    const Rotary& arguments;
    u64 row;
    u32 pair, count;

    // A thread for each PAIRS pairs of a row.
    __device__ __forceinline__ Place(const Rotary& given, u64 index) : arguments(given) {
        const u32 parts = parts_of_row(given);
        row = index / parts;
        pair = static_cast<u32>(index % parts) * PAIRS;
        count = given.half - pair;
    }
    __device__ __forceinline__ activation* head(u32 index) const {
        return arguments.rows + row * arguments.row_stride + static_cast<u64>(index) * 2 * arguments.half + pair;
    }
    __device__ __forceinline__ Halves read(u32 index) const {
        const activation* const at = head(index);
        return {load<PAIRS, ACCESS>(at, count), load<PAIRS, ACCESS>(at + arguments.half, count)};
    }
    __device__ __forceinline__ void write(u32 index, const Halves& x) const {
        activation* const at = head(index);
        store<PAIRS, ACCESS>(at, x.first, count);
        store<PAIRS, ACCESS>(at + arguments.half, x.second, count);
    }
    __device__ __forceinline__ Angles angles() const {
        u32 position = static_cast<u32>(row % arguments.positions);
        if (arguments.past) position += arguments.past[row / arguments.positions];
        if (arguments.starts) position -= min(position, arguments.starts[row]);
        const u64 entry = static_cast<u64>(min(position, arguments.limit - 1)) * 2 * arguments.half + pair;
        const float* const at = arguments.table + entry;
        return {load<PAIRS, ACCESS>(at, count), load<PAIRS, ACCESS>(at + arguments.half, count)};
    }
    // Turns at most IN_FLIGHT of the heads before `end`, from `first` on.
    __device__ __forceinline__ void turn(u32 first, u32 end, const Angles& by) const {
        Halves x[IN_FLIGHT];
        // Past the end the last head is loaded again and not stored: no load waits for a condition.
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) x[i] = read(min(first + i, end - 1));
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            if (first + i < end) write(first + i, turned(x[i], by));
        }
    }
    // The sum over the heads of `group` queries, from `first` on.
    __device__ __forceinline__ Halves sum(u32 first, u32 group) const {
        Halves sum = read(first);
        for (u32 other = 1; other < group; other += IN_FLIGHT) {
            Halves terms[IN_FLIGHT];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) terms[i] = read(first + min(other + i, group - 1));
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) {
                if (other + i >= group) break;
#pragma unroll
                for (u32 j = 0; j < PAIRS; j++) {
                    sum.first.at[j] += terms[i].first.at[j];
                    sum.second.at[j] += terms[i].second.at[j];
                }
            }
        }
        return sum;
    }
};

// A thread for some pairs of IN_FLIGHT heads of a row.
template <Access ACCESS>
DEVICE void forward(const Rotary& arguments) {
    const u32 heads = arguments.heads + arguments.shared_heads;
    const u32 groups = (heads - 1) / IN_FLIGHT + 1;
    const u32 parts = parts_of_row(arguments);
    const u64 index = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    const u64 of_row = index / parts;
    const Place<ACCESS> place(arguments, of_row / groups * parts + index % parts);
    if (place.row >= arguments.row_count) return;
    place.turn(static_cast<u32>(of_row % groups) * IN_FLIGHT, heads, place.angles());
}

// A row's gradients of queries are turned by a thread for IN_FLIGHT heads; those of keys and values are one thread's, which writes
// sums only over values that have been added already. No other thread has these pairs.
template <Access ACCESS>
DEVICE void backward(const Rotary& arguments) {
    const u32 heads = arguments.heads, shared_heads = arguments.shared_heads, group = heads / shared_heads;
    const u32 parts = parts_of_row(arguments);
    const u32 blocks = static_cast<u32>((arguments.row_count * parts - 1) / THREADS + 1);
    const Place<ACCESS> place(arguments, static_cast<u64>(blockIdx.x % blocks) * THREADS + threadIdx.x);
    if (place.row >= arguments.row_count) return;
    Angles back = place.angles();
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) back.sines.at[i] = -back.sines.at[i];
    // The longest task is begun first.
    const u32 task = blockIdx.x / blocks;
    if (task > 0) return place.turn((task - 1) * IN_FLIGHT, heads, back);
    for (u32 head = 0; head < shared_heads; head++) {
        place.write(heads + head, turned(place.sum(heads + head * group, group), back));
    }
    for (u32 head = 0; head < shared_heads; head++) {
        place.write(heads + shared_heads + head, place.sum(2 * heads + head * group, group));
    }
}

KERNEL(rotary_forward_wide, THREADS, 1, Rotary) { forward<Access::WIDE>(arguments); }
KERNEL(rotary_forward_single, THREADS, 1, Rotary) { forward<Access::SINGLE>(arguments); }
KERNEL(rotary_backward_wide, THREADS, 1, Rotary) { backward<Access::WIDE>(arguments); }
KERNEL(rotary_backward_single, THREADS, 1, Rotary) { backward<Access::SINGLE>(arguments); }
