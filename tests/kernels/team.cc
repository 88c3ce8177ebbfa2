#include "tests/kernels/team.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "tests/kernels/network.h"

namespace jax_ep::testing {
namespace {

// Starting threads is dear on a busy machine, so the caller takes a share itself and a share of
// nothing gets no thread.
ParallelFor MakeParallelFor(int num_threads) {
  return [num_threads](int64_t num_items, const std::function<void(int64_t, int64_t)>& body) {
    const int64_t shares = std::max<int64_t>(1, std::min<int64_t>(num_items, num_threads));
    std::vector<std::jthread> threads;
    for (int64_t i = 1; i < shares; ++i) {
      threads.emplace_back(body, num_items * i / shares, num_items * (i + 1) / shares);
    }
    body(0, num_items / shares);
  };
}

}  // namespace

void Team::HeapDeleter::operator()(std::byte* heap) const { std::free(heap); }

Team::Team(const TeamOptions& options)
    : options_(options), counters_(options.shape.num_ranks), ranks_(options.shape.num_ranks) {
  const GroupShape& shape = options_.shape;
  const HeapLayout layout = HeapLayout::Make(shape);
  for (uint32_t r = 0; r < shape.num_ranks; ++r) {
    void* heap = std::aligned_alloc(kAreaAlignBytes, layout.total_bytes);
    std::memset(heap, 0, layout.total_bytes);
    heaps_.emplace_back(static_cast<std::byte*>(heap));
  }
  for (uint32_t r = 0; r < shape.num_ranks; ++r) {
    Rank& rank = ranks_[r];
    rank.group_name = "test";
    rank.shape = shape;
    rank.layout = layout;
    rank.rank = r;
    rank.failure = &failure_;
    rank.timeout = options_.timeout;
    rank.parallel_for = MakeParallelFor(options_.threads_per_rank);
    rank.counters = &counters_[r];
    rank.counters->Allocate(shape);
    for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
      const bool is_mate = peer / shape.node_size == r / shape.node_size;
      rank.heaps.push_back(is_mate ? heaps_[peer].get() : nullptr);
      rank.in_process.push_back(is_mate && (peer == r || options_.in_process));
    }
  }
  for (Rank& rank : ranks_) PretendCalls(rank);
  if (shape.num_nodes() > 1) {  // proxies count on from the flags
    network_ = Network::Create(ranks_, options_.faulty_spec, &failure_);
  }
}

Team::~Team() = default;

void Team::PretendCalls(Rank& rank) {
  const uint64_t first = options_.first_epoch;
  rank.epochs = {first, first, first, first, first, first, first,
                 first, first, first, first, first, first};
  for (Rank::SlotSets* sets :
       {&rank.dispatch_sets, &rank.combine_sets, &rank.ll_dispatch_sets, &rank.ll_combine_sets}) {
    for (Rank::SlotSet& set : *sets) set = {.epoch = first, .done_seq = first};
  }
  for (uint32_t channel = 0; channel < kNumChannels; ++channel) {
    if (static_cast<Channel>(channel) == Channel::kBarrier) continue;
    for (uint32_t source = 0; source < num_ranks(); ++source) {
      const uint64_t offset = rank.layout.flag_offset(static_cast<Channel>(channel), source);
      reinterpret_cast<std::atomic<uint64_t>*>(rank.heaps[rank.rank] + offset)->store(first);
    }
  }
}

std::vector<Status> Team::Run(const std::function<Status(Rank&)>& body) {
  std::vector<Status> statuses(ranks_.size());
  {
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      threads.emplace_back([&, r] { statuses[r] = body(ranks_[r]); });
    }
  }
  return statuses;
}

}  // namespace jax_ep::testing
