// What a session tells of itself: who hangs, and everything else for a bug report.
#include <unistd.h>

#include <algorithm>

#include "proxy/base/log.h"
#include "xla_ffi/call_lines.h"
#include "xla_ffi/members.h"
#include "xla_ffi/report.h"
#include "xla_ffi/session_member.h"

namespace jax_ep {
namespace {

// A wait that is longer than timeout / kStallShare is worth a page in the log.
constexpr int kStallShare = 10;

std::string LineOfCall(uint64_t site) { return CallLines::Instance().Find(site); }

}  // namespace

// The ranks of `team` as this process sees them: its own, and those whose heaps it has mapped.
TeamView Session::ViewTeam(uint32_t team) const {
  TeamView view{.id = options_.IdOf(team), .node_size = options_.shape.node_size, .ranks = {}};
  for (uint32_t rank = 0; rank < options_.shape.num_ranks; ++rank) {
    RankView& seen = view.ranks.emplace_back();
    const uint32_t leader = rank / options_.shape.node_size * options_.shape.node_size;
    for (const auto& member : members_) {
      if (member->id.team != team || member->executor == nullptr) continue;
      std::byte* const heap = member->executor->rank().heaps[rank];
      if (heap == nullptr) continue;
      const auto flag = [&](Channel channel, uint32_t source) -> uint64_t {
        if (source >= options_.shape.num_ranks) return 0;
        return layout_.FlagIn(heap, channel, source).load(std::memory_order_relaxed);
      };
      seen = ViewOf(*reinterpret_cast<const ControlBlock*>(heap), flag);
      const auto* const order =
          reinterpret_cast<const ControlBlock*>(member->executor->rank().heaps[leader]);
      seen.next_is_announced = order->order_count.load(std::memory_order_acquire) > seen.num_calls;
      for (const MonitorOptions::Peer& peer : member->watched) {
        if (peer.rank == rank) seen.pid = peer.pid;
      }
      if (member->id.rank == rank) {
        seen.pid = static_cast<uint64_t>(getpid());
        seen.turn_since_ns = member->executor->oldest_queued_ns();
        break;
      }
    }
    seen.process = process_of(team, rank);
  }
  return view;
}

std::string Session::Report() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  const std::string failure = FailureText();
  if (!lease) return StateLine(options_.name, "closed", failure);
  const uint64_t now_ns = MonotonicNs();
  std::string culprit_text = "nobody is waiting", lines;
  uint64_t longest = 0;
  std::map<uint32_t, TeamView> views;  // by team
  for (uint32_t team = 0; team < options_.team_processes.size(); ++team) {
    if (std::none_of(members_.begin(), members_.end(),
                     [&](const auto& member) { return member->id.team == team; })) {
      continue;
    }
    const TeamView& view = views[team] = ViewTeam(team);
    const std::optional<Culprit> culprit = FindCulprit(view, now_ns, LineOfCall);
    if (culprit.has_value() && culprit->wait_ns > longest) {
      longest = culprit->wait_ns;
      culprit_text = CulpritText(view, culprit);
    }
    lines += RankLines(view, now_ns, LineOfCall);
  }
  if (is_leaving_.load(std::memory_order_relaxed)) culprit_text = "closing; " + culprit_text;
  std::string out = StateLine(options_.name, culprit_text, failure) + lines;
  if (proxy_ == nullptr) return out;
  const auto is_awaited = [&](uint32_t team, uint32_t rank, uint32_t peer, Channel channel) {
    const auto it = views.find(team);
    if (it == views.end()) return false;
    const RankView& waiting = it->second.ranks[rank];
    return waiting.awaits_rank() && waiting.awaited == peer && waiting.channel == channel;
  };
  return out + "  flows between nodes that are awaited or have messages under way:\n" +
         proxy_->DumpOpenFlows(is_awaited);
}

std::string Session::DumpState() const {
  std::string out = Report();
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease) return out;
  for (const auto& member : members_) {
    out += "  " + options_.NameOf(member->id) + ": flags (newest epoch by source rank):";
    for (uint32_t index = 0; index < kNumChannels; ++index) {
      const auto channel = static_cast<Channel>(index);
      std::string row;
      bool any = false;
      for (uint32_t source = 0; source < options_.shape.num_ranks; ++source) {
        const uint64_t value = layout_.FlagIn(member->heap.bytes().data(), channel, source)
                                   .load(std::memory_order_relaxed);
        any |= value != 0;
        row += " " + std::to_string(value);
      }
      if (any) {
        out += "\n    " + std::string(ChannelName(channel)) + ":" + row;
      }
    }
    out += "\n";
  }
  return proxy_ == nullptr ? out : out + proxy_->DumpState();
}

void Session::ReportStalls() {
  const uint64_t now_ns = MonotonicNs();
  const auto limit = static_cast<uint64_t>((options_.timeout / kStallShare).count());
  for (const auto& member : members_) {
    const Activity& activity = member->control_block()->activity;
    if (activity.phase.load(std::memory_order_relaxed) == Phase::kBetweenCalls &&
        activity.num_enqueued.load(std::memory_order_relaxed) <=
            activity.num_calls.load(std::memory_order_relaxed)) {
      continue;
    }
    RankView view = ViewOf(*member->control_block(), [](Channel, uint32_t) { return 0; });
    view.turn_since_ns = member->executor->oldest_queued_ns();
    const uint64_t waited = WaitedNs(view, now_ns);
    if (waited < limit) continue;
    // One page for each wait, by one process of the node.
    if (reported_ns_ >= now_ns - waited) continue;  // by this process, whatever the node
    const Rank& rank = member->executor->rank();
    std::atomic<uint64_t>& reported =
        reinterpret_cast<ControlBlock*>(rank.heaps[rank.node_begin()])->reported_ns;
    uint64_t before = reported.load(std::memory_order_relaxed);
    if (before >= now_ns - waited ||
        !reported.compare_exchange_strong(before, now_ns, std::memory_order_relaxed)) {
      continue;
    }
    reported_ns_ = now_ns;
    LogWarning("a rank has waited longer than a tenth of timeout_s\n" + Report());
    return;
  }
}

}  // namespace jax_ep
