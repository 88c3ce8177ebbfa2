// The GPU kernels' library, which is loaded when the first group on GPUs is created.
#pragma once

#include <string>

#include "kernels/gpu/api.h"
#include "proxy/base/status.h"

namespace jax_ep {

// The library's table, loaded once per process. `path` is the file beside the Python module.
// \error kUnimplemented  it is not there (built without a GPU toolkit), with the loader's words
Result<const gpu::GpuApi*> LoadGpuLibrary(const std::string& path);

}  // namespace jax_ep
