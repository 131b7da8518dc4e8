// Layer norm (Ba, Kiros and Hinton, 2016) over rows of the fp32 residual stream or of activations.
//
//   r = (mean((x - mean(x))^2) + eps)^-1/2;   n = (x - mean(x)) r;   y = n weight + bias
//   g = dy weight;   dx = r (g - mean(g) - n mean(g n))
//   dweight, dbias: sums over the grain's rows of dy n and of dy
//
// dx of the residual stream is added to fp32; that of activations takes the place of dy.
//
// Floor, bytes an element of the residual stream with bf16 activations: forward 6 (x read, y written), backward 14 (dy, x
// and dx read, dx written); of activations 4 and 6.
//
// Teams, packs and runs of rows are those of rms_norm.cu. The forward norm keeps a row in registers between its three passes,
// as far as they hold it.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 256;
constexpr u32 COLUMNS = 4;
// Rows over which a team sums the gradients of parameters: cut from a grain's first row.
constexpr u32 RUN_ROWS = 16;
// Packs of a row, and of what it adds to the parameters' gradients, that a thread holds in registers.
constexpr u32 KEPT = 4;
// Packs that a thread loads together.
constexpr u32 PAIR = 2;

typedef Pack<COLUMNS> Columns;

// Two sums that are formed together.
struct Sums {
    float first;
    float second;

    __device__ __forceinline__ Sums& operator+=(const Sums& other) {
        first += other.first;
        second += other.second;
        return *this;
    }
};
DEVICE Sums shuffle_xor(Sums x, u32 mask) {
    return {shuffle_xor(x.first, mask), shuffle_xor(x.second, mask)};
}

template <u32 TEAM, class T>
DEVICE T team_sum(T x) {
    if constexpr (TEAM == WARP) {
        return warp_sum(x);
    } else {
        __shared__ T partial[TEAM / WARP];
        return block_sum<TEAM>(x, partial);
    }
}

// (a + b) + (c + d) of a pack.
DEVICE float sum_of(const Columns& a) { return (a.at[0] + a.at[1]) + (a.at[2] + a.at[3]); }
// ((a + b) + (c + d)) of the products of two packs, added to a sum.
DEVICE float add_products(float sum, const Columns& a, const Columns& b) {
    const float first = fmaf(a.at[1], b.at[1], a.at[0] * b.at[0]);
    const float second = fmaf(a.at[3], b.at[3], a.at[2] * b.at[2]);
    return sum + (first + second);
}

// x - mean; zero past the row.
DEVICE Columns deviations(Columns x, float mean, u32 count) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) x.at[i] = i < count ? x.at[i] - mean : 0.0f;
    return x;
}

// The packs at `column` and `STEP` further on; zeros where the second lies past the row. Both loads are in
// flight at once.
template <u32 STEP, Access ACCESS, class T>
DEVICE void load_pair(Columns (&packs)[PAIR], const T* row, u32 column, u32 width) {
    const bool inside = column + STEP < width;
    const u32 second = inside ? column + STEP : column;
    packs[0] = load<COLUMNS, ACCESS>(row + column, width - column);
    packs[1] = or_zero(inside, load<COLUMNS, ACCESS>(row + second, width - second));
}

struct LayerNormForward {
    activation* y;        // [rows, d], rows y_stride apart
    float* statistics;    // [2, rows]: means, reciprocal deviations
    const void* x;        // [rows, d], rows x_stride apart: fp32 or activations
    const float* weight;  // [d]
    const float* bias;    // [d], or null
    u64 y_stride;
    u64 x_stride;
    u64 rows;
    u32 width;  // d
    float eps;
};

template <u32 TEAM, Access ACCESS>
DEVICE void store_normed(const LayerNormForward& arguments, u64 row, u32 column, Columns pack,
                         float mean, float reciprocal) {
    const u32 count = arguments.width - column;
    const Columns weight = load<COLUMNS, ACCESS>(arguments.weight + column, count);
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) pack.at[i] = (pack.at[i] - mean) * reciprocal;
    if (arguments.bias) {
        const Columns bias = load<COLUMNS, ACCESS>(arguments.bias + column, count);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) pack.at[i] = fmaf(pack.at[i], weight.at[i], bias.at[i]);
    } else {
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) pack.at[i] *= weight.at[i];
    }
    store<COLUMNS, ACCESS>(arguments.y + row * arguments.y_stride + column, pack, count);
}

template <u32 TEAM, Access ACCESS, class Input>
DEVICE void forward(const LayerNormForward& arguments) {
    constexpr u32 TEAMS = THREADS / TEAM;
    constexpr u32 STEP = TEAM * COLUMNS;
    const u64 row = static_cast<u64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
    // Whole teams leave; a block that is one team has a row.
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

struct LayerNormBackward {
    void* dx;                // [rows, d], rows dx_stride apart: fp32 that is added to, or activations that hold dy
    float* weight_partials;  // [runs of all grains, d]
    float* bias_partials;    // [runs of all grains, d], or null
    const activation* dy;    // [rows, d], rows dy_stride apart
    const void* x;           // [rows, d], rows x_stride apart: of dx's type
    const float* statistics; // [2, rows]
    const float* weight;     // [d]
    u64 dx_stride;
    u64 dy_stride;
    u64 x_stride;
    u64 rows;
    u64 rows_per_grain;
    u64 runs;
    u32 runs_per_grain;
    u32 width;  // d
};

// Where a gradient of x goes.
enum class Gradient {
    ADDED,     // to fp32
    IN_PLACE,  // of dy
};

template <Gradient GRADIENT>
struct InputOf;
template <>
struct InputOf<Gradient::ADDED> {
    typedef float Type;
};
template <>
struct InputOf<Gradient::IN_PLACE> {
    typedef activation Type;
};

// What a row adds to the gradients of parameters of a pack.
struct ParameterSums {
    Columns weight;
    Columns bias;
};

// A row of the backward norm, and the sums that it adds to.
template <u32 TEAM, Access ACCESS, Gradient GRADIENT>
struct BackwardRow {
    typedef typename InputOf<GRADIENT>::Type Input;
    static constexpr u32 STEP = TEAM * COLUMNS;

    const LayerNormBackward& arguments;
    const Input* x;
    const activation* dy;
    Input* dx;
    float mean;
    float reciprocal;

    __device__ __forceinline__ BackwardRow(const LayerNormBackward& given, u64 row)
        : arguments(given),
          x(static_cast<const Input*>(given.x) + row * given.x_stride),
          dy(given.dy + row * given.dy_stride),
          dx(static_cast<Input*>(given.dx) + row * given.dx_stride),
          mean(given.statistics[row]),
          reciprocal(given.statistics[given.rows + row]) {}

    // Adds a pack's g and g n to `sums`, and its dy n and dy to `parameters`.
    __device__ __forceinline__ void add_pack(Sums& sums, ParameterSums& parameters,
                                             const Columns& x_pack, const Columns& dy_pack,
                                             Columns g, u32 count) const {
        Columns n = deviations(x_pack, mean, count);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            n.at[i] *= reciprocal;
            g.at[i] *= dy_pack.at[i];
            parameters.weight.at[i] = fmaf(dy_pack.at[i], n.at[i], parameters.weight.at[i]);
            parameters.bias.at[i] += dy_pack.at[i];
        }
        sums.first += sum_of(g);
        sums.second = add_products(sums.second, g, n);
    }

    // The thread's sums of g and of g n. What it adds to the gradients of parameters goes to `parameters`, and to `wide` where
    // the row is wider than that; fp32 dx of the same packs is read on the way.
    template <class Wide>
    __device__ __forceinline__ Sums sums(ParameterSums (&parameters)[KEPT],
                                         Columns (&dx_kept)[KEPT], u32 first, Wide wide) const {
        const u32 width = arguments.width;
        Sums sums{0.0f, 0.0f};
#pragma unroll
        for (u32 kept = 0; kept < KEPT; kept += PAIR) {
            const u32 column = first + kept * STEP;
            if (column >= width) break;
            Columns x_packs[PAIR], dy_packs[PAIR], weights[PAIR], dx_packs[PAIR];
            load_pair<STEP, ACCESS>(x_packs, x, column, width);
            load_pair<STEP, ACCESS>(dy_packs, dy, column, width);
            if constexpr (GRADIENT == Gradient::ADDED) {
                load_pair<STEP, ACCESS>(dx_packs, static_cast<const Input*>(dx), column, width);
            }
            load_pair<STEP, ACCESS>(weights, arguments.weight, column, width);
#pragma unroll
            for (u32 i = 0; i < PAIR; i++) {
                const u32 here = column + i * STEP;
                const u32 count = here < width ? width - here : 0;
                add_pack(sums, parameters[kept + i], x_packs[i], dy_packs[i], weights[i], count);
                if constexpr (GRADIENT == Gradient::ADDED) dx_kept[kept + i] = dx_packs[i];
            }
        }
        for (u32 column = first + KEPT * STEP; column < width; column += STEP) {
            const u32 count = width - column;
            wide(column, [&](ParameterSums& partial) {
                add_pack(sums, partial, load<COLUMNS, ACCESS>(x + column, count),
                         load<COLUMNS, ACCESS>(dy + column, count),
                         load<COLUMNS, ACCESS>(arguments.weight + column, count), count);
            });
        }
        return sums;
    }

    __device__ __forceinline__ void store_dx(const Columns& dx_pack, u32 column,
                                             const Sums& means) const {
        const u32 count = arguments.width - column;
        const Columns x_pack = load<COLUMNS, ACCESS>(x + column, count);
        const Columns dy_pack = load<COLUMNS, ACCESS>(dy + column, count);
        const Columns weight = load<COLUMNS, ACCESS>(arguments.weight + column, count);
        Columns out;
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            const float n = (x_pack.at[i] - mean) * reciprocal;
            const float centred = dy_pack.at[i] * weight.at[i] - means.first;
            out.at[i] = reciprocal * fmaf(-means.second, n, centred);
            if constexpr (GRADIENT == Gradient::ADDED) out.at[i] += dx_pack.at[i];
        }
        store<COLUMNS, ACCESS>(dx + column, out, count);
    }
};

template <u32 TEAM, Access ACCESS, Gradient GRADIENT>
DEVICE void backward(const LayerNormBackward& arguments) {
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
    float* const weight_partials = arguments.weight_partials + run * width;
    float* const bias_partials =
        arguments.bias_partials ? arguments.bias_partials + run * width : nullptr;

    const auto store_sums = [&](u32 column, const ParameterSums& sums) {
        const u32 count = width - column;
        store<COLUMNS, Access::SINGLE>(weight_partials + column, sums.weight, count);
        if (bias_partials) store<COLUMNS, Access::SINGLE>(bias_partials + column, sums.bias, count);
    };
    const auto add_wide = [&](u32 column, auto add) {
        const u32 count = width - column;
        ParameterSums sums;
        sums.weight = load<COLUMNS, Access::SINGLE>(weight_partials + column, count);
        sums.bias = filled<COLUMNS>(0.0f);
        if (bias_partials) sums.bias = load<COLUMNS, Access::SINGLE>(bias_partials + column, count);
        add(sums);
        store_sums(column, sums);
    };

    const ParameterSums none{filled<COLUMNS>(0.0f), filled<COLUMNS>(0.0f)};
    ParameterSums parameters[KEPT];
#pragma unroll
    for (u32 kept = 0; kept < KEPT; kept++) parameters[kept] = none;
    for (u32 column = first + KEPT * STEP; column < width; column += STEP) store_sums(column, none);
    for (u64 row = first_row; row < last_row; row++) {
        const BackwardRow<TEAM, ACCESS, GRADIENT> here(arguments, row);
        Columns dx_kept[KEPT];
        Sums means = team_sum<TEAM>(here.sums(parameters, dx_kept, first, add_wide));
        means.first /= static_cast<float>(width);
        means.second /= static_cast<float>(width);
#pragma unroll
        for (u32 kept = 0; kept < KEPT; kept++) {
            const u32 column = first + kept * STEP;
            if (column < width) here.store_dx(dx_kept[kept], column, means);
        }
        for (u32 column = first + KEPT * STEP; column < width; column += STEP) {
            Columns held;
            if constexpr (GRADIENT == Gradient::ADDED) {
                held = load<COLUMNS, ACCESS>(here.dx + column, width - column);
            }
            here.store_dx(held, column, means);
        }
    }
#pragma unroll
    for (u32 kept = 0; kept < KEPT; kept++) {
        const u32 column = first + kept * STEP;
        if (column < width) store_sums(column, parameters[kept]);
    }
}

// The kernels of a team and an access: of the residual stream, and of activations. BLOCKS is what the registers of the last
// leave room for.
#define LAYER_NORM(variant, TEAM, ACCESS, BLOCKS)                                           \
    KERNEL(layer_norm_forward_residual_##variant, THREADS, 4, LayerNormForward) {           \
        forward<TEAM, ACCESS, float>(arguments);                                            \
    }                                                                                       \
    KERNEL(layer_norm_forward_activation_##variant, THREADS, 4, LayerNormForward) {         \
        forward<TEAM, ACCESS, activation>(arguments);                                       \
    }                                                                                       \
    KERNEL(layer_norm_backward_residual_##variant, THREADS, 2, LayerNormBackward) {         \
        backward<TEAM, ACCESS, Gradient::ADDED>(arguments);                                 \
    }                                                                                       \
    KERNEL(layer_norm_backward_activation_##variant, THREADS, BLOCKS, LayerNormBackward) {  \
        backward<TEAM, ACCESS, Gradient::IN_PLACE>(arguments);                              \
    }

LAYER_NORM(wide, THREADS, Access::WIDE, 2)
LAYER_NORM(single, THREADS, Access::SINGLE, 1)
LAYER_NORM(short_wide, WARP, Access::WIDE, 2)
LAYER_NORM(short_single, WARP, Access::SINGLE, 1)

struct LayerNormSumPartials {
    float* dweight;                // [grains, d]
    float* dbias;                  // [grains, d], or null
    const float* weight_partials;  // [runs of all grains, d]
    const float* bias_partials;    // [runs of all grains, d], or null
    u64 runs;
    u64 elements;  // grains d
    u32 runs_per_grain;
    u32 width;  // d
};

// A thread for each column of each grain of each parameter: the runs of the grain in order, from +0.0.
KERNEL(layer_norm_sum_partials, 128, 1, LayerNormSumPartials) {
    const u64 thread = static_cast<u64>(blockIdx.x) * 128 + threadIdx.x;
    const bool of_bias = thread >= arguments.elements;
    const u64 element = of_bias ? thread - arguments.elements : thread;
    float* const out = of_bias ? arguments.dbias : arguments.dweight;
    const float* const partials = of_bias ? arguments.bias_partials : arguments.weight_partials;
    if (element >= arguments.elements || !out) return;
    const u64 grain = element / arguments.width;
    const u64 column = element % arguments.width;
    const u64 first = grain * arguments.runs_per_grain;
    const u64 last = min(first + arguments.runs_per_grain, arguments.runs);
    float sum = 0.0f;
#pragma unroll 16
    for (u64 run = first; run < last; run++) sum += partials[run * arguments.width + column];
    out[element] = sum;
}
