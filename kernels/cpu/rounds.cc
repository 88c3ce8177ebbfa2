#include "kernels/cpu/rounds.h"

#include <cstddef>
#include <cstring>
#include <memory>

namespace jax_ep {
namespace {

// Copies the rows of `row_bytes` that `is_used` into new memory of `num_rows`, or frees `kept` if
// there are none. Pages of unused rows are never touched.
template <typename IsUsed>
void KeepRows(const std::byte* rows, uint64_t row_bytes, uint64_t num_rows, IsUsed&& is_used,
              std::unique_ptr<std::byte[]>& kept) {
  kept.reset();
  if (rows == nullptr) return;
  kept = std::make_unique_for_overwrite<std::byte[]>(num_rows * row_bytes);
  for (uint64_t row = 0; row < num_rows; ++row) {
    if (!is_used(row)) continue;
    std::memcpy(kept.get() + row * row_bytes, rows + row * row_bytes, row_bytes);
  }
}

Status OfOtherSizes(Operation& op) {
  return op.Invalid(
      "a *_done got another number of tokens or rows than its *_start; pass it the "
      "InFlight that the start returned");
}

}  // namespace

void KeepInputs(const GroupShape& shape, const DispatchParams& params, Rank::SlotSet& set) {
  KeepRows(
      params.x, shape.hidden * ElemBytes(shape.elem_type), static_cast<uint64_t>(params.num_tokens),
      [](uint64_t) { return true; }, set.rows);
  set.weights.assign(params.weights.begin(), params.weights.end());
  set.num_tokens = params.num_tokens;
}

void KeepInputs(const GroupShape& shape, const CombineParams& params, Rank::SlotSet& set) {
  KeepRows(
      params.y, shape.hidden * ElemBytes(shape.elem_type), params.recv_src.size(),
      [&](uint64_t row) { return params.recv_src[row] >= 0; }, set.rows);
  set.weights.assign(params.row_weights.begin(), params.row_weights.end());
  set.pair_scalars.assign(params.pair_scalars.begin(), params.pair_scalars.end());
  set.num_tokens = params.num_tokens;
  set.recv_rows = params.recv_rows;
}

Status TakeInputs(Operation& op, const Rank::SlotSet& set, DispatchParams& params) {
  if (set.num_tokens != params.num_tokens) return OfOtherSizes(op);
  params.x = set.rows.get();
  params.weights = set.weights;
  return Status::Ok();
}

Status TakeInputs(Operation& op, const Rank::SlotSet& set, CombineParams& params) {
  if (set.num_tokens != params.num_tokens || set.recv_rows != params.recv_rows) {
    return OfOtherSizes(op);
  }
  params.y = set.rows.get();
  params.row_weights = set.weights;
  params.pair_scalars = set.pair_scalars;
  return Status::Ok();
}

}  // namespace jax_ep
