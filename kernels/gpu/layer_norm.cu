// Layer norm (Ba, Kiros and Hinton, 2016) over rows of the fp32 residual stream or of activations.
//
//   r = (mean((x - mean(x))^2) + eps)^-1/2;   n = (x - mean(x)) r;   y = n weight + bias
//   g = dy weight;   dx = r (g - mean(g) - n mean(g n))
//   dweight, dbias: sums over the grain's rows of dy n and of dy
//
// dx of the residual stream is added to fp32; dx of activations overwrites dy.
//
// Floor, bytes an element of the residual stream with bf16 activations: forward 6 (x read, y written), backward 14 (dy, x
// and dx read, dx written) and 2 for the rounded copy of dx; of activations 4 and 6.
//
// The forward norm keeps a row in registers between its three passes, as far as it fits. The backward norm is norm.h's,
// and forms of both that load rows ahead are norm_ahead.h's.
#include "dialect.h"
#include "pack.h"
#include "norm_ahead.h"

DEVICE Columns normed(Columns pack, float mean, float reciprocal) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) pack.at[i] = (pack.at[i] - mean) * reciprocal;
    return pack;
}
DEVICE Columns scaled(Columns pack, const Columns& weight) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) pack.at[i] *= weight.at[i];
    return pack;
}
DEVICE Columns scaled(Columns pack, const Columns& weight, const Columns& bias) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) pack.at[i] = fmaf(pack.at[i], weight.at[i], bias.at[i]);
    return pack;
}

template <u32 TEAM, Access ACCESS>
DEVICE void store_normed(const NormForward& arguments, u64 row, u32 column, Columns pack,
                         float mean, float reciprocal) {
    const u32 count = arguments.width - column;
    const Columns weight = load<COLUMNS, ACCESS>(arguments.weight + column, count);
    pack = normed(pack, mean, reciprocal);
    if (arguments.bias) {
        pack = scaled(pack, weight, load<COLUMNS, ACCESS>(arguments.bias + column, count));
    } else {
        pack = scaled(pack, weight);
    }
    store<COLUMNS, ACCESS>(arguments.y + row * arguments.y_stride + column, pack, count);
}

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
    const Input* const x = static_cast<const Input*>(arguments.x) + row * arguments.x_stride;
    const u32 first = threadIdx.x % TEAM * COLUMNS;
    const u32 beyond = first + KEPT * STEP;

    Columns kept[KEPT];
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) kept[i] = filled<COLUMNS>(0.0f);
#pragma unroll
    for (u32 i = 0; i < KEPT; i += PAIR) {
        const u32 column = first + i * STEP;
        if (column >= width) break;
        Columns packs[PAIR];
        load_pair<STEP, ACCESS>(packs, x, column, width);
#pragma unroll
        for (u32 j = 0; j < PAIR; j++) kept[i + j] = packs[j];
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) sum += sum_of(kept[i]);
    for (u32 column = beyond; column < width; column += STEP) {
        sum += sum_of(load<COLUMNS, ACCESS>(x + column, width - column));
    }
    const float mean = team_sum<TEAM>(sum) / static_cast<float>(width);

    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        const u32 column = first + i * STEP;
        const Columns deviation = deviations(kept[i], mean, column < width ? width - column : 0);
        squares = add_products(squares, deviation, deviation);
    }
    for (u32 column = beyond; column < width; column += STEP) {
        const u32 count = width - column;
        const Columns deviation =
            deviations(load<COLUMNS, ACCESS>(x + column, count), mean, count);
        squares = add_products(squares, deviation, deviation);
    }
    const float variance = team_sum<TEAM>(squares) / static_cast<float>(width);
    const float reciprocal = 1.0f / sqrtf(variance + arguments.eps);
    if (threadIdx.x % TEAM == 0) {
        arguments.statistics[row] = mean;
        arguments.statistics[arguments.rows + row] = reciprocal;
    }
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        const u32 column = first + i * STEP;
        if (column >= width) break;
        store_normed<TEAM, ACCESS>(arguments, row, column, kept[i], mean, reciprocal);
    }
    for (u32 column = beyond; column < width; column += STEP) {
        const Columns pack = load<COLUMNS, ACCESS>(x + column, width - column);
        store_normed<TEAM, ACCESS>(arguments, row, column, pack, mean, reciprocal);
    }
}

// The same bits, for so few rows that all have a block at once, so that latency dominates, and short enough for registers: a thread
// loads its part of the parameters before it waits for a row, and no load waits for a store.
template <class Input>
DEVICE void forward_few(const NormForward& arguments) {
    constexpr u32 STEP = THREADS * COLUMNS;
    const u32 width = arguments.width, first = threadIdx.x * COLUMNS;
    release_next();
    Columns kept[KEPT], weights[KEPT], biases[KEPT];
    load_kept<STEP>(weights, arguments.weight, first, width);
    if (arguments.bias) load_kept<STEP>(biases, arguments.bias, first, width);
    await_previous();
    load_kept<STEP>(kept, static_cast<const Input*>(arguments.x) + blockIdx.x * arguments.x_stride, first, width);
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) sum += sum_of(kept[i]);
    const float mean = team_sum<THREADS>(sum) / static_cast<float>(width);
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        const u32 column = first + i * STEP;
        const Columns deviation = deviations(kept[i], mean, column < width ? width - column : 0);
        squares = add_products(squares, deviation, deviation);
    }
    const float variance = team_sum<THREADS>(squares) / static_cast<float>(width);
    const float reciprocal = 1.0f / sqrtf(variance + arguments.eps);
    if (threadIdx.x == 0) {
        arguments.statistics[blockIdx.x] = mean;
        arguments.statistics[arguments.rows + blockIdx.x] = reciprocal;
    }
    activation* const y = arguments.y + blockIdx.x * arguments.y_stride;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        const u32 column = first + i * STEP;
        if (column >= width) break;
        const Columns n = normed(kept[i], mean, reciprocal);
        store_pack<COLUMNS>(y + column, arguments.bias ? scaled(n, weights[i], biases[i]) : scaled(n, weights[i]));
    }
}

#if OF_ACTIVATIONS && BACKWARD
NORM_KERNELS(layer_norm_backward_activation, NormBackward, 2, 1, norm_backward<Norm::LAYER, TEAM, ACCESS, Gradient::IN_PLACE>)
#elif OF_ACTIVATIONS
NORM_KERNELS(layer_norm_forward_activation, NormForward, 4, 4, forward<TEAM, ACCESS, activation>)
KERNEL(layer_norm_forward_activation_few, THREADS, 2, NormForward) { forward_few<activation>(arguments); }
#elif BACKWARD
NORM_KERNELS(layer_norm_backward_residual, NormBackward, 2, 2, norm_backward<Norm::LAYER, TEAM, ACCESS, Gradient::ADDED>)
KERNEL(layer_norm_backward_residual_ahead_narrow, THREADS, 4, NormBackward) { norm_backward_ahead<Norm::LAYER, 1>(arguments); }
KERNEL(layer_norm_backward_residual_ahead, THREADS, 2, NormBackward) { norm_backward_ahead<Norm::LAYER, 2>(arguments); }
#else
NORM_KERNELS(layer_norm_forward_residual, NormForward, 5, 4, forward<TEAM, ACCESS, float>)
KERNEL(layer_norm_forward_residual_ahead_narrow, THREADS, 4, NormForward) { norm_forward_ahead<Norm::LAYER, 1>(arguments); }
KERNEL(layer_norm_forward_residual_ahead, THREADS, 3, NormForward) { norm_forward_ahead<Norm::LAYER, 2>(arguments); }
KERNEL(layer_norm_forward_residual_few, THREADS, 2, NormForward) { forward_few<float>(arguments); }
#endif
