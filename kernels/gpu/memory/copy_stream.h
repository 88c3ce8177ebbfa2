// The copies of DeviceMemoryApi (device_memory.h, which has the contract).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/memory/device_memory.h"

namespace jax_ep::gpu {

const char* OpenCopies(int device, CopyStream** out);
const char* StartCopy(CopyStream* stream, std::byte* to, const std::byte* from, uint64_t bytes);
const char* EndBatch(CopyStream* stream);
const char* NewestBatch(CopyStream* stream, uint64_t* number);
const char* CloseCopies(CopyStream* stream);

}  // namespace jax_ep::gpu
