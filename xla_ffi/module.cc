// The Python module jax_ep._core: registrations and sessions. No logic of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "proxy/transport/registry.h"
#include "xla_ffi/handlers_cpu.h"
#include "xla_ffi/session.h"
#include "xla_ffi/signatures.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

// Python's exception types by what the caller can do about it.
void ThrowIfError(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
      throw nb::value_error(status.message().c_str());
    case StatusCode::kResourceExhausted:
      PyErr_SetString(PyExc_MemoryError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kDeadlineExceeded:
      PyErr_SetString(PyExc_TimeoutError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kUnimplemented:
      PyErr_SetString(PyExc_NotImplementedError, status.message().c_str());
      throw nb::python_error();
    case StatusCode::kFailedPrecondition:
    case StatusCode::kUnavailable:
    case StatusCode::kInternal:
      throw std::runtime_error(status.message());
  }
}

std::chrono::nanoseconds Nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

nb::capsule Capsule(const void* pointer) { return nb::capsule(pointer); }

nb::tuple Registrations() {
  nb::dict types;
  nb::dict site_state;
  site_state["type_id"] = Capsule(&SiteState::id);
  site_state["type_info"] = Capsule(&SiteState::info);
  types["jax_ep_site"] = site_state;
  nb::dict targets;
  for (const HandlerRegistration& handler : CpuHandlers()) {
    nb::dict stages;
    stages["instantiate"] = Capsule(reinterpret_cast<const void*>(handler.instantiate));
    stages["execute"] = Capsule(reinterpret_cast<const void*>(handler.execute));
    targets[handler.target] = stages;
  }
  return nb::make_tuple(types, targets);
}

// Owns a Session for Python and keeps it in the table while it is open.
class PySession {
 public:
  PySession(int64_t session_id, const std::string& name, uint32_t num_ranks, uint32_t node_size,
            uint32_t num_experts, uint32_t top_k, uint32_t align, uint64_t hidden,
            uint64_t max_tokens, uint64_t ll_tokens, int elem_type, bool f32_partials, bool has_ht,
            uint32_t depth, std::vector<std::vector<uint32_t>> team_processes,
            const std::vector<std::tuple<int64_t, uint32_t, uint32_t>>& local_ranks,
            uint32_t process_index, const std::string& transport, double timeout_s,
            double peer_timeout_s, int threads_per_rank, bool debug) {
    SessionOptions options{.session_id = session_id,
                           .name = name,
                           .shape = {.num_ranks = num_ranks,
                                     .node_size = node_size,
                                     .num_experts = num_experts,
                                     .top_k = top_k,
                                     .align = align,
                                     .hidden = hidden,
                                     .max_tokens = max_tokens,
                                     .ll_tokens = ll_tokens,
                                     .elem_type = static_cast<ElemType>(elem_type),
                                     .f32_partials = f32_partials,
                                     .has_ht = has_ht,
                                     .depth = depth},
                           .team_processes = std::move(team_processes),
                           .local_ranks = {},
                           .process_index = process_index,
                           .transport = transport,
                           .timeout = Nanoseconds(timeout_s),
                           .peer_timeout = Nanoseconds(peer_timeout_s),
                           .threads_per_rank = threads_per_rank,
                           .debug = debug};
    for (const auto& [device, team, rank] : local_ranks) {
      options.local_ranks.push_back({.device_ordinal = device, .team = team, .rank = rank});
    }
    Result<std::unique_ptr<Session>> session = Session::Create(std::move(options));
    ThrowIfError(session.status());
    session_ = std::shared_ptr<Session>(std::move(*session));
  }

  nb::bytes LocalBlob() const {
    const std::string blob = session_->LocalBlob();
    return nb::bytes(blob.data(), blob.size());
  }

  void Connect(const nb::dict& blobs) {
    std::map<uint32_t, std::string> by_process;
    for (auto [process, blob] : blobs) {
      const nb::bytes bytes = nb::cast<nb::bytes>(blob);
      by_process[nb::cast<uint32_t>(process)] = std::string(bytes.c_str(), bytes.size());
    }
    Status status;
    {
      nb::gil_scoped_release release;
      status = session_->Connect(by_process);
    }
    ThrowIfError(status);
  }

  void Start() {
    Status status;
    {
      nb::gil_scoped_release release;
      status = session_->Start();
      if (status.ok()) status = SessionTable::Instance().Add(session_);
    }
    ThrowIfError(status);
  }

  void Barrier(double limit_s) {
    Status status;
    {
      nb::gil_scoped_release release;
      status = session_->Barrier(Nanoseconds(limit_s));
    }
    ThrowIfError(status);
  }

  void Close() {
    nb::gil_scoped_release release;
    SessionTable::Instance().Remove(session_->options().session_id);
    session_->Close();
  }

  // The first failure's message, or "" while the group works.
  std::string FailureText() const { return session_->failure().status().message(); }

  nb::list RankStats() const {
    nb::list all;
    const auto value = [](const std::atomic<uint64_t>& counter) {
      return counter.load(std::memory_order_relaxed);
    };
    for (const auto& [id, c] : session_->counters()) {
      nb::dict entry;
      entry["team"] = id.team;
      entry["rank"] = id.rank;
      entry["plans"] = value(c->plans);
      entry["dispatches"] = value(c->dispatches);
      entry["combines"] = value(c->combines);
      entry["rows_received"] = value(c->rows_received);
      entry["rows_dropped"] = value(c->rows_dropped);
      entry["invalid_ids"] = value(c->invalid_ids);
      entry["last_overflow"] = value(c->last_overflow);
      entry["bytes_pulled"] = value(c->bytes_pulled);
      entry["rows_sent_internode"] = value(c->rows_sent_internode);
      entry["bytes_sent_internode"] = value(c->bytes_sent_internode);
      entry["wait_ns"] = value(c->wait_ns);
      all.append(entry);
    }
    return all;
  }

  nb::list FlowStatsList() const {
    nb::list all;
    for (const FlowStats& flow : session_->flow_stats()) {
      nb::dict entry;
      entry["rank"] = flow.rank;
      entry["peer"] = flow.peer;
      entry["channel"] = static_cast<uint32_t>(flow.channel);
      entry["messages"] = flow.messages;
      entry["bytes"] = flow.bytes;
      entry["signals"] = flow.signals;
      entry["reorders"] = flow.reorders;
      entry["max_reorder_depth"] = flow.max_reorder_depth;
      entry["duplicates"] = flow.duplicates;
      entry["stalls"] = flow.stalls;
      entry["retries"] = flow.retries;
      all.append(entry);
    }
    return all;
  }

  std::string DumpState() const { return session_->DumpState(); }
  uint64_t heap_bytes() const { return session_->heap_bytes(); }

 private:
  std::shared_ptr<Session> session_;
};

nb::list Transports() {
  nb::list all;
  for (const TransportInfo& info : ListTransports()) {
    all.append(nb::make_tuple(info.name, info.is_available, info.reason));
  }
  return all;
}

}  // namespace
}  // namespace jax_ep

NB_MODULE(_core, m) {
  using jax_ep::PySession;
  m.doc() = "The native part of jax_ep: FFI handlers and sessions. Private; use jax_ep.";
  m.def("registrations", &jax_ep::Registrations,
        "(types, targets) to give to jax.ffi.register_ffi_type and register_ffi_target, in that "
        "order.");
  m.def(
      "note_compile_end", [] { jax_ep::SessionTable::Instance().sites().NoteModuleComplete(); },
      "A compilation has ended: the next custom call instantiated belongs to another module.");
  m.def("transports", &jax_ep::Transports, "[(name, available, reason)] of every transport.");
  m.def(
      "heap_bytes_for",
      [](uint32_t num_ranks, uint32_t node_size, uint32_t num_experts, uint32_t top_k,
         uint32_t align, uint64_t hidden, uint64_t max_tokens, uint64_t ll_tokens, int elem_type,
         bool f32_partials, bool has_ht, uint32_t depth) {
        return jax_ep::HeapLayout::Make({.num_ranks = num_ranks,
                                         .node_size = node_size,
                                         .num_experts = num_experts,
                                         .top_k = top_k,
                                         .align = align,
                                         .hidden = hidden,
                                         .max_tokens = max_tokens,
                                         .ll_tokens = ll_tokens,
                                         .elem_type = static_cast<jax_ep::ElemType>(elem_type),
                                         .f32_partials = f32_partials,
                                         .has_ht = has_ht,
                                         .depth = depth})
            .total_bytes;
      },
      nb::kw_only(), nb::arg("num_ranks"), nb::arg("node_size"), nb::arg("num_experts"),
      nb::arg("top_k"), nb::arg("align"), nb::arg("hidden"), nb::arg("max_tokens"),
      nb::arg("ll_tokens"), nb::arg("elem_type"), nb::arg("f32_partials"), nb::arg("has_ht"),
      nb::arg("depth"), "Bytes of one rank's heap for a group of this shape.");
  nb::class_<PySession>(m, "Session", "One group in this process (xla_ffi/session.h).")
      .def(nb::init<int64_t, const std::string&, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                    uint64_t, uint64_t, uint64_t, int, bool, bool, uint32_t,
                    std::vector<std::vector<uint32_t>>,
                    const std::vector<std::tuple<int64_t, uint32_t, uint32_t>>&, uint32_t,
                    const std::string&, double, double, int, bool>(),
           nb::kw_only(), nb::arg("session_id"), nb::arg("name"), nb::arg("num_ranks"),
           nb::arg("node_size"), nb::arg("num_experts"), nb::arg("top_k"), nb::arg("align"),
           nb::arg("hidden"), nb::arg("max_tokens"), nb::arg("ll_tokens"), nb::arg("elem_type"),
           nb::arg("f32_partials"), nb::arg("has_ht"), nb::arg("depth"), nb::arg("team_processes"),
           nb::arg("local_ranks"), nb::arg("process_index"), nb::arg("transport"),
           nb::arg("timeout_s"), nb::arg("peer_timeout_s"), nb::arg("threads_per_rank"),
           nb::arg("debug"))
      .def("local_blob", &PySession::LocalBlob, "What other processes need to connect (opaque).")
      .def("connect", &PySession::Connect, nb::arg("blobs"), "Takes {process index: local_blob}.")
      .def("start", &PySession::Start, "Starts the threads; every process must have connected.")
      .def("barrier", &PySession::Barrier, nb::arg("limit_s"), "Waits for every rank of the group.")
      .def("close", &PySession::Close, "Drains and stops; idempotent.")
      .def("failure_text", &PySession::FailureText, "The first failure, or an empty string.")
      .def("rank_stats", &PySession::RankStats, "Counters of each local rank.")
      .def("flow_stats", &PySession::FlowStatsList, "Counters of each proxy flow.")
      .def("dump_state", &PySession::DumpState, "A text with everything a hang report needs.")
      .def_prop_ro("heap_bytes", &PySession::heap_bytes, "Bytes of this process's heaps.");
}
