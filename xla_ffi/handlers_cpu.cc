// CPU handlers: check sizes, detach the call from XLA, enqueue it on the rank's executor, return a
// Future. They never block and never compute.
#include "xla_ffi/handlers_cpu.h"

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "xla_ffi/error.h"
#include "xla_ffi/session.h"
#include "xla_ffi/signatures.h"

namespace jax_ep {

namespace ffi = xla::ffi;

ffi::TypeId SiteState::id = {};
ffi::TypeInfo SiteState::info = ffi::MakeTypeInfo<SiteState>();

namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;

ffi::ErrorOr<std::unique_ptr<SiteState>> Instantiate(ffi::Dictionary /*attributes*/) {
  auto state = std::make_unique<SiteState>();
  state->site = SessionTable::Instance().sites().Next();
  return state;
}
XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

// What every handler gets first.
struct Invocation {
  ffi::RunId run_id;
  int32_t device;
  SiteState* state;
  int64_t session_id;
  Mode mode;
  Layout layout;
};

ffi::Future Failed(const Status& status) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ToFfiError(status));
  return future;
}

// The operations differ only in the parameters that they build: `make(shape, debug)` returns
// Result<Run> and runs on XLA's thread, the Run on the executor.
template <typename Make>
ffi::Future Submit(const Invocation& call, const char* operation, Make&& make) {
  SessionTable& table = SessionTable::Instance();
  table.sites().NoteModuleComplete();
  Result<std::shared_ptr<Session>> session = table.Find(call.session_id);
  if (!session.ok()) return Failed(session.status());
  Executor* executor = (*session)->FindExecutor(call.device);
  if (executor == nullptr) {
    return Failed(FailedPrecondition(
        "group " + (*session)->options().name + ": " + operation + " runs on device " +
        std::to_string(call.device) +
        ", which is not in the group's mesh; use the mesh that create_group got"));
  }
  auto run = make((*session)->options().shape, (*session)->options().debug);
  if (!run.ok()) return Failed(run.status());
  const CallSite& site = call.state->site;
  ffi::Promise promise;
  ffi::Future future(promise);
  executor->Enqueue(
      Call{.key = {.run_id = static_cast<uint64_t>(call.run_id.run_id),
                   .site = (*session)->IsTeamLocal(call.device) ? site.unique : site.index},
           .operation = operation,
           .run = std::move(run.value()),
           .complete = [promise](Status status) mutable {
             if (status.ok()) {
               promise.SetAvailable();
             } else {
               promise.SetError(ToFfiError(status));
             }
           }});
  return future;
}

// ---- Views of XLA's buffers ------------------------------------------------------------------

template <typename T>
std::span<const T> In(const Arg& arg) {
  return {static_cast<const T*>(arg.untyped_data()), arg.element_count()};
}
template <typename T>
std::span<T> Out(Ret& ret) {
  return {static_cast<T*>(ret->untyped_data()), ret->element_count()};
}
// Rows: null when absent (shape [0]), never null when present, even with zero tokens ([0, H]).
template <typename Buffer>
std::byte* RowsOf(const Buffer& buffer) {
  static std::byte no_rows[1];
  if (buffer.element_count() != 0) return static_cast<std::byte*>(buffer.untyped_data());
  return buffer.dimensions().size() < 2 ? nullptr : no_rows;
}
const std::byte* Bytes(const Arg& arg) { return RowsOf(arg); }
std::byte* Bytes(Ret& ret) { return RowsOf(*ret); }

ffi::DataType DataTypeOf(ElemType type) {
  switch (type) {
    case ElemType::kF32:
      return ffi::DataType::F32;
    case ElemType::kBf16:
      return ffi::DataType::BF16;
    case ElemType::kF16:
      return ffi::DataType::F16;
  }
  return ffi::DataType::INVALID;
}

// Collects the first mismatch between a buffer and what the operation needs. Python has checked
// shapes with better words; this keeps a hand-made or stale program from writing out of bounds.
class Checker {
 public:
  explicit Checker(const char* operation) : operation_(operation) {}

  template <typename Buffer>
  void Require(const char* name, Buffer& buffer, ffi::DataType type, int64_t num_elements,
               bool may_be_absent = false) {
    if (!status_.ok()) return;
    const auto have = static_cast<int64_t>(Count(buffer));
    if (have == 0 && may_be_absent) return;
    if (have != num_elements || TypeOf(buffer) != type) {
      status_ = InvalidArgument(
          std::string(operation_) + ": buffer " + name + " has " + std::to_string(have) +
          " elements of type " + std::to_string(static_cast<int>(TypeOf(buffer))) + ", expected " +
          std::to_string(num_elements) + " of type " + std::to_string(static_cast<int>(type)) +
          "; was the program compiled for another group?");
    }
  }
  void Require(bool condition, const std::string& message) {
    if (status_.ok() && !condition) {
      status_ = InvalidArgument(std::string(operation_) + ": " + message);
    }
  }
  const Status& status() const { return status_; }

 private:
  static size_t Count(const Arg& arg) { return arg.element_count(); }
  static size_t Count(Ret& ret) { return ret->element_count(); }
  static ffi::DataType TypeOf(const Arg& arg) { return arg.element_type(); }
  static ffi::DataType TypeOf(Ret& ret) { return ret->element_type(); }

  const char* operation_;
  Status status_;
};

constexpr ffi::DataType kI32 = ffi::DataType::S32;
constexpr ffi::DataType kF32 = ffi::DataType::F32;

// T from a [T, K] array.
int64_t TokensOf(size_t num_pairs, const GroupShape& shape) {
  return static_cast<int64_t>(num_pairs / shape.top_k);
}

void CheckTokens(Checker& check, const GroupShape& shape, Mode mode, int64_t num_tokens) {
  const uint64_t limit = mode == Mode::kLl ? shape.ll_tokens : shape.max_tokens;
  check.Require(static_cast<uint64_t>(num_tokens) <= limit,
                "got " + std::to_string(num_tokens) +
                    " tokens, the group was created for at most " + std::to_string(limit) +
                    " in this mode");
  check.Require(mode == Mode::kLl || shape.has_ht, "the group was created for mode ll only");
}

// Rows of the receive side; the layouts other than expert_major fix it.
int64_t ExpectedRows(const GroupShape& shape, Layout layout, int64_t num_tokens, int64_t rows) {
  const auto num_ranks = static_cast<int64_t>(shape.num_ranks);
  switch (layout) {
    case Layout::kExpertMajor:
      return rows;
    case Layout::kExpertBatched:
      return static_cast<int64_t>(shape.experts_per_rank()) * num_ranks * num_tokens;
    case Layout::kRankMajor:
      return num_ranks * num_tokens;
  }
  return rows;
}

Result<PlanParams> MakePlan(const Invocation& call, const GroupShape& shape, Checker& check,
                            const Arg& topk_idx, std::array<Ret*, 9> rets) {
  const int64_t num_tokens = TokensOf(topk_idx.element_count(), shape);
  const int64_t num_pairs = num_tokens * shape.top_k;
  const auto num_experts = static_cast<int64_t>(shape.experts_per_rank());
  const auto num_ranks = static_cast<int64_t>(shape.num_ranks);
  const int64_t rows = static_cast<int64_t>((*rets[3])->element_count());
  CheckTokens(check, shape, call.mode, num_tokens);
  check.Require("topk_idx", topk_idx, kI32, num_pairs);
  check.Require("group_sizes", *rets[0], kI32, num_experts);
  check.Require("group_counts", *rets[1], kI32, num_experts);
  check.Require("send_slot", *rets[2], kI32, num_pairs);
  check.Require("recv_src", *rets[3], kI32, ExpectedRows(shape, call.layout, num_tokens, rows));
  check.Require("send_counts", *rets[4], kI32, num_ranks);
  check.Require("recv_counts", *rets[5], kI32, num_ranks);
  check.Require("num_dropped", *rets[6], kI32, 1);
  check.Require("overflow", *rets[7], kI32, 1);
  check.Require("recv_topk_idx", *rets[8], kI32,
                call.layout == Layout::kRankMajor ? num_ranks * num_pairs : 0);
  if (!check.status().ok()) return check.status();
  return PlanParams{.mode = call.mode,
                    .layout = call.layout,
                    .num_tokens = num_tokens,
                    .recv_rows = rows,
                    .topk_idx = In<int32_t>(topk_idx),
                    .out = {.group_sizes = Out<int32_t>(*rets[0]),
                            .group_counts = Out<int32_t>(*rets[1]),
                            .send_slot = Out<int32_t>(*rets[2]),
                            .recv_src = Out<int32_t>(*rets[3]),
                            .send_counts = Out<int32_t>(*rets[4]),
                            .recv_counts = Out<int32_t>(*rets[5]),
                            .num_dropped = Out<int32_t>(*rets[6]).data(),
                            .overflow = Out<int32_t>(*rets[7]).data(),
                            .recv_topk_idx = Out<int32_t>(*rets[8])}};
}

// Fields common to whole calls and halves; absent pieces stay empty.
struct DispatchBuffers {
  const Arg* x = nullptr;
  const Arg* weights = nullptr;
  const Arg* send_slot = nullptr;
  const Arg* recv_src = nullptr;
  const Arg* recv_topk_idx = nullptr;
  const Arg* y = nullptr;
  const Arg* row_weights = nullptr;
  Ret* recv_x = nullptr;
  Ret* recv_weights = nullptr;
  Ret* recv_dots = nullptr;
};

Result<DispatchParams> MakeDispatch(const Invocation& call, const GroupShape& shape, Checker& check,
                                    int64_t num_tokens, int64_t rows, int64_t pad,
                                    const DispatchBuffers& b) {
  const ffi::DataType elem = DataTypeOf(shape.elem_type);
  const int64_t num_pairs = num_tokens * shape.top_k;
  const auto hidden = static_cast<int64_t>(shape.hidden);
  const auto num_ranks = static_cast<int64_t>(shape.num_ranks);
  const bool rank_major = call.layout == Layout::kRankMajor;
  const int64_t num_weights = rank_major ? num_ranks * num_pairs : rows;
  DispatchParams params{.mode = call.mode,
                        .layout = call.layout,
                        .zero_padding = pad == 0,
                        .num_tokens = num_tokens,
                        .recv_rows = rows};
  CheckTokens(check, shape, call.mode, num_tokens);
  check.Require(rows == ExpectedRows(shape, call.layout, num_tokens, rows),
                "recv_src has " + std::to_string(rows) + " rows, which do not fit the layout");
  if (b.x != nullptr) {
    check.Require("x", *b.x, elem, num_tokens * hidden, /*may_be_absent=*/true);
    params.x = Bytes(*b.x);
  }
  if (b.weights != nullptr) {
    check.Require("weights", *b.weights, kF32, num_pairs, /*may_be_absent=*/true);
    params.weights = In<float>(*b.weights);
  }
  if (b.send_slot != nullptr) {
    check.Require("send_slot", *b.send_slot, kI32, num_pairs);
    params.send_slot = In<int32_t>(*b.send_slot);
  }
  if (b.recv_src != nullptr) params.recv_src = In<int32_t>(*b.recv_src);
  if (b.recv_topk_idx != nullptr) {
    check.Require("recv_topk_idx", *b.recv_topk_idx, kI32, num_ranks * num_pairs,
                  /*may_be_absent=*/true);
    params.recv_topk_idx = In<int32_t>(*b.recv_topk_idx);
  }
  if (b.y != nullptr) {
    check.Require("y", *b.y, elem, rows * hidden, /*may_be_absent=*/true);
    params.y = Bytes(*b.y);
  }
  if (b.row_weights != nullptr) {
    check.Require("row_weights", *b.row_weights, kF32, rows, /*may_be_absent=*/true);
    params.row_weights = In<float>(*b.row_weights);
  }
  if (b.recv_x != nullptr) {
    check.Require("recv_x", *b.recv_x, elem, rows * hidden, /*may_be_absent=*/true);
    params.recv_x = Bytes(*b.recv_x);
  }
  if (b.recv_weights != nullptr) {
    check.Require("recv_weights", *b.recv_weights, kF32, num_weights, /*may_be_absent=*/true);
    params.recv_weights = Out<float>(*b.recv_weights);
  }
  if (b.recv_dots != nullptr) {
    check.Require("recv_dots", *b.recv_dots, kF32, rows, /*may_be_absent=*/true);
    params.recv_dots = Out<float>(*b.recv_dots);
  }
  if (!check.status().ok()) return check.status();
  return params;
}

struct CombineBuffers {
  const Arg* y = nullptr;
  const Arg* row_weights = nullptr;
  const Arg* ride = nullptr;
  const Arg* send_slot = nullptr;
  const Arg* recv_src = nullptr;
  Ret* out = nullptr;
  Ret* ride_out = nullptr;
};

Result<CombineParams> MakeCombine(const Invocation& call, const GroupShape& shape, Checker& check,
                                  const CombineBuffers& b) {
  const ffi::DataType elem = DataTypeOf(shape.elem_type);
  const auto hidden = static_cast<int64_t>(shape.hidden);
  const int64_t num_tokens = TokensOf(b.send_slot->element_count(), shape);
  const int64_t num_pairs = num_tokens * shape.top_k;
  const auto rows = static_cast<int64_t>(b.recv_src->element_count());
  CombineParams params{
      .mode = call.mode, .layout = call.layout, .num_tokens = num_tokens, .recv_rows = rows};
  CheckTokens(check, shape, call.mode, num_tokens);
  check.Require("send_slot", *b.send_slot, kI32, num_pairs);
  check.Require("recv_src", *b.recv_src, kI32, ExpectedRows(shape, call.layout, num_tokens, rows));
  params.send_slot = In<int32_t>(*b.send_slot);
  params.recv_src = In<int32_t>(*b.recv_src);
  if (b.y != nullptr) {
    check.Require("y", *b.y, elem, rows * hidden, /*may_be_absent=*/true);
    params.y = Bytes(*b.y);
  }
  if (b.row_weights != nullptr) {
    check.Require("row_weights", *b.row_weights, kF32, rows, /*may_be_absent=*/true);
    params.row_weights = In<float>(*b.row_weights);
  }
  if (b.ride != nullptr) {
    const int64_t per_row = call.layout == Layout::kRankMajor ? shape.top_k : 1;
    check.Require("ride", *b.ride, kF32, rows * per_row, /*may_be_absent=*/true);
    params.ride = In<float>(*b.ride);
  }
  if (b.out != nullptr) {
    check.Require("out", *b.out, elem, num_tokens * hidden, /*may_be_absent=*/true);
    params.out = Bytes(*b.out);
  }
  if (b.ride_out != nullptr) {
    check.Require("ride_out", *b.ride_out, kF32, num_pairs, /*may_be_absent=*/true);
    params.ride_out = Out<float>(*b.ride_out);
  }
  if (!check.status().ok()) return check.status();
  return params;
}

using Run = std::function<Status(Rank&)>;

// Debug mode: a call that met expert ids >= num_experts fails, after it has done its part for the
// other ranks, so that the group stays usable.
Run WithIdCheck(Run run, const char* operation, bool debug) {
  if (!debug) return run;
  return [run = std::move(run), operation](Rank& rank) {
    const uint64_t before = rank.counters->invalid_ids.load(std::memory_order_relaxed);
    JAX_EP_RETURN_IF_ERROR(run(rank));
    const uint64_t found = rank.counters->invalid_ids.load(std::memory_order_relaxed) - before;
    if (found == 0) return Status::Ok();
    return InvalidArgument(
        "group " + rank.group_name + ": " + operation + " on rank " + std::to_string(rank.rank) +
        " got " + std::to_string(found) + " expert id(s) of " +
        std::to_string(rank.shape.num_experts) +
        " or more, expected ids below num_experts (negative: no expert); fix the "
        "router, or unset JAX_EP_DEBUG to have them dropped and counted");
  };
}

// Epochs travel through XLA as i32; the counter they belong to is 64 bits wide.
uint64_t ExtendEpoch(const int32_t* low, uint64_t newest) {
  const auto difference =
      static_cast<int32_t>(static_cast<uint32_t>(*low) - static_cast<uint32_t>(newest));
  return newest + static_cast<uint64_t>(static_cast<int64_t>(difference));
}

// ---- Handlers --------------------------------------------------------------------------------

ffi::Future PlanHandler(ffi::RunId run_id, int32_t device, SiteState* state, int64_t session,
                        int64_t mode, int64_t layout, Arg topk_idx, Ret r0, Ret r1, Ret r2, Ret r3,
                        Ret r4, Ret r5, Ret r6, Ret r7, Ret r8) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(
      call, "plan", [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
        Checker check("plan");
        JAX_EP_ASSIGN_OR_RETURN(
            const PlanParams params,
            MakePlan(call, shape, check, topk_idx, {&r0, &r1, &r2, &r3, &r4, &r5, &r6, &r7, &r8}));
        return WithIdCheck([params](Rank& rank) { return RunPlan(rank, params); }, "plan", debug);
      });
}

ffi::Future DispatchHandler(ffi::RunId run_id, int32_t device, SiteState* state, int64_t session,
                            int64_t mode, int64_t layout, int64_t pad, Arg x, Arg weights,
                            Arg send_slot, Arg recv_src, Arg recv_topk_idx, Arg y, Arg row_weights,
                            Ret recv_x, Ret recv_weights, Ret recv_dots) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(call, "dispatch",
                [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
                  Checker check("dispatch");
                  JAX_EP_ASSIGN_OR_RETURN(
                      const DispatchParams params,
                      MakeDispatch(call, shape, check, TokensOf(send_slot.element_count(), shape),
                                   static_cast<int64_t>(recv_src.element_count()), pad,
                                   {.x = &x,
                                    .weights = &weights,
                                    .send_slot = &send_slot,
                                    .recv_src = &recv_src,
                                    .recv_topk_idx = &recv_topk_idx,
                                    .y = &y,
                                    .row_weights = &row_weights,
                                    .recv_x = &recv_x,
                                    .recv_weights = &recv_weights,
                                    .recv_dots = &recv_dots}));
                  return Run([params](Rank& rank) { return RunDispatch(rank, params); });
                });
}

ffi::Future LlDispatchHandler(ffi::RunId run_id, int32_t device, SiteState* state, int64_t session,
                              int64_t mode, int64_t layout, int64_t pad, Arg x, Arg weights,
                              Arg topk_idx, Ret r0, Ret r1, Ret r2, Ret r3, Ret r4, Ret r5, Ret r6,
                              Ret r7, Ret r8, Ret recv_x, Ret recv_weights) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(
      call, "dispatch (ll)",
      [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
        Checker check("dispatch (ll)");
        LlDispatchParams params;
        JAX_EP_ASSIGN_OR_RETURN(
            params.plan,
            MakePlan(call, shape, check, topk_idx, {&r0, &r1, &r2, &r3, &r4, &r5, &r6, &r7, &r8}));
        JAX_EP_ASSIGN_OR_RETURN(
            params.dispatch,
            MakeDispatch(
                call, shape, check, params.plan.num_tokens, params.plan.recv_rows, pad,
                {.x = &x, .weights = &weights, .recv_x = &recv_x, .recv_weights = &recv_weights}));
        return WithIdCheck([params](Rank& rank) { return RunLlDispatch(rank, params); },
                           "dispatch (ll)", debug);
      });
}

ffi::Future CombineHandler(ffi::RunId run_id, int32_t device, SiteState* state, int64_t session,
                           int64_t mode, int64_t layout, Arg y, Arg row_weights, Arg ride,
                           Arg send_slot, Arg recv_src, Ret out, Ret ride_out) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(call, "combine",
                [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
                  Checker check("combine");
                  JAX_EP_ASSIGN_OR_RETURN(const CombineParams params,
                                          MakeCombine(call, shape, check,
                                                      {.y = &y,
                                                       .row_weights = &row_weights,
                                                       .ride = &ride,
                                                       .send_slot = &send_slot,
                                                       .recv_src = &recv_src,
                                                       .out = &out,
                                                       .ride_out = &ride_out}));
                  return Run([params](Rank& rank) { return RunCombine(rank, params); });
                });
}

// Runs a Start half and hands its epoch to XLA.
template <typename Params>
Run StartRun(const Params& params, int32_t* epoch_out,
             Status (*start)(Rank&, const Params&, uint64_t*)) {
  return [params, epoch_out, start](Rank& rank) {
    uint64_t epoch = 0;
    Status status = start(rank, params, &epoch);
    *epoch_out = static_cast<int32_t>(static_cast<uint32_t>(epoch));
    return status;
  };
}

ffi::Future DispatchStartHandler(ffi::RunId run_id, int32_t device, SiteState* state,
                                 int64_t session, int64_t mode, int64_t layout, Arg x, Arg weights,
                                 Arg send_slot, Arg recv_src, Arg recv_topk_idx, Ret epoch) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(call, "dispatch_start",
                [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
                  Checker check("dispatch_start");
                  check.Require("epoch", epoch, kI32, 1);
                  JAX_EP_ASSIGN_OR_RETURN(
                      const DispatchParams params,
                      MakeDispatch(call, shape, check, TokensOf(send_slot.element_count(), shape),
                                   static_cast<int64_t>(recv_src.element_count()), /*pad=*/0,
                                   {.x = &x,
                                    .weights = &weights,
                                    .send_slot = &send_slot,
                                    .recv_src = &recv_src,
                                    .recv_topk_idx = &recv_topk_idx}));
                  return StartRun(params, Out<int32_t>(epoch).data(), &StartDispatch);
                });
}

ffi::Future DispatchDoneHandler(ffi::RunId run_id, int32_t device, SiteState* state,
                                int64_t session, int64_t mode, int64_t layout, int64_t pad,
                                int64_t /*has_weights*/, Arg epoch, Arg send_slot, Arg recv_src,
                                Arg recv_topk_idx, Ret recv_x, Ret recv_weights) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(call, "dispatch_done",
                [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
                  Checker check("dispatch_done");
                  check.Require("epoch", epoch, kI32, 1);
                  JAX_EP_ASSIGN_OR_RETURN(
                      const DispatchParams params,
                      MakeDispatch(call, shape, check, TokensOf(send_slot.element_count(), shape),
                                   static_cast<int64_t>(recv_src.element_count()), pad,
                                   {.send_slot = &send_slot,
                                    .recv_src = &recv_src,
                                    .recv_topk_idx = &recv_topk_idx,
                                    .recv_x = &recv_x,
                                    .recv_weights = &recv_weights}));
                  return Run([params, low = In<int32_t>(epoch).data()](Rank& rank) {
                    const uint64_t newest = params.mode == Mode::kLl
                                                ? rank.epochs.ll_dispatch_started
                                                : rank.epochs.dispatch_started;
                    return FinishDispatch(rank, params, ExtendEpoch(low, newest));
                  });
                });
}

ffi::Future LlDispatchStartHandler(ffi::RunId run_id, int32_t device, SiteState* state,
                                   int64_t session, int64_t mode, int64_t layout, Arg x,
                                   Arg weights, Arg topk_idx, Ret epoch) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(call, "dispatch_start (ll)",
                [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
                  Checker check("dispatch_start (ll)");
                  check.Require("epoch", epoch, kI32, 1);
                  const int64_t num_tokens = TokensOf(topk_idx.element_count(), shape);
                  check.Require("topk_idx", topk_idx, kI32, num_tokens * shape.top_k);
                  LlDispatchParams params;
                  params.plan = {.mode = call.mode,
                                 .layout = call.layout,
                                 .num_tokens = num_tokens,
                                 .recv_rows = 0,
                                 .topk_idx = In<int32_t>(topk_idx),
                                 .out = {}};
                  JAX_EP_ASSIGN_OR_RETURN(
                      params.dispatch,
                      MakeDispatch(call, shape, check, num_tokens,
                                   ExpectedRows(shape, call.layout, num_tokens, /*rows=*/0),
                                   /*pad=*/0, {.x = &x, .weights = &weights}));
                  return StartRun(params, Out<int32_t>(epoch).data(), &StartLlDispatch);
                });
}

ffi::Future LlDispatchDoneHandler(ffi::RunId run_id, int32_t device, SiteState* state,
                                  int64_t session, int64_t mode, int64_t layout, int64_t pad,
                                  int64_t /*has_weights*/, Arg epoch, Arg topk_idx, Ret r0, Ret r1,
                                  Ret r2, Ret r3, Ret r4, Ret r5, Ret r6, Ret r7, Ret r8,
                                  Ret recv_x, Ret recv_weights) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(
      call, "dispatch_done (ll)",
      [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
        Checker check("dispatch_done (ll)");
        check.Require("epoch", epoch, kI32, 1);
        LlDispatchParams params;
        JAX_EP_ASSIGN_OR_RETURN(
            params.plan,
            MakePlan(call, shape, check, topk_idx, {&r0, &r1, &r2, &r3, &r4, &r5, &r6, &r7, &r8}));
        JAX_EP_ASSIGN_OR_RETURN(
            params.dispatch,
            MakeDispatch(call, shape, check, params.plan.num_tokens, params.plan.recv_rows, pad,
                         {.recv_x = &recv_x, .recv_weights = &recv_weights}));
        return WithIdCheck(
            [params, low = In<int32_t>(epoch).data()](Rank& rank) {
              return FinishLlDispatch(rank, params,
                                      ExtendEpoch(low, rank.epochs.ll_dispatch_started));
            },
            "dispatch_done (ll)", debug);
      });
}

ffi::Future CombineStartHandler(ffi::RunId run_id, int32_t device, SiteState* state,
                                int64_t session, int64_t mode, int64_t layout, Arg y,
                                Arg row_weights, Arg ride, Arg send_slot, Arg recv_src, Ret epoch) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(call, "combine_start",
                [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
                  Checker check("combine_start");
                  check.Require("epoch", epoch, kI32, 1);
                  JAX_EP_ASSIGN_OR_RETURN(const CombineParams params,
                                          MakeCombine(call, shape, check,
                                                      {.y = &y,
                                                       .row_weights = &row_weights,
                                                       .ride = &ride,
                                                       .send_slot = &send_slot,
                                                       .recv_src = &recv_src}));
                  return StartRun(params, Out<int32_t>(epoch).data(), &StartCombine);
                });
}

ffi::Future CombineDoneHandler(ffi::RunId run_id, int32_t device, SiteState* state, int64_t session,
                               int64_t mode, int64_t layout, int64_t /*has_ride*/, Arg epoch,
                               Arg send_slot, Arg recv_src, Ret out, Ret ride_out) {
  const Invocation call{
      run_id, device, state, session, static_cast<Mode>(mode), static_cast<Layout>(layout)};
  return Submit(
      call, "combine_done",
      [&](const GroupShape& shape, [[maybe_unused]] bool debug) -> Result<Run> {
        Checker check("combine_done");
        check.Require("epoch", epoch, kI32, 1);
        JAX_EP_ASSIGN_OR_RETURN(const CombineParams params, MakeCombine(call, shape, check,
                                                                        {.send_slot = &send_slot,
                                                                         .recv_src = &recv_src,
                                                                         .out = &out,
                                                                         .ride_out = &ride_out}));
        return Run([params, low = In<int32_t>(epoch).data()](Rank& rank) {
          const uint64_t newest = params.mode == Mode::kLl ? rank.epochs.ll_combine_started
                                                           : rank.epochs.combine_started;
          return FinishCombine(rank, params, ExtendEpoch(low, newest));
        });
      });
}

XLA_FFI_DEFINE_HANDLER(kPlan, PlanHandler, signatures::Plan());
XLA_FFI_DEFINE_HANDLER(kDispatch, DispatchHandler, signatures::Dispatch());
XLA_FFI_DEFINE_HANDLER(kLlDispatch, LlDispatchHandler, signatures::LlDispatch());
XLA_FFI_DEFINE_HANDLER(kCombine, CombineHandler, signatures::Combine());
XLA_FFI_DEFINE_HANDLER(kDispatchStart, DispatchStartHandler, signatures::DispatchStart());
XLA_FFI_DEFINE_HANDLER(kDispatchDone, DispatchDoneHandler, signatures::DispatchDone());
XLA_FFI_DEFINE_HANDLER(kLlDispatchStart, LlDispatchStartHandler, signatures::LlDispatchStart());
XLA_FFI_DEFINE_HANDLER(kLlDispatchDone, LlDispatchDoneHandler, signatures::LlDispatchDone());
XLA_FFI_DEFINE_HANDLER(kCombineStart, CombineStartHandler, signatures::CombineStart());
XLA_FFI_DEFINE_HANDLER(kCombineDone, CombineDoneHandler, signatures::CombineDone());

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
