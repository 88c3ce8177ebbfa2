// Packed blocks to other nodes: contiguous bytes that leave in large WRITE commands while the rest
// is still being packed, with the signal on the last one.
#pragma once

#include <cstdint>

#include "kernels/cpu/sync.h"

namespace jax_ep {

// Bytes after which a WRITE leaves: large enough that the cost of a command vanishes, small enough
// that the network starts early (protocol.md asks for at least 64 KiB).
inline constexpr uint64_t kWriteChunkBytes = 256 * 1024;

// One block for one rank. Push order is the channel's order, so the signal comes last.
class PackedStream {
 public:
  // The block is at `local_offset` of this rank's heap and goes to `remote_offset` of `dst_rank`'s.
  // `signal`: what the flag there gets.
  PackedStream(Operation& op, Channel channel, uint64_t signal, uint32_t dst_rank,
               uint64_t local_offset, uint64_t remote_offset);

  // Where the next bytes are to be written.
  std::byte* end() const { return op_.own_heap() + command_.local_offset + pending_bytes_; }
  // The next `num_bytes` (a multiple of 16) have been written.
  Status Advance(uint64_t num_bytes);
  uint64_t num_bytes() const { return num_bytes_; }  // advanced so far
  // No more bytes: the rest and the signal leave.
  Status Finish();

 private:
  Status PushPending(uint64_t num_bytes, Op op);

  Operation& op_;
  Command command_;
  uint64_t pending_bytes_ = 0;
  uint64_t num_bytes_ = 0;
};

}  // namespace jax_ep
