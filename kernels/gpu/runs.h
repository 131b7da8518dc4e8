// Runs of rows: the rows over which one team or thread sums gradients of parameters, before partial_sums.cu adds the
// runs of a grain.
#pragma once

// Rows of a run of a bias's gradient.
constexpr u32 BIAS_RUN_ROWS = 32;

struct Run {
    u64 first_row;
    u64 last_row;  // one past it
};

// Run `run` of at most `ROWS` rows. Runs are cut from a grain's first row, so that they do not depend on other grains.
template <u32 ROWS, class Arguments>
DEVICE Run run_of_rows(const Arguments& arguments, u64 run) {
    const u64 grain_row = run / arguments.runs_per_grain * arguments.rows_per_grain;
    const u64 first_row = grain_row + run % arguments.runs_per_grain * ROWS;
    const u64 grain_end = min(grain_row + arguments.rows_per_grain, arguments.rows);
    return {first_row, min(first_row + ROWS, grain_end)};
}
