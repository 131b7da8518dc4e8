// The gradients of one parameter or two, from the partial sums of runs of rows (runs.h).
//
// Floor: 4 bytes a partial sum.
#include "dialect.h"

struct SumPartials {
    float* gradients[2];       // [grains, d] each; the second may be null
    const float* partials[2];  // [runs of all grains, d] each
    u64 runs;
    u64 elements;  // grains d
    u32 runs_per_grain;
    u32 width;  // d
};

constexpr u32 SUM_THREADS = 64;

// A thread for each column of each grain of each parameter: adds the runs of the grain in order, from +0.0. There are few
// threads, so their latency decides the time: each has a batch of runs in flight.
KERNEL(sum_partials, SUM_THREADS, 1, SumPartials) {
    constexpr u32 BATCH = 32;
    const u64 thread = static_cast<u64>(blockIdx.x) * SUM_THREADS + threadIdx.x;
    const bool of_second = thread >= arguments.elements;
    const u64 element = of_second ? thread - arguments.elements : thread;
    float* const out = of_second ? arguments.gradients[1] : arguments.gradients[0];
    if (element >= arguments.elements || !out) return;
    const u64 grain = element / arguments.width;
    const u64 first = grain * arguments.runs_per_grain;
    const u64 last = min(first + arguments.runs_per_grain, arguments.runs);
    const float* const partials =
        (of_second ? arguments.partials[1] : arguments.partials[0]) + element % arguments.width;
    float sum = 0.0f;
    u64 run = first;
    for (; run + BATCH <= last; run += BATCH) {
        float terms[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) terms[i] = partials[(run + i) * arguments.width];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) sum += terms[i];
    }
    for (; run < last; run++) sum += partials[run * arguments.width];
    out[element] = sum;
}

// Columns of a block where grains have many runs, and the threads that bring the partial sums of each.
constexpr u32 COLUMNS_OF_MANY = 32;
constexpr u32 BRINGERS = 8;
constexpr u32 THREADS_OF_MANY = COLUMNS_OF_MANY * BRINGERS;

// The same bits, for grains of so many runs that one thread would wait for them again and again: several threads have a
// column, and its first adds the runs in shared memory while all of them bring the next ones.
KERNEL(sum_partials_of_many, THREADS_OF_MANY, 1, SumPartials) {
    // Runs that a thread has in flight, and those of a column that lie in shared memory, twice.
    constexpr u32 BATCH = 16, STAGE = BRINGERS * BATCH;
    __shared__ float stages[2][STAGE][COLUMNS_OF_MANY];
    const u32 column = threadIdx.x % COLUMNS_OF_MANY, bringer = threadIdx.x / COLUMNS_OF_MANY;
    const u64 place = static_cast<u64>(blockIdx.x) * COLUMNS_OF_MANY + column;
    const bool of_second = place >= arguments.elements;
    const u64 element = of_second ? place - arguments.elements : place;
    float* const out = of_second ? arguments.gradients[1] : arguments.gradients[0];
    const bool exists = element < arguments.elements && out;
    const u64 grain = exists ? element / arguments.width : 0;
    const u64 first = grain * arguments.runs_per_grain;
    const u32 count = static_cast<u32>(min(static_cast<u64>(arguments.runs_per_grain), arguments.runs - first));
    const float* const partials = (exists && of_second ? arguments.partials[1] : arguments.partials[0]) +
                                  first * arguments.width + (exists ? element % arguments.width : 0);
    float terms[BATCH];
    const auto bring = [&](u32 begin) {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            // In a short last grain the last run is loaded in place of missing ones, which are not added: the condition
            // below is the same for all threads, so no load waits for another.
            const u32 run = min(begin + i * BRINGERS + bringer, count - 1);
            if (begin + i * BRINGERS < arguments.runs_per_grain) {
                terms[i] = partials[static_cast<u64>(run) * arguments.width];
            }
        }
    };
    float sum = 0.0f;
    bring(0);
    for (u32 begin = 0; begin < arguments.runs_per_grain; begin += STAGE) {
        float(&stage)[STAGE][COLUMNS_OF_MANY] = stages[begin / STAGE % 2];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) stage[i * BRINGERS + bringer][column] = terms[i];
        bring(begin + STAGE);
        // The stage of the round before is written again in the next round, behind this barrier.
        __syncthreads();
        if (bringer == 0 && begin < count) {
            const u32 here = min(count - begin, STAGE);
            u32 i = 0;
            for (; i + BATCH <= here; i += BATCH) {
#pragma unroll
                for (u32 j = 0; j < BATCH; j++) sum += stage[i + j][column];
            }
            for (; i < here; i++) sum += stage[i][column];
        }
    }
    if (exists && bringer == 0) out[element] = sum;
}
