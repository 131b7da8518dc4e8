// GELU (Hendrycks and Gimpel, 2016): x Phi(x), Phi being the normal distribution, or 0.5 x (1 + tanh(sqrt(2 / pi) (x +
// 0.044715 x^3))); and their derivatives.
//
// Phi is formed from its scaled tail, as on the CPU: Phi(-t) = exp(-t^2 / 2) u P(u), u = 1 / (1 + t / 4), t >= 0, which keeps all
// bits far out, and whose exponential is the density's too. Half of 1 + tanh u is sigmoid(2 u).
//
// Floor: 4 bytes an element of bf16 forward, 6 backward.
#include "dialect.h"
#include "pack.h"
#include "row_map.h"

// 1 / sqrt(2 pi).
#define DENSITY 0.3989422804f
// 2 sqrt(2 / pi), and that times 0.044715.
#define LINEAR 1.5957691216f
#define CUBIC 0.0713548163f
// Beyond it every slope is 0 or 1, and squares of x may overflow.
#define FLAT 16.0f

// x within +-FLAT; a NaN stays.
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

struct ErfCurve {
    static __device__ __forceinline__ float value(float x) { return x * normal(x).below; }
    static __device__ __forceinline__ float slope(float x) {
        const float here = near_zero(x);
        const Normal of = normal(here);
        return fmaf(here * DENSITY, of.bell, of.below);
    }
};

struct TanhCurve {
    // Of x near zero.
    static __device__ __forceinline__ float share(float x) {
        return sigmoid(x * fmaf(x * x, CUBIC, LINEAR));
    }
    static __device__ __forceinline__ float value(float x) { return x * share(near_zero(x)); }
    static __device__ __forceinline__ float slope(float x) {
        const float here = near_zero(x);
        const float s = share(here);
        return fmaf(here * (s * (1.0f - s)), fmaf(here * here, 3.0f * CUBIC, LINEAR), s);
    }
};

template <class Curve, Access ACCESS>
DEVICE void forward(const RowMap& arguments) {
    map_rows<activation, ACCESS, Reads::X>(arguments,
                                           [](float x, float) { return Curve::value(x); });
}
template <class Curve, Access ACCESS>
DEVICE void backward(const RowMap& arguments) {
    map_rows<activation, ACCESS, Reads::X_AND_DOUT>(
        arguments, [](float x, float dout) { return dout * Curve::slope(x); });
}

#define GELU(name, Curve)                                                                   \
    KERNEL(gelu_##name##_forward_wide, MAP_THREADS, 3, RowMap) {                            \
        forward<Curve, Access::WIDE>(arguments);                                            \
    }                                                                                       \
    KERNEL(gelu_##name##_forward_single, MAP_THREADS, 3, RowMap) {                          \
        forward<Curve, Access::SINGLE>(arguments);                                          \
    }                                                                                       \
    KERNEL(gelu_##name##_backward_wide, MAP_THREADS, 2, RowMap) {                           \
        backward<Curve, Access::WIDE>(arguments);                                           \
    }                                                                                       \
    KERNEL(gelu_##name##_backward_single, MAP_THREADS, 2, RowMap) {                         \
        backward<Curve, Access::SINGLE>(arguments);                                         \
    }

GELU(erf, ErfCurve)
GELU(tanh, TanhCurve)
