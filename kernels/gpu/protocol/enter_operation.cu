// The kernel in front of a dispatch or combine that has to copy arrays to the stage, as peers
// cannot reach them in place, or whose rows cross nodes (entry.h).
#include <algorithm>

#include "kernels/gpu/device/stage_copy.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/entry.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;

struct EntryKernelParams {
  DeviceRank device;
  Entry entry;
  // To the stage; 0 bytes: nothing.
  const std::byte* x;
  const std::byte* weights;
  uint64_t x_bytes, weights_bytes;
};

__global__ void __launch_bounds__(kThreads)
    EnterOperation(const __grid_constant__ EntryKernelParams params) {
  __shared__ uint32_t is_last;
  const DeviceRank& device = params.device;
  const Entry& entry = params.entry;
  const uint64_t sequence = SequenceOf(device);
  if (blockIdx.x == 0 && threadIdx.x == 0) TakeBusyWord(device, entry.operation);
  if (!HasFailed(device)) {  // else the heap may be gone
    if (params.x_bytes > 0) {
      GridCopyBytes(OwnHeapAt<std::byte>(device, device.layout.stage_rows), params.x,
                    params.x_bytes);
    }
    if (params.weights_bytes > 0) {
      GridCopyBytes(OwnHeapAt<std::byte>(device, device.layout.stage_weights), params.weights,
                    params.weights_bytes);
    }
    const RowIndex index(device, sequence, entry.num_tokens);
    IndexRows(device, entry, index,
              RowCodes(entry, {0, entry.recv_rows}, blockIdx.x * kThreads + threadIdx.x,
                       gridDim.x * kThreads));
  }
  if (!LastToArrive(device, &is_last) || HasFailed(device)) return;
  if (WarpId() == 0) {
    PublishEntry(device, entry, FlagValue(sequence, entry.operation, device.program), [] {});
  }
  if (threadIdx.x == 0) {
    ControlOf(device)->bytes_staged += params.x_bytes + params.weights_bytes;
  }
}

}  // namespace

const char* PrepareEntryKernels(const RankHandle&) { return PrepareKernel(&EnterOperation, 0); }

const char* PrepareEntry(RankHandle& rank, const EntryParams& call, Entry& entry,
                         cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const GpuHeapLayout& layout = rank.device.layout;
  const PeerMemory& own = rank.device.peers[rank.device.rank - rank.device.node_begin];
  entry = {.operation = call.operation,
           .has_record = call.x != nullptr || call.weights != nullptr,
           .has_index = true,
           .num_tokens = static_cast<uint32_t>(call.num_tokens),
           .recv_rows = static_cast<uint32_t>(call.recv_rows),
           .by_source_codes = Divisor(static_cast<uint32_t>(shape.max_tokens * shape.top_k)),
           .by_top_k = Divisor(shape.top_k),
           .recv_src = call.recv_src};
  EntryKernelParams params{.device = rank.device,
                           .x = call.x,
                           .weights = reinterpret_cast<const std::byte*>(call.weights)};
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
    entry.record.x = place(call.x, call.num_tokens * shape.hidden * ElemBytes(shape.elem_type),
                           layout.stage_rows, &params.x_bytes);
  }
  if (call.weights != nullptr) {
    entry.record.weights = place(call.weights, call.num_tokens * shape.top_k * sizeof(float),
                                 layout.stage_weights, &params.weights_bytes);
  }
  const uint64_t bytes_to_stage = params.x_bytes + params.weights_bytes;
  if (bytes_to_stage == 0 && shape.num_nodes() == 1) {
    constexpr uint32_t kFirstLaunch = 2;  // the busy word of other operations is 1
    entry.launch = rank.num_entries++;
    if (entry.launch < kFirstLaunch) {
      entry.launch = kFirstLaunch;
      rank.num_entries = kFirstLaunch + 1;
    }
    return nullptr;
  }
  if (bytes_to_stage > 0) rank.staged_launches.fetch_add(1, std::memory_order_relaxed);
  entry.is_over = true;
  params.entry = entry;
  const uint32_t blocks = std::max(BlocksFor(call.recv_rows, kThreads, rank.max_blocks),
                                   BlocksForCopy(bytes_to_stage, rank.max_blocks));
  EnterOperation<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("EnterOperation");
}

}  // namespace jax_ep::gpu
