// PeerBlob: what an endpoint tells its peers before they connect. It travels through the
// bootstrap's key-value store; every field that both sides must agree on is checked by Connect.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/base/siphash.h"
#include "proxy/base/status.h"

namespace jax_ep {

inline constexpr uint64_t kProtocolVersion = 8;  // commands, immediates, this blob, flag meaning

struct PeerBlob {
  std::string group_name = {};
  uint32_t rank = 0;
  uint32_t num_ranks = 0;
  uint64_t process = 0;  // LifeSigns::own_id of the one that runs the rank
  uint32_t window_messages = 0;
  uint32_t ll_slots = 0;
  std::string transport_address = {};
  std::string heap_key = {};
  // Sorted. The flow id of (peer, channel) at this endpoint is the peer's position here times
  // kNumChannels plus the channel: so the sender can compute what the receiver assigned.
  std::vector<uint32_t> peers = {};
  // What a peer has to present with each of its immediates follows from this and its rank
  // (SecretOf), so that the record is as long in a group of any size. None where the transport has
  // no room for it.
  std::optional<SipKey> secret_key = {};

  std::string Encode() const;
  // \error kInvalidArgument  another protocol version, or garbage
  static Result<PeerBlob> Decode(std::string_view blob);
};

// The secret of the peer `rank` under the key of the endpoint that it sends to.
constexpr uint32_t SecretOf(const SipKey& key, uint32_t rank) {
  return static_cast<uint32_t>(SipHash(key, rank));
}

}  // namespace jax_ep
