#include "proxy/transport/registry.h"

#include "proxy/transport/faulty.h"
#include "proxy/transport/loopback.h"
#include "proxy/transport/shm.h"

namespace jax_ep {
namespace {

struct Entry {
  const char* name;
  Result<std::unique_ptr<Transport>> (*make)(const TransportOptions&);  // nullptr: not here
  const char* reason;
};

constexpr Entry kEntries[] = {
    {"loopback", &MakeLoopbackTransport, "memory copies inside one process"},
    {"shm", &MakeShmTransport, "memory copies between processes of one host"},
    {"ofi", nullptr, "libfabric is not part of this version; use shm on one host"},
    {"verbs", nullptr, "ibverbs is not part of this version; use shm on one host"},
};

}  // namespace

std::vector<TransportInfo> ListTransports() {
  std::vector<TransportInfo> transports;
  for (const Entry& entry : kEntries) {
    transports.push_back(TransportInfo{
        .name = entry.name, .is_available = entry.make != nullptr, .reason = entry.reason});
  }
  return transports;
}

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
