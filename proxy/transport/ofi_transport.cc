// The ofi transport. Each rank has one endpoint per rail; every write takes the next rail, so a
// flow may arrive in any order, which the protocol allows. See loopback.cc for what each method
// owes.
#include "proxy/transport/ofi_transport.h"

#include <errno.h>
#include <rdma/fi_errno.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <utility>

#include "proxy/abi/command.h"
#include "proxy/base/blob.h"
#include "proxy/base/log.h"
#include "proxy/transport/waker.h"
#include "proxy/transport/write_bounds.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x3149464f4c504541;
constexpr uint64_t kKeyMagic = 0x3259454b49464f4a;
constexpr size_t kBatchEntries = 16;
constexpr int kSecretShift = 32;  // the protocol's immediate below it

// Errors that say "the peer, or the way to it, is gone" and not "we did something wrong".
bool IsPeerGone(int error) {
  switch (std::abs(error)) {
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case ENOTCONN:
    case ESHUTDOWN:
    case EPIPE:
    case ECANCELED:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EHOSTDOWN:
    case EIO:  // verbs: the peer's queue pair is gone
      return true;
    default:
      return false;
  }
}

class OfiTransport : public Transport {
 public:
  OfiTransport(const OfiLibrary& library, const TransportOptions& options,
               std::vector<std::unique_ptr<OfiRail>> rails)
      : library_(library),
        rank_(options.rank),
        team_(options.team),
        provider_(rails.front()->info().fabric_attr->prov_name),
        caps_(MakeCaps(rails)),
        bounds_("ofi", caps_.max_message_bytes),
        rails_(std::move(rails)) {}

  // What wakes the sleeper that options.bell has, if any.
  Status Start(const TransportOptions& options) {
    if (options.bell == nullptr) return Status::Ok();
    std::vector<int> fds;
    for (const auto& rail : rails_) {
      if (rail->wait_fd() >= 0) fds.push_back(rail->wait_fd());
    }
    if (fds.size() < rails_.size()) fds.clear();
    JAX_EP_ASSIGN_OR_RETURN(waker_, Waker::Create(options.bell, std::move(fds)));
    return Status::Ok();
  }

  const TransportCaps& Caps() const override { return caps_; }

  std::string LocalAddress() const override {
    BlobWriter writer;
    writer.U64(kAddressMagic).U64(rank_).Text(provider_).U64(rails_.size());
    for (const auto& rail : rails_) {
      const OfiRemote& signal = rail->signal().remote;
      writer.Text(rail->address()).U64(signal.base).U64(signal.key);
    }
    return writer.Take();
  }

  // Connections are made by the provider at the first message; nothing is waited for here.
  Result<uint32_t> Connect(std::string_view address, Deadline /*deadline*/) override {
    BlobReader reader(address);
    const uint64_t magic = reader.U64();
    Peer peer;
    peer.rank = reader.U64();
    const std::string_view provider = reader.Text();
    const uint64_t num_rails = reader.U64();
    if (!reader.ok() || magic != kAddressMagic || num_rails > kMaxRails) {
      return InvalidArgument("ofi: not an ofi address (" + std::to_string(address.size()) +
                             " bytes)");
    }
    if (provider != provider_ || num_rails != rails_.size()) {
      return InvalidArgument("ofi: " + NameOf(peer) + " has " + std::to_string(num_rails) +
                             " rails of provider " + std::string(provider) + ", this rank " +
                             std::to_string(rails_.size()) + " of " + provider_ +
                             "; on hosts that differ, set JAX_EP_OFI_PROVIDER alike, and "
                             "JAX_EP_OFI_DOMAIN or JAX_EP_SOCKET_IFNAME to equally many names "
                             "everywhere");
    }
    std::vector<std::string_view> names;
    for (size_t i = 0; i < rails_.size(); ++i) {
      names.push_back(reader.Text());
      const uint64_t base = reader.U64();
      const uint64_t key = reader.U64();
      peer.signal.push_back({.base = base, .key = key});
    }
    if (!reader.finished()) {
      return InvalidArgument("ofi: the address of " + NameOf(peer) + " is damaged");
    }
    for (size_t i = 0; i < rails_.size(); ++i) {
      JAX_EP_ASSIGN_OR_RETURN(const fi_addr_t handle, rails_[i]->AddPeer(names[i]));
      peer.addresses.push_back(handle);
    }
    peers_.push_back(std::move(peer));
    return bounds_.AddPeer();
  }

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    if (region.bytes.empty()) return InvalidArgument("ofi: an empty region");
    BlobWriter key;
    key.U64(kKeyMagic).U64(region.bytes.size()).U64(rails_.size());
    std::vector<OfiLocal> locals;
    for (const auto& rail : rails_) {
      JAX_EP_ASSIGN_OR_RETURN(const OfiLocal local, rail->Register(region.bytes, region.device));
      key.U64(local.remote.base).U64(local.remote.key);
      locals.push_back(local);
    }
    regions_.push_back(std::move(locals));
    return LocalRegion{.handle = bounds_.AddLocal(region.bytes.size()), .key = key.Take()};
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    JAX_EP_RETURN_IF_ERROR(bounds_.CheckPeer(peer));
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const uint64_t num_bytes = reader.U64();
    const uint64_t num_rails = reader.U64();
    if (!reader.ok() || magic != kKeyMagic || num_rails != rails_.size()) {
      return InvalidArgument("ofi: not a region key of ofi");
    }
    std::vector<OfiRemote> remotes;
    for (size_t i = 0; i < rails_.size(); ++i) {
      const uint64_t base = reader.U64();
      remotes.push_back({.base = base, .key = reader.U64()});
    }
    if (!reader.finished()) return InvalidArgument("ofi: a damaged region key");
    peers_[peer].regions.push_back(std::move(remotes));
    return bounds_.AddRemote(peer, num_bytes);
  }

  Status PostWrite(const WriteRequest& request) override {
    JAX_EP_RETURN_IF_ERROR(bounds_.Check(request));
    Peer& peer = peers_[request.peer];
    if (peer.is_gone) return Unavailable("ofi: " + peer.why_gone);
    const size_t index = next_rail_;
    next_rail_ = index + 1 == rails_.size() ? 0 : index + 1;
    OfiRail::Write write{.to = peer.addresses[index],
                         .peer = request.peer,
                         .local = &rails_[index]->signal(),
                         .remote = peer.signal[index],
                         .has_immediate = request.has_immediate,
                         .immediate = uint64_t{request.secret} << kSecretShift | request.immediate,
                         .token = request.token};
    if (request.length_bytes > 0) {
      write.local = &regions_[request.local_region][index];
      write.local_offset = request.local_offset;
      write.remote = peer.regions[request.remote_region][index];
      write.remote_offset = request.remote_offset;
      write.length_bytes = request.length_bytes;
    }
    const ssize_t rc = rails_[index]->Post(write);
    if (rc == -FI_EAGAIN) return Full();
    if (rc != 0) {
      const std::string what = library_.Describe("posting a write", rc);
      if (!IsPeerGone(static_cast<int>(rc))) {
        return Internal("ofi: to " + NameOf(peer) + ": " + what);
      }
      MarkGone(peer, what);
      return Unavailable("ofi: " + peer.why_gone);
    }
    return Status::Ok();
  }

  // An arrival is reported when its bytes are in host memory. GPU memory would need a read back;
  // this version's heaps are host memory, as Caps says.
  Result<bool> Flush(uint64_t /*token*/) override { return true; }

  Result<size_t> Poll(std::span<TransportEvent> events) override {
    size_t count = 0;
    for (size_t i = 0; i < rails_.size() && count < events.size(); ++i) {
      OfiRail& rail = *rails_[first_polled_rail_];
      first_polled_rail_ = first_polled_rail_ + 1 == rails_.size() ? 0 : first_polled_rail_ + 1;
      JAX_EP_RETURN_IF_ERROR(PollRail(rail, events, &count));
      JAX_EP_RETURN_IF_ERROR(rail.RepostReceives());
    }
    return count;
  }

  bool PrepareToSleep() override {
    if (waker_ == nullptr || waker_->is_armed()) return true;
    const bool may_wait = std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) {
      return rail->wait_fd() < 0 || rail->MayWait();
    });
    if (may_wait) waker_->Arm();
    return may_wait;
  }

  void AppendState(std::string* text) const override {
    *text += "    ofi: provider " + provider_;
    for (const auto& rail : rails_) {
      *text += "; rail " + std::string(rail->info().domain_attr->name) + ": " +
               std::to_string(rail->num_messages()) + " messages, " +
               std::to_string(rail->num_bytes()) + " bytes posted";
    }
    *text += "; errors of no write of ours " +
             std::to_string(num_foreign_errors_.load(std::memory_order_relaxed)) + "\n";
  }

 private:
  struct Peer {
    uint64_t rank = 0;
    std::vector<fi_addr_t> addresses;             // by rail
    std::vector<OfiRemote> signal;                // by rail; target of empty writes
    std::vector<std::vector<OfiRemote>> regions;  // by handle and rail
    bool is_gone = false;
    std::string why_gone;
  };

  static TransportCaps MakeCaps(const std::vector<std::unique_ptr<OfiRail>>& rails) {
    TransportCaps caps{.arrival_implies_visible = true,
                       .delivery_complete = true,
                       .max_message_bytes = kMaxCommandBytes,
                       .immediate_bits = 64};
    for (const auto& rail : rails) {
      const fi_info& info = rail->info();
      caps.delivery_complete =
          caps.delivery_complete && (info.tx_attr->op_flags & FI_DELIVERY_COMPLETE) != 0;
      caps.max_message_bytes =
          std::min<uint64_t>(caps.max_message_bytes, info.ep_attr->max_msg_size);
      caps.immediate_bits = std::min(caps.immediate_bits, rail->immediate_bits());
    }
    return caps;
  }

  // Short enough for the small-string buffer: this is the hot path's only error.
  static Status Full() { return ResourceExhausted("queue full"); }

  std::string NameOf(const Peer& peer) const { return RankName(team_, peer.rank); }

  void MarkGone(Peer& peer, const std::string& why) {
    if (peer.is_gone) return;
    peer.is_gone = true;
    peer.why_gone = NameOf(peer) + " cannot be reached: " + why;
    LogDebug("ofi: " + peer.why_gone);
  }

  Status PollRail(OfiRail& rail, std::span<TransportEvent> events, size_t* count) {
    std::array<fi_cq_data_entry, kBatchEntries> entries;
    while (*count < events.size()) {
      const size_t room = std::min(events.size() - *count, entries.size());
      const ssize_t num_read = rail.ReadCompletions(std::span(entries).first(room));
      if (num_read == -FI_EAGAIN) return Status::Ok();
      if (num_read == -FI_EAVAIL) {
        JAX_EP_RETURN_IF_ERROR(TakeError(rail, events, count));
        continue;
      }
      if (num_read < 0) return Internal("ofi: " + library_.Describe("fi_cq_read", num_read));
      for (ssize_t i = 0; i < num_read; ++i) {
        const fi_cq_data_entry& entry = entries[static_cast<size_t>(i)];
        auto* const operation = static_cast<OfiOperation*>(entry.op_context);
        // Not by FI_RMA: some providers do not set it.
        if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
          events[(*count)++] = {.kind = TransportEvent::Kind::kArrived,
                                .immediate = static_cast<uint32_t>(entry.data),
                                .secret = static_cast<uint32_t>(entry.data >> kSecretShift)};
          if (operation != nullptr) rail.Finish(operation);
        } else if (operation != nullptr) {
          if (!operation->is_receive) {
            events[(*count)++] = {.kind = TransportEvent::Kind::kSent, .token = operation->token};
          }
          rail.Finish(operation);
        }
      }
    }
    return Status::Ok();
  }

  // A write to a peer that is gone ends like any other: its bytes are free. That the peer is gone
  // is told by the next PostWrite to it, or by its silence.
  Status TakeError(OfiRail& rail, std::span<TransportEvent> events, size_t* count) {
    fi_cq_err_entry error;
    const ssize_t rc = rail.ReadError(&error);
    if (rc == -FI_EAGAIN) return Status::Ok();
    if (rc < 0) return Internal("ofi: " + library_.Describe("fi_cq_readerr", rc));
    auto* const operation = static_cast<OfiOperation*>(error.op_context);
    const std::string what = rail.DescribeError(error);
    if (operation == nullptr || operation->is_receive) {
      // What a stranger sent, with a wrong key or too long, or a connection that broke. It must not
      // end the group; the receive is posted again.
      num_foreign_errors_.store(num_foreign_errors_.load(std::memory_order_relaxed) + 1,
                                std::memory_order_relaxed);
      LogDebug("ofi: " + what);
      if (operation != nullptr) rail.Finish(operation);
      return Status::Ok();
    }
    Peer& peer = peers_[operation->peer];
    if (!IsPeerGone(error.err)) {
      return Internal("ofi: writing to " + NameOf(peer) + ": " + what);
    }
    MarkGone(peer, what);
    events[(*count)++] = {.kind = TransportEvent::Kind::kSent, .token = operation->token};
    rail.Finish(operation);
    return Status::Ok();
  }

  const OfiLibrary& library_;
  const uint32_t rank_;
  const TeamId team_;
  const std::string provider_;
  const TransportCaps caps_;
  WriteBounds bounds_;
  const std::vector<std::unique_ptr<OfiRail>> rails_;
  std::vector<std::vector<OfiLocal>> regions_;  // by handle and rail
  std::vector<Peer> peers_;
  size_t next_rail_ = 0;
  size_t first_polled_rail_ = 0;
  std::atomic<uint64_t> num_foreign_errors_{0};  // in TakeError
  std::unique_ptr<Waker> waker_;                 // last: its thread uses the rails' descriptors
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeOfiTransport(const OfiLibrary& library,
                                                    const TransportOptions& options,
                                                    std::vector<std::unique_ptr<OfiRail>> rails) {
  auto transport = std::make_unique<OfiTransport>(library, options, std::move(rails));
  JAX_EP_RETURN_IF_ERROR(transport->Start(options));
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace jax_ep
