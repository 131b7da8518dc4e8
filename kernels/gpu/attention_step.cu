// Attention of one new position of each sequence over its cache of keys and values, which receives the new key and
// value: for generation, where rows are too few for the tiles of attention_forward.cu.
//
// A sequence's keys are cut into chunks of 128, at whole multiples of 128 from its first position. A block has one
// chunk of one head. Its groups of lanes, with 8 columns a lane, compute the scores of their keys one after the other,
// then the weighted sums of their values, relative to the chunk's greatest score. The groups' sums are added in order,
// and a second kernel adds those of the chunks in order. So a row's bits depend on its position and on its keys alone.
// All arithmetic is fp32.
//
// Floor: one read of the keys and values that are attended to; with one sequence the latency of two kernels.
#include "dialect.h"

#define NOTHING __uint_as_float(0xff800000u)  // minus infinity: the score of a masked key

namespace {

constexpr u32 CHUNK = 128;    // keys; mirrored by gpu/launch/attention_step.rs
constexpr u32 THREADS = 128;  // whatever the width of a warp
constexpr u32 COLUMNS = 8;    // of a lane

struct AttentionStep {
    float* parts;         // [b, h, chunks, p + 2]: sums of values, then the sum of weights and the greatest score
    activation* keys;     // [b, capacity, g p]; the new one enters
    activation* values;   // the same
    const activation* q;  // [b, h p]; k and v [b, g p]
    const activation* k;
    const activation* v;
    const float* slopes;  // [h], or null
    const u32* past;      // [b]: the position of each sample's query
    u64 q_stride;
    u64 k_stride;
    u64 v_stride;
    u32 capacity;
    u32 heads;
    u32 width;   // p
    u32 window;  // the most positions that a query attends to
    u32 chunks;  // of a head, enough for the longest query
    float scale;
    u32 wide;  // whether rows are loaded 16 bytes at a time
    u32 group;  // heads of queries that share one of keys and values
};

struct AttentionStepSums {
    activation* out;     // [b, h p]
    const float* parts;  // as above
    const u32* past;
    u64 out_stride;
    u32 capacity, heads, width, window, chunks;
    u32 unused;
};

// The keys that the query of a sample attends to: from `begin` up to `end`; none where the cache is full.
struct MaskRange {
    u32 begin, end;

    __device__ __forceinline__ u32 first_chunk() const { return begin / CHUNK; }
};
DEVICE MaskRange mask_range_of(u32 past, u32 window, u32 capacity) {
    MaskRange range;
    range.end = past < capacity ? past + 1 : 0;
    range.begin = range.end > window ? range.end - window : 0;
    return range;
}

// Columns of a row in the form of memory.
struct Columns {
#if ACTIVATION_BF16
    u32 pairs[COLUMNS / 2];
    __device__ __forceinline__ float at(u32 i) const { return i % 2 ? second_of(pairs[i / 2]) : first_of(pairs[i / 2]); }
#else
    float values[COLUMNS];
    __device__ __forceinline__ float at(u32 i) const { return values[i]; }
#endif
};
// The columns from `first` on; zero for columns that do not exist, and where `inside` is false.
DEVICE Columns read_columns(const activation* row, u32 first, u32 width, bool inside, bool wide) {
    Columns columns = {};
    if (!inside || first >= width) return columns;
    if (wide) {
#if ACTIVATION_BF16
        const uint4 words = *reinterpret_cast<const uint4*>(row + first);
        columns.pairs[0] = words.x;
        columns.pairs[1] = words.y;
        columns.pairs[2] = words.z;
        columns.pairs[3] = words.w;
#else
        const float4 low = load4(row + first), high = load4(row + first + 4);
        const float all[COLUMNS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) columns.values[i] = all[i];
#endif
        return columns;
    }
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
        if (first + i >= width) continue;
#if ACTIVATION_BF16
        columns.pairs[i / 2] |= static_cast<u32>(row[first + i].bits) << i % 2 * 16;
#else
        columns.values[i] = row[first + i];
#endif
    }
    return columns;
}

template <u32 P>
DEVICE void attend(const AttentionStep& arguments) {
    constexpr u32 LANES = P / COLUMNS, GROUPS = THREADS / LANES;
    constexpr u32 KEYS = CHUNK / GROUPS;             // of a group
    constexpr u32 BATCH = KEYS < 8 ? KEYS : 8;       // keys whose columns are in flight at once
    __shared__ float maxima[THREADS / 32];
    __shared__ float sums[GROUPS][P];
    __shared__ float weights[GROUPS];
    const u32 thread = threadIdx.x, lane = thread % LANES, group = thread / LANES;
    const u32 head = blockIdx.x / arguments.chunks % arguments.heads;
    const u32 sample = blockIdx.x / arguments.chunks / arguments.heads;
    const u32 past = arguments.past[sample], width = arguments.width;
    const MaskRange range = mask_range_of(past, arguments.window, arguments.capacity);
    const u32 first = (range.first_chunk() + blockIdx.x % arguments.chunks) * CHUNK;
    release_next();
    await_previous();
    if (first >= range.end) return;

    const bool wide = arguments.wide != 0;
    const u32 column = lane * COLUMNS, head_column = head * width;
    const u32 shared_column = head / arguments.group * width;
    const u64 stride = static_cast<u64>(arguments.heads / arguments.group) * width;
    const u64 sample_start = sample * arguments.capacity * stride + shared_column;
    const activation* const keys = arguments.keys + sample_start;
    const activation* const values = arguments.values + sample_start;
    const activation* const new_key = arguments.k + sample * arguments.k_stride + shared_column;
    const activation* const new_value = arguments.v + sample * arguments.v_stride + shared_column;
    // The group's key i, and whether the query attends to it.
    auto key_of = [&](u32 i) { return first + i * GROUPS + group; };
    auto is_unmasked = [&](u32 key) { return key >= range.begin && key < range.end; };

    const Columns query =
        read_columns(arguments.q + sample * arguments.q_stride + head_column, column, width, true, wide);
    const float slope = arguments.slopes ? arguments.slopes[head] * LOG2_E : 0.0f;
    const float scale = arguments.scale * LOG2_E;
    float scores[KEYS], greatest = NOTHING;
#pragma unroll
    for (u32 batch = 0; batch < KEYS; batch += BATCH) {
        Columns held[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 key = key_of(batch + i);
            const activation* const row = key == past ? new_key : keys + key * stride;
            held[i] = read_columns(row, column, width, is_unmasked(key), wide);
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            // Recomputed here, so that AMD's compiler need not keep it for all keys at once.
            const u32 key = formed_anew(key_of(batch + i));
            float sum = 0.0f;
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) sum = fmaf(query.at(c), held[i].at(c), sum);
#pragma unroll
            for (u32 mask = 1; mask < LANES; mask *= 2) sum += shuffle_xor(sum, mask);
            const float score = fmaf(sum, scale, -slope * static_cast<float>(past - key));
            scores[batch + i] = is_unmasked(key) ? score : NOTHING;
            greatest = fmaxf(greatest, scores[batch + i]);
        }
    }
    // The first loads of values are in flight before the greatest score is known.
    Columns held[BATCH];
    auto load_values = [&](u32 batch) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 key = formed_anew(key_of(batch + i));
            const activation* const row = key == past ? new_value : values + key * stride;
            held[i] = read_columns(row, column, width, is_unmasked(key), wide);
        }
    };
    load_values(0);
#pragma unroll
    for (u32 mask = LANES; mask < WARP; mask *= 2) greatest = fmaxf(greatest, shuffle_xor(greatest, mask));
    if (thread % WARP == 0) maxima[thread / WARP] = greatest;
    __syncthreads();
    for (u32 warp = 0; warp < THREADS / WARP; warp++) greatest = fmaxf(greatest, maxima[warp]);
    const float used = greatest == NOTHING ? 0.0f : greatest;

    float weight_sum = 0.0f, sum[COLUMNS] = {};
#pragma unroll
    for (u32 batch = 0; batch < KEYS; batch += BATCH) {
        if (batch > 0) load_values(batch);
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const float weight = exp2_fast(scores[batch + i] - used);
            weight_sum += weight;
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) sum[c] = fmaf(weight, held[i].at(c), sum[c]);
        }
    }
#pragma unroll
    for (u32 c = 0; c < COLUMNS; c++) sums[group][column + c] = sum[c];
    if (lane == 0) weights[group] = weight_sum;
    __syncthreads();
    float* const part = arguments.parts + static_cast<u64>(blockIdx.x) * (width + 2);
    for (u32 i = thread; i < width; i += THREADS) {
        float total = sums[0][i];
#pragma unroll
        for (u32 other = 1; other < GROUPS; other++) total += sums[other][i];
        part[i] = total;
    }
    if (thread == 0) {
        float total = weights[0];
#pragma unroll
        for (u32 other = 1; other < GROUPS; other++) total += weights[other];
        part[width] = total;
        part[width + 1] = greatest;
    }
    // Among the heads that share a key and value, the first one writes the new key and value.
    if (past < first || past >= first + CHUNK || head % arguments.group != 0) return;
    const u64 entry = sample_start + past * stride;
    for (u32 i = thread; i < width; i += THREADS) {
        arguments.keys[entry + i] = new_key[i];
        arguments.values[entry + i] = new_value[i];
    }
}

}  // namespace

// A block for each chunk of each head of each sample.
KERNEL(attention_step_32, THREADS, 1, AttentionStep) { attend<32>(arguments); }
KERNEL(attention_step_64, THREADS, 1, AttentionStep) { attend<64>(arguments); }
KERNEL(attention_step_128, THREADS, 1, AttentionStep) { attend<128>(arguments); }
KERNEL(attention_step_256, THREADS, 1, AttentionStep) { attend<256>(arguments); }

// A block for each head of each sample.
KERNEL(attention_step_sums, THREADS, 1, AttentionStepSums) {
    const u32 head = blockIdx.x % arguments.heads, sample = blockIdx.x / arguments.heads;
    const u32 width = arguments.width, row = width + 2;
    release_next();
    await_previous();
    const MaskRange range = mask_range_of(arguments.past[sample], arguments.window, arguments.capacity);
    const u32 chunks = (range.end + CHUNK - 1) / CHUNK - range.first_chunk();
    const float* const parts = arguments.parts + static_cast<u64>(blockIdx.x) * arguments.chunks * row;
    float greatest = NOTHING;
#pragma unroll 4
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        greatest = fmaxf(greatest, parts[static_cast<u64>(chunk) * row + width + 1]);
    }
    const float used = greatest == NOTHING ? 0.0f : greatest;
    activation* const out = arguments.out + sample * arguments.out_stride + head * width;
    for (u32 i = threadIdx.x; i < width; i += THREADS) {
        float weights = 0.0f, total = 0.0f;
#pragma unroll 4
        for (u32 chunk = 0; chunk < chunks; chunk++) {
            const float* const part = parts + static_cast<u64>(chunk) * row;
            const float factor = exp2_fast(part[width + 1] - used);
            weights = fmaf(factor, part[width], weights);
            total = fmaf(factor, part[i], total);
        }
        narrow(out[i], total / weights);
    }
}
