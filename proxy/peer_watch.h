// PeerWatch: when to send heartbeats, and which peers of an endpoint are dead: silent for too long,
// or out of reach. Pure logic: the time is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "proxy/life_signs.h"

namespace jax_ep {

// A peer lives as long as its process is heard, on whichever endpoints (LifeSigns). While an answer
// of the peer itself is awaited, an acknowledgement, only what comes from the peer itself counts:
// the way between the two may be broken though their processes hear each other over another.
class PeerWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::nanoseconds;

  struct Dead {
    uint32_t peer;     // index
    Duration silence;  // since it was last heard, or since Start
    bool was_heard;    // false: never since Start
    bool is_lost;      // see Lose
    bool is_cut_off;   // it owes an answer, while its process is heard
  };

  // A peer whose process was heard may be silent for `peer_timeout`, one that never was
  // for `first_timeout`. `signs` outlives this object.
  PeerWatch(uint32_t num_peers, Duration peer_timeout, Duration first_timeout, LifeSigns* signs);

  // Which process runs the peer, by LifeSigns. For each before Start.
  void SetProcess(uint32_t peer, uint32_t process) { peers_[peer].process = process; }
  // Whether its pair carries the heartbeat of the process (leads.h); true unless said. If not, its
  // silence is judged where it is heard, and here only whether it answers. For each before Start.
  void SetCarrier(uint32_t peer, bool is_carrier) { peers_[peer].is_carrier = is_carrier; }
  void Start(Time now);

  // A peer sent something. Cheap; called for every arrival.
  void Heard(uint32_t peer) { peers_[peer].last_arrival = signs_.Heard(peers_[peer].process); }
  // The way to a peer is broken for good. It is dead at the second tick from now: until then its
  // own report may arrive, and the culprit may be another, for whose sake it ended.
  void Lose(uint32_t peer) {
    if (peers_[peer].ticks_to_live == kAlive) peers_[peer].ticks_to_live = kTicksAfterLoss;
  }
  // A peer has left in order, with its process, and is watched no more.
  void Depart(uint32_t peer) { signs_.Depart(peers_[peer].process); }
  bool has_departed(uint32_t peer) const { return signs_.has_departed(peers_[peer].process); }

  // Heartbeats are due at each tick; several fit into a timeout.
  Duration interval() const { return interval_; }
  Time next_tick() const { return last_tick_ + interval_; }

  // Call at next_tick() or later, after polling. `is_awaited`: whether an answer of that peer is.
  // If it comes much later (this process was stopped or starved), the peers are given that time
  // back: it was us who did not listen. Returns the dead, the one that fell silent first before all
  // others: it is the culprit. Those after it may have ended because of it.
  std::vector<Dead> Tick(Time now, const std::function<bool(uint32_t peer)>& is_awaited);

 private:
  static constexpr int kAlive = -1;
  static constexpr int kTicksAfterLoss = 2;

  struct Peer {
    uint32_t process = LifeSigns::kOwn;
    bool is_carrier = true;
    uint64_t last_arrival = 0;  // from itself
    uint64_t last_sign = 0;     // the newest arrival that counted for it
    bool was_heard = false;     // a sign, at a tick
    int ticks_to_live = kAlive;
    Time process_last_heard;  // on whichever endpoint, for the message
    Time last_heard;          // as exact as ticks are; last_sign says who of two fell silent first
  };

  // Takes note of what has arrived since the last tick.
  void Refresh(Peer& peer, bool is_awaited, Time now) const;

  LifeSigns& signs_;
  Duration peer_timeout_;
  Duration first_timeout_;
  Duration interval_;
  Time last_tick_;
  uint64_t num_arrivals_at_tick_ = 0;  // of LifeSigns, at the last tick
  std::vector<Peer> peers_;
};

}  // namespace jax_ep
