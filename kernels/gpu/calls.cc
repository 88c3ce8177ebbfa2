#include "kernels/gpu/calls.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/gpu/checks.h"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/profiler_range.h"

namespace jax_ep::gpu {

namespace {

LlRound OnlyRound(int64_t num_tokens) { return {.call_tokens = static_cast<uint32_t>(num_tokens)}; }

// Nothing calls halves of several rounds but a program that was lowered for another group.
std::string CheckHalf(const RankHandle& rank, CallPart part, int64_t num_tokens) {
  const uint64_t most = rank.device.layout.ll_round_tokens;
  if (part == CallPart::kWhole || static_cast<uint64_t>(num_tokens) <= most) return "";
  return "got a half of " + std::to_string(num_tokens) + " tokens, expected at most " +
         std::to_string(most) + ": more take rounds between nodes, which whole calls alone have; " +
         "lower the program with the group's Config.node_size";
}

const char* CheckAndLaunchLlDispatch(RankHandle& rank, const PlanParams* plan,
                                     const DispatchParams& call, CallPart part,
                                     const int32_t* epoch_in, int32_t* epoch_out, Stream stream) {
  const GroupShape& shape = rank.device.shape;
  DispatchParams params = call;
  params.mode = Mode::kLl;
  std::string wrong;
  if (plan != nullptr) {
    const uint64_t pairs = static_cast<uint64_t>(plan->num_tokens) * shape.top_k;
    if (plan->num_tokens != call.num_tokens || plan->topk_idx.size() != pairs) {
      wrong = "topk_idx does not have T * K = " + std::to_string(pairs) + " elements";
    }
    params.layout = plan->layout;
    params.recv_rows = plan->recv_rows;
    params.recv_src = plan->out.recv_src;
    params.recv_topk_idx = plan->out.recv_topk_idx;
    params.send_slot = plan->topk_idx;  // for the checks: of the same size, not read
    if (wrong.empty() && part != CallPart::kStart) wrong = CheckPlan(shape, *plan);
  }
  if (wrong.empty()) {
    wrong =
        part == CallPart::kStart ? CheckDispatchStart(shape, params) : CheckDispatch(shape, params);
  }
  if (wrong.empty() && part == CallPart::kWhole &&
      params.send_slot.size() != static_cast<uint64_t>(params.num_tokens) * shape.top_k) {
    wrong = "send_slot does not have T * K elements";
  }
  const bool has_rows = params.x != nullptr || params.recv_x != nullptr;
  if (wrong.empty() && has_rows) wrong = CheckHalf(rank, part, params.num_tokens);
  if (!wrong.empty()) return KeepText("ll dispatch: " + std::move(wrong));
  const auto to = static_cast<cudaStream_t>(stream);
  if (part == CallPart::kWhole && shape.num_nodes() > 1) {
    return LaunchNetLlDispatch(rank, plan, params, to);
  }
  return LaunchLlDispatch(rank, plan, params, OnlyRound(params.num_tokens), part, epoch_in,
                          epoch_out, to);
}

std::string CheckSlotCombine(const GroupShape& shape, const CombineParams& params, CallPart part) {
  if (part == CallPart::kStart) return CheckCombineStart(shape, params);
  if (part == CallPart::kDone) return CheckCombineDone(shape, params);
  return CheckCombine(shape, params);
}

const char* CheckAndLaunchSlotCombine(RankHandle& rank, const CombineParams& call, CallPart part,
                                      const int32_t* epoch_in, int32_t* epoch_out, Stream stream) {
  CombineParams params = call;
  if (part == CallPart::kStart) params.pair_scalars_out = {};
  const GroupShape& shape = rank.device.shape;
  std::string wrong = CheckSlotCombine(shape, params, part);
  if (wrong.empty()) wrong = CheckHalf(rank, part, params.num_tokens);
  if (!wrong.empty()) return KeepText("combine: " + std::move(wrong));
  const auto to = static_cast<cudaStream_t>(stream);
  if (part == CallPart::kWhole && shape.num_nodes() > 1) {
    return LaunchNetSlotCombine(rank, params, to);
  }
  return LaunchSlotCombine(rank, params, OnlyRound(params.num_tokens), part, epoch_in, epoch_out,
                           to);
}

// Nothing calls these but a program that another version of jax_ep has lowered.
const char* NoHalves(const char* operation) {
  return KeepText(std::string(operation) +
                  " (ht): mode ht has no halves on GPUs, expected a whole call; lower the program "
                  "with this version of jax_ep");
}

// Of an elastic group: fails the rank if the call knows another mask.
const char* CheckNames(RankHandle& rank, Operation operation, const PlanParams& params,
                       Stream stream) {
  const RankNames ids{params.topk_idx.data(), params.topk_idx.size(),
                      rank.device.shape.experts_per_rank()};
  return LaunchCheckActive(rank, operation, /*are_ids=*/true, {ids},
                           static_cast<cudaStream_t>(stream));
}
template <typename Params>  // of a dispatch or combine with a plan
const char* CheckNames(RankHandle& rank, Operation operation, const Params& params, Stream stream) {
  const GroupShape& shape = rank.device.shape;
  if (!HasHoles(shape, rank.device.active)) return nullptr;
  const bool is_ll = params.mode == Mode::kLl;
  const int64_t rank_slots = is_ll ? shape.num_ranks * params.num_tokens : params.recv_rows;
  const RankNames sources{params.recv_src.data(), params.recv_src.size(),
                          shape.max_tokens * shape.top_k};
  const RankNames targets{params.send_slot.data(), params.send_slot.size(),
                          static_cast<uint64_t>(std::max<int64_t>(rank_slots, 1))};
  return LaunchCheckActive(rank, operation, /*are_ids=*/false, {sources, targets},
                           static_cast<cudaStream_t>(stream));
}

// Runs the launcher of a call under the rank's lock: its kernels carry the call's shape, by which
// they read and write in the areas that the group's shape has laid out, and its fingerprint. If
// it could launch only some kernels of the operation, the rank fails: nobody will end what they
// have begun.
template <typename Params, typename Launch>
const char* Locked(RankHandle* rank, const GroupShape& shape, Operation operation,
                   const Params& params, Stream stream, Launch&& launch) {
  const ProfilerRange range(RangeName(operation, params.mode));
  const std::lock_guard lock(rank->launching);
  rank->device.shape = shape;
  rank->device.site = params.site;
  rank->device.program = FingerprintOf(operation, shape, params.site, params.mode, params.layout,
                                       params.num_tokens, params.recv_rows);
  TakeLaunchCount();
  if (rank->is_elastic) {
    if (const char* error = CheckNames(*rank, operation, params, stream)) return error;
    TakeLaunchCount();
  }
  const char* error = launch();
  if (error == nullptr || TakeLaunchCount() == 0) return error;
  std::string first = error;
  if (LaunchAbandon(*rank, operation, static_cast<cudaStream_t>(stream)) != nullptr) {
    first += "; the other ranks fail after timeout_s";
  }
  return KeepText(std::move(first));
}

}  // namespace

const char* RunCheckPosition(RankHandle* rank, const int32_t* position, int32_t expected,
                             Stream stream) {
  const std::lock_guard lock(rank->launching);
  return LaunchCheckPosition(*rank, position, expected, static_cast<cudaStream_t>(stream));
}

const char* RunPlan(RankHandle* rank, const GroupShape* shape, const PlanParams* params,
                    Stream stream) {
  return Locked(rank, *shape, Operation::kPlan, *params, stream,
                [&] { return LaunchPlan(*rank, *params, static_cast<cudaStream_t>(stream)); });
}

const char* RunDispatch(RankHandle* rank, const GroupShape* shape, const DispatchParams* params,
                        Stream stream) {
  if (params->mode == Mode::kLl) {
    return Locked(rank, *shape, Operation::kLlDispatch, *params, stream, [&] {
      return CheckAndLaunchLlDispatch(*rank, nullptr, *params, CallPart::kWhole, nullptr, nullptr,
                                      stream);
    });
  }
  return Locked(rank, *shape, Operation::kDispatch, *params, stream,
                [&] { return LaunchDispatch(*rank, *params, static_cast<cudaStream_t>(stream)); });
}

const char* RunDispatchStart(RankHandle* rank, const GroupShape* shape,
                             const DispatchParams* params, int32_t* epoch, Stream stream) {
  if (params->mode == Mode::kHt) return NoHalves("dispatch_start");
  return Locked(rank, *shape, Operation::kLlDispatchStart, *params, stream, [&] {
    return CheckAndLaunchLlDispatch(*rank, nullptr, *params, CallPart::kStart, nullptr, epoch,
                                    stream);
  });
}

const char* RunDispatchDone(RankHandle* rank, const GroupShape* shape, const DispatchParams* params,
                            const int32_t* epoch, Stream stream) {
  if (params->mode == Mode::kHt) return NoHalves("dispatch_done");
  return Locked(rank, *shape, Operation::kLlDispatchDone, *params, stream, [&] {
    return CheckAndLaunchLlDispatch(*rank, nullptr, *params, CallPart::kDone, epoch, nullptr,
                                    stream);
  });
}

const char* RunLlDispatch(RankHandle* rank, const GroupShape* shape, const LlDispatchParams* params,
                          Stream stream) {
  return Locked(rank, *shape, Operation::kLlDispatch, params->plan, stream, [&] {
    return CheckAndLaunchLlDispatch(*rank, &params->plan, params->dispatch, CallPart::kWhole,
                                    nullptr, nullptr, stream);
  });
}

const char* RunLlDispatchStart(RankHandle* rank, const GroupShape* shape,
                               const LlDispatchParams* params, int32_t* epoch, Stream stream) {
  return Locked(rank, *shape, Operation::kLlDispatchStart, params->plan, stream, [&] {
    return CheckAndLaunchLlDispatch(*rank, &params->plan, params->dispatch, CallPart::kStart,
                                    nullptr, epoch, stream);
  });
}

const char* RunLlDispatchDone(RankHandle* rank, const GroupShape* shape,
                              const LlDispatchParams* params, const int32_t* epoch, Stream stream) {
  return Locked(rank, *shape, Operation::kLlDispatchDone, params->plan, stream, [&] {
    return CheckAndLaunchLlDispatch(*rank, &params->plan, params->dispatch, CallPart::kDone, epoch,
                                    nullptr, stream);
  });
}

const char* RunCombine(RankHandle* rank, const GroupShape* shape, const CombineParams* params,
                       Stream stream) {
  if (params->mode == Mode::kLl) {
    return Locked(rank, *shape, Operation::kLlCombine, *params, stream, [&] {
      return CheckAndLaunchSlotCombine(*rank, *params, CallPart::kWhole, nullptr, nullptr, stream);
    });
  }
  return Locked(rank, *shape, Operation::kCombine, *params, stream,
                [&] { return LaunchCombine(*rank, *params, static_cast<cudaStream_t>(stream)); });
}

const char* RunCombineStart(RankHandle* rank, const GroupShape* shape, const CombineParams* params,
                            int32_t* epoch, Stream stream) {
  if (params->mode == Mode::kHt) return NoHalves("combine_start");
  return Locked(rank, *shape, Operation::kLlCombineStart, *params, stream, [&] {
    return CheckAndLaunchSlotCombine(*rank, *params, CallPart::kStart, nullptr, epoch, stream);
  });
}

const char* RunCombineDone(RankHandle* rank, const GroupShape* shape, const CombineParams* params,
                           const int32_t* epoch, Stream stream) {
  if (params->mode == Mode::kHt) return NoHalves("combine_done");
  return Locked(rank, *shape, Operation::kLlCombineDone, *params, stream, [&] {
    return CheckAndLaunchSlotCombine(*rank, *params, CallPart::kDone, epoch, nullptr, stream);
  });
}

}  // namespace jax_ep::gpu
