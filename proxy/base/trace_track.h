// One stream of a trace (trace.h): what a rank did, or its proxy, as fixed records in a ring that
// the trace's thread empties.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace jax_ep {

// What the fields of a TraceEvent mean. jax_ep/_cli/trace_files.py has the same numbers.
enum class TraceKind : uint8_t {
  // Of a rank.
  kCall = 0,      // name; value = epoch, detail = call site or 0, extra = when XLA handed it over
  kPhase = 1,     // name; a part of a call, with `peer` or kNobody
  kWait = 2,      // until signal `value` of `peer` on `channel`; detail = rank that holds the flag
  kRingFull = 3,  // until the command ring had space for a command to `peer` on `channel`
  kBarrier = 4,   // of create_group or close: until `peer` was there; value = epoch
  kSignal = 5,    // at a moment: `value` to `peer` on `channel`
  // Of its proxy.
  kCommand = 6,       // name = its Op, to `peer` on `channel`; from the ring until it is posted;
                      // value = signals of the flow so far, detail = bytes, extra = messages so far
  kFlag = 7,          // at a moment: messages of `peer` on `channel` became visible; value = the
                      // flag, detail = messages so far
  kAcknowledged = 8,  // at a moment: `peer` has acknowledged `value` messages on `channel`
};

// Times are MonotonicNs (proxy/abi/activity.h).
struct TraceEvent {
  static constexpr uint16_t kNobody = UINT16_MAX;

  uint64_t begin_ns = 0, end_ns = 0;
  uint64_t value = 0, detail = 0, extra = 0;
  uint16_t peer = kNobody;
  TraceKind kind = TraceKind::kCall;
  uint8_t channel = 0;
  uint8_t name = 0;  // of NameIndex, or an Op
  uint8_t unused[3] = {};
};
static_assert(sizeof(TraceEvent) == 48, "the files have records of this size");

// Thread rule: one writer at a time calls Add, NameIndex and at last End, one reader the rest.
class TraceTrack {
 public:
  static constexpr uint64_t kCapacity = uint64_t{1} << 15;  // events: 1.5 MiB
  static constexpr size_t kMaxNames = 64;

  TraceTrack(uint32_t id, std::string label)
      : id_(id), label_(std::move(label)), events_(new TraceEvent[kCapacity]) {}

  uint32_t id() const { return id_; }
  const std::string& label() const { return label_; }

  // Never waits: an event that finds the ring full is counted and dropped.
  void Add(const TraceEvent& event) {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    if (head - seen_tail_ == kCapacity) {
      // Acquire pairs with the release of Read: its copies are made.
      seen_tail_ = tail_.load(std::memory_order_acquire);
      if (head - seen_tail_ == kCapacity) {
        num_dropped_.fetch_add(1, std::memory_order_relaxed);
        return;
      }
    }
    events_[head % kCapacity] = event;
    head_.store(head + 1, std::memory_order_release);
    // The reader has had the line since: fetch it while the call goes on.
    __builtin_prefetch(&events_[(head + 2) % kCapacity], /*rw=*/1);
  }

  // Events that the writer knows to have missed.
  void NoteDropped(uint64_t count) { num_dropped_.fetch_add(count, std::memory_order_relaxed); }

  // The number by which events name `text`, which must live as long as the process.
  uint8_t NameIndex(const char* text) {
    const size_t known = num_names_.load(std::memory_order_relaxed);
    for (size_t i = 0; i < known; ++i) {
      if (names_[i] == text) return static_cast<uint8_t>(i);
    }
    if (known == kMaxNames) return kMaxNames - 1;
    names_[known] = text;
    num_names_.store(known + 1, std::memory_order_release);
    return static_cast<uint8_t>(known);
  }

  // The writer adds no more.
  void End() { has_ended_.store(true, std::memory_order_release); }
  // If so, all of its events can be read.
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }

  // The oldest events that nobody has read, at most up to the end of the ring's memory: calls
  // `take(events, count)` once if there are any, and returns their number.
  template <typename Take>
  uint64_t Read(Take&& take) {
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    const uint64_t head = head_.load(std::memory_order_acquire);
    const uint64_t count = std::min(head - tail, kCapacity - tail % kCapacity);
    if (count == 0) return 0;
    take(&events_[tail % kCapacity], count);
    tail_.store(tail + count, std::memory_order_release);
    return count;
  }
  size_t num_names() const { return num_names_.load(std::memory_order_acquire); }
  const char* name(size_t index) const { return names_[index]; }
  uint64_t num_dropped() const { return num_dropped_.load(std::memory_order_relaxed); }

 private:
  const uint32_t id_;
  const std::string label_;
  const std::unique_ptr<TraceEvent[]> events_;
  std::array<const char*, kMaxNames> names_{};
  std::atomic<size_t> num_names_{0};
  std::atomic<uint64_t> num_dropped_{0};
  std::atomic<bool> has_ended_{false};
  alignas(64) std::atomic<uint64_t> head_{0};
  uint64_t seen_tail_ = 0;  // the writer's
  alignas(64) std::atomic<uint64_t> tail_{0};
};

}  // namespace jax_ep
