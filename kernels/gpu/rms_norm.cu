// RMSNorm (Zhang and Sennrich, 2019) over rows of the fp32 residual stream, or over rows of activations or their heads (Henry et al.,
// 2020) that are wider than 128 columns; rms_norm_heads.cu has the others.
//
//   r  = (mean(x^2) + eps)^-1/2;   xr = x r;   y = xr weight
//   dx += r (dy weight - xr mean(dy weight xr));   dweight = sum over the grain's rows of dy xr
//
// dx of the residual stream is added to fp32; dx of activations overwrites dy. A team treats a head as a row.
//
// Floor, bytes an element with bf16 activations: forward 6 (x read, y written), backward 14 (dy, x and dx
// read, dx written) and 2 for the rounded copy of dx: 0.023 and 0.062 ms for 8,192 rows of 2,048 at 4.3 TB/s;
// of activations 4 and 6.
//
// A row is read twice, the second time from the nearest cache. The backward norm is norm.h's, and forms of both that load
// rows ahead are norm_ahead.h's.
#include "dialect.h"
#include "pack.h"
#include "norm_ahead.h"

template <u32 TEAM, Access ACCESS, class Input>
DEVICE void forward(const NormForward& arguments) {
    constexpr u32 TEAMS = THREADS / TEAM;
    constexpr u32 STEP = TEAM * COLUMNS;
    const u64 row = static_cast<u64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
    release_next();
    await_previous();
    // Whole teams leave together; a block that is a single team always has a row.
    if (row >= arguments.rows) return;
    const u32 width = arguments.width;
    const bool of_heads = OF_ACTIVATIONS;
    const u64 x_place = of_heads ? head_place(arguments, row, arguments.x_stride) : row * arguments.x_stride;
    const u64 y_place = of_heads ? head_place(arguments, row, arguments.y_stride) : row * arguments.y_stride;
    const Input* const x = static_cast<const Input*>(arguments.x) + x_place;
    activation* const y = arguments.y + y_place;
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
    if (threadIdx.x % TEAM == 0) arguments.statistics[row] = reciprocal_rms;
    for (u32 column = first; column < width; column += STEP) {
        Columns pack = load<COLUMNS, ACCESS>(x + column, width - column);
        const Columns weight = load<COLUMNS, ACCESS>(arguments.weight + column, width - column);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) pack.at[i] = pack.at[i] * reciprocal_rms * weight.at[i];
        store<COLUMNS, ACCESS>(y + column, pack, width - column);
    }
}

#if !OF_ACTIVATIONS && !BACKWARD
// The same bits, for so few rows that all have a block at once, so that latency dominates, and short enough for registers: a thread
// loads its part of the parameters before it waits for a row, and no load waits for a store.
KERNEL(rms_norm_forward_few, THREADS, 2, NormForward) {
    constexpr u32 STEP = THREADS * COLUMNS;
    const u32 width = arguments.width, first = threadIdx.x * COLUMNS;
    release_next();
    Columns kept[KEPT], weights[KEPT];
    load_kept<STEP>(weights, arguments.weight, first, width);
    await_previous();
    load_kept<STEP>(kept, static_cast<const float*>(arguments.x) + blockIdx.x * arguments.x_stride, first, width);
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) squares = add_products(squares, kept[i], kept[i]);
    const float mean = team_sum<THREADS>(squares) / static_cast<float>(width);
    const float reciprocal_rms = 1.0f / sqrtf(mean + arguments.eps);
    if (threadIdx.x == 0) arguments.statistics[blockIdx.x] = reciprocal_rms;
    activation* const y = arguments.y + blockIdx.x * arguments.y_stride;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        const u32 column = first + i * STEP;
        if (column >= width) break;
#pragma unroll
        for (u32 j = 0; j < COLUMNS; j++) kept[i].at[j] = kept[i].at[j] * reciprocal_rms * weights[i].at[j];
        store_pack<COLUMNS>(y + column, kept[i]);
    }
}

KERNEL(rms_norm_forward_ahead_narrow, THREADS, 5, NormForward) { norm_forward_ahead<Norm::RMS, 1>(arguments); }
#elif !OF_ACTIVATIONS
KERNEL(rms_norm_backward_ahead_narrow, THREADS, 4, NormBackward) { norm_backward_ahead<Norm::RMS, 1>(arguments); }
KERNEL(rms_norm_backward_ahead, THREADS, 2, NormBackward) { norm_backward_ahead<Norm::RMS, 2>(arguments); }
#endif

#if OF_ACTIVATIONS && BACKWARD
NORM_KERNELS(rms_norm_backward_activation, NormBackward, 2, 2, norm_backward<Norm::RMS, TEAM, ACCESS, Gradient::IN_PLACE>)
#elif OF_ACTIVATIONS
NORM_KERNELS(rms_norm_forward_activation, NormForward, 6, 6, forward<TEAM, ACCESS, activation>)
#elif BACKWARD
NORM_KERNELS(rms_norm_backward, NormBackward, 2, 2, norm_backward<Norm::RMS, TEAM, ACCESS, Gradient::ADDED>)
#else
NORM_KERNELS(rms_norm_forward, NormForward, 6, 6, forward<TEAM, ACCESS, float>)
#endif
