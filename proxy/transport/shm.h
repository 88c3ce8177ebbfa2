// shm: ranks of one host, in any processes, exchange bytes by copies into each other's heap.
#pragma once

#include <memory>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

Result<std::unique_ptr<Transport>> MakeShmTransport(const TransportOptions& options);

}  // namespace jax_ep
