// Watches the other processes of a node: a process that is gone, or whose heartbeat stopped, fails
// the session with the names of its ranks; a failure here is shown to node-mates at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "kernels/layout.h"
#include "proxy/base/failure.h"

namespace jax_ep {

struct MonitorOptions {
  std::string group_name;
  std::chrono::nanoseconds peer_timeout{};
  std::vector<ControlBlock*> own;  // heaps of this process's ranks
  struct Peer {                    // a node-mate of another process
    uint32_t rank = 0;
    uint64_t pid = 0;
    ControlBlock* control = nullptr;
  };
  std::vector<Peer> peers;
};

// Thread rule: owns one thread from construction to Stop. Heaps and latch must outlive it.
class Monitor {
 public:
  Monitor(MonitorOptions options, FailureLatch* failure);
  ~Monitor();  // Stop()
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // From now on a peer that closes or exits is no failure (this process is closing too).
  void ExpectDepartures() { departures_expected_.store(true, std::memory_order_release); }
  // Marks this process's ranks as closed, or failed, for its mates and joins. Idempotent.
  void Stop();

 private:
  struct Watched;
  void Loop();
  void Publish();  // own failure -> mates
  void Check(Watched& watched, std::chrono::steady_clock::time_point now);

  const MonitorOptions options_;
  FailureLatch* const failure_;
  std::atomic<bool> departures_expected_{false};
  std::atomic<bool> stopping_{false};
  Doorbell wake_{};
  bool published_ = false;
  std::thread thread_;
};

}  // namespace jax_ep
