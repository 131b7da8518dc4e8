// Updates of parameters: AdamW (Loshchilov and Hutter, 2019, in the order of PyTorch's) and Lion (Chen et al., 2023) of
// fp32 masters and of split ones; scaled sums, from which the update of a whole matrix is built (Muon's); and masters
// rounded to activation precision, split and joined.
//
// A split master is the bf16 that matrix products read, and the 16 bits that rounding removed. Together they are the
// fp32 master to the bit, so that an update gives the bits that it gives fp32 masters, and the next bf16 copy too.
// (Megatron-LM's precision-aware optimizer stores the same.)
//
// Floor: AdamW reads four words an element and writes three, 28 bytes: 9.1 ms for 1.4 billion parameters at 4.3 TB/s.
// For split masters it reads 2 + 2 + 4 + 4 + 4 bytes and writes 2 + 2 + 4 + 4: also 28, where an fp32 master that is
// rounded afterwards takes 34. Lion has one state less: 20. Rounding reads 4 bytes and writes 2; splitting and joining
// read 4 and write 4.
#include "dialect.h"
#include "pack.h"

constexpr u32 THREADS = 256;

// --- split masters ------------------------------------------------------------------------------------

struct SplitMaster {
    u16* rounded;    // [elements]; bf16
    u16* remainder;  // [elements]
};

// The highest of the removed bits says whether the value was rounded up.
DEVICE float joined(u32 rounded, u32 remainder) {
    return __uint_as_float((rounded << 16 | remainder) - ((remainder & 0x8000u) << 1));
}

// To nearest, ties away from zero, because a tie to even could not be undone. A NaN stays a NaN, without its lower
// half: a carry out of its payload would make it a zero.
DEVICE void split(u16& rounded, u16& remainder, float x) {
    const u32 bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    rounded = static_cast<u16>(is_nan ? (bits >> 16) | 0x40u : (bits + 0x8000u) >> 16);
    remainder = static_cast<u16>(is_nan ? 0u : bits);
}

// A pack of upper or lower halves of fp32 values.
template <u32 N>
struct Halves {
    u16 at[N];
};

template <u32 N>
DEVICE Halves<N> load_halves(const u16* at) {
    Halves<N> halves;
    if constexpr (N == 1) {
        halves.at[0] = *at;
    } else {
        const Pairs<N> pairs = load_pairs<N>(at);
#pragma unroll
        for (u32 i = 0; i < N / 2; i++) {
            halves.at[2 * i] = static_cast<u16>(pairs.at[i]);
            halves.at[2 * i + 1] = static_cast<u16>(pairs.at[i] >> 16);
        }
    }
    return halves;
}

template <u32 N>
DEVICE void store_halves(u16* at, const Halves<N>& halves) {
    if constexpr (N == 1) {
        *at = halves.at[0];
    } else {
        Pairs<N> pairs;
#pragma unroll
        for (u32 i = 0; i < N / 2; i++) {
            pairs.at[i] = halves.at[2 * i] | static_cast<u32>(halves.at[2 * i + 1]) << 16;
        }
        store_pairs<N>(at, pairs);
    }
}

// --- parameters, in either form -------------------------------------------------------------------------

// The N parameters from `first` on, of which `count` exist. As with `load`, no load is conditional.
template <u32 N, Access ACCESS, class T>
DEVICE Pack<N> load_from(const T* from, u64 first, u64 count) {
    return load<N, ACCESS>(from + first, count);
}
template <u32 N, Access ACCESS>
DEVICE Pack<N> load_from(const SplitMaster& from, u64 first, u64 count) {
    Pack<N> pack = filled<N>(0.0f);
    if constexpr (ACCESS == Access::WIDE) {
        const Halves<N> rounded = load_halves<N>(from.rounded + first);
        const Halves<N> remainder = load_halves<N>(from.remainder + first);
#pragma unroll
        for (u32 i = 0; i < N; i++) pack.at[i] = joined(rounded.at[i], remainder.at[i]);
    } else if (count > 0) {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            const u64 at = first + (i < count ? i : 0);
            pack.at[i] = joined(from.rounded[at], from.remainder[at]);
        }
    }
    return pack;
}

template <u32 N, Access ACCESS, class T>
DEVICE void store_to(T* out, u64 first, const Pack<N>& pack, u64 count) {
    store<N, ACCESS>(out + first, pack, count);
}
template <u32 N, Access ACCESS>
DEVICE void store_to(const SplitMaster& out, u64 first, const Pack<N>& pack, u64 count) {
    Halves<N> rounded, remainder;
#pragma unroll
    for (u32 i = 0; i < N; i++) split(rounded.at[i], remainder.at[i], pack.at[i]);
    if constexpr (ACCESS == Access::WIDE) {
        store_halves<N>(out.rounded + first, rounded);
        store_halves<N>(out.remainder + first, remainder);
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            if (i < count) {
                out.rounded[first + i] = rounded.at[i];
                out.remainder[first + i] = remainder.at[i];
            }
        }
    }
}

// --- AdamW --------------------------------------------------------------------------------------------

struct Update {
    float* exp_avg;         // [elements]
    float* exp_avg_sq;      // [elements]
    const float* gradient;  // [elements]
    u64 elements;
    float beta1;
    float beta2;
    float rest1;  // 1 - beta1
    float rest2;  // 1 - beta2
    float eps;
    float decay_factor;
    float step_size;         // learning_rate / bias_correction1
    float root_correction2;  // sqrt(bias_correction2)
    float gradient_scale;
    u32 padding;
};

// Either fp32 parameters or split masters.
template <class Parameters>
struct AdamW {
    Parameters parameters;  // [elements]
    Update update;
};

// m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
// p = p decay_factor - step_size m / (sqrt(v) / root_correction2 + eps)
template <u32 N, u32 BATCH, Access ACCESS, class Parameters>
DEVICE void update(const AdamW<Parameters>& arguments, const Tile<THREADS, BATCH, N>& tile) {
    const Update& step = arguments.update;
    Pack<N> p[BATCH], m[BATCH], v[BATCH], g[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        p[i] = load_from<N, ACCESS>(arguments.parameters, tile.pack(i), tile.count(i));
        m[i] = load<N, ACCESS>(step.exp_avg + tile.pack(i), tile.count(i));
        v[i] = load<N, ACCESS>(step.exp_avg_sq + tile.pack(i), tile.count(i));
        g[i] = load<N, ACCESS>(step.gradient + tile.pack(i), tile.count(i));
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
        for (u32 j = 0; j < N; j++) {
            const float gradient = g[i].at[j] * step.gradient_scale;
            const float first = fmaf(m[i].at[j], step.beta1, gradient * step.rest1);
            const float square = gradient * gradient * step.rest2;
            const float second = fmaf(v[i].at[j], step.beta2, square);
            const float denominator = sqrtf(second) / step.root_correction2 + step.eps;
            const float decayed = p[i].at[j] * step.decay_factor;
            m[i].at[j] = first;
            v[i].at[j] = second;
            p[i].at[j] = fmaf(-step.step_size, first / denominator, decayed);
        }
        store_to<N, ACCESS>(arguments.parameters, tile.pack(i), p[i], tile.count(i));
        store<N, ACCESS>(step.exp_avg + tile.pack(i), m[i], tile.count(i));
        store<N, ACCESS>(step.exp_avg_sq + tile.pack(i), v[i], tile.count(i));
    }
}

// --- Lion ---------------------------------------------------------------------------------------------

struct LionUpdate {
    float* exp_avg;         // [elements]
    const float* gradient;  // [elements]
    u64 elements;
    float beta1;
    float beta2;
    float rest1;  // 1 - beta1
    float rest2;  // 1 - beta2
    float decay_factor;
    float learning_rate;
    float gradient_scale;
    u32 padding;
};

// Either fp32 parameters or split masters.
template <class Parameters>
struct Lion {
    Parameters parameters;  // [elements]
    LionUpdate update;
};

// p = p decay_factor - learning_rate sign(beta1 m + (1 - beta1) g);   m = beta2 m + (1 - beta2) g
template <u32 N, u32 BATCH, Access ACCESS, class Parameters>
DEVICE void update(const Lion<Parameters>& arguments, const Tile<THREADS, BATCH, N>& tile) {
    const LionUpdate& step = arguments.update;
    Pack<N> p[BATCH], m[BATCH], g[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        p[i] = load_from<N, ACCESS>(arguments.parameters, tile.pack(i), tile.count(i));
        m[i] = load<N, ACCESS>(step.exp_avg + tile.pack(i), tile.count(i));
        g[i] = load<N, ACCESS>(step.gradient + tile.pack(i), tile.count(i));
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
        for (u32 j = 0; j < N; j++) {
            const float gradient = g[i].at[j] * step.gradient_scale;
            const float direction = fmaf(m[i].at[j], step.beta1, gradient * step.rest1);
            // Neither positive nor negative: a zero or a NaN, which goes into the parameter.
            const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;
            m[i].at[j] = fmaf(m[i].at[j], step.beta2, gradient * step.rest2);
            p[i].at[j] = fmaf(-step.learning_rate, sign, p[i].at[j] * step.decay_factor);
        }
        store_to<N, ACCESS>(arguments.parameters, tile.pack(i), p[i], tile.count(i));
        store<N, ACCESS>(step.exp_avg + tile.pack(i), m[i], tile.count(i));
    }
}

// --- updates ------------------------------------------------------------------------------------------

template <u32 N, u32 BATCH, class Rule>
DEVICE void update(const Rule& arguments) {
    const Tile<THREADS, BATCH, N> tile(arguments.update.elements);
    if (tile.whole()) {
        update<N, BATCH, Access::WIDE>(arguments, tile);
    } else {
        update<N, BATCH, Access::SINGLE>(arguments, tile);
    }
}

// A thread for a pack of four elements if all operands are aligned to packs, else for four elements.
KERNEL(adamw_wide, THREADS, 4, AdamW<float*>) { update<4, 1>(arguments); }
KERNEL(adamw_single, THREADS, 4, AdamW<float*>) { update<1, 4>(arguments); }
KERNEL(adamw_master_wide, THREADS, 4, AdamW<SplitMaster>) { update<4, 1>(arguments); }
KERNEL(adamw_master_single, THREADS, 4, AdamW<SplitMaster>) { update<1, 4>(arguments); }
KERNEL(lion_wide, THREADS, 4, Lion<float*>) { update<4, 1>(arguments); }
KERNEL(lion_single, THREADS, 4, Lion<float*>) { update<1, 4>(arguments); }
KERNEL(lion_master_wide, THREADS, 4, Lion<SplitMaster>) { update<4, 1>(arguments); }
KERNEL(lion_master_single, THREADS, 4, Lion<SplitMaster>) { update<1, 4>(arguments); }

// --- from one form to another -------------------------------------------------------------------------

template <class Out, class From>
struct Convert {
    Out out;    // [elements]
    From from;  // [elements]
    u64 elements;
};
using Round = Convert<activation*, const float*>;
using Split = Convert<SplitMaster, const float*>;

template <u32 N, u32 BATCH, Access ACCESS, class Out, class From>
DEVICE void convert(const Out& out, const From& from, const Tile<THREADS, BATCH, N>& tile) {
    Pack<N> packs[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        packs[i] = load_from<N, ACCESS>(from, tile.pack(i), tile.count(i));
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        store_to<N, ACCESS>(out, tile.pack(i), packs[i], tile.count(i));
    }
}

template <u32 N, u32 BATCH, class Out, class From>
DEVICE void convert(const Out& out, const From& from, u64 elements, u64 block) {
    const Tile<THREADS, BATCH, N> tile(elements, block);
    if (tile.whole()) {
        convert<N, BATCH, Access::WIDE>(out, from, tile);
    } else {
        convert<N, BATCH, Access::SINGLE>(out, from, tile);
    }
}

template <u32 N, u32 BATCH, class Out, class From>
DEVICE void convert(const Convert<Out, From>& arguments) {
    convert<N, BATCH>(arguments.out, arguments.from, arguments.elements, blockIdx.x);
}

// Runs of masters, each joined to its own place: a model has many small vectors, and a launch for each would take
// longer than the joining.
constexpr u32 RUNS = 64;

struct JoinedRun {
    u64 from;
    u64 to;
    u64 elements;
    u64 end_block;  // one past the last of its blocks, which follow those of the previous run
};

struct Join {
    float* out;
    SplitMaster from;
    u64 count;
    JoinedRun runs[RUNS];
};

template <u32 N, u32 BATCH>
DEVICE void join(const Join& arguments) {
    u64 run = 0;
    u64 first_block = 0;
    while (run + 1 < arguments.count && arguments.runs[run].end_block <= blockIdx.x) {
        first_block = arguments.runs[run].end_block;
        run++;
    }
    const JoinedRun place = arguments.runs[run];
    const SplitMaster from = {arguments.from.rounded + place.from, arguments.from.remainder + place.from};
    convert<N, BATCH>(arguments.out + place.to, from, place.elements, blockIdx.x - first_block);
}

// --- scaled sums --------------------------------------------------------------------------------------

// out = keep out + factor x; out and x may each be fp32 or activations. If keep is 0, `out` is not read.
struct Axpby {
    void* out;      // [elements]
    const void* x;  // [elements]
    u64 elements;
    float keep;
    float factor;
    u32 out_is_fp32;
    u32 x_is_fp32;
};

template <u32 N, Access ACCESS>
DEVICE Pack<N> load_either(const void* from, u32 is_fp32, u64 at, u32 count) {
    if (is_fp32) return load<N, ACCESS>(static_cast<const float*>(from) + at, count);
    return load<N, ACCESS>(static_cast<const activation*>(from) + at, count);
}

template <u32 N, u32 BATCH, Access ACCESS>
DEVICE void axpby(const Axpby& arguments, const Tile<THREADS, BATCH, N>& tile) {
    Pack<N> out[BATCH], x[BATCH];
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
        x[i] = load_either<N, ACCESS>(arguments.x, arguments.x_is_fp32, tile.pack(i), tile.count(i));
        if (arguments.keep == 0.0f) continue;
        out[i] = load_either<N, ACCESS>(arguments.out, arguments.out_is_fp32, tile.pack(i), tile.count(i));
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
#pragma unroll
        for (u32 j = 0; j < N; j++) {
            const float scaled = x[i].at[j] * arguments.factor;
            x[i].at[j] = arguments.keep == 0.0f ? scaled : fmaf(out[i].at[j], arguments.keep, scaled);
        }
        if (arguments.out_is_fp32) {
            store<N, ACCESS>(static_cast<float*>(arguments.out) + tile.pack(i), x[i], tile.count(i));
        } else {
            store<N, ACCESS>(static_cast<activation*>(arguments.out) + tile.pack(i), x[i], tile.count(i));
        }
    }
}

template <u32 N, u32 BATCH>
DEVICE void axpby(const Axpby& arguments) {
    const Tile<THREADS, BATCH, N> tile(arguments.elements);
    if (tile.whole()) {
        axpby<N, BATCH, Access::WIDE>(arguments, tile);
    } else {
        axpby<N, BATCH, Access::SINGLE>(arguments, tile);
    }
}

KERNEL(axpby_wide, THREADS, 4, Axpby) { axpby<4, 1>(arguments); }
KERNEL(axpby_single, THREADS, 4, Axpby) { axpby<1, 4>(arguments); }

// --- masters, rounded, split and joined -----------------------------------------------------------------

// A thread for eight elements.
KERNEL(round_wide, THREADS, 4, Round) { convert<8, 1>(arguments); }
KERNEL(round_single, THREADS, 4, Round) { convert<1, 8>(arguments); }
KERNEL(split_master_wide, THREADS, 4, Split) { convert<8, 1>(arguments); }
KERNEL(split_master_single, THREADS, 4, Split) { convert<1, 8>(arguments); }
KERNEL(join_master_wide, THREADS, 4, Join) { join<8, 1>(arguments); }
KERNEL(join_master_single, THREADS, 4, Join) { join<1, 8>(arguments); }
