// The few pieces of PTX that the kernels are made of: barriers, copies, number formats. No attention here.
// Nothing is included, so that NVRTC needs no headers.
#pragma once

using uint32 = unsigned int;
using uint64 = unsigned long long;

#define INFINITE __int_as_float(0x7f800000)
constexpr float HALF_MAX = 65504.f;

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// ---- launches that overlap

// Waits until the kernels before this one in the stream are complete and what they wrote is visible.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// ---- barriers in shared memory

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when all copies that this thread has started so far are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni over;\nbra.uni again;\nover:\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}
// Of the 128 threads of one warpgroup.
__device__ __forceinline__ void warpgroup_sync(int which) {
    asm volatile("bar.sync %0, 128;" ::"r"(which + 1) : "memory");
}

// ---- copies

// What is loaded so leaves the L2 cache first.
__device__ __forceinline__ uint64 passing_through() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
// 16 bytes from global to shared memory; zeros if `bytes` is 0.
__device__ __forceinline__ void copy_16(uint32 to, const void* from, int bytes, uint64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
                 "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// What this thread wrote to shared memory becomes visible to the tensor cores.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store_shared(uint32 to, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32 to, uint32 value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint4 load_shared(uint32 from) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

// ---- numbers

enum class Format { BF16, FP16, E4M3 };

// Two numbers as 16-bit, `low` in the low half.
template <Format FORMAT>
__device__ __forceinline__ uint32 packed(float low, float high) {
    uint32 both;
    if constexpr (FORMAT == Format::BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    }
    return both;
}
template <Format FORMAT>
__device__ __forceinline__ float2 unpacked(uint32 both) {
    float2 pair;
    if constexpr (FORMAT == Format::BF16) {
        pair.x = __uint_as_float(both << 16);
        pair.y = __uint_as_float(both & 0xffff0000u);
    } else {
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
            : "=f"(pair.x), "=f"(pair.y)
            : "r"(both));
    }
    return pair;
}
// Four e4m3 numbers as fp16, exactly.
__device__ __forceinline__ uint2 widened(uint32 four) {
    uint2 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(wide.x), "=r"(wide.y)
        : "r"(four));
    return wide;
}
__device__ __forceinline__ float within_half(float value) { return fminf(fmaxf(value, -HALF_MAX), HALF_MAX); }

__device__ __forceinline__ float power_of_2(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
__device__ __forceinline__ float log_2(float value) {
    float exponent;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(exponent) : "f"(value));
    return exponent;
}
