#include "kernels/gpu/launch.h"

#include <mutex>
#include <utility>

#include "kernels/gpu/device/vendor.h"

namespace jax_ep::gpu {

const char* KeepText(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

namespace {
thread_local uint32_t num_launched = 0;
}  // namespace

uint32_t TakeLaunchCount() { return std::exchange(num_launched, 0); }

const char* LaunchResult(const char* kernel) {
  // May also be what an earlier, asynchronous launch left behind.
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) {
    ++num_launched;
    return nullptr;
  }
  return KeepText(std::string(kernel) + ": " + cudaGetErrorString(error));
}

const char* PrepareKernel(const void* kernel, uint32_t shared_bytes) {
  static std::mutex mutex;  // the attribute is the process's
  const std::lock_guard lock(mutex);
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);  // loads it
  if (error == cudaSuccess &&
      static_cast<int>(shared_bytes) > attributes.maxDynamicSharedSizeBytes) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  if (error == cudaSuccess) return nullptr;
  return KeepText(std::string("a kernel cannot be loaded: ") + cudaGetErrorString(error));
}

}  // namespace jax_ep::gpu
