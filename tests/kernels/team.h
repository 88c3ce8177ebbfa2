// A team of ranks in one test process: heaps, one thread per rank, and proxies between virtual
// nodes. `in_process` = false makes node-mates exchange through their heaps as if each lived in a
// process of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/launch.h"
#include "proxy/base/failure.h"

namespace jax_ep::testing {

// Of a group of which one with shape `view` is a view.
inline GroupShape ShapeWithMoreRoom(GroupShape view) {
  constexpr uint32_t kMostTopK = 64;  // on GPUs
  view.num_experts += 3 * view.num_ranks;
  view.top_k = std::min(view.top_k + 5, kMostTopK);
  view.hidden += view.hidden % 8 == 0 ? 24 : 11;  // rows of 16-byte words stay such
  view.align *= 3;
  return view;
}

class Network;  // proxies of a team with several nodes: network.cc

struct TeamOptions {
  GroupShape shape;
  bool in_process = true;
  int threads_per_rank = 1;  // of parallel_for
  std::string faulty_spec;
  std::chrono::nanoseconds timeout = std::chrono::seconds(60);
  uint64_t first_epoch = 0;  // calls of every kind that the team seems to have behind it
};

class Team {
 public:
  explicit Team(const TeamOptions& options);
  ~Team();

  const GroupShape& shape() const { return options_.shape; }
  uint32_t num_ranks() const { return options_.shape.num_ranks; }
  Rank& rank(uint32_t index) { return ranks_[index]; }
  FailureLatch& failure() { return failure_; }
  const RankCounters& counters(uint32_t index) const { return counters_[index]; }

  // Runs body(rank) on one thread per rank and joins them; the Status of each.
  std::vector<Status> Run(const std::function<Status(Rank&)>& body);

 private:
  void PretendCalls(Rank& rank);  // options_.first_epoch of each kind

  struct HeapDeleter {
    void operator()(std::byte* heap) const;
  };

  TeamOptions options_;
  FailureLatch failure_;
  std::vector<std::unique_ptr<std::byte, HeapDeleter>> heaps_;
  std::vector<RankCounters> counters_;
  std::vector<Rank> ranks_;
  std::unique_ptr<Network> network_;
};

// An array with poison inside before the call and a canary behind: CheckCanary fails the test if a
// kernel wrote beyond the end.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t count = 0) : count_(count), cells_(count + kCanaryCells) {
    auto* bytes = reinterpret_cast<unsigned char*>(cells_.data());
    for (size_t i = 0; i < cells_.size() * sizeof(T); ++i) bytes[i] = kPoison;
  }
  std::span<T> span() { return {cells_.data(), count_}; }
  std::span<const T> span() const { return {cells_.data(), count_}; }
  T* data() { return cells_.data(); }
  const T* data() const { return cells_.data(); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return cells_[i]; }
  const T& operator[](size_t i) const { return cells_[i]; }

  bool HasCanary() const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(cells_.data() + count_);
    for (size_t i = 0; i < kCanaryCells * sizeof(T); ++i) {
      if (bytes[i] != kPoison) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kPoison = 0xa5;
  static constexpr size_t kCanaryCells = 64;
  size_t count_;
  std::vector<T> cells_;
};

}  // namespace jax_ep::testing
