#include "proxy/transport/registry.h"

#include <utility>

#include "proxy/transport/cuda.h"
#include "proxy/transport/faulty.h"
#include "proxy/transport/loopback.h"
#include "proxy/transport/ofi.h"
#include "proxy/transport/shm.h"
#include "proxy/transport/verbs.h"

namespace jax_ep {
namespace {

struct Entry {
  const char* name;
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions&);  // nullptr: not here
  const char* reason;
  Status (*probe)(std::string* description);  // nullptr: `reason` is all there is to say
};

constexpr Entry kEntries[] = {
    {"loopback", &MakeLoopbackTransport, "memory copies inside one process", nullptr},
    {"shm", &MakeShmTransport, "memory copies between processes of one host", nullptr},
    {"cuda", &MakeCudaTransport, "copy engines between the GPUs of one host, for ranks on GPUs",
     nullptr},
    {"ofi", &MakeOfiTransport, "libfabric", &ProbeOfi},
    {"verbs", &MakeVerbsTransport, "ibverbs", &ProbeVerbs},
};

}  // namespace

std::vector<TransportInfo> ListTransports(std::string_view only) {
  std::vector<TransportInfo> transports;
  for (const Entry& entry : kEntries) {
    if (!only.empty() && only != entry.name) continue;
    TransportInfo info{
        .name = entry.name, .is_available = entry.make != nullptr, .reason = entry.reason};
    if (entry.probe != nullptr) {
      const Status status = entry.probe(&info.reason);
      info.is_available = status.ok();
      if (!status.ok()) info.reason = status.message();
    }
    transports.push_back(std::move(info));
  }
  return transports;
}

Status CheckFaultySpec(std::string_view spec) { return FaultySpec::Parse(spec).status(); }

Result<std::unique_ptr<Transport>> MakeTransport(std::string_view name,
                                                 const TransportOptions& options) {
  std::string known;
  for (const Entry& entry : kEntries) {
    if (name == entry.name) {
      if (entry.make == nullptr) {
        return Unimplemented("transport \"" + std::string(name) + "\": " + entry.reason);
      }
      Result<std::unique_ptr<Transport>> transport = entry.make(options);
      if (!transport.ok() || options.faulty_spec.empty()) return transport;
      return MakeFaultyTransport(std::move(transport.value()), options);
    }
    known += known.empty() ? "" : ", ";
    known += entry.name;
  }
  return InvalidArgument("unknown transport \"" + std::string(name) + "\"; known are: " + known);
}

}  // namespace jax_ep
