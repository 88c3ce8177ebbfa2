#include "kernels/gpu/memory/nic_access.h"

#include <utility>

#include "kernels/gpu/memory/driver.h"
#include "kernels/gpu/memory/error_text.h"

namespace jax_ep::gpu {

#if JAX_EP_HIP
const char* GetNicAccess(int /*device*/, NicAccess* out) {
  *out = {.refusal = "this version gives no memory of AMD GPUs to NICs"};
  return nullptr;
}

const char* ExportDmabuf(int /*device*/, DeviceRange /*pages*/, int* fd) {
  *fd = -1;
  return nullptr;
}
#else
namespace {

const char* Attribute(int device, CUdevice_attribute attribute, int* value) {
  JAX_EP_DRIVER("cuDeviceGetAttribute", TheDriver().attribute(value, attribute, device));
  return nullptr;
}

}  // namespace

// CUDA driver API, CUdevice_attribute and cuFlushGPUDirectRDMAWrites. The latter also says that
// ordering is the caller's affair where there are several ways to the memory. So it is on machines
// where CPU and GPU share page tables (GH200, GB200): flags go by NVLink-C2C there, rows may go by
// PCIe.
const char* GetNicAccess(int device, NicAccess* out) {
  *out = {};
  const Driver& driver = TheDriver();
  if (driver.attribute == nullptr || driver.range_handle == nullptr) {
    out->refusal = "the CUDA driver lacks the functions for it; it must support CUDA 12";
    return nullptr;
  }
  int is_supported = 0, has_mappings = 0, has_two_ways = 0, ordering = 0;
  for (const auto& [attribute, value] :
       {std::pair{CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, &is_supported},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, &has_mappings},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, &has_two_ways},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, &ordering}}) {
    if (const char* error = Attribute(device, attribute, value)) return error;
  }
  out->owner_sees = ordering >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
  out->all_see = ordering >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES;
  if (is_supported == 0 || has_mappings == 0) {
    out->refusal = "the driver gives no mapped memory of this GPU to NICs";
  } else if (has_two_ways != 0) {
    out->refusal =
        "flags and rows take different ways to this GPU (NVLink-C2C, PCIe), which nothing orders";
  }
  return nullptr;
}

const char* ExportDmabuf(int device, DeviceRange pages, int* fd) {
  *fd = -1;
  int has_dmabuf = 0;
  if (const char* error = Attribute(device, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, &has_dmabuf)) {
    return error;
  }
  if (has_dmabuf == 0) return nullptr;
  JAX_EP_DRIVER("cuMemGetHandleForAddressRange",
                TheDriver().range_handle(fd, reinterpret_cast<CUdeviceptr>(pages.base), pages.bytes,
                                         CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, /*flags=*/0));
  return nullptr;
}
#endif

}  // namespace jax_ep::gpu
