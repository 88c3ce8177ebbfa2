// PeerWatch: when to send heartbeats and which peer has been silent for too long. Pure logic: the
// time is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
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
  };

  // A peer that was heard may be silent for `peer_timeout`, one that was never heard for
  // `first_timeout`.
  PeerWatch(uint32_t num_peers, Duration peer_timeout, Duration first_timeout);

  void Start(Time now);

  // A peer sent something. Cheap; called for every arrival.
  void Heard(uint32_t peer) { peers_[peer].is_heard = true; }
  // A peer has left in order and is watched no more.
  void Depart(uint32_t peer) { peers_[peer].has_departed = true; }
  bool has_departed(uint32_t peer) const { return peers_[peer].has_departed; }

  // Heartbeats are due at each tick; several fit into a timeout.
  Duration interval() const { return interval_; }
  Time next_tick() const { return last_tick_ + interval_; }

  // Call at next_tick() or later, after polling. If it comes much later (this process was stopped
  // or starved), the peers are given that time back: it was us who did not listen.
  std::optional<Dead> Tick(Time now);

 private:
  struct Peer {
    bool is_heard = false;  // since the last tick
    bool was_ever_heard = false;
    bool has_departed = false;
    Time last_heard;
  };

  Duration peer_timeout_;
  Duration first_timeout_;
  Duration interval_;
  Time last_tick_;
  std::vector<Peer> peers_;
};

}  // namespace jax_ep
