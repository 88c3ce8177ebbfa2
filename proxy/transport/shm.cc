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
#include "proxy/transport/shared_inbox.h"

namespace jax_ep {
namespace {

constexpr uint64_t kKeyMagic = 0x3259454b4c504541;

class ShmTransport : public CopyingTransport {
 public:
  explicit ShmTransport(SharedInbox own)
      : CopyingTransport("shm", own.inbox()), own_(std::move(own)) {}

  ~ShmTransport() override { CloseInbox(); }

  std::string LocalAddress() const override { return own_.Address(); }

  Result<uint32_t> Connect(std::string_view address, Deadline /*deadline*/) override {
    Peer peer;
    JAX_EP_ASSIGN_OR_RETURN(peer.mapped, own_.Open(address));
    peers_.push_back(std::move(peer));
    return AddPeer(peers_.back().mapped.inbox, peers_.back().mapped.bell);
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
    peers_[peer].regions.push_back(std::move(memory));
    return AddRemote(peer, peers_[peer].regions.back().bytes());
  }

 private:
  struct Peer {
    SharedInbox::Mapped mapped;
    std::vector<SharedMemory> regions;
  };

  SharedInbox own_;
  std::vector<Peer> peers_;
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeShmTransport(const TransportOptions& options) {
  JAX_EP_ASSIGN_OR_RETURN(SharedInbox own, SharedInbox::Create("shm", options));
  return std::unique_ptr<Transport>(std::make_unique<ShmTransport>(std::move(own)));
}

}  // namespace jax_ep
