// The fixed order in which the rows of one token are added (docs/semantics.md): rows of a rank in
// row order, ranks of a node along a binary tree over the local rank, nodes along the same tree
// over the node. What is missing is absent, not zero; an odd one out is carried up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/layout.h"

namespace jax_ep {

// Most pairs, hence terms, of one token.
inline constexpr uint32_t kMaxTopK = 64;

// One summand of a token.
struct Term {
  const std::byte* row = nullptr;
  uint32_t rank = 0;    // whose rows these are; any rank of the node for a node partial
  float weight = 1.0f;  // of kRow
  enum class Kind : uint8_t {
    kRow,          // one row of the element type, to be weighted
    kRankPartial,  // a rank's sum, of the partial type
    kNodePartial,  // a node's sum, of the partial type
  } kind = Kind::kRow;
};

// How far a sum goes: one rank's rows, one node's ranks, or the whole token.
enum class SumLevel : uint8_t { kRank, kNode, kToken };

// Adds the terms of one token. Stateless between tokens; one per thread (it holds the working
// memory of a row chunk).
class TokenSum {
 public:
  explicit TokenSum(const GroupShape& shape);

  // Type of a rank or node partial that is staged or travels.
  ElemType partial_type() const { return partial_type_; }

  // Adds `terms` (1 to kMaxTopK, sorted by rank, rows of a rank in row order) up to `level` and
  // writes one row [hidden]: of the element type for kToken, else of the partial type. The rows of
  // `upcoming`, terms of the next call or none, are fetched meanwhile.
  void Evaluate(std::span<const Term> terms, SumLevel level, std::byte* out,
                std::span<const Term> upcoming = {});

 private:
  // Elements of one pass over the terms: the sums in flight stay in the L1 cache.
  static constexpr uint64_t kChunkElems = 512;

  struct Step {
    enum class Kind : uint8_t { kLoad, kAdd, kMerge, kRound } kind;
    uint16_t into = 0;  // buffer
    uint16_t from = 0;  // term of kLoad and kAdd, buffer of kMerge
  };
  // A partial sum: still a term that nobody loaded, or a buffer.
  struct Operand {
    uint32_t key = 0;  // index on the current level of the tree
    uint16_t buffer = kNoBuffer;
    uint16_t term = 0;
  };
  static constexpr uint16_t kNoBuffer = 0xffff;

  void Plan(std::span<const Term> terms, SumLevel level);
  Operand SumRank(std::span<const Term> terms, uint32_t begin, uint32_t end);
  // Reduces operands_[begin, num_operands_) to one, level by level over their keys.
  void ReduceTail(uint32_t begin);
  uint16_t Loaded(Operand& operand);
  void Push(Step step) { steps_[num_steps_++] = step; }
  ElemType TypeOf(const Term& term) const {
    return term.kind == Term::Kind::kRow ? elem_type_ : partial_type_;
  }

  ElemType elem_type_;
  ElemType partial_type_;
  uint32_t node_size_;
  uint32_t num_nodes_;
  uint64_t hidden_;

  // Each term is loaded or added once, merged at most once, rounded at most twice.
  std::array<Step, 4 * kMaxTopK> steps_;
  uint32_t num_steps_ = 0;
  std::array<Operand, kMaxTopK> operands_;
  uint32_t num_operands_ = 0;
  uint16_t num_buffers_ = 0;
  alignas(64) std::array<float, kMaxTopK * kChunkElems> buffers_;
};

}  // namespace jax_ep
