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
// Runs that a thread has in flight: there are few threads, so their latency decides the time.
constexpr u32 BATCH = 32;

// A thread for each column of each grain of each parameter: adds the runs of the grain in order, from +0.0.
KERNEL(sum_partials, SUM_THREADS, 1, SumPartials) {
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
