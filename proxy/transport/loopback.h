// loopback: ranks of one process exchange bytes by memory copies.
#pragma once

#include <memory>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

Result<std::unique_ptr<Transport>> MakeLoopbackTransport(const TransportOptions& options);

}  // namespace jax_ep
