// The texts of an endpoint: errors, state dump, statistics.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "proxy/endpoint.h"

namespace jax_ep {

namespace {

std::string CommandText(uint64_t payload_word, uint64_t commit_word) {
  if (payload_word == 0 && commit_word == 0) return "none";
  const Command command = Unpack(PackedCommand{{payload_word, commit_word}});
  std::string text;
  switch (command.op) {
    case Op::kWrite:
      text = "write";
      break;
    case Op::kWriteSignal:
      text = "write+signal";
      break;
    case Op::kSignal:
      text = "signal";
      break;
    case Op::kQuiet:
      text = "quiet";
      break;
    case Op::kBarrier:
      text = "barrier";
      break;
  }
  return text + " of " + std::to_string(command.length_bytes) + " B, epoch " +
         std::to_string(command.epoch) + " (mod 16), value " + std::to_string(command.value);
}

}  // namespace

std::string Endpoint::Where() const { return "group " + group_name_ + ": " + NameOf(rank_); }

std::string Endpoint::DescribeFlow(uint32_t index) const {
  const SendFlow& send = send_flows_[index];
  const RecvFlow& recv = recv_flows_[index];
  return "channel " + std::string(ChannelName(static_cast<Channel>(index % kNumChannels))) +
         ": posted " + std::to_string(send.messages.Get()) + ", acknowledged " +
         std::to_string(send.acknowledged.Get()) + ", arrived " +
         std::to_string(recv.received.Get()) + ", committed " +
         std::to_string(recv.committed.Get()) + ", flag " + std::to_string(recv.signals.Get());
}

Status Endpoint::BadArrival(uint32_t peer, const Imm& imm, std::string_view why) const {
  return InvalidArgument(Where() + ": " + NameOf(peers_[peer].rank) +
                         " sent a message that breaks the protocol: " + std::string(why) +
                         " (kind " + std::to_string(static_cast<int>(imm.kind)) + ", epoch " +
                         std::to_string(imm.epoch) + ", payload " + std::to_string(imm.payload) +
                         "; " + DescribeFlow(imm.flow) + ")");
}

Status Endpoint::PeersDied(const std::vector<PeerWatch::Dead>& dead) const {
  const PeerWatch::Dead& first = dead.front();
  const Peer& culprit = peers_[first.peer];
  // The flow to that peer with the most outstanding says best what was going on.
  uint32_t busiest = first.peer * kNumChannels;
  const auto outstanding = [this](uint32_t index) {
    const SendFlow& flow = send_flows_[index];
    return flow.messages.Get() - flow.acknowledged.Get();
  };
  for (uint32_t i = busiest; i < (first.peer + 1) * kNumChannels; ++i) {
    if (outstanding(i) > outstanding(busiest)) busiest = i;
  }
  std::string text = "group " + group_name_ + ": " + NameOf(culprit.rank) + " ";
  if (first.is_lost) {
    text += "is gone: " + culprit.why_lost;
  } else {
    char silence[32];
    std::snprintf(silence, sizeof(silence), "%.1f",
                  std::chrono::duration<double>(first.silence).count());
    text += "stopped answering: " +
            std::string(first.is_cut_off ? "no acknowledgement" : "no heartbeat") + " for " +
            silence + " s" + (first.was_heard ? "" : " since the group was started") +
            (first.is_cut_off ? ", though others of its process are heard" : "");
  }
  text += "; seen by " + NameOf(rank_) + " (" + DescribeFlow(busiest) + ")";
  for (size_t i = 1; i < dead.size(); ++i) {
    text += (i == 1 ? "; later silent, too: " : ", ") + NameOf(peers_[dead[i].peer].rank);
  }
  return Unavailable(text);
}

std::string Endpoint::DescribeFlowAndWindow(uint32_t flow_index) const {
  const SendFlow& send = send_flows_[flow_index];
  return DescribeFlow(flow_index) + ", window " + std::to_string(window_messages_) + ", stalls " +
         std::to_string(send.stalls.Get()) + ", retries " + std::to_string(send.retries.Get());
}

void Endpoint::AppendState(std::string* text) const {
  *text += Where() + ": commands popped " + std::to_string(ring_->num_popped()) + ", quiet epoch " +
           std::to_string(quiet_epoch_.load(std::memory_order_relaxed)) + ", heartbeats sent " +
           std::to_string(num_heartbeats_.Get()) + ", forged immediates dropped " +
           std::to_string(num_forged_.Get()) + "\n";
  transport_->AppendState(text);
  for (uint32_t i = 0; i < send_flows_.size(); ++i) {
    const SendFlow& send = send_flows_[i];
    if (send.messages.Get() == 0 && recv_flows_[i].received.Get() == 0) continue;
    *text +=
        "  peer " + NameOf(peers_[i / kNumChannels].rank) + " " + DescribeFlowAndWindow(i) +
        "; last command: " + CommandText(send.last_command[0].Get(), send.last_command[1].Get()) +
        "\n";
  }
}

void Endpoint::AppendOpenFlows(const FlowFilter& is_awaited, std::string* text) const {
  for (uint32_t i = 0; i < send_flows_.size(); ++i) {
    const SendFlow& send = send_flows_[i];
    const RecvFlow& recv = recv_flows_[i];
    const uint32_t peer = peers_[i / kNumChannels].rank;
    const auto channel = static_cast<Channel>(i % kNumChannels);
    const bool is_open = send.messages.Get() != send.acknowledged.Get() ||
                         recv.received.Get() != recv.committed.Get();
    if (!is_open && !is_awaited(team_.index, rank_, peer, channel)) continue;
    *text += "  " + NameOf(rank_) + " and " + NameOf(peer) + ", " + DescribeFlowAndWindow(i) + "\n";
  }
}

void Endpoint::AppendStats(std::vector<FlowStats>* stats) const {
  for (uint32_t i = 0; i < send_flows_.size(); ++i) {
    const SendFlow& send = send_flows_[i];
    const RecvFlow& recv = recv_flows_[i];
    if (send.messages.Get() == 0 && recv.received.Get() == 0) continue;
    stats->push_back(FlowStats{.team = team_.index,
                               .rank = rank_,
                               .peer = peers_[i / kNumChannels].rank,
                               .channel = static_cast<Channel>(i % kNumChannels),
                               .messages = send.messages.Get(),
                               .bytes = send.bytes.Get(),
                               .signals = send.signals.Get(),
                               .stalls = send.stalls.Get(),
                               .retries = send.retries.Get(),
                               .received = recv.received.Get(),
                               .reorders = recv.reorders.Get(),
                               .max_reorder_depth = recv.max_reorder_depth.Get(),
                               .duplicates = recv.duplicates.Get()});
  }
}

}  // namespace jax_ep
