// cuda: ranks on GPUs of one host exchange bytes by their GPUs' copy engines.
#pragma once

#include <memory>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

// \error kInvalidArgument  no TransportOptions::copies: the rank is not on a GPU
Result<std::unique_ptr<Transport>> MakeCudaTransport(const TransportOptions& options);

}  // namespace jax_ep
