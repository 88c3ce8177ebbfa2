// kernels/gpu/device: what the hardware offers, as small functions.
//   In and out: pointers and registers. Nothing here knows of ranks, heaps or operations.
//   Waits: only BarrierWait, for bulk copies and warps of the same block.
//
// Every load, store, fence and bulk copy whose order matters, named by order and scope. No other
// file of this folder contains asm or vendor builtins of that kind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/device/vendor.h"

namespace jax_ep::gpu {

// Scope "sys": this GPU, its peers and the host. Scope "gpu": all blocks of this GPU.

// A line of memory on its way to the L2, for loads of it soon. It orders nothing.
inline constexpr uint64_t kLineBytes = 128;
__device__ inline void PrefetchLine([[maybe_unused]] const void* address) {
#if !JAX_EP_HIP
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

#if JAX_EP_HIP

__device__ inline uint64_t LoadAcquireSys(const uint64_t* address) {
  return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline uint32_t LoadAcquireSys(const uint32_t* address) {
  return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline uint32_t LoadRelaxedSys(const uint32_t* address) {
  return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline uint64_t LoadRelaxedSys(const uint64_t* address) {
  return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void StoreReleaseSys(uint64_t* address, uint64_t value) {
  __hip_atomic_store(address, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void StoreReleaseSys(uint32_t* address, uint32_t value) {
  __hip_atomic_store(address, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void StoreRelaxedSys(uint64_t* address, uint64_t value) {
  __hip_atomic_store(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// Two words side by side, each of which is stored or loaded as a whole. Multiples of 16 bytes.
__device__ inline void StoreRelaxedSys(uint64_t* address, uint64_t first, uint64_t second) {
  StoreRelaxedSys(address, first);
  StoreRelaxedSys(address + 1, second);
}
__device__ inline void LoadRelaxedSys(const uint64_t* address, uint64_t& first, uint64_t& second) {
  first = LoadRelaxedSys(address);
  second = LoadRelaxedSys(address + 1);
}
// Words of 16 bytes are stored and loaded in two halves here, in any order.
inline constexpr bool kHasWideWords = false;
__device__ inline void StoreRelaxedSys(uint4* address, const uint4& value) {
  uint64_t halves[2];
  __builtin_memcpy(halves, &value, sizeof(value));
  StoreRelaxedSys(reinterpret_cast<uint64_t*>(address), halves[0]);
  StoreRelaxedSys(reinterpret_cast<uint64_t*>(address) + 1, halves[1]);
}
__device__ inline uint4 LoadRelaxedSys(const uint4* address) {
  const uint64_t halves[] = {LoadRelaxedSys(reinterpret_cast<const uint64_t*>(address)),
                             LoadRelaxedSys(reinterpret_cast<const uint64_t*>(address) + 1)};
  uint4 value;
  __builtin_memcpy(&value, halves, sizeof(value));
  return value;
}
// Orders what this thread has stored and seen before its later stores, for everyone.
__device__ inline void FenceSys() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, ""); }
__device__ inline uint32_t LoadRelaxedGpu(const uint32_t* address) {
  return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// Also what peers will read: blocks run on dies that each have an L2 of their own, and the die
// whose block later tells the peers cannot write back what this one's L2 still holds.
__device__ inline uint32_t FetchAddAcqRelGpu(uint32_t* address, uint32_t amount) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");  // "": the whole system
  return __hip_atomic_fetch_add(address, amount, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
// What FetchAddAcqRelGpu releases, without a wait for the sum.
__device__ inline void AddReleaseGpu(uint32_t* address, uint32_t amount) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  __hip_atomic_fetch_add(address, amount, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// The same for bits.
__device__ inline void OrReleaseGpu(uint64_t* address, uint64_t bits) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  __hip_atomic_fetch_or(address, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Orders earlier stores of this wavefront before what it next tells its block, and lets another
// wavefront of the block publish them: a release at the scope of the block leaves them on their way
// to the L2, and the other wavefront's release waits for its own stores alone.
__device__ inline void ReleaseToBlock() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  constexpr int kVectorStoresOnly = 0x0f70;  // vmcnt(0), no wait for the other counters
  __builtin_amdgcn_s_waitcnt(kVectorStoresOnly);
}
__device__ inline uint32_t LoadAcquireBlock(const uint32_t* shared) {
  return __hip_atomic_load(shared, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ inline void StoreReleaseBlock(uint32_t* shared, uint32_t value) {
  ReleaseToBlock();
  __hip_atomic_store(shared, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ inline uint64_t ClockNs() {
  constexpr uint64_t kNsPerTick = 10;  // 100 MHz, whatever the clock of the cores
  return __builtin_readsteadycounter() * kNsPerTick;
}
__device__ inline void SleepBriefly() { __builtin_amdgcn_s_sleep(2); }

#else

__device__ inline uint64_t LoadAcquireSys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint32_t LoadAcquireSys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint32_t LoadRelaxedSys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint64_t LoadRelaxedSys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void StoreReleaseSys(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void StoreReleaseSys(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void StoreRelaxedSys(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
// Two words side by side, each of which is stored or loaded as a whole. Multiples of 16 bytes.
__device__ inline void StoreRelaxedSys(uint64_t* address, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first),
               "l"(second)
               : "memory");
}
__device__ inline void LoadRelaxedSys(const uint64_t* address, uint64_t& first, uint64_t& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(address)
               : "memory");
}
// Words of 16 bytes are stored and loaded as a whole, as scalars of type .b128 (PTX ISA 8.3, from
// sm_70 on; cuda::atomic_ref does the same with 16 bytes).
inline constexpr bool kHasWideWords = true;
__device__ inline void StoreRelaxedSys(uint4* address, const uint4& value) {
  asm volatile(
      "{\n\t"
      ".reg .b64 low, high;\n\t"
      ".reg .b128 word;\n\t"
      "mov.b64 low, {%1, %2};\n\t"
      "mov.b64 high, {%3, %4};\n\t"
      "mov.b128 word, {low, high};\n\t"
      "st.relaxed.sys.global.b128 [%0], word;\n\t"
      "}" ::"l"(address),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}
__device__ inline uint4 LoadRelaxedSys(const uint4* address) {
  uint4 value;
  asm volatile(
      "{\n\t"
      ".reg .b64 low, high;\n\t"
      ".reg .b128 word;\n\t"
      "ld.relaxed.sys.global.b128 word, [%4];\n\t"
      "mov.b128 {low, high}, word;\n\t"
      "mov.b64 {%0, %1}, low;\n\t"
      "mov.b64 {%2, %3}, high;\n\t"
      "}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address)
      : "memory");
  return value;
}
// Orders what this thread has stored and seen before its later stores, for everyone.
__device__ inline void FenceSys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline uint32_t LoadRelaxedGpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint32_t FetchAddAcqRelGpu(uint32_t* address, uint32_t amount) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(amount)
               : "memory");
  return before;
}
__device__ inline void AddReleaseGpu(uint32_t* address, uint32_t amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(amount) : "memory");
}
__device__ inline void OrReleaseGpu(uint64_t* address, uint64_t bits) {
  asm volatile("red.release.gpu.global.or.b64 [%0], %1;" ::"l"(address), "l"(bits) : "memory");
}

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// racecheck does not know what these two order; in the build for it (tests/kernels_gpu/sanitize.sh)
// they are functions of their own, so that its reports name them.
#if defined(JAX_EP_RACECHECK)
#define JAX_EP_NAMED __noinline__
#else
#define JAX_EP_NAMED
#endif
__device__ JAX_EP_NAMED inline uint32_t LoadAcquireBlock(const uint32_t* shared) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(SharedAddress(shared))
               : "memory");
  return value;
}
__device__ JAX_EP_NAMED inline void StoreReleaseBlock(uint32_t* shared, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(SharedAddress(shared)), "r"(value)
               : "memory");
}
#undef JAX_EP_NAMED
__device__ inline uint64_t ClockNs() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}
__device__ inline void SleepBriefly() { __nanosleep(100); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Orders earlier generic accesses of this thread (and what it has acquired) before its later bulk
// copies, and the other way round.
__device__ inline void FenceProxyAsync() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes initialised barriers known to bulk copies.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void BarrierExpectBytes(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(num_bytes)
      : "memory");
}
__device__ inline void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
__device__ inline void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// BarrierWait would return at once.
__device__ inline bool BarrierIsOver(uint64_t* barrier, uint32_t parity) {
  uint32_t is_over;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(is_over)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return is_over != 0;
}

// Addresses and sizes are multiples of 16 bytes.
__device__ inline void BulkLoad(void* shared, const void* global, uint32_t num_bytes,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(num_bytes), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ inline void BulkStore(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(SharedAddress(shared)), "r"(num_bytes)
               : "memory");
}
// The same of bytes that leave the L2 before others do.
__device__ inline void BulkStoreEvictFirst(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, policy;\n"
      "}\n" ::"l"(global),
      "r"(SharedAddress(shared)), "r"(num_bytes)
      : "memory");
}
__device__ inline void BulkCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's newest groups still read their shared memory.
template <int kPending>
__device__ inline void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until all of this thread's bulk stores are done.
__device__ inline void BulkWaitAll() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

#endif  // JAX_EP_HIP

}  // namespace jax_ep::gpu
