// Whole calls of mode ll between nodes. Each is a start and a done. One of more tokens than slot
// sets have room for (GpuLlRoundTokens) is several of both, one behind the other:
//
//   dispatch  first the plan, by the ids of all tokens, then the rows of each round, as of a call
//             with that plan. Ids have room for the largest call, so a call without rows is one
//             round.
//   combine   the partials of each round.
//
// A round needs no rules of its own: it takes the set that has been free for longest, when all
// ranks have read what was there. Where two are free, the next round does not wait for those that
// read.
#include <algorithm>

#include "kernels/gpu/launch_state.h"

namespace jax_ep::gpu {
namespace {

// half(part, epoch_in, epoch_out): a start, then its done.
template <typename Half>
const char* LaunchHalves(RankHandle& rank, Half&& half) {
  int32_t* epoch = WholeEpochOf(rank);
  if (const char* error = half(CallPart::kStart, nullptr, epoch)) return error;
  return half(CallPart::kDone, epoch, nullptr);
}

// launch(round, num_tokens) for each of them. Calls without tokens have one.
template <typename Launch>
const char* ForEachRound(uint64_t call_tokens, uint64_t round_tokens, Launch&& launch) {
  for (uint64_t first = 0;; first += round_tokens) {
    const LlRound round{.first_token = static_cast<uint32_t>(first),
                        .call_tokens = static_cast<uint32_t>(call_tokens)};
    const uint64_t num_tokens = std::min(round_tokens, call_tokens - first);
    if (const char* error = launch(round, num_tokens)) return error;
    if (first + num_tokens >= call_tokens) return nullptr;
  }
}

// The cells [T * K] of a round, of an array that may be absent.
template <typename T>
std::span<T> CellsOf(std::span<T> cells, const GroupShape& shape, const LlRound& round,
                     uint64_t num_tokens) {
  if (cells.empty()) return cells;
  return cells.subspan(round.first_token * uint64_t{shape.top_k}, num_tokens * shape.top_k);
}

}  // namespace

const char* LaunchNetLlDispatch(RankHandle& rank, const PlanParams* plan,
                                const DispatchParams& call, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const auto call_tokens = static_cast<uint64_t>(call.num_tokens);
  const auto launch = [&](const DispatchParams& params, const LlRound& round) {
    return LaunchHalves(rank, [&](CallPart part, const int32_t* epoch_in, int32_t* epoch_out) {
      return LaunchLlDispatch(rank, plan, params, round, part, epoch_in, epoch_out, stream);
    });
  };
  const uint64_t room = rank.device.layout.ll_round_tokens;
  const bool has_rows = call.x != nullptr || call.recv_x != nullptr;
  if (!has_rows || call_tokens <= room) {
    return launch(call, {.call_tokens = static_cast<uint32_t>(call_tokens)});
  }
  DispatchParams planned = call;
  if (plan != nullptr) {
    DispatchParams no_rows = call;
    no_rows.x = nullptr;
    no_rows.recv_x = nullptr;
    no_rows.weights = {};
    no_rows.recv_weights = {};
    const LlRound round{.call_tokens = static_cast<uint32_t>(call_tokens), .is_plan_alone = true};
    if (const char* error = launch(no_rows, round)) return error;
    planned.send_slot = plan->out.send_slot;
  }
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  return ForEachRound(call_tokens, room, [&](LlRound round, uint64_t num_tokens) {
    DispatchParams params = planned;
    params.num_tokens = static_cast<int64_t>(num_tokens);
    if (params.x != nullptr) params.x += round.first_token * row_bytes;
    params.weights = CellsOf(planned.weights, shape, round, num_tokens);
    params.send_slot = CellsOf(planned.send_slot, shape, round, num_tokens);
    round.is_planned = plan != nullptr;
    return launch(params, round);
  });
}

const char* LaunchNetSlotCombine(RankHandle& rank, const CombineParams& call, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  return ForEachRound(
      static_cast<uint64_t>(call.num_tokens), rank.device.layout.ll_round_tokens,
      [&](const LlRound& round, uint64_t num_tokens) {
        CombineParams params = call;
        params.num_tokens = static_cast<int64_t>(num_tokens);
        params.send_slot = CellsOf(call.send_slot, shape, round, num_tokens);
        params.pair_scalars_out = CellsOf(call.pair_scalars_out, shape, round, num_tokens);
        if (params.out != nullptr) params.out += round.first_token * row_bytes;
        return LaunchHalves(rank, [&](CallPart part, const int32_t* epoch_in, int32_t* epoch_out) {
          return LaunchSlotCombine(rank, params, round, part, epoch_in, epoch_out, stream);
        });
      });
}

}  // namespace jax_ep::gpu
