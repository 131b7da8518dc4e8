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

// Packs that a thread loads together.
constexpr u32 PAIR = 2;

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

// The packs at `column` and `step` further on; zeros where the second lies past the row. Both loads are in
// flight at once.
template <u32 STEP, Access ACCESS, class T>
DEVICE void load_pair(Columns (&packs)[PAIR], const T* row, u32 column, u32 width) {
    const bool inside = column + STEP < width;
    const u32 second = inside ? column + STEP : column;
    packs[0] = load<COLUMNS, ACCESS>(row + column, width - column);
    packs[1] = or_zero(inside, load<COLUMNS, ACCESS>(row + second, width - second));
}

template <u32 TEAM, Access ACCESS>
DEVICE void forward(const RmsNormForward& arguments) {
    constexpr u32 TEAMS = THREADS / TEAM;
    constexpr u32 STEP = TEAM * COLUMNS;
    const u64 row = static_cast<u64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
    // Whole teams leave; a block that is one team has a row.
    if (row >= arguments.rows) return;
    const u32 width = arguments.width;
    const float* const x = arguments.x + row * arguments.x_stride;
    activation* const y = arguments.y + row * arguments.y_stride;
    const u32 first = threadIdx.x % TEAM * COLUMNS;

    float squares = 0.0f;
    for (u32 column = first; column < width; column += PAIR * STEP) {
        Columns packs[PAIR];
        load_pair<STEP, ACCESS>(packs, x, column, width);
#pragma unroll
        for (u32 i = 0; i < PAIR; i++) squares = add_products(squares, packs[i], packs[i]);
    }
    const float mean = team_sum<TEAM>(squares) / static_cast<float>(width);
    const float reciprocal_rms = 1.0f / sqrtf(mean + arguments.eps);
    if (threadIdx.x % TEAM == 0) arguments.reciprocal_rms[row] = reciprocal_rms;
    for (u32 column = first; column < width; column += STEP) {
        Columns pack = load<COLUMNS, ACCESS>(x + column, width - column);
        const Columns weight = load<COLUMNS, ACCESS>(arguments.weight + column, width - column);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) pack.at[i] = pack.at[i] * reciprocal_rms * weight.at[i];
        store<COLUMNS, ACCESS>(y + column, pack, width - column);
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

// A row of the backward norm, and the sums that it adds to.
template <u32 TEAM, Access ACCESS>
struct BackwardRow {
    static constexpr u32 STEP = TEAM * COLUMNS;

    const RmsNormBackward& arguments;
    const float* x;
    const activation* dy;
    float* dx;
    float reciprocal_rms;

    __device__ __forceinline__ BackwardRow(const RmsNormBackward& given, u64 row)
        : arguments(given),
          x(given.x + row * given.x_stride),
          dy(given.dy + row * given.dy_stride),
          dx(given.dx + row * given.dx_stride),
          reciprocal_rms(given.reciprocal_rms[row]) {}

    // Adds a pack's dy weight xr to `sum`, and its dy xr to `dweight`.
    __device__ __forceinline__ void add_pack(float& sum, Columns& dweight, Columns xr,
                                             const Columns& dy_pack, Columns scaled) const {
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            xr.at[i] *= reciprocal_rms;
            scaled.at[i] *= dy_pack.at[i];
            dweight.at[i] = fmaf(dy_pack.at[i], xr.at[i], dweight.at[i]);
        }
        sum = add_products(sum, scaled, xr);
    }

    // The thread's sum of dy weight xr. What it adds to dweight goes to `dweight`, and to `partials` where
    // the row is wider than that; dx of the same packs is read on the way.
    __device__ __forceinline__ float sums(Columns (&dweight)[KEPT], Columns (&dx_kept)[KEPT],
                                          float* partials, u32 first) const {
        const u32 width = arguments.width;
        float sum = 0.0f;
#pragma unroll
        for (u32 kept = 0; kept < KEPT; kept += PAIR) {
            const u32 column = first + kept * STEP;
            if (column >= width) break;
            Columns x_packs[PAIR], dy_packs[PAIR], weights[PAIR], dx_packs[PAIR];
            load_pair<STEP, ACCESS>(x_packs, x, column, width);
            load_pair<STEP, ACCESS>(dy_packs, dy, column, width);
            load_pair<STEP, ACCESS>(dx_packs, static_cast<const float*>(dx), column, width);
            load_pair<STEP, ACCESS>(weights, arguments.weight, column, width);
#pragma unroll
            for (u32 i = 0; i < PAIR; i++) {
                add_pack(sum, dweight[kept + i], x_packs[i], dy_packs[i], weights[i]);
                dx_kept[kept + i] = dx_packs[i];
            }
        }
        for (u32 column = first + KEPT * STEP; column < width; column += STEP) {
            const u32 count = width - column;
            Columns partial = load<COLUMNS, Access::SINGLE>(partials + column, count);
            add_pack(sum, partial, load<COLUMNS, ACCESS>(x + column, count),
                     load<COLUMNS, ACCESS>(dy + column, count),
                     load<COLUMNS, ACCESS>(arguments.weight + column, count));
            store<COLUMNS, Access::SINGLE>(partials + column, partial, count);
        }
        return sum;
    }

    __device__ __forceinline__ void add_dx(Columns dx_pack, u32 column, float mean) const {
        const u32 count = arguments.width - column;
        const Columns x_pack = load<COLUMNS, ACCESS>(x + column, count);
        const Columns dy_pack = load<COLUMNS, ACCESS>(dy + column, count);
        const Columns weight = load<COLUMNS, ACCESS>(arguments.weight + column, count);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            const float xr = x_pack.at[i] * reciprocal_rms;
            const float dxr = fmaf(-mean, xr, dy_pack.at[i] * weight.at[i]);
            dx_pack.at[i] += reciprocal_rms * dxr;
        }
        store<COLUMNS, ACCESS>(dx + column, dx_pack, count);
    }
};

template <u32 TEAM, Access ACCESS>
DEVICE void backward(const RmsNormBackward& arguments) {
    constexpr u32 TEAMS = THREADS / TEAM;
    constexpr u32 STEP = TEAM * COLUMNS;
    const u64 run = static_cast<u64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
    if (run >= arguments.runs) return;
    const u64 grain_row = run / arguments.runs_per_grain * arguments.rows_per_grain;
    const u64 first_row = grain_row + run % arguments.runs_per_grain * RUN_ROWS;
    const u64 grain_end = min(grain_row + arguments.rows_per_grain, arguments.rows);
    const u64 last_row = min(first_row + RUN_ROWS, grain_end);
    const u32 width = arguments.width;
    const u32 first = threadIdx.x % TEAM * COLUMNS;
    float* const partials = arguments.partials + run * width;

    Columns dweight[KEPT];
#pragma unroll
    for (u32 kept = 0; kept < KEPT; kept++) dweight[kept] = filled<COLUMNS>(0.0f);
    for (u32 column = first + KEPT * STEP; column < width; column += STEP) {
        store<COLUMNS, Access::SINGLE>(partials + column, filled<COLUMNS>(0.0f), width - column);
    }
    for (u64 row = first_row; row < last_row; row++) {
        const BackwardRow<TEAM, ACCESS> here(arguments, row);
        Columns dx_kept[KEPT];
        const float sum = here.sums(dweight, dx_kept, partials, first);
        const float mean = team_sum<TEAM>(sum) / static_cast<float>(width);
#pragma unroll
        for (u32 kept = 0; kept < KEPT; kept++) {
            const u32 column = first + kept * STEP;
            if (column < width) here.add_dx(dx_kept[kept], column, mean);
        }
        for (u32 column = first + KEPT * STEP; column < width; column += STEP) {
            here.add_dx(load<COLUMNS, ACCESS>(here.dx + column, width - column), column, mean);
        }
    }
#pragma unroll
    for (u32 kept = 0; kept < KEPT; kept++) {
        const u32 column = first + kept * STEP;
        if (column < width) {
            store<COLUMNS, Access::SINGLE>(partials + column, dweight[kept], width - column);
        }
    }
}

KERNEL(rms_norm_backward_wide, THREADS, 2, RmsNormBackward) {
    backward<THREADS, Access::WIDE>(arguments);
}
KERNEL(rms_norm_backward_single, THREADS, 2, RmsNormBackward) {
    backward<THREADS, Access::SINGLE>(arguments);
}
KERNEL(rms_norm_backward_short_wide, THREADS, 2, RmsNormBackward) {
    backward<WARP, Access::WIDE>(arguments);
}
KERNEL(rms_norm_backward_short_single, THREADS, 2, RmsNormBackward) {
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
