#include "xla_ffi/buffers.h"

#include <cstddef>

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

// Rows: null when absent (shape [0]), never null when present, even with zero tokens ([0, H]).
template <typename Buffer>
std::byte* RowsOf(const Buffer& buffer) {
  static std::byte no_rows[1];
  if (buffer.element_count() != 0) return static_cast<std::byte*>(buffer.untyped_data());
  return buffer.dimensions().size() < 2 ? nullptr : no_rows;
}
const std::byte* Bytes(const Arg& arg) { return RowsOf(arg); }
std::byte* Bytes(Ret& ret) { return RowsOf(*ret); }

ffi::DataType DataTypeOf(ElemType type) {
  switch (type) {
    case ElemType::kF32:
      return ffi::DataType::F32;
    case ElemType::kBf16:
      return ffi::DataType::BF16;
    case ElemType::kF16:
      return ffi::DataType::F16;
  }
  return ffi::DataType::INVALID;
}

void CheckTokens(Checker& check, const GroupShape& shape, Mode mode, int64_t num_tokens) {
  const uint64_t limit = mode == Mode::kLl ? shape.ll_tokens : shape.max_tokens;
  check.Require(static_cast<uint64_t>(num_tokens) <= limit, [&] {
    return "got " + std::to_string(num_tokens) + " tokens, the group was created for at most " +
           std::to_string(limit) + " in this mode";
  });
  check.Require(mode == Mode::kLl || shape.has_ht,
                [] { return "the group has Config.mode='ll', expected 'ht' or 'auto'"; });
}

}  // namespace

void Checker::RequireSize(const char* name, size_t have, ffi::DataType have_type,
                          ffi::DataType type, int64_t num_elements, bool may_be_absent) {
  if (!status_.ok() || (have == 0 && may_be_absent)) return;
  if (static_cast<int64_t>(have) != num_elements || have_type != type) {
    status_ = InvalidArgument(
        std::string(operation_) + ": buffer " + name + " has " + std::to_string(have) +
        " elements of type " + std::to_string(static_cast<int>(have_type)) + ", expected " +
        std::to_string(num_elements) + " of type " + std::to_string(static_cast<int>(type)) +
        "; was the program compiled for another group?");
  }
}

void Checker::RequireRows(const char* name, size_t have, ffi::DataType have_type,
                          const GroupShape& shape, int64_t num_rows) {
  const bool is_opaque = have_type == ffi::DataType::U8;
  const uint64_t in_row = shape.hidden * (is_opaque ? ElemBytes(shape.elem_type) : 1);
  RequireSize(name, have, have_type, is_opaque ? have_type : DataTypeOf(shape.elem_type),
              num_rows * static_cast<int64_t>(in_row), /*may_be_absent=*/true);
}

int64_t ExpectedRows(const GroupShape& shape, Layout layout, int64_t num_tokens, int64_t rows) {
  const auto num_ranks = static_cast<int64_t>(shape.num_ranks);
  switch (layout) {
    case Layout::kExpertMajor:
      return rows;
    case Layout::kExpertBatched:
      return static_cast<int64_t>(shape.experts_per_rank()) * num_ranks * num_tokens;
    case Layout::kRankMajor:
      return num_ranks * num_tokens;
  }
  return rows;
}

namespace {

// `parts`: the results in the order of Python's PlanArrays.
PlanParams PlanOf(const CallKind& call, int64_t num_tokens, int64_t recv_rows, const Arg& topk_idx,
                  const std::array<std::span<int32_t>, 9>& parts) {
  return {.mode = call.mode,
          .layout = call.layout,
          .site = call.site,
          .num_tokens = num_tokens,
          .recv_rows = recv_rows,
          .counts_load = call.counts_load,
          .topk_idx = In<int32_t>(topk_idx),
          .out = {.group_sizes = parts[0],
                  .group_counts = parts[1],
                  .send_slot = parts[2],
                  .recv_src = parts[3],
                  .send_counts = parts[4],
                  .recv_counts = parts[5],
                  .num_dropped = parts[6].data(),
                  .overflow = parts[7].data(),
                  .recv_topk_idx = parts[8]}};
}

}  // namespace

Result<PlanParams> MakePlan(const CallKind& call, const GroupShape& shape, Checker& check,
                            const Arg& topk_idx, std::array<Ret*, 9> rets) {
  const int64_t num_tokens = TokensOf(topk_idx, shape);
  const int64_t num_pairs = num_tokens * shape.top_k;
  const auto num_experts = static_cast<int64_t>(shape.experts_per_rank());
  const auto num_ranks = static_cast<int64_t>(shape.num_ranks);
  const int64_t rows = static_cast<int64_t>((*rets[3])->element_count());
  CheckTokens(check, shape, call.mode, num_tokens);
  check.Require("topk_idx", topk_idx, kI32, num_pairs);
  check.Require("group_sizes", *rets[0], kI32, num_experts);
  check.Require("group_counts", *rets[1], kI32, num_experts);
  check.Require("send_slot", *rets[2], kI32, num_pairs);
  check.Require("recv_src", *rets[3], kI32, ExpectedRows(shape, call.layout, num_tokens, rows));
  check.Require("send_counts", *rets[4], kI32, num_ranks);
  check.Require("recv_counts", *rets[5], kI32, num_ranks);
  check.Require("num_dropped", *rets[6], kI32, 1);
  check.Require("overflow", *rets[7], kI32, 1);
  check.Require("recv_topk_idx", *rets[8], kI32,
                call.layout == Layout::kRankMajor ? num_ranks * num_pairs : 0);
  if (!check.status().ok()) return check.status();
  std::array<std::span<int32_t>, 9> parts;
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = Out<int32_t>(*rets[i]);
  return PlanOf(call, num_tokens, rows, topk_idx, parts);
}

Result<PlanParams> MakePackedPlan(const CallKind& call, const GroupShape& shape, Checker& check,
                                  const Arg& topk_idx, int64_t recv_rows, Ret& packed) {
  const int64_t num_tokens = TokensOf(topk_idx, shape);
  const int64_t num_pairs = num_tokens * shape.top_k;
  const auto num_experts = static_cast<int64_t>(shape.experts_per_rank());
  const auto num_ranks = static_cast<int64_t>(shape.num_ranks);
  const bool rank_major = call.layout == Layout::kRankMajor;
  const std::array<int64_t, 9> counts = {
      num_experts, num_experts, num_pairs,
      recv_rows,   num_ranks,   num_ranks,
      1,           1,           rank_major ? num_ranks * num_pairs : 0};
  uint64_t total = 0;
  for (const int64_t count : counts) total += AlignUp(static_cast<uint64_t>(count), kPackedAlign);
  CheckTokens(check, shape, call.mode, num_tokens);
  check.Require("topk_idx", topk_idx, kI32, num_pairs);
  const int64_t expected_rows = ExpectedRows(shape, call.layout, num_tokens, recv_rows);
  check.Require(recv_rows >= 0 && recv_rows == expected_rows, [&] {
    return "recv_rows is " + std::to_string(recv_rows) + ", which does not fit the layout";
  });
  check.Require("packed", packed, kI32, static_cast<int64_t>(total));
  if (!check.status().ok()) return check.status();
  std::span<int32_t> rest = Out<int32_t>(packed);
  std::array<std::span<int32_t>, 9> parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = rest.first(static_cast<size_t>(counts[i]));
    rest = rest.subspan(AlignUp(static_cast<uint64_t>(counts[i]), kPackedAlign));
  }
  return PlanOf(call, num_tokens, recv_rows, topk_idx, parts);
}

Result<DispatchParams> MakeDispatch(const CallKind& call, const GroupShape& shape, Checker& check,
                                    int64_t num_tokens, int64_t rows, int64_t pad,
                                    const DispatchBuffers& b) {
  const ffi::DataType elem = DataTypeOf(shape.elem_type);
  const int64_t num_pairs = num_tokens * shape.top_k;
  const auto hidden = static_cast<int64_t>(shape.hidden);
  const auto num_ranks = static_cast<int64_t>(shape.num_ranks);
  const bool rank_major = call.layout == Layout::kRankMajor;
  const int64_t num_weights = rank_major ? num_ranks * num_pairs : rows;
  DispatchParams params{.mode = call.mode,
                        .layout = call.layout,
                        .site = call.site,
                        .zero_padding = pad == 0,
                        .num_tokens = num_tokens,
                        .recv_rows = rows};
  CheckTokens(check, shape, call.mode, num_tokens);
  check.Require(rows == ExpectedRows(shape, call.layout, num_tokens, rows), [&] {
    return "recv_src has " + std::to_string(rows) + " rows, which do not fit the layout";
  });
  if (b.x != nullptr) {
    check.RequireRows("x", *b.x, shape, num_tokens);
    params.x = Bytes(*b.x);
  }
  if (b.weights != nullptr) {
    check.Require("weights", *b.weights, kF32, num_pairs, /*may_be_absent=*/true);
    params.weights = In<float>(*b.weights);
  }
  if (b.send_slot != nullptr) {
    check.Require("send_slot", *b.send_slot, kI32, num_pairs);
    params.send_slot = In<int32_t>(*b.send_slot);
  }
  if (b.recv_src != nullptr) params.recv_src = In<int32_t>(*b.recv_src);
  if (b.recv_topk_idx != nullptr) {
    check.Require("recv_topk_idx", *b.recv_topk_idx, kI32, num_ranks * num_pairs,
                  /*may_be_absent=*/true);
    params.recv_topk_idx = In<int32_t>(*b.recv_topk_idx);
  }
  if (b.y != nullptr) {
    check.Require("y", *b.y, elem, rows * hidden, /*may_be_absent=*/true);
    params.y = Bytes(*b.y);
  }
  if (b.row_weights != nullptr) {
    check.Require("row_weights", *b.row_weights, kF32, rows, /*may_be_absent=*/true);
    params.row_weights = In<float>(*b.row_weights);
  }
  if (b.recv_x != nullptr) {
    check.RequireRows("recv_x", *b.recv_x, shape, rows);
    params.recv_x = Bytes(*b.recv_x);
  }
  if (b.recv_weights != nullptr) {
    check.Require("recv_weights", *b.recv_weights, kF32, num_weights, /*may_be_absent=*/true);
    params.recv_weights = Out<float>(*b.recv_weights);
  }
  if (b.recv_dots != nullptr) {
    check.Require("recv_dots", *b.recv_dots, kF32, rows, /*may_be_absent=*/true);
    params.recv_dots = Out<float>(*b.recv_dots);
  }
  if (!check.status().ok()) return check.status();
  return params;
}

Result<CombineParams> MakeCombine(const CallKind& call, const GroupShape& shape, Checker& check,
                                  const CombineBuffers& b) {
  const ffi::DataType elem = DataTypeOf(shape.elem_type);
  const auto hidden = static_cast<int64_t>(shape.hidden);
  const int64_t num_tokens = TokensOf(*b.send_slot, shape);
  const int64_t num_pairs = num_tokens * shape.top_k;
  const auto rows = static_cast<int64_t>(b.recv_src->element_count());
  CombineParams params{.mode = call.mode,
                       .layout = call.layout,
                       .site = call.site,
                       .num_tokens = num_tokens,
                       .recv_rows = rows};
  CheckTokens(check, shape, call.mode, num_tokens);
  check.Require("send_slot", *b.send_slot, kI32, num_pairs);
  check.Require("recv_src", *b.recv_src, kI32, ExpectedRows(shape, call.layout, num_tokens, rows));
  params.send_slot = In<int32_t>(*b.send_slot);
  params.recv_src = In<int32_t>(*b.recv_src);
  if (b.y != nullptr) {
    check.Require("y", *b.y, elem, rows * hidden, /*may_be_absent=*/true);
    params.y = Bytes(*b.y);
  }
  if (b.row_weights != nullptr) {
    check.Require("row_weights", *b.row_weights, kF32, rows, /*may_be_absent=*/true);
    params.row_weights = In<float>(*b.row_weights);
  }
  if (b.pair_scalars != nullptr) {
    const int64_t per_row = call.layout == Layout::kRankMajor ? shape.top_k : 1;
    check.Require("pair_scalars", *b.pair_scalars, kF32, rows * per_row, /*may_be_absent=*/true);
    params.pair_scalars = In<float>(*b.pair_scalars);
  }
  if (b.out != nullptr) {
    check.Require("out", *b.out, elem, num_tokens * hidden, /*may_be_absent=*/true);
    params.out = Bytes(*b.out);
  }
  if (b.pair_scalars_out != nullptr) {
    check.Require("pair_scalars_out", *b.pair_scalars_out, kF32, num_pairs, /*may_be_absent=*/true);
    params.pair_scalars_out = Out<float>(*b.pair_scalars_out);
  }
  if (!check.status().ok()) return check.status();
  return params;
}

}  // namespace jax_ep
