// A team of GPU ranks in one test process, spread over the devices that there are (several ranks
// may share a device), and device arrays with poison inside and a canary behind.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/gpu/api.h"
#include "kernels/gpu/memory/device_memory.h"

namespace jax_ep::testing {

inline void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

int NumDevices();

// Work of so many streams goes to a GPU side by side; of more, the kernels of one may stand behind
// another's that waits for them. As many as CUDA can have: gpu_team.cc asks for them.
inline constexpr uint32_t kStreamsOfAGpu = 32;
uint32_t RanksOfAGpu(uint32_t num_ranks);
// `wanted` blocks of HT kernels per rank, or fewer: ranks of one GPU wait for each other, so their
// blocks (LL: 8/3 as many) must all run at once.
uint32_t SmsThatFit(uint32_t wanted, uint32_t num_ranks);

struct GpuTeamOptions {
  GroupShape shape;
  bool in_place = true;  // peers read x and weights in the arena, not in the stage
  bool use_tma = true;
  bool debug = false;
  uint32_t max_sms = 16;
  uint32_t piece_bytes = 0;
  uint32_t ring_slots = 0;
  uint64_t timeout_ns = 20'000'000'000;
  uint64_t arena_bytes = uint64_t{256} << 20;
  // Heaps of DeviceMemoryApi, as groups have them; else of cudaMalloc, whose ends sanitizers know.
  bool maps_heaps = false;
  // Bits of ranks that differ from the others: their arrays go through the stage, they have no bulk
  // copies, they have one SM.
  uint64_t staged_ranks = 0, plain_ranks = 0, narrow_ranks = 0;
  // Bits of the ranks that there are; the others have no handle, and nobody their memory.
  uint64_t active = ~uint64_t{0};
  uint64_t operations_before = 0;  // that the ranks count as theirs: the next one's number is + 1
  // Of a shape with several nodes.
  uint32_t num_rings = 1;
  uint32_t network_slots = 64;  // of a ring; few: producers meet a full one
  bool has_device_stages = false;
  // Of slices of HT calls: small calls have several, too. 0: as groups have them.
  uint64_t least_slice_bytes = 1;
};

// Whether a rank is among those of GpuTeamOptions; of the 65th on all bits are like the last one.
constexpr bool HasRank(uint64_t bits, uint32_t rank) {
  return static_cast<int64_t>(bits) >> std::min(rank, 63u) & 1;
}

class GpuNetwork;  // between nodes: gpu_network.h

class GpuTeam {
 public:
  explicit GpuTeam(const GpuTeamOptions& options);
  ~GpuTeam();  // Close; no graph of the team's calls is replayed any more
  GpuTeam(const GpuTeam&) = delete;
  GpuTeam& operator=(const GpuTeam&) = delete;

  const GroupShape& shape() const { return options_.shape; }
  uint32_t num_ranks() const { return options_.shape.num_ranks; }
  bool is_active(uint32_t rank) const { return HasRank(options_.active, rank); }
  gpu::RankHandle* handle(uint32_t rank) { return ranks_[rank].handle; }
  cudaStream_t stream(uint32_t rank) { return ranks_[rank].stream; }
  gpu::RankStatus& status(uint32_t rank) { return *ranks_[rank].status; }
  std::byte* heap(uint32_t rank) { return ranks_[rank].heap; }
  void UseDeviceOf(uint32_t rank) { CheckCuda(cudaSetDevice(ranks_[rank].device), "set device"); }

  // Memory of the rank's arena until the next Reset, at `misalignment` bytes past 256.
  std::byte* Allocate(uint32_t rank, uint64_t bytes, uint64_t misalignment = 0);
  void Reset();

  // What GpuSession::Close does: from now on only graphs captured before may run on the streams.
  // Arenas stay, as XLA's do.
  void Close();
  // Of a team that maps heaps.
  gpu::DeviceRange mapped_heap(uint32_t rank) const { return ranks_[rank].mapped; }

  // launch(rank), of active ranks, returns an error text or null; then waits for all streams.
  std::string Run(const std::function<const char*(uint32_t rank)>& launch);
  void Synchronize();
  // Ends the process if a stream is not idle within 20 s: what hangs cannot be torn down.
  void SynchronizeOrDie();

 private:
  struct RankState {
    int device = 0;
    cudaStream_t stream = nullptr;
    std::byte* heap = nullptr;
    gpu::DeviceRange mapped;  // the heap, if the team maps heaps
    std::byte* arena = nullptr;
    uint64_t arena_used = 0;
    gpu::RankStatus* status = nullptr;
    gpu::RankHandle* handle = nullptr;
  };
  GpuTeamOptions options_;
  std::vector<RankState> ranks_;
  std::unique_ptr<GpuNetwork> network_;
  bool is_closed_ = false;
};

// A device copy of a host array.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  // Input: what `host` holds.
  static DeviceArray Input(GpuTeam& team, uint32_t rank, std::span<const T> host,
                           uint64_t misalignment = 0) {
    DeviceArray array(team, rank, host.size(), misalignment);
    array.Upload(host);
    return array;
  }
  // Output: poison, and a canary behind it.
  static DeviceArray Output(GpuTeam& team, uint32_t rank, size_t count, uint64_t misalignment = 0) {
    DeviceArray array(team, rank, count, misalignment);
    array.Poison();
    return array;
  }
  void Upload(std::span<const T> host) {
    CheckCuda(cudaMemcpy(data_, host.data(), host.size_bytes(), cudaMemcpyHostToDevice), "upload");
  }
  void Poison() {
    CheckCuda(cudaMemset(data_, kPoison, count_ * sizeof(T) + kCanaryBytes), "poison");
  }
  std::vector<T> Download() const {
    std::vector<T> host(count_);
    CheckCuda(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              "download");
    return host;
  }
  bool HasCanary() const {
    std::vector<unsigned char> canary(kCanaryBytes);
    CheckCuda(cudaMemcpy(canary.data(), reinterpret_cast<std::byte*>(data_) + count_ * sizeof(T),
                         kCanaryBytes, cudaMemcpyDeviceToHost),
              "canary");
    for (const unsigned char byte : canary) {
      if (byte != kPoison) return false;
    }
    return true;
  }
  T* data() const { return data_; }
  std::span<T> span() const { return {data_, count_}; }

 private:
  static constexpr unsigned char kPoison = 0xa5;
  static constexpr size_t kCanaryBytes = 512;
  DeviceArray(GpuTeam& team, uint32_t rank, size_t count, uint64_t misalignment) : count_(count) {
    data_ =
        reinterpret_cast<T*>(team.Allocate(rank, count * sizeof(T) + kCanaryBytes, misalignment));
  }
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace jax_ep::testing
