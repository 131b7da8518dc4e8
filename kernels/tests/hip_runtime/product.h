// Products of matrices on the CPU, for the libraries that stand for AMD's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// In which order the terms of a sum are added, one after the other by fused multiply-adds.
enum Order {
    FORWARDS,
    BACKWARDS,
    // Of some rows it depends on where they stand.
    LATE_ROWS_BACKWARDS,
    // In two parts, of which the output takes one after the other, rounded each.
    IN_PARTS,
};

constexpr int FIRST_LATE_ROW = 64;

struct Matrix {
    const void* first;
    bool is_bf16, is_transposed;
    int64_t stride;

    // Column by column.
    float at(int64_t row, int64_t column) const {
        const int64_t place = is_transposed ? column + row * stride : row + column * stride;
        if (!is_bf16) return static_cast<const float*>(first)[place];
        const uint32_t bits = uint32_t(static_cast<const uint16_t*>(first)[place]) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

void store(void* first, bool is_bf16, int64_t place, float value) {
    if (!is_bf16) {
        static_cast<float*>(first)[place] = value;
        return;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    static_cast<uint16_t*>(first)[place] = is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// sums[i] += factor terms[i], each rounded once.
__attribute__((target_clones("default", "arch=x86-64-v3"))) void add_scaled(float* sums, const float* terms, float factor, int64_t count) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++) sums[i] = __builtin_fmaf(factor, terms[i], sums[i]);
}

struct Product {
    int64_t m, n, k;
    Matrix a, b;
    float beta;
    const void* base;
    void* out;
    bool out_is_bf16;
    int64_t out_stride;
    Order order;

    // The caller's rows are the columns here.
    void compute() const {
        std::vector<float> terms(m * k), sums(m);
        for (int64_t term = 0; term < k; term++) {
            for (int64_t row = 0; row < m; row++) terms[term * m + row] = a.at(row, term);
        }
        for (int64_t column = 0; column < n; column++) {
            std::fill(sums.begin(), sums.end(), 0.0f);
            const bool is_backwards = order == BACKWARDS || order == IN_PARTS || (order == LATE_ROWS_BACKWARDS && column >= FIRST_LATE_ROW);
            bool adds = beta != 0;
            const void* added_to = base;
            const auto add_to_out = [&] {
                const Matrix before{added_to, out_is_bf16, false, out_stride};
                for (int64_t row = 0; row < m; row++) {
                    const float sum = adds ? sums[row] + before.at(row, column) : sums[row];
                    store(out, out_is_bf16, row + column * out_stride, sum);
                }
                added_to = out;
            };
            for (int64_t step = 0; step < k; step++) {
                const int64_t term = is_backwards ? k - 1 - step : step;
                add_scaled(sums.data(), &terms[term * m], b.at(term, column), m);
                if (order == IN_PARTS && step + 1 == k / 2) {
                    add_to_out();
                    adds = true;
                    std::fill(sums.begin(), sums.end(), 0.0f);
                }
            }
            add_to_out();
        }
    }
};

}  // namespace
