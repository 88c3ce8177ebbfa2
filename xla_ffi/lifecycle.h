// Lifecycle: who may use a session's memory and threads, and until when. CPU and GPU sessions have
// one each.
//
//   open --BeginClose--> closing --Seal--> sealed --EndClose--> closed
//
// Whoever touches what Close frees holds a lease meanwhile: a handler that submits a call, a look
// at the state. Leases are short (nothing waits for a peer under one). While the session closes
// they are still given, for executions that XLA has enqueued come through here; once it is sealed
// none is given, and Seal returns when the last one is back: then everything can go.
//
// A child made by fork has the memory of its parent's session but none of its threads: there no
// lease is given, and nobody may close.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "proxy/base/status.h"

namespace jax_ep {

inline Status GroupIsClosed(const std::string& name) {
  return FailedPrecondition("group " + name +
                            " is closed; create a new one with jax_ep.create_group");
}

// To a call that comes while the session closes: its execution was enqueued before, or beside it.
inline Status GroupWasClosed(const std::string& name) {
  return FailedPrecondition("group " + name +
                            " was closed by this process while this step ran; wait for the "
                            "results of its steps before close");
}

// What a child of the process that made it is to its parent's group; so says Python, too.
inline constexpr std::string_view kIsFork =
    "this process is a fork of the group's process, and takes no part in it";

// The first line of a session's page. Of a group that has failed: what failed first, so that the
// culprit stands in front; then the state, where there is one. `failure` may be "". `where` stands
// behind the group's name.
inline std::string StateLine(const std::string& group, std::string_view state,
                             std::string_view failure, std::string_view where = "") {
  std::string line = "group " + group + std::string(where) + ": ";
  if (failure.empty()) return line + std::string(state) + "\n";
  const std::string prefix = "group " + group + ": ";
  if (failure.starts_with(prefix)) failure.remove_prefix(prefix.size());
  line += "FAILED: " + std::string(failure);
  if (!state.empty()) line += " (" + std::string(state) + ")";
  return line + "\n";
}

// For the destructor of a session in a forked child: `owned` are never destroyed. Their threads are
// the parent's, there is nothing to join, and their memory is not for the child to touch.
template <typename... Owned>
void Leak(Owned&... owned) {
  (..., (void)new Owned(std::move(owned)));
}

// Thread rule: any thread may call anything; Seal and EndClose: who got true from BeginClose.
class Lifecycle {
 public:
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (owner_ != nullptr) owner_->GiveBack();
    }
    explicit operator bool() const { return owner_ != nullptr; }

   private:
    friend class Lifecycle;
    explicit Lease(Lifecycle* owner) : owner_(owner) {}
    Lifecycle* owner_ = nullptr;
  };

  // Empty once the session is sealed, and in a forked child.
  Lease Enter() {
    if (is_forked()) return {};
    // Acquire pairs with Seal: who is refused sees what was written before.
    if ((leases_.fetch_add(1, std::memory_order_acquire) & kSealed) == 0) return Lease(this);
    GiveBack();
    return {};
  }

  // True for one caller, who closes. Others wait until that one is done. False in a forked child.
  bool BeginClose() {
    if (is_forked()) return false;
    Stage seen = Stage::kOpen;
    if (stage_.compare_exchange_strong(seen, Stage::kClosing, std::memory_order_acq_rel)) {
      return true;
    }
    stage_.wait(Stage::kClosing, std::memory_order_acquire);
    return false;
  }

  void Seal() {
    uint64_t left = leases_.fetch_or(kSealed, std::memory_order_acq_rel);
    while ((left & ~kSealed) != 0) {
      left = leases_.load(std::memory_order_acquire);
      if ((left & ~kSealed) != 0) leases_.wait(left, std::memory_order_acquire);
    }
  }

  void EndClose() {
    stage_.store(Stage::kClosed, std::memory_order_release);
    stage_.notify_all();
  }

  // To a handler that Enter has given no lease. `failure`: what the session had failed with when it
  // was closed, or "".
  Status Refusal(const std::string& name, const std::string& failure) const {
    if (is_forked()) {
      return FailedPrecondition("group " + name + ": " + std::string(kIsFork) +
                                "; run the group's programs in the parent");
    }
    if (!failure.empty()) return FailedPrecondition(failure);
    const bool is_over = stage_.load(std::memory_order_acquire) == Stage::kClosed;
    return is_over ? GroupIsClosed(name) : GroupWasClosed(name);
  }
  // The same for StateLine.
  std::string_view Refused() const { return is_forked() ? kIsFork : "closed"; }

  bool is_open() const { return stage_.load(std::memory_order_acquire) == Stage::kOpen; }
  // This process is a child of the one that made the session.
  bool is_forked() const { return getpid() != creator_; }

 private:
  enum class Stage : uint32_t { kOpen, kClosing, kClosed };
  static constexpr uint64_t kSealed = uint64_t{1} << 63;

  void GiveBack() {
    // Release: what was done under the lease happens before what follows Seal.
    if (leases_.fetch_sub(1, std::memory_order_acq_rel) == (kSealed | 1)) leases_.notify_all();
  }

  const pid_t creator_ = getpid();
  std::atomic<Stage> stage_{Stage::kOpen};
  std::atomic<uint64_t> leases_{0};  // how many are out, and kSealed
};

}  // namespace jax_ep
