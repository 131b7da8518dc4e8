// The language of every kernel here: the common part of CUDA, HIP and the CPU emulator, and one spelling for each thing
// that differs. Kernels include no header from outside this folder.
//
// Rules that keep a kernel's bits independent of compilers and devices:
//   - The compilers are told never to contract a product and a sum (--fmad=false, -ffp-contract=off):
//     where a fused multiply-add is wanted, fmaf says so. So a loop's tail rounds as its body does.
//   - No floating-point atomics; sums have a fixed order. WARP (32 or 64) is never assumed.
//   - A kernel takes one struct: outputs, then inputs, then sizes. Rust mirrors it.
#pragma once

#if defined(EMULATOR)
#include "emulator.h"
#define ON_AMD 0
#define ON_NVIDIA 0
#elif defined(__HIP__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)
#define ON_AMD 1
#define ON_NVIDIA 0
#if defined(__GFX9__)
#define WARP 64
#else
#define WARP 32
#endif
#else
#define ON_AMD 0
#define ON_NVIDIA 1
#define WARP 32
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__

// KERNEL(name, threads, blocks, Arguments): a kernel of at most `threads` threads a block, of which
// `blocks` should fit a multiprocessor at once (a hint that bounds registers on NVIDIA alone: AMD's
// second launch bound counts something else, and its first must always be given).
#if defined(EMULATOR)
#define KERNEL(name, threads, blocks, Arguments)                                              \
    static void name##_body(const Arguments arguments);                                       \
    extern "C" EXPORTED const u32 name##_argument_bytes = sizeof(Arguments);                  \
    extern "C" EXPORTED const u32 name##_threads = (threads);                                 \
    extern "C" EXPORTED void name(const void* arguments) {                                    \
        name##_body(*static_cast<const Arguments*>(arguments));                               \
    }                                                                                         \
    static void name##_body(const Arguments arguments)
#elif ON_AMD
#define KERNEL(name, threads, blocks, Arguments) \
    extern "C" __global__ void __launch_bounds__(threads) name(const Arguments arguments)
#else
#define KERNEL(name, threads, blocks, Arguments) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const Arguments arguments)
#endif

// KERNEL_OF_MAPS: the same for a struct that holds tile maps: the copy engine reads them in the launch's parameter
// memory.
#if ON_NVIDIA
#define KERNEL_OF_MAPS(name, threads, blocks, Arguments)               \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name( \
        const __grid_constant__ Arguments arguments)
#else
#define KERNEL_OF_MAPS KERNEL
#endif

// SHARED(T, name): the block's dynamic shared memory, whose size the launch gives.
#if defined(EMULATOR)
#define SHARED(T, name) T* const name = static_cast<T*>(emulator::dynamic_shared())
#else
#define SHARED(T, name)                                \
    extern __shared__ float4 dynamic_shared_memory[];  \
    T* const name = reinterpret_cast<T*>(dynamic_shared_memory)
#endif

// SHARED_ALIGNED(T, name, alignment): the same for data that must begin at a multiple of more than 16 bytes; the
// emulator needs none.
#if defined(EMULATOR)
#define SHARED_ALIGNED(T, name, alignment) SHARED(T, name)
#else
#define SHARED_ALIGNED(T, name, alignment)                                          \
    extern __shared__ __align__(alignment) unsigned char aligned_shared_memory[];  \
    T* const name = reinterpret_cast<T*>(aligned_shared_memory)
#endif

// SHARED_BYTES(kernel, bytes): the dynamic shared memory of each launch of the kernel. The emulator refuses another
// number. For AMD the number is compiled in for tools to read: shared memory bounds how many blocks a compute unit
// holds.
#if defined(EMULATOR)
#define SHARED_BYTES(kernel, bytes) extern "C" EXPORTED const u32 kernel##_shared_bytes = (bytes)
#elif ON_AMD
#define SHARED_BYTES(kernel, bytes) \
    extern "C" __device__ __attribute__((used)) const u32 kernel##_shared_bytes = (bytes)
#else
#define SHARED_BYTES(kernel, bytes) static_assert((bytes) > 0, "a kernel that needs none says nothing")
#endif

// --- bf16 -----------------------------------------------------------------------------------------

// The upper half of an fp32.
struct bf16 {
    u16 bits;
};

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

// To nearest, ties to even; a NaN stays a NaN.
DEVICE u32 bf16_bits(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

DEVICE void narrow(float& out, float x) { out = x; }
DEVICE void narrow(bf16& out, float x) { out.bits = static_cast<u16>(bf16_bits(x)); }

// Two bf16 in a word, the first in the lower half.
DEVICE u32 bf16_pair(float first, float second) {
#if ON_NVIDIA
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return bf16_bits(first) | (bf16_bits(second) << 16);
#endif
}
DEVICE float first_of(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float second_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Four consecutive elements at a place aligned to them.
DEVICE float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
DEVICE float4 four_of(uint2 pairs) {
    return make_float4(first_of(pairs.x), second_of(pairs.x), first_of(pairs.y), second_of(pairs.y));
}
DEVICE uint2 pairs_of(float4 x) { return make_uint2(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w)); }
DEVICE float4 load4(const bf16* at) { return four_of(*reinterpret_cast<const uint2*>(at)); }
DEVICE void unpack(float* out, float4 x) {
    out[0] = x.x;
    out[1] = x.y;
    out[2] = x.z;
    out[3] = x.w;
}
DEVICE float4 packed(const float* x) { return make_float4(x[0], x[1], x[2], x[3]); }
DEVICE void store4(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }
DEVICE void store4(bf16* at, float4 x) { *reinterpret_cast<uint2*>(at) = pairs_of(x); }
// store4 to global memory that the compiler cannot split in four, as it does where the place is a sum of
// several offsets.
DEVICE void store4_whole(float* global, float4 x) {
#if ON_NVIDIA
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
#else
    store4(global, x);
#endif
}
// The same of global memory that is not accessed again before much else was: the cache gives its lines away first. AMD's are ordinary
// accesses: what others would do there was not measured.
DEVICE float4 load4_streaming(const float* global) {
#if ON_NVIDIA
    return __ldcs(reinterpret_cast<const float4*>(global));
#else
    return load4(global);
#endif
}
DEVICE float4 load4_streaming(const bf16* global) {
#if ON_NVIDIA
    return four_of(__ldcs(reinterpret_cast<const uint2*>(global)));
#else
    return load4(global);
#endif
}
DEVICE void store4_streaming(float* global, float4 x) {
#if ON_NVIDIA
    __stcs(reinterpret_cast<float4*>(global), x);
#else
    store4(global, x);
#endif
}
DEVICE void store4_streaming(bf16* global, float4 x) {
#if ON_NVIDIA
    __stcs(reinterpret_cast<uint2*>(global), pairs_of(x));
#else
    store4(global, x);
#endif
}

// The type of activations: one module is compiled for each precision.
#if ACTIVATION_BF16
typedef bf16 activation;
#else
typedef float activation;
#endif
DEVICE activation rounded(float x) {
    activation out;
    narrow(out, x);
    return out;
}

// `x`, hidden from the compiler: results computed from it are computed here, not kept in registers since an earlier
// place.
DEVICE u32 formed_anew(u32 x) {
#if ON_NVIDIA
    asm volatile("" : "+r"(x));
#elif ON_AMD
    asm volatile("" : "+v"(x));
#endif
    return x;
}

// GROUP_PRODUCTS: whether groups of warps multiply together (group_product.h). The default is 1 on Hopper and 0
// elsewhere; the emulator sets it.
#if !defined(GROUP_PRODUCTS)
#if ON_NVIDIA && ACTIVATION_BF16 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GROUP_PRODUCTS 1
#else
#define GROUP_PRODUCTS 0
#endif
#endif

// --- mathematics ------------------------------------------------------------------------------------

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

// 2^x within 2 ulp, subnormals flushed.
DEVICE float exp2_fast(float x) {
#if ON_NVIDIA
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#elif ON_AMD
    return __builtin_amdgcn_exp2f(x);
#else
    return exp2f(x);
#endif
}
// log2 x for normal x.
DEVICE float log2_fast(float x) {
#if ON_NVIDIA
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#elif ON_AMD
    return __builtin_amdgcn_logf(x);
#else
    return log2f(x);
#endif
}
// 1 / x within 1 ulp; 0 for infinities.
DEVICE float reciprocal_fast(float x) {
#if ON_NVIDIA
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#elif ON_AMD
    return __builtin_amdgcn_rcpf(x);
#else
    return 1.0f / x;
#endif
}

DEVICE float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

// 1 / (1 + e^-x).
DEVICE float sigmoid(float x) { return reciprocal_fast(1.0f + exp_fast(-x)); }
// x sigmoid(x).
DEVICE float silu(float x) { return x * sigmoid(x); }
// The derivative of silu: s (1 + x (1 - s)), s = sigmoid(x).
DEVICE float silu_derivative(float x) {
    const float s = sigmoid(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
}

// --- warps ------------------------------------------------------------------------------------------

#if ON_AMD
// `x` of another lane among sixteen, which the arithmetic unit fetches directly: AMD's data-parallel primitives.
template <int CONTROL>
DEVICE float of_near_lane(float x) {
    return __int_as_float(__builtin_amdgcn_mov_dpp(__float_as_int(x), CONTROL, 0xf, 0xf, true));
}
// A mask known at compile time with such a primitive uses it; others use the crossbar of shared memory.
DEVICE float shuffle_xor(float x, u32 mask) {
    if (__builtin_constant_p(mask)) {
        if (mask == 1) return of_near_lane<0xb1>(x);   // quad_perm [1, 0, 3, 2]
        if (mask == 2) return of_near_lane<0x4e>(x);   // quad_perm [2, 3, 0, 1]
        if (mask == 8) return of_near_lane<0x128>(x);  // row_ror 8
    }
    return __shfl_xor(x, static_cast<int>(mask), WARP);
}
DEVICE float shuffle(float x, u32 lane) { return __shfl(x, static_cast<int>(lane), WARP); }
DEVICE void warp_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}
#else
DEVICE float shuffle_xor(float x, u32 mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle(float x, u32 lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE void warp_barrier() { __syncwarp(); }
#endif
DEVICE double shuffle_xor(double x, u32 mask) {
    union {
        double whole;
        float half[2];
    } word;
    word.whole = x;
    word.half[0] = shuffle_xor(word.half[0], mask);
    word.half[1] = shuffle_xor(word.half[1], mask);
    return word.whole;
}

// The sum over LANES neighbouring lanes, a power of two, in each of them: a butterfly, so that all have the same bits.
template <u32 LANES, class T>
DEVICE T lane_sum(T x) {
#pragma unroll
    for (u32 mask = LANES / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
template <class T>
DEVICE T warp_sum(T x) {
    return lane_sum<WARP>(x);
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}

// The sum over a block of THREADS threads, in every thread. `partial` is shared memory for
// THREADS / WARP elements; it may be used again after the call.
template <u32 THREADS, class T>
DEVICE T block_sum(T x, T* partial) {
    x = warp_sum(x);
    if (THREADS == WARP) return x;
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = partial[0];
#pragma unroll
    for (u32 warp = 1; warp < THREADS / WARP; warp++) sum += partial[warp];
    __syncthreads();
    return sum;
}

// --- copies from global to shared memory that may overlap with arithmetic ------------------------------

// 16 bytes, both ends aligned to 16. On a device without such copies the data is copied at once.
DEVICE void copy_async_16(void* shared, const void* global) {
#if ON_NVIDIA
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(shared))),
                 "l"(global));
#else
    *static_cast<float4*>(shared) = *static_cast<const float4*>(global);
#endif
}
// 8 bytes, both ends aligned to 8.
DEVICE void copy_async_8(void* shared, const void* global) {
#if ON_NVIDIA
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(shared))),
                 "l"(global));
#else
    *static_cast<float2*>(shared) = *static_cast<const float2*>(global);
#endif
}
// Ends a group of this thread's copies.
DEVICE void copy_async_commit() {
#if ON_NVIDIA
    asm volatile("cp.async.commit_group;");
#endif
}
// Waits for all but the newest `PENDING` groups of this thread's own copies.
template <int PENDING>
DEVICE void copy_async_wait() {
#if ON_NVIDIA
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// --- messages between blocks -------------------------------------------------------------------------------

// The number of earlier arrivals.
DEVICE u32 take_number(u32* counter) { return atomicAdd(counter, 1u); }
// Sets `flag`: a block that sees it there (`seen`) finds all that this block wrote before its last barrier.
DEVICE void publish(u32* flag, u32 value) {
#if ON_NVIDIA
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#elif ON_AMD
    __hip_atomic_store(flag, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
#else
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}
// The present value of `flag`. Other threads of the block may read the published data after the next barrier.
DEVICE u32 seen(const u32* flag) {
#if ON_NVIDIA
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
#elif ON_AMD
    return __hip_atomic_load(flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
#else
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}
// Waits briefly, between two reads of a flag.
DEVICE void rest() {
#if ON_NVIDIA
    __nanosleep(64);
#elif ON_AMD
    __builtin_amdgcn_s_sleep(2);
#else
    emulator::rest();
#endif
}

// --- kernels that overlap --------------------------------------------------------------------------------

// A kernel of a recording may begin while the one before it still runs (`Start::Early` of gpu/driver.rs): its blocks
// then use the room that the other's leave, and may already load parameters. On other devices these functions do
// nothing.
//
// Every thread of such a kernel calls await_previous, before it reads what another kernel writes and before it writes
// anything. Then any chain of kernels is correct, however many of them have begun: a kernel ends only when all of its
// threads have ended, so it ends after the kernel before it, which ends after its own predecessor; and a kernel that
// does not begin early begins when all kernels before it have ended. So after await_previous a kernel finds everything
// that earlier kernels wrote, and overwrites nothing that one of them has yet to read. Before that call, a thread may
// load data that no kernel of the recording writes, and `fetch_ahead` anything: the cache that all multiprocessors
// share is always up to date. A recording as a whole begins when all earlier work has ended.
#if ON_NVIDIA && defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 900
#define EARLY_STARTS 1
#endif
#endif
#if !defined(EARLY_STARTS)
#define EARLY_STARTS 0
#endif

// Lets the next kernel begin, once all blocks have reached this point or have ended.
DEVICE void release_next() {
#if EARLY_STARTS
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the kernel before this one has ended, and so all kernels before that.
DEVICE void await_previous() {
#if EARLY_STARTS
    asm volatile("griddepcontrol.wait;" ::: "memory");
#elif defined(EMULATOR)
    emulator::await_previous();
#endif
}
// Prefetches the line of `global` into the cache that all multiprocessors share.
DEVICE void fetch_ahead(const void* global) {
#if EARLY_STARTS
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#endif
}

// --- faults -----------------------------------------------------------------------------------------

// The error that a kernel leaves for the host when its input is wrong, checked whenever the host reads: the lowest row
// whose token lies outside the vocabulary, in the upper half, and the token. All ones: no error. Each kernel that looks
// up tokens has a Fault of its own.
struct Fault {
    u64 row_and_token;
};
DEVICE void report_token(Fault* fault, u32 row, u32 token) {
    atomicMin(&fault->row_and_token, static_cast<u64>(row) << 32 | token);
}
