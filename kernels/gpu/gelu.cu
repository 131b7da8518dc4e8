// GELU (Hendrycks and Gimpel, 2016): x Phi(x), Phi being the normal distribution, or 0.5 x (1 + tanh(sqrt(2 / pi) (x +
// 0.044715 x^3))); and their derivatives.
//
// Phi is computed from its scaled tail, as on the CPU: Phi(-t) = exp(-t^2 / 2) u P(u), u = 1 / (1 + t / 4), t >= 0,
// which keeps full precision far from zero, and shares its exponential with the density. Half of 1 + tanh u is
// sigmoid(2 u).
//
// Backward reads x once: the gradient overwrites dout, the values are stored for the product that follows, and the
// gradient's rows are summed, as bias.cu sums them, while they are in registers.
//
// Floor: 4 bytes an element of bf16 forward, 8 backward.
#include "dialect.h"
#include "pack.h"
#include "row_map.h"
#include "runs.h"

// 1 / sqrt(2 pi).
#define DENSITY 0.3989422804f
// 2 sqrt(2 / pi), and that times 0.044715.
#define LINEAR 1.5957691216f
#define CUBIC 0.0713548163f
// Beyond it every slope is 0 or 1, and squares of x may overflow.
#define FLAT 16.0f

// x clamped to +-FLAT; a NaN stays a NaN.
DEVICE float near_zero(float x) { return x > FLAT ? FLAT : x < -FLAT ? -FLAT : x; }

struct Normal {
    float below;  // Phi(x)
    float bell;   // exp(-x^2 / 2)
};
DEVICE Normal normal(float x) {
    const float u = reciprocal_fast(fmaf(fabsf(x), 0.25f, 1.0f));
    float p = 0.01978192325f;
    p = fmaf(p, u, -0.08087693792f);
    p = fmaf(p, u, 0.09559641188f);
    p = fmaf(p, u, -0.03171687115f);
    p = fmaf(p, u, 0.06369874372f);
    p = fmaf(p, u, 0.05897527133f);
    p = fmaf(p, u, 0.08160308634f);
    p = fmaf(p, u, 0.09346635736f);
    p = fmaf(p, u, 0.09973643154f);
    p = fmaf(p, u, 0.09973556672f);
    const float bell = exp_fast(x * -0.5f * x);
    const float tail = p * u * bell;
    return {x < 0.0f ? tail : 1.0f - tail, bell};
}

// The function at x, and its derivative.
struct Point {
    float value;
    float slope;
};

struct ErfCurve {
    static __device__ __forceinline__ float value(float x) { return x * normal(x).below; }
    // The value is that of the unclamped x: beyond FLAT the distribution is 0 or 1.
    static __device__ __forceinline__ Point point(float x) {
        const float here = near_zero(x);
        const Normal of = normal(here);
        return {x * of.below, fmaf(here * DENSITY, of.bell, of.below)};
    }
};

struct TanhCurve {
    // For x near zero.
    static __device__ __forceinline__ float share(float x) {
        return sigmoid(x * fmaf(x * x, CUBIC, LINEAR));
    }
    static __device__ __forceinline__ float value(float x) { return x * share(near_zero(x)); }
    static __device__ __forceinline__ Point point(float x) {
        const float here = near_zero(x);
        const float s = share(here);
        return {x * s, fmaf(here * (s * (1.0f - s)), fmaf(here * here, 3.0f * CUBIC, LINEAR), s)};
    }
};

template <class Curve, Access ACCESS>
DEVICE void forward(const RowMap& arguments) {
    map_rows<activation, ACCESS, Reads::X>(arguments,
                                           [](float x, float) { return Curve::value(x); });
}

constexpr u32 BACKWARD_THREADS = 128;
constexpr u32 COLUMNS = 16 / sizeof(activation);
// Rows that a thread has in flight.
constexpr u32 BATCH = 4;

struct GeluBackward {
    activation* gradient;  // [rows, n], rows gradient_stride apart: dout, which dx overwrites
    activation* out;       // [rows, n], rows out_stride apart
    float* bias_partials;  // [runs of all grains, n], or null
    const activation* x;   // [rows, n], rows x_stride apart
    const float* bias;     // [n], added to x; or null
    u64 gradient_stride;
    u64 out_stride;
    u64 x_stride;
    u64 rows;
    u64 rows_per_grain;
    u32 runs_per_grain;
    u32 width;  // n
};

// A thread for each pack of columns of each run of rows. The run's sums are of dx as stored, from +0.0 in order.
template <class Curve, Access ACCESS>
DEVICE void backward(const GeluBackward& arguments) {
    typedef Pack<COLUMNS> Columns;
    const u32 width = arguments.width;
    const u32 tiles = (width - 1) / (BACKWARD_THREADS * COLUMNS) + 1;
    const u32 column = (blockIdx.x % tiles * BACKWARD_THREADS + threadIdx.x) * COLUMNS;
    if (column >= width) return;
    const u32 count = width - column;
    const u64 run = blockIdx.x / tiles;
    const Run rows = run_of_rows<BIAS_RUN_ROWS>(arguments, run);
    activation* const gradient = arguments.gradient + column;
    activation* const out = arguments.out + column;
    const activation* const x = arguments.x + column;
    Columns bias = filled<COLUMNS>(0.0f);
    if (arguments.bias) bias = load<COLUMNS, ACCESS>(arguments.bias + column, count);
    Columns sum = filled<COLUMNS>(0.0f);
    for (u64 first = rows.first_row; first < rows.last_row; first += BATCH) {
        Columns inputs[BATCH], douts[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            // Past the last row the first is loaded again and not stored: no load waits for a condition.
            const u64 row = first + i < rows.last_row ? first + i : first;
            inputs[i] = load<COLUMNS, ACCESS>(x + row * arguments.x_stride, count);
            douts[i] = load<COLUMNS, ACCESS>(gradient + row * arguments.gradient_stride, count);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u64 row = first + i;
            if (row >= rows.last_row) break;
            Columns values, gradients;
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) {
                const float biased = arguments.bias ? inputs[i].at[j] + bias.at[j] : inputs[i].at[j];
                const Point point = Curve::point(biased);
                values.at[j] = point.value;
                gradients.at[j] = douts[i].at[j] * point.slope;
            }
            gradients = as_activations(gradients);
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) sum.at[j] += gradients.at[j];
            store<COLUMNS, ACCESS>(out + row * arguments.out_stride, values, count);
            store<COLUMNS, ACCESS>(gradient + row * arguments.gradient_stride, gradients, count);
        }
    }
    if (arguments.bias_partials) {
        store<COLUMNS, Access::SINGLE>(arguments.bias_partials + run * width + column, sum, count);
    }
}

#define GELU(name, Curve)                                                                   \
    KERNEL(gelu_##name##_forward_wide, MAP_THREADS, 3, RowMap) {                            \
        forward<Curve, Access::WIDE>(arguments);                                            \
    }                                                                                       \
    KERNEL(gelu_##name##_forward_single, MAP_THREADS, 3, RowMap) {                          \
        forward<Curve, Access::SINGLE>(arguments);                                          \
    }                                                                                       \
    KERNEL(gelu_##name##_backward_wide, BACKWARD_THREADS, 4, GeluBackward) {                \
        backward<Curve, Access::WIDE>(arguments);                                           \
    }                                                                                       \
    KERNEL(gelu_##name##_backward_single, BACKWARD_THREADS, 4, GeluBackward) {              \
        backward<Curve, Access::SINGLE>(arguments);                                         \
    }

GELU(erf, ErfCurve)
GELU(tanh, TanhCurve)
