// The custom calls that quantise rows and back on CPUs. They belong to no group: XLA's own threads
// run them, on the rows of one call.
#pragma once

#include <span>

#include "xla_ffi/operations.h"

namespace jax_ep {

std::span<const HandlerRegistration> QuantizeHandlers();

}  // namespace jax_ep
