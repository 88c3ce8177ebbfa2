// A Session is one group in this process: its ranks, their heaps, executors, proxy and monitor.
// Open sessions are found through SessionTable<Session>.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/launch.h"
#include "proxy/abi/command.h"
#include "proxy/base/shared_memory.h"
#include "proxy/base/trace.h"
#include "proxy/proxy.h"
#include "xla_ffi/executor.h"
#include "xla_ffi/lifecycle.h"
#include "xla_ffi/monitor.h"
#include "xla_ffi/report.h"
#include "xla_ffi/run_names.h"
#include "xla_ffi/session_options.h"
#include "xla_ffi/session_table.h"
#include "xla_ffi/totals.h"
#include "xla_ffi/worker_pool.h"

namespace jax_ep {

// Life: Create -> LocalBlob, Connect -> Start -> Barrier -> (calls) -> Close.
// Thread rule: Python's thread drives that life; what stands below Close from any thread, also
// beside Close and after it.
class Session {
 public:
  static Result<std::unique_ptr<Session>> Create(SessionOptions options);
  ~Session();  // Close(); in a forked child nothing is touched
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // What the other processes need to reach this one's ranks; opaque, for Python's exchange.
  std::string LocalBlob() const;
  // `blobs` maps every process of the group (this one may be left out) to its LocalBlob.
  Status Connect(const std::map<uint32_t, std::string>& blobs);
  // Starts proxy, monitor and executors. All processes must have connected before any starts.
  Status Start();
  // Of all ranks of this process. Returns when every rank of every team has entered it, or with the
  // reason why not.
  Status Barrier(std::chrono::nanoseconds limit);
  // Ends the calls that XLA has handed over, says good-bye to the other processes, and waits until
  // all of them that live have said theirs (bounded by timeout, or by peer_timeout if the program
  // ended): they may still read this process's memory, and a rank that is late with its own close
  // finds nobody dead. `departure` is what those are told that call an operation after all. Then
  // stops every thread and frees all memory, however long others keep this object. Whoever has
  // failed leaves at once. Idempotent.
  void Close(Departure departure = Departure::kClosed);
  // Tells the others that this process's ranks take part in no call beyond those that XLA has
  // handed over: a process that needs one fails at once, and is told to agree, too. This session
  // goes on until it is closed. Nothing if it has failed. Waits for room in rings, at most for
  // peer_timeout. Not beside Close; one caller at a time.
  void BeginToAgree();

  // Held by who uses an Executor of this session.
  Lifecycle::Lease Enter() { return lifecycle_.Enter(); }
  Lifecycle& lifecycle() { return lifecycle_; }
  // The executor of the rank on `device_ordinal`, or null. Under a lease.
  Executor* FindExecutor(int64_t device_ordinal);
  // Whether the ranks of each team in this process have been given the same number of calls: else
  // some device has still to reach a call that another one is in.
  bool IsBalanced() const;
  // The rank on `device_ordinal`, or null. At any time.
  const LocalRank* FindLocalRank(int64_t device_ordinal) const;
  // True if every rank of that device's team lives in this process (see CallSite).
  bool IsTeamLocal(int64_t device_ordinal) const;

  const SessionOptions& options() const { return options_; }
  RunNames& runs() { return runs_; }
  // Execution `run_id` has a call here; which was the newest to have one (SessionTable).
  void NoteRun(int64_t run_id) { newest_run_.store(run_id, std::memory_order_relaxed); }
  int64_t newest_run() const { return newest_run_.load(std::memory_order_relaxed); }
  FailureLatch& failure() { return *failure_; }
  // The first failure's message, or "". What happens to others while this process leaves is none of
  // its own.
  std::string FailureText() const { return FirstFailure().message(); }
  // To a call that the close cuts: the first failure, or that the group was closed.
  Status WhyClosed() const;
  uint64_t heap_bytes() const;  // of this process's ranks together; 0 after Close
  Result<std::vector<RankTotals>> totals() const;  // waits for nothing, at any time
  std::vector<FlowStats> flow_stats() const;
  // The same and flows as a JSON object (totals.h).
  std::string CountersJson() const;
  // One page: who hangs, in the first line; what every rank does, and for whom it waits.
  std::string Report() const;
  // The same and more, for a bug report.
  std::string DumpState() const;

 private:
  struct Member;  // one local rank
  // Through whom this process and another one tell each other what concerns all of their ranks.
  struct Lead {
    Member* member = nullptr;  // here
    uint32_t peer = 0;         // there
  };
  struct PeerRecord;
  using PeerRecords = std::map<std::pair<uint32_t, uint32_t>, PeerRecord>;  // by (team, rank)

  explicit Session(SessionOptions options);
  Status FirstFailure() const;  // of FailureText, or OK
  Status AllocateMembers();
  Status ConnectMember(Member& member, const PeerRecords& records);
  // Starts the proxy and notes down what it chose; see session_barrier.cc for all of these.
  Status StartProxy();
  Status Push(const Rank& rank, const Command& command, const Deadline& deadline) const;
  Status PushToAll(Op op, uint64_t epoch, const Deadline& deadline) const;
  // Until everything that the ranks of this process have sent has arrived.
  Status AwaitQuiet(uint64_t epoch, const Deadline& deadline) const;
  Status AwaitBarrierOf(const Member& member, uint32_t peer, uint64_t epoch,
                        std::chrono::nanoseconds limit, const Deadline& deadline) const;
  // Ends the calls that were taken; takes no other.
  Status EndCalls();
  // Of a local rank: writes kWireUnitBytes at `offset` of all heaps that farewells go to.
  Status LeaveWithAll(const Member& member, uint64_t offset,
                      const std::function<void(std::byte*)>& write, const Deadline& deadline) const;
  // Writes this process's farewells and waits for those of the others.
  Status SayGoodbye(Departure departure);
  // For the monitor: fails the group if a call needs a rank that has said good-bye.
  void CheckFarewells() const;
  // For the monitor: writes the report to the log, once for each wait, when a local rank has waited
  // longer than a tenth of timeout. Of the processes of a node, one does.
  void ReportStalls();
  TeamView ViewTeam(uint32_t team) const;
  uint32_t process_of(uint32_t team, uint32_t rank) const {
    return options_.team_processes[team][rank];
  }

  const SessionOptions options_;
  std::unique_ptr<FailureLatch> failure_;
  HeapLayout layout_;
  std::vector<std::pair<LocalRank, std::unique_ptr<RankCounters>>> counters_;
  mutable Lifecycle lifecycle_;
  // Close empties these; from Start to there they change under no lease.
  std::vector<std::unique_ptr<Member>> members_;
  std::unique_ptr<ContinuationWatch> watch_;
  std::unique_ptr<Proxy> proxy_;
  // By (team, process), of the processes that have ranks of the team on other nodes.
  std::map<std::pair<uint32_t, uint32_t>, Lead> leads_;
  std::unique_ptr<Monitor> monitor_;
  std::shared_ptr<Tracer> tracer_;  // null unless JAX_EP_TRACE is set
  std::atomic<uint64_t> barrier_epoch_{0};
  bool started_ = false;
  RunNames runs_;
  std::atomic<int64_t> newest_run_{kNoRun};
  PageClaims page_claims_;  // of the monitor's thread
  // What is known of a closed session: written before it leaves, and before it is sealed.
  Status last_failure_;
  std::atomic<bool> is_leaving_{false};  // publishes last_failure_
  std::vector<FlowStats> last_flows_;
};

}  // namespace jax_ep
