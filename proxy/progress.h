// Progress: who does a proxy's rounds, and when they pause: its own thread, or threads that wait
// for what it brings ("caller progress", ProxyPort). What a round does is the endpoints' business.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "proxy/base/doorbell.h"
#include "proxy/base/failure.h"
#include "proxy/base/status.h"
#include "proxy/endpoint.h"
#include "proxy/life_signs.h"

namespace jax_ep {

struct ProgressOptions {
  std::string group_name = {};
  // Whether threads that wait may do rounds, where the network wakes the thread dearly.
  bool caller_progress = true;
  // CPUs that the thread may run on; empty: any.
  std::vector<int> cpus = {};
};

// A round needs the mutex. The thread holds it except while it pauses; a helper tries for it, does
// one round and gives it back. What the thread is at (`state_`) changes under the mutex:
//
//   state    the thread                          ends by              a helper with the mutex
//   kAbsent  is not started, or has ended        Start                does nothing
//   kAwake   holds the mutex and does rounds     nothing to do        cannot be: it has no mutex
//   kNaps    pauses because somebody helps       bell, kHelpedNap     does a round
//   kSleeps  pauses; the transport rings for     bell, kMaxSleep      does a round; rings if it
//            arrivals                                                 leaves arrivals unfinished,
//                                                                     or the transport full
//
// (A pause also ends at the thread's next duty: heartbeats, a full transport to be tried again.)
// Beside it, without the mutex: num_helpers_, how many threads are between BeginHelp and EndHelp,
// which makes an idle thread nap instead of polling beside them; thread_waits_, set while the
// thread wants the mutex back: helpers keep off, so each delays it by one round at most. Heartbeats
// are the thread's, so it must not starve.
//
// Why no wake-up is lost. The thread reads the bell's count, then does a round, and pauses only if
// that round found nothing and the count is still the same. So whatever is rung for after the
// thread last looked ends the pause, or keeps it from beginning. It is rung for
//   - commands:  Kick returns with all of them sent by a round of its own, or rings;
//   - arrivals:  by the transport if the thread sleeps. A helper that polls one has published its
//                flag; what is left (the acknowledgement) is found by a thread that naps when its
//                nap ends, and is rung for if the thread sleeps;
//   - a helper that goes to sleep, or leaves a stream: EndHelp(leaves_work) rings;
//   - failures:  a helper latches its own and rings;
//   - Stop, after which the thread only naps until everything has left.
// tests/proxy/progress_model_test.cc searches all interleavings of a model of this, in which the
// transport is never full, and breaks each rule.
//
// Thread rule: Start and Stop on one thread, the rest on any. The endpoints' list may grow until
// Start; it, the signs, the bell and the latch outlive this object.
class Progress {
 public:
  using Endpoints = std::vector<std::unique_ptr<Endpoint>>;

  Progress(ProgressOptions options, const Endpoints* endpoints, LifeSigns* signs, Doorbell* bell,
           FailureLatch* failure);
  ~Progress() { Stop(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // \error kResourceExhausted  no thread
  Status Start();
  // Stop begins: the thread sends what is queued, and once all proxies of the process have come as
  // far it says goodbye and ends. Stop joins it (Proxy::StopAll).
  void BeginStop();
  void Stop();

  // See ProxyPort.
  void Kick();
  bool wants_help() const { return wants_help_; }
  void BeginHelp() { num_helpers_.fetch_add(1, std::memory_order_relaxed); }
  void EndHelp(bool leaves_work);
  bool Help();

 private:
  using Clock = std::chrono::steady_clock;
  enum class ThreadState : uint8_t { kAbsent, kAwake, kNaps, kSleeps };

  void Run(const std::stop_token& stop) noexcept;
  void RunRounds(const std::stop_token& stop, std::unique_lock<std::mutex>& lock);
  // A round on the calling thread, unless more than `max_commands` are queued. True if it was done
  // and nothing is left to be sent.
  bool HelpRound(uint64_t max_commands, bool* did_work);
  // One round of every endpoint; the first error, with whom it blames.
  Status Round(bool* did_work, int64_t* blamed) noexcept;
  // Heartbeats that are due, and their watch.
  Status Tick(Clock::time_point now, int64_t* blamed) noexcept;
  bool IsDrained() const;
  void EndSending();

  void Idle(uint32_t bell_count, std::unique_lock<std::mutex>& lock);
  // Lets go of the mutex until the bell has been rung since `bell_count` was read, for at most
  // `limit` and not beyond the next duty.
  void Pause(ThreadState state, uint32_t bell_count, std::chrono::nanoseconds limit,
             std::unique_lock<std::mutex>& lock);

  // Latches; who waits for an endpoint is woken.
  void Latch(Status status, int64_t blamed);
  // Tells the other processes what the latch holds: the thread's last act.
  void TellFailure();
  void SayToAll(ImmControl control, std::chrono::nanoseconds limit);

  const ProgressOptions options_;
  const Endpoints& endpoints_;
  LifeSigns& signs_;
  Doorbell& bell_;
  FailureLatch& failure_;
  Status exception_;              // made while there was memory
  bool is_slow_to_wake_ = false;  // fixed by Start, like the next two
  bool wants_help_ = false;
  bool must_poll_ = false;
  std::stop_source stop_;
  std::thread thread_;

  std::mutex mutex_;
  ThreadState state_ = ThreadState::kAbsent;  // guarded by mutex_
  std::atomic<int> num_helpers_{0};
  std::atomic<bool> thread_waits_{false};

  // The thread's own.
  int idle_rounds_ = 0;
  bool is_stopping_ = false;
  bool is_sending_ = false;  // LifeSigns counts it
  Clock::time_point idle_since_;
};

}  // namespace jax_ep
