// LifeSigns: the other processes of a group, and when each was last heard on any endpoint of this
// one.
//
// All ranks of a process live and die together: those of one proxy share its thread, and the
// proxies of a process share this object (on CPUs there is one proxy, on GPUs one or more for each
// rank). So what arrives from a process is a sign of life of all its ranks, one pair of ranks
// carries the heartbeat of two processes (leads.h), and one goodbye is that of all ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace jax_ep {

// Thread rule: IndexOf before any of the proxies starts, and on one thread; the rest on any.
class LifeSigns {
 public:
  // Index of the process that this object belongs to. It lives as long as it can look.
  static constexpr uint32_t kOwn = 0;

  // `own_id` tells the process from all others of the group; it travels in PeerBlob.
  explicit LifeSigns(uint64_t own_id) { processes_.emplace_back(own_id); }

  uint64_t own_id() const { return processes_[kOwn].id; }
  // The index of that process, a new one if it was not named before.
  uint32_t IndexOf(uint64_t id) {
    for (uint32_t i = 0; i < processes_.size(); ++i) {
      if (processes_[i].id == id) return i;
    }
    processes_.emplace_back(id);
    return static_cast<uint32_t>(processes_.size() - 1);
  }

  // Something arrived from it. Cheap; returns the number of this arrival. A tick between the two
  // steps may miss it, and sees the next one.
  uint64_t Heard(uint32_t process) {
    const uint64_t number = num_arrivals_.fetch_add(1, std::memory_order_relaxed) + 1;
    processes_[process].last_arrival.store(number, std::memory_order_relaxed);
    return number;
  }
  // Number of its latest arrival, or of one that came at the same time; 0: none.
  uint64_t last_arrival(uint32_t process) const {
    return processes_[process].last_arrival.load(std::memory_order_relaxed);
  }
  uint64_t num_arrivals() const {  // from all
    return num_arrivals_.load(std::memory_order_relaxed);
  }

  // It has said goodbye: its ranks send nothing more and are watched no more.
  void Depart(uint32_t process) {
    if (processes_[process].has_departed.exchange(true, std::memory_order_relaxed)) return;
    // Release pairs with num_departed: who sees the number sees who it was.
    num_departed_.fetch_add(1, std::memory_order_release);
  }
  bool has_departed(uint32_t process) const {
    return processes_[process].has_departed.load(std::memory_order_relaxed);
  }
  uint32_t num_departed() const { return num_departed_.load(std::memory_order_acquire); }

  // Of this process: each of its proxies begins to send, and has sent all and got it acknowledged.
  // Goodbye is said when none is left.
  void Begin() { num_sending_.fetch_add(1, std::memory_order_relaxed); }
  void End() { num_sending_.fetch_sub(1, std::memory_order_relaxed); }
  bool has_ended() const { return num_sending_.load(std::memory_order_relaxed) == 0; }

 private:
  // Threads write these at the rate of messages: no two of them share a cache line.
  static constexpr size_t kLineBytes = 64;

  struct alignas(kLineBytes) Process {
    explicit Process(uint64_t its_id) : id(its_id) {}

    const uint64_t id;
    std::atomic<uint64_t> last_arrival{0};
    std::atomic<bool> has_departed{false};
  };

  std::deque<Process> processes_;  // stay where they are
  alignas(kLineBytes) std::atomic<uint64_t> num_arrivals_{0};
  alignas(kLineBytes) std::atomic<uint32_t> num_departed_{0};
  std::atomic<uint32_t> num_sending_{0};
};

}  // namespace jax_ep
