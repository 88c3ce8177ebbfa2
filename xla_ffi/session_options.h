// What both kinds of session are created from.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/launch.h"
#include "kernels/layout.h"
#include "proxy/base/env.h"
#include "proxy/base/rank_name.h"
#include "proxy/base/status.h"
#include "proxy/base/trace.h"
#include "proxy/proxy.h"
#include "proxy/transport.h"

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
  // (team, rank) of every rank on this host, in any process, ascending.
  std::vector<std::pair<uint32_t, uint32_t>> host_ranks;
  // By rank: 0 for those that the group goes on without (Rank::active); of a group of one team. A
  // node that other nodes send rows of mode ht to has all of its ranks or none. Empty: not elastic.
  std::vector<uint8_t> active = {};
  // How often the ranks of the group have agreed on who takes part: 0 for create_group.
  uint32_t generation = 0;
  uint32_t process_index = 0;
  std::string transport;  // "none" (one node), or a name of proxy/transport/registry.h
  std::chrono::nanoseconds timeout{};
  std::chrono::nanoseconds peer_timeout{};
  int threads_per_rank = 1;
  bool huge_pages = true;   // hint for large results on CPU (kernels/cpu/huge_pages.h)
  bool debug = false;       // expert ids out of range fail the group
  bool gpu_direct = false;  // NICs read and write GPUs' memory, over transports that let them

  TeamId IdOf(uint32_t team) const {
    return {.index = team, .num_teams = static_cast<uint32_t>(team_processes.size())};
  }
  bool is_elastic() const { return !active.empty(); }
  bool IsActive(uint32_t rank) const { return active.empty() || active[rank] != 0; }
  // For messages (RankName).
  std::string NameOf(uint32_t team, uint32_t rank) const { return RankName(IdOf(team), rank); }
  std::string NameOf(const LocalRank& local) const { return NameOf(local.team, local.rank); }
};

// \error kInvalidArgument  the rank table and the shape disagree
Status CheckOptions(const SessionOptions& options);

// `buffer_bytes`: of one rank's memory that commands between nodes name.
// \error kInvalidArgument  they name less than that
Status CheckReach(const SessionOptions& options, uint64_t buffer_bytes);

// The shape that a call works by. `sizes`: its num_experts, top_k, align and hidden, which are the
// group's or those of a view (Group.view).
// \error kInvalidArgument  the group has no room for them
Result<GroupShape> ShapeOfCall(const SessionOptions& options, const char* operation,
                               std::span<const int64_t> sizes);

// Whether every rank of every team lives in this process.
bool IsOneProcess(const SessionOptions& options);

// Where the group has a rank, as programs say it: team * N + rank (`position` in signatures.h).
int64_t PositionOf(const SessionOptions& options, const LocalRank& local);

// A program runs on a device that the group does not have. `device` is how the platform names it.
Status OutsideOfMesh(const SessionOptions& options, const char* operation,
                     const std::string& device);

// The end of an error's text: a program holds the rank's device to stand at `got`.
std::string WrongPositionText(const SessionOptions& options, const LocalRank& local, int64_t got);

// What `spec` (Env::stall_spec) says of that rank.
// \error kInvalidArgument  it is not "CHANNEL:RANK:SECONDS"
Result<Rank::Stall> StallOf(const std::string& spec, uint32_t rank);

// The trace that JAX_EP_TRACE asks for, or null.
Result<std::shared_ptr<Tracer>> OpenTracer(const SessionOptions& options, const Env& env);

// A track of that rank or of its proxy; null without a tracer.
std::shared_ptr<TraceTrack> AddTrack(Tracer* tracer, const SessionOptions& options,
                                     const LocalRank& local, TrackKind kind);

// What every proxy of the session is made with.
ProxyOptions ProxyOptionsFor(const SessionOptions& options, const Env& env);

// Without device_pci, which only the owner of a device can tell.
RankPlace PlaceOf(const SessionOptions& options, const LocalRank& local);

}  // namespace jax_ep
