// The gate of SwiGLU (Shazeer, 2020): silu(gate) up, silu(g) being g / (1 + e^-g); and its gradients.
//
// Backward reads gate and up once: their gradients overwrite that of the output, and the output values are stored for
// the product that follows.
//
// Floor: 6 bytes an element of the output of bf16 forward, 12 backward.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 256;
constexpr u32 COLUMNS = 16 / sizeof(activation);

struct GatedSilu {
    activation* out;       // [rows, n], rows out_stride apart
    activation* gradient;  // [rows, 2 n], rows gradient_stride apart: the output's gradient in the columns from n on; then that of x
    const activation* x;   // [rows, 2 n], rows x_stride apart: gate, then up
    u64 out_stride;
    u64 gradient_stride;
    u64 x_stride;
    u32 width;  // n
    u32 unused;
};

// A thread for each pack of columns of each row of the output.
template <Access ACCESS, bool BACKWARD>
DEVICE void gated_silu(const GatedSilu& arguments) {
    typedef Pack<COLUMNS> Columns;
    const u32 width = arguments.width;
    const u32 tiles = (width - 1) / (THREADS * COLUMNS) + 1;
    const u32 column = (blockIdx.x % tiles * THREADS + threadIdx.x) * COLUMNS;
    if (column >= width) return;
    const u32 count = width - column;
    const u64 row = blockIdx.x / tiles;
    const activation* const x = arguments.x + row * arguments.x_stride + column;
    const Columns gates = load<COLUMNS, ACCESS>(x, count);
    const Columns ups = load<COLUMNS, ACCESS>(x + width, count);
    Columns values;
    if constexpr (BACKWARD) {
        activation* const gradient = arguments.gradient + row * arguments.gradient_stride + column;
        const Columns douts = load<COLUMNS, ACCESS>(gradient + width, count);
        Columns of_gates, of_ups;
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            const float gate = gates.at[i], share = sigmoid(gate), value = gate * share;
            values.at[i] = value * ups.at[i];
            of_gates.at[i] = douts.at[i] * ups.at[i] * (share * fmaf(gate, 1.0f - share, 1.0f));
            of_ups.at[i] = douts.at[i] * value;
        }
        store<COLUMNS, ACCESS>(gradient, of_gates, count);
        store<COLUMNS, ACCESS>(gradient + width, of_ups, count);
    } else {
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) values.at[i] = silu(gates.at[i]) * ups.at[i];
    }
    store<COLUMNS, ACCESS>(arguments.out + row * arguments.out_stride + column, values, count);
}

KERNEL(gated_silu_forward_wide, THREADS, 1, GatedSilu) { gated_silu<Access::WIDE, false>(arguments); }
KERNEL(gated_silu_forward_single, THREADS, 1, GatedSilu) { gated_silu<Access::SINGLE, false>(arguments); }
KERNEL(gated_silu_backward_wide, THREADS, 1, GatedSilu) { gated_silu<Access::WIDE, true>(arguments); }
KERNEL(gated_silu_backward_single, THREADS, 1, GatedSilu) { gated_silu<Access::SINGLE, true>(arguments); }
