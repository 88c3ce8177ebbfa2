// Errors of the host's code in this folder.
#pragma once

#include <string>
#include <utility>

#include "kernels/gpu/device/vendor.h"

namespace jax_ep::gpu {

// The text lives until the thread's next call.
inline const char* Fail(std::string text) {
  thread_local std::string last_error;
  last_error = std::move(text);
  return last_error.c_str();
}

// Returns from the caller if the runtime's call fails.
#define JAX_EP_RUNTIME(call)                                                              \
  do {                                                                                    \
    const cudaError_t runtime_result = (call);                                            \
    if (runtime_result != cudaSuccess) {                                                  \
      return Fail(std::string(#call) + " failed: " + cudaGetErrorString(runtime_result)); \
    }                                                                                     \
  } while (false)

}  // namespace jax_ep::gpu
