// What a GpuSession tells of itself: who hangs, and everything else for a bug report.
#include <unistd.h>

#include "proxy/base/log.h"
#include "xla_ffi/call_lines.h"
#include "xla_ffi/gpu_member.h"
#include "xla_ffi/members.h"

namespace jax_ep {
namespace {

// A wait whose note has been the same for so long is over.
constexpr uint64_t kNoteLifeNs = 5 * gpu::kLongWaitNs;

}  // namespace

void GpuSession::NoteCall(int64_t device, std::string_view operation, uint64_t site) {
  Activity& activity = FindMemberOn(members_, device)->control_block()->activity;
  activity.enqueued.Set(operation, site);
  activity.enqueued_ns.store(MonotonicNs(), std::memory_order_relaxed);
  activity.num_enqueued.fetch_add(1, std::memory_order_relaxed);
}

// Node-mates see the activity of each other, not the notes of each other's kernels.
void GpuSession::ShowWait(Member& member, uint64_t now_ns) {
  const gpu::WaitNote& note = member.status->wait;
  Activity& activity = member.control_block()->activity;
  const auto of = [](const auto& word) { return word.load(std::memory_order_relaxed); };
  const uint64_t written_ns = of(note.written_ns);
  if (written_ns == member.shown_note_ns) {
    if (of(activity.phase) == Phase::kBetweenCalls) return;
    if (now_ns - member.shown_at_ns <= kNoteLifeNs) return;
    TraceWait(member);
    activity.Enter(Phase::kBetweenCalls, now_ns);
    return;
  }
  const uint64_t begin_ns = now_ns - of(note.waited_ns);
  if (begin_ns > member.shown_at_ns && of(activity.phase) != Phase::kBetweenCalls) {
    TraceWait(member);  // of the wait before
  }
  member.shown_note_ns = written_ns;
  member.shown_at_ns = now_ns;
  activity.call.Set(NameOf(static_cast<gpu::Operation>(of(note.operation))), of(note.site));
  activity.num_calls.store(of(note.epoch), std::memory_order_relaxed);
  const uint32_t peer = of(note.peer);
  const Phase phase = peer == member.id.rank ? Phase::kAwaitsRing : Phase::kAwaitsSignal;
  activity.Await(phase, begin_ns, peer, Channel::kOrder, of(note.expected));
}

TeamView GpuSession::ViewTeam(uint32_t team) const {
  TeamView view{.id = options().IdOf(team),
                .node_size = options().shape.node_size,
                .ranks = {},
                .active = {options().active.begin(), options().active.end()}};
  for (uint32_t rank = 0; rank < options().shape.num_ranks; ++rank) {
    const auto see = [&](const ControlBlock& control, uint64_t pid) {
      RankView seen = ViewOf(control, [](Channel, uint32_t) { return uint64_t{0}; });
      seen.on_gpu = true;
      seen.pid = pid;
      return seen;
    };
    RankView& seen = view.ranks.emplace_back();
    if (const Member* const member = FindMember(members_, team, rank)) {
      seen = see(*member->control_block(), static_cast<uint64_t>(getpid()));
    }
    for (const auto& member : members_) {
      for (const MonitorOptions::Peer& peer : member->watched) {
        if (peer.team != team || peer.rank != rank) continue;
        seen = see(*peer.control, peer.pid);
        seen.is_gone = monitor_ != nullptr && monitor_->HasEnded(peer.pid);
      }
    }
    seen.process = options().team_processes[team][rank];
  }
  return view;
}

std::string GpuSession::Report() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  const std::string failure = NewestFailureText();
  const std::string& name = options().name;
  constexpr std::string_view kWhere = " on GPUs";
  if (!lease) return StateLine(name, lifecycle_.Refused(), failure, kWhere);
  std::map<uint32_t, TeamView> views;  // by team
  for (const auto& member : members_) {
    if (!views.contains(member->id.team)) views[member->id.team] = ViewTeam(member->id.team);
  }
  const Page page = PageOf(views, MonotonicNs(), LineOfCall);
  std::string out =
      StateLine(name, failure.empty() ? page.culprit : "", failure, kWhere) + page.lines;
  if (network_ == nullptr) return out;
  const auto is_awaited = [&](uint32_t team, uint32_t rank, uint32_t peer, Channel) {
    const auto it = views.find(team);
    if (it == views.end()) return false;
    const RankView& waiting = it->second.ranks[rank];
    return waiting.awaits_rank() && waiting.awaited == peer;
  };
  return out + std::string(kOpenFlowsTitle) + network_->DumpOpenFlows(is_awaited);
}

void GpuSession::ReportStalls() {
  const uint64_t now_ns = MonotonicNs();
  const auto limit = static_cast<uint64_t>((options().timeout / kStallShare).count());
  for (const auto& member : members_) {
    const Activity& activity = member->control_block()->activity;
    if (activity.phase.load(std::memory_order_relaxed) == Phase::kBetweenCalls) continue;
    const uint64_t waited = now_ns - activity.since_ns.load(std::memory_order_relaxed);
    if (waited < limit || waited > now_ns) continue;
    if (!page_claims_.Claim(waited, now_ns, ControlOfFirstOnNode(*member).reported_ns)) continue;
    LogWarning(std::string(kStallWarning) + Report());
    return;
  }
}

ControlBlock& GpuSession::ControlOfFirstOnNode(const Member& member) const {
  const uint32_t node_size = options().shape.node_size;
  uint32_t first = member.id.rank / node_size * node_size;
  while (!options().IsActive(first)) ++first;
  if (const Member* const found = FindMember(members_, member.id.team, first)) {
    return *found->control_block();
  }
  for (const MonitorOptions::Peer& peer : member.watched) {
    if (peer.rank == first) return *peer.control;
  }
  return *member.control_block();
}

std::string GpuSession::DumpState() const {
  std::string out = Report();
  const Lifecycle::Lease lease = lifecycle_.Enter();
  out += "  closed groups of this process keep " + std::to_string(api_->memory->retired_bytes()) +
         " bytes of device memory\n";
  if (!lease) return out;
  for (const auto& member : members_) {
    out +=
        "  " + options().NameOf(member->id) + " on GPU " + std::to_string(member->device()) +
        ": heap " + std::to_string(member->heap.bytes) + " bytes, " +
        (member->arena.bytes != 0 ? "arena " + std::to_string(member->arena.bytes) + " bytes"
                                  : "staged: " + member->no_arena) +
        (member->handle != nullptr && !api_->uses_bulk_copies(member->handle) ? ", no bulk copies"
                                                                              : "") +
        "\n";
  }
  return network_ == nullptr ? out : out + network_->DumpState();
}

}  // namespace jax_ep
