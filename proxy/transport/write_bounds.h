// WriteBounds: what a network transport knows of the regions that a write may touch, and the check
// of a request against them: the same words for every transport.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

class WriteBounds {
 public:
  // `transport` is the name that errors begin with.
  WriteBounds(std::string transport, uint64_t max_message_bytes)
      : transport_(std::move(transport)), max_message_bytes_(max_message_bytes) {}

  uint32_t AddPeer() {
    peers_.emplace_back();
    return static_cast<uint32_t>(peers_.size() - 1);
  }
  uint32_t AddLocal(uint64_t num_bytes) {
    local_.push_back(num_bytes);
    return static_cast<uint32_t>(local_.size() - 1);
  }
  // `peer` is one of AddPeer.
  uint32_t AddRemote(uint32_t peer, uint64_t num_bytes) {
    peers_[peer].push_back(num_bytes);
    return static_cast<uint32_t>(peers_[peer].size() - 1);
  }

  Status CheckPeer(uint32_t peer) const {
    return peer < peers_.size() ? Status::Ok() : BadHandle("peer", peer, peers_.size());
  }

  // Whatever the caller got wrong, nothing outside a region is touched, on either side.
  Status Check(const WriteRequest& request) const {
    JAX_EP_RETURN_IF_ERROR(CheckPeer(request.peer));
    if (request.length_bytes == 0) return Status::Ok();
    if (request.length_bytes > max_message_bytes_) {
      return InvalidArgument(transport_ + ": a write of " + std::to_string(request.length_bytes) +
                             " bytes; at most " + std::to_string(max_message_bytes_) +
                             " go at once");
    }
    const std::vector<uint64_t>& remote = peers_[request.peer];
    if (request.local_region >= local_.size()) {
      return BadHandle("local region", request.local_region, local_.size());
    }
    if (request.remote_region >= remote.size()) {
      return BadHandle("remote region", request.remote_region, remote.size());
    }
    JAX_EP_RETURN_IF_ERROR(
        CheckInside("local", request.local_offset, request, local_[request.local_region]));
    return CheckInside("remote", request.remote_offset, request, remote[request.remote_region]);
  }

 private:
  Status BadHandle(const char* what, uint64_t handle, size_t count) const {
    return InvalidArgument(transport_ + ": " + what + " " + std::to_string(handle) +
                           "; there are " + std::to_string(count));
  }

  Status CheckInside(const char* side, uint64_t offset, const WriteRequest& request,
                     uint64_t num_bytes) const {
    if (request.length_bytes <= num_bytes && offset <= num_bytes - request.length_bytes) {
      return Status::Ok();
    }
    return InvalidArgument(transport_ + ": " + side + " bytes [" + std::to_string(offset) + ", +" +
                           std::to_string(request.length_bytes) + ") are outside the region of " +
                           std::to_string(num_bytes) + " bytes");
  }

  std::string transport_;
  uint64_t max_message_bytes_;
  std::vector<uint64_t> local_;               // bytes by handle
  std::vector<std::vector<uint64_t>> peers_;  // bytes by handle of each peer
};

}  // namespace jax_ep
