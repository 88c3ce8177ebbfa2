// A combine of scalars alone: what the backward of a dispatch sends back for the weights where rows
// travel in a call of their own (xla_ffi/operations_beside.h). Nothing is summed, so each scalar
// goes straight to its pair's owner.
//
//   SendScalars: enters (protocol/entry.h), stores the scalars of other owners' pairs into their
//   reduce areas; the last block says so in the mates' tail flags.
//   TakeScalars: waits for the mates' tail flags; each own pair's scalar from where its rank put
//   it.
//
// Who has entered is through with the last combine, so its reduce area is free. Flags have the
// number and the kind of their call, so a combine may use those that a dispatch leaves with.
#include <algorithm>

#include "kernels/gpu/ht/combine/combine.cuh"
#include "kernels/gpu/launch.h"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kInFlight = 4;

// Scalars of a row: in rank_major one for each pair of its token, else its own pair's.
__device__ inline bool IsOfToken(const CombineKernelParams& params) {
  return params.layout == Layout::kRankMajor;
}

__device__ void SendRowScalars(const CombineKernelParams& params) {
  const DeviceRank& device = params.device;
  const Entry& entry = params.entry;
  const uint32_t top_k = device.shape.top_k;
  const uint32_t count = params.recv_rows * (IsOfToken(params) ? top_k : 1);
  const uint32_t step = gridDim.x * kThreads;
  const auto row_of = [&](uint32_t at) {
    return IsOfToken(params) ? entry.by_top_k.Quotient(at) : at;
  };
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < count;
       first += kInFlight * step) {
    int32_t codes[kInFlight];
    float scalars[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t at = first + i * step;
      codes[i] = at < count ? entry.recv_src[row_of(at)] : -1;
      scalars[i] = at < count ? params.pair_scalars[at] : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (codes[i] < 0) continue;
      const auto code = static_cast<uint32_t>(codes[i]);
      const uint32_t owner = entry.by_source_codes.Quotient(code);
      const uint32_t pair = entry.by_source_codes.Remainder(code);
      const uint32_t token = entry.by_top_k.Quotient(pair);
      // Plans come from the caller: what no plan says is ignored.
      if (owner >= device.shape.num_ranks || owner == device.rank || token >= params.num_tokens) {
        continue;
      }
      const uint32_t k = entry.by_top_k.Remainder(IsOfToken(params) ? first + i * step : pair);
      ScalarsAt(device, owner, device.rank, token)[k] = scalars[i];
    }
  }
}

__device__ void TakePairScalars(const CombineKernelParams& params) {
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  const uint32_t num_pairs = params.num_tokens * top_k;
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t pair = blockIdx.x * kThreads + threadIdx.x; pair < num_pairs; pair += step) {
    const int32_t place = params.send_slot[pair];
    const int32_t holder = place / params.rank_rows;
    const int32_t row = place % params.rank_rows;
    const uint32_t token = params.entry.by_top_k.Quotient(pair);
    const uint32_t k = params.entry.by_top_k.Remainder(pair);
    float scalar = 0.0f;
    // Plans come from the caller: a slot beyond the last row is none.
    if (place >= 0 && holder < static_cast<int32_t>(device.shape.num_ranks) &&
        row < static_cast<int32_t>(params.recv_rows)) {
      scalar = holder != static_cast<int32_t>(device.rank)
                   ? ScalarsAt(device, device.rank, static_cast<uint32_t>(holder), token)[k]
               : IsOfToken(params) ? params.pair_scalars[static_cast<uint64_t>(row) * top_k + k]
                                   : params.pair_scalars[row];
    }
    params.pair_scalars_out[pair] = scalar;
  }
}

__global__ void __launch_bounds__(kThreads)
    SendScalars(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (Enter(device, params.entry, sequence)) SendRowScalars(params);
  if (!LastToArrive(device, &shared_flag) || HasFailed(device)) return;
  BlockSignalMates(device, device.layout.tail_flags,
                   FlagValue(sequence, Operation::kCombine, device.program));
}

__global__ void __launch_bounds__(kThreads)
    TakeScalars(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (BlockWaitMates(device, device.layout.tail_flags, Operation::kCombine,
                     FlagValue(sequence, Operation::kCombine, device.program), &shared_flag)) {
    TakePairScalars(params);
  }
  FinishCombine(params, sequence, &shared_flag);
}

}  // namespace

const char* PrepareCombineScalars(const RankHandle&) {
  return PrepareKernels(0, &SendScalars, &TakeScalars);
}

const char* LaunchCombineScalars(const CombineKernelParams& call, cudaStream_t stream) {
  CombineKernelParams params = call;
  const GroupShape& shape = params.device.shape;
  params.entry.has_index = false;
  const uint64_t num_sent =
      uint64_t{params.recv_rows} * (params.layout == Layout::kRankMajor ? shape.top_k : 1);
  const uint64_t num_taken = uint64_t{params.num_tokens} * shape.top_k;
  SendScalars<<<BlocksFor(num_sent, kThreads * kInFlight, params.max_blocks), kThreads, 0,
                stream>>>(params);
  if (const char* error = LaunchResult("SendScalars")) return error;
  TakeScalars<<<BlocksFor(num_taken, kThreads, params.max_blocks), kThreads, 0, stream>>>(params);
  return LaunchResult("TakeScalars");
}

}  // namespace jax_ep::gpu
