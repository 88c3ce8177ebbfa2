// Proxy: one thread that moves what kernels cannot reach by load and store. It pops commands from
// the rings of its endpoints, posts them to the transport, turns arrivals into flags, and reports
// the first failure. Threads that wait for it may do its rounds while it has nothing to do
// (ProxyPort). It knows no CUDA, no XLA, and no transport by name.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/abi/channel.h"
#include "proxy/abi/ring.h"
#include "proxy/base/deadline.h"
#include "proxy/base/doorbell.h"
#include "proxy/base/failure.h"
#include "proxy/base/proxy_port.h"
#include "proxy/base/rank_name.h"
#include "proxy/base/status.h"
#include "proxy/base/trace_track.h"
#include "proxy/stats.h"
#include "proxy/transport.h"

namespace jax_ep {

class LifeSigns;

using TransportFactory = std::function<Result<std::unique_ptr<Transport>>(const TransportOptions&)>;

struct ProxyOptions {
  std::string group_name = {};   // in every message, and checked against the peers'
  std::string transport = {};    // a name of ListTransports()
  std::string faulty_spec = {};  // "" or e.g. "seed=7,reorder=16" (transport/faulty.h)
  // Range of messages (at most kMaxWindowMessages) and bytes per flow that may be unacknowledged;
  // bytes 0: what the transport says.
  uint32_t window_messages = 256;
  uint64_t window_bytes = 0;
  uint32_t inbox_slots = 8192;  // power of two
  // A peer whose process was heard and then is silent for longer is reported as dead, and one that
  // acknowledges nothing for as long.
  std::chrono::nanoseconds peer_timeout = std::chrono::seconds(15);
  // A peer whose process was never heard since Start is reported after this.
  std::chrono::nanoseconds timeout = std::chrono::seconds(600);
  // Whether threads that wait may do the proxy's rounds, where the network wakes it dearly.
  bool caller_progress = true;
  // CPUs that the thread may run on; empty: any.
  std::vector<int> cpus = {};
  // Of this process's proxies that live and die together (life_signs.h), as Proxy::MakeSigns gives
  // it; null: the proxy is the only one.
  std::shared_ptr<LifeSigns> signs = {};
  // Overrides `transport`; for tests and benchmarks.
  TransportFactory transport_factory = {};
};

struct EndpointOptions {
  uint32_t rank = 0;
  TeamId team = {};  // of that rank and its peers: whom messages name and blame
  uint32_t num_ranks = 1;
  std::vector<uint32_t> peers = {};  // ranks of other nodes, any order, without duplicates
  uint32_t ll_slots = 0;             // largest slot + 1 of the counted channels; 0: none is used
  std::span<std::byte> heap = {};    // outlives the proxy
  std::string heap_export = {};      // MemoryRegion::export_blob; needed by shm and cuda
  int heap_device = -1;              // MemoryRegion::device
  int heap_dmabuf_fd = -1;           // MemoryRegion::dmabuf_fd; AddEndpoint alone uses it
  DeviceCopies* copies = nullptr;    // TransportOptions::copies
  // Address of flag[channel][source], in host memory; nullptr where that pair has none. Called for
  // every peer and channel in AddEndpoint, and not kept. Its value then is what the flow's signals
  // count on from: 0 in fresh memory; tests start near wrap-around.
  std::function<std::atomic<uint64_t>*(Channel channel, uint32_t source)> flag = {};
  Doorbell* doorbell = nullptr;  // rung after flag or quiet updates, and on failure; may be null
  uint32_t ring_slots = 4096;    // power of two
  // Empty, or CommandRing::BytesFor(ring_slots) that outlive the proxy: the ring is there, and who
  // pushes rings no bell (a GPU cannot), so the proxy polls it.
  std::span<std::byte> ring_memory = {};
  RankPlace place = {};                    // for the transport
  std::shared_ptr<TraceTrack> trace = {};  // null: none
};

// Use: Create, AddEndpoint for each local rank, exchange LocalBlob with all peers, Connect all,
// Start, push commands, Stop.
//
// Thread rule: Create..Start and Stop on one thread. After Start any thread may push to ring(),
// call what ProxyPort has, DumpState, DumpOpenFlows and Stats. The latch, heaps, flags and
// doorbells outlive it.
//
// Waiting across nodes, for all endpoints of the proxy together: push kQuiet on each with the next
// epoch (it counts 1, 2, 3, ... per endpoint), Kick, wait until each *quiet_flag(endpoint) has
// reached it; then all that they sent has arrived. Push kBarrier on each with its next epoch, Kick,
// wait until flag(kBarrier, peer) of all BarrierPeers of each has reached it; then all other
// processes have come as far.
//
// Ranks of one process live and die together (life_signs.h). Two processes have one heartbeat, one
// goodbye and one barrier signal for each team, all over one pair of ranks (leads.h). So whatever
// connects at its first message, as ofi and verbs do, has a connection for each other process, and
// beyond these only for pairs of ranks that have something to send.
//
// Failure: the first of {dead peer, transport error, protocol violation, bad command, a peer that
// reports failure, a latch set by others} is latched with group, rank and peer, every endpoint's
// doorbell is rung, the other processes are told whom the latch blames, so that they fail at once
// and blame the same, and the thread ends.
class Proxy final : public ProxyPort {
 public:
  static Result<std::unique_ptr<Proxy>> Create(ProxyOptions options, FailureLatch* failure);
  static Result<std::shared_ptr<LifeSigns>> MakeSigns(const std::string& group_name);
  ~Proxy() override;  // stops
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // \error kInvalidArgument  says which field; the transport's error if it cannot be made
  Result<int> AddEndpoint(EndpointOptions options);

  // What peers need to Connect to this endpoint (binary string, a few hundred bytes).
  std::string LocalBlob(int endpoint) const;

  // \error kInvalidArgument  version, group, window or slots differ from ours (both are named)
  Status Connect(int endpoint, uint32_t peer, std::string_view blob, Deadline deadline);

  // \error kFailedPrecondition  an endpoint is not connected to all of its peers; already started;
  //                             signs differ
  // \error kResourceExhausted   no thread
  Status Start() { return StartAll(std::array{this}); }
  // All that share signs, in the same order as in other processes: by rank, then as the proxies of
  // a rank meet those of others. All are connected.
  static Status StartAll(std::span<Proxy* const> proxies);

  // Sends what is queued, says goodbye to the other processes, joins the thread. Idempotent; takes
  // at most about kMaxStopTime whatever the peers do. Afterwards nothing of this object runs.
  void Stop() { StopAll(std::array{this}); }
  // All that share signs. One that is stopped alone waits for the others, but not longer than that,
  // and then says goodbye for all.
  static void StopAll(std::span<Proxy* const> proxies);
  static constexpr std::chrono::seconds kMaxStopTime{3};

  void Kick() override;
  bool wants_help() const override;
  void BeginHelp() override;
  void EndHelp(bool leaves_work) override;
  bool Help() override;

  // Whom kBarrier of that endpoint signals, and who signals it; of the peers' team. After Start.
  std::vector<uint32_t> BarrierPeers(int endpoint) const;
  RingView ring(int endpoint);
  // The epoch of the newest completed kQuiet of this endpoint's ring (acquire it).
  std::atomic<uint64_t>* quiet_flag(int endpoint);

  // Text: per flow posted, acknowledged, expected, arrived, window, last command.
  std::string DumpState() const;
  // A line for each flow that has messages under way or gaps, or that `is_awaited`.
  std::string DumpOpenFlows(const FlowFilter& is_awaited) const;
  // Every flow that has had traffic, in order of (rank, peer, channel).
  std::vector<FlowStats> Stats() const;

 private:
  struct Impl;
  explicit Proxy(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace jax_ep
