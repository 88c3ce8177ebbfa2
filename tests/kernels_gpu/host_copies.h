// What a network stage could carry at best: kernels that store to and load from pinned memory, and
// threads that copy between stages.
#pragma once

#include <cstdint>

namespace jax_ep::testing {

// GB/s of each direction, per GPU (threads: per rank), all at once.
struct HostStageRates {
  double kernel_stores;
  double kernel_loads;
  double copies;  // by `threads` threads of each rank

  double least() const {
    const double kernels = kernel_stores < kernel_loads ? kernel_stores : kernel_loads;
    return kernels < copies ? kernels : copies;
  }
};
HostStageRates MeasureHostStage(uint32_t sms, uint32_t threads);

}  // namespace jax_ep::testing
