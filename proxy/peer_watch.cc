#include "proxy/peer_watch.h"

#include <algorithm>

namespace jax_ep {
namespace {

// Ticks per peer_timeout, and bounds of the interval: often enough to be exact, seldom enough that
// an idle process sleeps.
constexpr int kTicksPerTimeout = 16;
constexpr PeerWatch::Duration kMinInterval = std::chrono::milliseconds(1);
constexpr PeerWatch::Duration kMaxInterval = std::chrono::milliseconds(500);
// A tick this many intervals late means that we did not run.
constexpr int kLateIntervals = 4;

}  // namespace

PeerWatch::PeerWatch(uint32_t num_peers, Duration peer_timeout, Duration first_timeout,
                     LifeSigns* signs)
    : signs_(*signs),
      peer_timeout_(peer_timeout),
      first_timeout_(std::max(peer_timeout, first_timeout)),
      interval_(std::clamp(peer_timeout / kTicksPerTimeout, kMinInterval, kMaxInterval)),
      peers_(num_peers) {}

void PeerWatch::Start(Time now) {
  last_tick_ = now;
  for (Peer& peer : peers_) peer.last_heard = peer.process_last_heard = now;
}

void PeerWatch::Refresh(Peer& peer, bool is_awaited, Time now) const {
  const bool is_own = peer.process == LifeSigns::kOwn;
  const uint64_t last_of_process = signs_.last_arrival(peer.process);
  peer.last_sign = std::max(peer.last_sign, peer.last_arrival);
  if (!is_awaited) peer.last_sign = std::max(peer.last_sign, last_of_process);
  if (is_own || last_of_process > num_arrivals_at_tick_) peer.process_last_heard = now;
  // Its process has just been started: what was sent to it before counts from now.
  const bool is_new = !peer.was_heard && (is_own || last_of_process > 0);
  const bool has_sign = is_new || peer.last_sign > num_arrivals_at_tick_;
  if (has_sign || (!is_awaited && (is_own || !peer.is_carrier))) peer.last_heard = now;
  if (has_sign || (!is_awaited && is_own)) peer.was_heard = true;
}

std::vector<PeerWatch::Dead> PeerWatch::Tick(Time now,
                                             const std::function<bool(uint32_t peer)>& is_awaited) {
  const Duration gap = now - last_tick_;
  const Duration not_listened = gap > kLateIntervals * interval_ ? gap - interval_ : Duration(0);
  last_tick_ = now;
  const uint64_t num_arrivals = signs_.num_arrivals();  // what comes meanwhile counts next time
  std::vector<Dead> dead;
  for (uint32_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer.last_heard += not_listened;
    peer.process_last_heard += not_listened;
    Refresh(peer, is_awaited(i), now);
    if (peer.ticks_to_live > 0) --peer.ticks_to_live;
    if (has_departed(i)) continue;
    const Duration silence = now - peer.last_heard;
    const bool is_lost = peer.ticks_to_live == 0;
    if (is_lost || silence > (peer.was_heard ? peer_timeout_ : first_timeout_)) {
      dead.push_back(Dead{.peer = i,
                          .silence = silence,
                          .was_heard = peer.was_heard,
                          .is_lost = is_lost,
                          .is_cut_off = now - peer.process_last_heard < silence / 2});
    }
  }
  num_arrivals_at_tick_ = num_arrivals;
  std::stable_sort(dead.begin(), dead.end(), [this](const Dead& a, const Dead& b) {
    return peers_[a.peer].last_sign < peers_[b.peer].last_sign;
  });
  return dead;
}

}  // namespace jax_ep
