// Embedding: rows of a table picked by tokens, and the sums of their gradients.
//
// Floor: forward, rows read and written once, 8 bytes an element. Backward, dout read once, and the rows of the table
// that some token names read and written: 4 to 12 bytes an element.
//
// The gradient of a row of the table is a sum over the rows that hold its token, in order. So the rows are first
// grouped by token (with integers only, so that the method cannot change the result), then a thread sums four columns
// of a group: no atomics, and each element of the table is written by one thread.
#include "dialect.h"
#include "pack.h"

// A token outside the vocabulary is reported and treated as token 0.
DEVICE u32 checked(u32 token, u32 row, u32 vocab_size, Fault* fault) {
    if (token < vocab_size) return token;
    if (fault) report_token(fault, row, token);
    return 0;
}

struct EmbeddingForward {
    float* out;           // [rows, d], rows out_stride apart
    const float* table;   // [v, d], rows table_stride apart
    const u32* tokens;    // [rows]
    Fault* fault;         // receives tokens outside the vocabulary
    u64 out_stride;
    u64 table_stride;
    u32 vocab_size;  // v
    u32 width;       // d
    u32 adds;        // whether rows are added to out, or replace it
    u32 padding;
};

constexpr u32 COPY_THREADS = 128;
constexpr u32 COLUMNS = 4;

template <Access ACCESS>
DEVICE void copy_row(const EmbeddingForward& arguments) {
    const u32 row = blockIdx.x;
    const u32 width = arguments.width;
    release_next();
    await_previous();
    Fault* const fault = threadIdx.x == 0 ? arguments.fault : nullptr;
    const u32 token = checked(arguments.tokens[row], row, arguments.vocab_size, fault);
    const float* const from = arguments.table + token * arguments.table_stride;
    float* const out = arguments.out + row * arguments.out_stride;
#pragma unroll 4
    for (u32 column = threadIdx.x * COLUMNS; column < width; column += COPY_THREADS * COLUMNS) {
        const u32 count = width - column;
        Pack<COLUMNS> pack = load<COLUMNS, ACCESS>(from + column, count);
        if (arguments.adds) {
            const Pack<COLUMNS> before = load<COLUMNS, ACCESS>(out + column, count);
#pragma unroll
            for (u32 i = 0; i < COLUMNS; i++) pack.at[i] += before.at[i];
        }
        store<COLUMNS, ACCESS>(out + column, pack, count);
    }
}

// A block for each row.
KERNEL(embedding_forward_wide, COPY_THREADS, 12, EmbeddingForward) {
    copy_row<Access::WIDE>(arguments);
}
KERNEL(embedding_forward_single, COPY_THREADS, 12, EmbeddingForward) {
    copy_row<Access::SINGLE>(arguments);
}

// --- grouping rows by token -------------------------------------------------------------------------

// A token in the upper half, a row that holds it in the lower.
typedef u64 TokenRow;
DEVICE TokenRow token_row(u32 token, u32 row) { return static_cast<u64>(token) << 32 | row; }
DEVICE u32 token_of(TokenRow entry) { return static_cast<u32>(entry >> 32); }
DEVICE u32 row_of(TokenRow entry) { return static_cast<u32>(entry); }

struct EmbeddingGroup {
    TokenRow* grouped;  // [rows], ordered by token, then by row
    const u32* tokens;  // [rows]
    Fault* fault;       // receives tokens outside the vocabulary
    u32 rows;
    u32 vocab_size;        // v
    u32 tokens_per_block;  // at most GROUP_THREADS * GROUP_OWN
    u32 padding;
};

constexpr u32 GROUP_THREADS = 256;
// Tokens of the vocabulary that a thread owns.
constexpr u32 GROUP_OWN = 4;
// Rows that a thread, and a block, reads at a time: the block's are a tile of rows.
constexpr u32 GROUP_ROWS = 16;
constexpr u32 TILE_ROWS = GROUP_THREADS * GROUP_ROWS;

// The sum of `x` over the threads before this one; `total` gets that over all threads. `of_warps` is shared memory of
// one word a warp; the block must pass a barrier before it is used again.
DEVICE u32 sum_before(u32 x, u32* of_warps, u32& total) {
    const u32 lane = threadIdx.x % WARP;
    u32 sum = x;
#pragma unroll
    for (u32 distance = 1; distance < WARP; distance *= 2) {
        const u32 from = lane >= distance ? lane - distance : lane;
        const u32 other = __float_as_uint(shuffle(__uint_as_float(sum), from));
        if (lane >= distance) sum += other;
    }
    if (lane == WARP - 1) of_warps[threadIdx.x / WARP] = sum;
    __syncthreads();
    u32 before = sum - x;
    total = 0;
#pragma unroll
    for (u32 warp = 0; warp < GROUP_THREADS / WARP; warp++) {
        if (warp < threadIdx.x / WARP) before += of_warps[warp];
        total += of_warps[warp];
    }
    return before;
}

// The shared memory of a block for one tile of rows.
struct RowTile {
    // The tile's tokens; one word is left out after every GROUP_ROWS, so that neighbouring threads read
    // neighbouring banks.
    u32 tokens[TILE_ROWS + GROUP_THREADS];
    // The rows of the block's tokens, in order: the token, counted from the block's first, in the upper half, and the
    // row, counted from the tile's first.
    u32 found[TILE_ROWS];
    u32 of_warps[GROUP_THREADS / WARP];
};

// Lists the rows of a tile whose tokens are the block's; returns how many, and adds to `below` how many of the thread's
// rows hold tokens of earlier blocks.
DEVICE u32 find_own(RowTile& tile, const EmbeddingGroup& arguments, u32 first_row, u32 first_token,
                    u32 own_tokens, Fault* fault, u32& below) {
    u32 tokens[GROUP_ROWS];
#pragma unroll
    for (u32 i = 0; i < GROUP_ROWS; i++) {
        const u32 row = first_row + threadIdx.x + i * GROUP_THREADS;
        tokens[i] = arguments.tokens[min(row, arguments.rows - 1)];
    }
#pragma unroll
    for (u32 i = 0; i < GROUP_ROWS; i++) {
        const u32 place = threadIdx.x + i * GROUP_THREADS;
        const u32 token = checked(tokens[i], first_row + place, arguments.vocab_size, fault);
        // A place past the last row has no token.
        tile.tokens[place + place / GROUP_ROWS] =
            first_row + place < arguments.rows ? token : 0xffffffffu;
    }
    __syncthreads();
    u32 own = 0;
#pragma unroll
    for (u32 i = 0; i < GROUP_ROWS; i++) {
        const u32 token = tile.tokens[threadIdx.x * (GROUP_ROWS + 1) + i];
        own += token - first_token < own_tokens;
        below += token < first_token;
    }
    u32 found;
    u32 place = sum_before(own, tile.of_warps, found);
#pragma unroll
    for (u32 i = 0; i < GROUP_ROWS; i++) {
        const u32 token = tile.tokens[threadIdx.x * (GROUP_ROWS + 1) + i] - first_token;
        if (token < own_tokens) tile.found[place++] = token << 16 | (threadIdx.x * GROUP_ROWS + i);
    }
    __syncthreads();
    return found;
}

// Each block groups the rows that hold its tokens: it reads all rows twice, once to count and once to place them. A
// thread owns tokens and walks the block's list, so rows keep their order without sorting.
KERNEL(embedding_group, GROUP_THREADS, 2, EmbeddingGroup) {
    __shared__ RowTile tile;
    const u32 first_token = blockIdx.x * arguments.tokens_per_block;
    const u32 own_tokens = min(arguments.tokens_per_block, arguments.vocab_size - first_token);
    // The thread's tokens are consecutive, so its groups are too.
    const u32 tokens_per_thread = (arguments.tokens_per_block + GROUP_THREADS - 1) / GROUP_THREADS;
    const u32 thread_token = threadIdx.x * tokens_per_thread;

    u32 next[GROUP_OWN];
#pragma unroll
    for (u32 own = 0; own < GROUP_OWN; own++) next[own] = 0;
    u32 below = 0;
    for (u32 row = 0; row < arguments.rows; row += TILE_ROWS) {
        Fault* const fault = blockIdx.x == 0 ? arguments.fault : nullptr;
        const u32 found = find_own(tile, arguments, row, first_token, own_tokens, fault, below);
        if (thread_token >= own_tokens) continue;
#pragma unroll 4
        for (u32 i = 0; i < found; i++) {
            const u32 token = (tile.found[i] >> 16) - thread_token;
#pragma unroll
            for (u32 own = 0; own < GROUP_OWN; own++) {
                next[own] += token == own && own < tokens_per_thread;
            }
        }
    }

    // Counts become places: after the rows of the blocks before, and of the threads before.
    u32 place = 0;
#pragma unroll
    for (u32 own = 0; own < GROUP_OWN; own++) place += next[own];
    u32 total;
    place = sum_before(place, tile.of_warps, total);
    __syncthreads();
    sum_before(below, tile.of_warps, total);
    place += total;
#pragma unroll
    for (u32 own = 0; own < GROUP_OWN; own++) {
        const u32 count = next[own];
        next[own] = place;
        place += count;
    }

    for (u32 row = 0; row < arguments.rows; row += TILE_ROWS) {
        const u32 found = find_own(tile, arguments, row, first_token, own_tokens, nullptr, below);
        if (thread_token >= own_tokens) continue;
#pragma unroll 4
        for (u32 i = 0; i < found; i++) {
            const u32 token = (tile.found[i] >> 16) - thread_token;
#pragma unroll
            for (u32 own = 0; own < GROUP_OWN; own++) {
                if (token == own && own < tokens_per_thread) {
                    const u32 found_row = row + (tile.found[i] & 0xffffu);
                    arguments.grouped[next[own]++] =
                        token_row(first_token + thread_token + own, found_row);
                }
            }
        }
    }
}

// --- sums of the groups -------------------------------------------------------------------------------

struct EmbeddingBackwardAdd {
    float* lane_table;        // [v, d], rows lane_stride apart; added to
    const float* dout;        // [rows, d], rows dout_stride apart
    const TokenRow* grouped;  // [rows], ordered by token, then by row
    u64 lane_stride;
    u64 dout_stride;
    u32 rows;
    u32 rows_per_grain;
    u32 width;  // d
    u32 column_tiles;
};

constexpr u32 SUM_THREADS = 64;
// Places in the order of tokens; a block sums the groups that begin at its places.
constexpr u32 SUM_PLACES = 8;
// Rows of a group that a thread has in flight: first a few, as most tokens are rare; then many, as a frequent token is
// a long chain of additions, which must not wait for memory too.
constexpr u32 SUM_FIRST = 2;
constexpr u32 SUM_BATCH = 8;

// The sums of COLUMNS columns over a group of rows.
template <Access ACCESS>
struct GroupSum {
    const EmbeddingBackwardAdd& arguments;
    u32 token;
    u32 column;
    u32 first_row;
    Pack<COLUMNS> lane;
    Pack<COLUMNS> sum;  // of the grain so far
    u64 grain_end;      // the row after the grain's last

    // Adds up to COUNT rows from place `first`; returns whether the group may have more.
    template <u32 COUNT>
    __device__ __forceinline__ bool add(u32 first) {
        u32 rows[COUNT];
        Pack<COLUMNS> x[COUNT];
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const TokenRow entry = arguments.grouped[min(first + i, arguments.rows - 1)];
            const bool inside = first + i < arguments.rows && token_of(entry) == token;
            // Past the group's end the load reads a row that is in the cache already.
            rows[i] = inside ? row_of(entry) : first_row;
            found += inside;
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const float* const row = arguments.dout + rows[i] * arguments.dout_stride;
            x[i] = load<COLUMNS, ACCESS>(row + column, arguments.width - column);
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const bool inside = i < found;
            if (inside && rows[i] >= grain_end) {
                end_grain();
                enter_grain(rows[i]);
            }
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) sum.at[c] = inside ? sum.at[c] + x[i].at[c] : sum.at[c];
        }
        return found == COUNT;
    }

    __device__ __forceinline__ void end_grain() {
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            lane.at[c] += sum.at[c];
            sum.at[c] = 0.0f;
        }
    }

    __device__ __forceinline__ void enter_grain(u32 row) {
        grain_end = row / arguments.rows_per_grain + 1;
        grain_end *= arguments.rows_per_grain;
    }
};

// A thread has COLUMNS columns of the groups that begin at a block's places.
template <Access ACCESS>
DEVICE void add_groups(const EmbeddingBackwardAdd& arguments) {
    const u32 column = (blockIdx.x % arguments.column_tiles * SUM_THREADS + threadIdx.x) * COLUMNS;
    if (column >= arguments.width) return;
    const u32 count = arguments.width - column;
    const u32 first = blockIdx.x / arguments.column_tiles * SUM_PLACES;
    const u32 last = min(first + SUM_PLACES, arguments.rows);
    for (u32 place = first; place < last; place++) {
        const TokenRow entry = arguments.grouped[place];
        const u32 token = token_of(entry);
        if (place > 0 && token_of(arguments.grouped[place - 1]) == token) continue;
        float* const lane = arguments.lane_table + token * arguments.lane_stride + column;
        GroupSum<ACCESS> group{arguments, token, column, row_of(entry), load<COLUMNS, ACCESS>(lane, count), {}, 0};
        group.enter_grain(row_of(entry));
        u32 next = place + SUM_FIRST;
        bool more = group.template add<SUM_FIRST>(place);
        for (; more; next += SUM_BATCH) more = group.template add<SUM_BATCH>(next);
        group.end_grain();
        store<COLUMNS, ACCESS>(lane, group.lane, count);
    }
}

// A block for SUM_PLACES places and SUM_THREADS packs of columns.
KERNEL(embedding_backward_add_wide, SUM_THREADS, 12, EmbeddingBackwardAdd) {
    add_groups<Access::WIDE>(arguments);
}
KERNEL(embedding_backward_add_single, SUM_THREADS, 12, EmbeddingBackwardAdd) {
    add_groups<Access::SINGLE>(arguments);
}
