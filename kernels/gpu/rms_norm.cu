// RMSNorm (Zhang and Sennrich, 2019) over rows of the fp32 residual stream.
//
//   r  = (mean(x^2) + eps)^-1/2;   xr = x r;   y = xr weight
//   dx += r (dy weight - xr mean(dy weight xr));   dweight = sum over the grain's rows of dy xr
//
// Floor, bytes an element with bf16 activations: forward 6 (x read, y written), backward 14 (dy, x and dx
// read, dx written): 0.023 and 0.055 ms for 8,192 rows of 2,048 at 4.3 TB/s.
//
// A team of threads has a row: a warp where rows are short, else a block. Thread i of a team of T has the packs i,
// i + T, ... of four columns each. A row is read twice, the second time from the nearest cache.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 256;
constexpr u32 COLUMNS = 4;
// Rows over which a team sums dweight: cut from a grain's first row.
constexpr u32 RUN_ROWS = 16;
// Packs of a thread whose dweight it sums in registers; wider rows add the others in the scratch.
constexpr u32 KEPT = 4;

typedef Pack<COLUMNS> Columns;

template <u32 TEAM, class T>
DEVICE T team_sum(T x) {
    if constexpr (TEAM == WARP) {
        return warp_sum(x);
    } else {
        __shared__ T partial[TEAM / WARP];
        return block_sum<TEAM>(x, partial);
    }
}

// ((a + b) + (c + d)) of the products of two packs, added to a sum.
DEVICE float add_products(float sum, const Columns& a, const Columns& b) {
    const float first = fmaf(a.at[1], b.at[1], a.at[0] * b.at[0]);
    const float second = fmaf(a.at[3], b.at[3], a.at[2] * b.at[2]);
    return sum + (first + second);
}

struct RmsNormForward {
    activation* y;          // [rows, d], rows y_stride apart
    float* reciprocal_rms;  // [rows]
    const float* x;         // [rows, d], rows x_stride apart
    const float* weight;    // [d]
    u64 y_stride;
    u64 x_stride;
    u64 rows;
    u32 width;  // d
    float eps;
};

template <u32 TEAM, Access ACCESS>
DEVICE void forward(const RmsNormForward& arguments) {
    constexpr u32 TEAMS = THREADS / TEAM;
    const u64 row = static_cast<u64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
    // Whole teams leave; a block that is one team has a row.
    if (row >= arguments.rows) return;
    const u32 width = arguments.width;
    const float* const x = arguments.x + row * arguments.x_stride;
    activation* const y = arguments.y + row * arguments.y_stride;
    const u32 first = threadIdx.x % TEAM * COLUMNS;

    float squares = 0.0f;
#pragma unroll 4
    for (u32 column = first; column < width; column += TEAM * COLUMNS) {
        const Columns pack = load_first<COLUMNS, ACCESS>(x + column, width - column);
        squares = add_products(squares, pack, pack);
    }
    const float mean = team_sum<TEAM>(squares) / static_cast<float>(width);
    const float reciprocal_rms = 1.0f / sqrtf(mean + arguments.eps);
    if (threadIdx.x % TEAM == 0) arguments.reciprocal_rms[row] = reciprocal_rms;
#pragma unroll 4
    for (u32 column = first; column < width; column += TEAM * COLUMNS) {
        const u32 count = width - column;
        Columns pack = load_first<COLUMNS, ACCESS>(x + column, count);
        const Columns weight =
            load_first<COLUMNS, ACCESS>(arguments.weight + column, count);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            pack.at[i] = pack.at[i] * reciprocal_rms * weight.at[i];
        }
        store_first<COLUMNS, ACCESS>(y + column, pack, count);
    }
}

KERNEL(rms_norm_forward_wide, THREADS, 6, RmsNormForward) {
    forward<THREADS, Access::WIDE>(arguments);
}
KERNEL(rms_norm_forward_single, THREADS, 6, RmsNormForward) {
    forward<THREADS, Access::SINGLE>(arguments);
}
KERNEL(rms_norm_forward_short_wide, THREADS, 6, RmsNormForward) {
    forward<WARP, Access::WIDE>(arguments);
}
KERNEL(rms_norm_forward_short_single, THREADS, 6, RmsNormForward) {
    forward<WARP, Access::SINGLE>(arguments);
}

struct RmsNormBackward {
    float* dx;                    // [rows, d], rows dx_stride apart; added to
    float* partials;              // [runs of all grains, d]
    const activation* dy;         // [rows, d], rows dy_stride apart
    const float* x;               // [rows, d], rows x_stride apart
    const float* reciprocal_rms;  // [rows]
    const float* weight;          // [d]
    u64 dx_stride;
    u64 dy_stride;
    u64 x_stride;
    u64 rows;
    u64 rows_per_grain;
    u64 runs;
    u32 runs_per_grain;
    u32 width;  // d
};

template <u32 TEAM, Access ACCESS>
DEVICE void backward(const RmsNormBackward& arguments) {
    constexpr u32 TEAMS = THREADS / TEAM;
    const u64 run = static_cast<u64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
    if (run >= arguments.runs) return;
    const u64 grain_row = run / arguments.runs_per_grain * arguments.rows_per_grain;
    const u64 first_row = grain_row + run % arguments.runs_per_grain * RUN_ROWS;
    const u64 last_row = min(min(first_row + RUN_ROWS, grain_row + arguments.rows_per_grain),
                             arguments.rows);
    const u32 width = arguments.width;
    const u32 first = threadIdx.x % TEAM * COLUMNS;
    float* const partials = arguments.partials + run * width;

    Columns dweight[KEPT];
#pragma unroll
    for (u32 kept = 0; kept < KEPT; kept++) dweight[kept] = filled<COLUMNS>(0.0f);
    for (u32 column = first + KEPT * TEAM * COLUMNS; column < width;
         column += TEAM * COLUMNS) {
        store_first<COLUMNS, Access::SINGLE>(partials + column, filled<COLUMNS>(0.0f),
                                                  width - column);
    }

    for (u64 row = first_row; row < last_row; row++) {
        const float* const x = arguments.x + row * arguments.x_stride;
        const activation* const dy = arguments.dy + row * arguments.dy_stride;
        float* const dx = arguments.dx + row * arguments.dx_stride;
        const float reciprocal_rms = arguments.reciprocal_rms[row];

        // The sum of dy weight xr, and what the pack adds to dweight.
        auto products = [&](u32 column, float& sum, Columns& dweight_pack) {
            const u32 count = width - column;
            Columns xr = load_first<COLUMNS, ACCESS>(x + column, count);
            const Columns dy_pack = load_first<COLUMNS, ACCESS>(dy + column, count);
            Columns scaled = load_first<COLUMNS, ACCESS>(arguments.weight + column, count);
#pragma unroll
            for (u32 i = 0; i < COLUMNS; i++) {
                xr.at[i] *= reciprocal_rms;
                scaled.at[i] *= dy_pack.at[i];
                dweight_pack.at[i] = fmaf(dy_pack.at[i], xr.at[i], dweight_pack.at[i]);
            }
            sum = add_products(sum, scaled, xr);
        };
        float sum = 0.0f;
#pragma unroll
        for (u32 kept = 0; kept < KEPT; kept++) {
            const u32 column = first + kept * TEAM * COLUMNS;
            if (column < width) products(column, sum, dweight[kept]);
        }
        for (u32 column = first + KEPT * TEAM * COLUMNS; column < width;
             column += TEAM * COLUMNS) {
            const u32 count = width - column;
            Columns pack = load_first<COLUMNS, Access::SINGLE>(partials + column, count);
            products(column, sum, pack);
            store_first<COLUMNS, Access::SINGLE>(partials + column, pack, count);
        }
        const float mean = team_sum<TEAM>(sum) / static_cast<float>(width);

#pragma unroll 4
        for (u32 column = first; column < width; column += TEAM * COLUMNS) {
            const u32 count = width - column;
            const Columns x_pack = load_first<COLUMNS, ACCESS>(x + column, count);
            const Columns dy_pack = load_first<COLUMNS, ACCESS>(dy + column, count);
            const Columns weight =
                load_first<COLUMNS, ACCESS>(arguments.weight + column, count);
            Columns dx_pack = load_first<COLUMNS, ACCESS>(dx + column, count);
#pragma unroll
            for (u32 i = 0; i < COLUMNS; i++) {
                const float xr = x_pack.at[i] * reciprocal_rms;
                const float dxr = fmaf(-mean, xr, dy_pack.at[i] * weight.at[i]);
                dx_pack.at[i] += reciprocal_rms * dxr;
            }
            store_first<COLUMNS, ACCESS>(dx + column, dx_pack, count);
        }
    }
#pragma unroll
    for (u32 kept = 0; kept < KEPT; kept++) {
        const u32 column = first + kept * TEAM * COLUMNS;
        if (column < width) {
            store_first<COLUMNS, Access::SINGLE>(partials + column, dweight[kept],
                                                      width - column);
        }
    }
}

KERNEL(rms_norm_backward_wide, THREADS, 3, RmsNormBackward) {
    backward<THREADS, Access::WIDE>(arguments);
}
KERNEL(rms_norm_backward_single, THREADS, 3, RmsNormBackward) {
    backward<THREADS, Access::SINGLE>(arguments);
}
KERNEL(rms_norm_backward_short_wide, THREADS, 3, RmsNormBackward) {
    backward<WARP, Access::WIDE>(arguments);
}
KERNEL(rms_norm_backward_short_single, THREADS, 3, RmsNormBackward) {
    backward<WARP, Access::SINGLE>(arguments);
}

struct RmsNormSumPartials {
    float* dweight;         // [grains, d]
    const float* partials;  // [runs of all grains, d]
    u64 runs;
    u64 elements;  // grains d
    u32 runs_per_grain;
    u32 width;  // d
};

// A thread for each column of each grain: the runs of the grain in order, from +0.0.
KERNEL(rms_norm_sum_partials, 128, 1, RmsNormSumPartials) {
    const u64 element = static_cast<u64>(blockIdx.x) * 128 + threadIdx.x;
    if (element >= arguments.elements) return;
    const u64 grain = element / arguments.width;
    const u64 column = element % arguments.width;
    const u64 first = grain * arguments.runs_per_grain;
    const u64 last = min(first + arguments.runs_per_grain, arguments.runs);
    float sum = 0.0f;
#pragma unroll 16
    for (u64 run = first; run < last; run++) {
        sum += arguments.partials[run * arguments.width + column];
    }
    arguments.dweight[element] = sum;
}
