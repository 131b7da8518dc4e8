// Products in the stated order (ordered_product.h) of up to eight rows and several segments, whose weights pass through shared memory.
//
// Each warp of a block computes the sums of the same columns over one segment after the other. It has its own ring of
// stages, which the copy engine fills while the warp multiplies, so that data in flight takes no registers; a matrix
// load hands a step's two chunks of 16 bytes to the lanes as the instruction expects them. A block adds the segments at
// the end.
#pragma once
#include "group_product.h"

namespace ordered_staged {

struct Arguments {
    OrderedProduct product;  // `walkers` warps share its segments
    u32 columns;             // of a block
    u32 stage_terms;         // a multiple of 32
    u32 stages;              // of a warp
    u32 own_segments;        // the most segments of a warp
};

constexpr u32 MOST_WARPS = 10;
constexpr u32 ROUND_TERMS = 32;
// The padding of rows in shared memory, which puts the chunks of eight rows in different banks.
constexpr u32 PAD_BYTES = 16;

DEVICE u32 row_bytes(u32 terms) { return terms * sizeof(bf16) + PAD_BYTES; }

#if ON_NVIDIA
// Four matrices of eight rows of 16 bytes: lane i gives the address of row i % 8 of matrix i / 8, and gets the words
// for the instruction.
DEVICE void load_chunks(u32 (&chunks)[4], u32 place) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunks[0]), "=r"(chunks[1]), "=r"(chunks[2]), "=r"(chunks[3])
                 : "r"(place));
}
// The weights are the left factor: 16 columns of `out` and up to eight rows an instruction.
DEVICE void multiply_add(float (&sums)[4], const u32 (&weight)[4], u32 first, u32 second) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "r"(first), "r"(second));
}
DEVICE void copy_chunk(u32 to, const bf16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
#else
DEVICE char* at_place(u32 place) { return static_cast<char*>(emulator::dynamic_shared()) + place; }
DEVICE u32 shared_place(const void* shared) { return static_cast<const char*>(shared) - at_place(0); }
DEVICE void load_chunks(u32 (&chunks)[4], u32 place) {
    for (u32 i = 0; i < 4; i++) {
        const u32 row = emulator::exchange(place, i * 8 + lane_of_warp() / 4);
        memcpy(&chunks[i], at_place(row + lane_of_warp() % 4 * 4), 4);
    }
}
DEVICE void multiply_add(float (&sums)[4], const u32 (&weight)[4], u32 first, u32 second) {
    // The elements that a lane holds of both, for the others to read.
    __shared__ u32 lent[MOST_WARPS][WARP][6];
    u32(&of_warp)[WARP][6] = lent[threadIdx.x / WARP];
    const u32 lane = lane_of_warp(), own[6] = {weight[0], weight[1], weight[2], weight[3], first, second};
    memcpy(of_warp[lane], own, sizeof own);
    warp_barrier();
    for (u32 i = 0; i < 4; i++) {
        for (u32 pair = 0; pair < 8; pair++) {
            const u32 x = of_warp[lane / 4 * 4 + pair % 4][pair / 4 * 2 + i / 2];
            const u32 y = of_warp[(lane % 4 * 2 + i % 2) * 4 + pair % 4][4 + pair / 4];
            sums[i] = fmaf(first_of(x), first_of(y), sums[i]);
            sums[i] = fmaf(second_of(x), second_of(y), sums[i]);
        }
    }
    warp_barrier();
}
DEVICE void copy_chunk(u32 to, const bf16* from) { copy_async_16(at_place(to), from); }
#endif

// ROUNDS times 32 terms.
template <u32 ROUNDS, u32 TILES>
DEVICE void multiply_rounds(float (&sums)[TILES][4], u32 a_place, const u32 (&weight_rows)[TILES], u32 stage_place) {
    constexpr u32 ROUND_BYTES = ROUND_TERMS * sizeof(bf16);
    u32 a[ROUNDS][4], weight[ROUNDS][2][TILES][4];
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) {
        load_chunks(a[i], a_place + i * ROUND_BYTES);
#pragma unroll
        for (u32 step = 0; step < 2; step++) {
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                const u32 row = stage_place + weight_rows[tile];
                load_chunks(weight[i][step][tile], row + i * ROUND_BYTES + step * ROUND_BYTES / 2);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) {
#pragma unroll
        for (u32 step = 0; step < 2; step++) {
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                multiply_add(sums[tile], weight[i][step][tile], a[i][2 * step], a[i][2 * step + 1]);
            }
        }
    }
}

DEVICE void store_sum(const OrderedProduct& product, u64 place, float sum) {
    if (product.out_is_fp32) {
        narrow(static_cast<float*>(product.out)[place], sum);
    } else {
        narrow(static_cast<bf16*>(product.out)[place], sum);
    }
}
DEVICE float load_sum(const OrderedProduct& product, const void* at) {
    return product.out_is_fp32 ? *static_cast<const float*>(at) : widen(*static_cast<const bf16*>(at));
}
DEVICE const void* out_at(const OrderedProduct& product, u64 place) {
    return static_cast<const bf16*>(product.out) + (product.out_is_fp32 ? 2 * place : place);
}

// Writes zeros from term `from` to `to` of some rows of shared memory.
DEVICE void clear(unsigned char* rows, u32 count, u32 bytes, u32 from, u32 to) {
#pragma unroll 1
    for (u32 row = 0; row < count; row++) {
#pragma unroll 1
        for (u32 i = from + lane_of_warp(); i < to; i += WARP) reinterpret_cast<u16*>(rows + row * bytes)[i] = 0;
    }
}

// TILES tiles of 16 columns a block; the last block may have fewer.
template <u32 TILES>
DEVICE void multiply(const Arguments& arguments) {
    constexpr u32 ROUNDS = TILES == 1 ? 4 : 2;
    const OrderedProduct& product = arguments.product;
    SHARED(unsigned char, memory);
    release_next();
    const u32 lane = lane_of_warp(), warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const u32 columns = arguments.columns, stages = arguments.stages, stage_terms = arguments.stage_terms;
    const u32 first_column = blockIdx.x * columns, live = min(columns, product.columns - first_column);
    // The shared memory of the block: gates, rings, rows of `a`, and sums.
    const u32 weight_bytes = row_bytes(stage_terms), stage_bytes = columns * weight_bytes;
    const u32 a_bytes = row_bytes(min((product.terms + ROUND_TERMS - 1) / ROUND_TERMS * ROUND_TERMS, SEGMENT));
    const u32 own_a_bytes = arguments.own_segments * product.rows * a_bytes;
    const u32 gates_bytes = (warps * stages * sizeof(Gate) + 15) / 16 * 16;
    Gate* const gates = reinterpret_cast<Gate*>(memory) + warp * stages;
    unsigned char* const ring = memory + gates_bytes + warp * stages * stage_bytes;
    unsigned char* const all_a = memory + gates_bytes + warps * stages * stage_bytes;
    unsigned char* const own_a = all_a + warp * own_a_bytes;
    float* const held = reinterpret_cast<float*>(all_a + warps * own_a_bytes);  // [segments, rows, columns]
    if (lane == 0) {
#pragma unroll 1
        for (u32 i = 0; i < stages; i++) make_gate(gates[i], 1);
        gates_are_made();
    }
    warp_barrier();

    const auto end_of = [&](u32 segment) { return min((segment + 1) * SEGMENT, product.terms); };
    const bf16* const weights = product.weight + first_column * product.weight_stride;
    // The next terms to be copied.
    u32 next_segment = warp, next_term = warp * SEGMENT, next_stage = 0;
    const auto copy_next = [&] {
        if (next_segment >= product.segments) return;
        const u32 end = end_of(next_segment), count = min(stage_terms, end - next_term);
        unsigned char* const to = ring + next_stage * stage_bytes;
        if (lane == 0) arrive_expecting(gates[next_stage], live * count * sizeof(bf16));
        warp_barrier();
#pragma unroll 1
        for (u32 row = lane; row < live; row += WARP) {
            copy_bytes(to + row * weight_bytes, weights + row * product.weight_stride + next_term, count * sizeof(bf16),
                       gates[next_stage]);
        }
        next_stage = next_stage + 1 == stages ? 0 : next_stage + 1;
        next_term += stage_terms;
        if (next_term < end) return;
        next_segment += product.walkers;
        next_term = next_segment * SEGMENT;
    };
    // Instructions are fetched from memory too, so short loops are not unrolled.
#pragma unroll 1
    for (u32 i = 0; i < stages; i++) copy_next();
    // Addresses are computed early, so that little is left to do when the rows are available.
    constexpr u32 EACH = SEGMENT / CHUNK / WARP;
    const u32 first_term = warp * SEGMENT + lane * CHUNK;
    const bf16* a_from = settled(product.a + first_term);
    u32 left_terms = formed_anew(product.terms - min(first_term, product.terms));
    u32 a_to = formed_anew(shared_place(own_a) + lane * CHUNK * sizeof(bf16));
    const bool adds_first = product.adds && warp < product.rows && lane < live;
    const u64 first_place = warp * product.out_stride + first_column + lane;
    await_previous();

    // All of the warp's part of the rows of `a`, to the end of its last segment.
    const u64 next_own = product.walkers * SEGMENT - product.rows * product.a_stride;
#pragma unroll 1
    for (u32 own = 0; own < arguments.own_segments; own++) {
#pragma unroll 1
        for (u32 row = 0; row < product.rows; row++) {
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                constexpr u32 PASS = WARP * CHUNK;
                if (i * PASS < left_terms) copy_chunk(a_to + i * PASS * sizeof(bf16), a_from + i * PASS);
            }
            a_to += a_bytes;
            a_from += product.a_stride;
        }
        a_from += next_own;
        left_terms -= min(left_terms, product.walkers * SEGMENT);
    }
    copy_async_commit();
    // The values that the product is added to are loaded before the sums are finished.
    float found = 0.0f;
    if (adds_first) found = load_sum(product, out_at(product, first_place));
    copy_async_wait<0>();
    warp_barrier();

    const u32 a_row = min(lane % 8, product.rows - 1) * a_bytes + lane / 8 * CHUNK * sizeof(bf16);
    u32 weight_rows[TILES];
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
        // Matrices of eight rows: for the first chunk of a step the first eight rows and the next eight, then the same
        // for the second chunk.
        const u32 row = min(tile * TILE + lane % TILE, live - 1);
        weight_rows[tile] = row * weight_bytes + lane / TILE * CHUNK * sizeof(bf16);
    }
    u32 stage = 0, parity = 0, own = 0;
#pragma unroll 1
    for (u32 segment = warp; segment < product.segments; segment += product.walkers, own++) {
        float sums[TILES][4];
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[tile][i] = 0.0f;
        }
        const u32 start = segment * SEGMENT, end = end_of(segment);
        unsigned char* const a = own_a + own * product.rows * a_bytes;
        const u32 whole = (end - start + ROUND_TERMS - 1) / ROUND_TERMS * ROUND_TERMS;
        if (whole != end - start) {
            clear(a, product.rows, a_bytes, end - start, whole);
            warp_barrier();
        }
#pragma unroll 1
        for (u32 first = start; first < end; first += stage_terms) {
            wait_for(gates[stage], parity);
            unsigned char* const at = ring + stage * stage_bytes;
            const u32 count = min(stage_terms, end - first);
            const u32 rounded_count = (count + ROUND_TERMS - 1) / ROUND_TERMS * ROUND_TERMS;
            if (rounded_count != count) {
                clear(at, live, weight_bytes, count, rounded_count);
                warp_barrier();
            }
            constexpr u32 ROUND_BYTES = ROUND_TERMS * sizeof(bf16);
            u32 a_place = shared_place(a) + a_row + (first - start) * sizeof(bf16), place = shared_place(at);
            u32 left = rounded_count;
#pragma unroll 1
            for (; left >= ROUNDS * ROUND_TERMS; left -= ROUNDS * ROUND_TERMS) {
                multiply_rounds<ROUNDS>(sums, a_place, weight_rows, place);
                a_place += ROUNDS * ROUND_BYTES;
                place += ROUNDS * ROUND_BYTES;
            }
#pragma unroll 1
            for (; left > 0; left -= ROUND_TERMS) {
                multiply_rounds<1>(sums, a_place, weight_rows, place);
                a_place += ROUND_BYTES;
                place += ROUND_BYTES;
            }
            // The stage is filled again once all lanes have read it.
            warp_barrier();
            copy_next();
            stage++;
            if (stage == stages) stage = 0, parity ^= 1;
        }
        float* const of_segment = held + segment * product.rows * columns;
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 row = lane % 4 * 2 + i % 2, column = tile * TILE + i / 2 * 8 + lane / 4;
                if (row < product.rows && column < live) of_segment[row * columns + column] = sums[tile][i];
            }
        }
    }
    __syncthreads();
    const u32 results = product.rows * columns;
#pragma unroll 1
    for (u32 row = warp; row < product.rows; row += warps) {
#pragma unroll 1
        for (u32 column = lane; column < live; column += WARP) {
            const float* const at = held + row * columns + column;
            float total = at[0];
#pragma unroll 4
            for (u32 segment = 1; segment < product.segments; segment++) total += at[segment * results];
            const u64 place = row * product.out_stride + first_column + column;
            if (product.adds) {
                const bool is_found = row == warp && column == lane;
                total = (is_found ? found : load_sum(product, out_at(product, place))) + total;
            }
            store_sum(product, place, total);
        }
    }
}

}  // namespace ordered_staged
