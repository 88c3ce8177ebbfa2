#include "tests/kernels_gpu/gpu_network.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "proxy/command_ring.h"
#include "tests/kernels_gpu/gpu_team.h"

namespace jax_ep::testing {
namespace {

std::byte* AllocatePinned(uint64_t bytes) {
  void* memory = nullptr;
  CheckCuda(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "pinned");
  std::memset(memory, 0, bytes);
  return static_cast<std::byte*>(memory);
}

std::byte* AllocateOn(int device, uint64_t bytes) {
  void* memory = nullptr;
  CheckCuda(cudaSetDevice(device), "set device");
  CheckCuda(cudaMalloc(&memory, bytes), "stage");
  CheckCuda(cudaMemset(memory, 0, bytes), "stage");
  CheckCuda(cudaDeviceSynchronize(), "stage");
  return static_cast<std::byte*>(memory);
}

std::string StageName(uint32_t rank) { return "stage " + std::to_string(rank); }

void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::abort();
}

}  // namespace

GpuNetwork::GpuNetwork(const GroupShape& shape, uint32_t num_rings, uint32_t ring_slots,
                       const std::vector<int>& devices)
    : shape_(shape), num_rings_(num_rings), ring_slots_(ring_slots), devices_(devices) {
  const gpu::GpuApi* api = jax_ep_gpu_api();
  const uint64_t stage_bytes = api->stage_bytes(&shape);
  for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    stages_.push_back(devices_.empty() ? AllocatePinned(stage_bytes)
                                       : AllocateOn(devices_[rank], stage_bytes));
    signals_.push_back(AllocatePinned(api->signal_bytes(&shape)));
    for (uint32_t i = 0; i < num_rings; ++i) {
      rings_.push_back(AllocatePinned(CommandRing::BytesFor(ring_slots_)));
    }
  }
  for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    for (uint32_t ring = 0; ring < num_rings; ++ring) AddProxy(rank, ring);
  }
  for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    for (uint32_t ring = 0; ring < num_rings; ++ring) {
      for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
        if (!IsServedBy(ring, rank, peer)) continue;
        Must(ProxyOf(rank, ring)
                 .Connect(0, peer, ProxyOf(peer, ring).LocalBlob(0),
                          Deadline::After(std::chrono::seconds(30))));
      }
    }
  }
  for (const auto& proxy : proxies_) Must(proxy->Start());
}

GpuNetwork::~GpuNetwork() {
  for (const auto& proxy : proxies_) proxy->Stop();
  proxies_.clear();
  copies_.clear();
  for (std::byte* stage : stages_) {
    CheckCuda(devices_.empty() ? cudaFreeHost(stage) : cudaFree(stage), "free");
  }
  for (std::byte* signals : signals_) CheckCuda(cudaFreeHost(signals), "free");
  for (std::byte* ring : rings_) CheckCuda(cudaFreeHost(ring), "free");
}

bool GpuNetwork::IsServedBy(uint32_t ring, uint32_t rank, uint32_t peer) const {
  return gpu::RingServes(ring, num_rings_, rank / shape_.node_size, peer / shape_.node_size);
}

void GpuNetwork::AddProxy(uint32_t rank, uint32_t ring) {
  Result<std::unique_ptr<Proxy>> proxy = Proxy::Create(
      {.group_name = "test", .transport = devices_.empty() ? "loopback" : "cuda"}, &failure_);
  Must(proxy.status());
  std::byte* signals = signals_[rank];
  const GroupShape shape = shape_;
  EndpointOptions options{
      .rank = rank,
      .num_ranks = shape_.num_ranks,
      .ll_slots = static_cast<uint32_t>(shape_.ll_tokens) + 1,
      .heap = {stages_[rank], jax_ep_gpu_api()->stage_bytes(&shape_)},
      .flag =
          [signals, shape](Channel channel, uint32_t source) {
            return reinterpret_cast<std::atomic<uint64_t>*>(
                signals + jax_ep_gpu_api()->signal_offset(&shape, channel, source));
          },
      .ring_slots = ring_slots_,
      .ring_memory = {rings_[rank * num_rings_ + ring], CommandRing::BytesFor(ring_slots_)}};
  for (uint32_t peer = 0; peer < shape_.num_ranks; ++peer) {
    if (IsServedBy(ring, rank, peer)) options.peers.push_back(peer);
  }
  if (!devices_.empty()) {
    auto copies = GpuCopies::Open(*jax_ep_gpu_api()->memory, devices_[rank]);
    Must(copies.status());
    for (uint32_t other = 0; other < shape_.num_ranks; ++other) {
      (*copies)->Map(StageName(other), {stages_[other], options.heap.size()});
    }
    options.heap_export = StageName(rank);
    options.heap_device = devices_[rank];
    options.copies = copies->get();
    copies_.push_back(std::move(*copies));
  }
  Must((*proxy)->AddEndpoint(std::move(options)).status());
  proxies_.push_back(std::move(*proxy));
}

gpu::NetworkConfig GpuNetwork::ConfigOf(uint32_t rank) const {
  const uint32_t node_begin = rank / shape_.node_size * shape_.node_size;
  return {.stages = stages_.data() + node_begin,
          .has_device_stages = !devices_.empty(),
          .has_fast_wire = !devices_.empty(),
          .signals = signals_.data() + node_begin,
          .rings = rings_.data() + rank * num_rings_,
          .num_rings = num_rings_};
}

}  // namespace jax_ep::testing
