// Norms that load the next rows while the sums of some are formed: a block has several rows of the residual stream. Rows
// are fp32, whole packs, aligned to them, and at most one or two packs of each thread. The bits are those of the norms
// for all widths.
#pragma once
#include "norm.h"

// Rows of a block of a forward norm.
constexpr u32 FORWARD_ROWS = 8;

// Rows whose sums a block forms together, so that it waits half as often.
constexpr u32 TOGETHER = 2;

// Sums of such rows.
struct SumsOfRows {
    float of[TOGETHER];

    __device__ __forceinline__ SumsOfRows& operator+=(const SumsOfRows& other) {
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) of[i] += other.of[i];
        return *this;
    }
};
DEVICE SumsOfRows shuffle_xor(SumsOfRows x, u32 mask) {
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) x.of[i] = shuffle_xor(x.of[i], mask);
    return x;
}

// A thread holds at most PACKS packs of a row.
template <Norm NORM, u32 PACKS>
DEVICE void norm_forward_ahead(const NormForward& arguments) {
    constexpr u32 STEP = THREADS * COLUMNS;
    const u32 width = arguments.width, first = threadIdx.x * COLUMNS;
    const u64 first_row = static_cast<u64>(blockIdx.x) * FORWARD_ROWS;
    const u64 last_row = min(first_row + FORWARD_ROWS, arguments.rows);
    release_next();
    Columns weights[PACKS], biases[PACKS];
    load_kept<STEP>(weights, arguments.weight, first, width);
    if constexpr (NORM == Norm::LAYER) {
        if (arguments.bias) load_kept<STEP>(biases, arguments.bias, first, width);
    }
    await_previous();
    Columns next[TOGETHER][PACKS];
    const auto load_next = [&](u64 row) {
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            // An odd last row is loaded twice, and stored once.
            const u64 here = min(row + i, last_row - 1);
            load_kept<STEP>(next[i], static_cast<const float*>(arguments.x) + here * arguments.x_stride, first, width);
        }
    };
    load_next(first_row);
#pragma unroll 1
    for (u64 row = first_row; row < last_row; row += TOGETHER) {
        Columns held[TOGETHER][PACKS];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
#pragma unroll
            for (u32 j = 0; j < PACKS; j++) held[i][j] = next[i][j];
        }
        if (row + TOGETHER < last_row) load_next(row + TOGETHER);
        SumsOfRows means{};
        if constexpr (NORM == Norm::LAYER) {
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
#pragma unroll
                for (u32 j = 0; j < PACKS; j++) means.of[i] += sum_of(held[i][j]);
            }
            means = team_sum<THREADS>(means);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) means.of[i] /= static_cast<float>(width);
        }
        SumsOfRows squares{};
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
#pragma unroll
            for (u32 j = 0; j < PACKS; j++) {
                const u32 column = first + j * STEP;
                if constexpr (NORM == Norm::LAYER) {
                    held[i][j] = deviations(held[i][j], means.of[i], column < width ? width - column : 0);
                }
                squares.of[i] = add_products(squares.of[i], held[i][j], held[i][j]);
            }
        }
        squares = team_sum<THREADS>(squares);
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const u64 here = row + i;
            if (here >= last_row) break;
            const float reciprocal = 1.0f / sqrtf(squares.of[i] / static_cast<float>(width) + arguments.eps);
            if (threadIdx.x == 0) {
                if constexpr (NORM == Norm::LAYER) arguments.statistics[here] = means.of[i];
                arguments.statistics[NORM == Norm::LAYER ? arguments.rows + here : here] = reciprocal;
            }
#pragma unroll
            for (u32 j = 0; j < PACKS; j++) {
                const u32 column = first + j * STEP;
                if (column >= width) break;
                Columns y = held[i][j];
#pragma unroll
                for (u32 k = 0; k < COLUMNS; k++) {
                    y.at[k] *= reciprocal;
                    if (NORM == Norm::LAYER && arguments.bias) {
                        y.at[k] = fmaf(y.at[k], weights[j].at[k], biases[j].at[k]);
                    } else {
                        y.at[k] *= weights[j].at[k];
                    }
                }
                store_pack<COLUMNS>(arguments.y + here * arguments.y_stride + column, y);
            }
        }
    }
}

// The part of a row that a thread holds.
template <Norm NORM, u32 PACKS>
struct HeldRow {
    Columns x[PACKS], dy[PACKS], dx[PACKS];
    float mean, reciprocal;
};

// A block has a run of rows, and holds at most PACKS packs a thread of each.
template <Norm NORM, u32 PACKS>
DEVICE void norm_backward_ahead(const NormBackward& arguments) {
    typedef BackwardRow<NORM, THREADS, Access::WIDE, Gradient::ADDED> Row;
    const Run rows = run_of_rows<RUN_ROWS>(arguments, blockIdx.x);
    const u32 width = arguments.width, first = threadIdx.x * COLUMNS;
    Columns weights[PACKS];
    load_kept<Row::STEP>(weights, arguments.weight, first, width);
    HeldRow<NORM, PACKS> next;
    const auto load_next = [&](u64 row) {
        Row from(arguments, row);
        from.load_statistics(row);
        next.mean = from.mean;
        next.reciprocal = from.reciprocal;
        load_kept<Row::STEP>(next.x, from.x, first, width);
        load_kept<Row::STEP>(next.dy, from.dy, first, width);
        load_kept<Row::STEP>(next.dx, from.dx, first, width);
    };
    ParameterSums<NORM> parameters[PACKS]{};
    load_next(rows.first_row);
#pragma unroll 1
    for (u64 row = rows.first_row; row < rows.last_row; row++) {
        const HeldRow<NORM, PACKS> held = next;
        if (row + 1 < rows.last_row) load_next(row + 1);
        Row here(arguments, row);
        here.mean = held.mean;
        here.reciprocal = held.reciprocal;
        RowSums<NORM> means{};
#pragma unroll
        for (u32 i = 0; i < PACKS; i++) {
            const u32 column = first + i * Row::STEP, count = column < width ? width - column : 0;
            here.add_pack(means, parameters[i], held.x[i], held.dy[i], weights[i], count);
        }
        means = team_sum<THREADS>(means);
        if constexpr (NORM == Norm::LAYER) means.g /= static_cast<float>(width);
        means.products /= static_cast<float>(width);
#pragma unroll
        for (u32 i = 0; i < PACKS; i++) {
            const u32 column = first + i * Row::STEP;
            if (column < width) here.form_dx(held.dx[i], held.x[i], held.dy[i], weights[i], column, means);
        }
    }
#pragma unroll
    for (u32 i = 0; i < PACKS; i++) {
        const u32 column = first + i * Row::STEP;
        if (column >= width) break;
        const u64 place = static_cast<u64>(blockIdx.x) * width + column;
        store<COLUMNS, Access::SINGLE>(arguments.weight_partials + place, parameters[i].weight, width - column);
        if constexpr (NORM == Norm::LAYER) {
            if (arguments.bias_partials) {
                store<COLUMNS, Access::SINGLE>(arguments.bias_partials + place, parameters[i].bias, width - column);
            }
        }
    }
}
