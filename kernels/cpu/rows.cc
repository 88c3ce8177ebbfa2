#include "kernels/cpu/rows.h"

#include <cstring>

#include "kernels/cpu/elements.h"

#if defined(__SSE2__)
#include <emmintrin.h>  // non-temporal stores: GCC 12 has no portable builtin for them
#endif

namespace jax_ep {
namespace {

// Lanes of a dot product, which fix the order of its sum. As many as a GPU warp adds at once.
constexpr uint64_t kDotLanes = 256;

// The bodies below are forced into the cloned entry points, where they take on their instruction
// set; __restrict is what lets them vectorise.
#define JAX_EP_BODY        \
  template <typename Elem> \
  __attribute__((always_inline)) inline

JAX_EP_BODY void LoadScaledBody(float* __restrict acc, const std::byte* row, float weight,
                                uint64_t num_elems) {
  const auto* __restrict elems = Typed<Elem>(row);
  for (uint64_t i = 0; i < num_elems; ++i) acc[i] = weight * Elem::Load(elems[i]);
}

JAX_EP_BODY void AddScaledBody(float* __restrict acc, const std::byte* row, float weight,
                               uint64_t num_elems) {
  const auto* __restrict elems = Typed<Elem>(row);
  for (uint64_t i = 0; i < num_elems; ++i) acc[i] += weight * Elem::Load(elems[i]);
}

JAX_EP_BODY void RoundFloatsBody(float* acc, uint64_t num_elems) {
  for (uint64_t i = 0; i < num_elems; ++i) acc[i] = Elem::Load(Elem::Store(acc[i]));
}

JAX_EP_BODY void StoreRoundedBody(std::byte* row, const float* __restrict acc, uint64_t num_elems) {
  auto* __restrict elems = Typed<Elem>(row);
  for (uint64_t i = 0; i < num_elems; ++i) elems[i] = Elem::Store(acc[i]);
}

JAX_EP_BODY void ScaleRowBody(std::byte* dst, const std::byte* src, float weight,
                              uint64_t num_elems) {
  auto* __restrict to = Typed<Elem>(dst);
  const auto* __restrict from = Typed<Elem>(src);
  for (uint64_t i = 0; i < num_elems; ++i) to[i] = Elem::Store(weight * Elem::Load(from[i]));
}

JAX_EP_BODY float DotRowsBody(const std::byte* a, const std::byte* b, uint64_t num_elems) {
  const auto* __restrict lhs = Typed<Elem>(a);
  const auto* __restrict rhs = Typed<Elem>(b);
  float lanes[kDotLanes] = {};
  uint64_t i = 0;
  for (; i + kDotLanes <= num_elems; i += kDotLanes) {
    for (uint64_t lane = 0; lane < kDotLanes; ++lane) {
      lanes[lane] += Elem::Load(lhs[i + lane]) * Elem::Load(rhs[i + lane]);
    }
  }
  for (uint64_t lane = 0; i + lane < num_elems; ++lane) {
    lanes[lane] += Elem::Load(lhs[i + lane]) * Elem::Load(rhs[i + lane]);
  }
  for (uint64_t width = kDotLanes / 2; width > 0; width /= 2) {
    for (uint64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

#undef JAX_EP_BODY

}  // namespace

#if defined(__SSE2__)
void StreamCopy(std::byte* dst, const std::byte* src, uint64_t num_bytes) {
  constexpr uint64_t kLineBytes = 64;
  const uint64_t head = (kLineBytes - reinterpret_cast<uintptr_t>(dst) % kLineBytes) % kLineBytes;
  if (num_bytes < head + kLineBytes) {
    std::memcpy(dst, src, num_bytes);
    return;
  }
  std::memcpy(dst, src, head);
  uint64_t done = head;
  for (; done + kLineBytes <= num_bytes; done += kLineBytes) {
    const auto* from = reinterpret_cast<const __m128i*>(src + done);
    auto* to = reinterpret_cast<__m128i*>(dst + done);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + done, src + done, num_bytes - done);
}
void StreamFence() { _mm_sfence(); }
#else
void StreamCopy(std::byte* dst, const std::byte* src, uint64_t num_bytes) {
  std::memcpy(dst, src, num_bytes);
}
void StreamFence() {}
#endif

JAX_EP_CLONES void LoadScaled(ElemType type, float* acc, const std::byte* row, float weight,
                              uint64_t num_elems) {
  switch (type) {
    case ElemType::kF32:
      return LoadScaledBody<F32>(acc, row, weight, num_elems);
    case ElemType::kBf16:
      return LoadScaledBody<Bf16>(acc, row, weight, num_elems);
    case ElemType::kF16:
      return LoadScaledBody<F16>(acc, row, weight, num_elems);
  }
}

JAX_EP_CLONES void AddScaled(ElemType type, float* acc, const std::byte* row, float weight,
                             uint64_t num_elems) {
  switch (type) {
    case ElemType::kF32:
      return AddScaledBody<F32>(acc, row, weight, num_elems);
    case ElemType::kBf16:
      return AddScaledBody<Bf16>(acc, row, weight, num_elems);
    case ElemType::kF16:
      return AddScaledBody<F16>(acc, row, weight, num_elems);
  }
}

JAX_EP_CLONES void AddFloats(float* __restrict acc, const float* __restrict other,
                             uint64_t num_elems) {
  for (uint64_t i = 0; i < num_elems; ++i) acc[i] += other[i];
}

JAX_EP_CLONES void RoundFloats(ElemType type, float* acc, uint64_t num_elems) {
  switch (type) {
    case ElemType::kF32:
      return;
    case ElemType::kBf16:
      return RoundFloatsBody<Bf16>(acc, num_elems);
    case ElemType::kF16:
      return RoundFloatsBody<F16>(acc, num_elems);
  }
}

JAX_EP_CLONES void StoreRounded(ElemType type, std::byte* row, const float* acc,
                                uint64_t num_elems) {
  switch (type) {
    case ElemType::kF32:
      std::memcpy(row, acc, num_elems * sizeof(float));
      return;
    case ElemType::kBf16:
      return StoreRoundedBody<Bf16>(row, acc, num_elems);
    case ElemType::kF16:
      return StoreRoundedBody<F16>(row, acc, num_elems);
  }
}

JAX_EP_CLONES void ScaleRow(ElemType type, std::byte* dst, const std::byte* src, float weight,
                            uint64_t num_elems) {
  switch (type) {
    case ElemType::kF32:
      return ScaleRowBody<F32>(dst, src, weight, num_elems);
    case ElemType::kBf16:
      return ScaleRowBody<Bf16>(dst, src, weight, num_elems);
    case ElemType::kF16:
      return ScaleRowBody<F16>(dst, src, weight, num_elems);
  }
}

JAX_EP_CLONES float DotRows(ElemType type, const std::byte* a, const std::byte* b,
                            uint64_t num_elems) {
  switch (type) {
    case ElemType::kF32:
      return DotRowsBody<F32>(a, b, num_elems);
    case ElemType::kBf16:
      return DotRowsBody<Bf16>(a, b, num_elems);
    case ElemType::kF16:
      return DotRowsBody<F16>(a, b, num_elems);
  }
  return 0;
}

}  // namespace jax_ep
