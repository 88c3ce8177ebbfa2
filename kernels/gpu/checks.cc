#include "kernels/gpu/checks.h"

#include "kernels/gpu/device/record_format.h"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/stage_layout.h"
#include "proxy/abi/command.h"

namespace jax_ep::gpu {

namespace {

std::string CheckTokens(const GroupShape& shape, Mode mode, int64_t num_tokens) {
  const uint64_t max_tokens = mode == Mode::kLl ? shape.ll_tokens : shape.max_tokens;
  if (mode == Mode::kHt && !shape.has_ht) {
    return "the group was created with Config.mode='ll', expected 'ht' or 'auto'";
  }
  if (num_tokens < 0 || static_cast<uint64_t>(num_tokens) > max_tokens) {
    return "got " + std::to_string(num_tokens) + " tokens, the group takes at most " +
           std::to_string(max_tokens) + " in this mode; raise Config.max_tokens";
  }
  return "";
}

// What a combine reads, and what it writes per pair.
bool InputsOfCombineFit(const GroupShape& shape, const CombineParams& params) {
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const uint64_t pairs = static_cast<uint64_t>(params.num_tokens) * shape.top_k;
  const uint64_t scalars = params.layout == Layout::kRankMajor ? rows * shape.top_k : rows;
  return params.recv_rows >= 0 && params.recv_src.size() == rows &&
         params.send_slot.size() == pairs &&
         (params.row_weights.empty() || params.row_weights.size() == rows) &&
         (params.pair_scalars.empty() || params.pair_scalars.size() == scalars);
}
bool OutputsOfCombineFit(const GroupShape& shape, const CombineParams& params) {
  const uint64_t pairs = static_cast<uint64_t>(params.num_tokens) * shape.top_k;
  return params.send_slot.size() == pairs &&
         (params.pair_scalars_out.empty() || params.pair_scalars_out.size() == pairs);
}

std::string CheckWire(const GroupShape& shape, const DispatchParams& params) {
  const Fp8Wire& wire = params.wire;
  if (wire.block == 0) return "";
  if (shape.num_nodes() > 1 || params.x == nullptr || params.recv_x == nullptr ||
      params.y != nullptr || !params.row_weights.empty()) {
    return "got a wire of FP8 in a call between nodes, without rows, or with y or row_weights; "
           "quantise before it and send records";
  }
  if (!IsBlockOfUnits(wire.block) || shape.hidden % wire.block != 0) {
    return "got blocks of " + std::to_string(wire.block) + " elements in rows of " +
           std::to_string(shape.hidden) + ", expected 16 * 2^i, at most 512, that divide them";
  }
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  if (RecordBytes(shape.hidden, wire.block, wire.scale) > row_bytes) {
    return "got records that are longer than rows of " + std::to_string(row_bytes) +
           " bytes; use a larger block";
  }
  if (!IsWordAligned(params.recv_x) || !IsWordAligned(wire.recv_scales)) {
    return "recv_x and recv_scales must be at multiples of 16 bytes";
  }
  return "";
}

}  // namespace

std::string CheckConfig(const RankConfig& config) {
  const GroupShape& shape = config.shape;
  constexpr uint32_t kMaxTopK = 64;
  const NetworkConfig* network = config.network;
  if ((shape.num_nodes() > 1) != (network != nullptr)) {
    return network != nullptr ? "got a network for a group of one node"
                              : "got no network for a group of several nodes";
  }
  if (network != nullptr && (network->num_rings == 0 || network->num_rings > kMaxNetworkRings)) {
    return "got " + std::to_string(network->num_rings) + " rings, expected 1 to " +
           std::to_string(kMaxNetworkRings);
  }
  // What a command can name (proxy/abi/command.h).
  const NetLayout layout = NetLayout::Make(shape);
  if (layout.total_bytes > kMaxHeapBytes) {
    return "the network stage has more than 1 TiB; lower max_tokens";
  }
  const uint64_t most_pairs = (kMaxCommandBytes - sizeof(CallRecord)) / sizeof(float);
  if (shape.num_nodes() > 1 && shape.max_tokens * shape.top_k > most_pairs) {
    return "got max_tokens * top_k = " + std::to_string(shape.max_tokens * shape.top_k) +
           ", between nodes at most " + std::to_string(most_pairs) +
           " (weights travel in one command); lower max_tokens";
  }
  const uint64_t most_bytes = kMaxCommandBytes / kNetChunkTokens;
  const uint64_t token_bytes = MostTokenBytes(layout, shape);
  if (shape.num_nodes() > 1 && token_bytes > most_bytes) {
    return "got rows or partials that take " + std::to_string(token_bytes) +
           " bytes, between nodes at most " + std::to_string(most_bytes) + " (" +
           std::to_string(kNetChunkTokens) + " travel in one command); lower hidden";
  }
  if (shape.node_size > kMaxNodeRanks) {
    return "got nodes of " + std::to_string(shape.node_size) + " ranks, expected at most " +
           std::to_string(kMaxNodeRanks) + " on GPUs, the size of the kernels' tables";
  }
  if (shape.num_ranks > kMaxRanks) {
    return "got " + std::to_string(shape.num_ranks) + " ranks, expected at most " +
           std::to_string(kMaxRanks) + " on GPUs; use a mesh axis of fewer devices";
  }
  if (shape.top_k > kMaxTopK) {
    return "got top_k " + std::to_string(shape.top_k) + ", at most " + std::to_string(kMaxTopK);
  }
  if (config.status == nullptr || config.peers == nullptr) return "no status or peers";
  if ((config.active >> config.rank % shape.node_size & 1) == 0)
    return "got a mask without this rank";
  if (HasHoles(shape, config.active) && network != nullptr) {
    return "got a mask of ranks in a group of several nodes";
  }
  return "";
}

std::string CheckPlan(const GroupShape& shape, const PlanParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const auto tokens = static_cast<uint64_t>(params.num_tokens);
  const uint64_t pairs = tokens * shape.top_k;
  const uint64_t experts = shape.experts_per_rank();
  const uint64_t source_tokens = shape.num_ranks * tokens;
  const bool is_rows_right =
      params.recv_rows >= 0 &&
      (params.layout == Layout::kExpertMajor ||
       rows == source_tokens * (params.layout == Layout::kExpertBatched ? experts : 1));
  const PlanOutputs& out = params.out;
  if (!is_rows_right || params.topk_idx.size() != pairs || out.send_slot.size() != pairs ||
      out.recv_src.size() != rows || out.group_sizes.size() != experts ||
      out.group_counts.size() != experts || out.send_counts.size() != shape.num_ranks ||
      out.recv_counts.size() != shape.num_ranks || out.num_dropped == nullptr ||
      out.overflow == nullptr ||
      out.recv_topk_idx.size() != (params.layout == Layout::kRankMajor ? rows * shape.top_k : 0)) {
    return "the plan's arrays do not have the sizes of T = " + std::to_string(tokens) +
           ", R = " + std::to_string(params.recv_rows);
  }
  return "";
}

std::string CheckDispatch(const GroupShape& shape, const DispatchParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  const uint64_t tokens = static_cast<uint64_t>(params.num_tokens);
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  const uint64_t cells = is_rank_major ? rows * shape.top_k : rows;
  const bool has_weights = !params.recv_weights.empty();
  if (params.recv_rows < 0 || params.recv_src.size() != rows ||
      (is_rank_major && rows != shape.num_ranks * tokens) ||
      (!params.weights.empty() && params.weights.size() != tokens * shape.top_k) ||
      (has_weights && params.recv_weights.size() != cells) ||
      (has_weights && is_rank_major && params.recv_topk_idx.size() != cells) ||
      (!params.row_weights.empty() && params.row_weights.size() != rows) ||
      (!params.recv_dots.empty() && params.recv_dots.size() != rows)) {
    return "arrays do not have the sizes of T = " + std::to_string(tokens) +
           ", R = " + std::to_string(params.recv_rows);
  }
  if ((!params.recv_dots.empty() && params.y == nullptr) ||
      ((!params.recv_dots.empty() || !params.row_weights.empty()) && params.recv_x == nullptr)) {
    return "recv_dots needs y and rows, row_weights need rows";
  }
  return CheckWire(shape, params);
}

std::string CheckCombine(const GroupShape& shape, const CombineParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  if (!InputsOfCombineFit(shape, params) || !OutputsOfCombineFit(shape, params)) {
    return "arrays do not have the sizes of T = " + std::to_string(params.num_tokens) +
           ", R = " + std::to_string(params.recv_rows);
  }
  return "";
}

std::string CheckDispatchStart(const GroupShape& shape, const DispatchParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const uint64_t pairs = static_cast<uint64_t>(params.num_tokens) * shape.top_k;
  if ((!params.weights.empty() && params.weights.size() != pairs) ||
      params.send_slot.size() != pairs) {
    return "weights or send_slot do not have T * K = " + std::to_string(pairs) + " elements";
  }
  if (params.y != nullptr || !params.row_weights.empty()) {
    return "got a start half of the backward of combine, which has none";
  }
  if (params.wire.block != 0) return "got a wire of FP8 in a half; quantise before it";
  return "";
}

std::string CheckCombineStart(const GroupShape& shape, const CombineParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  if (!InputsOfCombineFit(shape, params)) {
    return "recv_src, send_slot, row_weights or pair_scalars do not have the sizes of R = " +
           std::to_string(static_cast<uint64_t>(params.recv_rows));
  }
  return "";
}

std::string CheckCombineDone(const GroupShape& shape, const CombineParams& params) {
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  if (!OutputsOfCombineFit(shape, params)) {
    return "send_slot or pair_scalars_out do not have T * K = " +
           std::to_string(static_cast<uint64_t>(params.num_tokens) * shape.top_k) + " elements";
  }
  return "";
}

}  // namespace jax_ep::gpu
