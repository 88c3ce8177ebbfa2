// The CPU-platform custom calls, for the module to register.
#pragma once

#include <span>

#include "xla_ffi/operations.h"
#include "xla_ffi/site.h"

namespace jax_ep {

// XLA's per-call state: made once when the call is instantiated, given to each execution.
struct SiteState {
  static xla::ffi::TypeId id;
  static xla::ffi::TypeInfo info;
  CallSite site;
};

std::span<const HandlerRegistration> CpuHandlers();

}  // namespace jax_ep
