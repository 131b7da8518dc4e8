// Elementwise functions over the rows of matrices: a thread has a pack of columns in a few neighbouring rows.
#pragma once

constexpr u32 MAP_THREADS = 256;
// Rows of a block.
constexpr u32 MAP_ROWS = 4;

struct RowMap {
    void* out;          // [rows, n], rows out_stride apart
    const void* x;      // [rows, n], rows x_stride apart; may be out
    const void* dout;   // [rows, n], rows dout_stride apart; may be out; null where not read
    const float* bias;  // [n], added to x; or null
    u64 out_stride;
    u64 x_stride;
    u64 dout_stride;
    u64 rows;
    u32 width;  // n
    float limit;
};

// The operands of a map beside x.
enum class Reads { X, X_AND_DOUT };

// out = operation(x + bias, dout) of elements of type T.
template <class T, Access ACCESS, Reads READS, class Operation>
DEVICE void map_rows(const RowMap& arguments, Operation operation) {
    constexpr u32 COLUMNS = 16 / sizeof(T);
    typedef Pack<COLUMNS> Columns;
    const u32 width = arguments.width;
    const u32 tiles = (width - 1) / (MAP_THREADS * COLUMNS) + 1;
    const u32 column = (blockIdx.x % tiles * MAP_THREADS + threadIdx.x) * COLUMNS;
    release_next();
    // All rows share one pack of biases.
    if (arguments.bias && blockIdx.x < tiles && column < width) fetch_ahead(arguments.bias + column);
    await_previous();
    if (column >= width) return;
    const u32 count = width - column;
    const u64 first_row = static_cast<u64>(blockIdx.x / tiles) * MAP_ROWS;
    const auto row_of = [&](u32 i) {
        // Past the last row the first is loaded again and not stored: no load waits for a condition.
        return first_row + i < arguments.rows ? first_row + i : first_row;
    };
    Columns x[MAP_ROWS], dout[MAP_ROWS];
#pragma unroll
    for (u32 i = 0; i < MAP_ROWS; i++) {
        const T* const row = static_cast<const T*>(arguments.x) + row_of(i) * arguments.x_stride;
        x[i] = load<COLUMNS, ACCESS>(row + column, count);
    }
    if constexpr (READS == Reads::X_AND_DOUT) {
#pragma unroll
        for (u32 i = 0; i < MAP_ROWS; i++) {
            const T* const row =
                static_cast<const T*>(arguments.dout) + row_of(i) * arguments.dout_stride;
            dout[i] = load<COLUMNS, ACCESS>(row + column, count);
        }
    }
    if (arguments.bias) {
        const Columns bias = load<COLUMNS, ACCESS>(arguments.bias + column, count);
#pragma unroll
        for (u32 i = 0; i < MAP_ROWS; i++) {
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) x[i].at[j] += bias.at[j];
        }
    }
#pragma unroll
    for (u32 i = 0; i < MAP_ROWS; i++) {
        if (first_row + i >= arguments.rows) break;
        Columns out;
#pragma unroll
        for (u32 j = 0; j < COLUMNS; j++) {
            const float given = READS == Reads::X_AND_DOUT ? dout[i].at[j] : 0.0f;
            out.at[j] = operation(x[i].at[j], given);
        }
        T* const row = static_cast<T*>(arguments.out) + (first_row + i) * arguments.out_stride;
        store<COLUMNS, ACCESS>(row + column, out, count);
    }
}
