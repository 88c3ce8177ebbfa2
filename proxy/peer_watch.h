// PeerWatch: when to send heartbeats, and which peers are dead: silent for too long, or out of
// reach. Pure logic: the time is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace jax_ep {

class PeerWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::nanoseconds;

  struct Dead {
    uint32_t peer;     // index
    Duration silence;  // since it was last heard, or since Start
    bool was_heard;    // false: never since Start
    bool is_lost;      // see Lose
  };

  // A peer that was heard may be silent for `peer_timeout`, one that was never heard for
  // `first_timeout`.
  PeerWatch(uint32_t num_peers, Duration peer_timeout, Duration first_timeout);

  void Start(Time now);

  // A peer sent something. Cheap; called for every arrival.
  void Heard(uint32_t peer) { peers_[peer].last_arrival = ++num_arrivals_; }
  // The way to a peer is broken for good. It is dead at the second tick from now: until then its
  // own report may arrive, and the culprit may be another, for whose sake it ended.
  void Lose(uint32_t peer) {
    if (peers_[peer].ticks_to_live == kAlive) peers_[peer].ticks_to_live = kTicksAfterLoss;
  }
  // A peer has left in order and is watched no more.
  void Depart(uint32_t peer) { peers_[peer].has_departed = true; }
  bool has_departed(uint32_t peer) const { return peers_[peer].has_departed; }

  // Heartbeats are due at each tick; several fit into a timeout.
  Duration interval() const { return interval_; }
  Time next_tick() const { return last_tick_ + interval_; }

  // Call at next_tick() or later, after polling. If it comes much later (this process was stopped
  // or starved), the peers are given that time back: it was us who did not listen. Returns the
  // dead, the one that fell silent first before all others: it is the culprit. Those after it may
  // have ended because of it.
  std::vector<Dead> Tick(Time now);

 private:
  static constexpr int kAlive = -1;
  static constexpr int kTicksAfterLoss = 2;

  struct Peer {
    uint64_t last_arrival = 0;  // number of its latest arrival; 0: none
    bool has_departed = false;
    int ticks_to_live = kAlive;
    Time last_heard;  // as exact as ticks are; last_arrival says who of two fell silent first
  };

  Duration peer_timeout_;
  Duration first_timeout_;
  Duration interval_;
  Time last_tick_;
  uint64_t num_arrivals_ = 0;          // from all peers
  uint64_t num_arrivals_at_tick_ = 0;  // the same at the last tick
  std::vector<Peer> peers_;
};

}  // namespace jax_ep
