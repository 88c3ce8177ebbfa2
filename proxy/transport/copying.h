// CopyingTransport: what loopback and shm share. Peers' memory is mapped here, so a write is a copy
// and an immediate is an entry in the peer's inbox. Part of the manual for writing a transport
// (loopback.cc): the comments say what a network transport has to do in place of each method.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "proxy/abi/command.h"
#include "proxy/base/doorbell.h"
#include "proxy/transport.h"
#include "proxy/transport/inbox.h"
#include "proxy/transport/sent_queue.h"
#include "proxy/transport/write_bounds.h"

namespace jax_ep {

class CopyingTransport : public Transport {
 public:
  // A network transport fills this from what the device says, not from its documentation.
  const TransportCaps& Caps() const final { return caps_; }

  // A network transport posts to its send queue and maps "queue full" to kResourceExhausted. The
  // checks are the same everywhere: see WriteBounds.
  Status PostWrite(const WriteRequest& request) final {
    JAX_EP_RETURN_IF_ERROR(bounds_.Check(request));
    Peer& peer = peers_[request.peer];
    if (peer.inbox.closed()) return Unavailable(name_ + ": the peer has closed its endpoint");
    if (sent_.full() || (request.has_immediate && !peer.inbox.HasRoom())) return Full();
    if (request.length_bytes > 0) {
      std::memcpy(peer.regions[request.remote_region].data() + request.remote_offset,
                  regions_[request.local_region].data() + request.local_offset,
                  request.length_bytes);
    }
    // The inbox's release after the copy is what makes "arrival implies visible" true. If it filled
    // up meanwhile the caller tries again and the same bytes are copied again, which is harmless.
    if (request.has_immediate) {
      if (!peer.inbox.TryPush(request.immediate)) return Full();
      if (peer.bell != nullptr) peer.bell->Ring();
    }
    sent_.Push(request.token);
    return Status::Ok();
  }

  // A network transport: a read that flushes the NIC's writes, or the platform's flush call.
  Result<bool> Flush(uint64_t /*token*/) final { return true; }

  // A network transport polls its completion queues, reposts receives, and turns every error
  // completion into a Status with peer and meaning.
  Result<size_t> Poll(std::span<TransportEvent> events) final {
    size_t count = sent_.PopInto(events);
    for (; count < events.size(); ++count) {
      const std::optional<uint32_t> immediate = inbox_.TryPop();
      if (!immediate) break;
      events[count] =
          TransportEvent{.kind = TransportEvent::Kind::kArrived, .immediate = *immediate};
    }
    return count;
  }

  void AppendState(std::string* text) const final {
    *text += "    " + name_ + ": inbox of " + std::to_string(inbox_.num_slots()) + " slots\n";
  }

 protected:
  // `name` begins every error. The memory of `inbox` outlives this object.
  CopyingTransport(std::string name, Inbox inbox)
      : name_(std::move(name)), bounds_(name_, kMaxCommandBytes), inbox_(inbox) {}

  // After this, senders see `closed` instead of copying into memory that may be unmapped. (A copy
  // under way is excluded by the rule that peers stop writing before memory goes.)
  void CloseInbox() { inbox_.Close(); }

  // The memory of `inbox` and `bell` (may be null) outlives this object.
  uint32_t AddPeer(Inbox inbox, Doorbell* bell) {
    peers_.push_back(Peer{.inbox = inbox, .bell = bell, .regions = {}});
    return bounds_.AddPeer();
  }
  Status CheckPeer(uint32_t peer) const { return bounds_.CheckPeer(peer); }

  uint32_t AddLocal(std::span<std::byte> region) {
    regions_.push_back(region);
    return bounds_.AddLocal(region.size());
  }
  uint32_t AddRemote(uint32_t peer, std::span<std::byte> region) {
    peers_[peer].regions.push_back(region);
    return bounds_.AddRemote(peer, region.size());
  }

  // What both refuse to register.
  Status CheckRegion(const MemoryRegion& region) const {
    if (region.device >= 0) return Unimplemented(name_ + ": device memory is not supported");
    if (region.bytes.empty()) return InvalidArgument(name_ + ": an empty region");
    return Status::Ok();
  }

 private:
  struct Peer {
    Inbox inbox;
    Doorbell* bell = nullptr;
    std::vector<std::span<std::byte>> regions;
  };

  // Short enough for the small-string buffer: this is the hot path's only error.
  static Status Full() { return ResourceExhausted("queue full"); }

  // A copy of the longest command at most: longer ones would keep the proxy from polling too long.
  const TransportCaps caps_{.arrival_implies_visible = true,
                            .delivery_complete = true,
                            .cheap_wake = true,
                            .max_message_bytes = kMaxCommandBytes,
                            // While a proxy copies it acknowledges nothing.
                            .window_bytes = uint64_t{64} << 20,
                            .immediate_bits = 32};
  const std::string name_;
  WriteBounds bounds_;
  Inbox inbox_;
  std::vector<std::span<std::byte>> regions_;
  std::vector<Peer> peers_;
  SentQueue sent_;
};

}  // namespace jax_ep
