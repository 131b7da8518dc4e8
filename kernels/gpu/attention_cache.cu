// Writes new keys and values into the cache that attention reads in generation.
//
// Floor: 4 bytes an element of bf16.
#include "dialect.h"

struct AppendToCache {
    activation* cache;       // [b, capacity, width]
    const activation* rows;  // [b t, width]
    const u32* past;         // [b]
    u64 row_stride;
    u32 positions;  // t
    u32 capacity;
    u64 width;
};

// A block for each new row.
KERNEL(append_to_cache, 128, 1, AppendToCache) {
    const u32 sample = blockIdx.x / arguments.positions;
    const u32 position = arguments.past[sample] + blockIdx.x % arguments.positions;
    if (position >= arguments.capacity) return;
    const activation* const from = arguments.rows + blockIdx.x * arguments.row_stride;
    activation* const to =
        arguments.cache +
        (static_cast<u64>(sample) * arguments.capacity + position) * arguments.width;
    for (u64 column = threadIdx.x; column < arguments.width; column += 128) {
        to[column] = from[column];
    }
}
