// The inverse of a plan's recv_src: which rows of this rank hold a given token of a given source.
// And the decoding of send_slot. Plans come from the caller, so both check what they read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/cpu/sync.h"
#include "kernels/launch.h"

namespace jax_ep {

// Views rank.scratch: valid until the next Build of that rank.
class RowIndex {
 public:
  // \error kInvalidArgument  recv_src names a source, token or k that does not exist
  static Result<RowIndex> Build(Operation& op, int64_t num_tokens,
                                std::span<const int32_t> recv_src);

  // Rows of this rank that hold token `token` of rank `source`, ascending.
  std::span<const int32_t> Rows(uint32_t source, int64_t token) const {
    const int32_t* start = starts_ + source * num_tokens_ + token;
    return {rows_ + start[0], rows_ + start[1]};
  }
  // As many rows, starting kRowsAhead rows later in the order of tokens: what a loop over the
  // tokens of `source` reads next. Fewer at the end.
  std::span<const int32_t> RowsAhead(uint32_t source, int64_t token) const {
    const int32_t* start = starts_ + source * num_tokens_ + token;
    const int64_t end = std::min<int64_t>(start[1] + kRowsAhead, num_rows_);
    return {rows_ + std::min<int64_t>(start[0] + kRowsAhead, end), rows_ + end};
  }
  int64_t num_rows() const { return num_rows_; }  // rows that are not padding

 private:
  static constexpr int32_t kRowsAhead = 2;

  int64_t num_tokens_ = 0;
  int64_t num_rows_ = 0;
  const int32_t* starts_ = nullptr;  // [N * T + 1]
  const int32_t* rows_ = nullptr;
};

// Checks that the group has room for a call of this mode and size: empty, or what is wrong.
std::string CheckTokens(const GroupShape& shape, Mode mode, int64_t num_tokens);

// send_slot's unit: slot = destination rank * rows_per_rank + position.
inline uint64_t RowsPerRank(const GroupShape& shape, Mode mode, int64_t num_tokens,
                            int64_t recv_rows) {
  return mode == Mode::kLl
             ? static_cast<uint64_t>(shape.num_ranks) * static_cast<uint64_t>(num_tokens)
             : static_cast<uint64_t>(recv_rows);
}

// \error kInvalidArgument  a slot lies beyond the last rank
Status CheckSlots(Operation& op, std::span<const int32_t> send_slot, uint64_t rows_per_rank);

}  // namespace jax_ep
