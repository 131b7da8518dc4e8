// Rotary positions (RoFormer, Su et al., 2021): pairs of elements, half a head apart, turned by the angles of their
// row's position; and their gradients, which are first added over the heads of queries that share keys and values.
//
// Cosines and sines come from a table that the host has computed, so that they are the same on every device.
//
// Floor: 4 bytes an element of bf16 forward; backward, the bytes of three gradients of h heads, and of the results.
#include "dialect.h"

constexpr u32 THREADS = 128;

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

// A pair's cosine and sine.
struct Angle {
    float cosine, sine;
};
DEVICE Angle angle_of(const Rotary& arguments, u64 row, u32 pair) {
    u32 position = static_cast<u32>(row % arguments.positions);
    if (arguments.past) position += arguments.past[row / arguments.positions];
    if (arguments.starts) position -= min(position, arguments.starts[row]);
    const u64 entry = static_cast<u64>(min(position, arguments.limit - 1)) * 2 * arguments.half + pair;
    return {arguments.table[entry], arguments.table[entry + arguments.half]};
}

struct Pair {
    float first, second;
};
DEVICE Pair turned(Pair x, Angle by) {
    return {fmaf(-x.second, by.sine, x.first * by.cosine), fmaf(x.first, by.sine, x.second * by.cosine)};
}
DEVICE Pair read_pair(const activation* at, u32 half) { return {widen(at[0]), widen(at[half])}; }
DEVICE void write_pair(activation* at, u32 half, Pair x) {
    narrow(at[0], x.first);
    narrow(at[half], x.second);
}

// A thread for each pair of each head of each row.
KERNEL(rotary_forward, THREADS, 1, Rotary) {
    const u32 half = arguments.half, heads = arguments.heads + arguments.shared_heads;
    const u64 index = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    const u32 pair = static_cast<u32>(index % half);
    const u32 head = static_cast<u32>(index / half % heads);
    const u64 row = index / half / heads;
    if (row >= arguments.row_count) return;
    activation* const at = arguments.rows + row * arguments.row_stride + head * 2 * half + pair;
    write_pair(at, half, turned(read_pair(at, half), angle_of(arguments, row, pair)));
}

// A thread for a pair of every head of a row: it writes sums only over values that have been added already, and no
// other thread has these columns.
KERNEL(rotary_backward, THREADS, 1, Rotary) {
    const u32 half = arguments.half, width = 2 * half;
    const u32 heads = arguments.heads, shared_heads = arguments.shared_heads, group = heads / shared_heads;
    const u64 index = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    const u32 pair = static_cast<u32>(index % half);
    const u64 row = index / half;
    if (row >= arguments.row_count) return;
    activation* const at = arguments.rows + row * arguments.row_stride + pair;
    Angle back = angle_of(arguments, row, pair);
    back.sine = -back.sine;
    for (u32 head = 0; head < heads; head++) {
        activation* const of_head = at + head * width;
        write_pair(of_head, half, turned(read_pair(of_head, half), back));
    }
    for (u32 part = 0; part < 2; part++) {
        for (u32 head = 0; head < shared_heads; head++) {
            const activation* const from = at + ((1 + part) * heads + head * group) * width;
            Pair sum = read_pair(from, half);
            for (u32 other = 1; other < group; other++) {
                const Pair term = read_pair(from + other * width, half);
                sum.first += term.first;
                sum.second += term.second;
            }
            if (part == 0) sum = turned(sum, back);
            write_pair(at + (heads + part * shared_heads + head) * width, half, sum);
        }
    }
}
