// shm: like loopback (which explains each method), but the inbox, the bell and the peer's heap are
// SharedMemory, so that peers may be other processes of this host. A killed peer leaves the inbox
// usable and every mapping valid; that it is dead is for the proxy's heartbeats to find out.
#include "proxy/transport/shm.h"

#include <string>
#include <utility>
#include <vector>

#include "proxy/base/blob.h"
#include "proxy/base/shared_memory.h"
#include "proxy/transport/copying.h"
#include "proxy/transport/inbox.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x314d48534c504541;
constexpr uint64_t kKeyMagic = 0x3259454b4c504541;

class ShmTransport : public CopyingTransport {
 public:
  static Result<std::unique_ptr<Transport>> Create(const TransportOptions& options) {
    const uint32_t num_slots = options.inbox_slots == 0 ? kDefaultInboxSlots : options.inbox_slots;
    JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory,
                            SharedMemory::Create(InboxBytes(num_slots), /*shareable=*/true));
    const Inbox inbox = Inbox::Create(memory.bytes(), num_slots);
    return std::unique_ptr<Transport>(
        new ShmTransport(options.bell_export, std::move(memory), inbox));
  }

  ~ShmTransport() override { CloseInbox(); }

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
    Mapped mapped;
    JAX_EP_ASSIGN_OR_RETURN(mapped.inbox, SharedMemory::Import(inbox_export));
    const std::optional<Inbox> inbox = Inbox::Open(mapped.inbox.bytes());
    if (!inbox) return InvalidArgument("shm: the peer's inbox has an impossible size");
    Doorbell* bell = nullptr;
    if (!bell_export.empty()) {
      JAX_EP_ASSIGN_OR_RETURN(mapped.bell, SharedMemory::Import(bell_export));
      if (mapped.bell.bytes().size() < sizeof(Doorbell)) {
        return InvalidArgument("shm: the peer's bell has an impossible size");
      }
      bell = reinterpret_cast<Doorbell*>(mapped.bell.bytes().data());
    }
    mapped_.push_back(std::move(mapped));
    return AddPeer(*inbox, bell);
  }

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    JAX_EP_RETURN_IF_ERROR(CheckRegion(region));
    if (region.export_blob.empty()) {
      return InvalidArgument(
          "shm: the region is not shareable; create it with "
          "SharedMemory::Create(..., shareable=true) and pass its Export()");
    }
    return LocalRegion{.handle = AddLocal(region.bytes),
                       .key = BlobWriter().U64(kKeyMagic).Text(region.export_blob).Take()};
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    JAX_EP_RETURN_IF_ERROR(CheckPeer(peer));
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const std::string_view export_blob = reader.Text();
    if (!reader.finished() || magic != kKeyMagic) {
      return InvalidArgument("shm: not a region key of shm");
    }
    JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Import(export_blob));
    mapped_[peer].regions.push_back(std::move(memory));
    return AddRemote(peer, mapped_[peer].regions.back().bytes());
  }

 private:
  // Of one peer.
  struct Mapped {
    SharedMemory inbox;
    SharedMemory bell;
    std::vector<SharedMemory> regions;
  };

  ShmTransport(std::string bell_export, SharedMemory memory, Inbox inbox)
      : CopyingTransport("shm", inbox),
        bell_export_(std::move(bell_export)),
        memory_(std::move(memory)) {}

  const std::string bell_export_;
  SharedMemory memory_;         // of the inbox
  std::vector<Mapped> mapped_;  // by peer
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeShmTransport(const TransportOptions& options) {
  return ShmTransport::Create(options);
}

}  // namespace jax_ep
