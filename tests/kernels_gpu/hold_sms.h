// A kernel that takes multiprocessors away until the host lets go, or its time is over.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jax_ep::testing {

// Of one device. Allocating and freeing may wait for kernels that run, on any device: make all of
// these before the first holds, and let all go before the first goes.
class HeldSms {
 public:
  HeldSms();   // of the current device
  ~HeldSms();  // after LetGo
  HeldSms(const HeldSms&) = delete;
  HeldSms& operator=(const HeldSms&) = delete;

  // Returns when all multiprocessors but `num_free` are held.
  void Hold(uint32_t num_free, uint64_t at_most_ns);
  // Whether they still are: nobody has waited for the time to be over.
  bool IsHeld() const { return AllAre(State::kRuns); }
  void LetGo();  // and waits for the kernel's end

  // In pinned memory.
  struct State {
    static constexpr uint32_t kMostBlocks = 1024;
    enum Phase : uint32_t { kNotYet, kRuns, kEnded };
    std::atomic<uint32_t> lets_go;
    std::atomic<uint32_t> phases[kMostBlocks];  // each written by its block
  };

 private:
  bool AllAre(State::Phase phase) const;

  int device_ = 0;
  int shared_bytes_ = 0;  // of a multiprocessor, for one block
  uint32_t num_blocks_ = 0;
  cudaStream_t stream_ = nullptr;
  State* state_ = nullptr;
};

}  // namespace jax_ep::testing
