// loopback, the reference implementation of Transport. It also is the manual for writing another:
// each method's comment says what a network transport has to do in its place.
//
// How it works: PostWrite copies the bytes at once and puts the immediate into the target's inbox;
// the target's Poll takes it out. The copy is finished before the immediate is published, so an
// arrival implies visibility, and kSent implies delivery.
#include "proxy/transport/loopback.h"

#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "proxy/abi/command.h"
#include "proxy/base/blob.h"
#include "proxy/transport/inbox.h"
#include "proxy/transport/sent_queue.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x314b4f4f4c504541;
constexpr uint64_t kKeyMagic = 0x3159454b4c504541;
// A copy of the longest command; longer writes would keep the proxy from polling for too long.
constexpr uint64_t kMaxMessageBytes = kMaxCommandBytes;
constexpr uint32_t kDefaultInboxSlots = 8192;

struct RegionBounds {
  std::byte* base = nullptr;
  uint64_t num_bytes = 0;

  bool Contains(uint64_t offset, uint64_t length_bytes) const {
    return length_bytes <= num_bytes && offset <= num_bytes - length_bytes;
  }
};

// What senders reach of an endpoint. Shared ownership: a sender may outlive the endpoint.
struct Target {
  std::vector<uint64_t> storage;  // of the inbox, with room to align it
  Inbox inbox;
  Doorbell* bell = nullptr;
  std::vector<RegionBounds> regions;  // complete before any key leaves the endpoint
};

// The endpoints of this process by number: stands for the network. It is the one mutable global of
// this folder, because an address must mean something to an endpoint that shares nothing else.
class Network {
 public:
  static Network& Get() {
    static Network network;
    return network;
  }

  uint64_t Add(std::weak_ptr<Target> target) {
    std::lock_guard lock(mutex_);
    targets_[++last_id_] = std::move(target);
    return last_id_;
  }
  void Remove(uint64_t id) {
    std::lock_guard lock(mutex_);
    targets_.erase(id);
  }
  std::shared_ptr<Target> Find(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto it = targets_.find(id);
    return it == targets_.end() ? nullptr : it->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Target>> targets_;
  uint64_t last_id_ = 0;
};

class LoopbackTransport : public Transport {
 public:
  explicit LoopbackTransport(const TransportOptions& options)
      : target_(std::make_shared<Target>()) {
    const uint32_t num_slots = options.inbox_slots == 0 ? kDefaultInboxSlots : options.inbox_slots;
    constexpr size_t kAlignment = alignof(InboxHeader);
    target_->storage.resize((InboxBytes(num_slots) + kAlignment) / sizeof(uint64_t));
    void* start = target_->storage.data();
    size_t space = target_->storage.size() * sizeof(uint64_t);
    start = std::align(kAlignment, InboxBytes(num_slots), start, space);
    target_->inbox = Inbox::Create({static_cast<std::byte*>(start), space}, num_slots);
    target_->bell = options.bell;
    id_ = Network::Get().Add(target_);
  }

  ~LoopbackTransport() override {
    // After this no sender finds us; one that already holds the target sees `closed` instead of
    // copying into memory that may be unmapped. (A copy under way is excluded by the rule that
    // peers stop writing before memory goes.)
    target_->inbox.Close();
    Network::Get().Remove(id_);
  }

  // A network transport fills this from what the device says, not from its documentation.
  const TransportCaps& Caps() const override { return caps_; }

  // A network transport: device address, port, queue pair numbers, and a token of the group.
  std::string LocalAddress() const override {
    return BlobWriter().U64(kAddressMagic).U64(static_cast<uint64_t>(getpid())).U64(id_).Take();
  }

  // A network transport also waits here, within the deadline, until the peer answers.
  Result<uint32_t> Connect(std::string_view address, Deadline /*deadline*/) override {
    BlobReader reader(address);
    const uint64_t magic = reader.U64();
    const uint64_t pid = reader.U64();
    const uint64_t id = reader.U64();
    if (!reader.finished() || magic != kAddressMagic) {
      return InvalidArgument("loopback: not a loopback address (" + std::to_string(address.size()) +
                             " bytes)");
    }
    if (pid != static_cast<uint64_t>(getpid())) {
      return InvalidArgument("loopback: the peer is in process " + std::to_string(pid) +
                             ", this is process " + std::to_string(getpid()) +
                             "; use transport \"shm\" between processes of one host");
    }
    std::shared_ptr<Target> target = Network::Get().Find(id);
    if (target == nullptr) return Unavailable("loopback: the peer has closed its endpoint");
    peers_.push_back(Peer{.target = std::move(target), .regions = {}});
    return static_cast<uint32_t>(peers_.size() - 1);
  }

  // A network transport pins the memory and gets the device's keys.
  Result<LocalRegion> Register(const MemoryRegion& region) override {
    if (region.device >= 0) return Unimplemented("loopback: device memory is not supported");
    if (region.bytes.empty()) return InvalidArgument("loopback: an empty region");
    target_->regions.push_back({.base = region.bytes.data(), .num_bytes = region.bytes.size()});
    const uint32_t handle = static_cast<uint32_t>(target_->regions.size() - 1);
    return LocalRegion{.handle = handle,
                       .key = BlobWriter().U64(kKeyMagic).U64(id_).U64(handle).Take()};
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    if (peer >= peers_.size()) return BadHandle("peer", peer, peers_.size());
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const uint64_t id = reader.U64();
    const uint64_t handle = reader.U64();
    Peer& owner = peers_[peer];
    if (!reader.finished() || magic != kKeyMagic || Network::Get().Find(id) != owner.target ||
        handle >= owner.target->regions.size()) {
      return InvalidArgument("loopback: not a region key of this peer");
    }
    owner.regions.push_back(owner.target->regions[handle]);
    return static_cast<uint32_t>(owner.regions.size() - 1);
  }

  // A network transport posts to its send queue and maps "queue full" to kResourceExhausted. The
  // checks are the same everywhere: whatever the caller got wrong, nothing outside a region is
  // touched, on either side.
  Status PostWrite(const WriteRequest& request) override {
    if (request.peer >= peers_.size()) return BadHandle("peer", request.peer, peers_.size());
    Peer& peer = peers_[request.peer];
    if (peer.target->inbox.closed()) {
      return Unavailable("loopback: the peer has closed its endpoint");
    }
    if (sent_.full() || (request.has_immediate && !peer.target->inbox.HasRoom())) {
      return Full();
    }
    if (request.length_bytes > 0) {
      if (request.length_bytes > kMaxMessageBytes) return TooLong(request);
      if (request.local_region >= target_->regions.size()) {
        return BadHandle("local region", request.local_region, target_->regions.size());
      }
      if (request.remote_region >= peer.regions.size()) {
        return BadHandle("remote region", request.remote_region, peer.regions.size());
      }
      const RegionBounds& from = target_->regions[request.local_region];
      const RegionBounds& to = peer.regions[request.remote_region];
      if (!from.Contains(request.local_offset, request.length_bytes)) {
        return Outside("local", request.local_offset, request.length_bytes, from.num_bytes);
      }
      if (!to.Contains(request.remote_offset, request.length_bytes)) {
        return Outside("remote", request.remote_offset, request.length_bytes, to.num_bytes);
      }
      std::memcpy(to.base + request.remote_offset, from.base + request.local_offset,
                  request.length_bytes);
    }
    // The inbox's release after the copy is what makes "arrival implies visible" true. If it filled
    // up meanwhile the caller tries again and the same bytes are copied again, which is harmless.
    if (request.has_immediate) {
      if (!peer.target->inbox.TryPush(request.immediate)) return Full();
      if (peer.target->bell != nullptr) peer.target->bell->Ring();
    }
    sent_.Push(request.token);
    return Status::Ok();
  }

  // A network transport: a read that flushes the NIC's writes, or the platform's flush call.
  Result<bool> Flush(uint64_t /*token*/) override { return true; }

  // A network transport polls its completion queues, reposts receives, and turns every error
  // completion into a Status with peer and meaning.
  Result<size_t> Poll(std::span<TransportEvent> events) override {
    size_t count = sent_.PopInto(events);
    for (; count < events.size(); ++count) {
      const std::optional<uint32_t> immediate = target_->inbox.TryPop();
      if (!immediate) break;
      events[count] =
          TransportEvent{.kind = TransportEvent::Kind::kArrived, .immediate = *immediate};
    }
    return count;
  }

 private:
  struct Peer {
    std::shared_ptr<Target> target;
    std::vector<RegionBounds> regions;
  };

  // Short enough for the small-string buffer: this is the hot path's only error.
  static Status Full() { return ResourceExhausted("queue full"); }

  static Status BadHandle(const char* what, uint64_t handle, size_t count) {
    return InvalidArgument(std::string("loopback: ") + what + " " + std::to_string(handle) +
                           "; there are " + std::to_string(count));
  }

  static Status TooLong(const WriteRequest& request) {
    return InvalidArgument("loopback: a write of " + std::to_string(request.length_bytes) +
                           " bytes; at most " + std::to_string(kMaxMessageBytes) + " go at once");
  }

  static Status Outside(const char* side, uint64_t offset, uint64_t length, uint64_t num_bytes) {
    return InvalidArgument(std::string("loopback: ") + side + " bytes [" + std::to_string(offset) +
                           ", +" + std::to_string(length) + ") are outside the region of " +
                           std::to_string(num_bytes) + " bytes");
  }

  const TransportCaps caps_{.ordered = true,
                            .arrival_implies_visible = true,
                            .delivery_complete = true,
                            .needs_registration = true,
                            .max_message_bytes = kMaxMessageBytes,
                            .immediate_bits = 32};
  std::shared_ptr<Target> target_;
  uint64_t id_ = 0;
  std::vector<Peer> peers_;
  SentQueue sent_;
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeLoopbackTransport(const TransportOptions& options) {
  return std::unique_ptr<Transport>(std::make_unique<LoopbackTransport>(options));
}

}  // namespace jax_ep
