// The receiving half of an endpoint: transport events -> sequencers -> visible flags, and the
// control messages of peers.
#include <algorithm>
#include <string>
#include <utility>

#include "proxy/abi/activity.h"
#include "proxy/base/log.h"
#include "proxy/blame.h"
#include "proxy/endpoint.h"

namespace jax_ep {

Status Endpoint::PollTransport(bool* did_work) {
  std::array<TransportEvent, kBatchEvents> events;
  for (int batch = 0; batch < kMaxPollBatches; ++batch) {
    const Result<size_t> num_events = transport_->Poll(events);
    if (!num_events.ok()) {
      return Status(num_events.status().code(),
                    Where() + ": polling the transport: " + num_events.status().message());
    }
    for (size_t i = 0; i < *num_events; ++i) {
      const TransportEvent& event = events[i];
      switch (event.kind) {
        case TransportEvent::Kind::kSent:
          --(event.token == kControlToken ? num_control_in_transport_ : num_in_transport_);
          break;
        case TransportEvent::Kind::kArrived:
          JAX_EP_RETURN_IF_ERROR(OnArrival(event));
          break;
        case TransportEvent::Kind::kFlushed:
          if (!is_flushing_ || event.token != flush_token_) {
            return Internal(Where() + ": the transport reports a flush that was not started");
          }
          is_flushing_ = false;
          break;
      }
    }
    if (*num_events > 0) *did_work = true;
    if (*num_events < events.size()) break;
  }
  return Status::Ok();
}

Status Endpoint::OnArrival(const TransportEvent& event) {
  const uint32_t immediate = event.immediate;
  const Imm imm = DecodeImm(immediate);
  if (uses_secrets_ && (imm.flow >= recv_flows_.size() ||
                        event.secret != peers_[imm.flow / kNumChannels].own_secret)) {
    // A stranger's. It must neither move a flag nor end the group.
    if (num_forged_.Get() == 0) {
      LogWarning(Where() +
                 ": an immediate without the secret of its sender was dropped; somebody " +
                 "outside the group reaches this endpoint (dump_state counts them)");
    }
    num_forged_.Add(1);
    return Status::Ok();
  }
  if (imm.flow >= recv_flows_.size()) {
    return InvalidArgument(Where() + ": an arrival from an unknown sender: immediate " +
                           std::to_string(immediate) + " names flow " + std::to_string(imm.flow) +
                           " of " + std::to_string(recv_flows_.size()));
  }
  watch_.Heard(imm.flow / kNumChannels);
  return imm.kind == ImmKind::kControl ? OnControl(imm.flow, imm) : OnMessage(imm.flow, imm);
}

Status Endpoint::OnMessage(uint32_t flow_index, const Imm& imm) {
  RecvFlow& flow = recv_flows_[flow_index];
  const uint32_t peer = flow_index / kNumChannels;
  Arrival arrival = Arrival::kAccepted;
  if (imm.kind == ImmKind::kUnknown) {
    Blame(peers_[peer].rank);
    return BadArrival(peer, imm, "an unknown kind of message");
  }
  if (IsCounted(static_cast<Channel>(flow_index % kNumChannels))) {
    if (!flow.counted) {
      Blame(peers_[peer].rank);
      return BadArrival(peer, imm, "an ll message in a group without ll");
    }
    arrival = imm.kind == ImmKind::kCount ? flow.counted->ArriveCount(imm.epoch, imm.payload)
                                          : flow.counted->ArriveSlot(imm.epoch, imm.payload);
    flow.duplicates.Set(flow.counted->num_duplicates());
  } else {
    arrival = flow.sequenced->Arrive(imm.payload, imm.kind == ImmKind::kSignal, imm.epoch);
    flow.reorders.Set(flow.sequenced->num_reorders());
    flow.max_reorder_depth.Set(flow.sequenced->max_reorder_depth());
    flow.duplicates.Set(flow.sequenced->num_duplicates());
  }
  const auto fail = [&](std::string_view why) {
    Blame(peers_[peer].rank);
    return BadArrival(peer, imm, why);
  };
  switch (arrival) {
    case Arrival::kDuplicate:
      return Status::Ok();
    case Arrival::kAccepted:
      flow.received.Add(1);
      if (!flow.is_dirty && (flow.progress() != flow.visible_progress)) {
        flow.is_dirty = true;
        dirty_flows_.push_back(flow_index);
      }
      return Status::Ok();
    case Arrival::kBeyondWindow:
      return fail("its sequence number is beyond the window");
    case Arrival::kWrongEpoch:
      return fail("its epoch is not the next one of this channel");
    case Arrival::kBadSlot:
      return fail("its slot or count is out of range");
  }
  return Internal(Where() + ": unknown arrival");
}

Status Endpoint::OnControl(uint32_t flow_index, const Imm& imm) {
  const uint32_t peer = flow_index / kNumChannels;
  if (imm.epoch > static_cast<uint32_t>(ImmControl::kBye) &&
      imm.epoch != static_cast<uint32_t>(ImmControl::kAck)) {
    Blame(peers_[peer].rank);
    return BadArrival(peer, imm, "an unknown control message");
  }
  switch (static_cast<ImmControl>(imm.epoch)) {
    case ImmControl::kHeartbeat:
      return Status::Ok();
    case ImmControl::kAck: {
      SendFlow& flow = send_flows_[flow_index];
      const int64_t num_new = flow.window.Acknowledge(imm.payload);
      if (num_new < 0) {
        Blame(peers_[peer].rank);
        return BadArrival(peer, imm, "it acknowledges messages that were never sent");
      }
      num_unacknowledged_ -= static_cast<uint64_t>(num_new);
      flow.acknowledged.Set(flow.window.acknowledged());
      TraceProgress(TraceKind::kAcknowledged, flow_index, flow.window.acknowledged(), 0);
      return Status::Ok();
    }
    case ImmControl::kFailed: {
      const uint32_t reporter = peers_[peer].rank;
      const int64_t culprit = BlamedBy(imm.payload, team_.num_teams);
      if (culprit == FailureLatch::kAgreement) {
        blamed_rank_ = culprit;
        return FailedPrecondition(Where() + ": " + NameOf(reporter) + std::string(kAgreesAnew));
      }
      Blame(reporter);
      const bool is_its_own = culprit == FailureLatch::kNobody || culprit == blamed_rank_;
      if (!is_its_own) blamed_rank_ = culprit;
      std::string message = Where() + ": " + NameOf(reporter) + " reported a failure";
      if (culprit == RankOfTeam(team_.index, rank_)) {
        message += " and blames this rank";
      } else if (culprit == FailureLatch::kUnnamed) {
        message += " of a rank that its message has no room to name";
      } else if (!is_its_own) {
        const TeamId team{.index = TeamOf(culprit), .num_teams = team_.num_teams};
        message += " of " + RankName(team, static_cast<uint32_t>(culprit));
      }
      return Unavailable(message + "; its own error says more");
    }
    case ImmControl::kBye:
      watch_.Depart(peer);  // see SeeDepartures
      return Status::Ok();
  }
  return Internal(Where() + ": unknown control message");
}

// What such a process has not acknowledged by now it does not need. Acknowledgements that the
// goodbye has overtaken, on another pair of ranks, then say nothing new.
Status Endpoint::SeeDepartures() {
  num_departed_seen_ = signs_.num_departed();
  for (uint32_t peer = 0; peer < peers_.size(); ++peer) {
    if (!watch_.has_departed(peer)) continue;
    for (uint32_t c = 0; c < kNumChannels; ++c) {
      SendFlow& flow = send_flows_[FlowIndex(peer, static_cast<Channel>(c))];
      if (flow.num_pending > 0) {
        Blame(peers_[peer].rank);
        return FailedPrecondition(Where() + ": " + NameOf(peers_[peer].rank) +
                                  " has closed the group, but this rank still sends to it (" +
                                  DescribeFlow(FlowIndex(peer, flow.channel)) + ")");
      }
      num_unacknowledged_ -= static_cast<uint64_t>(flow.window.AcknowledgeAll());
      flow.acknowledged.Set(flow.window.acknowledged());
    }
  }
  return Status::Ok();
}

// Moves arrivals to visible, with a flush in between where the transport does not promise it.
Status Endpoint::Publish() {
  if (dirty_flows_.empty() && flushing_flows_.empty()) return Status::Ok();
  if (caps_.arrival_implies_visible) {
    for (const uint32_t index : dirty_flows_) {
      RecvFlow& flow = recv_flows_[index];
      flow.is_dirty = false;
      JAX_EP_RETURN_IF_ERROR(PublishFlow(index, flow.progress(), flow.flag_value()));
    }
    dirty_flows_.clear();
    RingIfFlagChanged();
    return Status::Ok();
  }
  if (is_flushing_) return Status::Ok();
  if (flushing_flows_.empty()) {
    std::swap(flushing_flows_, dirty_flows_);
    for (const uint32_t index : flushing_flows_) {
      RecvFlow& flow = recv_flows_[index];
      flow.is_dirty = false;
      flow.flushing_progress = flow.progress();
      flow.flushing_flag = flow.flag_value();
    }
    const Result<bool> is_flushed = transport_->Flush(++flush_token_);
    if (!is_flushed.ok()) {
      return Status(is_flushed.status().code(),
                    Where() + ": flushing arrivals: " + is_flushed.status().message());
    }
    is_flushing_ = !*is_flushed;
    if (is_flushing_) return Status::Ok();
  }
  for (const uint32_t index : flushing_flows_) {
    const RecvFlow& flow = recv_flows_[index];
    JAX_EP_RETURN_IF_ERROR(PublishFlow(index, flow.flushing_progress, flow.flushing_flag));
  }
  flushing_flows_.clear();
  RingIfFlagChanged();
  return Status::Ok();
}

void Endpoint::RingIfFlagChanged() {
  if (has_flag_changed_) RingDoorbell();
  has_flag_changed_ = false;
}

void Endpoint::TraceProgress(TraceKind kind, uint32_t flow_index, uint64_t value,
                             uint64_t detail) const {
  if (trace_ == nullptr) return;
  const uint64_t now_ns = MonotonicNs();
  trace_->Add({.begin_ns = now_ns,
               .end_ns = now_ns,
               .value = value,
               .detail = detail,
               .peer = static_cast<uint16_t>(peers_[flow_index / kNumChannels].rank),
               .kind = kind,
               .channel = static_cast<uint8_t>(flow_index % kNumChannels)});
}

Status Endpoint::PublishFlow(uint32_t flow_index, uint64_t progress, uint64_t flag_value) {
  RecvFlow& flow = recv_flows_[flow_index];
  if (flag_value != flow.visible_flag) {
    if (flow.flag == nullptr) {
      const uint32_t peer = flow_index / kNumChannels;
      Blame(peers_[peer].rank);
      return InvalidArgument(
          Where() + ": " + NameOf(peers_[peer].rank) + " signals on channel " +
          std::string(ChannelName(static_cast<Channel>(flow_index % kNumChannels))) +
          ", which has no flag on this rank");
    }
    // Before the store: a waiter's stamp of what it has seen is never older than this one.
    TraceProgress(TraceKind::kFlag, flow_index, flag_value, flow.received.Get());
    // Release pairs with the acquire of the kernel that waits for this epoch: it sees the payload
    // that the transport has made visible to this thread.
    flow.flag->store(flag_value, std::memory_order_release);
    flow.visible_flag = flag_value;
    has_flag_changed_ = true;
    flow.signals.Set(flag_value);
  }
  flow.visible_progress = progress;
  flow.committed.Set(progress);
  if (!flow.is_ack_due && flow.visible_progress != flow.acknowledged) {
    flow.is_ack_due = true;
    ack_flows_.push_back(flow_index);
  }
  return Status::Ok();
}

}  // namespace jax_ep
