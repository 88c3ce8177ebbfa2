// Calls of mode ht that run beside other work (handlers_gpu.cc), each a part of an operation of
// operations.h with one result. A Platform is as there.
#pragma once

#include <cstdint>

#include "xla_ffi/buffers.h"

namespace jax_ep {

template <typename Platform>
struct OperationsBeside {
  using Context = typename Platform::Context;
  using Outcome = typename Platform::Outcome;

  static Outcome Plan(Context context, int64_t session, int64_t module, int64_t mode,
                      int64_t layout, Sizes sizes, Arg position, int64_t counts_load,
                      int64_t recv_rows, Arg topk_idx, Ret packed) {
    CallKind call = Kind(module, mode, layout);
    call.counts_load = counts_load != 0;
    const auto make = [&](const GroupShape& shape) -> Result<PlanParams> {
      Checker check("plan");
      return MakePackedPlan(call, shape, check, topk_idx, recv_rows, packed);
    };
    return Platform::Submit(context, session, sizes, position, "plan", make,
                            typename Platform::RunPlan{});
  }

  static Outcome DispatchRows(Context context, int64_t session, int64_t module, int64_t mode,
                              int64_t layout, Sizes sizes, Arg position, int64_t pad, Arg x,
                              Arg send_slot, Arg recv_src, Ret recv_x) {
    return Dispatch(context, session, sizes, position, Kind(module, mode, layout), pad,
                    {.x = &x, .send_slot = &send_slot, .recv_src = &recv_src, .recv_x = &recv_x});
  }

  static Outcome DispatchWeights(Context context, int64_t session, int64_t module, int64_t mode,
                                 int64_t layout, Sizes sizes, Arg position, int64_t pad,
                                 Arg weights, Arg send_slot, Arg recv_src, Arg recv_topk_idx,
                                 Ret recv_weights) {
    return Dispatch(context, session, sizes, position, Kind(module, mode, layout), pad,
                    {.weights = &weights,
                     .send_slot = &send_slot,
                     .recv_src = &recv_src,
                     .recv_topk_idx = &recv_topk_idx,
                     .recv_weights = &recv_weights});
  }

  static Outcome DispatchDots(Context context, int64_t session, int64_t module, int64_t mode,
                              int64_t layout, Sizes sizes, Arg position, int64_t pad, Arg x,
                              Arg send_slot, Arg recv_src, Arg y, Arg row_weights, Ret recv_x,
                              Ret recv_dots) {
    return Dispatch(context, session, sizes, position, Kind(module, mode, layout), pad,
                    {.x = &x,
                     .send_slot = &send_slot,
                     .recv_src = &recv_src,
                     .y = &y,
                     .row_weights = &row_weights,
                     .recv_x = &recv_x,
                     .recv_dots = &recv_dots});
  }

  static Outcome CombineRows(Context context, int64_t session, int64_t module, int64_t mode,
                             int64_t layout, Sizes sizes, Arg position, Arg y, Arg row_weights,
                             Arg send_slot, Arg recv_src, Ret out) {
    return Combine(context, session, sizes, position, Kind(module, mode, layout),
                   {.y = &y,
                    .row_weights = &row_weights,
                    .send_slot = &send_slot,
                    .recv_src = &recv_src,
                    .out = &out});
  }

  static Outcome CombineScalars(Context context, int64_t session, int64_t module, int64_t mode,
                                int64_t layout, Sizes sizes, Arg position, Arg pair_scalars,
                                Arg send_slot, Arg recv_src, Ret pair_scalars_out) {
    return Combine(context, session, sizes, position, Kind(module, mode, layout),
                   {.pair_scalars = &pair_scalars,
                    .send_slot = &send_slot,
                    .recv_src = &recv_src,
                    .pair_scalars_out = &pair_scalars_out});
  }

 private:
  static Outcome Dispatch(const Context& context, int64_t session, Sizes sizes, const Arg& position,
                          const CallKind& call, int64_t pad, const DispatchBuffers& buffers) {
    const auto make = [&](const GroupShape& shape) -> Result<DispatchParams> {
      Checker check("dispatch");
      return MakeDispatch(call, shape, check, TokensOf(*buffers.send_slot, shape),
                          RowsOf(*buffers.recv_src), pad, buffers);
    };
    return Platform::Submit(context, session, sizes, position, "dispatch", make,
                            typename Platform::RunDispatch{});
  }

  static Outcome Combine(const Context& context, int64_t session, Sizes sizes, const Arg& position,
                         const CallKind& call, const CombineBuffers& buffers) {
    const auto make = [&](const GroupShape& shape) -> Result<CombineParams> {
      Checker check("combine");
      return MakeCombine(call, shape, check, buffers);
    };
    return Platform::Submit(context, session, sizes, position, "combine", make,
                            typename Platform::RunCombine{});
  }
};

}  // namespace jax_ep
