#include "kernels/cpu/plan_tables.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "kernels/cpu/row_index.h"
#include "kernels/cpu/zones.h"

namespace jax_ep {
namespace {

constexpr uint64_t kIntsPerUnit = kWireUnitBytes / sizeof(int32_t);

// Calls visit(code, expert) for each pair that has a place, in (token, k) order.
template <typename Visit>
LocalDrops VisitPairs(const GroupShape& shape, Layout layout, std::span<const int32_t> topk_idx,
                      Visit&& visit) {
  LocalDrops drops;
  const uint64_t top_k = shape.top_k;
  for (uint64_t code = 0; code < topk_idx.size(); ++code) {
    const int32_t expert = topk_idx[code];
    if (expert < 0) continue;
    if (static_cast<uint32_t>(expert) >= shape.num_experts) {
      ++drops.num_invalid;
      ++drops.num_dropped;
      continue;
    }
    if (layout == Layout::kExpertBatched) {
      const auto* first = topk_idx.data() + code / top_k * top_k;
      const auto* here = topk_idx.data() + code;
      if (std::find(first, here, expert) != here) {
        ++drops.num_dropped;
        continue;
      }
    }
    visit(static_cast<int32_t>(code), static_cast<uint32_t>(expert));
  }
  return drops;
}

// Pairs that want an expert of `owner`.
uint64_t CountPairsFor(const GroupShape& shape, const int32_t* counts, uint32_t owner) {
  const int32_t* first = counts + owner * shape.experts_per_rank();
  return std::accumulate(first, first + shape.experts_per_rank(), uint64_t{0});
}

}  // namespace

uint64_t SegmentInts(const GroupShape& shape, const int32_t* counts, uint32_t owner) {
  return AlignUp(CountPairsFor(shape, counts, owner), kIntsPerUnit);
}

std::vector<uint64_t> SegmentStarts(const GroupShape& shape, const int32_t* counts) {
  std::vector<uint64_t> starts(shape.num_ranks + 1);
  for (uint32_t owner = 0; owner < shape.num_ranks; ++owner) {
    starts[owner + 1] = starts[owner] + SegmentInts(shape, counts, owner);
  }
  return starts;
}

LocalDrops SortPairs(const GroupShape& shape, Layout layout, std::span<const int32_t> topk_idx,
                     int32_t* counts, int32_t* codes) {
  std::fill_n(counts, shape.num_experts, 0);
  const LocalDrops drops =
      VisitPairs(shape, layout, topk_idx, [&](int32_t, uint32_t expert) { ++counts[expert]; });
  const std::vector<uint64_t> starts = SegmentStarts(shape, counts);
  std::vector<uint64_t> next(shape.num_experts);
  for (uint32_t expert = 0; expert < shape.num_experts; ++expert) {
    const bool is_first_of_owner = expert % shape.experts_per_rank() == 0;
    next[expert] = is_first_of_owner ? starts[expert / shape.experts_per_rank()]
                                     : next[expert - 1] + static_cast<uint64_t>(counts[expert - 1]);
  }
  VisitPairs(shape, layout, topk_idx,
             [&](int32_t code, uint32_t expert) { codes[next[expert]++] = code; });
  return drops;
}

namespace {

// Where masks differ and no pair is concerned, nothing differs.
Status CheckMask(Operation& op, std::span<const int32_t> topk_idx) {
  if (op.rank().active.empty()) return Status::Ok();
  const GroupShape& shape = op.shape();
  const auto limit = static_cast<int32_t>(shape.num_experts);
  const auto owner_of = [&](int32_t expert) {
    return static_cast<uint32_t>(expert) / shape.experts_per_rank();
  };
  for (const int32_t id : topk_idx) {
    const bool is_masked = id < kUnreachable + limit;
    const int32_t expert = is_masked ? id - kUnreachable : id;
    if (expert < 0 || expert >= limit || op.is_active(owner_of(expert)) != is_masked) continue;
    const std::string name = op.rank().NameOf(owner_of(expert));
    return op.Invalid(
        is_masked ? "got a mask without " + name +
                        ", with which the group has agreed to work; pass the newest result of "
                        "Group.agree as `active`"
                  : "got an expert of " + name +
                        ", which the group has agreed to go on without; pass the newest result of "
                        "Group.agree as `active`");
  }
  return Status::Ok();
}

}  // namespace

Status CheckIds(Operation& op, std::span<const int32_t> topk_idx) {
  JAX_EP_RETURN_IF_ERROR(CheckMask(op, topk_idx));
  Rank& rank = op.rank();
  if (!rank.refuses_invalid_ids) return Status::Ok();
  const auto limit = static_cast<int32_t>(rank.shape.num_experts);
  const auto found = std::count_if(topk_idx.begin(), topk_idx.end(),
                                   [limit](int32_t expert) { return expert >= limit; });
  if (found == 0) return Status::Ok();
  if (rank.counters != nullptr) {
    rank.counters->invalid_ids.fetch_add(static_cast<uint64_t>(found), std::memory_order_relaxed);
  }
  return op.Fail(
      InvalidArgument("got " + std::to_string(found) + " expert id(s) of " + std::to_string(limit) +
                      " or more, expected ids below num_experts (negative: no expert); fix the "
                      "router, or unset JAX_EP_DEBUG to have them dropped and counted"),
      RankOfTeam(rank.team.index, rank.rank));
}

bool AreCountsInRange(const GroupShape& shape, int64_t num_pairs, const int32_t* counts) {
  int64_t sum = 0;
  for (uint32_t expert = 0; expert < shape.num_experts; ++expert) {
    if (counts[expert] < 0) return false;
    sum += counts[expert];
  }
  return sum <= num_pairs;
}

bool AreCodesInRange(const GroupShape& shape, uint32_t rank, int64_t num_pairs,
                     const SourceRouting& source) {
  return std::all_of(source.codes, source.codes + CountPairsFor(shape, source.counts, rank),
                     [&](int32_t code) { return code >= 0 && code < num_pairs; });
}

std::string CheckPlanParams(const GroupShape& shape, const PlanParams& params) {
  const auto tokens = static_cast<uint64_t>(params.num_tokens);
  const auto rows = static_cast<uint64_t>(params.recv_rows);
  if (std::string wrong = CheckTokens(shape, params.mode, params.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const uint64_t experts = shape.experts_per_rank();
  const uint64_t source_tokens = shape.num_ranks * tokens;
  const bool is_rows_right =
      params.recv_rows >= 0 &&
      (params.layout == Layout::kExpertMajor ||
       rows == source_tokens * (params.layout == Layout::kExpertBatched ? experts : 1));
  const uint64_t topk_cells = params.layout == Layout::kRankMajor ? source_tokens * shape.top_k : 0;
  const PlanOutputs& out = params.out;
  if (!is_rows_right || params.topk_idx.size() != tokens * shape.top_k ||
      out.send_slot.size() != tokens * shape.top_k || out.recv_src.size() != rows ||
      out.group_sizes.size() != experts || out.group_counts.size() != experts ||
      out.send_counts.size() != shape.num_ranks || out.recv_counts.size() != shape.num_ranks ||
      out.recv_topk_idx.size() != topk_cells || out.num_dropped == nullptr ||
      out.overflow == nullptr) {
    return "the plan's arrays do not have the sizes of T = " + std::to_string(tokens) +
           ", R = " + std::to_string(params.recv_rows);
  }
  return "";
}

void CountPlan(Rank& rank, const PlanParams& params, const LocalDrops& drops) {
  if (rank.counters == nullptr) return;
  RankCounters& counters = *rank.counters;
  const auto count = [](std::atomic<uint64_t>& counter, int32_t amount) {
    counter.fetch_add(static_cast<uint64_t>(amount), std::memory_order_relaxed);
  };
  count(counters.plans, 1);
  count(counters.rows_dropped, *params.out.num_dropped);
  count(counters.invalid_ids, drops.num_invalid);
  const size_t experts = params.counts_load ? std::min(counters.pairs_per_expert.size(),
                                                       params.out.group_counts.size())
                                            : 0;
  for (size_t expert = 0; expert < experts; ++expert) {
    count(counters.pairs_per_expert[expert], params.out.group_counts[expert]);
  }
  counters.last_overflow.store(static_cast<uint64_t>(*params.out.overflow),
                               std::memory_order_relaxed);
}

void BuildPlan(const GroupShape& shape, uint32_t rank, const PlanParams& params,
               std::span<const SourceRouting> sources, const int32_t* own_codes) {
  const PlanOutputs& out = params.out;
  const uint32_t num_ranks = shape.num_ranks;
  const uint32_t num_experts = shape.num_experts;
  const uint32_t experts = shape.experts_per_rank();
  const int64_t top_k = shape.top_k;
  const int64_t tokens = params.num_tokens;
  const bool is_expert_major = params.layout == Layout::kExpertMajor;
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  const int64_t source_codes = static_cast<int64_t>(shape.max_tokens) * top_k;

  std::fill(out.send_slot.begin(), out.send_slot.end(), -1);
  std::fill(out.recv_src.begin(), out.recv_src.end(), -1);
  std::fill(out.recv_topk_idx.begin(), out.recv_topk_idx.end(), -1);
  std::fill(out.recv_counts.begin(), out.recv_counts.end(), 0);

  std::vector<int64_t> demand(num_experts, 0);
  std::vector<int64_t> before_own(num_experts, 0);  // pairs of lower source ranks
  int64_t num_dropped = sources[rank].num_locally_dropped;
  bool has_drops = false;
  for (uint32_t source = 0; source < num_ranks; ++source) {
    if (source == rank) before_own = demand;
    for (uint32_t e = 0; e < num_experts; ++e) demand[e] += sources[source].counts[e];
    has_drops |= sources[source].num_locally_dropped > 0;
  }

  const std::vector<uint64_t> own_segments = SegmentStarts(shape, sources[rank].counts);
  std::vector<const int32_t*> next_codes(num_ranks);  // per source, of its segment for this rank
  for (uint32_t source = 0; source < num_ranks; ++source)
    next_codes[source] = sources[source].codes;
  std::vector<int64_t> zones(experts);

  for (uint32_t owner = 0; owner < num_ranks; ++owner) {
    const std::span<const int64_t> owner_demand(demand.data() + owner * experts, experts);
    if (is_expert_major) FillZones(owner_demand, shape.align, params.recv_rows, zones);
    const int32_t* codes = own_codes + own_segments[owner];
    int64_t zone_begin = 0;
    int64_t sent = 0;
    for (uint32_t local = 0; local < experts; ++local) {
      const uint32_t e = owner * experts + local;
      const int64_t capacity =
          is_expert_major ? std::min(owner_demand[local], zones[local]) : owner_demand[local];
      has_drops |= capacity < owner_demand[local];
      const int64_t zone_rows = is_expert_major ? zones[local] : num_ranks * tokens;

      const int64_t own = sources[rank].counts[e];
      const int64_t kept = std::clamp<int64_t>(capacity - before_own[e], 0, own);
      for (int64_t i = 0; i < kept; ++i) {
        const int32_t code = codes[i];
        const int64_t source_row = rank * tokens + code / top_k;
        int64_t slot = owner * params.recv_rows + zone_begin + before_own[e] + i;
        if (is_rank_major) slot = owner * params.recv_rows + source_row;
        if (params.mode == Mode::kLl) slot = owner * (num_ranks * tokens) + source_row;
        out.send_slot[static_cast<uint64_t>(code)] = static_cast<int32_t>(slot);
      }
      codes += own;
      sent += kept;
      num_dropped += own - kept;

      if (owner == rank) {
        out.group_counts[local] = static_cast<int32_t>(capacity);
        out.group_sizes[local] = static_cast<int32_t>(is_expert_major ? zone_rows : capacity);
        int64_t before = 0;
        for (uint32_t source = 0; source < num_ranks; ++source) {
          const int64_t count = sources[source].counts[e];
          const int64_t count_kept = std::clamp<int64_t>(capacity - before, 0, count);
          for (int64_t i = 0; i < count_kept; ++i) {
            const int32_t code = next_codes[source][i];
            const int64_t source_row = source * tokens + code / top_k;
            const int64_t row = is_rank_major ? source_row : zone_begin + before + i;
            const auto src = static_cast<int32_t>(source * source_codes + code);
            int32_t& recv_src = out.recv_src[static_cast<uint64_t>(row)];
            recv_src = recv_src < 0 ? src : std::min(recv_src, src);
            if (is_rank_major) {
              out.recv_topk_idx[static_cast<uint64_t>(source_row * top_k + code % top_k)] =
                  static_cast<int32_t>(local);
            }
          }
          next_codes[source] += count;
          before += count;
          out.recv_counts[source] += static_cast<int32_t>(count_kept);
        }
      }
      zone_begin += zone_rows;
    }
    out.send_counts[owner] = static_cast<int32_t>(sent);
  }
  *out.num_dropped = static_cast<int32_t>(num_dropped);
  *out.overflow = has_drops ? 1 : 0;
}

}  // namespace jax_ep
