// FailureLatch: the status word of one session. The first failure wins and is never cleared.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <utility>

#include "proxy/base/status.h"

namespace jax_ep {

// Whose fault a failure was. A session may have ranks of several teams, whose ranks count from 0
// each.
constexpr int64_t RankOfTeam(uint32_t team, uint32_t rank) { return int64_t{team} << 32 | rank; }
constexpr uint32_t TeamOf(int64_t rank_of_team) {
  return static_cast<uint32_t>(rank_of_team >> 32);
}

// Thread rule: any thread may call anything. Must outlive every executor, proxy thread and
// monitor of its session. `failed()` is one relaxed-cost load, meant for polling inside waits.
// No lock: a forked child may look (not Set) whatever other threads of its parent were at.
class FailureLatch {
 public:
  // Acquire pairs with the release in Set: a caller that sees true also sees the message.
  bool failed() const { return stage_.load(std::memory_order_acquire) == Stage::kFailed; }

  static constexpr int64_t kNobody = -1;
  // Somebody of a group so large that a message had no room for the name (proxy/blame.h).
  static constexpr int64_t kUnnamed = INT64_MAX;
  // No failure: a process agrees anew on who takes part (Group.agree), which ends this session.
  static constexpr int64_t kAgreement = -2;

  // Keeps `status` if it is the first failure. Returns true if it was kept. `blamed` is the rank
  // whose fault it was (RankOfTeam), where that is known: it travels to the other processes and
  // nodes, so that all of them name the same. Allocates nothing.
  bool Set(Status status, int64_t blamed = kNobody) {
    Stage seen = Stage::kGood;
    if (!stage_.compare_exchange_strong(seen, Stage::kWriting, std::memory_order_relaxed)) {
      // Whoever is told that it was not the first may read what the first has written.
      stage_.wait(Stage::kWriting, std::memory_order_acquire);
      return false;
    }
    status_ = std::move(status);
    blamed_rank_ = blamed;
    stage_.store(Stage::kFailed, std::memory_order_release);
    stage_.notify_all();
    return true;
  }

  // The first failure, or OK.
  Status status() const { return failed() ? status_ : Status::Ok(); }

  // Its message, or ""; lives as long as the latch.
  std::string_view message() const {
    return failed() ? std::string_view(status_.message()) : std::string_view();
  }

  // Of the first failure; kNobody before it.
  int64_t blamed_rank() const { return failed() ? blamed_rank_ : kNobody; }

 private:
  enum class Stage : uint8_t { kGood, kWriting, kFailed };

  std::atomic<Stage> stage_{Stage::kGood};
  Status status_;  // these two: written by who set kWriting, fixed from kFailed on
  int64_t blamed_rank_ = kNobody;
};

}  // namespace jax_ep
