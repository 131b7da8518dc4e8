// The gradients of causal depthwise convolution and SiLU. With a[row] the convolution before SiLU, recomputed from x:
//
//   g[row]       = dout[row] silu'(a[row])
//   dx[row]      = sum over j of weight[e, j] g[row + (k - 1) - j], inside the sample
//   dweight[e, j] = sum over the grain's rows of g[row] x[row - (k - 1) + j];   dbias[e] = sum of g[row]
//
// Floor: dout and x read, dx written once, 6 bytes an element of bf16: 0.070 ms at (2, 4096, 5376) and 3.75 TB/s.
// Arithmetic is about 24 instructions an element and 32 are issued: 0.046 ms. That leaves too few registers to hold the
// rows in flight as well, so these wait in shared memory.
//
// A thread walks a run of positions of a few channels. The last dx of a run need g of the k - 1 positions after it: the
// thread of the next run hands them over or, where that run is in another block, they are recomputed. Sums over
// positions are those of a run, then of the runs of a block in order, then (in a second kernel) of the blocks of a
// grain in order.
#include "dialect.h"
#include "documents.h"
#include "pack.h"
#include "causal_conv1d.h"

struct CausalConv1dSiluBackward {
    activation* dx;          // [b t, e], rows dx_stride apart
    float* partials;         // [tiles of all samples, TAPS + 1, e]: for the taps, then for the bias
    const activation* dout;  // [b t, e], rows dout_stride apart
    const activation* x;     // [b t, e], rows x_stride apart
    const float* weight;     // [e, k]
    const float* bias;       // [e], or null
    u32 dx_stride;
    u32 dout_stride;
    u32 x_stride;
    u32 positions;  // t
    u32 channels;   // e
    u32 width;      // k
    const u32* start_bits;  // of documents.h, or null
};

constexpr u32 RUN_POSITIONS = 64;
static_assert(RUN_POSITIONS % WORD_POSITIONS == 0, "a run has whole words");

// The rows that a thread reads, BATCH positions at a time. STAGES - 1 batches are copied ahead to the thread's own
// places in shared memory; with no stages, rows are loaded when they are used.
template <u32 LANES, u32 BATCH, u32 STAGES>
struct Reader {
    static constexpr u32 STAGE_ROWS = 2 * BATCH * CONV_THREADS;
    static constexpr u32 SLOTS = STAGES == 0 ? 1 : STAGES * STAGE_ROWS;

    Rows<LANES> x;
    Rows<LANES> dout;
    Row<LANES>* slots;  // [STAGES, x and dout, BATCH, threads], from the thread's first.
    u32 next;           // The first position of the next batch to be requested.
    u32 end;            // The end of the positions that are needed.
    u32 asked_stage;
    u32 taken_stage;

    __device__ __forceinline__ Reader(const Rows<LANES>& x_rows, const Rows<LANES>& dout_rows,
                                      Row<LANES>* block_slots, u32 first, u32 last)
        : x(x_rows), dout(dout_rows), slots(block_slots + threadIdx.x), next(first), end(last),
          asked_stage(0), taken_stage(0) {
#pragma unroll
        for (u32 stage = 1; stage < STAGES; stage++) ask();
    }

    __device__ __forceinline__ void ask() {
        if (next < end) {
            Row<LANES>* const to = slots + asked_stage * STAGE_ROWS;
            x.template each<BATCH>(next, [&](u32 i, const Row<LANES>* from) {
                copy_async_8(to + i * CONV_THREADS, from);
            });
            dout.template each<BATCH>(next, [&](u32 i, const Row<LANES>* from) {
                copy_async_8(to + (BATCH + i) * CONV_THREADS, from);
            });
        }
        copy_async_commit();
        next += BATCH;
        asked_stage = asked_stage + 1 == STAGES ? 0 : asked_stage + 1;
    }

    __device__ __forceinline__ void take(Row<LANES> (&x_rows)[BATCH], Row<LANES> (&dout_rows)[BATCH]) {
        if constexpr (STAGES == 0) {
            x.load(x_rows, next);
            dout.load(dout_rows, next);
            next += BATCH;
        } else {
            static_assert(sizeof(Row<LANES>) == 8, "a row is one copy");
            ask();
            copy_async_wait<STAGES - 1>();
            const Row<LANES>* const from = slots + taken_stage * STAGE_ROWS;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                x_rows[i] = from[i * CONV_THREADS];
                dout_rows[i] = from[(BATCH + i) * CONV_THREADS];
            }
            taken_stage = taken_stage + 1 == STAGES ? 0 : taken_stage + 1;
        }
    }
};

// The position of a batch in its run.
enum class Part {
    FIRST,  // whole, and the first of its run: dx of the positions before it belong to another thread
    INNER,  // whole, with others of the run before it
    ANY,    // checks for each position which of these it is, or whether it is after the run
};

// What a thread holds while it walks its run in batches of BATCH positions.
template <u32 TAPS, u32 LANES, u32 BATCH>
struct Walk {
    static constexpr u32 BEFORE = TAPS - 1;

    activation* dx;  // The thread's first channel of the sample's first row.
    u32 dx_stride;
    u32 positions;
    u32 first;  // The first position of the run.
    u32 last;
    Filter<TAPS, LANES> filter;
    // Inputs and g of a batch, after the BEFORE ones that precede it. g before the run belongs to another thread, and
    // is multiplied by zero here.
    Pack<LANES> inputs[BEFORE + BATCH];
    Pack<LANES> gradients[BEFORE + BATCH];
    // Sums over positions of scaled g: for the gradients of the taps, and for that of the bias.
    Pack<LANES> sums[TAPS + 1];
    const u32* sample_start_bits;
    u32 start_bits;  // Of documents: a bit for each of the inputs.

    __device__ __forceinline__ Walk(const CausalConv1dSiluBackward& arguments, const Run& run)
        : dx(arguments.dx + run.sample_row * arguments.dx_stride + run.channel),
          dx_stride(arguments.dx_stride), positions(arguments.positions), first(run.first),
          last(run.last), filter(arguments.weight, arguments.bias, run.channel, arguments.width) {
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) gradients[i] = filled<LANES>(0.0f);
#pragma unroll
        for (u32 tap = 0; tap <= TAPS; tap++) sums[tap] = filled<LANES>(0.0f);
        if (DOCUMENTS) {
            sample_start_bits = start_bits_of(arguments.start_bits, run.sample_row, positions);
            start_bits = 0;
        }
    }

    // The inputs before the run have arrived: sets those of other documents to zero.
    __device__ __forceinline__ void forget_others() {
        if (DOCUMENTS) {
            start_bits = bits_before<BEFORE>(sample_start_bits, first);
            forget_before<BEFORE>(inputs, start_bits);
        }
    }

    // Reads which positions of a batch, from `start`, begin documents.
    __device__ __forceinline__ void mark(u32 start) {
        static_assert(WORD_POSITIONS % BATCH == 0, "a batch is within a word");
        if (DOCUMENTS) {
            const u32 bits = bits_from(sample_start_bits, start, positions) & ((1u << BATCH) - 1);
            start_bits |= bits << BEFORE;
        }
    }

    // Requests the batch from `start`.
    template <class Reader>
    __device__ __forceinline__ void take(Reader& reader, u32 start) {
        mark(start);
        Row<LANES> x[BATCH], dout[BATCH];
        reader.take(x, dout);
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            inputs[BEFORE + i] = widened(x[i]);
            gradients[BEFORE + i] = widened(dout[i]);
        }
    }

    // g, times -ln(2), in place of dout.
    __device__ __forceinline__ void differentiate(u32 i, bool inside) {
        if (DOCUMENTS && (start_bits >> (BEFORE + i) & 1)) forget<BEFORE>(inputs + i);
#pragma unroll
        for (u32 lane = 0; lane < LANES; lane++) {
            float& g = gradients[BEFORE + i].at[lane];
            const float derivative = scaled_silu_derivative(filter.convolve(inputs + i, lane));
            g = inside ? g * derivative : 0.0f;
        }
    }

    __device__ __forceinline__ void add_to_sums(u32 i) {
#pragma unroll
        for (u32 lane = 0; lane < LANES; lane++) {
            const float g = gradients[BEFORE + i].at[lane];
#pragma unroll
            for (u32 tap = 0; tap < TAPS; tap++) {
                sums[tap].at[lane] = fmaf(g, inputs[i + tap].at[lane], sums[tap].at[lane]);
            }
            sums[TAPS].at[lane] += g;
        }
    }

    // dx of the position BEFORE before place i; all of its parts are known at this point. The scales of weights and g
    // are each other's reciprocals.
    __device__ __forceinline__ Pack<LANES> ended(u32 i) const {
        // The documents of the positions after it.
        const u32 after = DOCUMENTS ? start_bits >> (i + 1) : 0;
        Pack<LANES> dx_ended;
#pragma unroll
        for (u32 lane = 0; lane < LANES; lane++) {
            float sum = 0.0f;
#pragma unroll
            for (u32 tap = 0; tap < TAPS; tap++) {
                float g = gradients[BEFORE + i - tap].at[lane];
                if (DOCUMENTS) g = after & ((1u << (BEFORE - tap)) - 1) ? 0.0f : g;
                const float weight = filter.weight[tap].at[lane];
                sum = tap == 0 ? weight * g : fmaf(weight, g, sum);
            }
            dx_ended.at[lane] = sum;
        }
        return dx_ended;
    }

    // The batch from position `start`.
    template <Part PART, class Reader>
    __device__ __forceinline__ void batch(Reader& reader, u32 start) {
        take(reader, start);
        activation* const dx_start = dx + static_cast<i64>(dx_stride) * (static_cast<i64>(start) - BEFORE);
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 position = start + i;
            differentiate(i, PART != Part::ANY || position < positions);
            if (PART != Part::ANY || position < last) add_to_sums(i);
            const bool ends = PART == Part::ANY ? position >= first + BEFORE && position - BEFORE < last
                                                : PART == Part::INNER || i >= BEFORE;
            if (ends) store_pack<LANES>(dx_start + static_cast<u64>(i) * dx_stride, ended(i));
        }
    }
    __device__ __forceinline__ void move_on() {
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) {
            inputs[i] = inputs[BATCH + i];
            gradients[i] = gradients[BATCH + i];
        }
        if (DOCUMENTS) start_bits >>= BATCH;
    }

    // The run's last dx, once the g after the run are in the places of a batch.
    __device__ __forceinline__ void finish() const {
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) {
            store_pack<LANES>(dx + static_cast<u64>(last - BEFORE + i) * dx_stride, ended(i));
        }
    }
};

// g at the first positions of a block's runs, which the runs before them need.
template <u32 BEFORE, u32 LANES>
struct alignas(16) Handed {
    float g[CONV_RUNS][BEFORE][CONV_CHANNEL_THREADS * LANES];

    __device__ __forceinline__ void give(const Run& run, const Pack<LANES>* gradients) {
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) store_pack<LANES>(&g[run.index][i][run.column], gradients[i]);
    }
    __device__ __forceinline__ void take(const Run& run, Pack<LANES>* gradients) const {
#pragma unroll
        for (u32 i = 0; i < BEFORE; i++) gradients[i] = load_pack<LANES>(&g[run.index + 1][i][run.column]);
    }
};

// Walks a run, except for the last dx of a run that `awaits` the g of the next run.
template <u32 TAPS, u32 LANES, u32 BATCH, class Reader, class Handed>
DEVICE void walk_run(Walk<TAPS, LANES, BATCH>& walk, Reader& reader, Handed& handed, const Run& run,
                     bool awaits) {
    constexpr u32 BEFORE = TAPS - 1;
    // Whether the first batch has all the g that the run before needs.
    constexpr bool GIVES = BEFORE <= BATCH;
    if (GIVES && run.last - run.first == RUN_POSITIONS) {
        walk.template batch<Part::FIRST>(reader, run.first);
        if constexpr (GIVES) handed.give(run, walk.gradients + BEFORE);
        walk.move_on();
        for (u32 start = run.first + BATCH; start < run.last; start += BATCH) {
            walk.template batch<Part::INNER>(reader, start);
            walk.move_on();
        }
        if (awaits) return;
        walk.take(reader, run.last);
        if constexpr (GIVES) {
#pragma unroll
            for (u32 i = 0; i < BEFORE; i++) walk.differentiate(i, run.last + i < walk.positions);
            walk.finish();
        }
    } else {
        for (u32 start = run.first; start < run.last + BEFORE; start += BATCH) {
            walk.template batch<Part::ANY>(reader, start);
            if constexpr (GIVES) {
                if (start == run.first) handed.give(run, walk.gradients + BEFORE);
            }
            walk.move_on();
        }
    }
}

template <u32 TAPS, u32 LANES, u32 BATCH, u32 STAGES>
DEVICE void backward(const CausalConv1dSiluBackward& arguments) {
    constexpr u32 BEFORE = TAPS - 1;
    constexpr u32 CHANNELS = CONV_CHANNEL_THREADS * LANES;
    constexpr bool GIVES = BEFORE <= BATCH;
    using Reads = Reader<LANES, BATCH, STAGES>;
    __shared__ Row<LANES> slots[Reads::SLOTS];
    alignas(16) __shared__ float of_runs[CONV_RUNS][TAPS + 1][CHANNELS];
    __shared__ Handed<GIVES ? BEFORE : 1, LANES> handed;

    const Run run = run_of_thread<LANES, RUN_POSITIONS>(arguments.positions, arguments.channels);
    const bool awaits = GIVES && run.last - run.first == RUN_POSITIONS &&
                        run.last < arguments.positions && run.index + 1 < CONV_RUNS;
    const u64 row = run.sample_row;
    const Rows<LANES> x = {arguments.x + row * arguments.x_stride + run.channel, arguments.x_stride,
                           arguments.positions};
    const Rows<LANES> dout = {arguments.dout + row * arguments.dout_stride + run.channel,
                              arguments.dout_stride, arguments.positions};
    const u32 end = run.first == run.last || awaits ? run.last : run.last + BEFORE;
    Reads reader(x, dout, slots, run.first, end);
    Walk<TAPS, LANES, BATCH> walk(arguments, run);
    if (run.first < run.last) {
        x.template load_before<BEFORE>(walk.inputs, run.first);
        walk.forget_others();
        walk_run(walk, reader, handed, run, awaits);
    }
#pragma unroll
    for (u32 tap = 0; tap <= TAPS; tap++) {
#pragma unroll
        for (u32 lane = 0; lane < LANES; lane++) walk.sums[tap].at[lane] *= -LOG2_E;
        store_pack<LANES>(&of_runs[run.index][tap][run.column], walk.sums[tap]);
    }
    __syncthreads();
    if constexpr (GIVES) {
        if (awaits) {
            handed.take(run, walk.gradients + BEFORE);
            walk.mark(run.last);
            walk.finish();
        }
    }
    for (u32 i = threadIdx.x; i < (TAPS + 1) * CHANNELS; i += CONV_THREADS) {
        const u32 tap = i / CHANNELS;
        const u32 channel = run.block_channel + i % CHANNELS;
        if (channel >= arguments.channels) continue;
        float sum = of_runs[0][tap][i % CHANNELS];
#pragma unroll
        for (u32 other = 1; other < CONV_RUNS; other++) sum += of_runs[other][tap][i % CHANNELS];
        const u64 partial = static_cast<u64>(run.tile) * (TAPS + 1) + tap;
        arguments.partials[partial * arguments.channels + channel] = sum;
    }
}

#if DOCUMENTS
KERNEL(causal_conv1d_silu_backward_wide_documents, CONV_THREADS, 3, CausalConv1dSiluBackward) {
    backward<4, 8 / sizeof(activation), 4, ON_AMD ? 0 : 3>(arguments);
}
KERNEL(causal_conv1d_silu_backward_single_documents, CONV_THREADS, 4, CausalConv1dSiluBackward) {
    backward<4, 1, 4, 0>(arguments);
}
KERNEL(causal_conv1d_silu_backward_long_documents, CONV_THREADS, 2, CausalConv1dSiluBackward) {
    backward<16, 1, 8, 0>(arguments);
}
#else
// As many channels as fill 8 bytes, in rows aligned to that. AMD has no asynchronous copies to shared memory.
KERNEL(causal_conv1d_silu_backward_wide, CONV_THREADS, 4, CausalConv1dSiluBackward) {
    backward<4, 8 / sizeof(activation), 4, ON_AMD ? 0 : 3>(arguments);
}
KERNEL(causal_conv1d_silu_backward_single, CONV_THREADS, 4, CausalConv1dSiluBackward) {
    backward<4, 1, 4, 0>(arguments);
}
// Up to 16 taps.
KERNEL(causal_conv1d_silu_backward_long, CONV_THREADS, 2, CausalConv1dSiluBackward) {
    backward<16, 1, 8, 0>(arguments);
}

struct CausalConv1dSumPartials {
    float* dweight;         // [grains, e, k]
    float* dbias;           // [grains, e], or null
    const float* partials;  // [tiles of all samples, taps + 1, e]
    u32 channels;           // e
    u32 width;              // k
    u32 taps;               // of the partials, the first taps - k of them padding
    u32 tiles;              // of all samples
    u32 tiles_per_grain;
    u32 grains;
};

// The threads of a block divide the channels of one tap, or the bias, of one grain: each adds the tiles of its channels
// in order, from +0.0.
KERNEL(causal_conv1d_sum_partials, 256, 1, CausalConv1dSumPartials) {
    constexpr u32 BATCH = 8;
    const u32 width = arguments.width;
    const u32 channel_blocks = (arguments.channels + 255) / 256;
    const u32 channel = blockIdx.x % channel_blocks * 256 + threadIdx.x;
    const u32 tap = blockIdx.x / channel_blocks % (width + 1);
    const u64 grain = blockIdx.x / channel_blocks / (width + 1);
    if (channel >= arguments.channels) return;
    const u32 first = static_cast<u32>(grain) * arguments.tiles_per_grain;
    const u32 last = min(first + arguments.tiles_per_grain, arguments.tiles);
    const u64 tile_stride = static_cast<u64>(arguments.taps + 1) * arguments.channels;
    const float* const partials = arguments.partials +
                                  static_cast<u64>(tap + arguments.taps - width) * arguments.channels +
                                  channel;
    float sum = 0.0f;
    for (u32 tile = first; tile < last; tile += BATCH) {
        float batch[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) batch[i] = partials[min(tile + i, last - 1) * tile_stride];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) sum = tile + i < last ? sum + batch[i] : sum;
    }
    if (tap < width) {
        arguments.dweight[(grain * arguments.channels + channel) * width + tap] = sum;
    } else if (arguments.dbias) {
        arguments.dbias[grain * arguments.channels + channel] = sum;
    }
}
#endif
