// loopback, the reference implementation of Transport. It also is the manual for writing another:
// each method's comment says what a network transport has to do in its place.
//
// How it works (with CopyingTransport): PostWrite copies the bytes at once and puts the immediate
// into the target's inbox; the target's Poll takes it out. The copy is finished before the
// immediate is published, so an arrival implies visibility, and kSent implies delivery.
#include "proxy/transport/loopback.h"

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proxy/base/blob.h"
#include "proxy/transport/copying.h"
#include "proxy/transport/inbox.h"
#include "proxy/transport/numbered.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x314b4f4f4c504541;
constexpr uint64_t kKeyMagic = 0x3159454b4c504541;

// What senders reach of an endpoint. Shared ownership: a sender may outlive the endpoint.
struct Target {
  std::vector<uint64_t> storage;  // of the inbox, with room to align it
  Inbox inbox;
  Doorbell* bell = nullptr;
  std::vector<std::span<std::byte>> regions;  // complete before any key leaves the endpoint
};

// The endpoints of this process: stands for the network.
using Network = Numbered<Target>;

std::shared_ptr<Target> MakeTarget(uint32_t num_slots, Doorbell* bell) {
  auto target = std::make_shared<Target>();
  constexpr size_t kAlignment = alignof(InboxHeader);
  target->storage.resize((InboxBytes(num_slots) + kAlignment) / sizeof(uint64_t));
  void* start = target->storage.data();
  size_t space = target->storage.size() * sizeof(uint64_t);
  start = std::align(kAlignment, InboxBytes(num_slots), start, space);
  target->inbox = Inbox::Create({static_cast<std::byte*>(start), space}, num_slots);
  target->bell = bell;
  return target;
}

class LoopbackTransport : public CopyingTransport {
 public:
  explicit LoopbackTransport(const TransportOptions& options)
      : LoopbackTransport(MakeTarget(
            options.inbox_slots == 0 ? kDefaultInboxSlots : options.inbox_slots, options.bell)) {}

  ~LoopbackTransport() override {
    CloseInbox();
    Network::Get().Remove(id_);
  }

  // A network transport: device address, port, queue pair numbers, and a token of the group.
  std::string LocalAddress() const override {
    return BlobWriter().U64(kAddressMagic).U64(static_cast<uint64_t>(getpid())).U64(id_).Take();
  }

  // A network transport compares settings here, and asks the peer when it is first written to.
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
    targets_.push_back(std::move(target));
    return AddPeer(targets_.back()->inbox, targets_.back()->bell);
  }

  // A network transport pins the memory and gets the device's keys.
  Result<LocalRegion> Register(const MemoryRegion& region) override {
    JAX_EP_RETURN_IF_ERROR(CheckRegion(region));
    target_->regions.push_back(region.bytes);
    const uint32_t handle = AddLocal(region.bytes);
    return LocalRegion{.handle = handle,
                       .key = BlobWriter().U64(kKeyMagic).U64(id_).U64(handle).Take()};
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    JAX_EP_RETURN_IF_ERROR(CheckPeer(peer));
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const uint64_t id = reader.U64();
    const uint64_t handle = reader.U64();
    const Target& owner = *targets_[peer];
    if (!reader.finished() || magic != kKeyMagic || Network::Get().Find(id).get() != &owner ||
        handle >= owner.regions.size()) {
      return InvalidArgument("loopback: not a region key of this peer");
    }
    return AddRemote(peer, owner.regions[handle]);
  }

 private:
  explicit LoopbackTransport(std::shared_ptr<Target> target)
      : CopyingTransport("loopback", target->inbox), target_(std::move(target)) {
    id_ = Network::Get().Add(target_);
  }

  std::shared_ptr<Target> target_;
  uint64_t id_ = 0;
  std::vector<std::shared_ptr<Target>> targets_;  // by peer
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeLoopbackTransport(const TransportOptions& options) {
  return std::unique_ptr<Transport>(std::make_unique<LoopbackTransport>(options));
}

}  // namespace jax_ep
