// What a rank is doing, for whoever asks why a job hangs (xla_ffi/report.h). In the rank's control
// block, so that node-mates of other processes see it without asking.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "proxy/abi/channel.h"

namespace jax_ep {

enum class Phase : uint32_t {
  kBetweenCalls = 0,  // no call runs: none has come, or none has its turn
  kWorking = 1,       // a call runs and waits for nobody
  kAwaitsSignal = 2,  // of `awaited`, on `channel`
  kAwaitsRing = 3,    // space in the command ring; the next command goes to `awaited`
  kAwaitsBarrier = 4  // of create_group or close: for `awaited`
};

// On clocks that all processes of a host share; 0 is "never".
inline uint64_t NanosecondsOf(std::chrono::steady_clock::time_point time) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}
inline uint64_t MonotonicNs() { return NanosecondsOf(std::chrono::steady_clock::now()); }

// What a call is, for people.
struct CallName {
  static constexpr size_t kWords = 3;

  std::array<std::atomic<uint64_t>, kWords> operation;  // NUL-padded
  std::atomic<uint64_t> site;  // its name in its program (xla_ffi/site.h), or 0

  void Set(std::string_view name, uint64_t call_site) {
    std::array<uint64_t, kWords> words{};
    std::memcpy(words.data(), name.data(), std::min(name.size(), sizeof(words)));
    for (size_t i = 0; i < kWords; ++i) operation[i].store(words[i], std::memory_order_relaxed);
    site.store(call_site, std::memory_order_relaxed);
  }
  std::string Operation() const {
    std::array<char, kWords * sizeof(uint64_t) + 1> text{};
    for (size_t i = 0; i < kWords; ++i) {
      const uint64_t word = operation[i].load(std::memory_order_relaxed);
      std::memcpy(text.data() + i * sizeof(word), &word, sizeof(word));
    }
    return text.data();
  }
};

// Zero-initialised memory is a valid start. All stores and loads are relaxed, and a report may mix
// two moments: it is read by people, about ranks that have not moved for seconds.
// On CPUs written by the thread that runs the rank's calls; on GPUs by the one that watches the
// device, which knows of a call only when it waits for long (gpu::WaitNote). The second half is
// written by whoever enqueues, and by the monitor (beat_ns, elsewhere).
struct Activity {
  std::atomic<uint64_t> num_calls;  // begun; the newest runs or has ended
  std::atomic<Phase> phase;
  std::atomic<uint32_t> awaited;   // rank of the team
  std::atomic<uint64_t> since_ns;  // begin of the phase
  std::atomic<uint64_t> epoch;     // of the newest call
  std::atomic<uint64_t> signal;    // awaited value
  std::atomic<uint32_t> channel;
  CallName call;  // the newest
  // On a line of their own: other threads write them while a call runs.
  alignas(64) std::atomic<uint64_t> num_enqueued;  // calls that XLA has handed over
  std::atomic<uint64_t> enqueued_ns;               // time of the newest
  std::atomic<uint64_t> beat_ns;                   // time of the newest heartbeat
  std::atomic<uint64_t> elsewhere;  // what the process is in beside calls (xla_ffi/elsewhere.h)
  CallName enqueued;                // the newest, on GPUs

  void BeginCall(uint64_t number, std::string_view name, uint64_t call_site) {
    call.Set(name, call_site);
    epoch.store(0, std::memory_order_relaxed);
    num_calls.store(number, std::memory_order_relaxed);
    Enter(Phase::kWorking, MonotonicNs());
  }
  void Enter(Phase next, uint64_t now_ns) {
    since_ns.store(now_ns, std::memory_order_relaxed);
    phase.store(next, std::memory_order_relaxed);
  }
  // For the phases that await a rank.
  void Await(Phase next, uint64_t begin_ns, uint32_t rank, Channel on, uint64_t value) {
    awaited.store(rank, std::memory_order_relaxed);
    channel.store(static_cast<uint32_t>(on), std::memory_order_relaxed);
    signal.store(value, std::memory_order_relaxed);
    Enter(next, begin_ns);
  }
};

}  // namespace jax_ep
