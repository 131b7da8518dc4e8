// Biases of rows and their gradients, and clamps.
//
//   out += bias;   dbias = sums over the grain's rows of dout
//   out = x within plus and minus the limit;   dx = 0 where |x| is above the limit
//
// Floor, bytes an element of bf16: 4 to add a bias or clamp, 2 to sum the gradient of a bias, 6 for that of a clamp.
#include "dialect.h"
#include "pack.h"
#include "row_map.h"
#include "runs.h"

template <class T, Access ACCESS>
DEVICE void add_bias(const RowMap& arguments) {
    map_rows<T, ACCESS, Reads::X>(arguments, [](float x, float) { return x; });
}
template <Access ACCESS>
DEVICE void clamp(const RowMap& arguments) {
    const float limit = arguments.limit;
    // A NaN stays a NaN.
    map_rows<activation, ACCESS, Reads::X>(arguments, [limit](float x, float) {
        return x > limit ? limit : x < -limit ? -limit : x;
    });
}
template <Access ACCESS>
DEVICE void clamp_backward(const RowMap& arguments) {
    const float limit = arguments.limit;
    map_rows<activation, ACCESS, Reads::X_AND_DOUT>(arguments, [limit](float x, float dout) {
        return fabsf(x) > limit ? 0.0f : dout;
    });
}

KERNEL(add_bias_wide, MAP_THREADS, 3, RowMap) { add_bias<activation, Access::WIDE>(arguments); }
KERNEL(add_bias_single, MAP_THREADS, 3, RowMap) { add_bias<activation, Access::SINGLE>(arguments); }
KERNEL(add_bias_f32_wide, MAP_THREADS, 3, RowMap) { add_bias<float, Access::WIDE>(arguments); }
KERNEL(add_bias_f32_single, MAP_THREADS, 3, RowMap) { add_bias<float, Access::SINGLE>(arguments); }
KERNEL(clamp_wide, MAP_THREADS, 3, RowMap) { clamp<Access::WIDE>(arguments); }
KERNEL(clamp_single, MAP_THREADS, 3, RowMap) { clamp<Access::SINGLE>(arguments); }
KERNEL(clamp_backward_wide, MAP_THREADS, 2, RowMap) { clamp_backward<Access::WIDE>(arguments); }
KERNEL(clamp_backward_single, MAP_THREADS, 2, RowMap) { clamp_backward<Access::SINGLE>(arguments); }

constexpr u32 SUM_THREADS = 128;
constexpr u32 COLUMNS = 16 / sizeof(activation);
// Rows that a thread has in flight.
constexpr u32 BATCH = 8;

struct BiasBackward {
    float* partials;         // [runs of all grains, n]
    const activation* dout;  // [rows, n], rows dout_stride apart
    u64 dout_stride;
    u64 rows;
    u64 rows_per_grain;
    u32 runs_per_grain;
    u32 width;  // n
};

// A thread for each pack of columns of each run of rows; sums begin at +0.0 and are in order.
template <Access ACCESS>
DEVICE void sum_run(const BiasBackward& arguments) {
    const u32 width = arguments.width;
    const u32 tiles = (width - 1) / (SUM_THREADS * COLUMNS) + 1;
    const u32 column = (blockIdx.x % tiles * SUM_THREADS + threadIdx.x) * COLUMNS;
    if (column >= width) return;
    const u32 count = width - column;
    const u64 run = blockIdx.x / tiles;
    const Run rows = run_of_rows<BIAS_RUN_ROWS>(arguments, run);
    const activation* const from = arguments.dout + column;
    Pack<COLUMNS> sum = filled<COLUMNS>(0.0f);
    u64 row = rows.first_row;
    for (; row + BATCH <= rows.last_row; row += BATCH) {
        Pack<COLUMNS> packs[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            packs[i] = load<COLUMNS, ACCESS>(from + (row + i) * arguments.dout_stride, count);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) sum.at[j] += packs[i].at[j];
        }
    }
    for (; row < rows.last_row; row++) {
        const Pack<COLUMNS> pack =
            load<COLUMNS, ACCESS>(from + row * arguments.dout_stride, count);
#pragma unroll
        for (u32 j = 0; j < COLUMNS; j++) sum.at[j] += pack.at[j];
    }
    store<COLUMNS, Access::SINGLE>(arguments.partials + run * width + column, sum, count);
}

KERNEL(bias_backward_wide, SUM_THREADS, 4, BiasBackward) { sum_run<Access::WIDE>(arguments); }
KERNEL(bias_backward_single, SUM_THREADS, 4, BiasBackward) { sum_run<Access::SINGLE>(arguments); }
