// Common parts of attention by groups of warps, forward and backward: positions in rings of tiles, rows that threads
// copy where the copy engine cannot, and numbers that are not finite in them.
#pragma once

namespace groups {

// The pipeline state of tile `count` of a chain: the stage of the ring that holds it, and the parity for which the stage's gates wait.
template <u32 STAGES>
struct PipelineState {
    u32 stage, parity;

    __device__ __forceinline__ explicit PipelineState(u32 count) : stage(count % STAGES), parity(count / STAGES % 2) {}
};

// A mask of bits that replaces the numbers that are not finite, in a pair of elements, by zeros.
DEVICE u32 finite_of(u32 pair) {
    u32 kept = 0xffffffffu;
    if (!is_finite(first_of(pair))) kept &= 0xffff0000u;
    if (!is_finite(second_of(pair))) kept &= 0x0000ffffu;
    return kept;
}

// Columns `column .. column + 8` of a row of `width` columns, with zeros behind its end.
DEVICE uint4 load_chunk(const activation* row, u32 column, u32 width, bool wide) {
    if (wide) return *reinterpret_cast<const uint4*>(row + column);
    // Without this, the compiler would keep which columns exist from row to row, in registers that copying threads
    // lack.
    const u32 count = formed_anew(width) - column;
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        pairs[i] = 2 * i < count ? row[column + 2 * i].bits : 0;
        if (2 * i + 1 < count) pairs[i] |= static_cast<u32>(row[column + 2 * i + 1].bits) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Copies COUNT rows from `first` on, by the first COPYING threads of the block, with zeros from `limit` and `width` on.
// Returns whether a number was not finite, and replaces it by zero if `cleared`.
template <u32 P, u32 COUNT, u32 COPYING = GROUP_THREADS>
DEVICE bool copy_rows(activation* to, const activation* from, u64 stride, u32 first, u32 limit,
                      const AttentionInputs& inputs, bool cleared) {
    constexpr u32 CHUNKS = P / Panel::CHUNK;
    // Addresses kept from one call to the next would take registers that copying threads lack.
    const u32 thread = formed_anew(threadIdx.x);
    const u32 column = thread % CHUNKS * Panel::CHUNK;
    const Panel panel(to + column / PANEL_COLUMNS * COUNT * PANEL_COLUMNS);
    bool found = false;
#pragma unroll 1
    for (u32 row = thread / CHUNKS; row < COUNT; row += COPYING / CHUNKS) {
        uint4 chunk = make_uint4(0, 0, 0, 0);
        if (first + row < limit && column < inputs.width) {
            chunk = load_chunk(from + (first + row) * stride, column, inputs.width, inputs.wide != 0);
        }
        if (cleared) {
            const uint4 kept = make_uint4(finite_of(chunk.x), finite_of(chunk.y), finite_of(chunk.z), finite_of(chunk.w));
            found |= (kept.x & kept.y & kept.z & kept.w) != 0xffffffffu;
            chunk = make_uint4(chunk.x & kept.x, chunk.y & kept.y, chunk.z & kept.z, chunk.w & kept.w);
        }
        *reinterpret_cast<uint4*>(panel.chunk(row, column % PANEL_COLUMNS)) = chunk;
    }
    show_to_products();
    return found;
}

}  // namespace groups
