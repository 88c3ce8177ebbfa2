#include "kernels/gpu/memory/device_memory.h"

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/gpu/memory/copy_stream.h"
#include "kernels/gpu/memory/driver.h"
#include "kernels/gpu/memory/error_text.h"
#include "kernels/gpu/memory/nic_access.h"

namespace jax_ep::gpu {
namespace {

const char* CheckDriver() {
  return TheDriver().complete()
             ? nullptr
             : Fail("the CUDA driver lacks the virtual memory functions; it must support CUDA 12");
}

CUdeviceptr Address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(const_cast<void*>(pointer));
}

CUmemLocation OnDevice(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

const char* UseDevice(int device) {
  JAX_EP_RUNTIME(cudaSetDevice(device));
  JAX_EP_RUNTIME(cudaFree(nullptr));  // makes the primary context
  return CheckDriver();
}

const char* PeerAccess(int device, int peer, bool* possible) {
  int value = 1;
  if (device != peer) JAX_EP_RUNTIME(cudaDeviceCanAccessPeer(&value, device, peer));
  *possible = value != 0;
  return nullptr;
}

// Maps the allocation of one part at its address; drops the handle (the mapping keeps the memory
// alive).
CUresult MapPart(CUmemGenericAllocationHandle handle, DeviceRange part,
                 const std::vector<CUmemAccessDesc>& access) {
  const Driver& driver = TheDriver();
  CUresult result = driver.map(Address(part.base), part.bytes, /*offset=*/0, handle, /*flags=*/0);
  static_cast<void>(driver.release(handle));
  if (result != CUDA_SUCCESS) return result;
  result = driver.set_access(Address(part.base), part.bytes, access.data(), access.size());
  if (result != CUDA_SUCCESS) static_cast<void>(driver.unmap(Address(part.base), part.bytes));
  return result;
}

// Maps a range at fresh addresses; make_part(number, bytes, &handle) gives each part's allocation.
template <typename MakePart>
const char* MapRange(uint64_t bytes, uint64_t kept_bytes, const int* accessors, int num_accessors,
                     bool writable, DeviceRange* out, MakePart&& make_part) {
  const Driver& driver = TheDriver();
  CUdeviceptr base = 0;
  JAX_EP_DRIVER("cuMemAddressReserve",
                driver.reserve(&base, bytes, /*alignment=*/0, /*hint=*/0, /*flags=*/0));
  std::vector<CUmemAccessDesc> access(static_cast<size_t>(num_accessors));
  for (int i = 0; i < num_accessors; ++i) {
    access[static_cast<size_t>(i)].location = OnDevice(accessors[i]);
    access[static_cast<size_t>(i)].flags =
        writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
  }
  const DeviceRange range{
      .base = reinterpret_cast<std::byte*>(base), .bytes = bytes, .kept_bytes = kept_bytes};
  const auto parts = PartsOf(range);
  for (size_t number = 0; number < parts.size(); ++number) {
    if (parts[number].bytes == 0) continue;
    CUmemGenericAllocationHandle handle{};
    const char* call = "";
    CUresult result = make_part(number, parts[number].bytes, &handle, &call);
    if (result == CUDA_SUCCESS) {
      call = "cuMemMap or cuMemSetAccess";
      result = MapPart(handle, parts[number], access);
    }
    if (result == CUDA_SUCCESS) continue;
    if (number > 0) static_cast<void>(driver.unmap(base, parts[0].bytes));
    static_cast<void>(driver.address_free(base, bytes));
    return Fail(DriverError(call, result));
  }
  *out = range;
  return nullptr;
}

const char* Allocate(int device, uint64_t bytes, uint64_t kept_bytes, bool for_nics,
                     const int* accessors, int num_accessors, DeviceRange* out) {
  if (const char* error = UseDevice(device)) return error;
  const Driver& driver = TheDriver();
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = OnDevice(device);
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (for_nics) Driver::AllowNics(&prop);
  size_t unit = 0;
  JAX_EP_DRIVER("cuMemGetAllocationGranularity",
                driver.granularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  const auto round_up = [unit](uint64_t value) { return (value + unit - 1) / unit * unit; };
  DeviceRange range;
  if (const char *error = MapRange(
          round_up(bytes), round_up(kept_bytes), accessors, num_accessors, /*writable=*/true,
          &range, [&](size_t, uint64_t part_bytes, auto* handle, const char** call) {
            *call = "cuMemCreate";
            return driver.create(handle, part_bytes, &prop, /*flags=*/0);
          })) {
    return error;
  }
  JAX_EP_RUNTIME(cudaMemset(range.base, 0, range.bytes));
  JAX_EP_RUNTIME(cudaDeviceSynchronize());
  *out = range;
  return nullptr;
}

const char* FindArena(const void* live, const int* accessors, int num_accessors, DeviceRange* out,
                      const char** reason) {
  *out = {};
  *reason = "";
  if (const char* error = CheckDriver()) return error;
  const Driver& driver = TheDriver();
  CUdeviceptr base = 0;
  size_t bytes = 0;
  JAX_EP_DRIVER("cuMemGetAddressRange", driver.address_range(&base, &bytes, Address(live)));
  CUmemGenericAllocationHandle handle{};
  // The call fails for memory of cudaMalloc and of pools, which have no handle.
  if (driver.retain(&handle, reinterpret_cast<void*>(base)) != CUDA_SUCCESS) {
    *reason = "XLA's allocator does not use CUDA virtual memory";
    return nullptr;
  }
  CUmemAllocationProp prop{};
  const CUresult result = driver.properties(&prop, handle);
  static_cast<void>(driver.release(handle));
  if (result != CUDA_SUCCESS) {
    return Fail(DriverError("cuMemGetAllocationPropertiesFromHandle", result));
  }
  if ((prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0) {
    *reason = "XLA's arena cannot be exported as a file descriptor";
    return nullptr;
  }
  for (int i = 0; i < num_accessors; ++i) {
    const CUmemLocation location = OnDevice(accessors[i]);
    unsigned long long flags = 0;
    JAX_EP_DRIVER("cuMemGetAccess", driver.get_access(&flags, &location, base));
    if ((flags & CU_MEM_ACCESS_FLAGS_PROT_READ) == 0) {
      *reason = "XLA's arena is not readable by the other GPUs of the process";
      return nullptr;
    }
  }
  *out = {.base = reinterpret_cast<std::byte*>(base), .bytes = bytes};
  return nullptr;
}

const char* ExportFd(DeviceRange part, int* fd) {
  if (const char* error = CheckDriver()) return error;
  const Driver& driver = TheDriver();
  CUmemGenericAllocationHandle handle{};
  JAX_EP_DRIVER("cuMemRetainAllocationHandle", driver.retain(&handle, part.base));
  const CUresult result =
      driver.export_handle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, /*flags=*/0);
  static_cast<void>(driver.release(handle));
  if (result != CUDA_SUCCESS) return Fail(DriverError("cuMemExportToShareableHandle", result));
  return nullptr;
}

const char* ImportFds(std::array<int, 2> fds, uint64_t bytes, uint64_t kept_bytes,
                      const int* accessors, int num_accessors, bool writable, DeviceRange* out) {
  if (const char* error = CheckDriver()) return error;
  return MapRange(bytes, kept_bytes, accessors, num_accessors, writable, out,
                  [&](size_t number, uint64_t, auto* handle, const char** call) {
                    *call = "cuMemImportFromShareableHandle";
                    const auto fd = static_cast<uintptr_t>(fds[number]);
                    return TheDriver().import_handle(handle, reinterpret_cast<void*>(fd),
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                  });
}

const char* Unmap(DeviceRange part) {
  if (part.bytes == 0) return nullptr;
  JAX_EP_DRIVER("cuMemUnmap", TheDriver().unmap(Address(part.base), part.bytes));
  return nullptr;
}

const char* Release(DeviceRange range) {
  if (range.bytes == 0) return nullptr;
  for (const DeviceRange& part : PartsOf(range)) {
    if (const char* error = Unmap(part)) return error;
  }
  JAX_EP_DRIVER("cuMemAddressFree", TheDriver().address_free(Address(range.base), range.bytes));
  return nullptr;
}

std::atomic<uint64_t> retired_bytes{0};  // relaxed: a statistic

const char* Retire(DeviceRange range) {
  const auto [kept, rest] = PartsOf(range);
  retired_bytes.fetch_add(kept.bytes, std::memory_order_relaxed);
  return Unmap(rest);
}

uint64_t RetiredBytes() { return retired_bytes.load(std::memory_order_relaxed); }

const char* AllocatePinned(uint64_t bytes, void** out) {
  JAX_EP_RUNTIME(cudaHostAlloc(out, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(*out, 0, bytes);
  return nullptr;
}

const char* ReleasePinned(void* memory) {
  if (memory != nullptr) JAX_EP_RUNTIME(cudaFreeHost(memory));
  return nullptr;
}

const char* Pin(void* memory, uint64_t bytes) {
  JAX_EP_RUNTIME(
      cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
  return nullptr;
}

const char* Unpin(void* memory) {
  JAX_EP_RUNTIME(cudaHostUnregister(memory));
  return nullptr;
}

const char* PciAddress(int device, char* text, size_t size) {
  JAX_EP_RUNTIME(cudaDeviceGetPCIBusId(text, static_cast<int>(size), device));
  return nullptr;
}

const char* Synchronize(int device) {
  JAX_EP_RUNTIME(cudaSetDevice(device));
  JAX_EP_RUNTIME(cudaDeviceSynchronize());
  return nullptr;
}

}  // namespace

const DeviceMemoryApi* GetDeviceMemoryApi() {
  static const DeviceMemoryApi api{.use_device = UseDevice,
                                   .peer_access = PeerAccess,
                                   .allocate = Allocate,
                                   .nic_access = GetNicAccess,
                                   .export_dmabuf = ExportDmabuf,
                                   .find_arena = FindArena,
                                   .export_fd = ExportFd,
                                   .import_fds = ImportFds,
                                   .release = Release,
                                   .retire = Retire,
                                   .retired_bytes = RetiredBytes,
                                   .allocate_pinned = AllocatePinned,
                                   .release_pinned = ReleasePinned,
                                   .pin = Pin,
                                   .unpin = Unpin,
                                   .open_copies = OpenCopies,
                                   .start_copy = StartCopy,
                                   .end_batch = EndBatch,
                                   .newest_batch = NewestBatch,
                                   .close_copies = CloseCopies,
                                   .pci_address = PciAddress,
                                   .synchronize = Synchronize};
  return &api;
}

}  // namespace jax_ep::gpu
