// GpuSession for Python.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "xla_ffi/gpu_library.h"
#include "xla_ffi/gpu_session.h"
#include "xla_ffi/module.h"
#include "xla_ffi/session_table.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

class PyGpuSession : public PySessionOf<GpuSession> {
 public:
  explicit PyGpuSession(GpuOptions options)
      : PySessionOf(Created<GpuSession>([&] { return GpuSession::Create(std::move(options)); })) {}

  std::vector<int> ExportFds() const {
    Result<std::vector<int>> fds = session().ExportFds();
    ThrowIfError(fds.status());
    return *fds;
  }

  // Returns why an arena could not be mapped, or "".
  std::string Connect(const nb::dict& blobs, const std::map<uint32_t, std::vector<int>>& fds) {
    const std::map<uint32_t, std::string> by_process = ToBlobs(blobs);
    AwaitPeers([&] { return session().Connect(by_process, fds); });
    return session().unmapped_arena();
  }

  void ForbidArenas(const std::string& reason) { session().ForbidArenas(reason); }

  std::string data_path() const { return session().data_path(); }
};

}  // namespace

void BindGpu(nb::module_& m) {
  m.def(
      "load_gpu_library",
      [](const std::string& path) { ThrowIfError(LoadGpuLibrary(path).status()); }, nb::arg("path"),
      "Loads libjax_ep_gpu.so, once; NotImplementedError if that is impossible.");
  m.def(
      "gpu_memory_bytes",
      [](const std::string& path, const GroupShape& shape) {
        const Result<const gpu::GpuApi*> api = LoadGpuLibrary(path);
        ThrowIfError(api.status());
        return std::make_tuple((*api)->heap_bytes(&shape), (*api)->stage_bytes(&shape));
      },
      nb::arg("path"), nb::arg("shape"),
      "Bytes of a GPU rank's heap and of its network stage; as load_gpu_library.");
  auto session = nb::class_<PyGpuSession>(m, "GpuSession", "One group on GPUs (gpu_session.h).");
  session
      .def(
          "__init__",
          [](PyGpuSession* self, const SessionOptions& options, const std::string& library_path,
             std::vector<uint64_t> live_pointers, uint64_t min_arena_bytes, bool require_arena,
             uint32_t max_sms, bool use_tma) {
            new (self) PyGpuSession({.session = options,
                                     .library_path = library_path,
                                     .live_pointers = std::move(live_pointers),
                                     .min_arena_bytes = min_arena_bytes,
                                     .require_arena = require_arena,
                                     .max_sms = max_sms,
                                     .use_tma = use_tma});
          },
          nb::kw_only(), nb::arg("options"), nb::arg("library_path"), nb::arg("live_pointers"),
          nb::arg("min_arena_bytes"), nb::arg("require_arena"), nb::arg("max_sms"),
          nb::arg("use_tma"))
      .def("export_fds", &PyGpuSession::ExportFds,
           "Descriptors for the other processes; the caller closes them.")
      .def("connect", &PyGpuSession::Connect, nb::arg("blobs"), nb::arg("fds"),
           nb::sig("def connect(self, blobs: dict[int, bytes], fds: dict[int, list[int]]) -> str"),
           "Takes {process: local_blob} and {process: export_fds}; returns why an arena could not "
           "be mapped, or an empty string.")
      .def("forbid_arenas", &PyGpuSession::ForbidArenas, nb::arg("reason"),
           "All ranks stage their rows from now on; before start.")
      .def_prop_ro("data_path", &PyGpuSession::data_path, "\"in place\", or \"staged: REASON\".");
  PyGpuSession::Bind(session);
}

}  // namespace jax_ep
