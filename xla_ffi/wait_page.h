// A page of its own for what Python waits for: Group.agree, while the group may have no session.
// Listed for `python -m jax_ep report` and SIGUSR1 as long as it lives.
#pragma once

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "proxy/abi/activity.h"
#include "proxy/base/log.h"
#include "xla_ffi/report.h"
#include "xla_ffi/reporter.h"

namespace jax_ep {

// Thread rule: any thread.
class WaitPage {
 public:
  // `who`: "group ep[2]#1: process 0 has not gone on", `why`: what it is in. The time, which counts
  // from here, stands between them.
  WaitPage(std::string who, std::string why)
      : who_(std::move(who)),
        why_(std::move(why)),
        entry_(ListForReports({.page = [this] { return Text(); }, .counters = nullptr})) {}
  WaitPage(const WaitPage&) = delete;
  WaitPage& operator=(const WaitPage&) = delete;

  void Set(std::string who, std::string why) {
    const std::lock_guard lock(mutex_);
    who_ = std::move(who);
    why_ = std::move(why);
  }

  std::string Text() const {
    char time[32];
    std::snprintf(time, sizeof(time), "%.1f s",
                  static_cast<double>(MonotonicNs() - begin_ns_) * 1e-9);
    const std::lock_guard lock(mutex_);
    return who_ + " for " + time + ": " + why_ + "\n";
  }

  // The page in the log, as Session writes it about calls.
  void Warn() const { LogWarning(std::string(kStallWarning) + Text()); }

  void End() { entry_.reset(); }

 private:
  const uint64_t begin_ns_ = MonotonicNs();
  mutable std::mutex mutex_;
  std::string who_, why_;
  std::unique_ptr<ReportEntry> entry_;  // the last: it calls Text
};

}  // namespace jax_ep
