// The vendors' virtual memory functions under CUDA's names: entry points of libcuda that are found
// at run time, or functions of the HIP runtime.
#pragma once

#include <string>

#include "kernels/gpu/device/vendor.h"

#if JAX_EP_HIP
#define CUDA_SUCCESS hipSuccess
#define CU_MEM_ACCESS_FLAGS_PROT_READ hipMemAccessFlagsProtRead
#define CU_MEM_ACCESS_FLAGS_PROT_READWRITE hipMemAccessFlagsProtReadWrite
#define CU_MEM_ALLOCATION_TYPE_PINNED hipMemAllocationTypePinned
#define CU_MEM_ALLOC_GRANULARITY_RECOMMENDED hipMemAllocationGranularityRecommended
#define CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR hipMemHandleTypePosixFileDescriptor
#define CU_MEM_LOCATION_TYPE_DEVICE hipMemLocationTypeDevice
#define CUdeviceptr hipDeviceptr_t
#define CUmemAccessDesc hipMemAccessDesc
#define CUmemAllocationProp hipMemAllocationProp
#define CUmemGenericAllocationHandle hipMemGenericAllocationHandle_t
#define CUmemLocation hipMemLocation
#define CUresult hipError_t
#define requestedHandleTypes requestedHandleType
#else
#include <cuda.h>
#endif

namespace jax_ep::gpu {

#if JAX_EP_HIP
struct Driver {
  decltype(&hipMemCreate) create = &hipMemCreate;
  decltype(&hipMemRelease) release = &hipMemRelease;
  decltype(&hipMemAddressReserve) reserve = &hipMemAddressReserve;
  decltype(&hipMemAddressFree) address_free = &hipMemAddressFree;
  decltype(&hipMemMap) map = &hipMemMap;
  decltype(&hipMemUnmap) unmap = &hipMemUnmap;
  decltype(&hipMemSetAccess) set_access = &hipMemSetAccess;
  decltype(&hipMemGetAccess) get_access = &hipMemGetAccess;
  decltype(&hipMemGetAllocationGranularity) granularity = &hipMemGetAllocationGranularity;
  decltype(&hipMemRetainAllocationHandle) retain = &hipMemRetainAllocationHandle;
  decltype(&hipMemGetAllocationPropertiesFromHandle) properties =
      &hipMemGetAllocationPropertiesFromHandle;
  decltype(&hipMemExportToShareableHandle) export_handle = &hipMemExportToShareableHandle;
  decltype(&hipMemImportFromShareableHandle) import_handle = &hipMemImportFromShareableHandle;
  decltype(&hipMemGetAddressRange) address_range = &hipMemGetAddressRange;

  bool complete() const { return true; }
  static void AllowNics(CUmemAllocationProp* /*prop*/) {}  // GetNicAccess refuses them
  std::string ErrorName(CUresult result) const { return hipGetErrorName(result); }
};
#else
// Null: the driver is not there or too old.
template <typename Function>
Function* Entry(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kVersion = 12000;  // the oldest driver API that has all of them
  if (cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<Function*>(address);
}

struct Driver {
  decltype(&cuGetErrorName) get_error_name = Entry<decltype(cuGetErrorName)>("cuGetErrorName");
  decltype(&cuMemCreate) create = Entry<decltype(cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = Entry<decltype(cuMemRelease)>("cuMemRelease");
  decltype(&cuMemAddressReserve) reserve =
      Entry<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) address_free = Entry<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemMap) map = Entry<decltype(cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = Entry<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = Entry<decltype(cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuMemGetAccess) get_access = Entry<decltype(cuMemGetAccess)>("cuMemGetAccess");
  decltype(&cuMemGetAllocationGranularity) granularity =
      Entry<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemRetainAllocationHandle) retain =
      Entry<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  decltype(&cuMemGetAllocationPropertiesFromHandle) properties =
      Entry<decltype(cuMemGetAllocationPropertiesFromHandle)>(
          "cuMemGetAllocationPropertiesFromHandle");
  decltype(&cuMemExportToShareableHandle) export_handle =
      Entry<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle");
  decltype(&cuMemImportFromShareableHandle) import_handle =
      Entry<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");
  decltype(&cuMemGetAddressRange) address_range =
      Entry<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange");
  // For NICs alone (nic_access.cc).
  decltype(&cuDeviceGetAttribute) attribute =
      Entry<decltype(cuDeviceGetAttribute)>("cuDeviceGetAttribute");
  decltype(&cuMemGetHandleForAddressRange) range_handle =
      Entry<decltype(cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");

  bool complete() const {
    return get_error_name && create && release && reserve && address_free && map && unmap &&
           set_access && get_access && granularity && retain && properties && export_handle &&
           import_handle && address_range;
  }
  static void AllowNics(CUmemAllocationProp* prop) { prop->allocFlags.gpuDirectRDMACapable = 1; }
  std::string ErrorName(CUresult result) const {
    const char* name = nullptr;
    if (get_error_name != nullptr) get_error_name(result, &name);
    return name != nullptr ? name : std::to_string(result);
  }
};
#endif

inline const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

inline std::string DriverError(const char* call, CUresult result) {
  return std::string(call) + " failed: " + TheDriver().ErrorName(result);
}

// Returns from the caller if the driver's call fails.
#define JAX_EP_DRIVER(call_name, call)                                                     \
  do {                                                                                     \
    const CUresult driver_result = (call);                                                 \
    if (driver_result != CUDA_SUCCESS) return Fail(DriverError(call_name, driver_result)); \
  } while (false)

}  // namespace jax_ep::gpu
