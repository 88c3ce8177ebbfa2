#include "xla_ffi/gpu_session.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <utility>

#include "proxy/base/blob.h"
#include "proxy/base/log.h"
#include "proxy/base/thread.h"

namespace jax_ep {
namespace {

constexpr uint64_t kBlobVersion = 2;
constexpr auto kWatchPeriod = std::chrono::milliseconds(2);
// A rank leaves when its devices are idle, so whatever it took part in runs here already, and ends
// long before this. What still waits then waits for the rank that has left.
constexpr auto kDepartureGrace = std::chrono::seconds(5);

// The runtime's current device belongs to XLA on XLA's and Python's threads, so everything that
// changes it runs on a thread of its own.
Status OnOwnThread(const std::function<Status()>& body) {
  Status status;
  JAX_EP_ASSIGN_OR_RETURN(std::thread thread,
                          StartThread("jax_ep device", [&] { status = body(); }));
  thread.join();
  return status;
}

const char* Name(gpu::Operation operation) {
  switch (operation) {
    case gpu::Operation::kPlan:
      return "plan";
    case gpu::Operation::kDispatch:
      return "dispatch";
    case gpu::Operation::kCombine:
      return "combine";
    case gpu::Operation::kLlDispatch:
      return "dispatch (ll)";
    case gpu::Operation::kLlCombine:
      return "combine (ll)";
    case gpu::Operation::kDispatchStart:
      return "dispatch_start";
    case gpu::Operation::kDispatchDone:
      return "dispatch_done";
    case gpu::Operation::kCombineStart:
      return "combine_start";
    case gpu::Operation::kCombineDone:
      return "combine_done";
    case gpu::Operation::kLlDispatchStart:
      return "dispatch_start (ll)";
    case gpu::Operation::kLlDispatchDone:
      return "dispatch_done (ll)";
    case gpu::Operation::kLlCombineStart:
      return "combine_start (ll)";
    case gpu::Operation::kLlCombineDone:
      return "combine_done (ll)";
  }
  return "an unknown operation";
}

}  // namespace

Result<const gpu::GpuApi*> LoadGpuLibrary(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, const gpu::GpuApi*> loaded;
  std::lock_guard lock(mutex);
  if (const auto it = loaded.find(path); it != loaded.end()) return it->second;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Unimplemented("the GPU library cannot be loaded (" + std::string(dlerror()) +
                         "); install jax_ep where nvcc is found, or pass implementation='xla'");
  }
  const auto get = reinterpret_cast<decltype(&jax_ep_gpu_api)>(dlsym(library, "jax_ep_gpu_api"));
  const gpu::GpuApi* api = get == nullptr ? nullptr : get();
  if (api == nullptr || api->abi_version != gpu::kAbiVersion) {
    return Unimplemented(path + " is of another jax_ep version; install jax_ep again");
  }
  loaded[path] = api;
  return api;
}

struct GpuSession::Member {
  LocalRank id;
  gpu::DeviceRange heap;
  gpu::DeviceRange arena;
  std::string no_arena;  // why there is none
  gpu::RankStatus* status = nullptr;
  SharedMemory control;                    // a ControlBlock, for heartbeats between processes
  std::vector<gpu::PeerMemory> peers;      // [node_size]
  std::vector<gpu::DeviceRange> imported;  // mappings of other processes' memory
  std::vector<SharedMemory> controls;      // of mates in other processes
  std::vector<MonitorOptions::Peer> watched;
  gpu::RankHandle* handle = nullptr;
  std::atomic<uint64_t> launches{0};  // relaxed: a statistic

  int device() const { return static_cast<int>(id.device_ordinal); }
  ControlBlock* control_block() { return reinterpret_cast<ControlBlock*>(control.bytes().data()); }
};

struct GpuSession::PeerRecord {
  uint64_t pid = 0;
  std::string control_export;
  uint64_t heap_bytes = 0;
  uint64_t kept_bytes = 0;  // of the heap
  uint64_t arena_bytes = 0;
  std::array<int, 2> heap_fds{-1, -1};
  int arena_fd = -1;
};

GpuSession::GpuSession(GpuOptions options, const gpu::GpuApi* api)
    : options_(std::move(options)), api_(api), failure_(std::make_unique<FailureLatch>()) {}

GpuSession::~GpuSession() {
  if (lifecycle_.is_forked()) {
    Abandon();
  } else {
    Close();
  }
}

Result<std::unique_ptr<GpuSession>> GpuSession::Create(GpuOptions options) {
  JAX_EP_RETURN_IF_ERROR(CheckOptions(options.session));
  const GroupShape& shape = options.session.shape;
  if (shape.num_ranks > gpu::kMaxNodeRanks) {
    return Unimplemented("group " + options.session.name + ": got " +
                         std::to_string(shape.num_ranks) + " ranks, this version takes " +
                         std::to_string(gpu::kMaxNodeRanks) + " on GPUs; use implementation='xla'");
  }
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
    JAX_EP_ASSIGN_OR_RETURN(session->network_,
                            GpuNetwork::Create(session->options(), *api, session->failure_.get()));
    return Status::Ok();
  }));
  return session;
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

Status GpuSession::AllocateMember(size_t index) {
  const gpu::DeviceMemoryApi& memory = *api_->memory;
  const GroupShape& shape = options().shape;
  // Kept in members_ from the start, so that Close frees what a later failure leaves.
  Member& member = *members_.emplace_back(std::make_unique<Member>());
  member.id = options().local_ranks[index];
  const std::string who = "group " + options().name + ": rank " + std::to_string(member.id.rank) +
                          " on GPU " + std::to_string(member.device());
  const std::vector<int> devices = Devices();
  JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(member.device()), who));
  for (const int peer : devices) {
    bool possible = false;
    JAX_EP_RETURN_IF_ERROR(ToStatus(memory.peer_access(member.device(), peer, &possible), who));
    if (!possible) {
      return InvalidArgument(who + " cannot load and store the memory of GPU " +
                             std::to_string(peer) +
                             "; expected peer access inside a node; use implementation='xla'");
    }
  }
  const uint64_t bytes = api_->heap_bytes(&shape);
  const auto num_devices = static_cast<int>(devices.size());
  if (const char* error = memory.allocate(member.device(), bytes, api_->kept_bytes(&shape),
                                          devices.data(), num_devices, &member.heap)) {
    return ResourceExhausted(who + " could not allocate its heap of " + std::to_string(bytes) +
                             " bytes (" + error +
                             "); lower max_tokens, or leave memory free with "
                             "XLA_PYTHON_CLIENT_MEM_FRACTION");
  }
  void* status = nullptr;
  JAX_EP_RETURN_IF_ERROR(ToStatus(memory.allocate_pinned(sizeof(gpu::RankStatus), &status), who));
  member.status = new (status) gpu::RankStatus();
  JAX_EP_ASSIGN_OR_RETURN(member.control,
                          SharedMemory::Create(sizeof(ControlBlock), /*shareable=*/true));
  const uint64_t live = options_.live_pointers[index];
  if (live == 0) {
    member.no_arena = "JAX_EP_ZERO_COPY=0";
  } else {
    const char* reason = "";
    JAX_EP_RETURN_IF_ERROR(
        ToStatus(memory.find_arena(reinterpret_cast<const void*>(live), devices.data(), num_devices,
                                   &member.arena, &reason),
                 who));
    member.no_arena = reason;
    if (member.arena.bytes != 0 && member.arena.bytes < options_.min_arena_bytes) {
      member.arena = {};
      member.no_arena = "XLA's memory is not one preallocated range";
    }
  }
  if (member.arena.bytes == 0 && options_.require_arena) {
    return FailedPrecondition(who + ": JAX_EP_ZERO_COPY=1 but " + member.no_arena);
  }
  return Status::Ok();
}

std::string GpuSession::LocalBlob() const {
  BlobWriter blob;
  blob.U64(kBlobVersion);
  blob.U64(static_cast<uint64_t>(getpid()));
  blob.U64(members_.size());
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = *members_[i];
    blob.U64(member.id.team);
    blob.U64(member.id.rank);
    blob.U64(member.heap.bytes);
    blob.U64(member.heap.kept_bytes);
    blob.U64(member.arena.bytes);
    blob.Text(member.control.Export());
    blob.Text(network_ == nullptr ? std::string() : network_->LocalBlob(i));
  }
  return blob.Take();
}

Result<std::vector<int>> GpuSession::ExportFds() const {
  std::vector<int> fds;
  const Status status = OnOwnThread([&]() -> Status {
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->use_device(member->device()), "export"));
      const auto [kept, rest] = gpu::PartsOf(member->heap);
      for (const gpu::DeviceRange part : {kept, rest, member->arena}) {
        if (part.bytes == 0) continue;
        int fd = -1;
        JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->export_fd(part, &fd), "export"));
        fds.push_back(fd);
      }
    }
    return Status::Ok();
  });
  if (!status.ok()) {
    for (const int fd : fds) close(fd);
    return status;
  }
  return fds;
}

Status GpuSession::Connect(const std::map<uint32_t, std::string>& blobs,
                           const std::map<uint32_t, std::vector<int>>& fds) {
  std::map<std::pair<uint32_t, uint32_t>, PeerRecord> records;
  std::map<std::pair<uint32_t, uint32_t>, std::string> network_blobs;
  for (const auto& [process, blob] : blobs) {
    if (process == options().process_index) continue;
    const std::string who =
        "group " + options().name + ": the bootstrap record of process " + std::to_string(process);
    BlobReader reader(blob);
    if (reader.U64() != kBlobVersion) {
      return InvalidArgument(who + " is of another version; install the same jax_ep everywhere");
    }
    const uint64_t pid = reader.U64();
    const uint64_t num_ranks = reader.U64();
    const auto descriptors = fds.find(process);
    size_t next = 0;
    const auto take_fd = [&](uint64_t bytes) {
      if (bytes == 0 || descriptors == fds.end() || next >= descriptors->second.size()) return -1;
      return descriptors->second[next++];
    };
    for (uint64_t i = 0; i < num_ranks && reader.ok(); ++i) {
      const auto team = static_cast<uint32_t>(reader.U64());
      const auto rank = static_cast<uint32_t>(reader.U64());
      PeerRecord record{.pid = pid};
      record.heap_bytes = reader.U64();
      record.kept_bytes = reader.U64();
      record.arena_bytes = reader.U64();
      record.control_export = std::string(reader.Text());
      network_blobs[{team, rank}] = std::string(reader.Text());
      record.heap_fds = {take_fd(record.kept_bytes),
                         take_fd(record.heap_bytes - record.kept_bytes)};
      record.arena_fd = take_fd(record.arena_bytes);
      records[{team, rank}] = std::move(record);
    }
    if (!reader.finished()) {
      return InvalidArgument(who + " is malformed; install the same jax_ep everywhere");
    }
  }
  return OnOwnThread([&]() -> Status {
    JAX_EP_RETURN_IF_ERROR(DrainDevices());
    for (const auto& member : members_) JAX_EP_RETURN_IF_ERROR(ConnectMember(*member, records));
    return network_ == nullptr ? Status::Ok() : network_->Connect(network_blobs);
  });
}

Status GpuSession::ConnectMember(
    Member& member, const std::map<std::pair<uint32_t, uint32_t>, PeerRecord>& records) {
  const gpu::DeviceMemoryApi& memory = *api_->memory;
  const GroupShape& shape = options().shape;
  const uint64_t heap_bytes = api_->heap_bytes(&shape);
  const uint32_t node_begin = member.id.rank / shape.node_size * shape.node_size;
  const int device = member.device();
  JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(device), "connect"));
  member.peers.assign(shape.node_size, {});
  for (uint32_t local = 0; local < shape.node_size; ++local) {
    const uint32_t peer = node_begin + local;
    const std::string who = "group " + options().name + ": memory of rank " + std::to_string(peer);
    const auto mate = std::find_if(members_.begin(), members_.end(), [&](const auto& other) {
      return other->id.team == member.id.team && other->id.rank == peer;
    });
    if (mate != members_.end()) {
      member.peers[local] = {.heap = (*mate)->heap.base,
                             .arena = (*mate)->arena.base,
                             .arena_bytes = (*mate)->arena.bytes};
      continue;
    }
    const auto found = records.find({member.id.team, peer});
    if (found == records.end() || found->second.heap_fds[0] < 0) {
      return InvalidArgument(who + " was not published by its process");
    }
    const PeerRecord& record = found->second;
    if (record.heap_bytes < heap_bytes) {
      return InvalidArgument(who + " is smaller than this group's layout");
    }
    gpu::DeviceRange heap, arena;
    JAX_EP_RETURN_IF_ERROR(
        ToStatus(memory.import_fds(record.heap_fds, record.heap_bytes, record.kept_bytes, &device,
                                   1, /*writable=*/true, &heap),
                 who));
    member.imported.push_back(heap);
    if (record.arena_bytes != 0) {
      const char* error = record.arena_fd < 0
                              ? "it was not passed"
                              : memory.import_fds({record.arena_fd, -1}, record.arena_bytes,
                                                  /*kept_bytes=*/0, &device, 1,
                                                  /*writable=*/false, &arena);
      if (error != nullptr) {
        unmapped_arena_ = who + ": its XLA arena cannot be mapped here (" + error + ")";
      } else {
        member.imported.push_back(arena);
      }
    }
    JAX_EP_ASSIGN_OR_RETURN(SharedMemory control, SharedMemory::Import(record.control_export));
    member.watched.push_back({.team = member.id.team,
                              .rank = peer,
                              .pid = record.pid,
                              .control = reinterpret_cast<ControlBlock*>(control.bytes().data())});
    member.controls.push_back(std::move(control));
    member.peers[local] = {.heap = heap.base, .arena = arena.base, .arena_bytes = arena.bytes};
  }
  return Status::Ok();
}

void GpuSession::ForbidArenas(const std::string& reason) {
  for (const auto& member : members_) {
    member->arena = {};
    member->no_arena = reason;
    for (gpu::PeerMemory& peer : member->peers) {
      peer.arena = nullptr;
      peer.arena_bytes = 0;
    }
  }
}

Status GpuSession::Start() {
  JAX_EP_RETURN_IF_ERROR(OnOwnThread([&]() -> Status {
    JAX_EP_RETURN_IF_ERROR(DrainDevices());
    if (network_ != nullptr) JAX_EP_RETURN_IF_ERROR(network_->Start());
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
          .network = network_ != nullptr ? &network : nullptr,
          .status = member->status,
          .timeout_ns = static_cast<uint64_t>(options().timeout.count()),
          .max_sms = options_.max_sms,
          .use_tma = options_.use_tma,
          .debug = options().debug,
      };
      JAX_EP_RETURN_IF_ERROR(
          ToStatus(api_->create(&config, &member->handle), "group " + options().name));
    }
    return Status::Ok();
  }));
  MonitorOptions monitor{.group_name = options().name, .peer_timeout = options().peer_timeout};
  for (const auto& member : members_) {
    monitor.own.push_back({.control = member->control_block(), .team = member->id.team});
    monitor.peers.insert(monitor.peers.end(), member->watched.begin(), member->watched.end());
  }
  JAX_EP_ASSIGN_OR_RETURN(monitor_, Monitor::Create(std::move(monitor), failure_.get()));
  JAX_EP_ASSIGN_OR_RETURN(watch_, StartThread("jax_ep gpu", [this] { WatchStatus(); }));
  return Status::Ok();
}

// Device failures become the session's, the session's (a dead process, say) end the kernels' waits.
void GpuSession::WatchStatus() {
  bool aborted = false;
  std::optional<std::chrono::steady_clock::time_point> left_at;
  std::unique_lock lock(watch_mutex_);
  while (!stopping_) {
    for (const auto& member : members_) {
      if (failure_->failed()) break;
      if (member->status->failed.load(std::memory_order_acquire) != 0 &&
          failure_->Set(Unavailable(Describe(*member)), BlamedFor(*member))) {
        LogError(failure_->status().message());
      }
    }
    const auto now = std::chrono::steady_clock::now();
    if (!left_at.has_value() && FindDeparted().has_value()) left_at = now;
    // Ends waits for a rank that has left; without such a wait nothing fails.
    const bool waits_in_vain = left_at.has_value() && now - *left_at > kDepartureGrace;
    if (!aborted && (failure_->failed() || waits_in_vain)) {
      for (const auto& member : members_) {
        member->status->abort.store(1, std::memory_order_release);
      }
      aborted = true;
    }
    watch_wake_.wait_for(lock, kWatchPeriod);
  }
}

std::string GpuSession::Describe(const Member& member) const {
  const gpu::RankStatus& status = *member.status;
  const auto operation = static_cast<gpu::Operation>(status.operation);
  std::string text = "group " + options().name + ": " + Name(operation) + " number " +
                     std::to_string(status.epoch) + " on rank " + std::to_string(member.id.rank);
  const std::string peer = "rank " + std::to_string(status.peer);
  const double seconds =
      std::chrono::duration_cast<std::chrono::duration<double>>(options().timeout).count();
  switch (static_cast<gpu::FailureKind>(status.kind)) {
    case gpu::FailureKind::kTimeout:
      return text + ": " + peer + " did not arrive within " + std::to_string(seconds) +
             " s (waited for " + std::to_string(status.expected) + ", saw " +
             std::to_string(status.actual) + ")";
    case gpu::FailureKind::kPeerFailed:
      return text + ": " + peer + " failed first; its own message says why";
    case gpu::FailureKind::kAborted:
      if (const auto left = FindDeparted(); left.has_value()) return left->status.message();
      return text + " was ended because the group had failed";
    case gpu::FailureKind::kBusy:
      return text +
             ": another call of the group was running on this device; calls of one group must not "
             "run at the same time (concurrent command buffers, compute_on streams)";
    case gpu::FailureKind::kWrongOrder:
      return text + ": " + peer +
             " is in another operation, or in a call of another program (value " +
             std::to_string(status.actual) + ", expected " + std::to_string(status.expected) +
             "); all ranks must run the same programs in the same order, which several threads "
             "that "
             "use one group do not promise";
    case gpu::FailureKind::kTooManyOpen:
      return text + ": more than max_in_flight starts before a done";
    case gpu::FailureKind::kStaleEpoch:
      return text +
             ": its *_start ran twice or not at all, under remat for instance: the slot set holds "
             "epoch " +
             std::to_string(status.actual) + ", expected " + std::to_string(status.expected);
    case gpu::FailureKind::kInvalidId:
      return text + " got expert id(s) of num_experts or more (JAX_EP_DEBUG=1); fix the router";
    case gpu::FailureKind::kRingFull:
      return text + ": this rank's proxy took no command for " + std::to_string(seconds) +
             " s; its network is stuck (dump_state says where)";
    case gpu::FailureKind::kBadCommand:
      return text + ": a command to " + peer +
             " does not fit the ring's format; this is a fault of "
             "jax_ep, please report it";
    case gpu::FailureKind::kNotLaunched:
      return text + ": one of its kernels could not be launched; the error of that call says why";
    case gpu::FailureKind::kNone:
      break;
  }
  return text + " failed without a reason";
}

void GpuSession::Close(Departure departure) {
  if (!lifecycle_.BeginClose()) return;
  if (monitor_ != nullptr) {
    if (Result<std::vector<Counters>> counters = ReadCounters(); counters.ok()) {
      last_.counters = std::move(*counters);
    }
  }
  if (network_ != nullptr) last_.flows = network_->flow_stats();
  last_.data_path = DataPath();
  // From here on no kernel can be launched; those that were are waited for in Free.
  lifecycle_.Seal();
  if (monitor_ != nullptr) monitor_->Leave(departure);
  Free();
  lifecycle_.EndClose();
}

// A child has neither the threads nor the devices of its parent: it must not touch them.
void GpuSession::Abandon() {
  (void)new std::vector<std::unique_ptr<Member>>(std::move(members_));
  (void)new std::thread(std::move(watch_));
  (void)network_.release();
  (void)monitor_.release();
}

void GpuSession::Free() {
  const Status drained = OnOwnThread([&]() -> Status {
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->synchronize(member->device()), "close"));
    }
    return Status::Ok();
  });
  {
    std::lock_guard lock(watch_mutex_);
    stopping_ = true;
  }
  watch_wake_.notify_all();
  if (watch_.joinable()) watch_.join();
  if (network_ != nullptr) network_->Stop();
  if (monitor_ != nullptr) monitor_->Stop();
  if (!drained.ok()) {
    // A device that cannot be waited for may still use this memory: keep it mapped for ever.
    LogError("group " + options().name + ": " + drained.message() + "; " +
             std::to_string(HeapBytes()) + " bytes stay allocated");
    for (const auto& member : members_) {
      member->control = {};
      member->controls.clear();
    }
    if (network_ != nullptr) network_->Leak();
    return;
  }
  const Status freed = OnOwnThread([&]() -> Status {
    const gpu::DeviceMemoryApi& memory = *api_->memory;
    // First all of them: kernels of one rank reach the memory of the others. From then on programs
    // that XLA captured touch the kept bytes of the heaps alone.
    bool has_run = false;
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(member->device()), "close"));
      gpu::RankHandle* handle = std::exchange(member->handle, nullptr);
      if (handle == nullptr) continue;
      has_run = true;
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->destroy(handle), "close"));
    }
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(member->device()), "close"));
      for (const gpu::DeviceRange& range : member->imported) {
        JAX_EP_RETURN_IF_ERROR(ToStatus(memory.release(range), "unmap"));
      }
      member->imported.clear();
      const auto free_heap = has_run ? memory.retire : memory.release;
      JAX_EP_RETURN_IF_ERROR(ToStatus(free_heap(member->heap), "free"));
      JAX_EP_RETURN_IF_ERROR(ToStatus(memory.release_pinned(member->status), "free"));
      member->heap = {};
      member->status = nullptr;
    }
    return network_ == nullptr ? Status::Ok() : network_->Release();
  });
  if (!freed.ok()) {
    LogError("group " + options().name + ": " + freed.message());
    if (network_ != nullptr) network_->Leak();
  }
  members_.clear();
  monitor_.reset();
  network_.reset();
}

int64_t GpuSession::BlamedFor(const Member& member) const {
  if (static_cast<gpu::FailureKind>(member.status->kind) != gpu::FailureKind::kAborted) {
    return FailureLatch::kNobody;  // a late rank is named, and blamed by nobody
  }
  const auto left = FindDeparted();
  return left.has_value() ? left->blamed : FailureLatch::kNobody;
}

std::optional<GpuSession::Departed> GpuSession::FindDeparted() const {
  for (const auto& member : members_) {
    for (const MonitorOptions::Peer& mate : member->watched) {
      // Acquire pairs with the release in Monitor::Leave.
      if (mate.control->state.load(std::memory_order_acquire) != MemberState::kClosed) continue;
      return Departed{
          .blamed = RankOfTeam(mate.team, mate.rank),
          .status = PeerHasLeft(options().name, mate.rank,
                                mate.control->departure.load(std::memory_order_relaxed))};
    }
  }
  return std::nullopt;
}

gpu::RankHandle* GpuSession::TakeHandle(int64_t device) {
  for (const auto& member : members_) {
    if (member->id.device_ordinal != device) continue;
    member->launches.fetch_add(1, std::memory_order_relaxed);
    return member->handle;
  }
  return nullptr;
}

uint64_t GpuSession::heap_bytes() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  return lease ? HeapBytes() : 0;
}

uint64_t GpuSession::HeapBytes() const {
  uint64_t bytes = network_ == nullptr ? 0 : network_->stage_bytes();
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

Result<std::vector<GpuSession::Counters>> GpuSession::counters() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease) return last_.counters;
  return ReadCounters();
}

Result<std::vector<GpuSession::Counters>> GpuSession::ReadCounters() const {
  std::vector<Counters> all;
  JAX_EP_RETURN_IF_ERROR(OnOwnThread([&]() -> Status {
    for (const auto& member : members_) {
      gpu::RankCountersSnapshot snapshot{};
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->use_device(member->device()), "counters"));
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->counters(member->handle, &snapshot), "counters"));
      all.push_back({.id = member->id,
                     .launches = member->launches.load(std::memory_order_relaxed),
                     .device = snapshot});
    }
    return Status::Ok();
  }));
  return all;
}

std::vector<FlowStats> GpuSession::flow_stats() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease) return last_.flows;
  return network_ == nullptr ? std::vector<FlowStats>() : network_->flow_stats();
}

std::string GpuSession::DumpState() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  std::string out = "group " + options().name + " on GPUs: " + (lease ? "running" : "closed");
  if (failure_->failed()) out += ", FAILED: " + failure_->status().message();
  out += "\n";
  out += "  closed groups of this process keep " + std::to_string(api_->memory->retired_bytes()) +
         " bytes of device memory\n";
  if (!lease) return out;
  for (const auto& member : members_) {
    out +=
        "  team " + std::to_string(member->id.team) + " rank " + std::to_string(member->id.rank) +
        " on GPU " + std::to_string(member->device()) + ": heap " +
        std::to_string(member->heap.bytes) + " bytes, " +
        (member->arena.bytes != 0 ? "arena " + std::to_string(member->arena.bytes) + " bytes"
                                  : "staged: " + member->no_arena) +
        (member->handle != nullptr && !api_->uses_bulk_copies(member->handle) ? ", no bulk copies"
                                                                              : "") +
        "\n";
  }
  return network_ == nullptr ? out : out + network_->DumpState();
}

}  // namespace jax_ep
