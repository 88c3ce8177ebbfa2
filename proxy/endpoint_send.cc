// The sending half of an endpoint: ring -> flows -> transport, quiet, barrier, acknowledgements and
// heartbeats.
#include <algorithm>
#include <string>

#include "proxy/abi/activity.h"
#include "proxy/endpoint.h"

namespace jax_ep {

Status Endpoint::PopCommands(bool* did_work) {
  if (batch_next_ == batch_size_) {
    batch_next_ = 0;
    batch_size_ = ring_->PopBatch(batch_);
  }
  while (batch_next_ < batch_size_) {
    bool is_taken = false;
    JAX_EP_RETURN_IF_ERROR(Take(batch_[batch_next_], &is_taken));
    if (!is_taken) return Status::Ok();  // the ring waits; polling goes on
    ++batch_next_;
    *did_work = true;
  }
  return Status::Ok();
}

Status Endpoint::CheckCommand(const Command& command) const {
  const auto bad = [this, &command](const std::string& what) {
    return InvalidArgument(Where() + ": bad command: " + what + " (op " +
                           std::to_string(static_cast<int>(command.op)) + ", " +
                           NameOf(command.dst_rank) + ", channel " +
                           std::to_string(static_cast<int>(command.channel)) + ", epoch " +
                           std::to_string(command.epoch) + ")");
  };
  if (static_cast<uint32_t>(command.op) >= kNumOps) return bad("unknown op");
  if (static_cast<uint32_t>(command.channel) >= kImmAckChannel) return bad("unknown channel");
  if (command.dst_rank >= num_ranks_ || peer_of_rank_[command.dst_rank] < 0) {
    return bad("the destination is not a rank of another node");
  }
  const bool is_counted = IsCounted(command.channel);
  if (is_counted && command.op == Op::kWriteSignal) {
    return bad("a counted channel has no write with signal");
  }
  if (is_counted &&
      (command.op == Op::kWrite ? command.value >= ll_slots_ : command.value > ll_slots_)) {
    return bad("slot or count " + std::to_string(command.value) + " of " +
               std::to_string(ll_slots_) + " slots");
  }
  if (is_counted && command.length_bytes > caps_.max_message_bytes) {
    // Pieces of one slot could not be told apart by a receiver that counts slots.
    return bad("an ll message of " + std::to_string(command.length_bytes) +
               " bytes, the transport takes at most " + std::to_string(caps_.max_message_bytes) +
               "; lower hidden");
  }
  if (watch_.has_departed(static_cast<uint32_t>(peer_of_rank_[command.dst_rank]))) {
    return FailedPrecondition(Where() + ": " + NameOf(command.dst_rank) +
                              " has closed the group, but this rank still sends to it on channel " +
                              std::string(ChannelName(command.channel)));
  }
  return Status::Ok();
}

bool Endpoint::IsQuiet() const {
  return num_pending_ == 0 && num_unacknowledged_ == 0 && num_in_transport_ == 0;
}

// *is_taken stays false if the ring has to wait with this command.
Status Endpoint::Take(const PackedCommand& packed, bool* is_taken) {
  const Command command = Unpack(packed);
  switch (command.op) {
    case Op::kWrite:
    case Op::kWriteSignal:
    case Op::kSignal: {
      JAX_EP_RETURN_IF_ERROR(CheckCommand(command));
      const uint32_t peer = static_cast<uint32_t>(peer_of_rank_[command.dst_rank]);
      return Enqueue(send_flows_[FlowIndex(peer, command.channel)], packed, command, is_taken);
    }
    case Op::kQuiet: {
      // The ring waits here, so "everything before the marker" is simply everything.
      if (!IsQuiet()) return Status::Ok();
      const uint64_t epoch = quiet_epoch_.load(std::memory_order_relaxed) + 1;
      if (command.epoch != (epoch & BitMask(kCommandEpochBits))) {
        return InvalidArgument(Where() + ": bad command: quiet with epoch " +
                               std::to_string(command.epoch) + " (mod 16) where " +
                               std::to_string(epoch) + " is next");
      }
      // Release pairs with the acquire of who waits for the epoch.
      quiet_epoch_.store(epoch, std::memory_order_release);
      RingDoorbell();
      *is_taken = true;
      return Status::Ok();
    }
    case Op::kBarrier:
      return TakeBarrier(command, is_taken);
  }
  return CheckCommand(command);  // an op outside the enumeration
}

Status Endpoint::TakeBarrier(const Command& command, bool* is_taken) {
  const uint64_t epoch = barrier_epoch_ + 1;
  if (command.epoch != (epoch & BitMask(kCommandEpochBits))) {
    return InvalidArgument(Where() + ": bad command: barrier with epoch " +
                           std::to_string(command.epoch) + " (mod 16) where " +
                           std::to_string(epoch) + " is next");
  }
  for (; barrier_next_peer_ < peers_.size(); ++barrier_next_peer_) {
    if (!peers_[barrier_next_peer_].role.is_lead) continue;
    const Command signal{.op = Op::kSignal,
                         .dst_rank = peers_[barrier_next_peer_].rank,
                         .channel = Channel::kBarrier,
                         .epoch = epoch};
    JAX_EP_RETURN_IF_ERROR(CheckCommand(signal));
    const std::optional<PackedCommand> packed = TryPack(signal);
    SendFlow& flow = send_flows_[FlowIndex(barrier_next_peer_, Channel::kBarrier)];
    bool is_queued = false;
    JAX_EP_RETURN_IF_ERROR(Enqueue(flow, *packed, signal, &is_queued));
    if (!is_queued) return Status::Ok();
  }
  barrier_next_peer_ = 0;
  barrier_epoch_ = epoch;
  *is_taken = true;
  return Status::Ok();
}

Status Endpoint::Enqueue(SendFlow& flow, const PackedCommand& packed, const Command& command,
                         bool* is_taken) {
  uint64_t sent_bytes = 0;
  const uint64_t taken_ns = trace_ == nullptr ? 0 : MonotonicNs();
  if (flow.num_pending == 0) {
    flow.last_command[0].Set(packed.words[0]);
    flow.last_command[1].Set(packed.words[1]);
    JAX_EP_RETURN_IF_ERROR(Send(flow, command, &sent_bytes, is_taken));
    if (*is_taken) {
      TraceCommand(flow, command, taken_ns);
      return Status::Ok();
    }
    flow.head_sent_bytes = sent_bytes;
  } else if (flow.num_pending == kMaxPendingCommands) {
    return Status::Ok();
  }
  const uint32_t last = (flow.pending_first + flow.num_pending) % kMaxPendingCommands;
  flow.pending[last] = packed;
  flow.pending_since_ns[last] = taken_ns;
  ++flow.num_pending;
  ++num_pending_;
  if (!flow.is_listed) {
    flow.is_listed = true;
    pending_flows_.push_back(FlowIndex(flow.peer, flow.channel));
  }
  *is_taken = true;
  return Status::Ok();
}

void Endpoint::TraceCommand(const SendFlow& flow, const Command& command, uint64_t taken_ns) const {
  if (trace_ == nullptr) return;
  trace_->Add({.begin_ns = taken_ns,
               .end_ns = MonotonicNs(),
               .value = flow.signals.Get(),
               .detail = command.length_bytes,
               .extra = flow.messages.Get(),
               .peer = static_cast<uint16_t>(peers_[flow.peer].rank),
               .kind = TraceKind::kCommand,
               .channel = static_cast<uint8_t>(flow.channel),
               .name = static_cast<uint8_t>(command.op)});
}

// Posts what is left of a command from *sent_bytes on. *is_done stays false if the window closed,
// the transport's queue is full, or the peer is lost.
Status Endpoint::Send(SendFlow& flow, const Command& command, uint64_t* sent_bytes, bool* is_done) {
  Peer& peer = peers_[flow.peer];
  if (!peer.why_lost.empty()) return Status::Ok();  // until the watch has found the culprit
  const uint64_t flow_index = FlowIndex(flow.peer, flow.channel);
  do {
    const uint64_t piece_bytes =
        std::min(command.length_bytes - *sent_bytes, caps_.max_message_bytes);
    const bool is_last = *sent_bytes + piece_bytes == command.length_bytes;
    if (!flow.window.CanSend(piece_bytes)) {
      if (!flow.has_stalled) flow.stalls.Add(1);
      flow.has_stalled = true;
      return Status::Ok();
    }
    flow.has_stalled = false;
    const bool is_signal = is_last && command.op != Op::kWrite;
    Imm imm{.flow = flow.remote_flow,
            .epoch = static_cast<uint32_t>(command.epoch & BitMask(kImmEpochBits))};
    if (flow.is_counted) {
      imm.kind = is_signal ? ImmKind::kCount : ImmKind::kSlot;
      imm.payload = command.value;
    } else {
      imm.kind = is_signal ? ImmKind::kSignal : ImmKind::kData;
      imm.payload = static_cast<uint32_t>(flow.window.next() & (kSequenceSpace - 1));
    }
    const Status status =
        transport_->PostWrite(WriteRequest{.peer = peer.handle,
                                           .local_region = heap_region_.handle,
                                           .remote_region = peer.heap_region,
                                           .local_offset = command.local_offset + *sent_bytes,
                                           .remote_offset = command.remote_offset + *sent_bytes,
                                           .length_bytes = piece_bytes,
                                           .has_immediate = true,
                                           .immediate = *TryEncodeImm(imm),
                                           .secret = peer.its_secret,
                                           .token = flow_index});
    if (!status.ok()) {
      if (status.code() == StatusCode::kResourceExhausted) {
        flow.retries.Add(1);
        must_retry_ = true;
        return Status::Ok();
      }
      if (status.code() == StatusCode::kUnavailable) {
        peer.why_lost = status.message();
        watch_.Lose(flow.peer);
        return Status::Ok();
      }
      return Status(status.code(), Where() + ": sending to " + NameOf(peer.rank) + " (" +
                                       DescribeFlow(static_cast<uint32_t>(flow_index)) +
                                       "): " + status.message());
    }
    flow.window.Record(piece_bytes);
    flow.messages.Add(1);
    flow.bytes.Add(piece_bytes);
    if (is_signal) flow.signals.Add(1);
    ++num_unacknowledged_;
    ++num_in_transport_;
    *sent_bytes += piece_bytes;
    *is_done = is_last;
  } while (!*is_done);
  return Status::Ok();
}

Status Endpoint::PumpPending(bool* did_work) {
  for (size_t i = 0; i < pending_flows_.size();) {
    SendFlow& flow = send_flows_[pending_flows_[i]];
    while (flow.num_pending > 0) {
      const PackedCommand packed = flow.pending[flow.pending_first];
      flow.last_command[0].Set(packed.words[0]);
      flow.last_command[1].Set(packed.words[1]);
      bool is_done = false;
      const uint64_t sent_before = flow.head_sent_bytes;
      const Command command = Unpack(packed);
      JAX_EP_RETURN_IF_ERROR(Send(flow, command, &flow.head_sent_bytes, &is_done));
      *did_work |= is_done || flow.head_sent_bytes != sent_before;
      if (!is_done) break;
      TraceCommand(flow, command, flow.pending_since_ns[flow.pending_first]);
      flow.head_sent_bytes = 0;
      flow.pending_first = (flow.pending_first + 1) % kMaxPendingCommands;
      --flow.num_pending;
      --num_pending_;
    }
    if (flow.num_pending == 0) {
      flow.is_listed = false;
      pending_flows_[i] = pending_flows_.back();
      pending_flows_.pop_back();
    } else {
      ++i;
    }
  }
  return Status::Ok();
}

// False if the transport's queue is full: try again later.
bool Endpoint::TrySendControl(uint32_t peer, ImmControl control, Channel channel,
                              uint32_t payload) {
  const Imm imm{.kind = ImmKind::kControl,
                .flow = peers_[peer].first_flow + static_cast<uint32_t>(channel),
                .epoch = static_cast<uint32_t>(control),
                .payload = payload};
  const Status status = transport_->PostWrite(WriteRequest{.peer = peers_[peer].handle,
                                                           .has_immediate = true,
                                                           .immediate = *TryEncodeImm(imm),
                                                           .secret = peers_[peer].its_secret,
                                                           .token = kControlToken});
  if (status.ok()) {
    ++num_control_in_transport_;
    return true;
  }
  if (status.code() == StatusCode::kResourceExhausted) {
    must_retry_ = true;
    return false;
  }
  // A peer that has closed needs neither acknowledgements nor heartbeats. If it left without a
  // goodbye, it is found silent, or lost by the next write to it.
  if (status.code() != StatusCode::kUnavailable && control_error_.ok()) {
    control_error_ = Status(status.code(), Where() + ": control message to " +
                                               NameOf(peers_[peer].rank) + ": " + status.message());
  }
  return true;
}

// Acknowledgements are cumulative, so waiting a little merges many into one message.
void Endpoint::SendAcks(bool send_all) {
  if (send_all) steps_since_ack_ = 0;
  const uint64_t threshold = window_messages_ / 4;
  for (size_t i = 0; i < ack_flows_.size();) {
    const uint32_t index = ack_flows_[i];
    RecvFlow& flow = recv_flows_[index];
    const bool is_due = send_all || flow.visible_progress - flow.acknowledged > threshold;
    const uint32_t low = static_cast<uint32_t>(flow.visible_progress & (kSequenceSpace - 1));
    const uint32_t peer = index / kNumChannels;
    if (!is_due || (!watch_.has_departed(peer) &&
                    !TrySendControl(peer, ImmControl::kAck,
                                    static_cast<Channel>(index % kNumChannels), low))) {
      ++i;
      continue;
    }
    flow.acknowledged = flow.visible_progress;
    flow.is_ack_due = false;
    ack_flows_[i] = ack_flows_.back();
    ack_flows_.pop_back();
  }
}

void Endpoint::DemandHeartbeats() {
  for (Peer& peer : peers_) {
    if (!peer.role.carries_heartbeat || peer.is_heartbeat_due) continue;
    peer.is_heartbeat_due = true;
    ++num_heartbeats_due_;
  }
}

// A peer whose queue is full holds up nobody else's: it stays due.
void Endpoint::SendHeartbeats() {
  for (uint32_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (!peer.is_heartbeat_due) continue;
    if (!watch_.has_departed(i)) {
      if (!TrySendControl(i, ImmControl::kHeartbeat, Channel::kOrder, 0)) continue;
      num_heartbeats_.Add(1);
    }
    peer.is_heartbeat_due = false;
    --num_heartbeats_due_;
  }
}

}  // namespace jax_ep
