#include "kernels/gpu/rank.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>

#include "kernels/gpu/checks.h"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/network.h"
#include "proxy/abi/ring.h"

namespace jax_ep::gpu {

namespace {

std::byte* OwnHeap(const DeviceRank& device) {
  return device.peers[device.rank - device.node_begin].heap;
}

const char* PrepareAllKernels(const RankHandle& rank) {
  for (const auto prepare :
       {&PrepareAbandonKernel, &PreparePositionKernel, &PrepareActiveKernel, &PreparePlanKernels,
        &PrepareEntryKernels, &PrepareDispatchKernels, &PrepareCombineKernels,
        &PrepareLlDispatchKernels, &PrepareSlotCombineKernels}) {
    if (const char* error = prepare(rank)) return error;
  }
  if (rank.device.shape.num_nodes() == 1) return nullptr;
  for (const auto prepare : {&PrepareNetPlanKernels, &PrepareNetDispatchKernels,
                             &PrepareNetCombineKernels, &PrepareNetSlotKernels}) {
    if (const char* error = prepare(rank)) return error;
  }
  return nullptr;
}

// Fills the device's table of stages and rings.
const char* ConnectNetwork(const RankConfig& config, RankHandle& rank) {
  const GroupShape& shape = config.shape;
  const NetworkConfig& network = *config.network;
  DeviceRank& device = rank.device;
  DeviceNetwork table{.layout = NetLayout::Make(shape),
                      .num_rings = network.num_rings,
                      .has_device_stages = network.has_device_stages,
                      .has_fast_wire = network.has_fast_wire};
  rank.sums_pitch = table.layout.sums_pitch;
  cudaError_t error = cudaSuccess;
  const auto map = [&](void* host) {
    void* mapped = nullptr;
    if (error == cudaSuccess) error = cudaHostGetDevicePointer(&mapped, host, 0);
    return static_cast<std::byte*>(mapped);
  };
  for (uint32_t local = 0; local < shape.node_size; ++local) {
    std::byte* stage = network.stages[local];
    table.stages[local] = network.has_device_stages ? stage : map(stage);
    table.signals[local] = reinterpret_cast<uint64_t*>(map(network.signals[local]));
  }
  for (uint32_t i = 0; i < network.num_rings; ++i) {
    const auto* ring = reinterpret_cast<const RingMemory*>(network.rings[i]);
    std::byte* mapped = map(network.rings[i]);
    table.ring_slots = static_cast<uint32_t>(ring->num_slots);
    table.ring_slots_log2 = ring->slots_log2;
    table.slots[i] = reinterpret_cast<uint64_t*>(mapped + sizeof(RingMemory));
    table.tails[i] = reinterpret_cast<uint64_t*>(mapped + offsetof(RingMemory, tail));
  }
  std::byte* to = OwnHeap(device) + device.layout.device_network;
  if (error == cudaSuccess) error = cudaMemcpy(to, &table, sizeof(table), cudaMemcpyHostToDevice);
  if (error != cudaSuccess) {
    return KeepText(std::string("create: the network stage: ") + cudaGetErrorString(error));
  }
  device.network = reinterpret_cast<const DeviceNetwork*>(to);
  return nullptr;
}

// Makes `device` current while it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    error_ = cudaSetDevice(device);
  }
  ~CurrentDevice() { static_cast<void>(cudaSetDevice(before_)); }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_;
};

const char* CopyFromHeap(const RankHandle& rank, uint64_t offset, size_t num_bytes, void* to) {
  const CurrentDevice current(rank.device_index);
  const cudaError_t error =
      cudaMemcpy(to, OwnHeap(rank.device) + offset, num_bytes, cudaMemcpyDeviceToHost);
  if (error == cudaSuccess) return nullptr;
  return KeepText(std::string("counters: ") + cudaGetErrorString(error));
}

}  // namespace

uint32_t MostBlocks(const RankHandle& rank, RowWork work, int64_t num_tokens, int64_t num_rows) {
  if (rank.device.shape.num_nodes() > 1) return BlocksBetweenNodes(rank);
  if (!rank.has_budget) return rank.max_blocks;
  return std::min(rank.num_sms, SmsFor(work, rank.device.shape, static_cast<uint64_t>(num_tokens),
                                       static_cast<uint64_t>(num_rows)));
}

uint32_t BlocksBetweenNodes(const RankHandle& rank) {
  return rank.has_budget && rank.has_fast_wire ? rank.ll_blocks : rank.max_blocks;
}

uint32_t BlocksBesideWire(const RankHandle& rank) {
  const uint32_t most = BlocksBetweenNodes(rank);
  return rank.has_budget ? std::min(most, kSmsBesideWire) : most;
}

int32_t* WholeEpochOf(const RankHandle& rank) {
  return reinterpret_cast<int32_t*>(OwnHeap(rank.device) + rank.device.layout.net_state +
                                    offsetof(NetState, whole_epoch));
}

const char* CreateRank(const RankConfig* config, RankHandle** out) {
  if (std::string wrong = CheckConfig(*config); !wrong.empty()) {
    return KeepText("create: " + std::move(wrong));
  }
  const CurrentDevice current(config->device);
  auto rank = std::make_unique<RankHandle>();
  bool has_bulk_copies = false;
  int shared_bytes = 0;
  int num_sms = 0;
  void* status = nullptr;
  void* stamps = nullptr;
  cudaError_t error = current.error();
  const auto read = [&](auto attribute, int* value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, config->device);
  };
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes);
  read(cudaDevAttrMultiProcessorCount, &num_sms);
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&status, config->status, 0);
  if (error == cudaSuccess && config->stamps != nullptr) {
    error = cudaHostGetDevicePointer(&stamps, config->stamps, 0);
  }
  if (error != cudaSuccess) return KeepText(std::string("create: ") + cudaGetErrorString(error));
  if (const char* failure = FindBulkCopies(&has_bulk_copies)) return failure;

  constexpr int kStaticSharedBytes = 1024;  // of the kernels themselves, and the system's
  constexpr uint32_t kPieceBytes = 4096;
  constexpr uint32_t kRingSlots = 3;
  rank->device_index = config->device;
  rank->num_sms = static_cast<uint32_t>(num_sms);
  rank->has_fast_wire = config->network != nullptr && config->network->has_fast_wire;
  rank->has_device_stages = config->network != nullptr && config->network->has_device_stages;
  const uint64_t asked_bytes = config->network != nullptr ? config->network->least_slice_bytes : 0;
  rank->least_slice_bytes = asked_bytes != 0 ? asked_bytes : LeastSliceBytes(rank->has_fast_wire);
  rank->has_budget = config->max_sms == 0;
  const uint32_t by_need = SmsBetweenNodes(rank->has_fast_wire);  // in one node: at first
  const uint32_t max_sms = rank->has_budget ? by_need : config->max_sms;
  rank->max_blocks = std::min(max_sms, rank->num_sms);
  // LL kernels wait for peers: NCCL's on another stream, of 32 blocks at most, need the rest.
  constexpr uint32_t kSpareSms = 32;
  const uint32_t most_ll_blocks =
      std::max(rank->num_sms - std::min(rank->num_sms / 2, kSpareSms), 1u);
  constexpr uint32_t kMostIfSet = 64;
  rank->ll_blocks =
      rank->has_budget ? most_ll_blocks : std::min({max_sms * 8 / 3, kMostIfSet, most_ll_blocks});
  rank->use_bulk_copies = config->use_tma && has_bulk_copies;
  rank->shared_bytes_per_block = static_cast<uint32_t>(shared_bytes - kStaticSharedBytes);
  rank->piece_bytes = config->piece_bytes != 0 ? config->piece_bytes : kPieceBytes;
  rank->ring_slots = config->ring_slots != 0 ? std::max(config->ring_slots, 2u) : kRingSlots;
  DeviceRank& device = rank->device;
  device.shape = config->shape;
  device.layout = GpuHeapLayout::Make(config->shape);
  device.rank = config->rank;
  device.debug = config->debug;
  device.timeout_ns = config->timeout_ns;
  device.status = static_cast<RankStatus*>(status);
  device.stamps = static_cast<OperationStamp*>(stamps);
  device.node_begin = config->rank / config->shape.node_size * config->shape.node_size;
  rank->is_elastic = config->is_elastic;
  device.generation = config->generation;
  device.active = config->active;
  for (uint32_t local = 0; local < config->shape.node_size; ++local) {
    const bool is_active = (config->active >> local & 1) != 0;
    device.peers[local] = config->peers[is_active ? local : config->rank - device.node_begin];
  }
  if (config->network != nullptr) {
    if (const char* failure = ConnectNetwork(*config, *rank)) return failure;
  }
  if (const char* failure = PrepareAllKernels(*rank)) return failure;
  *out = rank.release();
  return nullptr;
}

// The last word of the host to this rank's kernels, which outlives it: a graph that holds some may
// be replayed for as long as the process lives.
const char* DestroyRank(RankHandle* handle) {
  const std::unique_ptr<RankHandle> owned(handle);
  const CurrentDevice current(owned->device_index);
  const DeviceRank& device = owned->device;
  std::byte* failed = OwnHeap(device) + device.layout.control + offsetof(Control, failed);
  constexpr uint32_t kFailed = 1;
  cudaError_t error = current.error();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) {
    error = cudaMemcpy(failed, &kFailed, sizeof(kFailed), cudaMemcpyHostToDevice);
  }
  // What began before it saw that word.
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return nullptr;
  return KeepText(std::string("destroy: ") + cudaGetErrorString(error));
}

const char* ReadCounters(RankHandle* rank, RankCountersSnapshot* out) {
  Control control;
  const char* error = CopyFromHeap(*rank, rank->device.layout.control, sizeof(control), &control);
  if (error != nullptr) return error;
  *out = {.plans = control.plans,
          .dispatches = control.dispatches,
          .combines = control.combines,
          .rows_received = control.rows_received,
          .rows_dropped = control.rows_dropped,
          .bytes_pulled = control.bytes_pulled,
          .bytes_staged = control.bytes_staged,
          .last_overflow = control.last_overflow,
          .invalid_ids = control.invalid_ids};
  return nullptr;
}

const char* ReadPairsPerExpert(RankHandle* rank, uint64_t* out) {
  const GpuHeapLayout& layout = rank->device.layout;
  return CopyFromHeap(*rank, layout.pairs_per_expert, layout.num_local_experts * sizeof(*out), out);
}

const char* ReadWaits(RankHandle* rank, uint64_t* out) {
  const DeviceRank& device = rank->device;
  const uint64_t num_waits = uint64_t{kNumWaitPhases} * device.shape.num_ranks;
  return CopyFromHeap(*rank, device.layout.wait_ns, num_waits * sizeof(*out), out);
}

// The narrowest of a few looks: the first launches are slow.
const char* ReadDeviceClock(RankHandle* rank, uint64_t (*host_clock)(), uint64_t* device_ns,
                            uint64_t* host_ns) {
  const CurrentDevice current(rank->device_index);
  void *word = nullptr, *mapped = nullptr;
  cudaError_t error = cudaHostAlloc(&word, sizeof(uint64_t), cudaHostAllocMapped);
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&mapped, word, 0);
  constexpr int kLooks = 8;
  uint64_t narrowest = UINT64_MAX;
  const char* launched = nullptr;
  for (int i = 0; i < kLooks && error == cudaSuccess && launched == nullptr; ++i) {
    const uint64_t before = host_clock();
    launched = LaunchReadClock(static_cast<uint64_t*>(mapped), /*stream=*/nullptr);
    error = cudaDeviceSynchronize();
    const uint64_t width = host_clock() - before;
    if (error != cudaSuccess || width >= narrowest) continue;
    narrowest = width;
    *device_ns = *static_cast<volatile uint64_t*>(word);
    *host_ns = before + width / 2;
  }
  if (word != nullptr) static_cast<void>(cudaFreeHost(word));
  if (error == cudaSuccess) return launched;
  return KeepText(std::string("device clock: ") + cudaGetErrorString(error));
}

uint64_t StagedLaunches(const RankHandle* rank) {
  return rank->staged_launches.load(std::memory_order_relaxed);
}
bool UsesBulkCopies(const RankHandle* rank) { return rank->use_bulk_copies; }

}  // namespace jax_ep::gpu
