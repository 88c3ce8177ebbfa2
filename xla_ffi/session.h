// A Session is one group in this process: its ranks, their heaps, executors, proxy and monitor.
// The session table, at the bottom, is the only process-wide mutable state of jax_ep.
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
#include "xla_ffi/site.h"
#include "xla_ffi/worker_pool.h"

namespace jax_ep {

// A rank of this process: which device runs it, and its place in the group.
struct LocalRank {
  int64_t device_ordinal = 0;  // as the FFI reports it (a global, sparse id on CPU)
  uint32_t team = 0;
  uint32_t rank = 0;
};

struct SessionOptions {
  int64_t session_id = 0;
  std::string name;  // for messages
  GroupShape shape;
  // team_processes[team][rank] = index of the process that owns the rank's device.
  std::vector<std::vector<uint32_t>> team_processes;
  std::vector<LocalRank> local_ranks;
  uint32_t process_index = 0;
  std::string transport;  // "none" (one node), or a name of proxy/transport/registry.h
  std::chrono::nanoseconds timeout{};
  std::chrono::nanoseconds peer_timeout{};
  int threads_per_rank = 1;
  bool debug = false;  // expert ids out of range fail the call that has them
};

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

// The session table: id -> session, or the name of the group that was closed under that id.
class SessionTable {
 public:
  static SessionTable& Instance();

  Status Add(std::shared_ptr<Session> session);
  // Keeps a tombstone, so that a late execution gets "group NAME is closed".
  void Remove(int64_t session_id);
  Result<std::shared_ptr<Session>> Find(int64_t session_id) const;

  SiteNumbering& sites() { return sites_; }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Session>> sessions_;
  std::map<int64_t, std::string> closed_;
  SiteNumbering sites_;
};

}  // namespace jax_ep
