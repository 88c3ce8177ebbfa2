// What the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/stats.h"
#include "xla_ffi/operations.h"
#include "xla_ffi/session_table.h"

namespace jax_ep {

// Raises Python's exception type for `status` unless it is OK.
void ThrowIfError(const Status& status);

std::chrono::nanoseconds Nanoseconds(double seconds);

// {target: {stage: capsule}} as jax.ffi.register_ffi_target wants it.
nanobind::dict Targets(std::span<const HandlerRegistration> handlers);

nanobind::bytes ToBytes(const std::string& blob);
nanobind::list ToList(const std::vector<FlowStats>& flows);
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

// What Python does with every kind of session: owns it, and keeps it in the table while it is open.
template <typename S>
class PySessionOf {
 public:
  explicit PySessionOf(std::shared_ptr<S> session) : session_(std::move(session)) {}

  nanobind::bytes LocalBlob() const { return ToBytes(session_->LocalBlob()); }

  void Start() {
    WithoutGil([&]() -> Status {
      JAX_EP_RETURN_IF_ERROR(session_->Start());
      return SessionTable<S>::Instance().Add(session_);
    });
  }

  void Close() {
    nanobind::gil_scoped_release release;
    SessionTable<S>::Instance().Remove(session_->options().session_id);
    session_->Close();
  }

  // The first failure's message, or "" while the group works.
  std::string FailureText() const { return session_->failure().status().message(); }
  std::string DumpState() const { return session_->DumpState(); }
  nanobind::list FlowStatsList() const { return ToList(session_->flow_stats()); }
  uint64_t heap_bytes() const { return session_->heap_bytes(); }

  S& session() const { return *session_; }

  // The Python methods of all of the above.
  template <typename Class>
  static void Bind(Class& bound) {
    bound.def("local_blob", &PySessionOf::LocalBlob, "What other processes need (opaque).")
        .def("start", &PySessionOf::Start, "Starts it; every process must have connected.")
        .def("close", &PySessionOf::Close, "Drains, stops, frees; idempotent.")
        .def("failure_text", &PySessionOf::FailureText, "The first failure, or an empty string.")
        .def("flow_stats", &PySessionOf::FlowStatsList, "Counters of each proxy flow.")
        .def("dump_state", &PySessionOf::DumpState, "A text with everything a hang report needs.")
        .def_prop_ro("heap_bytes", &PySessionOf::heap_bytes, "Bytes of this process's heaps.");
  }

 private:
  std::shared_ptr<S> session_;
};

// GpuSession and load_gpu_library.
void BindGpu(nanobind::module_& m);

}  // namespace jax_ep
