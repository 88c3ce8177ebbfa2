#include "xla_ffi/session_options.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <sstream>
#include <type_traits>

#include "proxy/abi/command.h"
#include "xla_ffi/call_lines.h"

namespace jax_ep {
namespace {

std::string Gibibytes(uint64_t num_bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f GiB",
                static_cast<double>(num_bytes) / static_cast<double>(uint64_t{1} << 30));
  return text;
}

Status CheckActive(const SessionOptions& options) {
  const std::vector<uint8_t>& active = options.active;
  if (active.empty()) return Status::Ok();
  const GroupShape& shape = options.shape;
  const auto bad = [&](const std::string& what) {
    return InvalidArgument("group " + options.name + ": got a mask of active ranks " + what);
  };
  if (options.team_processes.size() != 1) return bad("for several teams, expected one team");
  if (active.size() != shape.num_ranks) return bad("that is not of length N");
  for (const LocalRank& local : options.local_ranks) {
    if (active[local.rank] == 0) return bad("without this process's " + options.NameOf(local));
  }
  if (shape.num_nodes() == 1 || !shape.has_ht) return Status::Ok();
  for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const uint32_t first = rank / shape.node_size * shape.node_size;
    if (active[rank] == active[first]) continue;
    return bad("with a part of a node, expected whole nodes, as rows of mode ht travel by rails");
  }
  return Status::Ok();
}

}  // namespace

Status CheckOptions(const SessionOptions& options) {
  const GroupShape& shape = options.shape;
  if (shape.num_ranks == 0 || shape.node_size == 0 || shape.num_ranks % shape.node_size != 0) {
    return InvalidArgument("group " + options.name + ": node_size " +
                           std::to_string(shape.node_size) + " does not divide the " +
                           std::to_string(shape.num_ranks) + " ranks of the group");
  }
  for (const LocalRank& local : options.local_ranks) {
    if (local.team >= options.team_processes.size() ||
        local.rank >= options.team_processes[local.team].size() ||
        options.team_processes[local.team].size() != shape.num_ranks) {
      return InvalidArgument("group " + options.name + ": rank table and shape disagree");
    }
  }
  return CheckActive(options);
}

Result<GroupShape> ShapeOfCall(const SessionOptions& options, const char* operation,
                               std::span<const int64_t> sizes) {
  const GroupShape& group = options.shape;
  const auto bad = [&](const std::string& what) {
    return InvalidArgument("group " + options.name + ": " + operation + ": got a call of " + what +
                           "; lower the program again, for this group or a view of it");
  };
  constexpr size_t kNumSizes = 4;
  if (sizes.size() != kNumSizes) {
    return bad(std::to_string(sizes.size()) + " sizes, expected " + std::to_string(kNumSizes));
  }
  GroupShape shape = group;
  const auto take = [](int64_t size, auto most, auto& field) {
    if (size < 1 || static_cast<uint64_t>(size) > most) return false;
    field = static_cast<std::remove_reference_t<decltype(field)>>(size);
    return true;
  };
  const auto at_most = [](const char* name, int64_t got, uint64_t most) {
    return std::string(name) + " = " + std::to_string(got) + ", expected 1 to " +
           std::to_string(most);
  };
  constexpr uint32_t kMaxAlign = std::numeric_limits<int32_t>::max();
  if (!take(sizes[0], group.num_experts, shape.num_experts)) {
    return bad(at_most("num_experts", sizes[0], group.num_experts));
  }
  if (shape.num_experts % group.num_ranks != 0) {
    return bad("num_experts = " + std::to_string(shape.num_experts) + ", expected a multiple of " +
               std::to_string(group.num_ranks));
  }
  if (!take(sizes[1], group.top_k, shape.top_k)) {
    return bad(at_most("top_k", sizes[1], group.top_k));
  }
  if (!take(sizes[2], kMaxAlign, shape.align)) return bad(at_most("align", sizes[2], kMaxAlign));
  if (!take(sizes[3], group.hidden, shape.hidden)) {
    return bad(at_most("hidden", sizes[3], group.hidden));
  }
  return shape;
}

Status CheckReach(const SessionOptions& options, uint64_t buffer_bytes) {
  const GroupShape& shape = options.shape;
  if (shape.num_nodes() == 1) return Status::Ok();
  if (shape.num_ranks > kMaxRanks) {
    return InvalidArgument("group " + options.name + ": got " + std::to_string(shape.num_ranks) +
                           " ranks in several nodes, expected at most " +
                           std::to_string(kMaxRanks) +
                           ", the most that a message between nodes can name; use a mesh axis of " +
                           "fewer devices, or several groups");
  }
  // A row of mode ll travels in one command: its arrival is one slot.
  const ElemType partial = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  const uint64_t ll_bytes = RowBytes(shape.hidden, partial) + ScalarBytes(shape.top_k);
  if (shape.ll_tokens > 0 && ll_bytes > kMaxCommandBytes) {
    return InvalidArgument("group " + options.name + ": got rows of " + std::to_string(ll_bytes) +
                           " bytes in combine, expected at most " +
                           std::to_string(kMaxCommandBytes) +
                           " in mode ll between nodes; lower hidden, or use Config.mode='ht'");
  }
  if (buffer_bytes <= kMaxHeapBytes) return Status::Ok();
  return InvalidArgument(
      "group " + options.name + ": got sizes that need " + Gibibytes(buffer_bytes) +
      " of exchange buffers per rank, expected at most " + Gibibytes(kMaxHeapBytes) +
      " in a group of several nodes, the most that a command between nodes can address; "
      "lower max_tokens, hidden or max_in_flight, or have more ranks per node");
}

bool IsOneProcess(const SessionOptions& options) {
  for (const auto& team : options.team_processes) {
    for (const uint32_t process : team) {
      if (process != options.process_index) return false;
    }
  }
  return true;
}

int64_t PositionOf(const SessionOptions& options, const LocalRank& local) {
  return int64_t{local.team} * options.shape.num_ranks + local.rank;
}

Status OutsideOfMesh(const SessionOptions& options, const char* operation,
                     const std::string& device) {
  return FailedPrecondition("group " + options.name + ": " + operation + " runs on " + device +
                            ", which is not in the group's mesh; use the mesh that create_group "
                            "got");
}

std::string WrongPositionText(const SessionOptions& options, const LocalRank& local, int64_t got) {
  const int64_t num_ranks = options.shape.num_ranks;
  return " got a program in which device " + std::to_string(local.device_ordinal) + " is " +
         options.NameOf(static_cast<uint32_t>(got / num_ranks),
                        static_cast<uint32_t>(got % num_ranks)) +
         ", expected " + options.NameOf(local) +
         " as in the group's mesh; call the program with arrays over that mesh (its devices in the "
         "same order), or create a group for this order";
}

Result<Rank::Stall> StallOf(const std::string& spec, uint32_t rank) {
  if (spec.empty()) return Rank::Stall{};
  std::istringstream parts(spec);
  std::string name;
  uint32_t stalled = 0;
  double seconds = 0;
  char colon = 0;
  if (std::getline(parts, name, ':') && parts >> stalled >> colon >> seconds && colon == ':') {
    for (uint32_t index = 0; index < kNumChannels; ++index) {
      const auto channel = static_cast<Channel>(index);
      if (ChannelName(channel) != name) continue;
      if (stalled != rank) return Rank::Stall{};
      return Rank::Stall{.channel = channel,
                         .time = std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::duration<double>(seconds))};
    }
  }
  return InvalidArgument("JAX_EP_TEST_STALL: got " + spec + ", expected CHANNEL:RANK:SECONDS");
}

Result<std::shared_ptr<Tracer>> OpenTracer(const SessionOptions& options, const Env& env) {
  if (env.trace.empty()) return std::shared_ptr<Tracer>();
  return Tracer::Open(env.trace, options.process_index,
                      [](uint64_t site) { return CallLines::Instance().Find(site); });
}

std::shared_ptr<TraceTrack> AddTrack(Tracer* tracer, const SessionOptions& options,
                                     const LocalRank& local, TrackKind kind) {
  if (tracer == nullptr) return nullptr;
  return tracer->AddTrack({.kind = kind,
                           .team = options.IdOf(local.team),
                           .rank = local.rank,
                           .group_name = options.name});
}

ProxyOptions ProxyOptionsFor(const SessionOptions& options, const Env& env) {
  return {.group_name = options.name,
          .transport = options.transport,
          .faulty_spec = env.faulty_spec,
          .window_messages = env.window_messages,
          .window_bytes = env.window_bytes,
          .inbox_slots = env.inbox_slots,
          .peer_timeout = options.peer_timeout,
          .timeout = options.timeout,
          .caller_progress = env.caller_progress != 0};
}

RankPlace PlaceOf(const SessionOptions& options, const LocalRank& local) {
  const std::vector<std::pair<uint32_t, uint32_t>>& all = options.host_ranks;
  const auto at = std::find(all.begin(), all.end(), std::pair(local.team, local.rank));
  if (at == all.end()) return RankPlace{};
  return {.local_index = static_cast<uint32_t>(at - all.begin()),
          .num_local = static_cast<uint32_t>(all.size())};
}

}  // namespace jax_ep
