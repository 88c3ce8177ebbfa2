// One Bind() per operation: arguments, results and attributes of the custom calls, shared by every
// platform's handlers so that they cannot diverge. Python's side is jax_ep/_ops/operations.py.
//
// Arrays that an operation can do without are passed as zero-element arrays, so the arity is fixed.
// T tokens, K = top_k, H hidden, N ranks, E_l local experts, R receive rows.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace signatures {

namespace ffi = xla::ffi;

// Leading parameters of every handler. `Context` is what the platform wants of XLA, decoded by its
// CtxDecoding<Context>.
template <typename Context>
auto Leading() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Attr<int64_t>("session")
      .template Attr<int64_t>("module")                  // site.h; PlanParams.site
      .template Attr<int64_t>("mode")                    // kernels/layout.h Mode
      .template Attr<int64_t>("layout")                  // kernels/layout.h Layout
      .template Attr<ffi::Span<const int64_t>>("sizes")  // buffers.h Sizes
      // position i32[1]: where the program holds this device to stand in the group's mesh, as
      // team * N + rank; absent where lowering has compared the devices (jax_ep/_ops/lowering.py).
      .template Arg<ffi::AnyBuffer>();
}

template <typename Binding>
auto PlanResults(Binding binding) {
  return std::move(binding)
      .template Ret<ffi::AnyBuffer>()   // group_sizes i32[E_l]
      .template Ret<ffi::AnyBuffer>()   // group_counts i32[E_l]
      .template Ret<ffi::AnyBuffer>()   // send_slot i32[T, K]
      .template Ret<ffi::AnyBuffer>()   // recv_src i32[R]
      .template Ret<ffi::AnyBuffer>()   // send_counts i32[N]
      .template Ret<ffi::AnyBuffer>()   // recv_counts i32[N]
      .template Ret<ffi::AnyBuffer>()   // num_dropped i32[]
      .template Ret<ffi::AnyBuffer>()   // overflow i32[]
      .template Ret<ffi::AnyBuffer>();  // recv_topk_idx i32[N, T, K] in rank_major
}

template <typename Context>
auto Plan() {
  return PlanResults(Leading<Context>()
                         .template Attr<int64_t>("counts_load")  // PlanParams.counts_load
                         .template Arg<ffi::AnyBuffer>());       // topk_idx i32[T, K]
}

template <typename Context>
auto Dispatch() {
  return Leading<Context>()
      .template Attr<int64_t>("pad")    // 0 zero, 1 undefined
      .template Arg<ffi::AnyBuffer>()   // x [T, H]
      .template Arg<ffi::AnyBuffer>()   // weights f32[T, K]
      .template Arg<ffi::AnyBuffer>()   // send_slot i32[T, K]
      .template Arg<ffi::AnyBuffer>()   // recv_src i32[R]
      .template Arg<ffi::AnyBuffer>()   // recv_topk_idx i32[N, T, K] in rank_major
      .template Arg<ffi::AnyBuffer>()   // y [R, H]
      .template Arg<ffi::AnyBuffer>()   // row_weights f32[R]
      .template Ret<ffi::AnyBuffer>()   // recv_x [R, H]
      .template Ret<ffi::AnyBuffer>()   // recv_weights f32[R]; rank_major f32[N, T, K]
      .template Ret<ffi::AnyBuffer>();  // recv_dots f32[R]
}

template <typename Context>
auto LlDispatch() {
  return PlanResults(Leading<Context>()
                         .template Attr<int64_t>("pad")
                         .template Arg<ffi::AnyBuffer>()   // x [T, H]
                         .template Arg<ffi::AnyBuffer>()   // weights f32[T, K]
                         .template Arg<ffi::AnyBuffer>())  // topk_idx i32[T, K]
      .template Ret<ffi::AnyBuffer>()                      // recv_x
      .template Ret<ffi::AnyBuffer>();                     // recv_weights
}

template <typename Context>
auto Combine() {
  return Leading<Context>()
      .template Arg<ffi::AnyBuffer>()   // y [R, H]
      .template Arg<ffi::AnyBuffer>()   // row_weights f32[R]
      .template Arg<ffi::AnyBuffer>()   // pair scalars f32[R]; rank_major f32[R, K]
      .template Arg<ffi::AnyBuffer>()   // send_slot i32[T, K]
      .template Arg<ffi::AnyBuffer>()   // recv_src i32[R]
      .template Ret<ffi::AnyBuffer>()   // out [T, H]
      .template Ret<ffi::AnyBuffer>();  // pair_scalars_out f32[T, K]
}

template <typename Context>
auto DispatchStart() {
  return Leading<Context>()
      .template Arg<ffi::AnyBuffer>()   // x
      .template Arg<ffi::AnyBuffer>()   // weights
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Arg<ffi::AnyBuffer>()   // recv_topk_idx
      .template Ret<ffi::AnyBuffer>();  // epoch i32[1]
}

template <typename Context>
auto DispatchDone() {
  return Leading<Context>()
      .template Attr<int64_t>("pad")
      .template Attr<int64_t>("has_weights")
      .template Arg<ffi::AnyBuffer>()   // epoch i32[1]
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Arg<ffi::AnyBuffer>()   // recv_topk_idx
      .template Ret<ffi::AnyBuffer>()   // recv_x
      .template Ret<ffi::AnyBuffer>();  // recv_weights
}

template <typename Context>
auto LlDispatchStart() {
  return Leading<Context>()
      .template Arg<ffi::AnyBuffer>()   // x
      .template Arg<ffi::AnyBuffer>()   // weights
      .template Arg<ffi::AnyBuffer>()   // topk_idx
      .template Ret<ffi::AnyBuffer>();  // epoch i32[1]
}

template <typename Context>
auto LlDispatchDone() {
  return PlanResults(Leading<Context>()
                         .template Attr<int64_t>("pad")
                         .template Attr<int64_t>("has_weights")
                         .template Arg<ffi::AnyBuffer>()   // epoch i32[1]
                         .template Arg<ffi::AnyBuffer>())  // topk_idx i32[T, K]
      .template Ret<ffi::AnyBuffer>()                      // recv_x
      .template Ret<ffi::AnyBuffer>();                     // recv_weights
}

template <typename Context>
auto CombineStart() {
  return Leading<Context>()
      .template Arg<ffi::AnyBuffer>()   // y
      .template Arg<ffi::AnyBuffer>()   // row_weights
      .template Arg<ffi::AnyBuffer>()   // pair scalars
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Ret<ffi::AnyBuffer>();  // epoch i32[1]
}

template <typename Context>
auto CombineDone() {
  return Leading<Context>()
      .template Attr<int64_t>("has_pair_scalars")
      .template Arg<ffi::AnyBuffer>()   // epoch i32[1]
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Ret<ffi::AnyBuffer>()   // out
      .template Ret<ffi::AnyBuffer>();  // pair_scalars_out
}

// Dispatches of rows that the kernels quantise (operations_fp8.h). On GPUs only.

template <typename Binding>
auto Fp8Attributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("pad")
      .template Attr<int64_t>("block")     // elements that share a scale
      .template Attr<int64_t>("scale")     // kernels/layout.h Fp8Scale
      .template Attr<int64_t>("columns");  // 1: a column of recv_scales for each row
}

template <typename Context>
auto DispatchFp8() {
  return Fp8Attributes(Leading<Context>())
      .template Arg<ffi::AnyBuffer>()   // x [T, H]
      .template Arg<ffi::AnyBuffer>()   // weights f32[T, K]
      .template Arg<ffi::AnyBuffer>()   // send_slot i32[T, K]
      .template Arg<ffi::AnyBuffer>()   // recv_src i32[R]
      .template Arg<ffi::AnyBuffer>()   // recv_topk_idx i32[N, T, K] in rank_major
      .template Ret<ffi::AnyBuffer>()   // recv_x [R, H], of e4m3fn if there are scales
      .template Ret<ffi::AnyBuffer>()   // recv_scales: [R, H / block] as Fp8Wire has them, or none
      .template Ret<ffi::AnyBuffer>();  // recv_weights f32[R]; rank_major f32[N, T, K]
}

template <typename Context>
auto LlDispatchFp8() {
  return PlanResults(Fp8Attributes(Leading<Context>())
                         .template Arg<ffi::AnyBuffer>()   // x [T, H]
                         .template Arg<ffi::AnyBuffer>()   // weights f32[T, K]
                         .template Arg<ffi::AnyBuffer>())  // topk_idx i32[T, K]
      .template Ret<ffi::AnyBuffer>()                      // recv_x
      .template Ret<ffi::AnyBuffer>()                      // recv_scales
      .template Ret<ffi::AnyBuffer>();                     // recv_weights
}

// Calls of mode ht that run beside other work: one result each, for XLA would wait for a call of
// several right after its start (jax_ep/_ops/beside.py).

template <typename Context>
auto PackedPlan() {
  return Leading<Context>()
      .template Attr<int64_t>("counts_load")  // PlanParams.counts_load
      .template Attr<int64_t>("recv_rows")    // R
      .template Arg<ffi::AnyBuffer>()         // topk_idx i32[T, K]
      .template Ret<ffi::AnyBuffer>();        // i32: a plan's results, as buffers.h packs them
}

template <typename Context>
auto DispatchRows() {
  return Leading<Context>()
      .template Attr<int64_t>("pad")
      .template Arg<ffi::AnyBuffer>()   // x [T, H]
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Ret<ffi::AnyBuffer>();  // recv_x [R, H]
}

template <typename Context>
auto DispatchWeights() {
  return Leading<Context>()
      .template Attr<int64_t>("pad")
      .template Arg<ffi::AnyBuffer>()   // weights f32[T, K]
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Arg<ffi::AnyBuffer>()   // recv_topk_idx
      .template Ret<ffi::AnyBuffer>();  // recv_weights f32[R]; rank_major f32[N, T, K]
}

template <typename Context>
auto DispatchDots() {
  return Leading<Context>()
      .template Attr<int64_t>("pad")
      .template Arg<ffi::AnyBuffer>()   // x [T, H]
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Arg<ffi::AnyBuffer>()   // y [R, H]
      .template Arg<ffi::AnyBuffer>()   // row_weights f32[R]
      .template Ret<ffi::AnyBuffer>()   // recv_x [R, H]
      .template Ret<ffi::AnyBuffer>();  // recv_dots f32[R]; of small use alone, hence two results
}

template <typename Context>
auto CombineRows() {
  return Leading<Context>()
      .template Arg<ffi::AnyBuffer>()   // y [R, H]
      .template Arg<ffi::AnyBuffer>()   // row_weights f32[R]
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Ret<ffi::AnyBuffer>();  // out [T, H]
}

template <typename Context>
auto CombineScalars() {
  return Leading<Context>()
      .template Arg<ffi::AnyBuffer>()   // pair scalars f32[R]; rank_major f32[R, K]
      .template Arg<ffi::AnyBuffer>()   // send_slot
      .template Arg<ffi::AnyBuffer>()   // recv_src
      .template Ret<ffi::AnyBuffer>();  // pair_scalars_out f32[T, K]
}

}  // namespace signatures
}  // namespace jax_ep
