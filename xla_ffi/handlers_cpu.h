// The CPU-platform custom calls: name -> (instantiate, execute), for the module to register.
#pragma once

#include <span>

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

struct HandlerRegistration {
  const char* target;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
};

std::span<const HandlerRegistration> CpuHandlers();

}  // namespace jax_ep
