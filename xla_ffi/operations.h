// The ten operations as FFI handlers, for any platform: each takes XLA's buffers apart, builds the
// kernels' parameters and submits them. A Platform says what runs them:
//
//   using Context    what XLA gives a call besides arguments (decoded by the signature)
//   using Outcome    what a handler returns
//   template <typename Make, typename Run>
//   static Outcome Submit(const Context&, int64_t session_id, Sizes sizes, const Arg& position,
//                         const char* operation, Make make, Run run)
//       finds the session, compares `position`, calls make(shape of the call) ->
//       Result<Params> and runs `run` with the parameters, now or later; a failure of either
//       becomes the outcome.
//   struct RunPlan, RunDispatch, RunLlDispatch, RunCombine, StartDispatch, FinishDispatch, ...
//       callables for each operation, made from the device or host word of the epoch in halves.
#pragma once

#include <cstdint>

#include "xla_ffi/buffers.h"

namespace jax_ep {

template <typename Platform>
struct Operations {
  using Context = typename Platform::Context;
  using Outcome = typename Platform::Outcome;

  static Outcome Plan(Context context, int64_t session, int64_t module, int64_t mode,
                      int64_t layout, Sizes sizes, Arg position, int64_t counts_load, Arg topk_idx,
                      Ret r0, Ret r1, Ret r2, Ret r3, Ret r4, Ret r5, Ret r6, Ret r7, Ret r8) {
    CallKind call = Kind(module, mode, layout);
    call.counts_load = counts_load != 0;
    const auto make = [&](const GroupShape& shape) -> Result<PlanParams> {
      Checker check("plan");
      return MakePlan(call, shape, check, topk_idx, {&r0, &r1, &r2, &r3, &r4, &r5, &r6, &r7, &r8});
    };
    return Platform::Submit(context, session, sizes, position, "plan", make,
                            typename Platform::RunPlan{});
  }

  static Outcome Dispatch(Context context, int64_t session, int64_t module, int64_t mode,
                          int64_t layout, Sizes sizes, Arg position, int64_t pad, Arg x,
                          Arg weights, Arg send_slot, Arg recv_src, Arg recv_topk_idx, Arg y,
                          Arg row_weights, Ret recv_x, Ret recv_weights, Ret recv_dots) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<DispatchParams> {
      Checker check("dispatch");
      return MakeDispatch(call, shape, check, TokensOf(send_slot, shape), RowsOf(recv_src), pad,
                          {.x = &x,
                           .weights = &weights,
                           .send_slot = &send_slot,
                           .recv_src = &recv_src,
                           .recv_topk_idx = &recv_topk_idx,
                           .y = &y,
                           .row_weights = &row_weights,
                           .recv_x = &recv_x,
                           .recv_weights = &recv_weights,
                           .recv_dots = &recv_dots});
    };
    return Platform::Submit(context, session, sizes, position, "dispatch", make,
                            typename Platform::RunDispatch{});
  }

  static Outcome LlDispatch(Context context, int64_t session, int64_t module, int64_t mode,
                            int64_t layout, Sizes sizes, Arg position, int64_t pad, Arg x,
                            Arg weights, Arg topk_idx, Ret r0, Ret r1, Ret r2, Ret r3, Ret r4,
                            Ret r5, Ret r6, Ret r7, Ret r8, Ret recv_x, Ret recv_weights) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<LlDispatchParams> {
      Checker check("dispatch (ll)");
      LlDispatchParams params;
      JAX_EP_ASSIGN_OR_RETURN(params.plan, MakePlan(call, shape, check, topk_idx,
                                                    {&r0, &r1, &r2, &r3, &r4, &r5, &r6, &r7, &r8}));
      JAX_EP_ASSIGN_OR_RETURN(
          params.dispatch,
          MakeDispatch(
              call, shape, check, params.plan.num_tokens, params.plan.recv_rows, pad,
              {.x = &x, .weights = &weights, .recv_x = &recv_x, .recv_weights = &recv_weights}));
      return params;
    };
    return Platform::Submit(context, session, sizes, position, "dispatch (ll)", make,
                            typename Platform::RunLlDispatch{});
  }

  static Outcome Combine(Context context, int64_t session, int64_t module, int64_t mode,
                         int64_t layout, Sizes sizes, Arg position, Arg y, Arg row_weights,
                         Arg pair_scalars, Arg send_slot, Arg recv_src, Ret out,
                         Ret pair_scalars_out) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<CombineParams> {
      Checker check("combine");
      return MakeCombine(call, shape, check,
                         {.y = &y,
                          .row_weights = &row_weights,
                          .pair_scalars = &pair_scalars,
                          .send_slot = &send_slot,
                          .recv_src = &recv_src,
                          .out = &out,
                          .pair_scalars_out = &pair_scalars_out});
    };
    return Platform::Submit(context, session, sizes, position, "combine", make,
                            typename Platform::RunCombine{});
  }

  static Outcome DispatchStart(Context context, int64_t session, int64_t module, int64_t mode,
                               int64_t layout, Sizes sizes, Arg position, Arg x, Arg weights,
                               Arg send_slot, Arg recv_src, Arg recv_topk_idx, Ret epoch) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<DispatchParams> {
      Checker check("dispatch_start");
      check.Require("epoch", epoch, kI32, 1);
      return MakeDispatch(call, shape, check, TokensOf(send_slot, shape), RowsOf(recv_src),
                          /*pad=*/0,
                          {.x = &x,
                           .weights = &weights,
                           .send_slot = &send_slot,
                           .recv_src = &recv_src,
                           .recv_topk_idx = &recv_topk_idx});
    };
    return Platform::Submit(context, session, sizes, position, "dispatch_start", make,
                            typename Platform::StartDispatch{Out<int32_t>(epoch).data()});
  }

  static Outcome DispatchDone(Context context, int64_t session, int64_t module, int64_t mode,
                              int64_t layout, Sizes sizes, Arg position, int64_t pad,
                              int64_t /*has_weights*/, Arg epoch, Arg send_slot, Arg recv_src,
                              Arg recv_topk_idx, Ret recv_x, Ret recv_weights) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<DispatchParams> {
      Checker check("dispatch_done");
      check.Require("epoch", epoch, kI32, 1);
      return MakeDispatch(call, shape, check, TokensOf(send_slot, shape), RowsOf(recv_src), pad,
                          {.send_slot = &send_slot,
                           .recv_src = &recv_src,
                           .recv_topk_idx = &recv_topk_idx,
                           .recv_x = &recv_x,
                           .recv_weights = &recv_weights});
    };
    return Platform::Submit(context, session, sizes, position, "dispatch_done", make,
                            typename Platform::FinishDispatch{In<int32_t>(epoch).data()});
  }

  static Outcome LlDispatchStart(Context context, int64_t session, int64_t module, int64_t mode,
                                 int64_t layout, Sizes sizes, Arg position, Arg x, Arg weights,
                                 Arg topk_idx, Ret epoch) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<LlDispatchParams> {
      Checker check("dispatch_start (ll)");
      check.Require("epoch", epoch, kI32, 1);
      const int64_t num_tokens = TokensOf(topk_idx, shape);
      check.Require("topk_idx", topk_idx, kI32, num_tokens * shape.top_k);
      LlDispatchParams params;
      params.plan = {.mode = call.mode,
                     .layout = call.layout,
                     .site = call.site,
                     .num_tokens = num_tokens,
                     .recv_rows = 0,
                     .topk_idx = In<int32_t>(topk_idx),
                     .out = {}};
      JAX_EP_ASSIGN_OR_RETURN(params.dispatch,
                              MakeDispatch(call, shape, check, num_tokens,
                                           ExpectedRows(shape, call.layout, num_tokens, /*rows=*/0),
                                           /*pad=*/0, {.x = &x, .weights = &weights}));
      return params;
    };
    return Platform::Submit(context, session, sizes, position, "dispatch_start (ll)", make,
                            typename Platform::StartLlDispatch{Out<int32_t>(epoch).data()});
  }

  static Outcome LlDispatchDone(Context context, int64_t session, int64_t module, int64_t mode,
                                int64_t layout, Sizes sizes, Arg position, int64_t pad,
                                int64_t /*has_weights*/, Arg epoch, Arg topk_idx, Ret r0, Ret r1,
                                Ret r2, Ret r3, Ret r4, Ret r5, Ret r6, Ret r7, Ret r8, Ret recv_x,
                                Ret recv_weights) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<LlDispatchParams> {
      Checker check("dispatch_done (ll)");
      check.Require("epoch", epoch, kI32, 1);
      LlDispatchParams params;
      JAX_EP_ASSIGN_OR_RETURN(params.plan, MakePlan(call, shape, check, topk_idx,
                                                    {&r0, &r1, &r2, &r3, &r4, &r5, &r6, &r7, &r8}));
      JAX_EP_ASSIGN_OR_RETURN(
          params.dispatch,
          MakeDispatch(call, shape, check, params.plan.num_tokens, params.plan.recv_rows, pad,
                       {.recv_x = &recv_x, .recv_weights = &recv_weights}));
      return params;
    };
    return Platform::Submit(context, session, sizes, position, "dispatch_done (ll)", make,
                            typename Platform::FinishLlDispatch{In<int32_t>(epoch).data()});
  }

  static Outcome CombineStart(Context context, int64_t session, int64_t module, int64_t mode,
                              int64_t layout, Sizes sizes, Arg position, Arg y, Arg row_weights,
                              Arg pair_scalars, Arg send_slot, Arg recv_src, Ret epoch) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<CombineParams> {
      Checker check("combine_start");
      check.Require("epoch", epoch, kI32, 1);
      return MakeCombine(call, shape, check,
                         {.y = &y,
                          .row_weights = &row_weights,
                          .pair_scalars = &pair_scalars,
                          .send_slot = &send_slot,
                          .recv_src = &recv_src});
    };
    return Platform::Submit(context, session, sizes, position, "combine_start", make,
                            typename Platform::StartCombine{Out<int32_t>(epoch).data()});
  }

  static Outcome CombineDone(Context context, int64_t session, int64_t module, int64_t mode,
                             int64_t layout, Sizes sizes, Arg position,
                             int64_t /*has_pair_scalars*/, Arg epoch, Arg send_slot, Arg recv_src,
                             Ret out, Ret pair_scalars_out) {
    const CallKind call = Kind(module, mode, layout);
    const auto make = [&](const GroupShape& shape) -> Result<CombineParams> {
      Checker check("combine_done");
      check.Require("epoch", epoch, kI32, 1);
      return MakeCombine(call, shape, check,
                         {.send_slot = &send_slot,
                          .recv_src = &recv_src,
                          .out = &out,
                          .pair_scalars_out = &pair_scalars_out});
    };
    return Platform::Submit(context, session, sizes, position, "combine_done", make,
                            typename Platform::FinishCombine{In<int32_t>(epoch).data()});
  }
};

// One custom call: its name and handlers. `instantiate` is null where a platform needs no state.
struct HandlerRegistration {
  const char* target;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
};

}  // namespace jax_ep
