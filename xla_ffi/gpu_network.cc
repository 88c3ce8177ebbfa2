#include "xla_ffi/gpu_network.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "proxy/base/blob.h"
#include "proxy/base/env.h"
#include "proxy/base/topology.h"
#include "proxy/command_ring.h"
#include "xla_ffi/gpu_copies.h"
#include "xla_ffi/members.h"

namespace jax_ep {
namespace {

// CPUs of the device's NUMA node that this process may use; empty: not known, or none of them.
std::vector<int> NearCpus(std::string_view pci_address) {
  const int numa_node = ReadPciDevice(kSysfs, pci_address).numa_node;
  if (numa_node < 0) return {};
  std::vector<int> cpus = AllowedCpus();
  std::erase_if(cpus, [numa_node](int cpu) {
    return NumaNodesOf(kSysfs, {cpu}) != std::vector<int>{numa_node};
  });
  return cpus;
}

// What transports know a rank's stage by, in device memory.
std::string StageName(uint32_t team, uint32_t rank) {
  return std::to_string(team) + "/" + std::to_string(rank);
}

}  // namespace

Status ToStatus(const char* error, const std::string& what) {
  if (error == nullptr) return Status::Ok();
  return Internal(what + ": " + error);
}

struct GpuNetwork::Member {
  LocalRank id;
  SharedMemory pinned_stage;   // unless the stage is the GPU's memory
  std::span<std::byte> stage;  // what proxies move
  SharedMemory signal_memory;
  std::vector<SharedMemory> imported;  // mates' stages and signals of other processes
  std::vector<std::byte*> stages;      // [node_size] of the node
  std::vector<std::byte*> signals;     // likewise
  std::vector<SharedMemory> ring_memory;
  std::vector<std::byte*> rings;
  // One for each proxy, if the transport makes copies of the GPU's memory; outlive the proxies.
  std::vector<std::unique_ptr<GpuCopies>> copies;
  std::vector<std::unique_ptr<Proxy>> proxies;  // one endpoint each, number 0

  int device() const { return static_cast<int>(id.device_ordinal); }
  bool has_device_stage() const { return pinned_stage.bytes().empty(); }
};

GpuNetwork::GpuNetwork(const SessionOptions& options, const gpu::GpuApi& api,
                       TransportFactory factory)
    : options_(options), api_(api), transport_factory_(std::move(factory)) {}

GpuNetwork::~GpuNetwork() {
  Stop();
  static_cast<void>(Release());
}

GpuNetwork::Mover GpuNetwork::MoverOf(const SessionOptions& options) {
  if (options.shape.num_nodes() == 1) return Mover::kHost;
  if (options.transport == "cuda") return Mover::kEngines;
  const bool has_nics = options.transport == "verbs" || options.transport == "ofi";
  return options.gpu_direct && has_nics ? Mover::kNic : Mover::kHost;
}

Status GpuNetwork::Pin(std::span<std::byte> memory) {
  JAX_EP_RETURN_IF_ERROR(ToStatus(api_.memory->pin(memory.data(), memory.size()),
                                  "group " + options_.name + ": pinning " +
                                      std::to_string(memory.size()) + " bytes of host memory"));
  pinned_.push_back(memory.data());
  return Status::Ok();
}

Result<SharedMemory> GpuNetwork::MakePinned(uint64_t bytes, bool shareable) {
  JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Create(bytes, shareable));
  JAX_EP_RETURN_IF_ERROR(Pin(memory.bytes()));
  return memory;
}

Result<SharedMemory> GpuNetwork::ImportPinned(const std::string& who, const std::string& blob,
                                              uint64_t bytes) {
  JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory, Of(who, SharedMemory::Import(blob)));
  if (memory.bytes().size() < bytes) {
    return InvalidArgument(who + " is smaller than this group's layout");
  }
  JAX_EP_RETURN_IF_ERROR(Pin(memory.bytes()));
  return memory;
}

Result<std::unique_ptr<GpuNetwork>> GpuNetwork::Create(
    const SessionOptions& options, const gpu::GpuApi& api,
    const std::vector<std::span<std::byte>>& device_stages, FailureLatch* failure,
    TransportFactory transport_factory) {
  JAX_EP_RETURN_IF_ERROR(CheckReach(options, api.stage_bytes(&options.shape)));
  std::unique_ptr<GpuNetwork> network(new GpuNetwork(options, api, std::move(transport_factory)));
  JAX_EP_ASSIGN_OR_RETURN(network->env_, Env::Read());
  JAX_EP_ASSIGN_OR_RETURN(network->tracer_, OpenTracer(options, network->env_));
  JAX_EP_ASSIGN_OR_RETURN(network->signs_, Proxy::MakeSigns(options.name));
  for (size_t i = 0; i < options.local_ranks.size(); ++i) {
    const auto stage = device_stages.empty() ? std::span<std::byte>() : device_stages[i];
    JAX_EP_RETURN_IF_ERROR(network->AddMember(options.local_ranks[i], stage, failure));
  }
  return network;
}

Status GpuNetwork::AddMember(const LocalRank& local, std::span<std::byte> device_stage,
                             FailureLatch* failure) {
  auto member = std::make_unique<Member>();
  member->id = local;
  JAX_EP_RETURN_IF_ERROR(ToStatus(api_.memory->use_device(member->device()), "network"));
  const bool shareable = !IsOneProcess(options_);
  member->stage = device_stage;
  if (device_stage.empty()) {
    JAX_EP_ASSIGN_OR_RETURN(member->pinned_stage,
                            MakePinned(api_.stage_bytes(&options_.shape), shareable));
    member->stage = member->pinned_stage.bytes();
  }
  JAX_EP_ASSIGN_OR_RETURN(member->signal_memory,
                          MakePinned(api_.signal_bytes(&options_.shape), shareable));
  Member& added = *members_.emplace_back(std::move(member));
  return AddProxies(added, failure);
}

Status GpuNetwork::AddProxies(Member& member, FailureLatch* failure) {
  const GroupShape& shape = options_.shape;
  const uint32_t node = member.id.rank / shape.node_size;
  RankPlace place = PlaceOf(options_, member.id);
  std::array<char, 32> pci_address{};
  JAX_EP_RETURN_IF_ERROR(
      ToStatus(api_.memory->pci_address(member.device(), pci_address.data(), pci_address.size()),
               "network"));
  place.device_pci = pci_address.data();
  const Mover mover = MoverOf(options_);
  Descriptor dmabuf;
  // libfabric's providers export it themselves.
  if (mover == Mover::kNic && options_.transport == "verbs") {
    JAX_EP_ASSIGN_OR_RETURN(dmabuf, ExportStage(member));
  }
  std::byte* const signals = member.signal_memory.bytes().data();
  for (uint32_t ring = 0; ring < env_.proxy_threads; ++ring) {
    ProxyOptions proxy_options = ProxyOptionsFor(options_, env_);
    proxy_options.cpus = NearCpus(place.device_pci);
    proxy_options.transport_factory = transport_factory_;
    proxy_options.signs = signs_;
    JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<Proxy> proxy,
                            Proxy::Create(std::move(proxy_options), failure));
    JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory, MakePinned(CommandRing::BytesFor(env_.ring_slots),
                                                            /*shareable=*/false));
    EndpointOptions endpoint{
        .rank = member.id.rank,
        .team = options_.IdOf(member.id.team),
        .num_ranks = shape.num_ranks,
        .ll_slots = static_cast<uint32_t>(shape.ll_tokens) + 1,
        .heap = member.stage,
        .flag =
            [this, signals](Channel channel, uint32_t source) {
              return reinterpret_cast<std::atomic<uint64_t>*>(
                  signals + api_.signal_offset(&options_.shape, channel, source));
            },
        .ring_slots = env_.ring_slots,
        .ring_memory = memory.bytes(),
        .place = place,
        .trace = AddTrack(tracer_.get(), options_, member.id, TrackKind::kProxy)};
    if (member.has_device_stage()) {
      endpoint.heap_device = member.device();
      endpoint.heap_dmabuf_fd = dmabuf.fd();
    }
    if (mover == Mover::kEngines) {
      endpoint.heap_export = StageName(member.id.team, member.id.rank);
      JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<GpuCopies> copies,
                              GpuCopies::Open(*api_.memory, member.device()));
      endpoint.copies = copies.get();
      member.copies.push_back(std::move(copies));
    } else if (mover == Mover::kHost && !IsOneProcess(options_)) {
      endpoint.heap_export = member.pinned_stage.Export();
    }
    for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
      if (gpu::RingServes(ring, env_.proxy_threads, node, peer / shape.node_size)) {
        endpoint.peers.push_back(peer);
      }
    }
    JAX_EP_RETURN_IF_ERROR(proxy->AddEndpoint(std::move(endpoint)).status());
    member.rings.push_back(memory.bytes().data());
    member.ring_memory.push_back(std::move(memory));
    member.proxies.push_back(std::move(proxy));
  }
  return Status::Ok();
}

Result<Descriptor> GpuNetwork::ExportStage(const Member& member) const {
  // The stage begins at a page, and its allocation ends at one.
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const gpu::DeviceRange pages{.base = member.stage.data(),
                               .bytes = AlignUp(member.stage.size(), page)};
  int fd = -1;
  JAX_EP_RETURN_IF_ERROR(ToStatus(api_.memory->export_dmabuf(member.device(), pages, &fd),
                                  "group " + options_.name + ": the network stage of " +
                                      options_.NameOf(member.id) + ", for NICs"));
  return Descriptor(fd);
}

std::string GpuNetwork::LocalBlob(size_t index) const {
  const Member& member = *members_[index];
  BlobWriter blob;
  blob.Text(member.has_device_stage() ? std::string() : member.pinned_stage.Export());
  blob.Text(member.signal_memory.Export());
  blob.U64(member.proxies.size());
  for (const auto& proxy : member.proxies) blob.Text(proxy->LocalBlob(0));
  return blob.Take();
}

Status GpuNetwork::Connect(const Blobs& blobs,
                           const std::vector<std::vector<std::byte*>>& device_stages) {
  Blobs all = blobs;
  for (size_t i = 0; i < members_.size(); ++i) {
    all[{members_[i]->id.team, members_[i]->id.rank}] = LocalBlob(i);
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    JAX_EP_RETURN_IF_ERROR(ConnectMember(*members_[i], all, device_stages[i]));
  }
  return Status::Ok();
}

Status GpuNetwork::ConnectMember(Member& member, const Blobs& blobs,
                                 const std::vector<std::byte*>& device_stages) {
  const GroupShape& shape = options_.shape;
  const uint32_t node = member.id.rank / shape.node_size;
  const Deadline deadline = Deadline::After(options_.timeout);
  JAX_EP_RETURN_IF_ERROR(ToStatus(api_.memory->use_device(member.device()), "network"));
  for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
    const std::string who = "group " + options_.name + ": the network stage of " +
                            options_.NameOf(member.id.team, peer);
    const uint32_t peer_node = peer / shape.node_size;
    const Member* const mate = FindMember(members_, member.id.team, peer);
    if (peer_node == node && mate != nullptr) {
      member.stages.push_back(mate->stage.data());
      member.signals.push_back(mate->signal_memory.bytes().data());
      continue;
    }
    const auto found = blobs.find({member.id.team, peer});
    if (found == blobs.end()) {
      return InvalidArgument(who + " was not published by its process");
    }
    BlobReader reader(found->second);
    const std::string stage_export(reader.Text());
    const std::string signal_export(reader.Text());
    const uint64_t num_endpoints = reader.U64();
    std::vector<std::string> endpoints;
    for (uint64_t i = 0; i < num_endpoints && reader.ok(); ++i) {
      endpoints.emplace_back(reader.Text());
    }
    if (!reader.finished() || endpoints.size() != env_.proxy_threads) {
      return InvalidArgument(who + " has " + std::to_string(num_endpoints) +
                             " endpoints, expected " + std::to_string(env_.proxy_threads) +
                             "; set JAX_EP_PROXY_THREADS alike on all processes");
    }
    if (peer_node == node) {
      if (stage_export.empty() != member.has_device_stage()) {
        return InvalidArgument(who + " is in " +
                               (stage_export.empty() ? "its GPU's" : "the host's") +
                               " memory, and this rank's is not; set JAX_EP_GPU_DIRECT alike on "
                               "all processes of a node");
      }
      if (member.has_device_stage()) {
        member.stages.push_back(device_stages[peer]);
      } else {
        JAX_EP_ASSIGN_OR_RETURN(SharedMemory stage,
                                ImportPinned(who, stage_export, api_.stage_bytes(&shape)));
        member.stages.push_back(stage.bytes().data());
        member.imported.push_back(std::move(stage));
      }
      JAX_EP_ASSIGN_OR_RETURN(SharedMemory signals,
                              ImportPinned(who, signal_export, api_.signal_bytes(&shape)));
      member.signals.push_back(signals.bytes().data());
      member.imported.push_back(std::move(signals));
      continue;
    }
    for (const auto& copies : member.copies) {
      copies->Map(StageName(member.id.team, peer), {device_stages[peer], api_.stage_bytes(&shape)});
    }
    for (uint32_t ring = 0; ring < env_.proxy_threads; ++ring) {
      if (!gpu::RingServes(ring, env_.proxy_threads, node, peer_node)) continue;
      JAX_EP_RETURN_IF_ERROR(member.proxies[ring]->Connect(0, peer, endpoints[ring], deadline));
    }
  }
  return Status::Ok();
}

Status GpuNetwork::Start() {
  for (const auto& member : members_) {
    // All stages are zeroes still.
    for (const auto& copies : member->copies) {
      const Status warm = copies->Warm(member->stage.data());
      if (!warm.ok()) {
        return Internal("group " + options_.name + ": a copy from GPU " +
                        std::to_string(member->device()) + " to another: " + warm.message());
      }
    }
  }
  return Proxy::StartAll(Proxies());
}

gpu::NetworkConfig GpuNetwork::ConfigOf(size_t index) const {
  const Member& member = *members_[index];
  return {.stages = member.stages.data(),
          .has_device_stages = member.has_device_stage(),
          .has_fast_wire = MoverOf(options_) == Mover::kEngines,
          .signals = member.signals.data(),
          .rings = member.rings.data(),
          .num_rings = env_.proxy_threads};
}

std::vector<Proxy*> GpuNetwork::Proxies() const {
  std::vector<Proxy*> proxies;
  for (const auto& member : members_) {
    for (const auto& proxy : member->proxies) proxies.push_back(proxy.get());
  }
  return proxies;
}

void GpuNetwork::Stop() { Proxy::StopAll(Proxies()); }

Status GpuNetwork::EndCopies() {
  Status first;
  for (const auto& member : members_) {
    for (const auto& copies : member->copies) {
      const Status closed = copies->Close();
      if (first.ok()) first = closed;
    }
  }
  return first;
}

Status GpuNetwork::Release() {
  Status status = EndCopies();
  for (std::byte* memory : pinned_) {
    if (const char* error = api_.memory->unpin(memory); error != nullptr && status.ok()) {
      status = ToStatus(error, "group " + options_.name + ": unpinning");
    }
  }
  pinned_.clear();
  for (const auto& member : members_) member->proxies.clear();
  members_.clear();
  return status;
}

void GpuNetwork::Leak() {
  pinned_.clear();
  for (auto& member : members_) static_cast<void>(member.release());
  members_.clear();
}

uint64_t GpuNetwork::pinned_stage_bytes() const {
  uint64_t bytes = 0;
  for (const auto& member : members_) bytes += member->pinned_stage.bytes().size();
  return bytes;
}

std::vector<FlowStats> GpuNetwork::flow_stats() const {
  std::vector<FlowStats> all;
  for (const auto& member : members_) {
    for (const auto& proxy : member->proxies) {
      const std::vector<FlowStats> stats = proxy->Stats();
      all.insert(all.end(), stats.begin(), stats.end());
    }
  }
  return all;
}

std::string GpuNetwork::DumpOpenFlows(const FlowFilter& is_awaited) const {
  std::string text;
  for (const auto& member : members_) {
    for (const auto& proxy : member->proxies) text += proxy->DumpOpenFlows(is_awaited);
  }
  return text;
}

std::string GpuNetwork::DumpState() const {
  std::string text;
  for (const auto& member : members_) {
    for (const auto& proxy : member->proxies) text += proxy->DumpState();
  }
  return text;
}

}  // namespace jax_ep
