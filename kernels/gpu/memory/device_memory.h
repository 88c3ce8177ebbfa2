// kernels/gpu/memory: memory that several ranks or processes map.
//   In: sizes, devices, descriptors of other processes. Out: mapped ranges, and their descriptors.
//   Waits: nothing. The host alone runs this, before the first kernel and after the last.
//
// Memory that GPU kernels of several ranks share: heaps, XLA's arenas, pinned status words.
// CallPart of the table in api.h; no CUDA types, so that xla_ffi can include it.
//
// Ranges are CUDA virtual-memory mappings, because only those travel between processes as file
// descriptors, and because XLA's own allocator makes them (cudaIpcGetMemHandle refuses them).
// Every function returns nullptr or a text that lives until the thread's next call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace jax_ep::gpu {

// A mapping as this process addresses it. `bytes` 0: none.
struct DeviceRange {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  uint64_t kept_bytes = 0;  // its first bytes, an allocation of their own; 0: one allocation
};

// The allocations of a range, in its order, each of which has a descriptor of its own; `bytes` 0:
// there is no second.
constexpr std::array<DeviceRange, 2> PartsOf(const DeviceRange& range) {
  if (range.kept_bytes == 0) return {range, DeviceRange{}};
  return {
      DeviceRange{.base = range.base, .bytes = range.kept_bytes},
      DeviceRange{.base = range.base + range.kept_bytes, .bytes = range.bytes - range.kept_bytes}};
}

inline constexpr uint32_t kMaxCopyBatches = 2;

// Whether NICs may read and write a device's memory (GPUDirect RDMA), and who sees what they wrote
// once the host has seen that it was written.
struct NicAccess {
  const char* refusal = nullptr;  // why they cannot; null: they can, in what `for_nics` allocates
  bool owner_sees = false;        // kernels of the device
  bool all_see = false;           // and those of all others
};

// Copies of one device's memory to others, on a stream of their own.
struct CopyStream;

struct DeviceMemoryApi {
  // Makes the device's context exist and this thread's current one for the calls below.
  const char* (*use_device)(int device);
  // Whether kernels on `device` can load and store memory of `peer`, both of this process.
  const char* (*peer_access)(int device, int peer, bool* possible);
  // `bytes` (rounded up) of zeroes on `device`, for every device of `accessors`; exportable. The
  // first kept_bytes (rounded up as well) survive retire. `for_nics`: NICs may access it as well.
  const char* (*allocate)(int device, uint64_t bytes, uint64_t kept_bytes, bool for_nics,
                          const int* accessors, int num_accessors, DeviceRange* out);
  const char* (*nic_access)(int device, NicAccess* out);
  // A dmabuf descriptor of whole pages within one part of what `allocate` gave; the caller closes
  // it. -1: the driver exports none, and NICs know the memory by its address.
  const char* (*export_dmabuf)(int device, DeviceRange pages, int* fd);
  // The mapping that contains a live pointer, if it is one exportable allocation that all of
  // `accessors` (of this process) may read; else out->bytes is 0 and `reason` says why.
  const char* (*find_arena)(const void* live, const int* accessors, int num_accessors,
                            DeviceRange* out, const char** reason);
  // A descriptor for a part of a range that another process can import. The caller closes it.
  const char* (*export_fd)(DeviceRange part, int* fd);
  // Maps what another process exported, for kernels of `accessors`: the descriptors of its parts,
  // which stay open; `bytes` and kept_bytes as there.
  const char* (*import_fds)(std::array<int, 2> fds, uint64_t bytes, uint64_t kept_bytes,
                            const int* accessors, int num_accessors, bool writable,
                            DeviceRange* out);
  // Unmaps what allocate or import_fds gave. No kernel may use it any more.
  const char* (*release)(DeviceRange range);
  // Unmaps what allocate gave but for its kept bytes, which stay for the life of the process, and
  // so do the addresses of the range: nothing is mapped there again.
  const char* (*retire)(DeviceRange range);
  // Device memory that retired ranges of this process keep.
  uint64_t (*retired_bytes)();
  // Pinned, zeroed, mapped host memory, valid on every device of the process.
  const char* (*allocate_pinned)(uint64_t bytes, void** out);
  const char* (*release_pinned)(void* memory);
  // Makes host memory of the caller pinned and mapped for every device of the process, and back.
  const char* (*pin)(void* memory, uint64_t bytes);
  const char* (*unpin)(void* memory);
  // Copies between ranges that `device` can address, beside its kernels, in any order. Between
  // open_copies and close_copies from any thread, one at a time; only close_copies waits for them.
  // A batch is what was started since the last one ended; they count 1, 2, 3, ..., and at most
  // kMaxCopyBatches are under way. newest_batch: of which, and of all before it, all is done.
  const char* (*open_copies)(int device, CopyStream** out);
  const char* (*start_copy)(CopyStream* stream, std::byte* to, const std::byte* from,
                            uint64_t bytes);
  const char* (*end_batch)(CopyStream* stream);
  const char* (*newest_batch)(CopyStream* stream, uint64_t* number);
  const char* (*close_copies)(CopyStream* stream);
  // "0000:4f:00.0", NUL-terminated; `size` is at least 16.
  const char* (*pci_address)(int device, char* text, size_t size);
  // Waits until `device` is idle.
  const char* (*synchronize)(int device);
};

const DeviceMemoryApi* GetDeviceMemoryApi();

}  // namespace jax_ep::gpu
