// Registry: transport name -> factory. An explicit list; nothing registers itself.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

struct TransportInfo {
  std::string name;
  bool is_available = false;
  std::string reason;  // what it is; if unavailable, why and what to do
};

// Every transport that this version knows of, in order of preference; with a name, that one alone.
// Whether a network can be used is tried: its library is loaded, endpoints are opened and closed.
std::vector<TransportInfo> ListTransports(std::string_view only = {});

// Of JAX_EP_FAULTY.
// \error kInvalidArgument
Status CheckFaultySpec(std::string_view spec);

// Makes a transport by name, wrapped in the faulty one if options.faulty_spec is not empty.
// \error kInvalidArgument  unknown name (the message lists the known ones) or bad faulty_spec
// \error kUnimplemented    known, but not part of this version
Result<std::unique_ptr<Transport>> MakeTransport(std::string_view name,
                                                 const TransportOptions& options);

}  // namespace jax_ep
