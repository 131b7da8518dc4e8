// Packs: a few consecutive elements that one thread loads or stores at once, as fp32 in registers.
//
// A thread that walks packs does the same arithmetic in the same order whether its loads are wide or
// element by element, so the bits of a result do not depend on where its operands begin.
#pragma once

template <u32 N>
struct Pack {
    float at[N];
};

template <u32 N>
DEVICE Pack<N> filled(float x) {
    Pack<N> pack;
#pragma unroll
    for (u32 i = 0; i < N; i++) pack.at[i] = x;
    return pack;
}

// N elements of two bytes each, the first of a pair in the lower half of its word.
template <u32 N>
struct Pairs {
    u32 at[N / 2];
};

// N elements of two bytes each, from a place aligned to all of them.
template <u32 N>
DEVICE Pairs<N> load_pairs(const void* at) {
    static_assert(N == 2 || N == 4 || N == 8, "pairs are one load");
    Pairs<N> pairs;
    if constexpr (N == 2) {
        pairs.at[0] = *static_cast<const u32*>(at);
    } else if constexpr (N == 4) {
        const uint2 words = *static_cast<const uint2*>(at);
        pairs.at[0] = words.x;
        pairs.at[1] = words.y;
    } else {
        const uint4 words = *static_cast<const uint4*>(at);
        pairs.at[0] = words.x;
        pairs.at[1] = words.y;
        pairs.at[2] = words.z;
        pairs.at[3] = words.w;
    }
    return pairs;
}
template <u32 N>
DEVICE void store_pairs(void* at, const Pairs<N>& pairs) {
    if constexpr (N == 2) {
        *static_cast<u32*>(at) = pairs.at[0];
    } else if constexpr (N == 4) {
        *static_cast<uint2*>(at) = make_uint2(pairs.at[0], pairs.at[1]);
    } else {
        *static_cast<uint4*>(at) = make_uint4(pairs.at[0], pairs.at[1], pairs.at[2], pairs.at[3]);
    }
}

// N elements at a place aligned to their size, or to 16 bytes where they are larger.
template <u32 N>
DEVICE Pack<N> load_pack(const float* at) {
    static_assert(N == 1 || N == 2 || N % 4 == 0, "a pack is one load, or whole loads of 16 bytes");
    Pack<N> pack;
    if constexpr (N == 1) {
        pack.at[0] = *at;
    } else if constexpr (N == 2) {
        const float2 pair = *reinterpret_cast<const float2*>(at);
        pack.at[0] = pair.x;
        pack.at[1] = pair.y;
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) {
            const float4 quad = *reinterpret_cast<const float4*>(at + i);
            pack.at[i] = quad.x;
            pack.at[i + 1] = quad.y;
            pack.at[i + 2] = quad.z;
            pack.at[i + 3] = quad.w;
        }
    }
    return pack;
}
template <u32 N>
DEVICE Pack<N> load_pack(const bf16* at) {
    Pack<N> pack;
    if constexpr (N == 1) {
        pack.at[0] = widen(*at);
    } else {
        const Pairs<N> pairs = load_pairs<N>(at);
#pragma unroll
        for (u32 i = 0; i < N / 2; i++) {
            pack.at[2 * i] = first_of(pairs.at[i]);
            pack.at[2 * i + 1] = second_of(pairs.at[i]);
        }
    }
    return pack;
}

template <u32 N>
DEVICE void store_pack(float* at, const Pack<N>& pack) {
    if constexpr (N == 1) {
        *at = pack.at[0];
    } else if constexpr (N == 2) {
        *reinterpret_cast<float2*>(at) = make_float2(pack.at[0], pack.at[1]);
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) {
            *reinterpret_cast<float4*>(at + i) =
                make_float4(pack.at[i], pack.at[i + 1], pack.at[i + 2], pack.at[i + 3]);
        }
    }
}
template <u32 N>
DEVICE void store_pack(bf16* at, const Pack<N>& pack) {
    if constexpr (N == 1) {
        narrow(*at, pack.at[0]);
    } else {
        Pairs<N> pairs;
#pragma unroll
        for (u32 i = 0; i < N / 2; i++) pairs.at[i] = bf16_pair(pack.at[2 * i], pack.at[2 * i + 1]);
        store_pairs<N>(at, pairs);
    }
}

// The pack as it reads back after it is stored as activations.
template <u32 N>
DEVICE Pack<N> as_activations(Pack<N> pack) {
#if ACTIVATION_BF16
    static_assert(N % 2 == 0, "activations of two bytes are rounded in pairs");
#pragma unroll
    for (u32 i = 0; i < N; i += 2) {
        const u32 pair = bf16_pair(pack.at[i], pack.at[i + 1]);
        pack.at[i] = first_of(pair);
        pack.at[i + 1] = second_of(pair);
    }
#endif
    return pack;
}

// How packs are accessed. A conditional load would make the next one wait for it, so wide accesses have no condition.
enum class Access {
    WIDE,    // whole and aligned, as the caller ensures
    SINGLE,  // element by element, as many as exist
};

// The first `count` elements of a pack, the others `rest`.
template <u32 N, Access ACCESS, class T>
DEVICE Pack<N> load(const T* at, u64 count, float rest = 0.0f) {
    if constexpr (ACCESS == Access::WIDE) {
        return load_pack<N>(at);
    } else {
        Pack<N> pack = filled<N>(rest);
        if (count == 0) return pack;
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            const float x = widen(at[i < count ? i : 0]);
            pack.at[i] = i < count ? x : rest;
        }
        return pack;
    }
}
template <u32 N, Access ACCESS, class T>
DEVICE void store(T* at, const Pack<N>& pack, u64 count) {
    if constexpr (ACCESS == Access::WIDE) {
        store_pack<N>(at, pack);
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            if (i < count) narrow(at[i], pack.at[i]);
        }
    }
}

// `pack` if `inside`, else zeros: for loads whose result may lie outside.
template <u32 N>
DEVICE Pack<N> or_zero(bool inside, Pack<N> pack) {
#pragma unroll
    for (u32 i = 0; i < N; i++) pack.at[i] = inside ? pack.at[i] : 0.0f;
    return pack;
}

// The part of a block in elements that threads share: BATCH packs of N for each thread, neighbouring threads having
// neighbouring packs.
template <u32 THREADS, u32 BATCH, u32 N>
struct Tile {
    static constexpr u32 ELEMENTS = THREADS * BATCH * N;

    u64 elements;  // of all blocks
    u64 start;     // of the block

    __device__ __forceinline__ explicit Tile(u64 all_elements) : Tile(all_elements, blockIdx.x) {}
    // The part of block `block`.
    __device__ __forceinline__ Tile(u64 all_elements, u64 block)
        : elements(all_elements), start(block * ELEMENTS) {}

    // Whether the block has all of its elements: the last may not.
    __device__ __forceinline__ bool whole() const { return start + ELEMENTS <= elements; }
    // The first element of the thread's pack `i`.
    __device__ __forceinline__ u64 pack(u32 i) const {
        return start + (i * THREADS + threadIdx.x) * N;
    }
    // The elements from there to the end.
    __device__ __forceinline__ u64 count(u32 i) const {
        return pack(i) < elements ? elements - pack(i) : 0;
    }
};
