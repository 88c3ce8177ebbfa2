#include "xla_ffi/gpu_network.h"

#include <algorithm>
#include <array>

#include "proxy/base/blob.h"
#include "proxy/base/env.h"
#include "proxy/base/topology.h"
#include "proxy/command_ring.h"
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

}  // namespace

Status ToStatus(const char* error, const std::string& what) {
  if (error == nullptr) return Status::Ok();
  return Internal(what + ": " + error);
}

struct GpuNetwork::Member {
  LocalRank id;
  SharedMemory stage;
  std::vector<SharedMemory> imported;  // mates' stages of other processes
  std::vector<std::byte*> stages;      // [node_size] of the node
  std::vector<SharedMemory> ring_memory;
  std::vector<std::byte*> rings;
  std::vector<std::unique_ptr<Proxy>> proxies;  // one endpoint each, number 0

  int device() const { return static_cast<int>(id.device_ordinal); }
};

GpuNetwork::GpuNetwork(const SessionOptions& options, const gpu::GpuApi& api)
    : options_(options), api_(api) {}

GpuNetwork::~GpuNetwork() {
  Stop();
  static_cast<void>(Release());
}

Status GpuNetwork::Pin(std::span<std::byte> memory) {
  JAX_EP_RETURN_IF_ERROR(ToStatus(api_.memory->pin(memory.data(), memory.size()),
                                  "group " + options_.name + ": pinning " +
                                      std::to_string(memory.size()) + " bytes of host memory"));
  pinned_.push_back(memory.data());
  return Status::Ok();
}

Result<std::unique_ptr<GpuNetwork>> GpuNetwork::Create(const SessionOptions& options,
                                                       const gpu::GpuApi& api,
                                                       FailureLatch* failure) {
  JAX_EP_RETURN_IF_ERROR(CheckReach(options, api.stage_bytes(&options.shape)));
  std::unique_ptr<GpuNetwork> network(new GpuNetwork(options, api));
  JAX_EP_ASSIGN_OR_RETURN(network->env_, Env::Read());
  JAX_EP_ASSIGN_OR_RETURN(network->tracer_, OpenTracer(options, network->env_));
  for (const LocalRank& local : options.local_ranks) {
    JAX_EP_RETURN_IF_ERROR(network->AddMember(local, failure));
  }
  return network;
}

Status GpuNetwork::AddMember(const LocalRank& local, FailureLatch* failure) {
  auto member = std::make_unique<Member>();
  member->id = local;
  JAX_EP_RETURN_IF_ERROR(ToStatus(api_.memory->use_device(member->device()), "network"));
  JAX_EP_ASSIGN_OR_RETURN(member->stage,
                          SharedMemory::Create(api_.stage_bytes(&options_.shape),
                                               /*shareable=*/!IsOneProcess(options_)));
  JAX_EP_RETURN_IF_ERROR(Pin(member->stage.bytes()));
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
  std::byte* stage = member.stage.bytes().data();
  for (uint32_t ring = 0; ring < env_.proxy_threads; ++ring) {
    ProxyOptions proxy_options = ProxyOptionsFor(options_, env_);
    proxy_options.cpus = NearCpus(place.device_pci);
    JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<Proxy> proxy,
                            Proxy::Create(std::move(proxy_options), failure));
    JAX_EP_ASSIGN_OR_RETURN(
        SharedMemory memory,
        SharedMemory::Create(CommandRing::BytesFor(env_.ring_slots), /*shareable=*/false));
    JAX_EP_RETURN_IF_ERROR(Pin(memory.bytes()));
    EndpointOptions endpoint{
        .rank = member.id.rank,
        .team = options_.IdOf(member.id.team),
        .num_ranks = shape.num_ranks,
        .ll_slots = static_cast<uint32_t>(shape.ll_tokens) + 1,
        .heap = member.stage.bytes(),
        .heap_export = IsOneProcess(options_) ? std::string() : member.stage.Export(),
        .flag =
            [this, stage](Channel channel, uint32_t source) {
              return reinterpret_cast<std::atomic<uint64_t>*>(
                  stage + api_.stage_flag(&options_.shape, channel, source));
            },
        .ring_slots = env_.ring_slots,
        .ring_memory = memory.bytes(),
        .place = place,
        .trace = AddTrack(tracer_.get(), options_, member.id, TrackKind::kProxy)};
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

std::string GpuNetwork::LocalBlob(size_t index) const {
  const Member& member = *members_[index];
  BlobWriter blob;
  blob.Text(member.stage.Export());
  blob.U64(member.proxies.size());
  for (const auto& proxy : member.proxies) blob.Text(proxy->LocalBlob(0));
  return blob.Take();
}

Status GpuNetwork::Connect(const Blobs& blobs) {
  Blobs all = blobs;
  for (size_t i = 0; i < members_.size(); ++i) {
    all[{members_[i]->id.team, members_[i]->id.rank}] = LocalBlob(i);
  }
  for (const auto& member : members_) JAX_EP_RETURN_IF_ERROR(ConnectMember(*member, all));
  return Status::Ok();
}

Status GpuNetwork::ConnectMember(Member& member, const Blobs& blobs) {
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
      member.stages.push_back(mate->stage.bytes().data());
      continue;
    }
    const auto found = blobs.find({member.id.team, peer});
    if (found == blobs.end()) {
      return InvalidArgument(who + " was not published by its process");
    }
    BlobReader reader(found->second);
    const std::string stage_export(reader.Text());
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
      JAX_EP_ASSIGN_OR_RETURN(SharedMemory stage, Of(who, SharedMemory::Import(stage_export)));
      if (stage.bytes().size() < api_.stage_bytes(&shape)) {
        return InvalidArgument(who + " is smaller than this group's layout");
      }
      JAX_EP_RETURN_IF_ERROR(Pin(stage.bytes()));
      member.stages.push_back(stage.bytes().data());
      member.imported.push_back(std::move(stage));
      continue;
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
    for (const auto& proxy : member->proxies) JAX_EP_RETURN_IF_ERROR(proxy->Start());
  }
  return Status::Ok();
}

gpu::NetworkConfig GpuNetwork::ConfigOf(size_t index) const {
  const Member& member = *members_[index];
  return {.stages = member.stages.data(),
          .rings = member.rings.data(),
          .num_rings = env_.proxy_threads};
}

void GpuNetwork::Stop() {
  for (const auto& member : members_) {
    for (const auto& proxy : member->proxies) proxy->Stop();
  }
}

Status GpuNetwork::Release() {
  Status status;
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

uint64_t GpuNetwork::stage_bytes() const {
  return members_.size() * api_.stage_bytes(&options_.shape);
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
