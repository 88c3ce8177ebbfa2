#include "proxy/peer_blob.h"

#include <cstring>

#include "proxy/abi/command.h"
#include "proxy/base/blob.h"

namespace jax_ep {
namespace {

constexpr uint64_t kMagic = 0x524545505f504541;

}  // namespace

std::string PeerBlob::Encode() const {
  BlobWriter writer;
  writer.U64(kMagic).U64(kProtocolVersion).Text(group_name).U64(rank).U64(num_ranks);
  writer.U64(process);
  writer.U64(window_messages).U64(ll_slots).Text(transport_address).Text(heap_key);
  // One bit per rank.
  std::string bits((num_ranks + 7) / 8, '\0');
  for (const uint32_t peer : peers) bits[peer / 8] |= static_cast<char>(1 << (peer % 8));
  std::string key(secret_key ? sizeof(SipKey) : 0, '\0');
  if (secret_key) std::memcpy(key.data(), secret_key->data(), key.size());
  return writer.Text(bits).Text(key).Take();
}

Result<PeerBlob> PeerBlob::Decode(std::string_view text) {
  BlobReader reader(text);
  const uint64_t magic = reader.U64();
  const uint64_t version = reader.U64();
  if (!reader.ok() || magic != kMagic) {
    return InvalidArgument("not the bootstrap record of an endpoint (" +
                           std::to_string(text.size()) + " bytes)");
  }
  if (version != kProtocolVersion) {
    return InvalidArgument("the peer speaks protocol version " + std::to_string(version) +
                           ", this process " + std::to_string(kProtocolVersion) +
                           "; install the same jax_ep everywhere");
  }
  PeerBlob blob;
  blob.group_name = reader.Text();
  blob.rank = static_cast<uint32_t>(reader.U64());
  blob.num_ranks = static_cast<uint32_t>(reader.U64());
  blob.process = reader.U64();
  blob.window_messages = static_cast<uint32_t>(reader.U64());
  blob.ll_slots = static_cast<uint32_t>(reader.U64());
  blob.transport_address = reader.Text();
  blob.heap_key = reader.Text();
  const std::string_view bits = reader.Text();
  const std::string_view key = reader.Text();
  if (!reader.finished() || blob.num_ranks > kMaxRanks || bits.size() != (blob.num_ranks + 7) / 8 ||
      (!key.empty() && key.size() != sizeof(SipKey))) {
    return InvalidArgument("the bootstrap record of an endpoint is damaged");
  }
  for (uint32_t rank = 0; rank < blob.num_ranks; ++rank) {
    if ((bits[rank / 8] >> (rank % 8) & 1) != 0) blob.peers.push_back(rank);
  }
  if (!key.empty()) std::memcpy(blob.secret_key.emplace().data(), key.data(), key.size());
  return blob;
}

}  // namespace jax_ep
