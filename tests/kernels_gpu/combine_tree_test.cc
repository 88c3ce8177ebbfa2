// The orders in which combines add partials give the sums of the fixed tree, whatever ranks there
// are, and as few waiting sums as they say. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/gpu/sums/tree.h"

namespace jax_ep {
namespace {

using gpu::team::TreeOrder;

// Sums as texts, neighbours in alphabetical order: additions commute.
std::string Add(const std::string& a, const std::string& b) {
  return "(" + std::min(a, b) + "+" + std::max(a, b) + ")";
}

// The fixed tree of docs/semantics.md over the ranks from `begin` on.
std::string TreeSum(uint64_t present, uint32_t begin, uint32_t size) {
  if (size == 1) return (present >> begin & 1) != 0 ? std::to_string(begin) : "";
  const std::string left = TreeSum(present, begin, size / 2);
  const std::string right = TreeSum(present, begin + size / 2, size / 2);
  if (left.empty() || right.empty()) return left + right;
  return Add(left, right);
}

// Does what a reducer of rank `own` does. Returns how many sums waited at once; 64 if the result is
// wrong.
size_t MostWaiting(uint64_t present, uint32_t own) {
  constexpr size_t kWrong = 64;
  uint64_t leaves = 0;
  for (uint32_t rank = 0; rank < 64; ++rank) leaves |= (present >> rank & 1) << (rank ^ own);
  const TreeOrder order(leaves);
  std::vector<std::optional<uint32_t>> ranks(static_cast<size_t>(std::popcount(present)));
  for (uint32_t rank = 0; rank < 64; ++rank) {
    if ((present >> rank & 1) == 0) continue;
    const uint32_t position = order.NumBefore(rank ^ own);
    if (position >= ranks.size() || ranks[position].has_value()) return kWrong;
    ranks[position] = rank;
  }
  std::vector<std::string> waiting;
  std::string sum;
  size_t most = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::string partial = std::to_string(*ranks[i]);
    const uint32_t ops = order.OpsAfter(*ranks[i] ^ own);
    sum = order.Begins(*ranks[i] ^ own) ? partial : Add(sum, partial);
    if ((ops & gpu::team::kEndsSum) == 0) continue;
    for (uint32_t merges = ops >> gpu::team::kMergesShift & gpu::team::kMergesMask; merges > 0;
         --merges) {
      if (waiting.empty()) return kWrong;
      sum = Add(waiting.back(), sum);
      waiting.pop_back();
    }
    if ((ops & gpu::team::kPushes) != 0) waiting.push_back(sum);
    most = std::max(most, waiting.size());
    if (((ops & gpu::team::kIsResult) != 0) != (i + 1 == ranks.size())) return kWrong;
  }
  return waiting.empty() && sum == TreeSum(present, 0, 64) ? most : kWrong;
}

TEST(CombineTree, AllSetsOfUpToEightRanks) {
  constexpr size_t kMost[] = {0, 0, 1, 2};  // of 2^n ranks
  for (uint64_t present = 1; present < 1u << 8; ++present) {
    const auto levels = static_cast<uint32_t>(std::bit_width(std::bit_width(present) - 1u));
    for (uint32_t own = 0; own < 8; ++own) {
      EXPECT_LE(MostWaiting(present, own), kMost[levels]) << present << " at rank " << own;
    }
  }
}

// Does what lanes do: all leaves in turn, absent ones too.
std::string SumOfLeaves(uint64_t present, uint32_t num_leaves) {
  constexpr uint32_t kLevels = 7;
  const auto join = [](const std::string& a, const std::string& b) {
    return a.empty() || b.empty() ? a + b : Add(a, b);
  };
  std::string waiting[kLevels];
  std::string sum;
  for (uint32_t leaf = 0; leaf < num_leaves; ++leaf) {
    sum = (present >> leaf & 1) != 0 ? std::to_string(leaf) : "";
    gpu::AddToTree<kLevels>(leaf, leaf + 1 == num_leaves, [&](uint32_t level, bool is_right) {
      is_right ? sum = join(waiting[level], sum) : waiting[level] = sum;
    });
  }
  return sum;
}

TEST(CombineTree, AllLeavesInTurn) {
  for (uint32_t num_leaves = 1; num_leaves <= 9; ++num_leaves) {
    for (uint64_t present = 0; present < 1u << num_leaves; ++present) {
      EXPECT_EQ(SumOfLeaves(present, num_leaves), TreeSum(present, 0, 64)) << present;
    }
  }
  std::mt19937_64 random(2);
  for (int i = 0; i < 300; ++i) {
    const uint64_t present = random();
    EXPECT_EQ(SumOfLeaves(present, 64), TreeSum(present, 0, 64)) << std::hex << present;
  }
}

// Of the leaves [begin, begin + size), by halves.
std::string SumOfHalves(const std::vector<bool>& present, uint32_t begin, uint32_t size) {
  if (size == 1) return begin < present.size() && present[begin] ? std::to_string(begin) : "";
  const std::string left = SumOfHalves(present, begin, size / 2);
  const std::string right = SumOfHalves(present, begin + size / 2, size / 2);
  return left.empty() || right.empty() ? left + right : Add(left, right);
}

// More leaves than levels in registers: those above wait elsewhere.
TEST(CombineTree, ManyLeavesInTurn) {
  constexpr uint32_t kLevels = 3, kMost = 11;
  std::mt19937 random(3);
  for (const uint32_t num_leaves : {4u, 8u, 9u, 16u, 100u, 129u, 144u, 200u, 1000u, 1024u, 2048u}) {
    for (const uint32_t one_of : {1u, 3u, 50u}) {
      std::vector<bool> present(num_leaves);
      for (uint32_t leaf = 0; leaf < num_leaves; ++leaf) present[leaf] = random() % one_of == 0;
      std::string waiting[kMost], sum;
      const auto visit = [&](uint32_t level, bool is_right) {
        std::string& other = waiting[level];
        if (!is_right) {
          other = sum;
        } else {
          sum = other.empty() || sum.empty() ? other + sum : Add(other, sum);
        }
      };
      for (uint32_t leaf = 0; leaf < num_leaves; ++leaf) {
        sum = present[leaf] ? std::to_string(leaf) : "";
        const bool is_last = leaf + 1 == num_leaves;
        gpu::AddToLargeTree<kLevels, kMost>(leaf, is_last, num_leaves, visit, visit);
      }
      EXPECT_EQ(sum, SumOfHalves(present, 0, 1u << kMost)) << num_leaves << " leaves";
    }
  }
}

TEST(CombineTree, RandomSetsOfUpToSixtyFourRanks) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 3000; ++i) {
    uint64_t present = random();
    for (uint64_t sparser = random() % 4; sparser > 0; --sparser) present &= random();
    if (i % 10 == 0) present = ~uint64_t{0};
    const uint32_t num_ranks = uint32_t{1} << (4 + i % 3);
    if (num_ranks < 64) present &= (uint64_t{1} << num_ranks) - 1;
    if (present == 0) continue;
    const auto own = static_cast<uint32_t>(random() % num_ranks);
    EXPECT_LE(MostWaiting(present, own), static_cast<size_t>(3 + i % 3))
        << std::hex << present << " at rank " << std::dec << own;
  }
}

}  // namespace
}  // namespace jax_ep
