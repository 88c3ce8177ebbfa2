// The Python module jax_ep._core: registrations and sessions. No logic of its own.
#include "xla_ffi/module.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "proxy/base/env.h"
#include "proxy/base/topology.h"
#include "proxy/transport/registry.h"
#include "xla_ffi/call_lines.h"
#include "xla_ffi/elsewhere.h"
#include "xla_ffi/handlers_cpu.h"
#include "xla_ffi/handlers_gpu.h"
#include "xla_ffi/quantize.h"
#include "xla_ffi/session.h"
#include "xla_ffi/wait_page.h"

namespace nb = nanobind;

namespace jax_ep {

// Exception types by what the caller can do about it.
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

namespace {

// {phase: [N]} of [kNumWaitPhases * N].
nb::dict WaitsByPhase(std::span<const uint64_t> wait_by_peer) {
  const size_t num_ranks = wait_by_peer.size() / kNumWaitPhases;
  nb::dict waits;
  for (uint32_t index = 0; index < kNumWaitPhases; ++index) {
    nb::list by_rank;
    for (const uint64_t wait : wait_by_peer.subspan(index * num_ranks, num_ranks)) {
      by_rank.append(wait);
    }
    waits[nb::str(WaitPhaseName(static_cast<WaitPhase>(index)).data())] = by_rank;
  }
  return waits;
}

}  // namespace

nb::list ToList(const std::vector<RankTotals>& ranks) {
  nb::list all;
  for (const RankTotals& rank : ranks) {
    nb::dict entry;
    entry["team"] = rank.id.team;
    entry["rank"] = rank.id.rank;
    entry["plans"] = rank.plans;
    entry["dispatches"] = rank.dispatches;
    entry["combines"] = rank.combines;
    entry["rows_received"] = rank.rows_received;
    entry["rows_dropped"] = rank.rows_dropped;
    entry["invalid_ids"] = rank.invalid_ids;
    entry["last_overflow"] = rank.last_overflow;
    entry["bytes_pulled"] = rank.bytes_pulled;
    entry["wait_ns"] = rank.wait_ns;
    nb::list pairs;
    for (const uint64_t count : rank.pairs_per_expert) pairs.append(count);
    entry["pairs_per_expert"] = pairs;
    entry["wait_by_peer"] = WaitsByPhase(rank.wait_by_peer);
    const auto add = [&entry](const char* name, const std::optional<uint64_t>& count) {
      if (count.has_value()) entry[name] = *count;
    };
    add("rows_sent_internode", rank.rows_sent_internode);
    add("bytes_sent_internode", rank.bytes_sent_internode);
    add("bytes_staged", rank.bytes_staged);
    add("launches", rank.launches);
    all.append(entry);
  }
  return all;
}

nb::list ToList(const std::vector<FlowStats>& flows) {
  nb::list all;
  for (const FlowStats& flow : flows) {
    nb::dict entry;
    entry["team"] = flow.team;
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

nb::bytes ToBytes(const std::string& blob) { return nb::bytes(blob.data(), blob.size()); }

std::map<uint32_t, std::string> ToBlobs(const nb::dict& blobs) {
  std::map<uint32_t, std::string> by_process;
  for (auto [process, blob] : blobs) {
    const nb::bytes bytes = nb::cast<nb::bytes>(blob);
    by_process[nb::cast<uint32_t>(process)] = std::string(bytes.c_str(), bytes.size());
  }
  return by_process;
}

namespace {

nb::capsule Capsule(const void* pointer) { return nb::capsule(pointer); }

}  // namespace

nb::dict Targets(std::span<const HandlerRegistration> handlers) {
  nb::dict targets;
  for (const HandlerRegistration& handler : handlers) {
    nb::dict stages;
    if (handler.instantiate != nullptr) {
      stages["instantiate"] = Capsule(reinterpret_cast<const void*>(handler.instantiate));
    }
    stages["execute"] = Capsule(reinterpret_cast<const void*>(handler.execute));
    targets[handler.target] = stages;
  }
  return targets;
}

namespace {

nb::tuple Registrations(const std::string& platform) {
  nb::dict types;
  if (platform != "cpu") return nb::make_tuple(types, Targets(GpuHandlers()));
  nb::dict site_state;
  site_state["type_id"] = Capsule(&SiteState::id);
  site_state["type_info"] = Capsule(&SiteState::info);
  types["jax_ep_site"] = site_state;
  nb::dict targets = Targets(CpuHandlers());
  targets.update(Targets(QuantizeHandlers()));
  return nb::make_tuple(types, targets);
}

void BindOptions(nb::module_& m) {
  nb::class_<GroupShape>(m, "GroupShape", "Sizes of a group (kernels/layout.h).")
      .def(
          "__init__",
          [](GroupShape* self, uint32_t num_ranks, uint32_t node_size, uint32_t num_experts,
             uint32_t top_k, uint32_t align, uint64_t hidden, uint64_t max_tokens,
             uint64_t ll_tokens, int elem_type, bool f32_partials, bool has_ht, uint32_t depth) {
            new (self) GroupShape{.num_ranks = num_ranks,
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
                                  .depth = depth};
          },
          nb::kw_only(), nb::arg("num_ranks"), nb::arg("node_size"), nb::arg("num_experts"),
          nb::arg("top_k"), nb::arg("align"), nb::arg("hidden"), nb::arg("max_tokens"),
          nb::arg("ll_tokens"), nb::arg("elem_type"), nb::arg("f32_partials"), nb::arg("has_ht"),
          nb::arg("depth"))
      .def_prop_ro("gpu_ll_round_tokens", &GpuLlRoundTokens,
                   "Tokens of every rank that a call of mode ll moves at once on GPUs.");
  m.def(
      "heap_bytes", [](const GroupShape& shape) { return HeapLayout::Make(shape).total_bytes; },
      nb::arg("shape"), "Bytes of a CPU rank's heap.");
  nb::class_<SessionOptions>(m, "SessionOptions", "What a session is created from.")
      .def(
          "__init__",
          [](SessionOptions* self, int64_t session_id, const std::string& name,
             const GroupShape& shape, std::vector<std::vector<uint32_t>> team_processes,
             const std::vector<std::tuple<int64_t, uint32_t, uint32_t>>& local_ranks,
             std::vector<std::pair<uint32_t, uint32_t>> host_ranks, std::vector<uint8_t> active,
             uint32_t generation, uint32_t process_index, const std::string& transport,
             double timeout_s, double peer_timeout_s, int threads_per_rank, bool huge_pages,
             bool debug, bool gpu_direct) {
            new (self) SessionOptions{.session_id = session_id,
                                      .name = name,
                                      .shape = shape,
                                      .team_processes = std::move(team_processes),
                                      .local_ranks = {},
                                      .host_ranks = std::move(host_ranks),
                                      .active = std::move(active),
                                      .generation = generation,
                                      .process_index = process_index,
                                      .transport = transport,
                                      .timeout = Nanoseconds(timeout_s),
                                      .peer_timeout = Nanoseconds(peer_timeout_s),
                                      .threads_per_rank = threads_per_rank,
                                      .huge_pages = huge_pages,
                                      .debug = debug,
                                      .gpu_direct = gpu_direct};
            for (const auto& [device, team, rank] : local_ranks) {
              self->local_ranks.push_back({.device_ordinal = device, .team = team, .rank = rank});
            }
          },
          nb::kw_only(), nb::arg("session_id"), nb::arg("name"), nb::arg("shape"),
          nb::arg("team_processes"), nb::arg("local_ranks"), nb::arg("host_ranks"),
          nb::arg("active"), nb::arg("generation"), nb::arg("process_index"), nb::arg("transport"),
          nb::arg("timeout_s"), nb::arg("peer_timeout_s"), nb::arg("threads_per_rank"),
          nb::arg("huge_pages"), nb::arg("debug"), nb::arg("gpu_direct"));
}

class PySession : public PySessionOf<Session> {
 public:
  explicit PySession(const SessionOptions& options)
      : PySessionOf(Created<Session>([&] { return Session::Create(options); })) {}

  void Connect(const nb::dict& blobs) {
    const std::map<uint32_t, std::string> by_process = ToBlobs(blobs);
    AwaitPeers([&] { return session().Connect(by_process); });
  }

  void Barrier(double limit_s) {
    AwaitPeers([&] { return session().Barrier(Nanoseconds(limit_s)); });
  }

  bool IsBalanced() const { return session().IsBalanced(); }
};

std::vector<std::pair<std::string, std::vector<int>>> GpuDistances(
    const std::string& sysfs, const std::vector<std::string>& rdma_devices) {
  std::vector<std::pair<std::string, std::vector<int>>> all;
  for (const PciDevice& gpu : ListGpus(sysfs)) {
    std::vector<int> distances;
    for (const std::string& name : rdma_devices) {
      distances.push_back(static_cast<int>(DistanceOf(gpu, ReadRdmaDevice(sysfs, name))));
    }
    all.emplace_back(gpu.address, std::move(distances));
  }
  return all;
}

void CheckEnvironment(const std::string& name) {
  const Result<Env> env = Env::Read([&name](const char* other) -> const char* {
    return other == name ? std::getenv(other) : nullptr;
  });
  ThrowIfError(env.status());
  ThrowIfError(CheckFaultySpec(env.value().faulty_spec));
}

nb::list Transports(const std::string& only) {
  nb::list all;
  for (const TransportInfo& info : ListTransports(only)) {
    all.append(nb::make_tuple(info.name, info.is_available, info.reason));
  }
  return all;
}

}  // namespace
}  // namespace jax_ep

NB_MODULE(_core, m) {
  using jax_ep::PySession;
  m.doc() = "The native part of jax_ep: FFI handlers and sessions. Private; use jax_ep.";
  m.def("registrations", &jax_ep::Registrations, nb::arg("platform"),
        nb::sig("def registrations(platform: str) -> tuple[dict[str, dict[str, object]], "
                "dict[str, dict[str, object]]]"),
        "(types, targets) to give to jax.ffi.register_ffi_type and register_ffi_target, in that "
        "order, for platform \"cpu\" or a GPU platform.");
  m.attr("AGREEMENT") = jax_ep::FailureLatch::kAgreement;
  m.attr("STALL_SHARE") = jax_ep::kStallShare;
  m.def("check_environment", &jax_ep::CheckEnvironment, nb::arg("name"),
        "ValueError if this variable has a value that is not allowed (base/env.h).");
  m.def(
      "begin_stay",
      [](const std::string& what, uint32_t number) {
        const jax_ep::Stay stay = what == "close"          ? jax_ep::Stay::kClose
                                  : what == "create_group" ? jax_ep::Stay::kCreateGroup
                                                           : jax_ep::Stay::kAgree;
        return jax_ep::Elsewhere::Instance().Begin(stay, number);
      },
      nb::arg("what"), nb::arg("number"),
      "This process enters \"close\", \"create_group\" or \"agree\" of group #number: for "
      "reports.");
  m.def(
      "end_stay", [](size_t place) { jax_ep::Elsewhere::Instance().End(place); }, nb::arg("place"),
      "It leaves what begin_stay returned this for.");
  m.def(
      "set_call_lines",
      [](const std::vector<std::pair<uint64_t, std::string>>& lines) {
        for (const auto& [name, line] : lines) jax_ep::CallLines::Instance().Set(name, line);
      },
      nb::arg("lines"), nb::sig("def set_call_lines(lines: list[tuple[int, str]]) -> None"),
      "Takes [(name of a call, where it stands in the program)], for reports.");
  m.def("transports", &jax_ep::Transports, nb::arg("only") = "",
        nb::sig("def transports(only: str = '') -> list[tuple[str, bool, str]]"),
        "[(name, available, reason)] of every transport, or of that one; networks are tried.");
  m.def("gpu_distances", &jax_ep::GpuDistances, nb::arg("sysfs"), nb::arg("rdma_devices"),
        "[(PCI address of a GPU, [distance of each RDMA device])]; 0 is nearest (topology.h).");
  nb::class_<jax_ep::WaitPage>(m, "WaitPage", "What Python waits for (wait_page.h).")
      .def(nb::init<std::string, std::string>(), nb::arg("who"), nb::arg("why"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("set", &jax_ep::WaitPage::Set, nb::arg("who"), nb::arg("why"), "Replaces both.")
      .def("text", &jax_ep::WaitPage::Text, "The page.")
      .def("warn", &jax_ep::WaitPage::Warn, "Writes the page to the log.")
      .def("end", &jax_ep::WaitPage::End, nb::call_guard<nb::gil_scoped_release>(),
           "Nobody who asks this process gets it any more.");
  jax_ep::BindOptions(m);
  auto session = nb::class_<PySession>(m, "Session", "One group in this process (session.h).");
  session.def(nb::init<const jax_ep::SessionOptions&>(), nb::arg("options"))
      .def("connect", &PySession::Connect, nb::arg("blobs"),
           nb::sig("def connect(self, blobs: dict[int, bytes]) -> None"),
           "Takes {process index: local_blob}.")
      .def("barrier", &PySession::Barrier, nb::arg("limit_s"), "Waits for every rank of the group.")
      .def("is_balanced", &PySession::IsBalanced,
           "Whether the ranks of this process have been given the same number of calls.");
  PySession::Bind(session);
  jax_ep::BindGpu(m);
}
