// SharedMemory: zeroed memory that other processes of this host can map, without a name anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "proxy/base/status.h"

namespace jax_ep {

// Move-only owner of one mapping (and, for the creator, of the memfd behind it). Thread rule: the
// object belongs to one thread at a time; the bytes are shared memory like any other. The memory
// lives until the creator and all importers have dropped it, so an importer may outlive the
// creator. Nothing exists in /dev/shm, so a killed process leaves nothing behind. A child made by
// fork does not have the mapping: there the object must be neither used nor destroyed.
class SharedMemory {
 public:
  SharedMemory() = default;  // empty: bytes() is empty
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // `num_bytes` of zeroes, page aligned. shareable: backed by a memfd whose pages are reserved now,
  // so that a later store cannot meet a full system. Not shareable: anonymous, committed on first
  // touch; Export returns "".
  // \error kResourceExhausted  the host has less memory than asked for, or no descriptor is left
  // \error kInvalidArgument    num_bytes is 0
  static Result<SharedMemory> Create(size_t num_bytes, bool shareable);

  // Maps what another process (or this one) exported. Needs the same user and the same pid
  // namespace, and the exporter must still live.
  // \error kInvalidArgument  not a blob of Export
  // \error kUnavailable      the exporter is gone (also when its pid was recycled) or unreachable
  static Result<SharedMemory> Import(std::string_view blob);

  std::span<std::byte> bytes() const { return bytes_; }

  // What Import needs: pid, descriptor, size and a random token (binary string).
  std::string Export() const;

 private:
  void Reset();

  std::span<std::byte> bytes_;  // what callers see
  size_t mapped_bytes_ = 0;     // with the trailer page that holds the token
  int fd_ = -1;                 // kept open by the creator so that importers can reach it
  uint64_t token_ = 0;
};

}  // namespace jax_ep
