#include "xla_ffi/report.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include "xla_ffi/elsewhere.h"

namespace jax_ep {
namespace {

// A monitor shows a heartbeat ten times a second or more often: after this its process stands.
constexpr uint64_t kSilenceNs = 2'000'000'000;

// Of shorter waits "0.0 s" would be said: they keep nobody.
constexpr uint64_t kShortestWaitNs = 50'000'000;

std::string Seconds(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(ns) * 1e-9);
  return text;
}

uint64_t Since(uint64_t then_ns, uint64_t now_ns) {
  return then_ns == 0 || then_ns > now_ns ? 0 : now_ns - then_ns;
}

std::string AtLine(uint64_t site, const LineOf& line_of) {
  const std::string line = site == 0 ? std::string() : line_of(site);
  return line.empty() ? line : " at " + line;
}

std::string CallText(const RankView& rank, const LineOf& line_of) {
  std::string text = "call " + std::to_string(rank.num_calls) + ", " + rank.operation;
  if (rank.epoch != 0) text += " epoch " + std::to_string(rank.epoch);
  return text + AtLine(rank.site, line_of);
}

// Of a GPU's rank that waits for nobody, or not for long.
std::string Enqueued(const RankView& rank, uint64_t now_ns, const LineOf& line_of) {
  std::string text = "no call of it is known to wait; its host has enqueued ";
  if (rank.num_enqueued == 0) return text + "none";
  return text + std::to_string(rank.num_enqueued) + ", the newest " +
         Seconds(Since(rank.enqueued_ns, now_ns)) + " ago: " + rank.enqueued_operation +
         AtLine(rank.enqueued_site, line_of);
}

std::string Untaken(const RankView& rank) {
  return "has not taken " + std::to_string(rank.num_untaken) + " of its commands";
}

// It has said good-bye, and waits for nobody any more.
bool HasLeft(const RankView& rank) {
  return rank.state == MemberState::kClosed && !rank.agrees && rank.phase != Phase::kAwaitsBarrier;
}

// It has ended without a good-bye.
bool IsGone(const RankView& rank) { return rank.is_gone && !HasLeft(rank); }

// The last that it has shown; since when is of no interest any more.
std::string Gone(const RankView& rank, const LineOf& line_of) {
  const std::string text = "gone, its process has ended";
  if (rank.on_gpu) {
    if (rank.num_enqueued == 0) return text;
    return text + "; the newest call that its host had enqueued: " + rank.enqueued_operation +
           AtLine(rank.enqueued_site, line_of);
  }
  return rank.num_calls == 0 ? text : text + "; its newest: " + CallText(rank, line_of);
}

bool IsSilent(const RankView& rank, uint64_t now_ns) {
  return rank.state == MemberState::kRunning && rank.beat_ns != 0 &&
         Since(rank.beat_ns, now_ns) > kSilenceNs;
}

// Of a rank that is in no call.
std::string Beside(const RankView& rank) {
  const std::string stay = StayText(rank.elsewhere);
  return stay.empty() ? stay : "; its process is in " + stay;
}

// What the rank does, whoever waits for it.
std::string Doing(const TeamView& team, const RankView& rank, uint64_t now_ns,
                  const LineOf& line_of) {
  const std::string for_long = " for " + Seconds(Since(rank.since_ns, now_ns));
  const auto awaited = [&] { return RankName(team.id, rank.awaited); };
  switch (rank.phase) {
    case Phase::kBetweenCalls:
      if (rank.on_gpu) return Enqueued(rank, now_ns, line_of) + Beside(rank);
      break;
    case Phase::kWorking:
      return CallText(rank, line_of) + ": has worked" + for_long + " and waits for nobody";
    case Phase::kAwaitsSignal:
      if (rank.on_gpu) return CallText(rank, line_of) + ": waits for " + awaited() + for_long;
      return CallText(rank, line_of) + ": waits for " + awaited() + for_long + " (" +
             std::string(ChannelName(rank.channel)) + " signal " + std::to_string(rank.signal) +
             ", arrived " + std::to_string(rank.arrived) + ")";
    case Phase::kAwaitsRing:
      if (rank.on_gpu) {
        return CallText(rank, line_of) + ": waits" + for_long +
               " for space in the command ring: its proxy takes nothing";
      }
      return CallText(rank, line_of) + ": waits" + for_long +
             " for space in the command ring, to send to " + awaited() + " (" +
             std::string(ChannelName(rank.channel)) + ")";
    case Phase::kAwaitsBarrier:
      return "in create_group or close: waits for " + awaited() + for_long;
  }
  std::string text = "in no call";
  if (rank.since_ns != 0) text += for_long;
  if (rank.num_calls > 0) text += " since " + CallText(rank, line_of);
  if (rank.awaits_turn()) {
    text += "; " + std::to_string(rank.num_enqueued - rank.num_calls) +
            " call(s) of its program wait for their turn: ";
    text += rank.next_is_announced ? "the one that the team executes next is not among them"
                                   : "rank 0 has not said which is next";
  }
  return text + Beside(rank);
}

}  // namespace

RankView ViewOf(const ControlBlock& control,
                const std::function<uint64_t(Channel channel, uint32_t source)>& flag) {
  const Activity& seen = control.activity;
  RankView view{.is_visible = true};
  const auto of = [](const auto& word) { return word.load(std::memory_order_relaxed); };
  view.state = control.state.load(std::memory_order_acquire);
  view.agrees = view.state != MemberState::kFailed && of(control.departure) == Departure::kAgrees;
  view.num_calls = of(seen.num_calls);
  view.num_enqueued = of(seen.num_enqueued);
  view.phase = of(seen.phase);
  view.awaited = of(seen.awaited);
  view.channel = static_cast<Channel>(of(seen.channel) % kNumChannels);
  view.signal = of(seen.signal);
  view.since_ns = of(seen.since_ns);
  view.beat_ns = of(seen.beat_ns);
  view.elsewhere = of(seen.elsewhere);
  view.turn_since_ns = of(seen.enqueued_ns);
  view.epoch = of(seen.epoch);
  view.site = of(seen.call.site);
  view.operation = seen.call.Operation();
  view.enqueued_ns = of(seen.enqueued_ns);
  view.enqueued_site = of(seen.enqueued.site);
  view.enqueued_operation = seen.enqueued.Operation();
  if (view.awaits_rank()) view.arrived = flag(view.channel, view.awaited);
  return view;
}

uint64_t WaitedNs(const RankView& rank, uint64_t now_ns) {
  if (!rank.is_visible) return 0;
  if (rank.awaits_rank()) return Since(rank.since_ns, now_ns);
  // Its turn could not come before it ended the call before.
  if (rank.awaits_turn()) return Since(std::max(rank.since_ns, rank.turn_since_ns), now_ns);
  return 0;
}

std::optional<Culprit> FindCulprit(const TeamView& team, uint64_t now_ns, const LineOf& line_of) {
  uint32_t victim = 0;
  uint64_t longest = 0;
  for (uint32_t rank = 0; rank < team.ranks.size(); ++rank) {
    const uint64_t waited = WaitedNs(team.ranks[rank], now_ns);
    if (waited <= longest || waited < kShortestWaitNs) continue;
    longest = waited;
    victim = rank;
  }
  if (longest == 0) {
    // The others may be in the program, which waits for the results of one that still works.
    for (uint32_t rank = 0; rank < team.ranks.size(); ++rank) {
      const RankView& view = team.ranks[rank];
      if (!view.is_visible || view.phase != Phase::kWorking) continue;
      const uint64_t worked = Since(view.since_ns, now_ns);
      if (worked <= longest || worked < kShortestWaitNs) continue;
      longest = worked;
      victim = rank;
    }
  }
  if (longest == 0) return std::nullopt;
  uint32_t at = victim;
  uint32_t before = victim;  // waits for `at`
  std::set<uint32_t> seen;
  while (true) {
    const RankView& rank = team.ranks[at];
    const auto found = [&](std::string why) {
      return Culprit{.rank = at, .why = std::move(why), .victim = victim, .wait_ns = longest};
    };
    if (!rank.is_visible) {
      std::string why =
          "it is in another node: ask there (what this one knows are the flows below)";
      if (team.ranks[before].num_untaken > 0) {
        why +=
            "; but the proxy of " + RankName(team.id, before) + " " + Untaken(team.ranks[before]);
      }
      return found(why);
    }
    if (IsGone(rank)) return found("it is " + Gone(rank, line_of));
    if (rank.state == MemberState::kFailed) return found("its process has failed");
    if (HasLeft(rank)) return found("it has closed the group");
    if (IsSilent(rank, now_ns)) {
      return found("its process has been silent for " + Seconds(Since(rank.beat_ns, now_ns)) +
                   ": stopped, swapped out, or starved; " + Doing(team, rank, now_ns, line_of));
    }
    if (rank.agrees) {
      return found("its process agrees anew with the others on who takes part (group.agree)");
    }
    if (rank.state == MemberState::kAgrees) {
      return found("its process was told that others agree anew, and has not called group.agree");
    }
    if (!seen.insert(at).second) {
      // They do, if what one of them has sent does not leave.
      for (const uint32_t member : seen) {
        if (team.ranks[member].num_untaken == 0) continue;
        at = member;
        return found("its proxy " + Untaken(team.ranks[at]) +
                     ", so the proxy or its network stands still; " +
                     Doing(team, team.ranks[at], now_ns, line_of));
      }
      return found("ranks wait for each other in a circle; " + Doing(team, rank, now_ns, line_of));
    }
    // On GPUs a rank signals itself for those that take no part, and may wait for that.
    const bool awaits_other = rank.awaits_rank() && rank.awaited < team.ranks.size() &&
                              rank.awaited != at && team.IsActive(rank.awaited);
    if (awaits_other) {
      before = std::exchange(at, rank.awaited);
    } else if (rank.awaits_turn() && !rank.next_is_announced && at != team.Announcer()) {
      before = std::exchange(at, team.Announcer());
    } else {
      const RankView& waits = team.ranks[victim];
      std::string why;
      if (at != victim && waits.phase == Phase::kAwaitsBarrier) {
        why = "it has not come to that point of create_group or close; ";
      } else if (at != victim && !rank.on_gpu && rank.num_calls < waits.num_calls) {
        why = "it has not made " + CallText(waits, line_of) + "; ";
      }
      return found(why + Doing(team, rank, now_ns, line_of));
    }
  }
}

std::string CulpritText(const TeamView& team, const std::optional<Culprit>& culprit) {
  if (!culprit.has_value()) return "nobody is waiting";
  const std::string who = RankName(team.id, culprit->rank) + " (process " +
                          std::to_string(team.ranks[culprit->rank].process) + ")";
  const std::string wait = " for " + Seconds(culprit->wait_ns) + ": ";
  if (culprit->rank == culprit->victim) return who + " has not gone on" + wait + culprit->why;
  return who + " has kept " + RankName(team.id, culprit->victim) + " waiting" + wait + culprit->why;
}

std::string RankLines(const TeamView& team, uint64_t now_ns, const LineOf& line_of) {
  std::string out;
  for (uint32_t index = 0; index < team.ranks.size(); ++index) {
    const RankView& rank = team.ranks[index];
    out += "  " + RankName(team.id, index) + ", process " + std::to_string(rank.process);
    if (rank.pid != 0) out += ", pid " + std::to_string(rank.pid);
    out += ": ";
    if (!team.IsActive(index)) {
      out += "not active, the group has agreed to go on without it\n";
      continue;
    }
    if (!rank.is_visible) {
      out += "in another node; this one knows only the flows below\n";
      continue;
    }
    if (IsGone(rank)) {
      out += Gone(rank, line_of) + "\n";
      continue;
    }
    if (rank.state == MemberState::kFailed) out += "FAILED, ";
    if (rank.agrees) {
      out += "in group.agree, ";
    } else if (rank.state == MemberState::kAgrees) {
      out += "told to call group.agree, ";
    }
    if (HasLeft(rank)) out += "has closed the group, ";
    if (IsSilent(rank, now_ns)) {
      out += "SILENT for " + Seconds(Since(rank.beat_ns, now_ns)) + ", ";
    }
    out += Doing(team, rank, now_ns, line_of);
    if (rank.num_untaken > 0) out += "; its proxy " + Untaken(rank);
    out += "\n";
  }
  return out;
}

Page PageOf(const std::map<uint32_t, TeamView>& teams, uint64_t now_ns, const LineOf& line_of) {
  Page page{.culprit = "nobody is waiting", .lines = {}};
  uint64_t longest = 0;
  for (const auto& [index, team] : teams) {
    const std::optional<Culprit> culprit = FindCulprit(team, now_ns, line_of);
    if (culprit.has_value() && culprit->wait_ns > longest) {
      longest = culprit->wait_ns;
      page.culprit = CulpritText(team, culprit);
    }
    page.lines += RankLines(team, now_ns, line_of);
  }
  return page;
}

bool PageClaims::Claim(uint64_t waited_ns, uint64_t now_ns, std::atomic<uint64_t>& of_node) {
  const uint64_t begin_ns = now_ns - waited_ns;
  if (newest_ns_ >= begin_ns) return false;
  uint64_t before = of_node.load(std::memory_order_relaxed);
  if (before >= begin_ns ||
      !of_node.compare_exchange_strong(before, now_ns, std::memory_order_relaxed)) {
    return false;
  }
  newest_ns_ = now_ns;
  return true;
}

}  // namespace jax_ep
