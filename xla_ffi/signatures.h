// One Bind() per operation: arguments, results and attributes of the custom calls, shared by every
// platform's handlers so that they cannot diverge. Python's side is jax_ep/_ffi.py.
//
// Arrays that an operation can do without are passed as zero-element arrays, so the arity is fixed.
// T tokens, K = top_k, H hidden, N ranks, E_l local experts, R receive rows.
#pragma once

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/site.h"

namespace jax_ep {

// XLA's per-call state: made once when the call is instantiated, given to each execution.
struct SiteState {
  static xla::ffi::TypeId id;
  static xla::ffi::TypeInfo info;
  CallSite site;
};

namespace signatures {

namespace ffi = xla::ffi;

// Leading parameters of every handler.
inline auto Context() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<SiteState>>()
      .Attr<int64_t>("session")
      .Attr<int64_t>("mode")     // kernels/layout.h Mode
      .Attr<int64_t>("layout");  // kernels/layout.h Layout
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

inline auto Plan() {
  return PlanResults(Context().Arg<ffi::AnyBuffer>());  // topk_idx i32[T, K]
}

inline auto Dispatch() {
  return Context()
      .Attr<int64_t>("pad")    // 0 zero, 1 undefined
      .Arg<ffi::AnyBuffer>()   // x [T, H]
      .Arg<ffi::AnyBuffer>()   // weights f32[T, K]
      .Arg<ffi::AnyBuffer>()   // send_slot i32[T, K]
      .Arg<ffi::AnyBuffer>()   // recv_src i32[R]
      .Arg<ffi::AnyBuffer>()   // recv_topk_idx i32[N, T, K] in rank_major
      .Arg<ffi::AnyBuffer>()   // y [R, H]
      .Arg<ffi::AnyBuffer>()   // row_weights f32[R]
      .Ret<ffi::AnyBuffer>()   // recv_x [R, H]
      .Ret<ffi::AnyBuffer>()   // recv_weights f32[R]; rank_major f32[N, T, K]
      .Ret<ffi::AnyBuffer>();  // recv_dots f32[R]
}

inline auto LlDispatch() {
  return PlanResults(Context()
                         .Attr<int64_t>("pad")
                         .Arg<ffi::AnyBuffer>()   // x [T, H]
                         .Arg<ffi::AnyBuffer>()   // weights f32[T, K]
                         .Arg<ffi::AnyBuffer>())  // topk_idx i32[T, K]
      .Ret<ffi::AnyBuffer>()                      // recv_x
      .Ret<ffi::AnyBuffer>();                     // recv_weights
}

inline auto Combine() {
  return Context()
      .Arg<ffi::AnyBuffer>()   // y [R, H]
      .Arg<ffi::AnyBuffer>()   // row_weights f32[R]
      .Arg<ffi::AnyBuffer>()   // ride f32[R]; rank_major f32[R, K]
      .Arg<ffi::AnyBuffer>()   // send_slot i32[T, K]
      .Arg<ffi::AnyBuffer>()   // recv_src i32[R]
      .Ret<ffi::AnyBuffer>()   // out [T, H]
      .Ret<ffi::AnyBuffer>();  // ride_out f32[T, K]
}

inline auto DispatchStart() {
  return Context()
      .Arg<ffi::AnyBuffer>()   // x
      .Arg<ffi::AnyBuffer>()   // weights
      .Arg<ffi::AnyBuffer>()   // send_slot
      .Arg<ffi::AnyBuffer>()   // recv_src
      .Arg<ffi::AnyBuffer>()   // recv_topk_idx
      .Ret<ffi::AnyBuffer>();  // epoch i32[1]
}

inline auto DispatchDone() {
  return Context()
      .Attr<int64_t>("pad")
      .Attr<int64_t>("has_weights")
      .Arg<ffi::AnyBuffer>()   // epoch i32[1]
      .Arg<ffi::AnyBuffer>()   // send_slot
      .Arg<ffi::AnyBuffer>()   // recv_src
      .Arg<ffi::AnyBuffer>()   // recv_topk_idx
      .Ret<ffi::AnyBuffer>()   // recv_x
      .Ret<ffi::AnyBuffer>();  // recv_weights
}

inline auto LlDispatchStart() {
  return Context()
      .Arg<ffi::AnyBuffer>()   // x
      .Arg<ffi::AnyBuffer>()   // weights
      .Arg<ffi::AnyBuffer>()   // topk_idx
      .Ret<ffi::AnyBuffer>();  // epoch i32[1]
}

inline auto LlDispatchDone() {
  return PlanResults(Context()
                         .Attr<int64_t>("pad")
                         .Attr<int64_t>("has_weights")
                         .Arg<ffi::AnyBuffer>()   // epoch i32[1]
                         .Arg<ffi::AnyBuffer>())  // topk_idx i32[T, K]
      .Ret<ffi::AnyBuffer>()                      // recv_x
      .Ret<ffi::AnyBuffer>();                     // recv_weights
}

inline auto CombineStart() {
  return Context()
      .Arg<ffi::AnyBuffer>()   // y
      .Arg<ffi::AnyBuffer>()   // row_weights
      .Arg<ffi::AnyBuffer>()   // ride
      .Arg<ffi::AnyBuffer>()   // send_slot
      .Arg<ffi::AnyBuffer>()   // recv_src
      .Ret<ffi::AnyBuffer>();  // epoch i32[1]
}

inline auto CombineDone() {
  return Context()
      .Attr<int64_t>("has_ride")
      .Arg<ffi::AnyBuffer>()   // epoch i32[1]
      .Arg<ffi::AnyBuffer>()   // send_slot
      .Arg<ffi::AnyBuffer>()   // recv_src
      .Ret<ffi::AnyBuffer>()   // out
      .Ret<ffi::AnyBuffer>();  // ride_out
}

}  // namespace signatures
}  // namespace jax_ep
