// The pull of an HT dispatch without bulk copies (dispatch.cc): each warp loads pieces of a row and
// stores them to all of its places.
#include "kernels/gpu/ht/dispatch/pull.cuh"
#include "kernels/gpu/launch.h"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kWarps = 512 / kWarpSize;  // that pull
constexpr uint32_t kThreads = (kWarps + 1) * kWarpSize;
constexpr uint32_t kSharedBytes = kWarps * kMaxTopK * sizeof(int32_t);
// For the compiler: bounds the registers of a thread.
constexpr uint32_t kMaxThreads = (kWarps + 4) * kWarpSize;

extern __shared__ __align__(128) unsigned char shared_bytes[];

template <typename Word>
__device__ uint64_t PullPlain(const PullParams& params, uint64_t sequence, uint32_t num_warps) {
  auto* rows = reinterpret_cast<int32_t*>(shared_bytes) + WarpId() * kMaxTopK;
  const DeviceRank& device = params.device;
  const auto* records = OwnHeapAt<DispatchRecord>(device, device.layout.records);
  const uint64_t num_words = params.row_bytes / sizeof(Word);
  constexpr uint32_t kInFlight = 4;
  uint64_t num_pulled = 0;
  ItemCursor items(params, sequence, num_warps);
  while (items.Next(rows)) {
    const std::byte* source_rows =
        PublishedArray(device, items.source(), records[items.source()].x);
    const auto* from =
        reinterpret_cast<const Word*>(source_rows + items.token() * params.row_bytes);
    num_pulled += items.source() != device.rank;
    for (uint64_t first = LaneId(); first < num_words; first += kInFlight * kWarpSize) {
      Word words[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        if (first + i * kWarpSize < num_words) words[i] = from[first + i * kWarpSize];
      }
      for (uint32_t copy = 0; copy < items.num_rows(); ++copy) {
        auto* to = reinterpret_cast<Word*>(params.recv_x +
                                           static_cast<uint64_t>(rows[copy]) * params.row_bytes);
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          if (first + i * kWarpSize < num_words) to[first + i * kWarpSize] = words[i];
        }
      }
    }
  }
  return num_pulled;
}

template <typename Word>
__global__ void __launch_bounds__(kMaxThreads) PullRows(const __grid_constant__ PullParams params) {
  RunPull(params, [&](uint64_t sequence, uint32_t num_warps) -> uint64_t {
    return params.recv_x == nullptr ? 0 : PullPlain<Word>(params, sequence, num_warps);
  });
}

}  // namespace

const char* PreparePullRows(const RankHandle&) {
  return PrepareKernels(kSharedBytes, &PullRows<uint4>, &PullRows<uint16_t>);
}

const char* LaunchPullRows(const PullParams& params, cudaStream_t stream) {
  const uint32_t blocks = PullBlocks(params, kWarps);
  if (params.is_vectorised) {
    PullRows<uint4><<<blocks, kThreads, kSharedBytes, stream>>>(params);
  } else {
    PullRows<uint16_t><<<blocks, kThreads, kSharedBytes, stream>>>(params);
  }
  return LaunchResult("PullRows");
}

}  // namespace jax_ep::gpu
