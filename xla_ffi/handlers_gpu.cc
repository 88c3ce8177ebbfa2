// GPU platforms: each handler enqueues kernels on XLA's stream and returns. Nothing is allocated,
// waited for or read back, so the calls may be captured in command buffers and replayed, but for
// those of elastic groups and those beside other work.
#include "xla_ffi/handlers_gpu.h"

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "xla_ffi/error.h"
#include "xla_ffi/gpu_session.h"
#include "xla_ffi/operations_beside.h"
#include "xla_ffi/operations_fp8.h"
#include "xla_ffi/session_table.h"
#include "xla_ffi/signatures.h"

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

struct GpuContext {
  gpu::Stream stream = nullptr;
  int32_t device = 0;
};

// What a launch needs besides its parameters.
struct Target {
  const gpu::GpuApi& api;
  gpu::RankHandle* rank;
  const GroupShape* shape;  // of the call
  gpu::Stream stream;
};

uint64_t SiteOf(const PlanParams& params) { return params.site; }
uint64_t SiteOf(const DispatchParams& params) { return params.site; }
uint64_t SiteOf(const CombineParams& params) { return params.site; }
uint64_t SiteOf(const LlDispatchParams& params) { return params.plan.site; }

struct GpuPlatform {
  using Context = GpuContext;
  using Outcome = ffi::Error;

  template <typename Make, typename Run>
  static Outcome Submit(const Context& context, int64_t session_id, Sizes sizes,
                        const Arg& position, const char* operation, Make make, Run run) {
    Result<std::shared_ptr<GpuSession>> session =
        SessionTable<GpuSession>::Instance().Find(session_id);
    if (!session.ok()) return ToFfiError(session.status());
    GpuSession& group = **session;
    const std::string& name = group.options().name;
    const Lifecycle::Lease lease = group.Enter();  // until the launcher has returned
    if (!lease) return ToFfiError(group.lifecycle().Refusal(name, group.FailureText()));
    if (!std::string_view(operation).starts_with("dispatch_done") &&
        !std::string_view(operation).starts_with("combine_done")) {
      if (auto left = group.FindDepartedMate(context.device)) {
        group.failure().Set(std::move(left->status), left->blamed);
      }
    }
    if (group.failure().failed()) return ToFfiError(group.failure().status());
    gpu::RankHandle* rank = group.TakeHandle(context.device);
    if (rank == nullptr) {
      const Status status =
          OutsideOfMesh(group.options(), operation, "GPU " + std::to_string(context.device));
      group.failure().Set(status);  // its other ranks would wait for this one
      return ToFfiError(status);
    }
    const Result<GroupShape> shape =
        ShapeOfCall(group.options(), operation, {sizes.begin(), sizes.size()});
    if (!shape.ok()) return ToFfiError(shape.status());
    const auto params = make(*shape);
    if (!params.ok()) return ToFfiError(params.status());
    group.NoteCall(context.device, operation, SiteOf(*params));
    const Target target{group.api(), rank, &*shape, context.stream};
    const char* error = nullptr;
    if (position.element_count() != 0) {
      Checker check(operation);
      check.Require("position", position, kI32, 1);
      if (!check.status().ok()) return ToFfiError(check.status());
      const int64_t expected = PositionOf(group.options(), group.LocalRankOn(context.device));
      error = target.api.check_position(rank, In<int32_t>(position).data(),
                                        static_cast<int32_t>(expected), context.stream);
    }
    if (error == nullptr) error = run(target, *params);
    if (error == nullptr) return ffi::Error::Success();
    return ToFfiError(Internal("group " + name + ": " + operation + " on GPU " +
                               std::to_string(context.device) + ": " + error));
  }

  struct RunPlan {
    const char* operator()(const Target& t, const PlanParams& p) const {
      return t.api.plan(t.rank, t.shape, &p, t.stream);
    }
  };
  struct RunDispatch {
    const char* operator()(const Target& t, const DispatchParams& p) const {
      return t.api.dispatch(t.rank, t.shape, &p, t.stream);
    }
  };
  struct RunLlDispatch {
    const char* operator()(const Target& t, const LlDispatchParams& p) const {
      return t.api.ll_dispatch(t.rank, t.shape, &p, t.stream);
    }
  };
  struct RunCombine {
    const char* operator()(const Target& t, const CombineParams& p) const {
      return t.api.combine(t.rank, t.shape, &p, t.stream);
    }
  };
  // Halves of mode ll. `epoch` is a word of device memory.
  struct StartDispatch {
    int32_t* epoch;
    const char* operator()(const Target& t, const DispatchParams& p) const {
      return t.api.dispatch_start(t.rank, t.shape, &p, epoch, t.stream);
    }
  };
  struct FinishDispatch {
    const int32_t* epoch;
    const char* operator()(const Target& t, const DispatchParams& p) const {
      return t.api.dispatch_done(t.rank, t.shape, &p, epoch, t.stream);
    }
  };
  struct StartLlDispatch {
    int32_t* epoch;
    const char* operator()(const Target& t, const LlDispatchParams& p) const {
      return t.api.ll_dispatch_start(t.rank, t.shape, &p, epoch, t.stream);
    }
  };
  struct FinishLlDispatch {
    const int32_t* epoch;
    const char* operator()(const Target& t, const LlDispatchParams& p) const {
      return t.api.ll_dispatch_done(t.rank, t.shape, &p, epoch, t.stream);
    }
  };
  struct StartCombine {
    int32_t* epoch;
    const char* operator()(const Target& t, const CombineParams& p) const {
      return t.api.combine_start(t.rank, t.shape, &p, epoch, t.stream);
    }
  };
  struct FinishCombine {
    const int32_t* epoch;
    const char* operator()(const Target& t, const CombineParams& p) const {
      return t.api.combine_done(t.rank, t.shape, &p, epoch, t.stream);
    }
  };
};

}  // namespace
}  // namespace jax_ep

namespace xla::ffi {
template <>
struct CtxDecoding<jax_ep::GpuContext> {
  using Type = jax_ep::GpuContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto stream = CtxDecoding<PlatformStream<void*>>::Decode(api, context, diagnostic);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!stream || !device) return std::nullopt;
    return Type{*stream, *device};
  }
};
}  // namespace xla::ffi

namespace jax_ep {
namespace {

using Ops = Operations<GpuPlatform>;

// Twice: XLA may record a call in a command buffer and replay it, which goes to the session that
// there was. Groups whose sessions change (elastic ones) use targets that it calls each time.
#define JAX_EP_DEFINE_HANDLERS(name, implementation, signature)                                 \
  XLA_FFI_DEFINE_HANDLER(name, implementation, signature, {ffi::Traits::kCmdBufferCompatible}); \
  XLA_FFI_DEFINE_HANDLER(name##EachTime, implementation, signature)

JAX_EP_DEFINE_HANDLERS(kPlan, Ops::Plan, signatures::Plan<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kDispatch, Ops::Dispatch, signatures::Dispatch<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kLlDispatch, Ops::LlDispatch, signatures::LlDispatch<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kCombine, Ops::Combine, signatures::Combine<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kDispatchStart, Ops::DispatchStart, signatures::DispatchStart<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kDispatchDone, Ops::DispatchDone, signatures::DispatchDone<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kLlDispatchStart, Ops::LlDispatchStart,
                       signatures::LlDispatchStart<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kLlDispatchDone, Ops::LlDispatchDone,
                       signatures::LlDispatchDone<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kCombineStart, Ops::CombineStart, signatures::CombineStart<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kCombineDone, Ops::CombineDone, signatures::CombineDone<GpuContext>());

using Fp8 = OperationsFp8<GpuPlatform>;
JAX_EP_DEFINE_HANDLERS(kDispatchFp8, Fp8::Dispatch, signatures::DispatchFp8<GpuContext>());
JAX_EP_DEFINE_HANDLERS(kLlDispatchFp8, Fp8::LlDispatch, signatures::LlDispatchFp8<GpuContext>());

#undef JAX_EP_DEFINE_HANDLERS

// Mode ht beside other work. Not replayable: in a command buffer XLA starts and ends an
// asynchronous call at one place.
using Beside = OperationsBeside<GpuPlatform>;
XLA_FFI_DEFINE_HANDLER(kPlanBeside, Beside::Plan, signatures::PackedPlan<GpuContext>());
XLA_FFI_DEFINE_HANDLER(kDispatchRows, Beside::DispatchRows, signatures::DispatchRows<GpuContext>());
XLA_FFI_DEFINE_HANDLER(kDispatchWeights, Beside::DispatchWeights,
                       signatures::DispatchWeights<GpuContext>());
XLA_FFI_DEFINE_HANDLER(kDispatchDots, Beside::DispatchDots, signatures::DispatchDots<GpuContext>());
XLA_FFI_DEFINE_HANDLER(kCombineRows, Beside::CombineRows, signatures::CombineRows<GpuContext>());
XLA_FFI_DEFINE_HANDLER(kCombineScalars, Beside::CombineScalars,
                       signatures::CombineScalars<GpuContext>());

}  // namespace

std::span<const HandlerRegistration> GpuHandlers() {
  static const std::array<HandlerRegistration, 30> kHandlers{{
      {"jax_ep_plan", nullptr, kPlan},
      {"jax_ep_dispatch", nullptr, kDispatch},
      {"jax_ep_ll_dispatch", nullptr, kLlDispatch},
      {"jax_ep_combine", nullptr, kCombine},
      {"jax_ep_dispatch_start", nullptr, kDispatchStart},
      {"jax_ep_dispatch_done", nullptr, kDispatchDone},
      {"jax_ep_ll_dispatch_start", nullptr, kLlDispatchStart},
      {"jax_ep_ll_dispatch_done", nullptr, kLlDispatchDone},
      {"jax_ep_combine_start", nullptr, kCombineStart},
      {"jax_ep_combine_done", nullptr, kCombineDone},
      {"jax_ep_dispatch_fp8", nullptr, kDispatchFp8},
      {"jax_ep_ll_dispatch_fp8", nullptr, kLlDispatchFp8},
      {"jax_ep_plan_each_time", nullptr, kPlanEachTime},
      {"jax_ep_dispatch_each_time", nullptr, kDispatchEachTime},
      {"jax_ep_ll_dispatch_each_time", nullptr, kLlDispatchEachTime},
      {"jax_ep_combine_each_time", nullptr, kCombineEachTime},
      {"jax_ep_dispatch_start_each_time", nullptr, kDispatchStartEachTime},
      {"jax_ep_dispatch_done_each_time", nullptr, kDispatchDoneEachTime},
      {"jax_ep_ll_dispatch_start_each_time", nullptr, kLlDispatchStartEachTime},
      {"jax_ep_ll_dispatch_done_each_time", nullptr, kLlDispatchDoneEachTime},
      {"jax_ep_combine_start_each_time", nullptr, kCombineStartEachTime},
      {"jax_ep_combine_done_each_time", nullptr, kCombineDoneEachTime},
      {"jax_ep_dispatch_fp8_each_time", nullptr, kDispatchFp8EachTime},
      {"jax_ep_ll_dispatch_fp8_each_time", nullptr, kLlDispatchFp8EachTime},
      {"jax_ep_plan_beside", nullptr, kPlanBeside},
      {"jax_ep_dispatch_rows_beside", nullptr, kDispatchRows},
      {"jax_ep_dispatch_weights_beside", nullptr, kDispatchWeights},
      {"jax_ep_dispatch_dots_beside", nullptr, kDispatchDots},
      {"jax_ep_combine_rows_beside", nullptr, kCombineRows},
      {"jax_ep_combine_scalars_beside", nullptr, kCombineScalars},
  }};
  return kHandlers;
}

}  // namespace jax_ep
