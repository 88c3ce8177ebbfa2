// shm: like loopback (which explains each method), but the inbox, the bell and the peer's heap are
// SharedMemory, so that peers may be other processes of this host. A killed peer leaves the inbox
// usable and every mapping valid; that it is dead is for the proxy's heartbeats to find out.
#include "proxy/transport/shm.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "proxy/abi/command.h"
#include "proxy/base/blob.h"
#include "proxy/base/shared_memory.h"
#include "proxy/transport/inbox.h"
#include "proxy/transport/sent_queue.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x314d48534c504541;
constexpr uint64_t kKeyMagic = 0x3259454b4c504541;
constexpr uint64_t kMaxMessageBytes = kMaxCommandBytes;
constexpr uint32_t kDefaultInboxSlots = 8192;

bool Contains(std::span<std::byte> region, uint64_t offset, uint64_t length_bytes) {
  return length_bytes <= region.size() && offset <= region.size() - length_bytes;
}

Status Outside(const char* side, uint64_t offset, uint64_t length, uint64_t num_bytes) {
  return InvalidArgument(std::string("shm: ") + side + " bytes [" + std::to_string(offset) + ", +" +
                         std::to_string(length) + ") are outside the region of " +
                         std::to_string(num_bytes) + " bytes");
}

Status BadHandle(const char* what, uint64_t handle, size_t count) {
  return InvalidArgument(std::string("shm: ") + what + " " + std::to_string(handle) +
                         "; there are " + std::to_string(count));
}

class ShmTransport : public Transport {
 public:
  ShmTransport(const TransportOptions& options, SharedMemory memory, Inbox inbox)
      : bell_export_(options.bell_export), memory_(std::move(memory)), inbox_(inbox) {}

  ~ShmTransport() override { inbox_.Close(); }

  const TransportCaps& Caps() const override { return caps_; }

  std::string LocalAddress() const override {
    return BlobWriter().U64(kAddressMagic).Text(memory_.Export()).Text(bell_export_).Take();
  }

  Result<uint32_t> Connect(std::string_view address, Deadline /*deadline*/) override {
    BlobReader reader(address);
    const uint64_t magic = reader.U64();
    const std::string_view inbox_export = reader.Text();
    const std::string_view bell_export = reader.Text();
    if (!reader.finished() || magic != kAddressMagic) {
      return InvalidArgument("shm: not a shm address (" + std::to_string(address.size()) +
                             " bytes)");
    }
    Peer peer;
    JAX_EP_ASSIGN_OR_RETURN(peer.inbox_memory, SharedMemory::Import(inbox_export));
    const std::optional<Inbox> inbox = Inbox::Open(peer.inbox_memory.bytes());
    if (!inbox) return InvalidArgument("shm: the peer's inbox has an impossible size");
    peer.inbox = *inbox;
    if (!bell_export.empty()) {
      JAX_EP_ASSIGN_OR_RETURN(peer.bell_memory, SharedMemory::Import(bell_export));
      if (peer.bell_memory.bytes().size() < sizeof(Doorbell)) {
        return InvalidArgument("shm: the peer's bell has an impossible size");
      }
      peer.bell = reinterpret_cast<Doorbell*>(peer.bell_memory.bytes().data());
    }
    peers_.push_back(std::move(peer));
    return static_cast<uint32_t>(peers_.size() - 1);
  }

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    if (region.device >= 0) return Unimplemented("shm: device memory is not supported");
    if (region.bytes.empty()) return InvalidArgument("shm: an empty region");
    if (region.export_blob.empty()) {
      return InvalidArgument(
          "shm: the region is not shareable; create it with "
          "SharedMemory::Create(..., shareable=true) and pass its Export()");
    }
    regions_.push_back(region.bytes);
    return LocalRegion{.handle = static_cast<uint32_t>(regions_.size() - 1),
                       .key = BlobWriter().U64(kKeyMagic).Text(region.export_blob).Take()};
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    if (peer >= peers_.size()) return BadHandle("peer", peer, peers_.size());
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const std::string_view export_blob = reader.Text();
    if (!reader.finished() || magic != kKeyMagic) {
      return InvalidArgument("shm: not a region key of shm");
    }
    JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Import(export_blob));
    peers_[peer].regions.push_back(std::move(memory));
    return static_cast<uint32_t>(peers_[peer].regions.size() - 1);
  }

  Status PostWrite(const WriteRequest& request) override {
    if (request.peer >= peers_.size()) return BadHandle("peer", request.peer, peers_.size());
    Peer& peer = peers_[request.peer];
    if (peer.inbox.closed()) return Unavailable("shm: the peer has closed its endpoint");
    if (sent_.full() || (request.has_immediate && !peer.inbox.HasRoom())) return Full();
    if (request.length_bytes > 0) {
      if (request.length_bytes > kMaxMessageBytes) {
        return InvalidArgument("shm: a write of " + std::to_string(request.length_bytes) +
                               " bytes; at most " + std::to_string(kMaxMessageBytes) +
                               " go at once");
      }
      if (request.local_region >= regions_.size()) {
        return BadHandle("local region", request.local_region, regions_.size());
      }
      if (request.remote_region >= peer.regions.size()) {
        return BadHandle("remote region", request.remote_region, peer.regions.size());
      }
      const std::span<std::byte> from = regions_[request.local_region];
      const std::span<std::byte> to = peer.regions[request.remote_region].bytes();
      if (!Contains(from, request.local_offset, request.length_bytes)) {
        return Outside("local", request.local_offset, request.length_bytes, from.size());
      }
      if (!Contains(to, request.remote_offset, request.length_bytes)) {
        return Outside("remote", request.remote_offset, request.length_bytes, to.size());
      }
      std::memcpy(to.data() + request.remote_offset, from.data() + request.local_offset,
                  request.length_bytes);
    }
    if (request.has_immediate) {
      if (!peer.inbox.TryPush(request.immediate)) return Full();
      if (peer.bell != nullptr) peer.bell->Ring();
    }
    sent_.Push(request.token);
    return Status::Ok();
  }

  Result<bool> Flush(uint64_t /*token*/) override { return true; }

  Result<size_t> Poll(std::span<TransportEvent> events) override {
    size_t count = sent_.PopInto(events);
    for (; count < events.size(); ++count) {
      const std::optional<uint32_t> immediate = inbox_.TryPop();
      if (!immediate) break;
      events[count] =
          TransportEvent{.kind = TransportEvent::Kind::kArrived, .immediate = *immediate};
    }
    return count;
  }

 private:
  struct Peer {
    SharedMemory inbox_memory;
    SharedMemory bell_memory;
    Inbox inbox;
    Doorbell* bell = nullptr;
    std::vector<SharedMemory> regions;
  };

  static Status Full() { return ResourceExhausted("queue full"); }

  const TransportCaps caps_{.ordered = true,
                            .arrival_implies_visible = true,
                            .delivery_complete = true,
                            .needs_registration = true,
                            .max_message_bytes = kMaxMessageBytes,
                            .immediate_bits = 32};
  std::string bell_export_;
  SharedMemory memory_;  // of inbox_
  Inbox inbox_;
  std::vector<std::span<std::byte>> regions_;
  std::vector<Peer> peers_;
  SentQueue sent_;
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeShmTransport(const TransportOptions& options) {
  const uint32_t num_slots = options.inbox_slots == 0 ? kDefaultInboxSlots : options.inbox_slots;
  JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory,
                          SharedMemory::Create(InboxBytes(num_slots), /*shareable=*/true));
  const Inbox inbox = Inbox::Create(memory.bytes(), num_slots);
  return std::unique_ptr<Transport>(
      std::make_unique<ShmTransport>(options, std::move(memory), inbox));
}

}  // namespace jax_ep
