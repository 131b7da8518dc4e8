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

// A thread for each column of each grain of each parameter: the runs of the grain in order, from +0.0.
KERNEL(sum_partials, 128, 1, SumPartials) {
    const u64 thread = static_cast<u64>(blockIdx.x) * 128 + threadIdx.x;
    const bool of_second = thread >= arguments.elements;
    const u64 element = of_second ? thread - arguments.elements : thread;
    float* const out = of_second ? arguments.gradients[1] : arguments.gradients[0];
    const float* const partials = of_second ? arguments.partials[1] : arguments.partials[0];
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
