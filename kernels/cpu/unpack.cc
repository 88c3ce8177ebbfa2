#include "kernels/cpu/unpack.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/cpu/rows.h"

namespace jax_ep {

std::string CheckDispatchSend(const GroupShape& shape, const DispatchParams& params) {
  const auto tokens = static_cast<uint64_t>(params.num_tokens);
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const uint64_t pairs = tokens * shape.top_k;
  if (params.recv_rows < 0 || params.send_slot.size() != pairs ||
      (!params.weights.empty() && params.weights.size() != pairs)) {
    return "send_slot or weights do not have T * K = " + std::to_string(pairs) + " elements";
  }
  return "";
}

std::string CheckDispatchReceive(const GroupShape& shape, const DispatchParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  const uint64_t source_tokens = shape.num_ranks * static_cast<uint64_t>(params.num_tokens);
  const uint64_t cells = is_rank_major ? rows * shape.top_k : rows;
  const bool has_weights = !params.recv_weights.empty();
  if (params.recv_src.size() != rows || (is_rank_major && rows != source_tokens) ||
      (has_weights && params.recv_weights.size() != cells) ||
      (has_weights && is_rank_major && params.recv_topk_idx.size() != cells) ||
      (!params.row_weights.empty() && params.row_weights.size() != rows) ||
      (!params.recv_dots.empty() && params.recv_dots.size() != rows)) {
    return "the received arrays do not have the sizes of R = " + std::to_string(rows);
  }
  if (!params.recv_dots.empty() && (params.y == nullptr || params.recv_x == nullptr)) {
    return "recv_dots needs y and rows";
  }
  return "";
}

void CountDispatch(Rank& rank, int64_t num_rows) {
  if (rank.counters == nullptr) return;
  rank.counters->dispatches.fetch_add(1, std::memory_order_relaxed);
  rank.counters->rows_received.fetch_add(static_cast<uint64_t>(num_rows),
                                         std::memory_order_relaxed);
}

void RowUnpacker::ZeroPadding(const ParallelFor& parallel_for) const {
  const bool is_rank_major = params_.layout == Layout::kRankMajor;
  const uint64_t cells_per_row = is_rank_major ? shape_.top_k : 1;
  const bool has_rows_to_zero = params_.zero_padding && params_.recv_x != nullptr;
  parallel_for(params_.recv_rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end;) {
      if (params_.recv_src[static_cast<uint64_t>(row)] >= 0) {
        ++row;
        continue;
      }
      const int64_t first = row;
      while (row < end && params_.recv_src[static_cast<uint64_t>(row)] < 0) ++row;
      const auto from = static_cast<uint64_t>(first);
      const auto count = static_cast<uint64_t>(row - first);
      if (has_rows_to_zero) {
        std::memset(params_.recv_x + from * elem_row_bytes(), 0, count * elem_row_bytes());
      }
      if (!params_.recv_weights.empty()) {
        std::fill_n(params_.recv_weights.data() + from * cells_per_row, count * cells_per_row,
                    0.0f);
      }
      if (!params_.recv_dots.empty()) std::fill_n(params_.recv_dots.data() + from, count, 0.0f);
    }
  });
}

void RowUnpacker::Place(uint32_t source, int64_t token, const std::byte* row,
                        const float* weights) const {
  for (const int32_t row_index : index_.Rows(source, token)) {
    const auto to = static_cast<uint64_t>(row_index);
    if (params_.recv_x != nullptr) {
      std::byte* dst = params_.recv_x + to * elem_row_bytes();
      if (params_.row_weights.empty()) {
        is_streamed_ ? StreamCopy(dst, row, elem_row_bytes())
                     : static_cast<void>(std::memcpy(dst, row, elem_row_bytes()));
      } else {
        ScaleRow(shape_.elem_type, dst, row, params_.row_weights[to], shape_.hidden);
      }
      if (!params_.recv_dots.empty()) {
        params_.recv_dots[to] =
            DotRows(shape_.elem_type, row, params_.y + to * elem_row_bytes(), shape_.hidden);
      }
    }
    if (params_.recv_weights.empty()) continue;
    if (params_.layout == Layout::kRankMajor) {
      const uint64_t first = to * shape_.top_k;
      for (uint64_t k = 0; k < shape_.top_k; ++k) {
        const bool is_here = params_.recv_topk_idx[first + k] >= 0;
        params_.recv_weights[first + k] = is_here ? weights[k] : 0.0f;
      }
    } else {
      params_.recv_weights[to] =
          weights[static_cast<uint32_t>(params_.recv_src[to]) % shape_.top_k];
    }
  }
}

}  // namespace jax_ep
