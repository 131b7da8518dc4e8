// Common parts of RMSNorm and layer norm: the team of threads for a row, and the backward norm of rows of any width.
//
// A team of threads has a row: a warp where rows are short, else a block. Thread i of a team of T has the packs i, i +
// T, ... of four columns each. (Of narrow heads rms_norm_heads.cu has its own teams.)
#pragma once
#include "runs.h"

constexpr u32 THREADS = 256;
constexpr u32 COLUMNS = 4;
// The number of rows over which a team sums the gradients of parameters.
constexpr u32 RUN_ROWS = 16;
// The same of narrow heads (rms_norm_heads.cu), over which a block sums.
constexpr u32 RUN_HEADS = 512;
// Packs of a row, and of its contribution to the parameters' gradients, that a thread holds in registers; in wider rows
// it adds the others in the scratch.
constexpr u32 KEPT = 4;
// Packs that a thread loads together.
constexpr u32 PAIR = 2;

typedef Pack<COLUMNS> Columns;

enum class Norm { RMS, LAYER };

struct NormForward {
    activation* y;        // [rows, d], rows y_stride apart
    float* statistics;    // [rows]: reciprocal RMS; of layer norm [2, rows]: means, reciprocal deviations
    const void* x;        // [rows, d], rows x_stride apart: fp32 or activations
    const float* weight;  // [d]
    const float* bias;    // [d], or null
    u64 y_stride;
    u64 x_stride;
    u64 rows;   // or heads of rows
    u32 width;  // rows, or heads of rows
    float eps;
    u32 heads;  // heads of a row of activations, in RMSNorm
    u32 unused;
};

struct NormBackward {
    void* dx;                 // [rows, d], rows dx_stride apart: fp32 to add to, or activations that hold dy before
    activation* rounded;      // [rows, d], rows rounded_stride apart: fp32 dx after the addition, rounded; or null
    float* weight_partials;   // [runs of all grains, d]
    float* bias_partials;     // [runs of all grains, d], or null
    const activation* dy;     // [rows, d], rows dy_stride apart
    const void* x;            // [rows, d], rows x_stride apart: of dx's type
    const float* statistics;  // as the forward norm wrote them
    const float* weight;      // [d]
    u64 dx_stride;
    u64 rounded_stride;
    u64 dy_stride;
    u64 x_stride;
    u64 rows;
    u64 rows_per_grain;
    u64 runs;
    u32 runs_per_grain;
    u32 width;  // d
    u32 heads;  // as in the forward norm, whose rows these are
    u32 unused;
};

// Where head `index % heads` of row `index / heads` begins.
template <class Arguments>
DEVICE u64 head_place(const Arguments& arguments, u64 index, u64 stride) {
    return index / arguments.heads * stride + index % arguments.heads * arguments.width;
}

template <u32 TEAM, class T>
DEVICE T team_sum(T x) {
    if constexpr (TEAM <= WARP) {
        return lane_sum<TEAM>(x);
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

// The packs at `column` and `STEP` further on; zeros if the second lies past the row. Both loads are in flight at once.
template <u32 STEP, Access ACCESS, class T>
DEVICE void load_pair(Columns (&packs)[PAIR], const T* row, u32 column, u32 width) {
    const bool inside = column + STEP < width;
    const u32 second = inside ? column + STEP : column;
    packs[0] = load<COLUMNS, ACCESS>(row + column, width - column);
    packs[1] = or_zero(inside, load<COLUMNS, ACCESS>(row + second, width - second));
}

// The packs of a thread, STEP columns apart, in rows of whole packs; zeros past the row.
template <u32 STEP, u32 COUNT, class T>
DEVICE void load_kept(Columns (&packs)[COUNT], const T* row, u32 first, u32 width) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        const u32 column = first + i * STEP;
        packs[i] = or_zero(column < width, load_pack<COLUMNS>(row + (column < width ? column : 0)));
    }
}

// How a gradient of x is stored.
enum class Gradient {
    ADDED,     // to the fp32 gradient
    IN_PLACE,  // in place of dy
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

// Sums over a row: of g, if the norm subtracts a mean, and of g n.
template <Norm NORM>
struct RowSums;
template <>
struct RowSums<Norm::RMS> {
    float products;

    __device__ __forceinline__ RowSums& operator+=(const RowSums& other) {
        products += other.products;
        return *this;
    }
};
template <>
struct RowSums<Norm::LAYER> {
    float g;
    float products;

    __device__ __forceinline__ RowSums& operator+=(const RowSums& other) {
        g += other.g;
        products += other.products;
        return *this;
    }
};
DEVICE RowSums<Norm::RMS> shuffle_xor(RowSums<Norm::RMS> x, u32 mask) {
    return {shuffle_xor(x.products, mask)};
}
DEVICE RowSums<Norm::LAYER> shuffle_xor(RowSums<Norm::LAYER> x, u32 mask) {
    return {shuffle_xor(x.g, mask), shuffle_xor(x.products, mask)};
}

// The contribution of a row to the parameters' gradients, for one pack.
template <Norm NORM>
struct ParameterSums;
template <>
struct ParameterSums<Norm::RMS> {
    Columns weight;
};
template <>
struct ParameterSums<Norm::LAYER> {
    Columns weight;
    Columns bias;
};

// A row of the backward norm, and the sums that it adds to.
template <Norm NORM, u32 TEAM, Access ACCESS, Gradient GRADIENT>
struct BackwardRow {
    typedef typename InputOf<GRADIENT>::Type Input;
    static constexpr u32 STEP = TEAM * COLUMNS;

    const NormBackward& arguments;
    const Input* x;
    const activation* dy;
    Input* dx;
    activation* rounded;
    float mean;
    float reciprocal;

    // Rows of activations may be heads in RMSNorm.
    static __device__ __forceinline__ u64 place(const NormBackward& given, u64 row, u64 stride) {
        if constexpr (NORM == Norm::RMS && GRADIENT == Gradient::IN_PLACE) return head_place(given, row, stride);
        return row * stride;
    }

    __device__ __forceinline__ BackwardRow(const NormBackward& given, u64 row)
        : arguments(given),
          x(static_cast<const Input*>(given.x) + place(given, row, given.x_stride)),
          dy(given.dy + place(given, row, given.dy_stride)),
          dx(static_cast<Input*>(given.dx) + place(given, row, given.dx_stride)),
          rounded(given.rounded + row * given.rounded_stride) {}

    __device__ __forceinline__ void load_statistics(u64 row) {
        mean = NORM == Norm::LAYER ? arguments.statistics[row] : 0.0f;
        reciprocal = arguments.statistics[NORM == Norm::LAYER ? arguments.rows + row : row];
    }

    // Adds a pack's g and g n to `sums`, and its dy n and dy to `parameters`.
    __device__ __forceinline__ void add_pack(RowSums<NORM>& sums, ParameterSums<NORM>& parameters,
                                             const Columns& x_pack, const Columns& dy_pack,
                                             Columns g, u32 count) const {
        Columns n = x_pack;
        if constexpr (NORM == Norm::LAYER) n = deviations(x_pack, mean, count);
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            n.at[i] *= reciprocal;
            g.at[i] *= dy_pack.at[i];
            parameters.weight.at[i] = fmaf(dy_pack.at[i], n.at[i], parameters.weight.at[i]);
            if constexpr (NORM == Norm::LAYER) parameters.bias.at[i] += dy_pack.at[i];
        }
        if constexpr (NORM == Norm::LAYER) sums.g += sum_of(g);
        sums.products = add_products(sums.products, g, n);
    }

    // The thread's sums over the row. Its contribution to the gradients of parameters goes to `parameters`, and to
    // `wide` where the row is wider than that; fp32 dx of the same packs is read in the same pass.
    template <class Wide>
    __device__ __forceinline__ RowSums<NORM> sums(ParameterSums<NORM> (&parameters)[KEPT],
                                                  Columns (&dx_kept)[KEPT], u32 first,
                                                  Wide wide) const {
        const u32 width = arguments.width;
        RowSums<NORM> sums{};
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
            wide(column, [&](ParameterSums<NORM>& partial) {
                add_pack(sums, partial, load<COLUMNS, ACCESS>(x + column, count),
                         load<COLUMNS, ACCESS>(dy + column, count),
                         load<COLUMNS, ACCESS>(arguments.weight + column, count), count);
            });
        }
        return sums;
    }

    __device__ __forceinline__ void store_dx(const Columns& dx_pack, u32 column,
                                             const RowSums<NORM>& means) const {
        const u32 count = arguments.width - column;
        form_dx(dx_pack, load<COLUMNS, ACCESS>(x + column, count), load<COLUMNS, ACCESS>(dy + column, count),
                load<COLUMNS, ACCESS>(arguments.weight + column, count), column, means);
    }

    __device__ __forceinline__ void form_dx(const Columns& dx_pack, const Columns& x_pack, const Columns& dy_pack,
                                            const Columns& weight, u32 column, const RowSums<NORM>& means) const {
        const u32 count = arguments.width - column;
        Columns out;
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) {
            float n = x_pack.at[i], g = dy_pack.at[i] * weight.at[i];
            if constexpr (NORM == Norm::LAYER) {
                n -= mean;
                g -= means.g;
            }
            n *= reciprocal;
            out.at[i] = reciprocal * fmaf(-means.products, n, g);
            if constexpr (GRADIENT == Gradient::ADDED) out.at[i] += dx_pack.at[i];
        }
        store<COLUMNS, ACCESS>(dx + column, out, count);
        if constexpr (GRADIENT == Gradient::ADDED && ACCESS == Access::WIDE) {
            if (arguments.rounded) store<COLUMNS, ACCESS>(rounded + column, out, count);
        }
    }
};

// With n the normed x and g = dy weight: dx = r (g - mean(g) - n mean(g n)), of RMSNorm without the mean of g; and for each run
// of rows the sums of dy n and of dy.
template <Norm NORM, u32 TEAM, Access ACCESS, Gradient GRADIENT>
DEVICE void norm_backward(const NormBackward& arguments) {
    constexpr u32 TEAMS = THREADS / TEAM;
    constexpr u32 STEP = TEAM * COLUMNS;
    const u64 run = static_cast<u64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
    if (run >= arguments.runs) return;
    const Run rows = run_of_rows<RUN_ROWS>(arguments, run);
    const u32 width = arguments.width;
    const u32 first = threadIdx.x % TEAM * COLUMNS;
    float* const weight_partials = arguments.weight_partials + run * width;
    float* bias_partials = nullptr;
    if constexpr (NORM == Norm::LAYER) {
        if (arguments.bias_partials) bias_partials = arguments.bias_partials + run * width;
    }

    const auto store_sums = [&](u32 column, const ParameterSums<NORM>& sums) {
        const u32 count = width - column;
        store<COLUMNS, Access::SINGLE>(weight_partials + column, sums.weight, count);
        if constexpr (NORM == Norm::LAYER) {
            if (bias_partials) {
                store<COLUMNS, Access::SINGLE>(bias_partials + column, sums.bias, count);
            }
        }
    };
    const auto add_wide = [&](u32 column, auto add) {
        const u32 count = width - column;
        ParameterSums<NORM> sums{};
        sums.weight = load<COLUMNS, Access::SINGLE>(weight_partials + column, count);
        if constexpr (NORM == Norm::LAYER) {
            if (bias_partials) {
                sums.bias = load<COLUMNS, Access::SINGLE>(bias_partials + column, count);
            }
        }
        add(sums);
        store_sums(column, sums);
    };

    ParameterSums<NORM> parameters[KEPT]{};
    for (u32 column = first + KEPT * STEP; column < width; column += STEP) store_sums(column, {});
    for (u64 row = rows.first_row; row < rows.last_row; row++) {
        BackwardRow<NORM, TEAM, ACCESS, GRADIENT> here(arguments, row);
        here.load_statistics(row);
        Columns dx_kept[KEPT];
        RowSums<NORM> means = team_sum<TEAM>(here.sums(parameters, dx_kept, first, add_wide));
        if constexpr (NORM == Norm::LAYER) means.g /= static_cast<float>(width);
        means.products /= static_cast<float>(width);
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

#if BACKWARD && !OF_ACTIVATIONS
// A block for each row: dx in activation precision, for cases in which the kernel that adds to dx accesses elements one
// by one. That kernel has no registers left to round dx itself.
KERNEL(round_dx_single, THREADS, 1, NormBackward) {
    const float* const dx = static_cast<const float*>(arguments.dx) + blockIdx.x * arguments.dx_stride;
    activation* const rounded = arguments.rounded + blockIdx.x * arguments.rounded_stride;
    for (u32 i = threadIdx.x; i < arguments.width; i += THREADS) narrow(rounded[i], dx[i]);
}
#endif

// The kernels of a norm, named after the team of a row and its access, which the function behind the blocks is given as TEAM and ACCESS.
// A multiprocessor has to have registers for so many blocks; single accesses take more of them.
#define NORM_KERNELS(name, Arguments, WIDE_BLOCKS, SINGLE_BLOCKS, ...)                           \
    NORM_KERNEL(name##_wide, Arguments, WIDE_BLOCKS, THREADS, Access::WIDE, (__VA_ARGS__))       \
    NORM_KERNEL(name##_single, Arguments, SINGLE_BLOCKS, THREADS, Access::SINGLE, (__VA_ARGS__)) \
    NORM_KERNEL(name##_short_wide, Arguments, WIDE_BLOCKS, WARP, Access::WIDE, (__VA_ARGS__))    \
    NORM_KERNEL(name##_short_single, Arguments, SINGLE_BLOCKS, WARP, Access::SINGLE, (__VA_ARGS__))
#define NORM_KERNEL(name, Arguments, blocks, team, access, function) \
    KERNEL(name, THREADS, blocks, Arguments) {                       \
        constexpr u32 TEAM = team;                                   \
        constexpr Access ACCESS = access;                            \
        function(arguments);                                         \
    }
