// Kernels of an LL dispatch whose rows travel quantised.
#include "kernels/gpu/ll/dispatch/kernel.cuh"
#include "kernels/gpu/ll/dispatch/place_records.cuh"

namespace jax_ep::gpu::ll {

Kernel RecordKernelOf(ElemType type, bool are_split) {
  return WithRecordRows(type, are_split, [&]<typename Delivered>() -> Kernel {
    return &LlDispatch<RecordRows<Delivered>>;
  });
}

}  // namespace jax_ep::gpu::ll
