// The verbs transport. The first write to a peer makes queue pairs of our own for it and asks the
// peer's side channel for receiving ones; so each direction of a pair of ranks has its own. Writes
// take the queue pairs of a peer in turn. See loopback.cc for what each method owes.
#include "proxy/transport/verbs_transport.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "proxy/abi/command.h"
#include "proxy/base/blob.h"
#include "proxy/base/log.h"
#include "proxy/transport/interfaces.h"
#include "proxy/transport/side_channel.h"
#include "proxy/transport/verbs_connector.h"
#include "proxy/transport/waker.h"
#include "proxy/transport/write_bounds.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x3142524556504541;
constexpr uint64_t kKeyMagic = 0x3259454b42524556;
constexpr size_t kMaxWrites = 1024;  // under way, all peers
constexpr size_t kBatchCompletions = 16;

// Statuses that say "the peer, or the way to it, is gone" and not "we did something wrong".
bool IsPeerGone(ibv_wc_status status) {
  return status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_RNR_RETRY_EXC_ERR ||
         status == IBV_WC_WR_FLUSH_ERR || status == IBV_WC_REM_ABORT_ERR ||
         status == IBV_WC_RESP_TIMEOUT_ERR;
}

class VerbsTransport : public Transport {
 public:
  VerbsTransport(const TransportOptions& options, const Env& env,
                 std::vector<std::unique_ptr<VerbsRail>> rails)
      : rank_(options.rank),
        team_(options.team),
        num_qps_(env.verbs_qps),
        rails_(std::move(rails)),
        writes_(kMaxWrites) {
    for (uint32_t i = 0; i < kMaxWrites; ++i) free_writes_.push_back(i);
  }

  // Opens the side channel. What wakes the sleeper that options.bell has, if any.
  Status Start(const TransportOptions& options, const Env& env) {
    for (const auto& rail : rails_) {
      caps_.max_message_bytes =
          std::min<uint64_t>(caps_.max_message_bytes, rail->max_message_bytes());
    }
    bounds_ = WriteBounds("verbs", caps_.max_message_bytes);
    JAX_EP_ASSIGN_OR_RETURN(const std::vector<Interface> interfaces,
                            ChooseInterfaces(env.socket_ifname));
    connector_ = std::make_unique<VerbsConnector>(VerbsConnector::Options{
        .rank = rank_, .team = team_, .num_qps = num_qps_, .rails = rails_});
    JAX_EP_ASSIGN_OR_RETURN(
        side_, SideListener::Create(interfaces.front().address, [this](std::string_view question) {
          return connector_->Answer(question);
        }));
    if (options.bell == nullptr) return Status::Ok();
    std::vector<int> fds;
    for (const auto& rail : rails_) fds.push_back(rail->wait_fd());
    JAX_EP_ASSIGN_OR_RETURN(waker_, Waker::Create(options.bell, std::move(fds)));
    return Status::Ok();
  }

  const TransportCaps& Caps() const override { return caps_; }

  std::string LocalAddress() const override {
    return BlobWriter()
        .U64(kAddressMagic)
        .U64(rank_)
        .U64(rails_.size())
        .U64(num_qps_)
        .Text(side_->Blob())
        .Take();
  }

  Result<uint32_t> Connect(std::string_view address, Deadline /*deadline*/) override {
    BlobReader reader(address);
    const uint64_t magic = reader.U64();
    Peer peer;
    peer.rank = reader.U64();
    const uint64_t num_rails = reader.U64();
    const uint64_t num_qps = reader.U64();
    peer.side = reader.Text();
    if (!reader.finished() || magic != kAddressMagic || !CheckSideBlob(peer.side).ok()) {
      return InvalidArgument("verbs: not a verbs address (" + std::to_string(address.size()) +
                             " bytes)");
    }
    if (num_rails != rails_.size() || num_qps != num_qps_) {
      return InvalidArgument("verbs: " + NameOf(peer) + " has " + std::to_string(num_rails) +
                             " rails of " + std::to_string(num_qps) + " queue pairs, this one " +
                             std::to_string(rails_.size()) + " of " + std::to_string(num_qps_) +
                             "; on hosts that differ, set JAX_EP_VERBS_DEVICE to equally many "
                             "devices everywhere, and JAX_EP_VERBS_QPS alike");
    }
    peers_.push_back(std::move(peer));
    return bounds_.AddPeer();
  }

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    if (region.bytes.empty()) return InvalidArgument("verbs: an empty region");
    BlobWriter key;
    key.U64(kKeyMagic).U64(region.bytes.size());
    key.U64(reinterpret_cast<uint64_t>(region.bytes.data())).U64(rails_.size());
    Region local{.base = reinterpret_cast<uint64_t>(region.bytes.data()), .keys = {}};
    for (const auto& rail : rails_) {
      JAX_EP_ASSIGN_OR_RETURN(const ibv_mr* memory, rail->Register(region));
      local.keys.push_back(memory->lkey);
      key.U64(memory->rkey);
    }
    regions_.push_back(std::move(local));
    return LocalRegion{.handle = bounds_.AddLocal(region.bytes.size()), .key = key.Take()};
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    JAX_EP_RETURN_IF_ERROR(bounds_.CheckPeer(peer));
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const uint64_t num_bytes = reader.U64();
    Region region{.base = reader.U64(), .keys = {}};
    const uint64_t num_rails = reader.U64();
    if (!reader.ok() || magic != kKeyMagic || num_rails != rails_.size()) {
      return InvalidArgument("verbs: not a region key of verbs");
    }
    for (size_t i = 0; i < rails_.size(); ++i) {
      region.keys.push_back(static_cast<uint32_t>(reader.U64()));
    }
    if (!reader.finished()) return InvalidArgument("verbs: a damaged region key");
    peers_[peer].regions.push_back(std::move(region));
    return bounds_.AddRemote(peer, num_bytes);
  }

  Status PostWrite(const WriteRequest& request) override {
    JAX_EP_RETURN_IF_ERROR(bounds_.Check(request));
    Peer& peer = peers_[request.peer];
    if (!peer.failure.ok()) return peer.failure;
    if (peer.senders.empty()) JAX_EP_RETURN_IF_ERROR(Join(request.peer));
    if (free_writes_.empty()) return Full();
    const uint32_t turn = peer.next_sender;
    VerbsSender& sender = peer.senders[turn];
    const size_t rail = turn / num_qps_;
    if (!rails_[rail]->HasRoom(sender)) return Full();
    const uint32_t id = free_writes_.back();
    VerbsRail::Write write{.id = id,
                           .length_bytes = static_cast<uint32_t>(request.length_bytes),
                           .has_immediate = request.has_immediate,
                           .immediate = request.immediate};
    if (request.length_bytes > 0) {
      const Region& from = regions_[request.local_region];
      const Region& to = peer.regions[request.remote_region];
      write.local_address = from.base + request.local_offset;
      write.local_key = from.keys[rail];
      write.remote_address = to.base + request.remote_offset;
      write.remote_key = to.keys[rail];
    }
    const int rc = rails_[rail]->Post(&sender, write);
    if (rc == ENOMEM || rc == EAGAIN) return Full();
    if (rc != 0) {
      return Internal("verbs: to " + NameOf(peer) + ": ibv_post_send: " + strerror(rc) + " (" +
                      std::to_string(rc) + ")");
    }
    writes_[id] = {.token = request.token, .peer = request.peer, .sender = turn};
    free_writes_.pop_back();
    peer.next_sender = turn + 1 == peer.senders.size() ? 0 : turn + 1;
    return Status::Ok();
  }

  // An arrival is reported when its bytes are in host memory, which is where the heaps are.
  Result<bool> Flush(uint64_t /*token*/) override { return true; }

  Result<size_t> Poll(std::span<TransportEvent> events) override {
    size_t count = 0;
    for (size_t i = 0; i < rails_.size() && count < events.size(); ++i) {
      VerbsRail& rail = *rails_[first_polled_rail_];
      first_polled_rail_ = first_polled_rail_ + 1 == rails_.size() ? 0 : first_polled_rail_ + 1;
      JAX_EP_RETURN_IF_ERROR(PollRail(rail, events, &count));
    }
    return count;
  }

  bool PrepareToSleep() override {
    if (waker_ == nullptr || waker_->is_armed()) return true;
    if (!is_requested_) {
      // Events are asked for; what came before makes none, so the queues are looked at once more.
      for (const auto& rail : rails_) rail->Arm();
    } else {
      waker_->Arm();
    }
    is_requested_ = !is_requested_;
    return !is_requested_;
  }

  void AppendState(std::string* text) const override {
    *text += "    verbs: " + std::to_string(num_qps_) + " queue pairs per peer and rail, to " +
             std::to_string(connector_->num_connected()) + " peers";
    for (const auto& rail : rails_) {
      *text += "; rail " + rail->port().device + ": " + std::to_string(rail->num_messages()) +
               " messages, " + std::to_string(rail->num_bytes()) + " bytes posted";
    }
    *text += "\n";
  }

 private:
  struct Region {
    uint64_t base = 0;
    std::vector<uint32_t> keys;  // by rail
  };
  struct Peer {
    uint64_t rank = 0;
    std::string side = {};                 // its side channel
    VerbsConnector::Senders senders = {};  // empty until it has answered
    uint32_t next_sender = 0;
    std::vector<Region> regions = {};
    Status failure = {};  // of every later write
  };
  struct PostedWrite {
    uint64_t token = 0;
    uint32_t peer = 0;
    uint32_t sender = 0;
  };

  // OK once the peer's queue pairs are joined to ours.
  Status Join(uint32_t handle) {
    Peer& peer = peers_[handle];
    auto outcome = connector_->Connect(handle, peer.rank, peer.side);
    if (!outcome.has_value()) return Full();
    if (!outcome->ok()) {
      LogWarning(outcome->status().message());
      return peer.failure = outcome->status();
    }
    peer.senders = std::move(**outcome);
    return Status::Ok();
  }

  // Short enough for the small-string buffer: this is the hot path's only error.
  static Status Full() { return ResourceExhausted("queue full"); }

  std::string NameOf(const Peer& peer) const { return RankName(team_, peer.rank); }

  Status PollRail(VerbsRail& rail, std::span<TransportEvent> events, size_t* count) {
    std::array<ibv_wc, kBatchCompletions> completions;
    while (*count < events.size()) {
      const size_t room = std::min(events.size() - *count, completions.size());
      const int num_polled = rail.Poll(std::span(completions).first(room));
      if (num_polled < 0) return Internal("verbs: ibv_poll_cq failed");
      for (int i = 0; i < num_polled; ++i) {
        const ibv_wc& completion = completions[static_cast<size_t>(i)];
        if (completion.wr_id == kVerbsReceiveId) {
          if (completion.status != IBV_WC_SUCCESS) continue;  // of a queue pair that has ended
          events[(*count)++] = {.kind = TransportEvent::Kind::kArrived,
                                .immediate = ntohl(completion.imm_data)};
        } else {
          JAX_EP_RETURN_IF_ERROR(FinishWrite(rail, completion));
          events[(*count)++] = {.kind = TransportEvent::Kind::kSent,
                                .token = writes_[completion.wr_id].token};
        }
      }
      JAX_EP_RETURN_IF_ERROR(rail.RepostReceives());
      if (static_cast<size_t>(num_polled) < room) break;
    }
    return Status::Ok();
  }

  // A write to a peer that is gone ends like any other: its bytes are free. That the peer is gone
  // is told by the next PostWrite to it, or by its silence. Any other error is one of ours, or
  // worse.
  Status FinishWrite(const VerbsRail& rail, const ibv_wc& completion) {
    if (completion.wr_id >= writes_.size()) return Internal("verbs: an unknown completion");
    const PostedWrite& write = writes_[completion.wr_id];
    Peer& peer = peers_[write.peer];
    --peer.senders[write.sender].num_posted;
    free_writes_.push_back(static_cast<uint32_t>(completion.wr_id));
    if (completion.status == IBV_WC_SUCCESS) return Status::Ok();
    const std::string what = NameOf(peer) + ", queue pair " + std::to_string(completion.qp_num) +
                             " of " + rail.port().device + ": " +
                             rail.StatusText(completion.status) + " (status " +
                             std::to_string(static_cast<int>(completion.status)) + ", vendor's " +
                             std::to_string(completion.vendor_err) + ")";
    if (!IsPeerGone(completion.status)) return Internal("verbs: writing to " + what);
    if (peer.failure.ok()) {
      peer.failure = Unavailable("verbs: " + what);
      LogDebug(peer.failure.message());
    }
    return Status::Ok();
  }

  const uint32_t rank_;
  const TeamId team_;
  const uint32_t num_qps_;
  TransportCaps caps_{.arrival_implies_visible = true,
                      .delivery_complete = true,  // the peer's NIC has acknowledged it
                      .max_message_bytes = kMaxCommandBytes,
                      .immediate_bits = 32};
  WriteBounds bounds_{"verbs", kMaxCommandBytes};
  const std::vector<std::unique_ptr<VerbsRail>> rails_;
  std::vector<Region> regions_;
  std::vector<Peer> peers_;
  std::vector<PostedWrite> writes_;
  std::vector<uint32_t> free_writes_;
  size_t first_polled_rail_ = 0;
  bool is_requested_ = false;
  // Last: their threads use the rails, and the listener's the connector.
  std::unique_ptr<VerbsConnector> connector_;
  std::unique_ptr<SideListener> side_;
  std::unique_ptr<Waker> waker_;
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeVerbsTransport(
    const TransportOptions& options, const Env& env,
    std::vector<std::unique_ptr<VerbsRail>> rails) {
  auto transport = std::make_unique<VerbsTransport>(options, env, std::move(rails));
  JAX_EP_RETURN_IF_ERROR(transport->Start(options, env));
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace jax_ep
