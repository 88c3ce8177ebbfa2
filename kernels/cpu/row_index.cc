#include "kernels/cpu/row_index.h"

#include <algorithm>
#include <string>

#include "kernels/cpu/tree.h"

namespace jax_ep {
namespace {

constexpr const char* kStalePlan =
    ", which the group has agreed to go on without; make a new plan with the newest result of "
    "Group.agree as `active`";

}  // namespace

Result<RowIndex> RowIndex::Build(Operation& op, int64_t num_tokens,
                                 std::span<const int32_t> recv_src) {
  const GroupShape& shape = op.shape();
  const auto tokens = static_cast<uint64_t>(num_tokens);
  const uint64_t num_keys = shape.num_ranks * tokens;
  const uint64_t top_k = shape.top_k;
  const uint64_t source_codes = std::max<uint64_t>(1, shape.max_tokens * top_k);
  const uint64_t num_ints = num_keys + 1 + recv_src.size();
  std::vector<int32_t>& scratch = op.rank().scratch;
  if (scratch.size() < num_ints) scratch.resize(num_ints);
  int32_t* starts = scratch.data();
  int32_t* rows = starts + num_keys + 1;

  const auto key_of = [&](int32_t src) {
    const auto code = static_cast<uint64_t>(src);
    return code / source_codes * tokens + code % source_codes / top_k;
  };
  std::fill_n(starts, num_keys + 1, 0);
  for (const int32_t src : recv_src) {
    if (src < 0) continue;
    const auto code = static_cast<uint64_t>(src);
    if (code / source_codes >= shape.num_ranks || code % source_codes / top_k >= tokens) {
      return op.Invalid("recv_src holds " + std::to_string(src) + ", which is no token of " +
                        std::to_string(shape.num_ranks) + " ranks with " + std::to_string(tokens) +
                        " tokens each; pass the plan of this routing");
    }
    if (const auto source = static_cast<uint32_t>(code / source_codes); !op.is_active(source)) {
      return op.Invalid("recv_src names a token of " + op.rank().NameOf(source) + kStalePlan);
    }
    ++starts[key_of(src)];
  }
  // Inclusive sums are the ends; placing from the last row backwards turns them into the starts.
  int32_t sum = 0;
  for (uint64_t key = 0; key <= num_keys; ++key) {
    sum += starts[key];
    starts[key] = sum;
  }
  for (uint64_t row = recv_src.size(); row > 0; --row) {
    const int32_t src = recv_src[row - 1];
    if (src >= 0) rows[--starts[key_of(src)]] = static_cast<int32_t>(row - 1);
  }
  RowIndex index;
  index.num_tokens_ = num_tokens;
  index.num_rows_ = sum;
  index.starts_ = starts;
  index.rows_ = rows;
  return index;
}

std::string CheckTokens(const GroupShape& shape, Mode mode, int64_t num_tokens) {
  if (mode == Mode::kHt && !shape.has_ht) {
    return "the group has Config.mode='ll', expected 'ht' or 'auto'";
  }
  if (shape.top_k > kMaxTopK) {
    return "got top_k " + std::to_string(shape.top_k) + ", at most " + std::to_string(kMaxTopK);
  }
  const uint64_t max_tokens = mode == Mode::kLl ? shape.ll_tokens : shape.max_tokens;
  if (num_tokens < 0 || static_cast<uint64_t>(num_tokens) > max_tokens) {
    return "got " + std::to_string(num_tokens) + " tokens, the group takes at most " +
           std::to_string(max_tokens) + " in this mode; raise Config.max_tokens";
  }
  return "";
}

Status CheckSlots(Operation& op, std::span<const int32_t> send_slot, uint64_t rows_per_rank) {
  const uint64_t end = op.shape().num_ranks * rows_per_rank;
  for (const int32_t slot : send_slot) {
    if (slot >= 0 && static_cast<uint64_t>(slot) >= end) {
      return op.Invalid("send_slot holds " + std::to_string(slot) + ", expected values below " +
                        std::to_string(end) + "; pass the plan of this routing");
    }
    if (slot < 0 || op.rank().active.empty()) continue;
    const auto target = static_cast<uint32_t>(static_cast<uint64_t>(slot) / rows_per_rank);
    if (!op.is_active(target)) {
      return op.Invalid("send_slot names a row of " + op.rank().NameOf(target) + kStalePlan);
    }
  }
  return Status::Ok();
}

}  // namespace jax_ep
