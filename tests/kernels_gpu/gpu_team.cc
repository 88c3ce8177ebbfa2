#include "tests/kernels_gpu/gpu_team.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/gpu/heap_layout.h"
#include "kernels/layout.h"
#include "tests/kernels_gpu/gpu_network.h"

namespace jax_ep::testing {
namespace {

const char* Must(const char* error) {
  if (error == nullptr) return nullptr;
  std::fprintf(stderr, "%s\n", error);
  std::abort();
}

void EnablePeers() {
  static const bool once = [] {
    for (int device = 0; device < NumDevices(); ++device) {
      CheckCuda(cudaSetDevice(device), "set device");
      for (int peer = 0; peer < NumDevices(); ++peer) {
        if (peer != device) CheckCuda(cudaDeviceEnablePeerAccess(peer, 0), "peer access");
      }
    }
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

int NumDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
  return count;
}

GpuTeam::GpuTeam(const GpuTeamOptions& options)
    : options_(options), ranks_(options.shape.num_ranks) {
  EnablePeers();
  const gpu::GpuApi* api = jax_ep_gpu_api();
  const uint64_t heap_bytes = api->heap_bytes(&options_.shape);
  std::vector<gpu::PeerMemory> peers(num_ranks());
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    RankState& rank = ranks_[r];
    rank.device = static_cast<int>(r) % NumDevices();
    UseDeviceOf(r);
    CheckCuda(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "stream");
    CheckCuda(cudaMalloc(&rank.heap, heap_bytes), "heap");
    CheckCuda(cudaMemset(rank.heap, 0, heap_bytes), "heap");
    const uint64_t sequence =
        gpu::GpuHeapLayout::Make(options_.shape).control + offsetof(gpu::Control, sequence);
    CheckCuda(cudaMemcpy(rank.heap + sequence, &options_.operations_before,
                         sizeof(options_.operations_before), cudaMemcpyHostToDevice),
              "heap");
    CheckCuda(cudaMalloc(&rank.arena, options_.arena_bytes), "arena");
    CheckCuda(cudaHostAlloc(&rank.status, sizeof(gpu::RankStatus),
                            cudaHostAllocMapped | cudaHostAllocPortable),
              "status");
    std::memset(static_cast<void*>(rank.status), 0, sizeof(gpu::RankStatus));
    CheckCuda(cudaDeviceSynchronize(), "synchronize");
    peers[r].heap = rank.heap;
    if (options_.in_place) {
      peers[r].arena = rank.arena;
      peers[r].arena_bytes = options_.arena_bytes;
    }
  }
  const GroupShape& shape = options_.shape;
  if (shape.num_nodes() > 1) {
    network_ = std::make_unique<GpuNetwork>(shape, options_.num_rings, options_.network_slots);
  }
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    UseDeviceOf(r);
    gpu::RankConfig config;
    config.shape = shape;
    config.rank = r;
    config.device = ranks_[r].device;
    config.peers = peers.data() + r / shape.node_size * shape.node_size;
    gpu::NetworkConfig network;
    if (network_ != nullptr) {
      network = network_->ConfigOf(r);
      config.network = &network;
    }
    config.status = ranks_[r].status;
    config.timeout_ns = options_.timeout_ns;
    config.max_sms = options_.max_sms;
    config.use_tma = options_.use_tma;
    config.debug = options_.debug;
    config.piece_bytes = options_.piece_bytes;
    config.ring_slots = options_.ring_slots;
    Must(api->create(&config, &ranks_[r].handle));
  }
}

GpuTeam::~GpuTeam() {
  Synchronize();
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    UseDeviceOf(r);
    RankState& rank = ranks_[r];
    jax_ep_gpu_api()->destroy(rank.handle);
    CheckCuda(cudaStreamDestroy(rank.stream), "stream");
    CheckCuda(cudaFree(rank.heap), "free");
    CheckCuda(cudaFree(rank.arena), "free");
    CheckCuda(cudaFreeHost(rank.status), "free");
  }
}

std::byte* GpuTeam::Allocate(uint32_t rank, uint64_t bytes, uint64_t misalignment) {
  UseDeviceOf(rank);
  RankState& state = ranks_[rank];
  const uint64_t begin = AlignUp(state.arena_used, 256) + misalignment;
  state.arena_used = begin + bytes;
  if (state.arena_used > options_.arena_bytes) {
    std::fprintf(stderr, "arena of %lu bytes is too small\n", options_.arena_bytes);
    std::abort();
  }
  return state.arena + begin;
}

void GpuTeam::Reset() {
  for (RankState& rank : ranks_) rank.arena_used = 0;
}

std::string GpuTeam::Run(const std::function<const char*(uint32_t rank)>& launch) {
  std::string wrong;
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    UseDeviceOf(r);
    if (const char* error = launch(r)) wrong += error;
  }
  Synchronize();
  return wrong;
}

void GpuTeam::Synchronize() {
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    CheckCuda(cudaStreamSynchronize(ranks_[r].stream), "synchronize");
  }
}

}  // namespace jax_ep::testing
