// The GPU-platform custom calls, for the module to register.
#pragma once

#include <span>

#include "xla_ffi/operations.h"

namespace jax_ep {

std::span<const HandlerRegistration> GpuHandlers();

}  // namespace jax_ep
