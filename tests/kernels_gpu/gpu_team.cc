#include "tests/kernels_gpu/gpu_team.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "kernels/gpu/protocol/heap_layout.h"
#include "kernels/layout.h"
#include "tests/kernels_gpu/gpu_network.h"

namespace jax_ep::testing {
namespace {

const char* Must(const char* error) {
  if (error == nullptr) return nullptr;
  std::fprintf(stderr, "%s\n", error);
  std::abort();
}

// Read when the first context is made.
[[maybe_unused]] const bool has_connections = [] {
  return setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kStreamsOfAGpu).c_str(), 1) == 0;
}();

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

uint32_t RanksOfAGpu(uint32_t num_ranks) {
  const auto num_devices = static_cast<uint32_t>(NumDevices());
  return (num_ranks + num_devices - 1) / num_devices;
}

uint32_t SmsThatFit(uint32_t wanted, uint32_t num_ranks) {
  constexpr uint32_t kSmsForRanks = 48;  // 8/3 of it: 128 of an H100's 132
  return std::min(wanted, kSmsForRanks / RanksOfAGpu(num_ranks));
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
    if (options_.maps_heaps) {
      std::vector<int> devices(static_cast<size_t>(NumDevices()));
      std::iota(devices.begin(), devices.end(), 0);
      Must(api->memory->allocate(rank.device, heap_bytes, api->kept_bytes(&options_.shape),
                                 /*for_nics=*/false, devices.data(), NumDevices(), &rank.mapped));
      rank.heap = rank.mapped.base;
    } else {
      CheckCuda(cudaMalloc(&rank.heap, heap_bytes), "heap");
      CheckCuda(cudaMemset(rank.heap, 0, heap_bytes), "heap");
    }
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
    std::vector<int> devices;
    for (const RankState& rank : ranks_) {
      if (options_.has_device_stages) devices.push_back(rank.device);
    }
    network_ =
        std::make_unique<GpuNetwork>(shape, options_.num_rings, options_.network_slots, devices);
  }
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    if (!is_active(r)) peers[r] = {};
  }
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    if (!is_active(r)) continue;
    UseDeviceOf(r);
    gpu::RankConfig config;
    config.active = options_.active;
    config.is_elastic = options_.active != ~uint64_t{0};
    config.shape = shape;
    config.rank = r;
    config.device = ranks_[r].device;
    const auto has = [r](uint64_t bits) { return HasRank(bits, r); };
    std::vector<gpu::PeerMemory> seen = peers;
    if (has(options_.staged_ranks)) seen[r].arena = nullptr;
    config.peers = seen.data() + r / shape.node_size * shape.node_size;
    gpu::NetworkConfig network;
    if (network_ != nullptr) {
      network = network_->ConfigOf(r);
      network.least_slice_bytes = options_.least_slice_bytes;
      config.network = &network;
    }
    config.status = ranks_[r].status;
    config.timeout_ns = options_.timeout_ns;
    config.max_sms = has(options_.narrow_ranks) ? 1 : options_.max_sms;
    config.use_tma = options_.use_tma && !has(options_.plain_ranks);
    config.debug = options_.debug;
    config.piece_bytes = options_.piece_bytes;
    config.ring_slots = options_.ring_slots;
    Must(api->create(&config, &ranks_[r].handle));
  }
}

GpuTeam::~GpuTeam() {
  Close();
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    UseDeviceOf(r);
    RankState& rank = ranks_[r];
    CheckCuda(cudaStreamDestroy(rank.stream), "stream");
    if (!options_.maps_heaps) CheckCuda(cudaFree(rank.heap), "free");
    CheckCuda(cudaFree(rank.arena), "free");
  }
}

void GpuTeam::Close() {
  if (std::exchange(is_closed_, true)) return;
  Synchronize();
  const gpu::GpuApi* api = jax_ep_gpu_api();
  for (RankState& rank : ranks_) {
    if (rank.handle != nullptr) Must(api->destroy(std::exchange(rank.handle, nullptr)));
  }
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    UseDeviceOf(r);
    Must(api->memory->retire(ranks_[r].mapped));
    CheckCuda(cudaFreeHost(ranks_[r].status), "free");
  }
  network_.reset();
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
    if (!is_active(r)) continue;
    UseDeviceOf(r);
    if (const char* error = launch(r)) wrong += error;
  }
  Synchronize();
  return wrong;
}

namespace {

void PrintWait(uint32_t rank, const gpu::RankStatus& status) {
  const gpu::WaitNote& wait = status.wait;
  std::fprintf(
      stderr,
      "rank %u: failed %u kind %u; has waited %.1f s in operation %u of epoch %lu for rank "
      "%u, value %lx, saw %lx\n",
      rank, status.failed.load(), status.kind, static_cast<double>(wait.waited_ns.load()) * 1e-9,
      wait.operation.load(), wait.epoch.load(), wait.peer.load(), wait.expected.load(),
      wait.actual.load());
}

}  // namespace

void GpuTeam::SynchronizeOrDie() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    UseDeviceOf(r);
    cudaError_t state = cudaErrorNotReady;
    while ((state = cudaStreamQuery(ranks_[r].stream)) == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() > deadline) {
        std::fprintf(stderr, "rank %u still runs after 20 s\n", r);
        for (uint32_t rank = 0; rank < num_ranks(); ++rank) PrintWait(rank, *ranks_[rank].status);
        std::abort();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CheckCuda(state, "a stream");
  }
}

void GpuTeam::Synchronize() {
  for (uint32_t r = 0; r < num_ranks(); ++r) {
    CheckCuda(cudaStreamSynchronize(ranks_[r].stream), "synchronize");
  }
}

}  // namespace jax_ep::testing
