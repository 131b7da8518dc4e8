// The kernels before and after the walks of the selective scan: B and C in the form that walks read, and the sums, in
// order, over blocks and samples; and the sums of the scan of heads.
#include "scan.h"

namespace {

constexpr u32 THREADS = 256;

struct PackArguments {
    float* packed;  // [b, positions up to a whole tile, 8, 4]
    u32* words;     // of ScanWorkItems
    ScanRows bc;    // [b t, 32]
    u32 samples, positions, word_count, unused;
};

// The order of partial sums of a row's dB and dC: that of dbc, or that of scan_pack.
enum Order { PLAIN, PACKED };

struct SumDbcArguments {
    ScanRowsOut dbc;        // [b t, 2 n]
    const float* partials;  // [b, blocks, t, 2 n]
    u64 elements;           // b t 2 n
    u32 positions, states, blocks, order;
};

struct SumHeadsArguments {
    ScanRowsOut to;       // [b t, g n]
    const float* shares;  // [b t, h, row]: the part of each head in its group's sum, 16 bytes aligned
    u64 items;            // b t g row / 4
    u32 heads, groups, states;
    u32 row;              // a multiple of 4
};

struct SumSamplesArguments {
    float *da_log, *dd, *ddelta_bias;  // [grains, e n], [grains, e], [grains, e]
    const float* partials;             // [b, e n + 2 e]
    u64 state_elements;                // e n
    u32 channels, samples, samples_per_grain, grains;
};

}  // namespace

// One thread for a row's two neighbouring states, and for a word that the walk needs to be zero. Reads are single
// elements: bc may begin anywhere.
KERNEL(scan_pack, 256, 1, PackArguments) {
    const u64 per_sample = packed_elements(arguments.positions) / 4;
    const u64 item = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    if (item < arguments.word_count) arguments.words[item] = 0;
    if (item >= per_sample * arguments.samples) return;
    const u32 sample = static_cast<u32>(item / per_sample);
    const u32 position = static_cast<u32>(item % per_sample / 8);
    const u32 state = static_cast<u32>(item % 8) * 2;
    float4 packed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (position < arguments.positions) {
        const u32 row = sample * arguments.positions + position;
        const activation* b = place(arguments.bc, row, state);
        packed = make_float4(widen(b[0]), widen(b[1]), widen(b[16]), widen(b[17]));
    }
    store4(arguments.packed + item * 4, packed);
}

// One thread for an element of dbc: its blocks' partial sums, first to last.
KERNEL(scan_sum_dbc, 256, 1, SumDbcArguments) {
    const u64 item = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= arguments.elements) return;
    const u32 columns = 2 * arguments.states;
    const u32 row = static_cast<u32>(item / columns), column = static_cast<u32>(item % columns);
    const u64 stride = static_cast<u64>(arguments.positions) * columns;
    const u32 sample = row / arguments.positions;
    const float* partial = arguments.partials + sample * arguments.blocks * stride +
                           static_cast<u64>(row % arguments.positions) * columns + column;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 block = 0; block < arguments.blocks; block++) sum += partial[block * stride];
    const u32 state = column / 4 * 2 + column % 2, is_c = column / 2 % 2;
    const u32 to = arguments.order == PACKED ? is_c * arguments.states + state : column;
    *place(arguments.dbc, row, to) = rounded(sum);
}

// One thread for a parameter of a grain: its samples' gradients, first to last.
KERNEL(scan_sum_samples, 256, 1, SumSamplesArguments) {
    const u64 per_sample = arguments.state_elements + 2 * static_cast<u64>(arguments.channels);
    const u64 item = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= per_sample * arguments.grains) return;
    const u32 grain = static_cast<u32>(item / per_sample);
    const u64 at = item % per_sample;
    const u32 first = grain * arguments.samples_per_grain;
    const u32 count = min(arguments.samples_per_grain, arguments.samples - first);
    const float* partial = arguments.partials + first * per_sample + at;
    float sum = 0.0f;
    for (u32 sample = 0; sample < count; sample++) sum += partial[sample * per_sample];
    const u64 channels = arguments.channels;
    if (at < arguments.state_elements) {
        arguments.da_log[grain * arguments.state_elements + at] = sum;
    } else if (at < arguments.state_elements + channels) {
        arguments.dd[grain * channels + (at - arguments.state_elements)] = sum;
    } else {
        arguments.ddelta_bias[grain * channels + (at - arguments.state_elements - channels)] = sum;
    }
}

// One thread for four neighbouring states of a group of heads in a row: the shares of its heads, first to last. Floor: 4 bytes a share.
KERNEL(scan_sum_heads, 256, 1, SumHeadsArguments) {
    const u64 item = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= arguments.items) return;
    const u32 fours = arguments.row / 4, heads = arguments.heads / arguments.groups;
    const u32 state = static_cast<u32>(item % fours) * 4;
    const u64 of_group = item / fours;
    const u32 group = static_cast<u32>(of_group % arguments.groups), row = static_cast<u32>(of_group / arguments.groups);
    const float* const shares = arguments.shares + of_group * heads * arguments.row + state;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (u32 head = 0; head < heads; head++) {
        float share[4];
        unpack(share, load4(shares + static_cast<u64>(head) * arguments.row));
#pragma unroll
        for (u32 j = 0; j < 4; j++) sums[j] += share[j];
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        if (state + j < arguments.states) {
            *place(arguments.to, row, group * arguments.states + state + j) = rounded(sums[j]);
        }
    }
}
