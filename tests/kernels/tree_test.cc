#include "kernels/cpu/tree.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "kernels/cpu/rows.h"

namespace jax_ep {
namespace {

constexpr uint64_t kHidden = 1037;  // three chunks, the last one odd

using Row = std::vector<float>;
using Absent = std::optional<Row>;

GroupShape Shape(uint32_t num_ranks, uint32_t node_size, bool f32_partials = true,
                 ElemType type = ElemType::kF32) {
  GroupShape shape;
  shape.num_ranks = num_ranks;
  shape.node_size = node_size;
  shape.hidden = kHidden;
  shape.f32_partials = f32_partials;
  shape.elem_type = type;
  return shape;
}

Absent Add(const Absent& a, const Absent& b) {
  if (!a) return b;
  if (!b) return a;
  Row sum(kHidden);
  for (size_t i = 0; i < kHidden; ++i) sum[i] = (*a)[i] + (*b)[i];
  return sum;
}

// ((0,1),(2,3)),...: level by level, an odd one out is carried up.
Absent Tree(std::vector<Absent> level) {
  while (level.size() > 1) {
    std::vector<Absent> next;
    for (size_t i = 0; i < level.size(); i += 2) {
      next.push_back(i + 1 < level.size() ? Add(level[i], level[i + 1]) : level[i]);
    }
    level = next;
  }
  return level[0];
}

struct Token {
  std::vector<std::unique_ptr<Row>> rows;
  std::vector<Term> terms;
  std::map<uint32_t, Row> partials;  // by rank, in f32
};

Token RandomToken(std::mt19937& random, uint32_t num_ranks) {
  std::normal_distribution<float> normal;
  Token token;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    for (auto n = random() % 3; n > 0; --n) {
      auto row = std::make_unique<Row>(kHidden);
      for (float& value : *row) value = normal(random);
      const float weight = random() % 4 == 0 ? 1.0f : normal(random);
      Row product(kHidden);
      for (size_t i = 0; i < kHidden; ++i) product[i] = weight * (*row)[i];
      Row& partial = token.partials[rank];
      partial = partial.empty() ? product : *Add(partial, product);
      Term term;
      term.row = reinterpret_cast<const std::byte*>(row->data());
      term.rank = rank;
      term.weight = weight;
      token.terms.push_back(term);
      token.rows.push_back(std::move(row));
    }
  }
  return token;
}

TEST(Tree, AddsRowsThenRanksThenNodesInOrder) {
  std::mt19937 random(1);
  for (const auto& [num_ranks, node_size] :
       {std::pair{1u, 1u}, {2u, 2u}, {3u, 3u}, {8u, 2u}, {8u, 8u}, {7u, 7u}, {12u, 3u}, {6u, 2u}}) {
    const GroupShape shape = Shape(num_ranks, node_size);
    auto sum = std::make_unique<TokenSum>(shape);
    for (int i = 0; i < 40; ++i) {
      const Token token = RandomToken(random, num_ranks);
      if (token.terms.empty()) continue;
      std::vector<Absent> nodes;
      for (uint32_t node = 0; node < shape.num_nodes(); ++node) {
        std::vector<Absent> ranks;
        for (uint32_t rank = node * node_size; rank < (node + 1) * node_size; ++rank) {
          const auto partial = token.partials.find(rank);
          ranks.push_back(partial == token.partials.end() ? Absent() : Absent(partial->second));
        }
        nodes.push_back(Tree(ranks));
      }
      Row got(kHidden, 77.0f);
      sum->Evaluate(token.terms, SumLevel::kToken, reinterpret_cast<std::byte*>(got.data()));
      ASSERT_EQ(got, *Tree(nodes)) << num_ranks << " ranks in nodes of " << node_size;
    }
  }
}

// Rows, rank partials and node partials of the same token end in the same bits.
TEST(Tree, PartialsAnywhereOnTheWayChangeNothing) {
  std::mt19937 random(2);
  for (const bool f32_partials : {true, false}) {
    const ElemType type = ElemType::kBf16;
    const GroupShape shape = Shape(8, 4, f32_partials, type);
    auto sum = std::make_unique<TokenSum>(shape);
    for (int i = 0; i < 30; ++i) {
      Token token = RandomToken(random, 8);
      if (token.terms.empty()) continue;
      for (size_t n = 0; n < token.terms.size(); ++n) {  // rows of bf16
        StoreRounded(type, reinterpret_cast<std::byte*>(token.rows[n]->data()),
                     std::vector<float>(*token.rows[n]).data(), kHidden);
      }
      std::vector<std::byte> direct(kHidden * 2), staged(kHidden * 2);
      sum->Evaluate(token.terms, SumLevel::kToken, direct.data());

      const uint64_t row_bytes = RowBytes(kHidden, ElemType::kF32);
      std::vector<std::vector<std::byte>> buffers;
      std::vector<Term> ranks, nodes;
      const auto reduce = [&](const std::vector<Term>& terms, SumLevel level, Term::Kind kind,
                              auto&& key, std::vector<Term>& to) {
        for (size_t begin = 0; begin < terms.size();) {
          size_t end = begin + 1;
          while (end < terms.size() && key(terms[end]) == key(terms[begin])) ++end;
          buffers.emplace_back(row_bytes);
          sum->Evaluate(std::span(terms).subspan(begin, end - begin), level, buffers.back().data());
          Term term;
          term.row = buffers.back().data();
          term.rank = terms[begin].rank;
          term.kind = kind;
          to.push_back(term);
          begin = end;
        }
      };
      reduce(
          token.terms, SumLevel::kRank, Term::Kind::kRankPartial,
          [](const Term& term) { return term.rank; }, ranks);
      sum->Evaluate(ranks, SumLevel::kToken, staged.data());
      ASSERT_EQ(direct, staged);
      reduce(
          ranks, SumLevel::kNode, Term::Kind::kNodePartial,
          [](const Term& term) { return term.rank / 4; }, nodes);
      sum->Evaluate(nodes, SumLevel::kToken, staged.data());
      ASSERT_EQ(direct, staged);
    }
  }
}

TEST(Tree, NegativeZeroIsNotAddedToZero) {
  const GroupShape shape = Shape(4, 4);
  auto sum = std::make_unique<TokenSum>(shape);
  const Row row(kHidden, -0.0f);
  Term term;
  term.row = reinterpret_cast<const std::byte*>(row.data());
  Row got(kHidden);
  sum->Evaluate({&term, 1}, SumLevel::kToken, reinterpret_cast<std::byte*>(got.data()));
  for (const float value : got) ASSERT_TRUE(std::signbit(value));
}

}  // namespace
}  // namespace jax_ep
