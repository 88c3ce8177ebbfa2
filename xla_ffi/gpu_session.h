// A GpuSession is one group on this process's GPUs: heaps and status words, the memory of
// node-mates mapped here, the way to other nodes (gpu_network.h), the launch handle of each local
// rank, and the threads that watch for failures. Kernels come from libjax_ep_gpu.so through
// kernels/gpu/api.h.
//
// Nothing here runs during a call: launchers only enqueue kernels, on XLA's stream.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/gpu/api.h"
#include "kernels/gpu/memory/device_memory.h"
#include "proxy/base/shared_memory.h"
#include "xla_ffi/departure.h"
#include "xla_ffi/gpu_network.h"
#include "xla_ffi/lifecycle.h"
#include "xla_ffi/monitor.h"
#include "xla_ffi/report.h"
#include "xla_ffi/session_options.h"
#include "xla_ffi/session_table.h"
#include "xla_ffi/totals.h"

namespace jax_ep {

struct GpuOptions {
  SessionOptions session;  // LocalRank.device_ordinal is the runtime's device index
  std::string library_path;
  // One live XLA buffer per local rank, to find the arena with; 0 forbids the in-place way.
  std::vector<uint64_t> live_pointers;
  uint64_t min_arena_bytes = 0;  // a smaller range is one of many and not worth exporting
  bool require_arena = false;    // JAX_EP_ZERO_COPY=1: no arena is an error
  uint32_t max_sms = 0;          // as in gpu::RankConfig
  bool use_tma = true;
};

// Life: Create -> LocalBlob, ExportFds, Connect -> Start -> (calls) -> Close.
// Thread rule: Python's thread drives that life; the rest from any thread.
class GpuSession {
 public:
  static Result<std::unique_ptr<GpuSession>> Create(GpuOptions options);
  ~GpuSession();  // Close(); in a forked child nothing is touched
  GpuSession(const GpuSession&) = delete;
  GpuSession& operator=(const GpuSession&) = delete;

  // What other processes need to know of this one's ranks; opaque.
  std::string LocalBlob() const;
  // Descriptors of this process's ranks for other processes, in the order in which LocalBlob names
  // them: heap, then arena if there is one. The caller closes them.
  Result<std::vector<int>> ExportFds() const;
  // `blobs` maps every other process of the group to its LocalBlob, `fds` those of the node
  // (over "cuda" all of them) to their ExportFds.
  Status Connect(const std::map<uint32_t, std::string>& blobs,
                 const std::map<uint32_t, std::vector<int>>& fds);
  // Why a mate's arena could not be mapped by Connect, or "". If any process of the group has such
  // a reason, all call ForbidArenas before Start: an owner cannot know who reads its buffers.
  const std::string& unmapped_arena() const { return unmapped_arena_; }
  void ForbidArenas(const std::string& reason);
  // Builds and warms the launch handles, starts the threads. All processes have connected before.
  Status Start();
  // The devices are idle (Python waited). Ends all leases, stops threads, unmaps, frees everything
  // but the first granule of each heap, which stays for what XLA has captured
  // (kernels/gpu/protocol/heap_layout.h), however long others keep this object. `departure` is what
  // mates that still use the group are told. Idempotent.
  void Close(Departure departure = Departure::kClosed);
  // For the reports of mates. (Who waits for this process's ranks waits until its timeout.)
  void BeginToAgree();

  // Held by whoever uses a handle, from TakeHandle until the launcher has returned.
  Lifecycle::Lease Enter() { return lifecycle_.Enter(); }
  Lifecycle& lifecycle() { return lifecycle_; }

  // Launch handle of the rank on `device`, or null. Counts the call as launched from the host.
  // Under a lease.
  gpu::RankHandle* TakeHandle(int64_t device);
  // For the report: that rank's host enqueues this call. Under a lease.
  void NoteCall(int64_t device, std::string_view operation, uint64_t site);
  // Of a device that TakeHandle has a handle for.
  const LocalRank& LocalRankOn(int64_t device) const;
  // A mate of the rank on `device` that has closed the group: no call that begins on that rank can
  // end any more. (The done of a start may: its mates had what they needed before they left.) Under
  // a lease.
  std::optional<Departed> FindDepartedMate(int64_t device) const;
  const gpu::GpuApi& api() const { return *api_; }
  const SessionOptions& options() const { return options_.session; }
  // Kernels are launched ahead of the work that they wait for: a close cuts none of them.
  int64_t newest_run() const { return kNoRun; }
  FailureLatch& failure() { return *failure_; }
  // From here on any thread, at any time: after Close what was true at its begin.
  // With what a kernel has found whose results can be read: the watch may look later. If that is
  // only that a mate has failed, it waits for the reason, up to a second.
  std::string FailureText() const;
  // As of a Session.
  Status WhyClosed() const {
    return failure_->failed() ? failure_->status() : GroupWasClosed(options().name);
  }
  // Of this process's ranks together: device, and pinned stages; 0 after Close.
  uint64_t heap_bytes() const;
  // "in place", with a count of launches that staged all the same, or "staged: REASON" if any local
  // rank's arena cannot be read by its mates.
  std::string data_path() const;
  Result<std::vector<RankTotals>> totals() const;  // asks the devices
  // The same and flows as a JSON object (totals.h); empty where the devices do not answer.
  std::string CountersJson() const;
  std::vector<FlowStats> flow_stats() const;  // of the proxies
  // One page: who hangs (report.h). It asks no GPU: one that waits for long has told by itself.
  std::string Report() const;
  std::string DumpState() const;

 private:
  struct Member;
  struct PeerRecord;

  explicit GpuSession(GpuOptions options, const gpu::GpuApi* api);
  Status AllocateMember(size_t index);
  Status ConnectMember(Member& member,
                       const std::map<std::pair<uint32_t, uint32_t>, PeerRecord>& records);
  std::vector<int> Devices() const;
  // Of each rank's heap: with its stage behind it, if that is device memory, or without.
  uint64_t WholeHeapBytes() const;
  std::byte* StageIn(std::byte* heap) const;
  uint64_t ActiveRanks() const;  // a bit each
  Status DrainDevices() const;
  Result<std::vector<RankTotals>> ReadTotals() const;  // under a lease
  uint64_t HeapBytes() const;                          // under a lease
  std::string DataPath() const;                        // under a lease
  void Free();
  void WatchStatus() noexcept;
  // Makes what a kernel has found the session's failure. False: that is only that a mate has
  // failed; with `may_wait` its cause is left to the monitor.
  bool LatchDeviceFailures(bool may_wait) const;
  std::string NewestFailureText() const;      // without a wait: the monitor's own thread asks, too
  static bool IsCause(const Member& member);  // of a failed one: not that it heard of a failure
  void EndVainWaits(Member& member) const;
  // gpu_session_report.cc
  static void ShowWait(Member& member, uint64_t now_ns);  // the watch
  TeamView ViewTeam(uint32_t team) const;
  void ReportStalls();  // the monitor
  ControlBlock& ControlOfFirstOnNode(const Member& member) const;
  // gpu_session_trace.cc
  Status AllocateStamps();                // if JAX_EP_TRACE is set
  Status CompareClocks();                 // on a thread of its own
  void ReadStamps(Member& member) const;  // the watch
  static void TraceWait(Member& member);  // the watch: the one that its activity shows
  std::optional<Departed> DepartedMateOf(const Member& member) const;
  std::string Describe(const Member& member) const;
  int64_t BlamedFor(const Member& member) const;  // of that failure: a rank, or kNobody

  const GpuOptions options_;
  const gpu::GpuApi* const api_;
  std::unique_ptr<FailureLatch> failure_;
  Status exception_;  // of the watch, made while there was memory
  std::vector<std::unique_ptr<Member>> members_;
  std::unique_ptr<GpuNetwork> network_;  // null in a group of one node
  std::shared_ptr<Tracer> tracer_;       // null unless JAX_EP_TRACE is set
  std::string unmapped_arena_;
  std::unique_ptr<Monitor> monitor_;
  PageClaims page_claims_;  // of the monitor's thread
  std::thread watch_;
  std::mutex watch_mutex_;
  std::condition_variable watch_wake_;
  bool stopping_ = false;  // guarded by watch_mutex_
  mutable Lifecycle lifecycle_;
  struct Last {  // what is known of a closed session; written before it is sealed
    std::vector<RankTotals> totals;
    std::vector<FlowStats> flows;
    std::string data_path;
  } last_;
};

}  // namespace jax_ep
