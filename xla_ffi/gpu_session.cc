#include "xla_ffi/gpu_session.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/gpu_library.h"
#include "xla_ffi/gpu_member.h"
#include "xla_ffi/members.h"

namespace jax_ep {

GpuSession::GpuSession(GpuOptions options, const gpu::GpuApi* api)
    : options_(std::move(options)),
      api_(api),
      failure_(std::make_unique<FailureLatch>()),
      exception_(Internal("group " + this->options().name +
                          ": the watch of its GPUs met an exception (out of memory?)")) {}

GpuSession::~GpuSession() {
  if (lifecycle_.is_forked()) {
    Leak(members_, watch_, network_, monitor_, tracer_);
  } else {
    Close();
  }
}

Result<std::unique_ptr<GpuSession>> GpuSession::Create(GpuOptions options) {
  JAX_EP_RETURN_IF_ERROR(CheckOptions(options.session));
  const GroupShape shape = options.session.shape;
  const auto check = [&](const char* what, uint32_t count, uint32_t most) {
    if (count <= most) return Status::Ok();
    return Unimplemented("group " + options.session.name + ": got " + std::to_string(count) + what +
                         ", this version takes " + std::to_string(most) +
                         " on GPUs; use implementation='xla'");
  };
  JAX_EP_RETURN_IF_ERROR(check(" ranks", shape.num_ranks, gpu::kMaxRanks));
  JAX_EP_RETURN_IF_ERROR(check(" ranks in a node", shape.node_size, gpu::kMaxNodeRanks));
  if (options.live_pointers.size() != options.session.local_ranks.size()) {
    return InvalidArgument("group " + options.session.name + ": one pointer per local rank");
  }
  JAX_EP_ASSIGN_OR_RETURN(const gpu::GpuApi* api, LoadGpuLibrary(options.library_path));
  std::unique_ptr<GpuSession> session(new GpuSession(std::move(options), api));
  JAX_EP_RETURN_IF_ERROR(OnOwnThread([&]() -> Status {
    JAX_EP_RETURN_IF_ERROR(session->DrainDevices());
    for (size_t i = 0; i < session->options().local_ranks.size(); ++i) {
      JAX_EP_RETURN_IF_ERROR(session->AllocateMember(i));
    }
    if (session->options().shape.num_nodes() == 1) return Status::Ok();
    std::vector<std::span<std::byte>> stages;
    if (GpuNetwork::HasDeviceStages(session->options())) {
      for (const auto& member : session->members_) {
        stages.emplace_back(session->StageIn(member->heap.base), api->stage_bytes(&shape));
      }
    }
    JAX_EP_ASSIGN_OR_RETURN(session->network_, GpuNetwork::Create(session->options(), *api, stages,
                                                                  session->failure_.get()));
    return Status::Ok();
  }));
  return session;
}

uint64_t GpuSession::ActiveRanks() const {
  uint64_t active = ~uint64_t{0};
  if (options().shape.num_nodes() > 1) return active;  // all take part (RankConfig.active)
  for (uint32_t rank = 0; rank < options().shape.num_ranks; ++rank) {
    if (!options().IsActive(rank)) active &= ~(uint64_t{1} << rank);
  }
  return active;
}

std::vector<int> GpuSession::Devices() const {
  std::vector<int> devices;
  for (const LocalRank& local : options().local_ranks) {
    const int device = static_cast<int>(local.device_ordinal);
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

// Kernels of other groups may wait for each other across this process's devices. To allocate, map
// or load anything on one of them may wait for what runs there, which would be a circle.
Status GpuSession::DrainDevices() const {
  for (const int device : Devices()) {
    JAX_EP_RETURN_IF_ERROR(
        ToStatus(api_->memory->synchronize(device),
                 "group " + options().name + ": waiting for GPU " + std::to_string(device)));
  }
  return Status::Ok();
}

Status GpuSession::Start() {
  JAX_EP_RETURN_IF_ERROR(OnOwnThread([&]() -> Status {
    JAX_EP_RETURN_IF_ERROR(DrainDevices());
    if (network_ != nullptr) JAX_EP_RETURN_IF_ERROR(network_->Start());
    JAX_EP_RETURN_IF_ERROR(AllocateStamps());
    for (size_t i = 0; i < members_.size(); ++i) {
      Member* member = members_[i].get();
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->use_device(member->device()), "start"));
      gpu::NetworkConfig network;
      if (network_ != nullptr) network = network_->ConfigOf(i);
      const gpu::RankConfig config{
          .shape = options().shape,
          .rank = member->id.rank,
          .device = member->device(),
          .peers = member->peers.data(),
          .active = ActiveRanks(),
          .is_elastic = options().is_elastic(),
          .generation = options().generation,
          .network = network_ != nullptr ? &network : nullptr,
          .status = member->status,
          .stamps = member->stamps,
          .timeout_ns = static_cast<uint64_t>(options().timeout.count()),
          .max_sms = options_.max_sms,
          .use_tma = options_.use_tma,
          .debug = options().debug,
      };
      JAX_EP_RETURN_IF_ERROR(
          ToStatus(api_->create(&config, &member->handle), "group " + options().name));
    }
    return CompareClocks();
  }));
  MonitorOptions monitor = MonitorOptionsFor(options(), members_);
  monitor.check = [this] { ReportStalls(); };
  JAX_EP_ASSIGN_OR_RETURN(monitor_, Monitor::Create(std::move(monitor), failure_.get()));
  JAX_EP_ASSIGN_OR_RETURN(watch_, StartThread("jax_ep gpu", [this] { WatchStatus(); }));
  return Status::Ok();
}

gpu::RankHandle* GpuSession::TakeHandle(int64_t device) {
  Member* const member = FindMemberOn(members_, device);
  if (member == nullptr) return nullptr;
  member->launches.fetch_add(1, std::memory_order_relaxed);
  return member->handle;
}

const LocalRank& GpuSession::LocalRankOn(int64_t device) const {
  return FindMemberOn(members_, device)->id;
}

uint64_t GpuSession::heap_bytes() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  return lease ? HeapBytes() : 0;
}

uint64_t GpuSession::HeapBytes() const {
  uint64_t bytes = network_ == nullptr ? 0 : network_->pinned_stage_bytes();
  for (const auto& member : members_) bytes += member->heap.bytes;
  return bytes;
}

std::string GpuSession::data_path() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  return lease ? DataPath() : last_.data_path;
}

std::string GpuSession::DataPath() const {
  for (const auto& member : members_) {
    if (member->arena.bytes == 0) return "staged: " + member->no_arena;
  }
  uint64_t num_staged = 0;
  for (const auto& member : members_) {
    if (member->handle != nullptr) num_staged += api_->staged_launches(member->handle);
  }
  if (num_staged == 0) return "in place";
  return "in place, but " + std::to_string(num_staged) +
         " launches copied arrays that are not in XLA's arena to the stage first";
}

Result<std::vector<RankTotals>> GpuSession::totals() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease) return last_.totals;
  return ReadTotals();
}

Result<std::vector<RankTotals>> GpuSession::ReadTotals() const {
  std::vector<RankTotals> all;
  JAX_EP_RETURN_IF_ERROR(OnOwnThread([&]() -> Status {
    for (const auto& member : members_) {
      gpu::RankCountersSnapshot counters{};
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->use_device(member->device()), "counters"));
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->counters(member->handle, &counters), "counters"));
      std::vector<uint64_t> pairs(options().shape.experts_per_rank());
      JAX_EP_RETURN_IF_ERROR(
          ToStatus(api_->pairs_per_expert(member->handle, pairs.data()), "counters"));
      std::vector<uint64_t> waits(size_t{kNumWaitPhases} * options().shape.num_ranks);
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->wait_ns(member->handle, waits.data()), "counters"));
      // The flags of ranks that take no part are this rank's own.
      for (size_t i = 0; i < waits.size(); ++i) {
        if (!options().IsActive(static_cast<uint32_t>(i) % options().shape.num_ranks)) waits[i] = 0;
      }
      uint64_t wait_ns = 0;
      for (auto phase = waits.begin(); phase != waits.end(); phase += options().shape.num_ranks) {
        wait_ns += *std::max_element(phase, phase + options().shape.num_ranks);
      }
      all.push_back({.id = member->id,
                     .plans = counters.plans,
                     .dispatches = counters.dispatches,
                     .combines = counters.combines,
                     .rows_received = counters.rows_received,
                     .rows_dropped = counters.rows_dropped,
                     .invalid_ids = counters.invalid_ids,
                     .last_overflow = counters.last_overflow,
                     .bytes_pulled = counters.bytes_pulled,
                     .wait_ns = wait_ns,
                     .pairs_per_expert = std::move(pairs),
                     .wait_by_peer = std::move(waits),
                     .bytes_staged = counters.bytes_staged,
                     .launches = member->launches.load(std::memory_order_relaxed)});
    }
    return Status::Ok();
  }));
  return all;
}

std::string GpuSession::CountersJson() const {
  Result<std::vector<RankTotals>> ranks = totals();
  if (!ranks.ok() || ranks->empty()) return "";  // empty: the devices did not answer at the end
  return ToJson({.name = options().name,
                 .num_ranks = options().shape.num_ranks,
                 .failure = NewestFailureText(),
                 .ranks = std::move(*ranks),
                 .flows = flow_stats()});
}

std::vector<FlowStats> GpuSession::flow_stats() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease) return last_.flows;
  return network_ == nullptr ? std::vector<FlowStats>() : network_->flow_stats();
}

}  // namespace jax_ep
