// The backward of a weighted combine: like dispatch, but each copy of a row is scaled by its own
// weight on the way, and its dot product with y's row is the gradient of that weight.
//
// With bulk copies a warp has the whole row of the source in shared memory, while the rows of y
// stream through a ring. Without, a piece of the source's row is kept and
// read for all copies.
#include <algorithm>

#include "kernels/gpu/ht/dispatch/weighted_bulk.cuh"
#include "kernels/gpu/ht/dispatch/weighted_pull.cuh"
#include "kernels/gpu/launch.h"

namespace jax_ep::gpu {
namespace {

using namespace weighted;

template <typename Elem, bool kIsVectorised>
__global__ void __launch_bounds__(kMaxThreads)
    PullWeightedRows(const __grid_constant__ PullParams params) {
  RunPull(params, [&](uint64_t sequence, uint32_t num_warps) {
    return PullWeighted<Elem, kIsVectorised>(params, sequence, num_warps);
  });
}

#if JAX_EP_BULK_COPIES
template <typename Elem>
__global__ void __launch_bounds__((kMaxBulkWarps + 1) * kWarpSize)
    PullWeightedRowsInBulk(const __grid_constant__ PullParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ uint32_t shared_flag;
  __shared__ uint32_t positions[kMaxWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const uint32_t num_warps = blockDim.x / kWarpSize - 1;
  const Progress progress(params, positions, num_warps);
  if (threadIdx.x < kMaxWarps) positions[threadIdx.x] = 0;
  for (uint32_t i = threadIdx.x; i < params.zero_bytes / sizeof(uint4); i += blockDim.x) {
    reinterpret_cast<uint4*>(shared_bytes)[i] = uint4{0, 0, 0, 0};
  }
  FenceProxyAsyncShared();  // the zeroes, before bulk stores read them
  uint64_t num_pulled = 0;
  if (Enter(device, params.entry, sequence) && CheckRecords(params)) {
    FenceProxyAsync();  // what the peers published, before bulk loads read it
    if (WarpId() == num_warps) {
      FillWeightsAndPadding(params, 0, 1, [&](uint64_t row, uint32_t number, uint32_t total) {
        progress.WaitFor(number, total);
        ZeroRowInBulk(params, shared_bytes, row);
      });
      BulkWaitAll();
      FenceProxyAsync();  // own bulk copies, before the tail flags
    } else {
      num_pulled = BulkPuller<Elem>(params, sequence, num_warps, progress).Run();
    }
  }
  FinishPull(params, sequence, num_pulled, &shared_flag);
#endif
}
#endif

using Kernel = void (*)(PullParams);

template <typename Elem>
Kernel KernelOf(bool is_vectorised) {
  return is_vectorised ? &PullWeightedRows<Elem, true> : &PullWeightedRows<Elem, false>;
}

Kernel KernelOf(ElemType type, bool is_vectorised) {
  return WithElem(type, [&]<typename Elem>() { return KernelOf<Elem>(is_vectorised); });
}

#if JAX_EP_BULK_COPIES
Kernel BulkKernelOf(ElemType type) {
  return WithElem(type, [&]<typename Elem>() -> Kernel { return &PullWeightedRowsInBulk<Elem>; });
}
#endif

}  // namespace

const char* PreparePullWeightedRows(const RankHandle& rank) {
  const ElemType type = rank.device.shape.elem_type;
  for (const bool is_vectorised : {false, true}) {
    const Kernel kernel = KernelOf(type, is_vectorised);
    if (const char* error = PrepareKernel(kernel, rank.shared_bytes_per_block)) return error;
  }
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies) {
    return PrepareKernel(BulkKernelOf(type), rank.shared_bytes_per_block);
  }
#endif
  return nullptr;
}

const char* LaunchPullWeightedRows(RankHandle& rank, const PullParams& call, cudaStream_t stream) {
  PullParams params = call;
  const ElemType type = params.device.shape.elem_type;
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies && params.is_vectorised) {
    constexpr uint64_t kZeroBytes = 2048;
    params.zero_bytes = static_cast<uint32_t>(std::min(AlignUp(params.row_bytes, 128), kZeroBytes));
    const WeightedShared shared(params.row_bytes, params.device.shape.top_k);
    const uint32_t num_warps = std::min(
        (rank.shared_bytes_per_block - params.zero_bytes) / shared.warp_bytes, kMaxBulkWarps);
    constexpr uint32_t kFewestWarps = 2;  // longer rows: in pieces, below
    if (num_warps >= kFewestWarps) {
      BulkKernelOf(type)<<<PullBlocks(params, num_warps), (num_warps + 1) * kWarpSize,
                           params.zero_bytes + num_warps * shared.warp_bytes, stream>>>(params);
      return LaunchResult("PullWeightedRowsInBulk");
    }
  }
#endif
  const uint64_t row_bytes = AlignUp(params.row_bytes, kWireUnitBytes);
  const uint64_t num_pieces = DivideUp(row_bytes, kMaxPieceBytes);
  // Whole rounds of the dot product's lanes.
  constexpr uint64_t kPieceUnit = kDotLanes * sizeof(float);
  params.piece_bytes = static_cast<uint32_t>(AlignUp(DivideUp(row_bytes, num_pieces), kPieceUnit));
  const uint32_t num_warps = std::clamp<uint32_t>(
      rank.shared_bytes_per_block / WarpBytes(params.piece_bytes), 1, kMaxWarps);
  KernelOf(type,
           params.is_vectorised)<<<PullBlocks(params, num_warps), (num_warps + 1) * kWarpSize,
                                   num_warps * WarpBytes(params.piece_bytes), stream>>>(params);
  return LaunchResult("PullWeightedRows");
}

}  // namespace jax_ep::gpu
