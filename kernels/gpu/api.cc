// The table of functions behind api.h: creation of a rank's launch state and the checks of calls.
#include "kernels/gpu/api.h"

#include <algorithm>
#include <memory>
#include <string>

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/memory/device_memory.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/network.h"
#include "proxy/abi/ring.h"

namespace jax_ep::gpu {

namespace {
std::byte* OwnHeap(const DeviceRank& device) { return device.peers[device.rank].heap; }
}  // namespace

int32_t* WholeEpochOf(const RankHandle& rank) {
  return reinterpret_cast<int32_t*>(OwnHeap(rank.device) + rank.device.layout.net_state +
                                    offsetof(NetState, whole_epoch));
}

const char* KeepText(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

namespace {
// Kernels that this thread has launched for the call that it is in.
thread_local uint32_t num_launched = 0;
}  // namespace

const char* LaunchResult(const char* kernel) {
  // May also be what an earlier, asynchronous launch left behind.
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) {
    ++num_launched;
    return nullptr;
  }
  return KeepText(std::string(kernel) + ": " + cudaGetErrorString(error));
}

const char* PrepareKernel(const void* kernel, uint32_t shared_bytes) {
  static std::mutex mutex;  // the attribute is the process's
  const std::lock_guard lock(mutex);
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);  // loads it
  if (error == cudaSuccess &&
      static_cast<int>(shared_bytes) > attributes.maxDynamicSharedSizeBytes) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  if (error == cudaSuccess) return nullptr;
  return KeepText(std::string("a kernel cannot be loaded: ") + cudaGetErrorString(error));
}

namespace {

std::string CheckTokens(const GroupShape& shape, Mode mode, int64_t num_tokens) {
  const uint64_t max_tokens = mode == Mode::kLl ? shape.ll_tokens : shape.max_tokens;
  if (mode == Mode::kHt && !shape.has_ht) return "the group was made for mode ll only";
  if (num_tokens < 0 || static_cast<uint64_t>(num_tokens) > max_tokens) {
    return "got " + std::to_string(num_tokens) + " tokens, the group takes at most " +
           std::to_string(max_tokens) + " in this mode; raise Config.max_tokens";
  }
  return "";
}

std::string CheckShape(const RankConfig& config) {
  const GroupShape& shape = config.shape;
  constexpr uint32_t kMaxTopK = 64;
  const NetworkConfig* network = config.network;
  if ((shape.num_nodes() > 1) != (network != nullptr)) return "a network is for several nodes";
  if (network != nullptr && (network->num_rings == 0 || network->num_rings > kMaxNetworkRings)) {
    return "got " + std::to_string(network->num_rings) + " rings, expected 1 to " +
           std::to_string(kMaxNetworkRings);
  }
  // What a command can name (proxy/abi/command.h).
  if (NetLayout::Make(shape).total_bytes > kCommandUnitBytes << kCommandRemoteOffsetBits) {
    return "the network stage has more than 64 GiB; lower max_tokens";
  }
  if (shape.num_ranks > kMaxNodeRanks) {
    return "got " + std::to_string(shape.num_ranks) + " ranks, at most " +
           std::to_string(kMaxNodeRanks);
  }
  if (shape.top_k > kMaxTopK) {
    return "got top_k " + std::to_string(shape.top_k) + ", at most " + std::to_string(kMaxTopK);
  }
  if (config.max_sms == 0) return "got max_sms 0";
  if (config.status == nullptr || config.peers == nullptr) return "no status or peers";
  return "";
}

const char* PrepareKernels(const RankHandle& rank) {
  for (const auto prepare :
       {&PrepareAbandonKernel, &PreparePlanKernels, &PrepareEntryKernels, &PrepareDispatchKernels,
        &PrepareWeightedDispatchKernels, &PrepareCombineKernels, &PrepareDispatchStartKernels,
        &PrepareLlDispatchKernels, &PrepareSlotCombineKernels}) {
    if (const char* error = prepare(rank)) return error;
  }
  if (rank.device.shape.num_nodes() == 1) return nullptr;
  for (const auto prepare :
       {&PrepareNetPlanKernels, &PrepareNetDispatchKernels, &PrepareNetCombineKernels,
        &PrepareNetCombineHalves, &PrepareNetSlotKernels}) {
    if (const char* error = prepare(rank)) return error;
  }
  return nullptr;
}

uint64_t HeapBytes(const GroupShape* shape) { return GpuHeapLayout::Make(*shape).total_bytes; }
uint64_t KeptBytes(const GroupShape* shape) { return GpuHeapLayout::Make(*shape).kept_bytes; }

uint64_t StageBytes(const GroupShape* shape) { return NetLayout::Make(*shape).total_bytes; }
uint64_t StageFlag(const GroupShape* shape, Channel channel, uint32_t source) {
  return NetLayout::Make(*shape).FlagAt(shape->num_ranks, channel, source);
}

// Fills the device's table of stages and rings, and the peers of other nodes.
const char* ConnectNetwork(const RankConfig& config, RankHandle& rank) {
  const GroupShape& shape = config.shape;
  const NetworkConfig& network = *config.network;
  DeviceRank& device = rank.device;
  DeviceNetwork table{.layout = NetLayout::Make(shape), .num_rings = network.num_rings};
  cudaError_t error = cudaSuccess;
  const auto map = [&](void* host) {
    void* mapped = nullptr;
    if (error == cudaSuccess) error = cudaHostGetDevicePointer(&mapped, host, 0);
    return static_cast<std::byte*>(mapped);
  };
  for (uint32_t local = 0; local < shape.node_size; ++local) {
    table.stages[local] = map(network.stages[local]);
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
  for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
    if (peer / shape.node_size == config.rank / shape.node_size) continue;
    device.peers[peer] = {.heap = table.stages[peer % shape.node_size]};
  }
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

const char* Create(const RankConfig* config, RankHandle** out) {
  if (std::string wrong = CheckShape(*config); !wrong.empty()) {
    return KeepText("create: " + std::move(wrong));
  }
  const CurrentDevice current(config->device);
  auto rank = std::make_unique<RankHandle>();
  bool has_bulk_copies = false;
  int shared_bytes = 0;
  int num_sms = 0;
  void* status = nullptr;
  cudaError_t error = current.error();
  const auto read = [&](auto attribute, int* value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, config->device);
  };
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes);
  read(cudaDevAttrMultiProcessorCount, &num_sms);
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&status, config->status, 0);
  if (error != cudaSuccess) return KeepText(std::string("create: ") + cudaGetErrorString(error));
  if (const char* failure = FindBulkCopies(&has_bulk_copies)) return failure;

  constexpr int kStaticSharedBytes = 1024;  // of the kernels themselves, and the system's
  constexpr uint32_t kPieceBytes = 4096;
  constexpr uint32_t kRingSlots = 3;
  rank->device_index = config->device;
  rank->max_blocks = std::min(config->max_sms, static_cast<uint32_t>(num_sms));
  constexpr uint32_t kMostLlBlocks = 64;  // NCCL on another stream needs the rest
  rank->ll_blocks =
      std::min({config->max_sms * 8 / 3, kMostLlBlocks, static_cast<uint32_t>(num_sms)});
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
  device.node_begin = config->rank / config->shape.node_size * config->shape.node_size;
  std::copy_n(config->peers, config->shape.node_size, device.peers + device.node_begin);
  if (config->network != nullptr) {
    if (const char* failure = ConnectNetwork(*config, *rank)) return failure;
  }
  if (const char* failure = PrepareKernels(*rank)) return failure;
  *out = rank.release();
  return nullptr;
}

// The last word of the host to this rank's kernels, which outlives it: a graph that holds some may
// be replayed for as long as the process lives.
const char* Destroy(RankHandle* handle) {
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

// Checks of a start: what it reads.
std::string CheckStart(const GroupShape& shape, const DispatchParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const uint64_t pairs = static_cast<uint64_t>(params.num_tokens) * shape.top_k;
  if ((!params.weights.empty() && params.weights.size() != pairs) ||
      (params.mode == Mode::kLl && params.send_slot.size() != pairs)) {
    return "weights or send_slot do not have T * K = " + std::to_string(pairs) + " elements";
  }
  if (params.y != nullptr || !params.row_weights.empty()) {
    return "the weighted backward has no halves";
  }
  return "";
}

const char* RunLlDispatch(RankHandle& rank, const PlanParams* plan, const DispatchParams& call,
                          CallPart part, const int32_t* epoch_in, int32_t* epoch_out,
                          Stream stream) {
  const GroupShape& shape = rank.device.shape;
  DispatchParams params = call;
  params.mode = Mode::kLl;
  std::string wrong;
  if (plan != nullptr) {
    const uint64_t pairs = static_cast<uint64_t>(plan->num_tokens) * shape.top_k;
    if (plan->num_tokens != call.num_tokens || plan->topk_idx.size() != pairs) {
      wrong = "topk_idx does not have T * K = " + std::to_string(pairs) + " elements";
    }
    params.layout = plan->layout;
    params.recv_rows = plan->recv_rows;
    params.recv_src = plan->out.recv_src;
    params.recv_topk_idx = plan->out.recv_topk_idx;
    params.send_slot = plan->topk_idx;  // for the checks: of the same size, not read
    if (wrong.empty() && part != CallPart::kStart) wrong = CheckPlan(shape, *plan);
  }
  if (wrong.empty()) {
    wrong = part == CallPart::kStart ? CheckStart(shape, params) : CheckDispatch(shape, params);
  }
  if (wrong.empty() && part == CallPart::kWhole &&
      params.send_slot.size() != static_cast<uint64_t>(params.num_tokens) * shape.top_k) {
    wrong = "send_slot does not have T * K elements";
  }
  if (!wrong.empty()) return KeepText("ll dispatch: " + std::move(wrong));
  return LaunchLlDispatch(rank, plan, params, part, epoch_in, epoch_out,
                          static_cast<cudaStream_t>(stream));
}

const char* RunSlotCombine(RankHandle& rank, const CombineParams& call, CallPart part,
                           const int32_t* epoch_in, int32_t* epoch_out, Stream stream) {
  const GroupShape& shape = rank.device.shape;
  const bool is_start = part == CallPart::kStart;
  const uint64_t pairs = static_cast<uint64_t>(call.num_tokens) * shape.top_k;
  CombineParams params = call;
  std::string wrong = CheckTokens(shape, params.mode, params.num_tokens);
  if (wrong.empty() && part == CallPart::kWhole) wrong = CheckCombine(shape, params);
  if (wrong.empty() && is_start) {
    params.ride_out = {};
    const auto rows = static_cast<uint64_t>(params.recv_rows);
    const bool is_rank_major = params.layout == Layout::kRankMajor;
    if (params.recv_rows < 0 || params.recv_src.size() != rows ||
        params.send_slot.size() != pairs ||
        (!params.row_weights.empty() && params.row_weights.size() != rows) ||
        (!params.ride.empty() &&
         params.ride.size() != (is_rank_major ? rows * shape.top_k : rows))) {
      wrong = "recv_src, send_slot, row_weights or ride do not have the sizes of R = " +
              std::to_string(rows);
    }
  }
  if (wrong.empty() && part == CallPart::kDone &&
      (params.send_slot.size() != pairs ||
       (!params.ride_out.empty() && params.ride_out.size() != pairs))) {
    wrong = "send_slot or ride_out do not have T * K = " + std::to_string(pairs) + " elements";
  }
  if (!wrong.empty()) return KeepText("combine: " + std::move(wrong));
  return LaunchSlotCombine(rank, params, part, epoch_in, epoch_out,
                           static_cast<cudaStream_t>(stream));
}

// Runs the launcher of a call under the rank's lock: its kernels carry the call's fingerprint. If
// it could launch only some kernels of the operation, the rank fails: nobody will end what they
// have begun.
template <typename Params, typename Launch>
const char* Locked(RankHandle* rank, Operation operation, const Params& params, Stream stream,
                   Launch&& launch) {
  const std::lock_guard lock(rank->launching);
  rank->device.program = FingerprintOf(operation, params.program, params.mode, params.layout,
                                       params.num_tokens, params.recv_rows);
  num_launched = 0;
  const char* error = launch();
  if (error == nullptr || num_launched == 0) return error;
  std::string first = error;
  if (LaunchAbandon(*rank, operation, static_cast<cudaStream_t>(stream)) != nullptr) {
    first += "; the other ranks will learn of it when they have waited";
  }
  return KeepText(std::move(first));
}

const char* Plan(RankHandle* rank, const PlanParams* params, Stream stream) {
  return Locked(rank, Operation::kPlan, *params, stream,
                [&] { return LaunchPlan(*rank, *params, static_cast<cudaStream_t>(stream)); });
}

const char* Dispatch(RankHandle* rank, const DispatchParams* params, Stream stream) {
  if (params->mode == Mode::kLl) {
    return Locked(rank, Operation::kLlDispatch, *params, stream, [&] {
      return RunLlDispatch(*rank, nullptr, *params, CallPart::kWhole, nullptr, nullptr, stream);
    });
  }
  return Locked(rank, Operation::kDispatch, *params, stream, [&] {
    return LaunchDispatch(*rank, *params, nullptr, static_cast<cudaStream_t>(stream));
  });
}

const char* DispatchStart(RankHandle* rank, const DispatchParams* params, int32_t* epoch,
                          Stream stream) {
  if (params->mode == Mode::kLl) {
    return Locked(rank, Operation::kLlDispatchStart, *params, stream, [&] {
      return RunLlDispatch(*rank, nullptr, *params, CallPart::kStart, nullptr, epoch, stream);
    });
  }
  if (std::string wrong = CheckStart(rank->device.shape, *params); !wrong.empty()) {
    return KeepText("dispatch_start: " + std::move(wrong));
  }
  return Locked(rank, Operation::kDispatchStart, *params, stream, [&] {
    return LaunchDispatchStart(*rank, *params, epoch, static_cast<cudaStream_t>(stream));
  });
}

const char* DispatchDone(RankHandle* rank, const DispatchParams* params, const int32_t* epoch,
                         Stream stream) {
  if (params->mode == Mode::kLl) {
    return Locked(rank, Operation::kLlDispatchDone, *params, stream, [&] {
      return RunLlDispatch(*rank, nullptr, *params, CallPart::kDone, epoch, nullptr, stream);
    });
  }
  return Locked(rank, Operation::kDispatchDone, *params, stream, [&] {
    return LaunchDispatch(*rank, *params, epoch, static_cast<cudaStream_t>(stream));
  });
}

const char* LlDispatch(RankHandle* rank, const LlDispatchParams* params, Stream stream) {
  return Locked(rank, Operation::kLlDispatch, params->plan, stream, [&] {
    return RunLlDispatch(*rank, &params->plan, params->dispatch, CallPart::kWhole, nullptr, nullptr,
                         stream);
  });
}

const char* LlDispatchStart(RankHandle* rank, const LlDispatchParams* params, int32_t* epoch,
                            Stream stream) {
  return Locked(rank, Operation::kLlDispatchStart, params->plan, stream, [&] {
    return RunLlDispatch(*rank, &params->plan, params->dispatch, CallPart::kStart, nullptr, epoch,
                         stream);
  });
}

const char* LlDispatchDone(RankHandle* rank, const LlDispatchParams* params, const int32_t* epoch,
                           Stream stream) {
  return Locked(rank, Operation::kLlDispatchDone, params->plan, stream, [&] {
    return RunLlDispatch(*rank, &params->plan, params->dispatch, CallPart::kDone, epoch, nullptr,
                         stream);
  });
}

const char* Combine(RankHandle* rank, const CombineParams* params, Stream stream) {
  if (params->mode == Mode::kLl) {
    return Locked(rank, Operation::kLlCombine, *params, stream, [&] {
      return RunSlotCombine(*rank, *params, CallPart::kWhole, nullptr, nullptr, stream);
    });
  }
  return Locked(rank, Operation::kCombine, *params, stream,
                [&] { return LaunchCombine(*rank, *params, static_cast<cudaStream_t>(stream)); });
}

const char* CombineStart(RankHandle* rank, const CombineParams* params, int32_t* epoch,
                         Stream stream) {
  const Operation operation =
      params->mode == Mode::kLl ? Operation::kLlCombineStart : Operation::kCombineStart;
  return Locked(rank, operation, *params, stream, [&] {
    return RunSlotCombine(*rank, *params, CallPart::kStart, nullptr, epoch, stream);
  });
}

const char* CombineDone(RankHandle* rank, const CombineParams* params, const int32_t* epoch,
                        Stream stream) {
  const Operation operation =
      params->mode == Mode::kLl ? Operation::kLlCombineDone : Operation::kCombineDone;
  return Locked(rank, operation, *params, stream, [&] {
    return RunSlotCombine(*rank, *params, CallPart::kDone, epoch, nullptr, stream);
  });
}

const char* Counters(RankHandle* rank, RankCountersSnapshot* out) {
  const CurrentDevice current(rank->device_index);
  Control control;
  const DeviceRank& device = rank->device;
  const std::byte* from = OwnHeap(device) + device.layout.control;
  const cudaError_t error = cudaMemcpy(&control, from, sizeof(control), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) return KeepText(std::string("counters: ") + cudaGetErrorString(error));
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

uint64_t StagedLaunches(const RankHandle* rank) {
  return rank->staged_launches.load(std::memory_order_relaxed);
}
bool UsesBulkCopies(const RankHandle* rank) { return rank->use_bulk_copies; }

}  // namespace

std::string CheckPlan(const GroupShape& shape, const PlanParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const auto tokens = static_cast<uint64_t>(params.num_tokens);
  const uint64_t pairs = tokens * shape.top_k;
  const uint64_t experts = shape.experts_per_rank();
  const uint64_t source_tokens = shape.num_ranks * tokens;
  const bool is_rows_right =
      params.recv_rows >= 0 &&
      (params.layout == Layout::kExpertMajor ||
       rows == source_tokens * (params.layout == Layout::kExpertBatched ? experts : 1));
  const PlanOutputs& out = params.out;
  if (!is_rows_right || params.topk_idx.size() != pairs || out.send_slot.size() != pairs ||
      out.recv_src.size() != rows || out.group_sizes.size() != experts ||
      out.group_counts.size() != experts || out.send_counts.size() != shape.num_ranks ||
      out.recv_counts.size() != shape.num_ranks || out.num_dropped == nullptr ||
      out.overflow == nullptr ||
      out.recv_topk_idx.size() != (params.layout == Layout::kRankMajor ? rows * shape.top_k : 0)) {
    return "the plan's arrays do not have the sizes of T = " + std::to_string(tokens) +
           ", R = " + std::to_string(params.recv_rows);
  }
  return "";
}

std::string CheckDispatch(const GroupShape& shape, const DispatchParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const uint64_t tokens = static_cast<uint64_t>(params.num_tokens);
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  const uint64_t cells = is_rank_major ? rows * shape.top_k : rows;
  const bool has_weights = !params.recv_weights.empty();
  if (params.recv_rows < 0 || params.recv_src.size() != rows ||
      (is_rank_major && rows != shape.num_ranks * tokens) ||
      (!params.weights.empty() && params.weights.size() != tokens * shape.top_k) ||
      (has_weights && params.recv_weights.size() != cells) ||
      (has_weights && is_rank_major && params.recv_topk_idx.size() != cells) ||
      (!params.row_weights.empty() && params.row_weights.size() != rows) ||
      (!params.recv_dots.empty() && params.recv_dots.size() != rows)) {
    return "arrays do not have the sizes of T = " + std::to_string(tokens) +
           ", R = " + std::to_string(params.recv_rows);
  }
  if ((!params.recv_dots.empty() && params.y == nullptr) ||
      ((!params.recv_dots.empty() || !params.row_weights.empty()) && params.recv_x == nullptr)) {
    return "recv_dots needs y and rows, row_weights need rows";
  }
  return "";
}

std::string CheckCombine(const GroupShape& shape, const CombineParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const uint64_t pairs = static_cast<uint64_t>(params.num_tokens) * shape.top_k;
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  if (params.recv_rows < 0 || params.recv_src.size() != rows || params.send_slot.size() != pairs ||
      (!params.row_weights.empty() && params.row_weights.size() != rows) ||
      (!params.ride.empty() && params.ride.size() != (is_rank_major ? rows * shape.top_k : rows)) ||
      (!params.ride_out.empty() && params.ride_out.size() != pairs)) {
    return "arrays do not have the sizes of T = " + std::to_string(params.num_tokens) +
           ", R = " + std::to_string(params.recv_rows);
  }
  return "";
}

}  // namespace jax_ep::gpu

extern "C" __attribute__((visibility("default"))) const jax_ep::gpu::GpuApi* jax_ep_gpu_api() {
  using namespace jax_ep::gpu;
  static const GpuApi api = {
      .abi_version = kAbiVersion,
      .heap_bytes = &HeapBytes,
      .kept_bytes = &KeptBytes,
      .stage_bytes = &StageBytes,
      .stage_flag = &StageFlag,
      .create = &Create,
      .destroy = &Destroy,
      .plan = &Plan,
      .dispatch = &Dispatch,
      .ll_dispatch = &LlDispatch,
      .combine = &Combine,
      .dispatch_start = &DispatchStart,
      .dispatch_done = &DispatchDone,
      .ll_dispatch_start = &LlDispatchStart,
      .ll_dispatch_done = &LlDispatchDone,
      .combine_start = &CombineStart,
      .combine_done = &CombineDone,
      .counters = &Counters,
      .staged_launches = &StagedLaunches,
      .uses_bulk_copies = &UsesBulkCopies,
      .memory = GetDeviceMemoryApi(),
  };
  return &api;
}
