// Set-up of an endpoint and the order of one round.
#include "proxy/endpoint.h"

#include <algorithm>
#include <utility>

#include "proxy/base/random.h"
#include "proxy/blame.h"
#include "proxy/peer_blob.h"

namespace jax_ep {
namespace {

constexpr uint32_t kNeededImmediateBits = 32;
constexpr uint32_t kSecretImmediateBits = 64;

Status CheckOptions(const EndpointOptions& options) {
  const auto bad = [&options](const std::string& what) {
    return InvalidArgument("proxy endpoint of " + RankName(options.team, options.rank) + ": " +
                           what);
  };
  if (options.num_ranks > kMaxRanks || options.rank >= options.num_ranks) {
    return bad("got num_ranks=" + std::to_string(options.num_ranks) +
               ", expected more than this rank and at most " + std::to_string(kMaxRanks));
  }
  constexpr uint32_t kMaxPeers = 1u << kImmPeerBits;
  if (options.peers.size() > kMaxPeers) {
    return bad(std::to_string(options.peers.size()) + " peers; at most " +
               std::to_string(kMaxPeers) + " fit the flow field of an immediate");
  }
  std::vector<bool> is_peer(options.num_ranks);
  for (const uint32_t peer : options.peers) {
    if (peer >= options.num_ranks || peer == options.rank || is_peer[peer]) {
      return bad("peer " + std::to_string(peer) +
                 " is this rank, no rank of the group, or listed twice");
    }
    is_peer[peer] = true;
  }
  if (options.ll_slots > kMaxCommandValue + 1) {
    return bad("ll_slots=" + std::to_string(options.ll_slots) + "; at most " +
               std::to_string(kMaxCommandValue + 1) + " fit a command");
  }
  if (options.heap.empty()) return bad("the heap is empty");
  if (!options.flag) return bad("no flag function");
  return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::Create(const ProxyOptions& proxy,
                                                   const EndpointOptions& options,
                                                   std::unique_ptr<Transport> transport,
                                                   LifeSigns* signs) {
  JAX_EP_RETURN_IF_ERROR(CheckOptions(options));
  if (transport->Caps().immediate_bits < kNeededImmediateBits) {
    return Unimplemented("transport: carries " + std::to_string(transport->Caps().immediate_bits) +
                         " bits of immediate data; 32 are needed");
  }
  JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<CommandRing> ring,
                          CommandRing::Create(options.ring_slots, options.ring_memory));
  std::unique_ptr<Endpoint> endpoint(
      new Endpoint(proxy, options, std::move(transport), std::move(ring), signs));
  if (endpoint->uses_secrets_) JAX_EP_RETURN_IF_ERROR(endpoint->DrawSecrets());
  JAX_EP_ASSIGN_OR_RETURN(endpoint->heap_region_, endpoint->transport_->Register(MemoryRegion{
                                                      .bytes = options.heap,
                                                      .export_blob = options.heap_export,
                                                      .device = options.heap_device,
                                                      .dmabuf_fd = options.heap_dmabuf_fd}));
  return endpoint;
}

Endpoint::Endpoint(const ProxyOptions& proxy, const EndpointOptions& options,
                   std::unique_ptr<Transport> transport, std::unique_ptr<CommandRing> ring,
                   LifeSigns* signs)
    : group_name_(proxy.group_name),
      rank_(options.rank),
      team_(options.team),
      num_ranks_(options.num_ranks),
      window_messages_(proxy.window_messages),
      ll_slots_(options.ll_slots),
      heap_bytes_(options.heap.size()),
      must_poll_(!options.ring_memory.empty()),
      doorbell_(options.doorbell),
      trace_(options.trace),
      transport_(std::move(transport)),
      caps_(transport_->Caps()),
      uses_secrets_(caps_.immediate_bits >= kSecretImmediateBits),
      peer_of_rank_(options.num_ranks, -1),
      signs_(*signs),
      watch_(static_cast<uint32_t>(options.peers.size()), proxy.peer_timeout, proxy.timeout, signs),
      ring_(std::move(ring)) {
  std::vector<uint32_t> ranks = options.peers;
  std::sort(ranks.begin(), ranks.end());
  const size_t num_flows = ranks.size() * kNumChannels;
  const uint64_t window_bytes = proxy.window_bytes != 0 ? proxy.window_bytes : caps_.window_bytes;
  send_flows_.reserve(num_flows);
  recv_flows_.reserve(num_flows);
  for (uint32_t i = 0; i < ranks.size(); ++i) {
    peers_.push_back(Peer{.rank = ranks[i]});
    peer_of_rank_[ranks[i]] = static_cast<int32_t>(i);
    for (uint32_t c = 0; c < kNumChannels; ++c) {
      const Channel channel = static_cast<Channel>(c);
      SendFlow& send = send_flows_.emplace_back(proxy.window_messages, window_bytes);
      send.peer = i;
      send.channel = channel;
      send.is_counted = IsCounted(channel);
      RecvFlow& recv = recv_flows_.emplace_back();
      recv.flag = options.flag(channel, ranks[i]);
      // Nobody else writes it.
      const uint64_t first = recv.flag == nullptr ? 0 : recv.flag->load(std::memory_order_relaxed);
      if (!IsCounted(channel)) {
        recv.sequenced.emplace(proxy.window_messages, /*first_sequence=*/0, first);
      } else if (ll_slots_ > 0) {
        recv.counted.emplace(ll_slots_, first);
      }
      recv.visible_flag = recv.flag_value();
    }
  }
  // Each list names a flow at most once, so these never grow later.
  pending_flows_.reserve(num_flows);
  dirty_flows_.reserve(num_flows);
  flushing_flows_.reserve(num_flows);
  ack_flows_.reserve(num_flows);
}

Status Endpoint::DrawSecrets() {
  SipKey key;
  JAX_EP_RETURN_IF_ERROR(DrawRandom(Where(), &key));
  for (Peer& peer : peers_) peer.own_secret = SecretOf(key, peer.rank);
  secret_key_ = key;
  return Status::Ok();
}

std::string Endpoint::LocalBlob() const {
  PeerBlob blob{.group_name = group_name_,
                .rank = rank_,
                .num_ranks = num_ranks_,
                .process = signs_.own_id(),
                .window_messages = window_messages_,
                .ll_slots = ll_slots_,
                .transport_address = transport_->LocalAddress(),
                .heap_key = heap_region_.key,
                .secret_key = secret_key_};
  for (const Peer& peer : peers_) blob.peers.push_back(peer.rank);
  return blob.Encode();
}

Status Endpoint::Connect(uint32_t rank, std::string_view text, Deadline deadline) {
  const std::string what = Where() + ": connecting to " + NameOf(rank) + ": ";
  if (rank >= num_ranks_ || peer_of_rank_[rank] < 0) {
    return InvalidArgument(what + "it is not one of this endpoint's peers");
  }
  Peer& peer = peers_[static_cast<size_t>(peer_of_rank_[rank])];
  if (peer.is_connected) return FailedPrecondition(what + "already connected");
  const Result<PeerBlob> decoded = PeerBlob::Decode(text);
  if (!decoded.ok()) return Status(decoded.status().code(), what + decoded.status().message());
  const PeerBlob& blob = *decoded;
  const auto differs = [&what](const char* name, const auto& theirs, const auto& ours) {
    return InvalidArgument(what + "its " + name + " is " + theirs + ", ours " + ours);
  };
  const auto number = [](uint64_t value) { return std::to_string(value); };
  if (blob.group_name != group_name_) return differs("group", blob.group_name, group_name_);
  if (blob.rank != rank) return differs("rank", number(blob.rank), number(rank));
  if (blob.num_ranks != num_ranks_) {
    return differs("num_ranks", number(blob.num_ranks), number(num_ranks_));
  }
  if (blob.window_messages != window_messages_) {
    return differs("window (JAX_EP_WINDOW_MESSAGES)", number(blob.window_messages),
                   number(window_messages_));
  }
  if (blob.ll_slots != ll_slots_) {
    return differs("number of LL slots", number(blob.ll_slots), number(ll_slots_));
  }
  const auto self = std::find(blob.peers.begin(), blob.peers.end(), rank_);
  if (self == blob.peers.end()) {
    return InvalidArgument(what + "it does not expect " + NameOf(rank_) +
                           " as a peer; node_size differs between the two");
  }
  if (blob.secret_key.has_value() != uses_secrets_) {
    return differs("immediate", uses_secrets_ ? "32 bits" : "64 bits",
                   uses_secrets_ ? "64 bits" : "32 bits");
  }
  const auto with_context = [&what](const Status& status) {
    return Status(status.code(), what + status.message());
  };
  const Result<uint32_t> handle = transport_->Connect(blob.transport_address, deadline);
  if (!handle.ok()) return with_context(handle.status());
  const Result<uint32_t> region = transport_->ImportRemoteKey(*handle, blob.heap_key);
  if (!region.ok()) return with_context(region.status());
  peer.handle = *handle;
  peer.heap_region = *region;
  peer.first_flow = static_cast<uint32_t>(self - blob.peers.begin()) * kNumChannels;
  if (uses_secrets_) peer.its_secret = SecretOf(*blob.secret_key, rank_);
  peer.process = signs_.IndexOf(blob.process);
  peer.is_connected = true;
  const uint32_t index = static_cast<uint32_t>(peer_of_rank_[rank]);
  watch_.SetProcess(index, peer.process);
  for (uint32_t c = 0; c < kNumChannels; ++c) {
    send_flows_[index * kNumChannels + c].remote_flow = peer.first_flow + c;
  }
  return Status::Ok();
}

std::optional<uint32_t> Endpoint::FirstUnconnectedPeer() const {
  for (const Peer& peer : peers_) {
    if (!peer.is_connected) return peer.rank;
  }
  return std::nullopt;
}

void Endpoint::AppendPairs(std::vector<PeerPair>* pairs) const {
  for (const Peer& peer : peers_) {
    pairs->push_back(
        {.team = team_.index, .rank = rank_, .peer = peer.rank, .process = peer.process});
  }
}

void Endpoint::SetRoles(std::span<const LeadRole> roles) {
  for (uint32_t i = 0; i < peers_.size(); ++i) {
    peers_[i].role = roles[i];
    watch_.SetCarrier(i, roles[i].carries_heartbeat);
  }
}

std::vector<uint32_t> Endpoint::BarrierPeers() const {
  std::vector<uint32_t> ranks;
  for (const Peer& peer : peers_) {
    if (peer.role.is_lead) ranks.push_back(peer.rank);
  }
  return ranks;
}

void Endpoint::Start(PeerWatch::Time now) {
  watch_.Start(now);
  DemandHeartbeats();
}

Status Endpoint::Step(bool* did_work) {
  bool is_busy = false;
  must_retry_ = false;
  // Commands first: who pushed them waits, and looking costs less than polling a network.
  JAX_EP_RETURN_IF_ERROR(PopCommands(&is_busy));
  JAX_EP_RETURN_IF_ERROR(PollTransport(&is_busy));
  if (num_departed_seen_ != signs_.num_departed()) JAX_EP_RETURN_IF_ERROR(SeeDepartures());
  JAX_EP_RETURN_IF_ERROR(Publish());
  if (!pending_flows_.empty()) JAX_EP_RETURN_IF_ERROR(PumpPending(&is_busy));
  if (!ack_flows_.empty()) {
    SendAcks((!is_busy && caps_.cheap_wake) || ++steps_since_ack_ >= kStepsPerAck);
  }
  if (num_heartbeats_due_ > 0) SendHeartbeats();
  if (!control_error_.ok()) return control_error_;
  *did_work |= is_busy;
  return Status::Ok();
}

Status Endpoint::Tick(PeerWatch::Time now) {
  const std::vector<PeerWatch::Dead> dead =
      watch_.Tick(now, [this](uint32_t peer) { return Awaits(peer); });
  if (!dead.empty()) {
    Blame(peers_[dead.front().peer].rank);
    return PeersDied(dead);
  }
  DemandHeartbeats();
  return Status::Ok();
}

bool Endpoint::PrepareToSleep() {
  if (!ack_flows_.empty()) SendAcks(/*send_all=*/true);
  return transport_->PrepareToSleep();
}

bool Endpoint::has_commands() const {
  return batch_next_ != batch_size_ || num_queued_commands() > 0;
}

bool Endpoint::has_unfinished_sends() const {
  return has_commands() || num_pending_ > 0 || num_in_transport_ > 0 || must_retry_;
}

bool Endpoint::has_unfinished_receives() const {
  return !ack_flows_.empty() || !dirty_flows_.empty() || is_flushing_;
}

bool Endpoint::is_drained() const {
  return !has_commands() && IsQuiet() && !has_unfinished_receives() &&
         num_control_in_transport_ == 0;
}

uint32_t Endpoint::FailurePayload(int64_t blamed) const {
  return BlamePayload(blamed, team_.num_teams);
}

bool Endpoint::HasUsed(uint32_t peer) const {
  for (uint32_t i = peer * kNumChannels; i < (peer + 1) * kNumChannels; ++i) {
    if (send_flows_[i].messages.Get() > 0 || recv_flows_[i].received.Get() > 0) return true;
  }
  return false;
}

bool Endpoint::Awaits(uint32_t peer) const {
  for (uint32_t i = peer * kNumChannels; i < (peer + 1) * kNumChannels; ++i) {
    const SendFlow& flow = send_flows_[i];
    if (flow.num_pending > 0 || flow.window.num_unacknowledged() > 0) return true;
  }
  return false;
}

bool Endpoint::SendToAll(ImmControl control, uint32_t payload) {
  bool all_told = true;
  for (uint32_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    const bool is_own = peer.process == LifeSigns::kOwn;  // it has the same latch
    if (peer.is_told || !peer.is_connected || is_own || watch_.has_departed(i)) continue;
    if (control == ImmControl::kBye ? !peer.role.carries_heartbeat
                                    : !peer.role.is_lead && !HasUsed(i)) {
      continue;
    }
    peer.is_told = TrySendControl(i, control, Channel::kOrder, payload);
    all_told = all_told && peer.is_told;
  }
  return all_told;
}

bool Endpoint::DrainCompletions() {
  std::array<TransportEvent, kBatchEvents> events;
  const Result<size_t> num_events = transport_->Poll(events);
  if (!num_events.ok()) return true;
  for (size_t i = 0; i < *num_events; ++i) {
    if (events[i].kind != TransportEvent::Kind::kSent) continue;
    --(events[i].token == kControlToken ? num_control_in_transport_ : num_in_transport_);
  }
  return num_in_transport_ == 0 && num_control_in_transport_ == 0;
}

}  // namespace jax_ep
