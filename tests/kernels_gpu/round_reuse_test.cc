// Rounds take sets of places in turn. A model of the kernels' order, with ranks and proxies that
// run as fast or slowly as they like: nothing is written while somebody may still read it, and one
// set fewer would not do. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/gpu/network/token_slices.h"

namespace jax_ep::gpu {
namespace {

constexpr int kNodes = 3, kNodeSize = 2, kRanks = kNodes * kNodeSize;
constexpr HtRounds kRounds{.tokens = kNetChunkTokens, .are_several = true};

// What a rank's stream does with a round, rounds being counted over all calls.
enum class Kind { kSend, kUse };
struct Step {
  Kind kind;
  int round;
  int left;  // mates must have used this round before a combine sends; -1: none
  bool begins_call;
};

std::vector<Step> StepsOfCalls(std::mt19937& random) {
  std::vector<Step> steps;
  int first = 0;
  for (int call = 0; call < 6; ++call) {
    const uint64_t num_tokens = 1 + random() % (6 * kNetChunkTokens);
    const TokenCut cut(num_tokens, kRounds, kNodes, /*has_fast_wire=*/random() % 2 == 0,
                       /*num_least=*/random() % 8);
    const auto add = [&](Kind kind, const TokenSlice& slice) -> const char* {
      steps.push_back({.kind = kind,
                       .round = first + static_cast<int>(slice.round()),
                       .left = first + static_cast<int>(slice.num_left()) - 1,
                       .begins_call = kind == Kind::kSend && slice.IsFirst()});
      if (slice.num_left() == 0) steps.back().left = -1;
      return nullptr;
    };
    const auto send = [&](const SliceSpan& slices) {
      EXPECT_EQ(slices.count(), 1u);
      return add(Kind::kSend, slices.At(0));
    };
    const auto use = [&](const TokenSlice& slice) { return add(Kind::kUse, slice); };
    EXPECT_EQ(cut.ForEachSlice(/*sends_round=*/true, send, use), nullptr);
    first += static_cast<int>(cut.num_slices());
  }
  return steps;
}

// Newest rounds, by rank.
class Model {
 public:
  Model(std::vector<Step> steps, bool is_combine)
      : steps_(std::move(steps)), is_combine_(is_combine) {}

  // Until all ranks are through, in an order drawn by `random`. How often a place was written while
  // somebody was not done with it.
  int Run(int stage_sets, int reduce_sets, std::mt19937& random) {
    while (std::any_of(next_.begin(), next_.end(), [&](size_t n) { return n < steps_.size(); })) {
      const int actor = static_cast<int>(random() % (kRanks * (1 + kNodes)));
      if (actor < kRanks) {
        RunRank(actor, stage_sets, reduce_sets);
      } else {
        RunProxy((actor - kRanks) / kNodes, (actor - kRanks) % kNodes, stage_sets);
      }
    }
    return num_hazards_;
  }

 private:
  static int NodeOf(int rank) { return rank / kNodeSize; }
  template <typename Function>
  static void ForMates(int rank, Function&& visit) {
    for (int local = 0; local < kNodeSize; ++local) visit(NodeOf(rank) * kNodeSize + local);
  }

  void RunRank(int rank, int stage_sets, int reduce_sets) {
    if (next_[rank] == steps_.size()) return;
    const Step& step = steps_[next_[rank]];
    if (step.kind == Kind::kSend) {
      if (is_combine_ && !HasReducePlaces(rank, step)) return;
      // Partials go to mates, rows and sums to the own stage, which proxies read.
      if (is_combine_) {
        ForMates(rank, [&](int mate) { num_hazards_ += used_[mate] < step.round - reduce_sets; });
      }
      for (int node = 0; node < kNodes; ++node) {
        num_hazards_ += node != NodeOf(rank) && moved_[rank][node] < step.round - stage_sets;
      }
      sent_[rank] = step.round;
    } else {
      if (!HasArrived(rank, step.round)) return;
      reading_[rank] = step.round;
      // A dispatch leaves with its mates, whose stages it reads; a combine reads its own.
      bool all_are_here = true;
      if (!is_combine_) {
        ForMates(rank, [&](int mate) { all_are_here &= reading_[mate] >= step.round; });
      }
      if (!all_are_here) return;
      used_[rank] = step.round;
    }
    ++next_[rank];
  }
  bool HasReducePlaces(int rank, const Step& step) const {
    bool are_free = true;
    ForMates(rank, [&](int mate) {
      if (step.begins_call) are_free &= used_[mate] >= step.round - 1;  // it has entered this call
      are_free &= used_[mate] >= step.left;
    });
    return are_free;
  }
  // What the ranks of the rail have sent, in a dispatch those of all rails.
  bool HasArrived(int rank, int round) const {
    for (int source = 0; source < kRanks; ++source) {
      if (NodeOf(source) == NodeOf(rank)) continue;
      if (is_combine_ && source % kNodeSize != rank % kNodeSize) continue;
      if (moved_[source][NodeOf(rank)] < round) return false;
    }
    return true;
  }
  // Moves a round from a rank to the rail mate in a node, over what is in the set there.
  void RunProxy(int source, int node, int stage_sets) {
    if (node == NodeOf(source) || moved_[source][node] == sent_[source]) return;
    const int round = ++moved_[source][node];
    const int target = node * kNodeSize + source % kNodeSize;
    ForMates(target, [&](int mate) {
      if (!is_combine_ || mate == target) num_hazards_ += used_[mate] < round - stage_sets;
    });
  }

  static std::vector<int> Nothing() { return std::vector<int>(kRanks, -1); }

  const std::vector<Step> steps_;
  const bool is_combine_;
  std::vector<size_t> next_ = std::vector<size_t>(kRanks, 0);
  std::vector<int> sent_ = Nothing(), reading_ = Nothing(), used_ = Nothing();
  std::vector<std::vector<int>> moved_ = std::vector(kRanks, std::vector<int>(kNodes, -1));
  int num_hazards_ = 0;
};

int HazardsOf(bool is_combine, int stage_sets, int reduce_sets) {
  std::mt19937 random(1);
  int num_hazards = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    num_hazards += Model(StepsOfCalls(random), is_combine).Run(stage_sets, reduce_sets, random);
  }
  return num_hazards;
}

constexpr int kStageSets = kRounds.num_stage_sets(), kReduceSets = kRounds.num_reduce_sets();

TEST(RoundReuse, NoPlaceIsWrittenBeforeItWasRead) {
  EXPECT_EQ(HazardsOf(/*is_combine=*/false, kStageSets, kReduceSets), 0);
  EXPECT_EQ(HazardsOf(/*is_combine=*/true, kStageSets, kReduceSets), 0);
}

TEST(RoundReuse, OneSetFewerWouldNotDo) {
  EXPECT_GT(HazardsOf(/*is_combine=*/false, kStageSets - 1, kReduceSets), 0);
  EXPECT_GT(HazardsOf(/*is_combine=*/true, kStageSets - 1, kReduceSets), 0);
  EXPECT_GT(HazardsOf(/*is_combine=*/true, kStageSets, kReduceSets - 1), 0);
}

}  // namespace
}  // namespace jax_ep::gpu
