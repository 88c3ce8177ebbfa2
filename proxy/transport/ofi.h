// ofi: ranks on any hosts exchange bytes over libfabric: RDM endpoints, RMA writes whose immediate
// is remote CQ data. What is built, and what runs where: docs/transports.md.
#pragma once

#include <memory>
#include <string>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

// \error kUnavailable      no libfabric here, or no provider of it can do what we need
// \error kInvalidArgument  JAX_EP_SOCKET_IFNAME, JAX_EP_OFI_PROVIDER or JAX_EP_OFI_DOMAIN names
//                          something that is not there
Result<std::unique_ptr<Transport>> MakeOfiTransport(const TransportOptions& options);

// OK and what would be used (version, provider, domain), or why there is none.
Status ProbeOfi(std::string* description);

}  // namespace jax_ep
