// What NICs may do with a device's memory: functions of DeviceMemoryApi (device_memory.h, which has
// the contract).
#pragma once

#include "kernels/gpu/memory/device_memory.h"

namespace jax_ep::gpu {

const char* GetNicAccess(int device, NicAccess* out);
const char* ExportDmabuf(int device, DeviceRange pages, int* fd);

}  // namespace jax_ep::gpu
