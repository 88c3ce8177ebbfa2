// Names of a program's executions, equal on all processes of a group.
//
// XLA counts the executions of each program from a number that the program's text determines, so
// its run ids are equal on processes that have run the same. Those of an elastic group need not
// have: one was a step ahead when a rank died, and a process that was started again counts from the
// beginning. What they run alike begins when they have agreed. So from then on (generation 1 and
// above) an execution is named by its distance from the first one of its program that came.
//
// That one must come first everywhere: two executions of one program that overlap, right behind an
// agreement, could come in different orders on different ranks. XLA begins them in order, so the
// one that is late is found: its id is below that of the first.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: any thread. Each session has one.
class RunNames {
 public:
  RunNames(std::string group_name, uint32_t generation)
      : group_name_(std::move(group_name)), generation_(generation) {}

  // The name of execution `run_id` of the program that `site` belongs to (CallSite::shared).
  // `is_local`: every rank of the team lives in this process, and no other has to find it.
  // \error kFailedPrecondition  it began before the first that came
  Result<int64_t> Name(uint64_t site, int64_t run_id, bool is_local) {
    if (generation_ == 0 || is_local) return run_id;
    constexpr int kNumberBits = 32;  // below the program's key
    int64_t first = 0;
    {
      std::lock_guard lock(mutex_);
      first = first_.emplace(site >> kNumberBits, run_id).first->second;
    }
    // XLA counts in 32 bits.
    const auto distance =
        static_cast<int32_t>(static_cast<uint32_t>(run_id) - static_cast<uint32_t>(first));
    if (distance >= 0) return distance;
    return FailedPrecondition(
        "group " + group_name_ +
        ": got the executions of a program out of order after Group.agree; wait for the first "
        "execution of each program there (jax.block_until_ready), and call jax.jit once for it");
  }

 private:
  const std::string group_name_;
  const uint32_t generation_;
  std::mutex mutex_;
  std::map<uint64_t, int64_t> first_;  // by the program's key
};

}  // namespace jax_ep
