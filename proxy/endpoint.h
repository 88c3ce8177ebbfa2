// Endpoint: one local rank inside the proxy thread: its ring, its transport, its flows. Sending is
// in endpoint_send.cc, receiving in endpoint_receive.cc, the texts in endpoint_report.cc. The
// thread, its sleep and its end are in progress.h.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/abi/imm.h"
#include "proxy/base/failure.h"
#include "proxy/base/rank_name.h"
#include "proxy/base/siphash.h"
#include "proxy/command_ring.h"
#include "proxy/flow.h"
#include "proxy/leads.h"
#include "proxy/life_signs.h"
#include "proxy/peer_watch.h"
#include "proxy/proxy.h"
#include "proxy/stats.h"
#include "proxy/transport.h"

namespace jax_ep {

// Thread rule: Create and Connect before the proxy thread starts; then whoever holds the proxy's
// mutex, except the functions marked "any thread". An error returned by any step ends the endpoint;
// blamed_rank() then says whose fault it was.
class Endpoint {
 public:
  static Result<std::unique_ptr<Endpoint>> Create(const ProxyOptions& proxy,
                                                  const EndpointOptions& options,
                                                  std::unique_ptr<Transport> transport,
                                                  LifeSigns* signs);  // outlives the endpoint

  std::string LocalBlob() const;
  Status Connect(uint32_t peer, std::string_view blob, Deadline deadline);
  // The first peer that is not connected, if any.
  std::optional<uint32_t> FirstUnconnectedPeer() const;
  // A pair for each peer, and what each is for; both in the order of the peers' ranks.
  void AppendPairs(std::vector<PeerPair>* pairs) const;
  void SetRoles(std::span<const LeadRole> roles);

  // --- under the proxy's mutex ---
  void Start(PeerWatch::Time now);
  // One round: poll, publish flags, send. *did_work is set if anything moved.
  Status Step(bool* did_work);
  // Heartbeats and their watch; call when `now` has reached next_tick().
  Status Tick(PeerWatch::Time now);
  PeerWatch::Time next_tick() const { return watch_.next_tick(); }
  bool has_cheap_wake() const { return caps_.cheap_wake; }
  // The ring's producers ring no bell.
  bool must_poll() const { return must_poll_; }
  uint64_t num_queued_commands() const { return ring_->num_queued(); }
  // Something waits for room in the transport or for a connection, which ring no bell.
  bool must_retry() const { return must_retry_; }
  // Another round is needed soon: for commands that are left or writes that the transport has to
  // finish; for arrivals that are not visible yet or wait for their acknowledgement.
  bool has_unfinished_sends() const;
  bool has_unfinished_receives() const;
  // Sends what had time until now; then see Transport::PrepareToSleep.
  bool PrepareToSleep();
  // Nothing is queued, under way or unacknowledged, in either direction.
  bool is_drained() const;
  // Tells every other process that is still there, as leads.h says. Returns true when all were
  // told; else call again.
  bool SendToAll(ImmControl control, uint32_t payload);
  // Reports local completions only; used after a failure. True when nothing is under way.
  bool DrainCompletions();
  void RingDoorbell() const {
    if (doorbell_ != nullptr) doorbell_->Ring();
  }
  int64_t blamed_rank() const { return blamed_rank_; }  // RankOfTeam
  // The payload of kFailed that tells the peers whom the latch blames.
  uint32_t FailurePayload(int64_t blamed) const;

  // --- any thread ---
  uint32_t rank() const { return rank_; }
  size_t num_peers() const { return peers_.size(); }
  // Whom kBarrier signals, and who signals this endpoint; fixed by SetRoles.
  std::vector<uint32_t> BarrierPeers() const;
  std::string NameOf(uint32_t rank) const { return RankName(team_, rank); }
  RingView ring() { return ring_->view(); }
  std::atomic<uint64_t>* quiet_flag() { return &quiet_epoch_; }
  void AppendState(std::string* text) const;
  // A line for each flow that has messages under way or gaps, or that `is_awaited`.
  void AppendOpenFlows(const FlowFilter& is_awaited, std::string* text) const;
  void AppendStats(std::vector<FlowStats>* stats) const;

 private:
  static constexpr size_t kBatchCommands = 64;
  static constexpr size_t kBatchEvents = 64;
  static constexpr int kMaxPollBatches = 4;  // per step, so that sending is not starved
  // An acknowledgement waits at most this long, or until the proxy sleeps: on a network even if
  // there is nothing else to do, because the answer of whom we have just woken is more urgent and
  // often a second message.
  static constexpr uint32_t kStepsPerAck = 256;
  static constexpr uint64_t kControlToken = UINT64_MAX;

  struct Peer {
    uint32_t rank = 0;
    bool is_connected = false;
    uint32_t handle = 0;       // of Transport::Connect
    uint32_t heap_region = 0;  // of Transport::ImportRemoteKey
    uint32_t first_flow = 0;   // our flow ids at the peer start here
    uint32_t own_secret = 0;   // that it presents to us; both only if uses_secrets_
    uint32_t its_secret = 0;   // that we present to it
    uint32_t process = 0;      // that runs it, by LifeSigns
    LeadRole role = {};
    bool is_told = false;  // by the SendToAll under way
    bool is_heartbeat_due = false;
    std::string why_lost = {};  // the transport's words; "": writes to it are possible
  };

  Endpoint(const ProxyOptions& proxy, const EndpointOptions& options,
           std::unique_ptr<Transport> transport, std::unique_ptr<CommandRing> ring,
           LifeSigns* signs);

  Status DrawSecrets();

  // endpoint_send.cc
  Status PopCommands(bool* did_work);
  Status Take(const PackedCommand& packed, bool* is_taken);
  Status TakeBarrier(const Command& command, bool* is_taken);
  bool has_commands() const;  // in the ring or the batch
  bool IsQuiet() const;
  bool HasUsed(uint32_t peer) const;  // a message of any flow went or came
  bool Awaits(uint32_t peer) const;   // its acknowledgements, or a place for commands to it
  Status CheckCommand(const Command& command) const;
  Status Enqueue(SendFlow& flow, const PackedCommand& packed, const Command& command,
                 bool* is_taken);
  Status Send(SendFlow& flow, const Command& command, uint64_t* sent_bytes, bool* is_done);
  Status PumpPending(bool* did_work);
  bool TrySendControl(uint32_t peer, ImmControl control, Channel channel, uint32_t payload);
  void SendAcks(bool send_all);
  void DemandHeartbeats();
  void SendHeartbeats();
  uint32_t FlowIndex(uint32_t peer, Channel channel) const {
    return peer * kNumChannels + static_cast<uint32_t>(channel);
  }

  void TraceCommand(const SendFlow& flow, const Command& command, uint64_t taken_ns) const;

  // endpoint_receive.cc
  Status PollTransport(bool* did_work);
  Status OnArrival(const TransportEvent& event);
  Status OnMessage(uint32_t flow_index, const Imm& imm);
  Status OnControl(uint32_t flow_index, const Imm& imm);
  // Takes note of the processes that have said goodbye, on whichever endpoint.
  Status SeeDepartures();
  Status Publish();
  void RingIfFlagChanged();
  // What peer and channel of a flow have come to: kFlag or kAcknowledged.
  void TraceProgress(TraceKind kind, uint32_t flow_index, uint64_t value, uint64_t detail) const;
  Status PublishFlow(uint32_t flow_index, uint64_t progress, uint64_t flag_value);

  // endpoint_report.cc
  std::string Where() const;  // rank R of group "G"
  std::string DescribeFlow(uint32_t flow_index) const;
  std::string DescribeFlowAndWindow(uint32_t flow_index) const;
  void Blame(uint32_t rank) { blamed_rank_ = RankOfTeam(team_.index, rank); }
  Status BadArrival(uint32_t peer, const Imm& imm, std::string_view why) const;
  Status PeersDied(const std::vector<PeerWatch::Dead>& dead) const;

  const std::string group_name_;
  const uint32_t rank_;
  const TeamId team_;
  const uint32_t num_ranks_;
  const uint32_t window_messages_;
  const uint32_t ll_slots_;
  const uint64_t heap_bytes_;
  const bool must_poll_;
  Doorbell* const doorbell_;
  const std::shared_ptr<TraceTrack> trace_;  // null: none
  std::unique_ptr<Transport> transport_;
  const TransportCaps caps_;
  const bool uses_secrets_;
  std::optional<SipKey> secret_key_;  // of DrawSecrets
  LocalRegion heap_region_;

  std::vector<Peer> peers_;            // sorted by rank
  std::vector<int32_t> peer_of_rank_;  // index into peers_, or -1
  std::vector<SendFlow> send_flows_;   // by FlowIndex
  std::vector<RecvFlow> recv_flows_;   // by FlowIndex, which is the flow id on the wire
  LifeSigns& signs_;
  PeerWatch watch_;
  uint32_t num_departed_seen_ = 0;  // of LifeSigns

  std::unique_ptr<CommandRing> ring_;
  std::array<PackedCommand, kBatchCommands> batch_;
  size_t batch_size_ = 0;
  size_t batch_next_ = 0;
  std::vector<uint32_t> pending_flows_;  // send flows with pending commands
  uint32_t barrier_next_peer_ = 0;       // progress of the barrier at the head of the batch
  uint64_t barrier_epoch_ = 0;           // newest barrier sent
  std::atomic<uint64_t> quiet_epoch_{0};

  uint64_t num_pending_ = 0;         // commands in all pending queues
  uint64_t num_unacknowledged_ = 0;  // messages, all flows
  uint64_t num_in_transport_ = 0;    // messages posted whose kSent is missing
  uint64_t num_control_in_transport_ = 0;
  bool must_retry_ = false;
  uint32_t num_heartbeats_due_ = 0;
  Counter num_heartbeats_;  // sent

  std::vector<uint32_t> dirty_flows_;     // recv flows with arrivals that are not yet visible
  std::vector<uint32_t> flushing_flows_;  // those that the Flush under way covers
  bool is_flushing_ = false;
  bool has_flag_changed_ = false;  // since the doorbell was last rung
  uint64_t flush_token_ = 0;
  std::vector<uint32_t> ack_flows_;
  uint32_t steps_since_ack_ = 0;

  Counter num_forged_;  // immediates without the secret of the peer that they claim to be from
  int64_t blamed_rank_ = FailureLatch::kNobody;
  Status control_error_;  // of a TrySendControl that met more than a full queue
};

}  // namespace jax_ep
