// Puts arrived rows at their final places: what HT and LL dispatch share on the receiving side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/cpu/row_index.h"
#include "kernels/cpu/rows.h"
#include "kernels/launch.h"

namespace jax_ep {

// How one dispatch packs a row and its weights in a stage: only what the call carries.
struct DispatchPitch {
  uint64_t weights_offset = 0;
  uint64_t pitch = 0;

  static DispatchPitch Make(const GroupShape& shape, bool has_rows, bool has_weights) {
    DispatchPitch result;
    result.weights_offset = has_rows ? RowBytes(shape.hidden, shape.elem_type) : 0;
    result.pitch = result.weights_offset + (has_weights ? ScalarBytes(shape.top_k) : 0);
    return result;
  }
};

// Checks the spans of a call's sending and receiving side: empty, or what is wrong.
std::string CheckDispatchSend(const GroupShape& shape, const DispatchParams& params);
std::string CheckDispatchReceive(const GroupShape& shape, const DispatchParams& params);

// Adds a finished dispatch to the rank's counters.
void CountDispatch(Rank& rank, int64_t num_rows);

// Writes every specified element of recv_x, recv_weights and recv_dots exactly once: padding by
// ZeroPadding, the rest by Place. Place may run on several threads at once (for different tokens);
// each of them calls FinishPlacing after its last.
class RowUnpacker {
 public:
  RowUnpacker(const GroupShape& shape, const DispatchParams& params, const RowIndex& index)
      : shape_(shape),
        params_(params),
        index_(index),
        is_streamed_(static_cast<uint64_t>(params.recv_rows) * elem_row_bytes() >=
                     kStreamFromBytes) {}

  void ZeroPadding(const ParallelFor& parallel_for) const;

  // The first token in [token, end) of `source` that has rows here, else `end`.
  int64_t NextToken(uint32_t source, int64_t token, int64_t end) const {
    while (token < end && index_.Rows(source, token).empty()) ++token;
    return token;
  }
  // `row` [H] and `weights` [K] of that token; null where the call carries none.
  void Place(uint32_t source, int64_t token, const std::byte* row, const float* weights) const;
  void FinishPlacing() const {
    if (is_streamed_) StreamFence();
  }

 private:
  uint64_t elem_row_bytes() const { return shape_.hidden * ElemBytes(shape_.elem_type); }

  const GroupShape& shape_;
  const DispatchParams& params_;
  const RowIndex& index_;
  const bool is_streamed_;  // recv_x is written past the caches
};

}  // namespace jax_ep
