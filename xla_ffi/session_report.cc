// What a session tells of itself: who hangs, and everything else for a bug report.
#include <unistd.h>

#include "proxy/base/log.h"
#include "xla_ffi/call_lines.h"
#include "xla_ffi/members.h"
#include "xla_ffi/report.h"
#include "xla_ffi/session_member.h"

namespace jax_ep {

// The ranks of `team` as this process sees them: its own, and those whose heaps it has mapped.
TeamView Session::ViewTeam(uint32_t team) const {
  TeamView view{.id = options_.IdOf(team),
                .node_size = options_.shape.node_size,
                .ranks = {},
                .active = {options_.active.begin(), options_.active.end()}};
  for (uint32_t rank = 0; rank < options_.shape.num_ranks; ++rank) {
    RankView& seen = view.ranks.emplace_back();
    for (const auto& member : members_) {
      if (member->id.team != team || member->executor == nullptr) continue;
      const Rank& viewer = member->executor->rank();
      std::byte* const heap = viewer.heaps[rank];
      if (heap == nullptr) continue;
      const auto flag = [&](Channel channel, uint32_t source) -> uint64_t {
        if (source >= options_.shape.num_ranks) return 0;
        std::byte* const flags = viewer.heaps[options_.shape.receiver_of(channel, rank, source)];
        if (flags == nullptr) return 0;
        return layout_.FlagIn(flags, channel, source).load(std::memory_order_relaxed);
      };
      seen = ViewOf(*reinterpret_cast<const ControlBlock*>(heap), flag);
      const auto* const order =
          reinterpret_cast<const ControlBlock*>(viewer.heaps[viewer.leader()]);
      seen.next_is_announced = order->order_count.load(std::memory_order_acquire) > seen.num_calls;
      for (const MonitorOptions::Peer& peer : member->watched) {
        if (peer.rank != rank) continue;
        seen.pid = peer.pid;
        seen.is_gone = monitor_ != nullptr && monitor_->HasEnded(peer.pid);
      }
      if (member->id.rank == rank) {
        seen.pid = static_cast<uint64_t>(getpid());
        seen.turn_since_ns = member->executor->oldest_queued_ns();
        if (const RingMemory* const ring = member->executor->rank().ring.memory) {
          const uint64_t taken = ring->tail.load(std::memory_order_relaxed);  // before head
          seen.num_untaken = ring->head.load(std::memory_order_relaxed) - taken;
        }
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
  if (!lease) return StateLine(options_.name, lifecycle_.Refused(), failure);
  const uint64_t now_ns = MonotonicNs();
  std::map<uint32_t, TeamView> views;  // by team
  for (const auto& member : members_) {
    if (!views.contains(member->id.team)) views[member->id.team] = ViewTeam(member->id.team);
  }
  Page page = PageOf(views, now_ns, LineOfCall);
  const bool is_leaving = is_leaving_.load(std::memory_order_relaxed);
  if (!failure.empty()) {
    page.culprit = is_leaving ? "closing" : "";  // nobody waits for anybody any more
  } else if (is_leaving) {
    page.culprit = "closing; " + page.culprit;
  }
  std::string out = StateLine(options_.name, page.culprit, failure) + page.lines;
  if (proxy_ == nullptr) return out;
  const auto is_awaited = [&](uint32_t team, uint32_t rank, uint32_t peer, Channel channel) {
    const auto it = views.find(team);
    if (it == views.end()) return false;
    const std::vector<RankView>& ranks = it->second.ranks;
    for (uint32_t waiting = 0; waiting < ranks.size(); ++waiting) {
      const RankView& view = ranks[waiting];
      if (!view.awaits_rank() || view.awaited != peer || view.channel != channel) continue;
      if (options_.shape.receiver_of(channel, waiting, peer) == rank) return true;
    }
    return false;
  };
  return out + std::string(kOpenFlowsTitle) + proxy_->DumpOpenFlows(is_awaited);
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
    const Rank& rank = member->executor->rank();
    auto* const first = reinterpret_cast<ControlBlock*>(rank.heaps[rank.leader()]);
    if (!page_claims_.Claim(waited, now_ns, first->reported_ns)) continue;
    LogWarning(std::string(kStallWarning) + Report());
    return;
  }
}

}  // namespace jax_ep
