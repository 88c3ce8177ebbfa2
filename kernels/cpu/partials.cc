#include "kernels/cpu/partials.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace jax_ep {
namespace {

// The distinct slots of one token, ascending: by rank, then row.
class SortedSlots {
 public:
  explicit SortedSlots(std::span<const int32_t> slots) {
    for (const int32_t slot : slots) {
      if (slot >= 0) slots_[count_++] = slot;
    }
    std::sort(slots_.begin(), slots_.begin() + count_);
    count_ = static_cast<uint32_t>(std::unique(slots_.begin(), slots_.begin() + count_) -
                                   slots_.begin());
  }
  std::span<const int32_t> view() const { return {slots_.data(), count_}; }

 private:
  std::array<int32_t, kMaxTopK> slots_;
  uint32_t count_ = 0;
};

// Which row of `from`, the contribution of `rank`, is that of `token`.
uint64_t PackedIndex(const GroupShape& shape, const CombineParams& params, uint64_t rows_per_rank,
                     const Contribution& from, uint32_t rank, uint64_t token) {
  const uint64_t row = token - from.first_token;
  if (from.map != nullptr) return static_cast<uint64_t>(from.map[row]);
  if (from.num_slots == 0) return row;
  const int32_t* slots = params.send_slot.data() + token * shape.top_k;
  uint32_t k = 0;
  while (slots[k] < 0 || static_cast<uint64_t>(slots[k]) / rows_per_rank != rank) ++k;
  return row * from.num_slots + LlSlot(shape, from.num_slots, rank, k);
}

// One token's terms in the order of TokenSum.
struct TokenTerms {
  std::array<Term, kMaxTopK> terms;
  uint32_t count = 0;

  std::span<const Term> view() const { return {terms.data(), count}; }
};

void FindTerms(const GroupShape& shape, const CombineParams& params, uint64_t rows_per_rank,
               const std::vector<Contribution>& contributions, uint64_t token, TokenTerms& result) {
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const SortedSlots slots(params.send_slot.subspan(token * shape.top_k, shape.top_k));
  for (const int32_t slot : slots.view()) {
    const auto position = static_cast<uint64_t>(slot);
    const auto rank = static_cast<uint32_t>(position / rows_per_rank);
    const uint64_t row = position % rows_per_rank;
    const Contribution& from = contributions[rank];
    Term term{.rank = rank, .kind = from.kind};
    if (from.kind == Term::Kind::kRow) {
      term.row = from.rows + row * row_bytes;
      if (from.row_weights != nullptr) term.weight = from.row_weights[row];
    } else {
      const bool is_node = from.kind == Term::Kind::kNodePartial;
      if (result.count > 0) {  // a partial stands for all rows of its rank or node
        const uint32_t last = result.terms[result.count - 1].rank;
        if (is_node ? last / shape.node_size == rank / shape.node_size : last == rank) continue;
      }
      term.row =
          from.rows + PackedIndex(shape, params, rows_per_rank, from, rank, token) * from.pitch;
    }
    result.terms[result.count++] = term;
  }
}

void FetchPairScalars(const GroupShape& shape, const CombineParams& params, uint64_t rows_per_rank,
                      const std::vector<Contribution>& contributions, uint64_t token) {
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  for (uint64_t k = 0; k < shape.top_k; ++k) {
    const uint64_t cell = token * shape.top_k + k;
    const int32_t slot = params.send_slot[cell];
    if (slot < 0) {
      params.pair_scalars_out[cell] = 0.0f;
      continue;
    }
    const uint64_t row = static_cast<uint64_t>(slot) % rows_per_rank;
    const auto rank = static_cast<uint32_t>(static_cast<uint64_t>(slot) / rows_per_rank);
    const Contribution& from = contributions[rank];
    const float* pair_scalars = nullptr;
    if (from.kind == Term::Kind::kRow) {
      pair_scalars = from.pair_scalars + (is_rank_major ? row * shape.top_k + k : row);
    } else {
      const uint64_t packed = PackedIndex(shape, params, rows_per_rank, from, rank, token);
      pair_scalars =
          reinterpret_cast<const float*>(from.rows + packed * from.pitch + from.scalars_offset) + k;
    }
    std::memcpy(&params.pair_scalars_out[cell], pair_scalars, sizeof(float));
  }
}

}  // namespace

PartialPitch PartialPitch::Make(const GroupShape& shape, bool has_rows, bool has_pair_scalars) {
  const ElemType type = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  PartialPitch result;
  result.scalars_offset = has_rows ? RowBytes(shape.hidden, type) : 0;
  result.rank_pitch = result.scalars_offset + (has_pair_scalars ? ScalarBytes(shape.top_k) : 0);
  const uint64_t node_scalars = static_cast<uint64_t>(shape.node_size) * shape.top_k;
  result.node_pitch = result.scalars_offset + (has_pair_scalars ? ScalarBytes(node_scalars) : 0);
  return result;
}

std::string CheckCombineSend(const GroupShape& shape, const CombineParams& params) {
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  if (params.recv_rows < 0 || params.recv_src.size() != rows ||
      (!params.row_weights.empty() && params.row_weights.size() != rows) ||
      (!params.pair_scalars.empty() &&
       params.pair_scalars.size() != (is_rank_major ? rows * shape.top_k : rows))) {
    return "recv_src, row_weights or pair_scalars do not have the sizes of R = " +
           std::to_string(rows);
  }
  return "";
}

std::string CheckCombineReceive(const GroupShape& shape, const CombineParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const uint64_t cells = static_cast<uint64_t>(params.num_tokens) * shape.top_k;
  if (params.send_slot.size() != cells ||
      (!params.pair_scalars_out.empty() && params.pair_scalars_out.size() != cells)) {
    return "send_slot or pair_scalars_out do not have T * K = " + std::to_string(cells) +
           " elements";
  }
  return "";
}

void WriteRankPartial(const GroupShape& shape, uint32_t rank, const CombineParams& params,
                      const PartialPitch& pitch, const RowIndex& index, uint32_t source,
                      int64_t token, TokenSum& sum, std::byte* to) {
  const std::span<const int32_t> rows = index.Rows(source, token);
  if (rows.empty()) return;
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  if (params.y != nullptr) {
    // At most K rows: recv_src names each (source, token, k) once. More can only come from a plan
    // that nobody made; what they add to is unspecified, so the rest is left out.
    std::array<Term, kMaxTopK> terms;
    const size_t num_terms = std::min<size_t>(rows.size(), kMaxTopK);
    for (size_t i = 0; i < num_terms; ++i) {
      const auto row = static_cast<uint64_t>(rows[i]);
      terms[i] = {.row = params.y + row * row_bytes,
                  .rank = rank,
                  .weight = params.row_weights.empty() ? 1.0f : params.row_weights[row]};
    }
    std::array<Term, kMaxTopK> upcoming;
    size_t num_upcoming = 0;
    for (const int32_t row : index.RowsAhead(source, token)) {
      if (num_upcoming == kMaxTopK) break;
      upcoming[num_upcoming++].row = params.y + static_cast<uint64_t>(row) * row_bytes;
    }
    sum.Evaluate({terms.data(), num_terms}, SumLevel::kRank, to, {upcoming.data(), num_upcoming});
  }
  if (params.pair_scalars.empty()) return;
  float* pair_scalars = reinterpret_cast<float*>(to + pitch.scalars_offset);
  for (const int32_t row_index : rows) {
    const auto row = static_cast<uint64_t>(row_index);
    if (params.layout == Layout::kRankMajor) {
      std::memcpy(pair_scalars, &params.pair_scalars[row * shape.top_k],
                  shape.top_k * sizeof(float));
    } else {
      const uint32_t k = static_cast<uint32_t>(params.recv_src[row]) % shape.top_k;
      std::memcpy(pair_scalars + k, &params.pair_scalars[row], sizeof(float));
    }
  }
}

void SumTokens(Rank& rank, const CombineParams& params, int64_t first, int64_t last,
               uint64_t rows_per_rank, const std::vector<Contribution>& contributions) {
  const GroupShape& shape = rank.shape;
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  rank.parallel_for(last - first, [&](int64_t begin, int64_t end) {
    begin += first;
    end += first;
    TokenSum sum(shape);
    std::array<TokenTerms, 2> found;  // of this token and the next, by token modulo 2
    const auto find = [&](int64_t token) {
      TokenTerms& result = found[token % 2];
      result.count = 0;
      if (params.out == nullptr || token >= end) return;
      FindTerms(shape, params, rows_per_rank, contributions, static_cast<uint64_t>(token), result);
    };
    find(begin);
    for (int64_t token = begin; token < end; ++token) {
      const auto index = static_cast<uint64_t>(token);
      if (params.out != nullptr) {
        find(token + 1);
        const std::span<const Term> terms = found[token % 2].view();
        std::byte* out = params.out + index * row_bytes;
        if (terms.empty()) {
          std::memset(out, 0, row_bytes);
        } else {
          sum.Evaluate(terms, SumLevel::kToken, out, found[(token + 1) % 2].view());
        }
      }
      if (!params.pair_scalars_out.empty()) {
        FetchPairScalars(shape, params, rows_per_rank, contributions, index);
      }
    }
  });
}

void CountCombine(Rank& rank) {
  if (rank.counters != nullptr) {
    rank.counters->combines.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace jax_ep
