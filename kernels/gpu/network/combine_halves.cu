// Halves of an HT combine over several nodes. start is a whole combine (combine.cu) whose
// result waits in a slot set, done copies it to the caller: right, but nothing of it overlaps.
// (Inside a node the halves push partials, slot_combine.cu; between nodes the sum of a node comes
// first.)
#include <algorithm>

#include "kernels/gpu/device/stage_copy.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/protocol/slot_sets.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr SetKind kKind = SetKind::kCombine;

struct HalfParams {
  DeviceRank device;
  uint64_t rows_bytes;     // 0: no rows
  uint64_t scalars_bytes;  // 0: no scalars
  std::byte* out;
  float* pair_scalars_out;
  const int32_t* epoch_in;  // done
  int32_t* epoch_out;       // start
};

// The result of the start in `set`, or of the combine just before it.
struct Result {
  uint64_t rows, scalars;
};
__host__ __device__ inline Result ResultAt(const PushArea& area, uint64_t set) {
  const uint64_t block = area.blocks.At(set, 0);
  return {block + area.rows, block};
}
__host__ __device__ inline Result FreshResult(const PushArea& area) {
  const uint64_t block = area.blocks.At(0, 1);
  return {block + area.rows, block};
}

__global__ void __launch_bounds__(kThreads) KeepSums(const __grid_constant__ HalfParams params) {
  __shared__ CallSlot slot;
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const PushArea& area = device.layout.ht_combine;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) TakeBusyWord(device, Operation::kCombineStart);
    slot = FindFreeSet(device, kKind, Operation::kCombineStart);
  }
  SyncBlock();
  if (slot.is_ok != 0 && !HasFailed(device)) {
    const Result from = FreshResult(area);
    const Result to = ResultAt(area, slot.set);
    GridCopyBytes(OwnHeapAt<std::byte>(device, to.rows), OwnHeapAt<std::byte>(device, from.rows),
                  params.rows_bytes);
    GridCopyBytes(OwnHeapAt<std::byte>(device, to.scalars),
                  OwnHeapAt<std::byte>(device, from.scalars), params.scalars_bytes);
  }
  if (!LastToArrive(device, &shared_flag) || threadIdx.x != 0) return;
  *params.epoch_out = EpochOf(slot.started);
  UpdateSet(device, kKind, CallPart::kStart, slot, slot.started);
  EndOperation(device, slot.started);
}

__global__ void __launch_bounds__(kThreads) FetchSums(const __grid_constant__ HalfParams params) {
  __shared__ CallSlot slot;
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) TakeBusyWord(device, Operation::kCombineDone);
    slot = FindOpenSet(device, kKind, Operation::kCombineDone, *params.epoch_in);
  }
  SyncBlock();
  if (slot.is_ok != 0 && !HasFailed(device)) {
    const Result from = ResultAt(device.layout.ht_combine, slot.set);
    GridCopyBytes(params.out, OwnHeapAt<std::byte>(device, from.rows), params.rows_bytes);
    GridCopyBytes(reinterpret_cast<std::byte*>(params.pair_scalars_out),
                  OwnHeapAt<std::byte>(device, from.scalars), params.scalars_bytes);
  }
  if (!LastToArrive(device, &shared_flag)) return;
  if (HasFailed(device)) {
    PoisonBytes(params.out, params.rows_bytes);
    PoisonBytes(params.pair_scalars_out, params.scalars_bytes);
  }
  if (threadIdx.x != 0) return;
  const uint64_t sequence = SequenceOf(device);
  UpdateSet(device, kKind, CallPart::kDone, slot, sequence);
  EndOperation(device, sequence);
}

}  // namespace

const char* PrepareNetCombineHalves(const RankHandle&) {
  return PrepareKernels(0, &KeepSums, &FetchSums);
}

const char* LaunchNetCombineHalf(RankHandle& rank, const CombineParams& call, CallPart part,
                                 const int32_t* epoch_in, int32_t* epoch_out, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const auto tokens = static_cast<uint64_t>(call.num_tokens);
  const bool is_start = part == CallPart::kStart;
  const bool has_rows = is_start ? call.y != nullptr : call.out != nullptr;
  const bool has_scalars = is_start ? !call.pair_scalars.empty() : !call.pair_scalars_out.empty();
  HalfParams params{.device = rank.device,
                    .rows_bytes = has_rows ? tokens * shape.hidden * ElemBytes(shape.elem_type) : 0,
                    .scalars_bytes = has_scalars ? tokens * shape.top_k * sizeof(float) : 0,
                    .out = call.out,
                    .pair_scalars_out = call.pair_scalars_out.data(),
                    .epoch_in = epoch_in,
                    .epoch_out = epoch_out};
  const uint32_t blocks = BlocksForCopy(params.rows_bytes + params.scalars_bytes, rank.max_blocks);
  if (!is_start) {
    FetchSums<<<blocks, kThreads, 0, stream>>>(params);
    return LaunchResult("FetchSums");
  }
  CombineParams whole = call;
  std::byte* heap = rank.device.peers[rank.device.rank].heap;
  const Result result = FreshResult(rank.device.layout.ht_combine);
  whole.out = has_rows ? heap + result.rows : nullptr;
  whole.pair_scalars_out = {reinterpret_cast<float*>(heap + result.scalars),
                            has_scalars ? tokens * shape.top_k : 0};
  if (const char* error = LaunchCombine(rank, whole, stream)) return error;
  KeepSums<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("KeepSums");
}

}  // namespace jax_ep::gpu
