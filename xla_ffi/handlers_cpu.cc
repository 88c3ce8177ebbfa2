// CPU platform: detaches each call from XLA, enqueues it on the rank's executor and returns a
// Future. Handlers never block and never compute.
#include "xla_ffi/handlers_cpu.h"

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "kernels/epoch.h"
#include "xla_ffi/error.h"
#include "xla_ffi/session.h"
#include "xla_ffi/signatures.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId SiteState::id = {};
ffi::TypeInfo SiteState::info = ffi::MakeTypeInfo<SiteState>();

namespace {

ffi::ErrorOr<std::unique_ptr<SiteState>> Instantiate(ffi::Dictionary attributes) {
  const ffi::ErrorOr<int64_t> module = attributes.get<int64_t>("module");
  if (module.has_error()) return ffi::Unexpected(module.error());
  auto state = std::make_unique<SiteState>();
  state->site = SiteNumbering::Instance().Next(static_cast<uint64_t>(*module));
  return state;
}
XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

struct CpuContext {
  ffi::RunId run_id{0};
  int32_t device = 0;
  SiteState* state = nullptr;
};

ffi::Future Failed(const Status& status) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ToFfiError(status));
  return future;
}

// Runs a Start half and hands its epoch to XLA.
template <typename Params>
Status Start(Rank& rank, const Params& params, int32_t* epoch_out,
             Status (*start)(Rank&, const Params&, uint64_t*)) {
  uint64_t epoch = 0;
  Status status = start(rank, params, &epoch);
  *epoch_out = PackEpoch(epoch, rank.generation);
  return status;
}

// Runs a Done half with the epoch that its start gave to XLA.
template <typename Params>
Status Finish(Rank& rank, const Params& params, int32_t packed, uint64_t newest,
              Status (*finish)(Rank&, const Params&, uint64_t)) {
  if (!IsOfGeneration(packed, rank.generation)) {
    Status status = FailedPrecondition(
        "group " + rank.group_name + ": " + rank.NameOf(rank.rank) +
        ": *_done got a *_start from before the newest Group.agree; start it again");
    rank.failure->Set(status);
    return status;
  }
  return finish(rank, params, ExtendEpoch(packed, newest));
}

// A program that was lowered without its devices (abstract meshes, jax.export) may run on any order
// of them: rows would go to other ranks than it means.
Status CheckPosition(const Session& session, int32_t device, const Arg& position,
                     const char* operation) {
  if (position.element_count() == 0) return Status::Ok();
  Checker check(operation);
  check.Require("position", position, kI32, 1);
  JAX_EP_RETURN_IF_ERROR(check.status());
  const int64_t got = In<int32_t>(position)[0];
  const SessionOptions& options = session.options();
  const LocalRank& local = *session.FindLocalRank(device);
  if (got == PositionOf(options, local)) return Status::Ok();
  return InvalidArgument("group " + options.name + ": " + operation +
                         WrongPositionText(options, local, got));
}

struct CpuPlatform {
  using Context = CpuContext;
  using Outcome = ffi::Future;

  template <typename Make, typename Run>
  static Outcome Submit(const Context& context, int64_t session_id, Sizes sizes,
                        const Arg& position, const char* operation, Make make, Run run) {
    const CallSite& site = context.state->site;
    Result<std::shared_ptr<Session>> session =
        SessionTable<Session>::Instance().Find(session_id, context.run_id.run_id);
    if (!session.ok()) return Failed(session.status());
    const SessionOptions& options = (*session)->options();
    const Lifecycle::Lease lease = (*session)->Enter();
    if (!lease) {
      return Failed((*session)->lifecycle().Refusal(options.name, (*session)->FailureText()));
    }
    // For what only some ranks of a program may meet: the others would wait for this one.
    const auto fail_group = [&](const Status& status) {
      (*session)->failure().Set(status);
      return Failed(status);
    };
    Executor* executor = (*session)->FindExecutor(context.device);
    if (executor == nullptr) {
      return fail_group(
          OutsideOfMesh(options, operation, "device " + std::to_string(context.device)));
    }
    const bool is_local = (*session)->IsTeamLocal(context.device);
    if (!is_local && !site.has_key()) {
      return Failed(FailedPrecondition(
          "group " + options.name + ": " + operation +
          " got a program without a key, by which processes find each other's calls: this version "
          "of JAX does not say when a program is lowered; use one that jax_ep supports"));
    }
    if (Status status = CheckPosition(**session, context.device, position, operation);
        !status.ok()) {
      return fail_group(status);
    }
    Result<GroupShape> shape = ShapeOfCall(options, operation, {sizes.begin(), sizes.size()});
    if (!shape.ok()) return Failed(shape.status());
    auto params = make(*shape);
    if (!params.ok()) return Failed(params.status());
    const Result<int64_t> name =
        (*session)->runs().Name(site.shared, context.run_id.run_id, is_local);
    if (!name.ok()) return fail_group(name.status());
    (*session)->NoteRun(context.run_id.run_id);
    ffi::Promise promise;
    ffi::Future future(promise);
    executor->Enqueue(Call{
        .key = {.run_id = static_cast<uint64_t>(*name),
                .site = is_local ? site.unique : site.shared},
        .site = site.has_key() ? site.shared : 0,
        .operation = operation,
        .run = [run, shape = *shape, params = std::move(params.value())](Rank& rank) -> Status {
          rank.TakeSizes(shape);
          return run(rank, params);
        },
        .complete =
            [promise](Status status) mutable {
              if (status.ok()) {
                promise.SetAvailable();
              } else {
                promise.SetError(ToFfiError(status));
              }
            }});
    return future;
  }

  struct RunPlan {
    Status operator()(Rank& rank, const PlanParams& p) const { return jax_ep::RunPlan(rank, p); }
  };
  struct RunDispatch {
    Status operator()(Rank& rank, const DispatchParams& p) const {
      return jax_ep::RunDispatch(rank, p);
    }
  };
  struct RunLlDispatch {
    Status operator()(Rank& rank, const LlDispatchParams& p) const {
      return jax_ep::RunLlDispatch(rank, p);
    }
  };
  struct RunCombine {
    Status operator()(Rank& rank, const CombineParams& p) const {
      return jax_ep::RunCombine(rank, p);
    }
  };
  struct StartDispatch {
    int32_t* epoch;
    Status operator()(Rank& rank, const DispatchParams& p) const {
      return Start(rank, p, epoch, &jax_ep::StartDispatch);
    }
  };
  struct FinishDispatch {
    const int32_t* epoch;
    Status operator()(Rank& rank, const DispatchParams& p) const {
      const uint64_t newest =
          p.mode == Mode::kLl ? rank.epochs.ll_dispatch_started : rank.epochs.dispatch_started;
      return Finish(rank, p, *epoch, newest, &jax_ep::FinishDispatch);
    }
  };
  struct StartLlDispatch {
    int32_t* epoch;
    Status operator()(Rank& rank, const LlDispatchParams& p) const {
      return Start(rank, p, epoch, &jax_ep::StartLlDispatch);
    }
  };
  struct FinishLlDispatch {
    const int32_t* epoch;
    Status operator()(Rank& rank, const LlDispatchParams& p) const {
      const uint64_t newest = rank.epochs.ll_dispatch_started;
      return Finish(rank, p, *epoch, newest, &jax_ep::FinishLlDispatch);
    }
  };
  struct StartCombine {
    int32_t* epoch;
    Status operator()(Rank& rank, const CombineParams& p) const {
      return Start(rank, p, epoch, &jax_ep::StartCombine);
    }
  };
  struct FinishCombine {
    const int32_t* epoch;
    Status operator()(Rank& rank, const CombineParams& p) const {
      const uint64_t newest =
          p.mode == Mode::kLl ? rank.epochs.ll_combine_started : rank.epochs.combine_started;
      return Finish(rank, p, *epoch, newest, &jax_ep::FinishCombine);
    }
  };
};

}  // namespace
}  // namespace jax_ep

namespace xla::ffi {
template <>
struct CtxDecoding<jax_ep::CpuContext> {
  using Type = jax_ep::CpuContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto run_id = CtxDecoding<RunId>::Decode(api, context, diagnostic);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    const auto state = CtxDecoding<State<jax_ep::SiteState>>::Decode(api, context, diagnostic);
    if (!run_id || !device || !state) return std::nullopt;
    return Type{*run_id, *device, *state};
  }
};
}  // namespace xla::ffi

namespace jax_ep {
namespace {

using Ops = Operations<CpuPlatform>;

XLA_FFI_DEFINE_HANDLER(kPlan, Ops::Plan, signatures::Plan<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kDispatch, Ops::Dispatch, signatures::Dispatch<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kLlDispatch, Ops::LlDispatch, signatures::LlDispatch<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kCombine, Ops::Combine, signatures::Combine<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kDispatchStart, Ops::DispatchStart, signatures::DispatchStart<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kDispatchDone, Ops::DispatchDone, signatures::DispatchDone<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kLlDispatchStart, Ops::LlDispatchStart,
                       signatures::LlDispatchStart<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kLlDispatchDone, Ops::LlDispatchDone,
                       signatures::LlDispatchDone<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kCombineStart, Ops::CombineStart, signatures::CombineStart<CpuContext>());
XLA_FFI_DEFINE_HANDLER(kCombineDone, Ops::CombineDone, signatures::CombineDone<CpuContext>());

}  // namespace

std::span<const HandlerRegistration> CpuHandlers() {
  static const std::array<HandlerRegistration, 10> kHandlers{{
      {"jax_ep_plan", kInstantiate, kPlan},
      {"jax_ep_dispatch", kInstantiate, kDispatch},
      {"jax_ep_ll_dispatch", kInstantiate, kLlDispatch},
      {"jax_ep_combine", kInstantiate, kCombine},
      {"jax_ep_dispatch_start", kInstantiate, kDispatchStart},
      {"jax_ep_dispatch_done", kInstantiate, kDispatchDone},
      {"jax_ep_ll_dispatch_start", kInstantiate, kLlDispatchStart},
      {"jax_ep_ll_dispatch_done", kInstantiate, kLlDispatchDone},
      {"jax_ep_combine_start", kInstantiate, kCombineStart},
      {"jax_ep_combine_done", kInstantiate, kCombineDone},
  }};
  return kHandlers;
}

}  // namespace jax_ep
