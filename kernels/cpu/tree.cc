#include "kernels/cpu/tree.h"

#include <algorithm>

#include "kernels/cpu/rows.h"

namespace jax_ep {

TokenSum::TokenSum(const GroupShape& shape)
    : elem_type_(shape.elem_type),
      partial_type_(shape.f32_partials ? ElemType::kF32 : shape.elem_type),
      node_size_(shape.node_size),
      num_nodes_(shape.num_nodes()),
      hidden_(shape.hidden) {}

uint16_t TokenSum::Loaded(Operand& operand) {
  if (operand.buffer == kNoBuffer) {
    operand.buffer = num_buffers_++;
    Push({.kind = Step::Kind::kLoad, .into = operand.buffer, .from = operand.term});
  }
  return operand.buffer;
}

// Terms [begin, end) belong to one rank: either its rows or its finished partial. A partial is
// rounded where it would leave its rank, whether it does or not, so that bits do not depend on it.
TokenSum::Operand TokenSum::SumRank(std::span<const Term> terms, uint32_t begin, uint32_t end) {
  Operand sum{.key = terms[begin].rank % node_size_, .term = static_cast<uint16_t>(begin)};
  if (terms[begin].kind != Term::Kind::kRow) return sum;
  for (uint32_t term = begin + 1; term < end; ++term) {
    Push({.kind = Step::Kind::kAdd, .into = Loaded(sum), .from = static_cast<uint16_t>(term)});
  }
  const bool is_rounded = end == begin + 1 && terms[begin].weight == 1.0f;
  if (partial_type_ != ElemType::kF32 && !is_rounded) {
    Push({.kind = Step::Kind::kRound, .into = Loaded(sum)});
  }
  return sum;
}

void TokenSum::ReduceTail(uint32_t begin) {
  while (num_operands_ > begin + 1) {
    uint32_t kept = begin;
    for (uint32_t i = begin; i < num_operands_; ++i) {
      Operand operand = operands_[i];
      const bool has_partner = i + 1 < num_operands_ && (operands_[i + 1].key ^ operand.key) == 1;
      if (has_partner) {
        const Operand& partner = operands_[++i];
        const uint16_t into = Loaded(operand);
        if (partner.buffer == kNoBuffer) {
          Push({.kind = Step::Kind::kAdd, .into = into, .from = partner.term});
        } else {
          Push({.kind = Step::Kind::kMerge, .into = into, .from = partner.buffer});
        }
      }
      operand.key /= 2;
      operands_[kept++] = operand;
    }
    num_operands_ = kept;
  }
}

void TokenSum::Plan(std::span<const Term> terms, SumLevel level) {
  num_steps_ = 0;
  num_operands_ = 0;
  num_buffers_ = 0;
  uint32_t num_node_sums = 0;  // operands_[0, num_node_sums) are nodes
  const auto num_terms = static_cast<uint32_t>(terms.size());
  for (uint32_t begin = 0; begin < num_terms;) {
    const uint32_t node = terms[begin].rank / node_size_;
    const bool is_node_partial = terms[begin].kind == Term::Kind::kNodePartial;
    while (begin < num_terms && terms[begin].rank / node_size_ == node) {
      uint32_t end = begin + 1;
      while (end < num_terms && terms[end].rank == terms[begin].rank) ++end;
      operands_[num_operands_++] = SumRank(terms, begin, end);
      begin = end;
    }
    ReduceTail(num_node_sums);
    Operand& node_sum = operands_[num_node_sums++];
    node_sum.key = node;
    const bool is_rank_only = level == SumLevel::kRank;
    if (partial_type_ != ElemType::kF32 && num_nodes_ > 1 && !is_node_partial && !is_rank_only) {
      Push({.kind = Step::Kind::kRound, .into = Loaded(node_sum)});
    }
  }
  ReduceTail(0);
}

void TokenSum::Evaluate(std::span<const Term> terms, SumLevel level, std::byte* out,
                        std::span<const Term> upcoming) {
  Plan(terms, level);
  const ElemType out_type = level == SumLevel::kToken ? elem_type_ : partial_type_;
  const Operand result = operands_[0];
  if (result.buffer == kNoBuffer) {
    const Term& term = terms[result.term];
    if (TypeOf(term) == out_type) {
      for (const Term& next : upcoming) PrefetchBytes(next.row, hidden_ * ElemBytes(TypeOf(next)));
      ScaleRow(out_type, out, term.row, term.weight, hidden_);
      return;
    }
  }
  for (uint64_t first = 0; first < hidden_; first += kChunkElems) {
    const uint64_t count = std::min(kChunkElems, hidden_ - first);
    std::byte* out_chunk = out + first * ElemBytes(out_type);
    const auto chunk = [&](const Term& term) { return term.row + first * ElemBytes(TypeOf(term)); };
    for (const Term& next : upcoming) {
      PrefetchBytes(chunk(next), count * ElemBytes(TypeOf(next)));
    }
    const auto buffer = [&](uint16_t index) {
      if (index == result.buffer && out_type == ElemType::kF32) {
        return reinterpret_cast<float*>(out_chunk);  // the result needs no copy
      }
      return buffers_.data() + index * kChunkElems;
    };
    for (uint32_t i = 0; i < num_steps_; ++i) {
      const Step& step = steps_[i];
      switch (step.kind) {
        case Step::Kind::kLoad: {
          const Term& term = terms[step.from];
          LoadScaled(TypeOf(term), buffer(step.into), chunk(term), term.weight, count);
          break;
        }
        case Step::Kind::kAdd: {
          const Term& term = terms[step.from];
          AddScaled(TypeOf(term), buffer(step.into), chunk(term), term.weight, count);
          break;
        }
        case Step::Kind::kMerge:
          AddFloats(buffer(step.into), buffer(step.from), count);
          break;
        case Step::Kind::kRound:
          RoundFloats(partial_type_, buffer(step.into), count);
          break;
      }
    }
    if (result.buffer == kNoBuffer) {  // one partial, of another type than the output
      const Term& term = terms[result.term];
      LoadScaled(TypeOf(term), buffer(0), chunk(term), term.weight, count);
    }
    const float* sum = buffer(result.buffer == kNoBuffer ? uint16_t{0} : result.buffer);
    if (reinterpret_cast<const std::byte*>(sum) != out_chunk) {
      StoreRounded(out_type, out_chunk, sum, count);
    }
  }
}

}  // namespace jax_ep
