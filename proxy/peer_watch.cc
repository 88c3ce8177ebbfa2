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

PeerWatch::PeerWatch(uint32_t num_peers, Duration peer_timeout, Duration first_timeout)
    : peer_timeout_(peer_timeout),
      first_timeout_(std::max(peer_timeout, first_timeout)),
      interval_(std::clamp(peer_timeout / kTicksPerTimeout, kMinInterval, kMaxInterval)),
      peers_(num_peers) {}

void PeerWatch::Start(Time now) {
  last_tick_ = now;
  for (Peer& peer : peers_) peer.last_heard = now;
}

std::vector<PeerWatch::Dead> PeerWatch::Tick(Time now) {
  const Duration gap = now - last_tick_;
  const Duration not_listened = gap > kLateIntervals * interval_ ? gap - interval_ : Duration(0);
  last_tick_ = now;
  std::vector<Dead> dead;
  for (uint32_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer.last_heard += not_listened;
    if (peer.last_arrival > num_arrivals_at_tick_) peer.last_heard = now;
    if (peer.ticks_to_live > 0) --peer.ticks_to_live;
    if (peer.has_departed) continue;
    const Duration silence = now - peer.last_heard;
    const bool was_heard = peer.last_arrival != 0;
    const bool is_lost = peer.ticks_to_live == 0;
    if (is_lost || silence > (was_heard ? peer_timeout_ : first_timeout_)) {
      dead.push_back(
          Dead{.peer = i, .silence = silence, .was_heard = was_heard, .is_lost = is_lost});
    }
  }
  num_arrivals_at_tick_ = num_arrivals_;
  std::stable_sort(dead.begin(), dead.end(), [this](const Dead& a, const Dead& b) {
    return peers_[a.peer].last_arrival < peers_[b.peer].last_arrival;
  });
  return dead;
}

}  // namespace jax_ep
