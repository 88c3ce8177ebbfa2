// A named range in the timeline of Nsight Systems while an operation is launched: "jax_ep.dispatch
// (ht)", as JAX's own traces call it. Costs a branch where no profiler listens. Its kernels appear
// below the range; of a CUDA graph only the capture does.
#pragma once

#include "kernels/gpu/api.h"
#include "kernels/gpu/device/vendor.h"

#ifndef JAX_EP_HIP
#include <nvtx3/nvToolsExt.h>
#endif

namespace jax_ep::gpu {

constexpr const char* RangeName(Operation operation, Mode mode) {
  const bool is_ll = mode == Mode::kLl;
  switch (operation) {
    case Operation::kPlan:
      return is_ll ? "jax_ep.plan (ll)" : "jax_ep.plan (ht)";
    case Operation::kDispatch:
      return "jax_ep.dispatch (ht)";
    case Operation::kCombine:
      return "jax_ep.combine (ht)";
    case Operation::kLlDispatch:
      return "jax_ep.dispatch (ll)";
    case Operation::kLlCombine:
      return "jax_ep.combine (ll)";
    case Operation::kLlDispatchStart:
      return "jax_ep.dispatch_start (ll)";
    case Operation::kLlDispatchDone:
      return "jax_ep.dispatch_done (ll)";
    case Operation::kLlCombineStart:
      return "jax_ep.combine_start (ll)";
    case Operation::kLlCombineDone:
      return "jax_ep.combine_done (ll)";
  }
  return "jax_ep";
}

// From here to the end of the scope, on the calling thread.
class ProfilerRange {
 public:
#ifdef JAX_EP_HIP  // its ranges would need a library more; rocprof shows the kernels' names
  explicit ProfilerRange(const char*) {}
#else
  explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
  ~ProfilerRange() { nvtxRangePop(); }
#endif
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace jax_ep::gpu
