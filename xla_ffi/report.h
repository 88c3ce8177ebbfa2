// Who hangs: one page about the ranks of a team, its culprit in the first line. Made of what the
// ranks show (proxy/abi/activity.h); knows nothing of sessions.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/layout.h"
#include "proxy/base/rank_name.h"

namespace jax_ep {

// One rank as this process sees it.
struct RankView {
  uint32_t process = 0;     // its index in the job
  uint64_t pid = 0;         // 0: not known
  bool is_visible = false;  // its control block is mapped here; else nothing below is known
  // Then calls are known once they have waited for long, and those that the host has enqueued, but
  // not what a graph replays.
  bool on_gpu = false;
  MemberState state = MemberState::kRunning;
  bool is_gone = false;  // its process has ended
  bool agrees = false;   // its process has called Group.agree
  // Copies of what its Activity said.
  uint64_t num_calls = 0, num_enqueued = 0;
  Phase phase = Phase::kBetweenCalls;
  uint32_t awaited = 0;
  Channel channel = Channel::kOrder;
  uint64_t signal = 0, arrived = 0;
  uint64_t since_ns = 0, beat_ns = 0;
  uint64_t elsewhere = 0;      // PackStay
  uint64_t turn_since_ns = 0;  // when the call came that has waited longest for its turn
  uint64_t epoch = 0, site = 0;
  std::string operation;
  uint64_t enqueued_ns = 0, enqueued_site = 0;  // of the newest call that was enqueued
  std::string enqueued_operation;
  // Commands of this rank that its proxy has not taken from the ring; known of this process's
  // ranks.
  uint64_t num_untaken = 0;
  // The order has the call that this rank executes next (of ranks with calls that wait for their
  // turn).
  bool next_is_announced = false;

  bool awaits_turn() const {
    return !on_gpu && phase == Phase::kBetweenCalls && num_enqueued > num_calls;
  }
  bool awaits_rank() const {
    return phase == Phase::kAwaitsSignal || phase == Phase::kAwaitsRing ||
           phase == Phase::kAwaitsBarrier;
  }
};

// Of the rank whose heap begins with `control`. `flag`: reads its flag of a channel and source.
RankView ViewOf(const ControlBlock& control,
                const std::function<uint64_t(Channel channel, uint32_t source)>& flag);

struct TeamView {
  TeamId id;
  uint32_t node_size = 1;
  std::vector<RankView> ranks;
  std::vector<uint8_t> active;  // by rank, 0: the group goes on without it; empty: all are

  bool IsActive(uint32_t rank) const { return active.empty() || active[rank] != 0; }
  // The first active rank, which announces calls (xla_ffi/order.h).
  uint32_t Announcer() const {
    const auto is_active = [](uint8_t is) { return is != 0; };
    const auto first = std::find_if(active.begin(), active.end(), is_active);
    return static_cast<uint32_t>(first - active.begin());
  }
};

struct Culprit {
  uint32_t rank = 0;
  std::string why;       // what it does, or does not
  uint32_t victim = 0;   // the rank that waits for it, itself if nobody is known to
  uint64_t wait_ns = 0;  // for how long
};

// Who keeps the others waiting; if nobody waits, who works longest; else nothing. `line_of`:
// CallLines::Find. A rank whose process has stopped, that has left or is not visible ends the
// search: what it waits for is not known.
using LineOf = std::function<std::string(uint64_t site)>;
std::optional<Culprit> FindCulprit(const TeamView& team, uint64_t now_ns, const LineOf& line_of);

// The first line's words without the group's name, and a line for each rank.
std::string CulpritText(const TeamView& team, const std::optional<Culprit>& culprit);
std::string RankLines(const TeamView& team, uint64_t now_ns, const LineOf& line_of);

// For how long the rank has waited for another one or for its turn; 0 if it does not.
uint64_t WaitedNs(const RankView& rank, uint64_t now_ns);

// The same of all teams that have a rank here, by their numbers. `culprit`: of the longest wait.
struct Page {
  std::string culprit, lines;
};
Page PageOf(const std::map<uint32_t, TeamView>& teams, uint64_t now_ns, const LineOf& line_of);

inline constexpr std::string_view kOpenFlowsTitle =
    "  flows between nodes that are awaited or have messages under way:\n";

// Who writes a page to the log by itself: a wait longer than timeout / kStallShare is worth one,
// each wait gets one, and of the processes of a node one writes it. One thread.
inline constexpr int kStallShare = 10;
inline constexpr std::string_view kStallWarning =
    "a rank has waited longer than a tenth of timeout_s\n";
class PageClaims {
 public:
  // `of_node`: ControlBlock::reported_ns of the node's first rank. True: this process writes it.
  bool Claim(uint64_t waited_ns, uint64_t now_ns, std::atomic<uint64_t>& of_node);

 private:
  uint64_t newest_ns_ = 0;  // page of this process, whatever the node
};

}  // namespace jax_ep
