// A Session is one group in this process: its ranks, their heaps, executors, proxy and monitor.
// Open sessions are found through SessionTable<Session>.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/launch.h"
#include "proxy/base/shared_memory.h"
#include "proxy/proxy.h"
#include "xla_ffi/executor.h"
#include "xla_ffi/monitor.h"
#include "xla_ffi/session_options.h"
#include "xla_ffi/session_table.h"
#include "xla_ffi/worker_pool.h"

namespace jax_ep {

// Life: Create -> LocalBlob, Connect -> Start -> Barrier -> (calls) -> Close.
// Thread rule: Python's thread drives that life; Enqueue, status and stats from any thread.
class Session {
 public:
  static Result<std::unique_ptr<Session>> Create(SessionOptions options);
  ~Session();  // Close()
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // What the other processes need to reach this one's ranks; opaque, for Python's exchange.
  std::string LocalBlob() const;
  // `blobs` maps every process of the group (this one may be left out) to its LocalBlob.
  Status Connect(const std::map<uint32_t, std::string>& blobs);
  // Starts proxy, monitor and executors. All processes must have connected before any starts.
  Status Start();
  // Returns when every rank of every team has entered it, or with the reason why not.
  Status Barrier(std::chrono::nanoseconds limit);
  // Drains (a barrier, bounded by peer_timeout, unless failed), stops every thread, unmaps. Calls
  // still queued fail with "closed". Idempotent.
  void Close();

  // The executor of the rank on `device_ordinal`, or null.
  Executor* FindExecutor(int64_t device_ordinal);
  // True if every rank of that device's team lives in this process (see CallSite).
  bool IsTeamLocal(int64_t device_ordinal) const;

  const SessionOptions& options() const { return options_; }
  FailureLatch& failure() { return *failure_; }
  uint64_t heap_bytes() const;  // of this process's ranks together
  std::vector<std::pair<LocalRank, const RankCounters*>> counters() const;
  std::vector<FlowStats> flow_stats() const;
  std::string DumpState() const;

 private:
  struct Member;  // one local rank
  struct PeerRecord;
  using PeerRecords = std::map<std::pair<uint32_t, uint32_t>, PeerRecord>;  // by (team, rank)

  explicit Session(SessionOptions options);
  Status AllocateMembers();
  Status ConnectMember(Member& member, const PeerRecords& records);
  uint32_t process_of(uint32_t team, uint32_t rank) const {
    return options_.team_processes[team][rank];
  }

  const SessionOptions options_;
  std::unique_ptr<FailureLatch> failure_;
  HeapLayout layout_;
  // Close() stops all threads before anything here is destroyed.
  std::vector<std::unique_ptr<Member>> members_;
  std::unique_ptr<ContinuationWatch> watch_;
  std::unique_ptr<Proxy> proxy_;
  std::unique_ptr<Monitor> monitor_;
  uint64_t barrier_epoch_ = 0;
  bool started_ = false;
  std::atomic<bool> closed_{false};
};

}  // namespace jax_ep
