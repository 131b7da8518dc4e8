// RMSNorm (rms_norm.cu) of rows or heads of activations that are at most 128 columns wide, as heads of queries and keys are (Henry et
// al., 2020).
//
// Floor: 4 bytes an element of bf16 forward, 6 backward. Few bytes leave time for few instructions: a team of eight threads has a head,
// so that a warp sums and divides for several at once, and a thread finds the place of its first head by division, those of others by
// adding.
#include "dialect.h"
#include "pack.h"
#include "norm.h"

constexpr u32 TEAM = 8;
constexpr u32 TEAMS = THREADS / TEAM;
constexpr u32 WARPS = THREADS / WARP;
// Columns that a thread loads at once, and that lie between its packs of a head.
constexpr u32 PACK = 8;
constexpr u32 STEP = TEAM * PACK;

// A thread's columns of a head.
template <u32 PACKS>
struct Part {
    Pack<PACK> packs[PACKS];
};

template <u32 PACKS>
DEVICE float sum_of_products(const Part<PACKS>& a, const Part<PACKS>& b) {
    float sums[PACKS];
#pragma unroll
    for (u32 k = 0; k < PACKS; k++) {
        float pairs[PACK / 2];
#pragma unroll
        for (u32 i = 0; i < PACK; i += 2) {
            const Pack<PACK>&x = a.packs[k], &y = b.packs[k];
            pairs[i / 2] = fmaf(x.at[i + 1], y.at[i + 1], x.at[i] * y.at[i]);
        }
        sums[k] = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
    }
    static_assert(PACKS <= 2, "two sums are added");
    return PACKS == 1 ? sums[0] : sums[0] + sums[PACKS - 1];
}

// Heads as a thread reads and writes them.
template <u32 PACKS, Access ACCESS>
struct Heads {
    u32 width;

    // Zeros past the head.
    template <class T>
    __device__ __forceinline__ Part<PACKS> read(const T* head) const {
        Part<PACKS> part;
#pragma unroll
        for (u32 k = 0; k < PACKS; k++) {
            const u32 own = threadIdx.x % TEAM * PACK + k * STEP, column = own < width ? own : 0;
            part.packs[k] = or_zero(own < width, load<PACK, ACCESS>(head + column, width - column));
        }
        return part;
    }
    template <class T>
    __device__ __forceinline__ void write(T* head, const Part<PACKS>& part) const {
#pragma unroll
        for (u32 k = 0; k < PACKS; k++) {
            const u32 column = threadIdx.x % TEAM * PACK + k * STEP;
            if (column < width) store<PACK, ACCESS>(head + column, part.packs[k], width - column);
        }
    }
};

// A head of a row.
struct HeadPlace {
    u64 row;
    u32 head;

    __device__ __forceinline__ HeadPlace(u32 index, u32 heads) : row(index / heads), head(index % heads) {}
    __device__ __forceinline__ u64 in_rows(u64 stride, u32 width) const { return row * stride + static_cast<u64>(head) * width; }
    // Moves on by `rows` rows and `more` heads; `more` is less than the heads of a row.
    __device__ __forceinline__ void advance(u32 rows, u32 more, u32 heads) {
        row += rows;
        head += more;
        if (head < heads) return;
        head -= heads;
        row++;
    }
};

// A team for each head.
template <u32 PACKS, Access ACCESS>
DEVICE void heads_forward(const NormForward& arguments) {
    const u32 own = blockIdx.x * TEAMS + threadIdx.x / TEAM, count = static_cast<u32>(arguments.rows);
    // Teams past the last head read the last one again and store nothing: every thread of a warp takes part in its sums.
    const u32 index = min(own, count - 1);
    release_next();
    await_previous();
    const u32 width = arguments.width;
    const Heads<PACKS, ACCESS> heads{width};
    const HeadPlace place(index, arguments.heads);
    const activation* const from = static_cast<const activation*>(arguments.x) + place.in_rows(arguments.x_stride, width);
    Part<PACKS> x = heads.read(from);
    const Part<PACKS> weight = heads.read(arguments.weight);
    const float mean = team_sum<TEAM>(sum_of_products(x, x)) / static_cast<float>(width);
    const float reciprocal_rms = 1.0f / sqrtf(mean + arguments.eps);
    if (own >= count) return;
    if (threadIdx.x % TEAM == 0) arguments.statistics[index] = reciprocal_rms;
#pragma unroll
    for (u32 k = 0; k < PACKS; k++) {
#pragma unroll
        for (u32 i = 0; i < PACK; i++) x.packs[k].at[i] = x.packs[k].at[i] * reciprocal_rms * weight.packs[k].at[i];
    }
    heads.write(arguments.y + place.in_rows(arguments.y_stride, width), x);
}

// A block has a run of heads, of which each team has every TEAMS-th. Its sums of dy xr are added over the teams of a warp, then over
// the warps.
template <u32 PACKS, Access ACCESS>
DEVICE void heads_backward(const NormBackward& arguments) {
    __shared__ float of_warps[WARPS][PACKS * STEP];
    const u32 width = arguments.width, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Heads<PACKS, ACCESS> heads{width};
    const Run run = run_of_rows<RUN_HEADS>(arguments, blockIdx.x);
    const u32 begin = static_cast<u32>(run.first_row), end = static_cast<u32>(run.last_row);
    const u32 rows = TEAMS / arguments.heads, more = TEAMS % arguments.heads;
    const Part<PACKS> weight = heads.read(arguments.weight);
    u32 index = begin + threadIdx.x / TEAM;
    HeadPlace place(index, arguments.heads);
    Part<PACKS> sums{};
    // Every thread of a warp takes part in its sums, with zeros where its team has no head.
#pragma unroll 1
    for (u32 first = begin + warp * (WARP / TEAM); first < end; first += TEAMS, index += TEAMS) {
        Part<PACKS> x{}, dy{};
        float reciprocal = 0.0f;
        if (index < end) {
            const activation* const x_start = static_cast<const activation*>(arguments.x);
            x = heads.read(x_start + place.in_rows(arguments.x_stride, width));
            dy = heads.read(arguments.dy + place.in_rows(arguments.dy_stride, width));
            reciprocal = arguments.statistics[index];
        }
        // From here on x is xr, and dy is dy weight.
#pragma unroll
        for (u32 k = 0; k < PACKS; k++) {
#pragma unroll
            for (u32 i = 0; i < PACK; i++) {
                x.packs[k].at[i] *= reciprocal;
                sums.packs[k].at[i] = fmaf(dy.packs[k].at[i], x.packs[k].at[i], sums.packs[k].at[i]);
                dy.packs[k].at[i] *= weight.packs[k].at[i];
            }
        }
        const float mean = team_sum<TEAM>(sum_of_products(dy, x)) / static_cast<float>(width);
#pragma unroll
        for (u32 k = 0; k < PACKS; k++) {
#pragma unroll
            for (u32 i = 0; i < PACK; i++) {
                dy.packs[k].at[i] = reciprocal * fmaf(-mean, x.packs[k].at[i], dy.packs[k].at[i]);
            }
        }
        activation* const dx = static_cast<activation*>(arguments.dx);
        if (index < end) heads.write(dx + place.in_rows(arguments.dx_stride, width), dy);
        place.advance(rows, more, arguments.heads);
    }
#pragma unroll
    for (u32 k = 0; k < PACKS; k++) {
#pragma unroll
        for (u32 i = 0; i < PACK; i++) {
            float sum = sums.packs[k].at[i];
#pragma unroll
            for (u32 mask = TEAM; mask < WARP; mask *= 2) sum += shuffle_xor(sum, mask);
            if (lane < TEAM) of_warps[warp][k * STEP + lane * PACK + i] = sum;
        }
    }
    __syncthreads();
    const u32 column = threadIdx.x;
    if (column >= width) return;
    float total = of_warps[0][column];
#pragma unroll
    for (u32 other = 1; other < WARPS; other++) total += of_warps[other][column];
    arguments.weight_partials[static_cast<u64>(blockIdx.x) * width + column] = total;
}

// The kernels of heads of at most a width, by their accesses.
#define HEADS_OF(WIDTH, variant, ACCESS)                                                   \
    KERNEL(rms_norm_forward_heads_##WIDTH##_##variant, THREADS, 4, NormForward) {          \
        heads_forward<WIDTH / STEP, ACCESS>(arguments);                                    \
    }                                                                                      \
    KERNEL(rms_norm_backward_heads_##WIDTH##_##variant, THREADS, 2, NormBackward) {        \
        heads_backward<WIDTH / STEP, ACCESS>(arguments);                                   \
    }

HEADS_OF(64, wide, Access::WIDE)
HEADS_OF(64, single, Access::SINGLE)
HEADS_OF(128, wide, Access::WIDE)
HEADS_OF(128, single, Access::SINGLE)
