// First kernel of a dispatch or combine: says to the peers that this rank has entered, and where it
// keeps what they will read; copies there what they cannot reach in place; indexes recv_src.
#include <algorithm>

#include "kernels/gpu/device/stage_copy.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/row_index.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;

struct EntryKernelParams {
  EntryParams call;
  uint64_t x_bytes;        // to stage; 0: read in place
  uint64_t weights_bytes;  // to stage
  DispatchRecord record;
  bool has_record;
};

// All threads of the block.
__device__ void Publish(const EntryKernelParams& params, uint64_t sequence) {
  const DeviceRank& device = params.call.device;
  const uint64_t value = FlagValue(sequence, params.call.operation, device.program);
  for (uint32_t peer = device.node_begin + threadIdx.x; peer < MatesEnd(device); peer += kThreads) {
    const uint32_t sender = SenderTo(device, peer);
    if (params.has_record) {
      HeapAt<DispatchRecord>(device, peer, device.layout.records)[sender] = params.record;
    }
    if (peer == device.rank) continue;
    // Publishes the record, and the arrays that it names.
    StoreReleaseSys(HeapAt<uint64_t>(device, peer, device.layout.entry_flags) + sender, value);
  }
}

// All threads of a block that does nothing else: to make the arrays visible to peers takes longer
// than to index the rows.
__device__ void PublishAside(const EntryKernelParams& params, uint64_t sequence) {
  __shared__ uint32_t is_alone;
  const DeviceRank& device = params.call.device;
  const bool has_failed = HasFailed(device);  // on its way while the busy word is taken
  if (threadIdx.x == kThreads - 1) {
    is_alone = TakeBusyWord(device, params.call.operation) ? 1 : 0;
  }
  SyncBlock();
  if (is_alone != 0 && !has_failed) Publish(params, sequence);
}

__global__ void __launch_bounds__(kThreads)
    EnterOperation(const __grid_constant__ EntryKernelParams params) {
  __shared__ uint32_t is_last;
  const EntryParams& call = params.call;
  const DeviceRank& device = call.device;
  const uint64_t sequence = SequenceOf(device);
  const bool has_copies = params.x_bytes + params.weights_bytes > 0;
  const uint32_t num_blocks = gridDim.x - (has_copies ? 0 : 1);  // that index rows
  if (blockIdx.x == num_blocks) return PublishAside(params, sequence);
  if (has_copies && blockIdx.x == 0 && threadIdx.x == 0) TakeBusyWord(device, call.operation);
  const bool is_ok = !HasFailed(device);  // else the heap may be gone
  if (is_ok && params.x_bytes > 0) {
    GridCopyBytes(OwnHeapAt<std::byte>(device, device.layout.stage_rows), call.x, params.x_bytes);
  }
  if (is_ok && params.weights_bytes > 0) {
    GridCopyBytes(OwnHeapAt<std::byte>(device, device.layout.stage_weights),
                  reinterpret_cast<const std::byte*>(call.weights), params.weights_bytes);
  }

  const RowIndex index(device, sequence, call.num_tokens);
  const uint32_t top_k = device.shape.top_k;
  const uint64_t source_codes = device.shape.max_tokens * top_k;
  constexpr uint32_t kInFlight = 4;
  const uint64_t step = static_cast<uint64_t>(num_blocks) * kThreads;
  for (uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
       is_ok && first < call.recv_rows; first += kInFlight * step) {
    int32_t srcs[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      srcs[i] = first + i * step < call.recv_rows ? call.recv_src[first + i * step] : -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (srcs[i] < 0) continue;
      const auto source = static_cast<uint32_t>(srcs[i] / source_codes);
      const uint64_t code = srcs[i] % source_codes;
      // Plans come from the caller: what no plan says is ignored.
      if (source >= device.shape.num_ranks || code / top_k >= call.num_tokens) continue;
      index.Put(source, code / top_k, static_cast<uint32_t>(code % top_k),
                static_cast<int32_t>(first + i * step));
    }
  }
  if (!has_copies || !LastToArrive(device, &is_last) || HasFailed(device)) return;
  Publish(params, sequence);
  if (threadIdx.x == 0) {
    ControlOf(device)->bytes_staged += params.x_bytes + params.weights_bytes;
  }
}

}  // namespace

const char* PrepareEntryKernels(const RankHandle&) { return PrepareKernel(&EnterOperation, 0); }

const char* LaunchEntry(RankHandle& rank, const EntryParams& call, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const GpuHeapLayout& layout = rank.device.layout;
  const PeerMemory& own = rank.device.peers[rank.device.rank];
  EntryKernelParams params{.call = call};
  params.has_record = call.x != nullptr || call.weights != nullptr;
  // Peers read an array in place if they map it, and in units of 16 bytes.
  const auto place = [&](const void* array, uint64_t num_bytes, uint64_t stage_offset,
                         uint64_t* bytes_to_stage) -> uint64_t {
    const auto address = reinterpret_cast<uintptr_t>(array);
    const auto arena = reinterpret_cast<uintptr_t>(own.arena);
    const bool is_mapped = own.arena != nullptr && address >= arena &&
                           address + num_bytes <= arena + own.arena_bytes &&
                           address % kWireUnitBytes == 0;
    if (is_mapped) return (address - arena) << 1 | 1;
    *bytes_to_stage = num_bytes;
    return stage_offset << 1;
  };
  if (call.x != nullptr) {
    params.record.x = place(call.x, call.num_tokens * shape.hidden * ElemBytes(shape.elem_type),
                            layout.stage_rows, &params.x_bytes);
  }
  if (call.weights != nullptr) {
    params.record.weights = place(call.weights, call.num_tokens * shape.top_k * sizeof(float),
                                  layout.stage_weights, &params.weights_bytes);
  }
  if (params.x_bytes + params.weights_bytes > 0) {
    rank.staged_launches.fetch_add(1, std::memory_order_relaxed);
  }
  const uint32_t others = params.x_bytes + params.weights_bytes > 0 ? 0 : 1;  // PublishAside
  const uint32_t most = std::max(rank.max_blocks - others, 1u);
  const uint32_t blocks = std::max(BlocksFor(call.recv_rows, kThreads, most),
                                   BlocksForCopy(params.x_bytes + params.weights_bytes, most));
  EnterOperation<<<blocks + others, kThreads, 0, stream>>>(params);
  return LaunchResult("EnterOperation");
}

}  // namespace jax_ep::gpu
