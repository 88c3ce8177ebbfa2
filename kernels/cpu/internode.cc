#include "kernels/cpu/internode.h"

#include <algorithm>

namespace jax_ep {

PackedStream::PackedStream(Operation& op, Channel channel, uint64_t signal, uint32_t dst_rank,
                           uint64_t local_offset, uint64_t remote_offset)
    : op_(op) {
  command_.dst_rank = dst_rank;
  command_.local_offset = local_offset;
  command_.remote_offset = remote_offset;
  command_.channel = channel;
  command_.epoch = signal;
}

Status PackedStream::PushPending(uint64_t num_bytes, Op op) {
  command_.op = op;
  command_.length_bytes = num_bytes;
  JAX_EP_RETURN_IF_ERROR(op_.Push(command_));
  command_.local_offset += num_bytes;
  command_.remote_offset += num_bytes;
  pending_bytes_ -= num_bytes;
  return Status::Ok();
}

Status PackedStream::Advance(uint64_t num_bytes) {
  pending_bytes_ += num_bytes;
  num_bytes_ += num_bytes;
  if (pending_bytes_ < kWriteChunkBytes) return Status::Ok();
  while (pending_bytes_ > 0) {
    const uint64_t length = std::min(pending_bytes_, kWriteChunkBytes);
    JAX_EP_RETURN_IF_ERROR(PushPending(length, Op::kWrite));
  }
  op_.KickProxy();
  return Status::Ok();
}

Status PackedStream::Finish() {
  if (pending_bytes_ > 0) {
    JAX_EP_RETURN_IF_ERROR(PushPending(pending_bytes_, Op::kWriteSignal));
  } else {
    JAX_EP_RETURN_IF_ERROR(op_.Signal(command_.dst_rank, command_.channel, command_.epoch));
  }
  op_.KickProxy();
  return Status::Ok();
}

}  // namespace jax_ep
