#include "xla_ffi/gpu_library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace jax_ep {

Result<const gpu::GpuApi*> LoadGpuLibrary(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, const gpu::GpuApi*> loaded;
  std::lock_guard lock(mutex);
  if (const auto it = loaded.find(path); it != loaded.end()) return it->second;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Unimplemented("the GPU library cannot be loaded (" + std::string(dlerror()) +
                         "); run `pip install 'jax_ep[cuda13]'`, in a checkout `JAX_EP_GPU=cuda "
                         "pip install .` where "
                         "nvcc is found, or pass implementation='xla'");
  }
  const auto get = reinterpret_cast<decltype(&jax_ep_gpu_api)>(dlsym(library, "jax_ep_gpu_api"));
  const gpu::GpuApi* api = get == nullptr ? nullptr : get();
  if (api == nullptr || api->abi_version != gpu::kAbiVersion) {
    const std::string got =
        api == nullptr ? "no jax_ep library" : "version " + std::to_string(api->abi_version);
    return Unimplemented("the GPU library " + path + ": got " + got +
                         " of its interface, expected " + std::to_string(gpu::kAbiVersion) +
                         ", as this jax_ep has; install both again, of one version");
  }
  loaded[path] = api;
  return api;
}

}  // namespace jax_ep
