// verbs: ranks on any hosts exchange bytes over RDMA NICs: reliable queue pairs, RDMA writes with
// immediate. What is built, and what runs where: docs/transports.md.
#pragma once

#include <memory>
#include <string>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

// \error kUnavailable      no libibverbs here, or no RDMA device with an active port
// \error kInvalidArgument  JAX_EP_VERBS_DEVICE or JAX_EP_VERBS_GID_INDEX names what is not there
Result<std::unique_ptr<Transport>> MakeVerbsTransport(const TransportOptions& options);

// OK and which devices would be used, or why there is none.
Status ProbeVerbs(std::string* description);

}  // namespace jax_ep
