// What the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/stats.h"
#include "xla_ffi/lifecycle.h"
#include "xla_ffi/operations.h"
#include "xla_ffi/reporter.h"
#include "xla_ffi/session_options.h"
#include "xla_ffi/session_table.h"
#include "xla_ffi/totals.h"

namespace jax_ep {

// Raises Python's exception type for `status` unless it is OK.
void ThrowIfError(const Status& status);

std::chrono::nanoseconds Nanoseconds(double seconds);

// {target: {stage: capsule}} as jax.ffi.register_ffi_target wants it.
nanobind::dict Targets(std::span<const HandlerRegistration> handlers);

nanobind::bytes ToBytes(const std::string& blob);
nanobind::list ToList(const std::vector<FlowStats>& flows);
nanobind::list ToList(const std::vector<RankTotals>& ranks);
// {process index: bytes} as the sessions want it.
std::map<uint32_t, std::string> ToBlobs(const nanobind::dict& blobs);

// Runs `body` without the interpreter's lock and raises what it returns.
template <typename Body>
void WithoutGil(Body&& body) {
  Status status;
  {
    nanobind::gil_scoped_release release;
    status = body();
  }
  ThrowIfError(status);
}

// How long a wait may leave Ctrl-C unseen.
inline constexpr std::chrono::milliseconds kSignalSlice{200};

// WithoutGil for a `body` that waits for other processes: it runs on a thread of its own while this
// one looks at signals. If a handler raises (Ctrl-C), `cancel` is called, `body` awaited, which
// must end soon then, and the handler's exception raised.
template <typename Body, typename Cancel>
void Interruptibly(Body&& body, Cancel&& cancel) {
  std::future<Status> result;
  try {
    result = std::async(std::launch::async, std::ref(body));
  } catch (const std::system_error&) {  // no thread is to be had: Ctrl-C has to wait
    WithoutGil(body);
    return;
  }
  const auto is_done = [&] {
    nanobind::gil_scoped_release release;
    return result.wait_for(kSignalSlice) == std::future_status::ready;
  };
  while (!is_done()) {
    if (PyErr_CheckSignals() == 0) continue;
    nanobind::python_error raised;
    {
      nanobind::gil_scoped_release release;
      cancel();
      result.wait();
    }
    throw raised;
  }
  ThrowIfError(result.get());
}

// `Make()`, a Result of a session, by the rules of Interruptibly: creating takes a while.
template <typename S, typename Make>
std::shared_ptr<S> Created(Make&& make) {
  std::shared_ptr<S> session;
  const auto body = [&]() -> Status {
    JAX_EP_ASSIGN_OR_RETURN(session, make());
    return Status::Ok();
  };
  Interruptibly(body, [] {});
  return session;
}

// What Python does with every kind of session: owns it, and keeps it in the table while it is open.
template <typename S>
class PySessionOf {
 public:
  explicit PySessionOf(std::shared_ptr<S> session) : session_(std::move(session)) {}

  nanobind::bytes LocalBlob() const { return ToBytes(session_->LocalBlob()); }

  void Start() {
    WithoutGil([&]() -> Status {
      JAX_EP_RETURN_IF_ERROR(session_->Start());
      reported_ = ListForReports(
          {.page = [session = session_.get()] { return session->Report(); },
           .counters = [session = session_.get()] { return session->CountersJson(); }});
      return SessionTable<S>::Instance().Add(session_);
    });
  }

  // `program_ended` is what peers that still use the group are told. Executions find the session
  // until it is sealed: those that XLA has enqueued are still to end well.
  void Close(bool program_ended) {
    if (session_->lifecycle().is_forked()) return;
    CloseFor(program_ended ? Departure::kProgramEnded : Departure::kClosed,
             GroupIsClosed(session_->options().name), [&] { return session_->WhyClosed(); });
  }

  // Close without the others' consent: what they wait for ends with `reason`, which late executions
  // here are told, too. Of a session that is closed it replaces what they are told.
  void Abort(const std::string& reason) {
    if (session_->lifecycle().is_forked()) return;
    const Status why = FailedPrecondition(reason);
    session_->failure().Set(why);
    CloseFor(Departure::kClosed, why, [&] { return why; });
  }

  void BeginToAgree() { session_->BeginToAgree(); }

  // Abort, as a process does that agrees with the others on who takes part in the next session.
  void EndToAgree() {
    if (session_->lifecycle().is_forked()) return;
    const Status why = FailedPrecondition(
        "group " + session_->options().name +
        ": this process called agree, which has not ended well yet; if it has raised, call it "
        "again");
    session_->failure().Set(why, FailureLatch::kAgreement);
    CloseFor(Departure::kClosed, why, [&] { return why; });
  }

  // The first failure's message, or "" while the group works, or worked when it was closed.
  std::string FailureText() const { return session_->FailureText(); }
  int64_t BlamedRank() const { return session_->failure().blamed_rank(); }
  std::string Report() const { return session_->Report(); }
  std::string DumpState() const { return session_->DumpState(); }
  nanobind::list RankStats() const {
    const Result<std::vector<RankTotals>> totals = session_->totals();
    ThrowIfError(totals.status());
    return ToList(*totals);
  }
  nanobind::list FlowStatsList() const { return ToList(session_->flow_stats()); }
  uint64_t heap_bytes() const { return session_->heap_bytes(); }

  S& session() const { return *session_; }

  // Interruptibly; what it cancels with fails the group.
  template <typename Body>
  void AwaitPeers(Body&& body) {
    Interruptibly(body, [&] {
      const SessionOptions& options = session_->options();
      session_->failure().Set(FailedPrecondition("group " + options.name + ": process " +
                                                 std::to_string(options.process_index) +
                                                 " was interrupted by a signal"));
    });
  }

  // The Python methods of all of the above.
  template <typename Class>
  static void Bind(Class& bound) {
    bound.def("local_blob", &PySessionOf::LocalBlob, "What other processes need (opaque).")
        .def("start", &PySessionOf::Start, "Starts it; every process must have connected.")
        .def("close", &PySessionOf::Close, nanobind::arg("program_ended") = false,
             "Drains, says good-bye, stops, frees; idempotent. Nothing in a forked child.")
        .def("abort", &PySessionOf::Abort, nanobind::arg("reason"),
             "close, without waiting for the others; they and late executions are told the "
             "reason.")
        .def("begin_to_agree", &PySessionOf::BeginToAgree,
             nanobind::call_guard<nanobind::gil_scoped_release>(),
             "Tells the others that this process takes part in no further call.")
        .def("end_to_agree", &PySessionOf::EndToAgree,
             "abort, because the processes agree anew on who takes part.")
        // On a GPU its cause may be waited for, which other threads need not do.
        .def("failure_text", &PySessionOf::FailureText,
             nanobind::call_guard<nanobind::gil_scoped_release>(),
             "The first failure, or an empty string.")
        .def("blamed_rank", &PySessionOf::BlamedRank,
             "Of the first failure, in a group of one team; negative: nobody.")
        .def("rank_stats", &PySessionOf::RankStats,
             nanobind::sig("def rank_stats(self) -> list[dict[str, typing.Any]]"),
             "Counters of each local rank.")
        .def("flow_stats", &PySessionOf::FlowStatsList,
             nanobind::sig("def flow_stats(self) -> list[dict[str, int]]"),
             "Counters of each proxy flow.")
        .def("report", &PySessionOf::Report, "One page: who hangs, in the first line.")
        .def("dump_state", &PySessionOf::DumpState, "The report and more, for a bug report.")
        .def_prop_ro("heap_bytes", &PySessionOf::heap_bytes,
                     "Bytes of this process's heaps; 0 after close.");
  }

 private:
  // `why`: what executions are told from then on; cut(), asked when all has ended: one that had
  // begun.
  template <typename Cut>
  void CloseFor(Departure departure, const Status& why, Cut&& cut) {
    AwaitPeers([&] {
      session_->Close(departure);
      SessionTable<S>::Instance().Remove(*session_, why, cut());
      reported_.reset();  // may wait for an answer
      return Status::Ok();
    });
  }
  std::shared_ptr<S> session_;
  std::unique_ptr<ReportEntry> reported_;  // from Start to Close; goes before the session
};

// GpuSession and load_gpu_library.
void BindGpu(nanobind::module_& m);

}  // namespace jax_ep
