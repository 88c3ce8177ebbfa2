// What two verbs endpoints tell each other over the side channel: the sender's queue pairs, then
// the receiver's. Pure encoding; a damaged message is refused whatever its bytes are.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/base/blob.h"
#include "proxy/base/status.h"
#include "proxy/transport/choose_nics.h"
#include "proxy/transport/verbs_rail.h"

namespace jax_ep {

inline constexpr uint64_t kMaxVerbsQps = 16;

struct VerbsHandshake {
  uint64_t rank = 0;
  // [rail][queue pair]
  std::vector<std::vector<VerbsAddress>> addresses = {};

  std::string Encode() const {
    BlobWriter writer;
    writer.U64(rank).U64(addresses.size());
    for (const auto& rail : addresses) {
      writer.U64(rail.size());
      for (const VerbsAddress& address : rail) {
        writer.U64(address.qp_number).U64(address.sequence).U64(address.lid).U64(address.mtu);
        writer.Text({reinterpret_cast<const char*>(address.gid.raw), sizeof(address.gid.raw)});
      }
    }
    return writer.Take();
  }

  // \error kInvalidArgument
  static Result<VerbsHandshake> Decode(std::string_view text) {
    BlobReader reader(text);
    VerbsHandshake handshake;
    handshake.rank = reader.U64();
    const uint64_t num_rails = reader.U64();
    if (!reader.ok() || num_rails > kMaxRails) return Damaged();
    for (uint64_t i = 0; i < num_rails; ++i) {
      const uint64_t num_qps = reader.U64();
      if (!reader.ok() || num_qps > kMaxVerbsQps) return Damaged();
      auto& rail = handshake.addresses.emplace_back();
      for (uint64_t j = 0; j < num_qps; ++j) {
        VerbsAddress& address = rail.emplace_back();
        address.qp_number = static_cast<uint32_t>(reader.U64());
        address.sequence = static_cast<uint32_t>(reader.U64());
        address.lid = static_cast<uint32_t>(reader.U64());
        address.mtu = static_cast<uint32_t>(reader.U64());
        const std::string_view gid = reader.Text();
        if (gid.size() != sizeof(address.gid.raw)) return Damaged();
        std::memcpy(address.gid.raw, gid.data(), gid.size());
      }
    }
    if (!reader.finished()) return Damaged();
    return handshake;
  }

 private:
  static Status Damaged() { return InvalidArgument("verbs: a damaged handshake"); }
};

}  // namespace jax_ep
