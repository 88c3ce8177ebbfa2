// Whole dispatches of rows that travel in FP8 (handlers_gpu.cc): those of operations.h, with a
// format and the results of jax_ep.fp8. A Platform is as there.
#pragma once

#include <cstdint>

#include "xla_ffi/buffers.h"

namespace jax_ep {

template <typename Platform>
struct OperationsFp8 {
  using Context = typename Platform::Context;
  using Outcome = typename Platform::Outcome;

  static Outcome Dispatch(Context context, int64_t session, int64_t module, int64_t mode,
                          int64_t layout, Sizes sizes, Arg position, int64_t pad, int64_t block,
                          int64_t scale, int64_t columns, Arg x, Arg weights, Arg send_slot,
                          Arg recv_src, Arg recv_topk_idx, Ret recv_x, Ret recv_scales,
                          Ret recv_weights) {
    const CallKind call = Kind(module, mode, layout);
    const Format format{block, scale, columns};
    const auto make = [&](const GroupShape& shape) -> Result<DispatchParams> {
      Checker check("dispatch");
      return Make(call, shape, check, TokensOf(send_slot, shape), RowsOf(recv_src), pad, format,
                  {.x = &x,
                   .weights = &weights,
                   .send_slot = &send_slot,
                   .recv_src = &recv_src,
                   .recv_topk_idx = &recv_topk_idx,
                   .recv_weights = &recv_weights},
                  recv_x, recv_scales);
    };
    return Platform::Submit(context, session, sizes, position, "dispatch", make,
                            typename Platform::RunDispatch{});
  }

  static Outcome LlDispatch(Context context, int64_t session, int64_t module, int64_t mode,
                            int64_t layout, Sizes sizes, Arg position, int64_t pad, int64_t block,
                            int64_t scale, int64_t columns, Arg x, Arg weights, Arg topk_idx,
                            Ret r0, Ret r1, Ret r2, Ret r3, Ret r4, Ret r5, Ret r6, Ret r7, Ret r8,
                            Ret recv_x, Ret recv_scales, Ret recv_weights) {
    const CallKind call = Kind(module, mode, layout);
    const Format format{block, scale, columns};
    const auto make = [&](const GroupShape& shape) -> Result<LlDispatchParams> {
      Checker check("dispatch (ll)");
      LlDispatchParams params;
      JAX_EP_ASSIGN_OR_RETURN(params.plan, MakePlan(call, shape, check, topk_idx,
                                                    {&r0, &r1, &r2, &r3, &r4, &r5, &r6, &r7, &r8}));
      JAX_EP_ASSIGN_OR_RETURN(
          params.dispatch,
          Make(call, shape, check, params.plan.num_tokens, params.plan.recv_rows, pad, format,
               {.x = &x, .weights = &weights, .recv_weights = &recv_weights}, recv_x, recv_scales));
      return params;
    };
    return Platform::Submit(context, session, sizes, position, "dispatch (ll)", make,
                            typename Platform::RunLlDispatch{});
  }

 private:
  struct Format {
    int64_t block, scale, columns;
  };

  // `buffers`: without recv_x, whose type depends on whether there are scales.
  static Result<DispatchParams> Make(const CallKind& call, const GroupShape& shape, Checker& check,
                                     int64_t num_tokens, int64_t rows, int64_t pad,
                                     const Format& format, DispatchBuffers buffers, Ret& recv_x,
                                     Ret& recv_scales) {
    const bool are_split = recv_scales->element_count() != 0;
    const auto hidden = static_cast<int64_t>(shape.hidden);
    check.Require(
        format.block > 0 && hidden % format.block == 0 && format.scale >= 0 && format.scale <= 1,
        [&] {
          return "got a block of " + std::to_string(format.block) + " and scales of kind " +
                 std::to_string(format.scale) + ", expected a divisor of hidden, and 0 or 1";
        });
    if (!check.status().ok()) return check.status();
    const auto scale = static_cast<Fp8Scale>(format.scale);
    if (are_split) {
      check.Require("recv_x", recv_x, xla::ffi::DataType::F8E4M3FN, rows * hidden);
      check.Require("recv_scales", recv_scales,
                    scale == Fp8Scale::kF32 ? kF32 : xla::ffi::DataType::F8E8M0FNU,
                    rows * (hidden / format.block));
    } else {
      buffers.recv_x = &recv_x;
    }
    JAX_EP_ASSIGN_OR_RETURN(DispatchParams params,
                            MakeDispatch(call, shape, check, num_tokens, rows, pad, buffers));
    params.wire = {.block = static_cast<uint32_t>(format.block), .scale = scale};
    if (!are_split) return params;
    params.recv_x = static_cast<std::byte*>(recv_x->untyped_data());
    params.wire.recv_scales = static_cast<std::byte*>(recv_scales->untyped_data());
    params.wire.scales_in_columns = format.columns != 0;
    return params;
  }
};

}  // namespace jax_ep
