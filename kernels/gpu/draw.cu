// Draws a token from each row of logits, among those that top-k, top-p and min-p keep.
//
// The definition (reference/draw.rs) adds weights exp(logit / temperature - greatest / temperature) in f64, one after
// the other: by falling logit for top-p, by token for the draw. Sums here have another fixed order, so this kernel
// decides only rows that rounding cannot change: each mark on the line of weights is further than `doubt` from the ends
// of the weight it falls into, and each weight further than that from min-p. Other rows, and rows with a logit that is
// not a finite number, get NO_TOKEN: the host, which follows the definition, decides them.
//
// No row is sorted. Top-k and top-p keep the tokens that rank at or above a limit. The limit is searched for: an
// interval of keys that holds it is cut into WAYS parts until few enough candidates are left to be sorted.
#include "dialect.h"

#define NO_TOKEN 0xffffffffu

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 WAYS = 8;
// The most candidates that are sorted.
constexpr u32 CAPACITY = 2048;
// Threads that share a segment of the columns: as many as there are segments.
constexpr u32 SEGMENTS = 32;
constexpr u32 OF_SEGMENT = THREADS / SEGMENTS;
// Loads of a thread that are in flight at once.
constexpr u32 AHEAD = 8;

struct Draw {
    u32* tokens;             // [rows]
    const float* logits;     // [rows, columns]
    const double* uniforms;  // [rows]
    u64 row_stride;
    double temperature;
    double top_p;  // 1: all
    double min_p;  // 0: all
    u32 top_k;     // 0: all
    u32 columns;
    float scale;
    u32 unused;
};

// A row, and the values that weigh its logits.
struct Row {
    const float* logits;
    u32 columns;
    float scale;
    double temperature;
    double greatest;  // divided by the temperature
};

struct Shared {
    u64 ranked[CAPACITY];
    double sums[THREADS];
    double totals[WAYS];
    u32 counts[WARPS * WAYS];
    u32 total_counts[WAYS];
    u32 partial[WARPS];
    u32 listed;
    u32 found;
    u32 is_doubtful;
};

// Keys are ordered as total_cmp orders logits: a negative zero is below a positive one.
constexpr u32 NEGATIVE_ZERO = 0x7fffffffu;
constexpr u32 POSITIVE_ZERO = 0x80000000u;

DEVICE u32 key_of(float logit) {
    const u32 bits = __float_as_uint(logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float logit_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Of equal logits the lower column ranks higher.
DEVICE u64 rank_of(u32 key, u32 column) { return static_cast<u64>(key) << 32 | ~column; }

DEVICE bool is_finite(float logit) { return (__float_as_uint(logit) & 0x7f800000u) != 0x7f800000u; }

DEVICE double exponent_of(const Row& row, float logit) {
    return static_cast<double>(logit) / row.temperature - row.greatest;
}
DEVICE double weight_of(const Row& row, float logit) { return exp(exponent_of(row, logit)); }

// Calls a function with every STEP-th column from `first` on and its logit.
template <u32 STEP, class Take>
DEVICE void for_each(const Row& row, u32 first, u32 end, Take take) {
#pragma unroll 1
    for (u32 column = first; column < end; column += AHEAD * STEP) {
        float logits[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 next = column + i * STEP;
            logits[i] = row.logits[next < end ? next : column] * row.scale;
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (column + i * STEP < end) take(column + i * STEP, logits[i]);
        }
    }
}
template <class Take>
DEVICE void for_each(const Row& row, Take take) {
    for_each<THREADS>(row, threadIdx.x, row.columns, take);
}

DEVICE u32 shuffle_xor(u32 x, u32 mask) { return __float_as_uint(shuffle_xor(__uint_as_float(x), mask)); }

DEVICE u32 block_max(u32 x, u32* partial) {
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) x = max(x, shuffle_xor(x, mask));
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    u32 greatest = partial[0];
#pragma unroll 1
    for (u32 warp = 1; warp < WARPS; warp++) greatest = max(greatest, partial[warp]);
    __syncthreads();
    return greatest;
}

// The sum of `x` up to and including each thread; `sums` holds them too.
DEVICE double sum_up_to(double x, double* sums) {
    sums[threadIdx.x] = x;
    __syncthreads();
#pragma unroll 1
    for (u32 distance = 1; distance < THREADS; distance *= 2) {
        const double before = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0.0;
        __syncthreads();
        x += before;
        sums[threadIdx.x] = x;
        __syncthreads();
    }
    return x;
}

// A mark must be further than this from the end of a weight: twice as many roundings of 2^-53 as there are columns for
// the definition's sums and as many for the sums here, none of which is larger than `whole`, and a few for exponentials
// (within 2 ulp) and products.
DEVICE double doubt_of(double whole, u32 columns) { return whole * (4.0 * columns + 64.0) * 0x1p-53; }

// The i of begin .. end whose weight `mark` falls into, where the weights of begin .. i add to `before`; NO_TOKEN in
// case of doubt.
template <class Weight>
DEVICE u32 find(Shared& shared, double before, double mark, double doubt, u32 begin, u32 end, Weight weight) {
    if (threadIdx.x == 0) shared.found = NO_TOKEN;
    __syncthreads();
#pragma unroll 1
    for (u32 first = begin; first < end; first += THREADS) {
        const u32 i = first + threadIdx.x;
        const double own = i < end ? weight(i) : 0.0;
        const double after = before + sum_up_to(own, shared.sums);
        if (mark - (after - own) > doubt && after - mark > doubt) shared.found = i;
        before += shared.sums[THREADS - 1];
        __syncthreads();
    }
    return shared.found;
}

// An interval of keys that contains the key of the last candidate.
struct Interval {
    u32 low, high;
    // The measure of the keys above `high`.
    double above;
    // The number of columns with keys in the interval.
    u32 count;
};

// The first key of a part of an interval. Parts have equal differences of logits, or of keys, which reach a single key
// for any logits.
DEVICE u32 first_of_part(const Interval& interval, u32 part, bool by_logits) {
    const u32 low = interval.low, high = interval.high;
    if (part == 0) return low;
    if (!by_logits) return low + static_cast<u32>((static_cast<u64>(high - low) + 1) * part / WAYS);
    const double least = logit_of(low), most = logit_of(high);
    const u32 key = key_of(static_cast<float>(least + (most - least) * (static_cast<double>(part) / WAYS)));
    return min(max(key, low), high);
}

// Measures the interval from each of `firsts` on: the sum of weights, or the number of columns. Leaves totals in
// `shared`.
template <bool OF_WEIGHTS>
DEVICE void measure(const Row& row, Shared& shared, const Interval& interval, const u32 (&firsts)[WAYS]) {
    double weights[WAYS] = {};
    u32 counts[WAYS] = {};
    for_each(row, [&](u32, float logit) {
        const u32 key = key_of(logit);
        if (key < interval.low || key > interval.high) return;
        const double weight = OF_WEIGHTS ? weight_of(row, logit) : 0.0;
#pragma unroll
        for (u32 part = 0; part < WAYS; part++) {
            if (key < firsts[part]) continue;
            counts[part]++;
            if (OF_WEIGHTS) weights[part] += weight;
        }
    });
    const u32 place = threadIdx.x / WARP * WAYS;
#pragma unroll
    for (u32 part = 0; part < WAYS; part++) {
        u32 count = counts[part];
#pragma unroll
        for (u32 mask = WARP / 2; mask > 0; mask /= 2) count += shuffle_xor(count, mask);
        const double weight = OF_WEIGHTS ? warp_sum(weights[part]) : 0.0;
        if (threadIdx.x % WARP != 0) continue;
        shared.counts[place + part] = count;
        if (OF_WEIGHTS) shared.sums[place + part] = weight;
    }
    __syncthreads();
    if (threadIdx.x < WAYS) {
        u32 count = 0;
        double weight = 0.0;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < WARPS * WAYS; i += WAYS) {
            count += shared.counts[i];
            if (OF_WEIGHTS) weight += shared.sums[i];
        }
        shared.total_counts[threadIdx.x] = count;
        shared.totals[threadIdx.x] = OF_WEIGHTS ? weight : count;
    }
    __syncthreads();
}

// Narrows an interval to where the measure from above reaches `mark`, a share of the whole or a count, until its
// candidates can be sorted or have one key. Converts a share to the measure itself; returns the whole.
template <bool OF_WEIGHTS>
DEVICE double narrow(const Row& row, Shared& shared, Interval& interval, double& mark) {
    double whole = 0.0;
#pragma unroll 1
    for (u32 round = 0; round == 0 || (interval.count > CAPACITY && interval.low < interval.high); round++) {
        const bool by_logits = round % 2 == 0;
        u32 firsts[WAYS];
#pragma unroll
        for (u32 part = 0; part < WAYS; part++) firsts[part] = first_of_part(interval, part, by_logits);
        measure<OF_WEIGHTS>(row, shared, interval, firsts);
        if (round == 0) {
            whole = shared.totals[0];
            if (OF_WEIGHTS) mark *= whole;
        }
        // The last part from whose first key on the measure reaches the mark: the next parts are above the interval.
        u32 last = 0;
#pragma unroll 1
        for (u32 part = 1; part < WAYS; part++) last += interval.above + shared.totals[part] >= mark;
        Interval narrower = {first_of_part(interval, last, by_logits), interval.high, interval.above,
                             shared.total_counts[last]};
        if (last + 1 < WAYS) {
            narrower.high = first_of_part(interval, last + 1, by_logits) - 1;
            narrower.above += shared.totals[last + 1];
            narrower.count -= shared.total_counts[last + 1];
        }
        interval = narrower;
    }
    return whole;
}

// Ranks the candidates in the interval, at most CAPACITY: by falling logit, then by column, the lower first.
DEVICE void rank(const Row& row, Shared& shared, const Interval& interval) {
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    for_each(row, [&](u32 column, float logit) {
        const u32 key = key_of(logit);
        if (key < interval.low || key > interval.high) return;
        shared.ranked[take_number(&shared.listed)] = rank_of(key, column);
    });
    u32 size = 2;
    while (size < interval.count) size *= 2;
    for (u32 i = interval.count + threadIdx.x; i < size; i += THREADS) shared.ranked[i] = 0;
    __syncthreads();
    // Batcher's bitonic sort (1968).
#pragma unroll 1
    for (u32 run = 2; run <= size; run *= 2) {
#pragma unroll 1
        for (u32 apart = run / 2; apart > 0; apart /= 2) {
#pragma unroll 1
            for (u32 pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const u32 i = 2 * pair - (pair & (apart - 1));
                const u64 one = shared.ranked[i], other = shared.ranked[i + apart];
                if ((one < other) == ((i & run) == 0)) {
                    shared.ranked[i] = other;
                    shared.ranked[i + apart] = one;
                }
            }
            __syncthreads();
        }
    }
}

// The least key among the k most likely.
DEVICE u32 limit_of_top_k(const Row& row, Shared& shared, Interval interval, u32 k) {
    double mark = k;
    narrow<false>(row, shared, interval, mark);
    u32 limit = interval.low;
    if (interval.low < interval.high) {
        rank(row, shared, interval);
        limit = static_cast<u32>(shared.ranked[k - 1 - static_cast<u32>(interval.above)] >> 32);
        __syncthreads();
    }
    // Both zeros are equal.
    return limit == POSITIVE_ZERO ? NEGATIVE_ZERO : limit;
}

// The rank, as `rank` numbers them, of the last candidate in the interval that top-p keeps; 0 in case of doubt.
DEVICE u64 limit_of_top_p(const Row& row, Shared& shared, Interval interval, double top_p) {
    double mark = top_p;
    const double whole = narrow<true>(row, shared, interval, mark);
    const double doubt = doubt_of(whole, row.columns);
    if (interval.count > CAPACITY) {
        // All of them are equal, so they rank by column.
        const u32 key = interval.low;
        const double weight = weight_of(row, logit_of(key));
        const u32 last = find(shared, interval.above, mark, doubt, 0, row.columns, [&](u32 column) {
            return key_of(row.logits[column] * row.scale) == key ? weight : 0.0;
        });
        return last == NO_TOKEN ? 0 : rank_of(key, last);
    }
    rank(row, shared, interval);
    const u32 last = find(shared, interval.above, mark, doubt, 0, interval.count, [&](u32 i) {
        return weight_of(row, logit_of(static_cast<u32>(shared.ranked[i] >> 32)));
    });
    const u64 limit = last == NO_TOKEN ? 0 : shared.ranked[last];
    __syncthreads();
    return limit;
}

// The token of a row with a known limit: the first whose weight, added to those before it, exceeds the share `uniform`
// of all.
DEVICE u32 draw_from(const Row& row, Shared& shared, u64 limit, double min_p, double uniform) {
    bool is_doubtful = false;
    auto weight_kept = [&](u32 column, float logit) {
        const u32 key = key_of(logit);
        if (rank_of(key, column) < limit) return 0.0;
        const double exponent = exponent_of(row, logit), weight = exp(exponent);
        // The most likely tokens have a weight of exactly 1.
        is_doubtful |= exponent != 0.0 && fabs(weight - min_p) < min_p * 0x1p-49;
        return weight < min_p ? 0.0 : weight;
    };
    const u32 length = ((row.columns + SEGMENTS - 1) / SEGMENTS + OF_SEGMENT - 1) / OF_SEGMENT * OF_SEGMENT;
    const u32 segment = threadIdx.x / OF_SEGMENT;
    const u32 end = min((segment + 1) * length, row.columns);
    double sum = 0.0;
    for_each<OF_SEGMENT>(row, segment * length + threadIdx.x % OF_SEGMENT, end, [&](u32 column, float logit) {
        sum += weight_kept(column, logit);
    });
#pragma unroll
    for (u32 mask = OF_SEGMENT / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (threadIdx.x == 0) shared.is_doubtful = 0;
    if (threadIdx.x % OF_SEGMENT == 0) shared.sums[segment] = sum;
    __syncthreads();
    if (is_doubtful) shared.is_doubtful = 1;
    double whole = 0.0;
#pragma unroll 1
    for (u32 i = 0; i < SEGMENTS; i++) whole += shared.sums[i];
    const double mark = uniform * whole;
    double before = 0.0;
    u32 of_mark = 0;
#pragma unroll 1
    for (; of_mark + 1 < SEGMENTS && before + shared.sums[of_mark] <= mark; of_mark++) before += shared.sums[of_mark];
    __syncthreads();
    if (shared.is_doubtful) return NO_TOKEN;
    const u32 first = of_mark * length;
    return find(shared, before, mark, doubt_of(whole, row.columns), first, min(first + length, row.columns), [&](u32 column) {
        return weight_kept(column, row.logits[column] * row.scale);
    });
}

// A block a row.
KERNEL(draw, THREADS, 1, Draw) {
    __shared__ Shared shared;
    Row row = {arguments.logits + blockIdx.x * arguments.row_stride, arguments.columns, arguments.scale, arguments.temperature, 0.0};
    u32 greatest = 0, not_least = 0;
    for_each(row, [&](u32, float logit) {
        // Above the keys of all numbers.
        const u32 key = is_finite(logit) ? key_of(logit) : ~0u;
        greatest = max(greatest, key);
        not_least = max(not_least, ~key);
    });
    greatest = block_max(greatest, shared.partial);
    not_least = block_max(not_least, shared.partial);
    u32 token = NO_TOKEN;
    if (greatest != ~0u) {
        row.greatest = static_cast<double>(logit_of(greatest)) / row.temperature;
        Interval interval = {~not_least, greatest, 0.0, row.columns};
        if (arguments.top_k > 0 && arguments.top_k < row.columns) {
            interval.low = limit_of_top_k(row, shared, interval, arguments.top_k);
        }
        u64 limit = static_cast<u64>(interval.low) << 32;
        if (arguments.top_p < 1.0) limit = limit_of_top_p(row, shared, interval, arguments.top_p);
        if (limit > 0) token = draw_from(row, shared, limit, arguments.min_p, arguments.uniforms[blockIdx.x]);
    }
    if (threadIdx.x == 0) arguments.tokens[blockIdx.x] = token;
}
