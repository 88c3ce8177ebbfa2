// Watches the other processes of a node: a process that is gone, or whose heartbeat stopped, fails
// the session with the names of its ranks; a failure here is shown to node-mates at once. A process
// that has closed the group may go: whether anything here still needs it is for others to say.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/layout.h"
#include "proxy/base/failure.h"

namespace jax_ep {

struct MonitorOptions {
  std::string group_name;
  uint32_t num_teams = 1;  // of the group
  std::chrono::nanoseconds peer_timeout{};
  // Of the ranks of this process.
  std::vector<ControlBlock*> own = {};
  struct Peer {  // a node-mate of another process
    uint32_t team = 0;
    uint32_t rank = 0;
    uint64_t pid = 0;
    ControlBlock* control = nullptr;
  };
  std::vector<Peer> peers = {};
  // Called with every heartbeat while the group works: latches what it finds. May be empty.
  std::function<void()> check = {};
};

// What a rank says of the failure that the one of that name has shown it: "group NAME: rank 3
// failed first: CAUSE". The name of the group and "failed first" stand there once, however many
// ranks passed the failure on.
std::string FailedFirst(const std::string& group_name, const std::string& rank_name,
                        std::string_view shown);
// The text that a rank shows: `message` without the group's name, cut in the middle to `limit`.
std::string ShownFailure(const std::string& group_name, std::string_view message, size_t limit);

// Thread rule: owns one thread from Create to Stop. Heaps and latch must outlive it.
class Monitor {
 public:
  // \error kResourceExhausted  no thread
  static Result<std::unique_ptr<Monitor>> Create(MonitorOptions options, FailureLatch* failure);
  ~Monitor();  // Stop()
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Shows the mates that this process's ranks leave in peace; heartbeats go on until Stop. What
  // fails from here on is no longer shown to them.
  void Leave(Departure departure);
  // Shows the mates, for their reports, that this process agrees; all else goes on. If that is what
  // ends the session, Leave says so, whatever it is given. One caller at a time. Returns false if
  // it was called before.
  bool ShowAgreement();
  // Leave, or shows the failure, and joins. Idempotent.
  void Stop();
  // Whether that process of a mate has ended, as far as the kernel tells; on any thread.
  bool HasEnded(uint64_t pid) const;

 private:
  struct Watched;
  Monitor(MonitorOptions options, FailureLatch* failure);
  void Loop() noexcept;
  void Round(std::chrono::steady_clock::time_point now);
  void Publish();  // own failure -> mates
  void Check(Watched& watched, std::chrono::steady_clock::time_point now);

  const MonitorOptions options_;
  FailureLatch* const failure_;
  Status exception_;              // made while there was memory
  std::vector<Watched> watched_;  // of the thread, from its start on, but for what is constant
  std::atomic<bool> stopping_{false};
  Doorbell wake_{};
  std::atomic<bool> has_left_{false};
  bool published_ = false;
  std::thread thread_;
};

}  // namespace jax_ep
