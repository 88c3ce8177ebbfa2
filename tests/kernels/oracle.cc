#include "tests/kernels/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

namespace jax_ep::testing {
namespace {

struct Pair {
  uint32_t source;
  int64_t token;
  int64_t k;
};

int64_t Up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Adds one block at a time to every expert that wants more while a full round fits, then one block
// each in order.
std::vector<int64_t> Zones(const std::vector<int64_t>& demand, int64_t align, int64_t recv_rows) {
  std::vector<int64_t> zones(demand.size(), 0);
  int64_t used = 0;
  while (true) {
    int64_t round = 0;
    for (size_t e = 0; e < demand.size(); ++e) round += zones[e] < demand[e] ? align : 0;
    if (round == 0 || used + round > recv_rows) break;
    for (size_t e = 0; e < demand.size(); ++e) zones[e] += zones[e] < demand[e] ? align : 0;
    used += round;
  }
  for (size_t e = 0; e < demand.size(); ++e) {
    if (zones[e] < demand[e] && used + align <= recv_rows) {
      zones[e] += align;
      used += align;
    }
  }
  return zones;
}

// Per expert, the pairs that want it, in (source, token, k) order. Pairs without a place are
// counted.
std::vector<std::vector<Pair>> Demand(const Routing& routing, std::vector<int32_t>& num_dropped) {
  const GroupShape& shape = routing.shape;
  std::vector<std::vector<Pair>> demand(shape.num_experts);
  for (uint32_t source = 0; source < shape.num_ranks; ++source) {
    for (int64_t t = 0; t < routing.num_tokens; ++t) {
      std::set<int32_t> seen;
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const int32_t e = routing.topk_idx[source][static_cast<size_t>(t * shape.top_k + k)];
        if (e < 0) continue;
        const bool is_repeat = !seen.insert(e).second;
        if (e >= static_cast<int32_t>(shape.num_experts) ||
            (is_repeat && routing.layout == Layout::kExpertBatched)) {
          ++num_dropped[source];
          continue;
        }
        demand[static_cast<size_t>(e)].push_back({source, t, k});
      }
    }
  }
  return demand;
}

}  // namespace

PlanOracle MakePlanOracle(const Routing& routing) {
  const GroupShape& shape = routing.shape;
  const size_t num_ranks = shape.num_ranks;
  const int64_t experts = shape.experts_per_rank();
  const int64_t tokens = routing.num_tokens;
  const auto cells = static_cast<size_t>(tokens * shape.top_k);
  PlanOracle plan;
  plan.num_dropped.assign(num_ranks, 0);
  plan.group_sizes.assign(num_ranks, std::vector<int32_t>(static_cast<size_t>(experts)));
  plan.group_counts = plan.group_sizes;
  plan.send_slot.assign(num_ranks, std::vector<int32_t>(cells, -1));
  plan.pair_row.assign(num_ranks, std::vector<int64_t>(cells, -1));
  plan.pair_owner = plan.pair_row;
  plan.recv_src.assign(num_ranks, std::vector<int32_t>(static_cast<size_t>(routing.recv_rows), -1));
  plan.send_counts.assign(num_ranks, std::vector<int32_t>(num_ranks, 0));
  plan.recv_counts = plan.send_counts;
  if (routing.layout == Layout::kRankMajor) {
    plan.recv_topk_idx.assign(num_ranks, std::vector<int32_t>(num_ranks * cells, -1));
  }
  const auto demand = Demand(routing, plan.num_dropped);
  for (uint32_t owner = 0; owner < num_ranks; ++owner) {
    std::vector<int64_t> wanted;
    for (int64_t e = 0; e < experts; ++e) {
      wanted.push_back(
          static_cast<int64_t>(demand[static_cast<size_t>(owner * experts + e)].size()));
    }
    const auto zones = Zones(wanted, shape.align, routing.recv_rows);
    int64_t zone_begin = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const auto local = static_cast<size_t>(e);
      const bool is_major = routing.layout == Layout::kExpertMajor;
      const int64_t room = is_major ? zones[local] : wanted[local];
      int64_t position = 0;
      for (const Pair& pair : demand[static_cast<size_t>(owner * experts + e)]) {
        const auto cell = static_cast<size_t>(pair.token * shape.top_k + pair.k);
        if (position >= room) {
          ++plan.num_dropped[pair.source];
          continue;
        }
        int64_t row = zone_begin + position++;
        const int64_t source_row = pair.source * tokens + pair.token;
        if (routing.layout == Layout::kExpertBatched) {
          row = e * static_cast<int64_t>(num_ranks) * tokens + position - 1;
        } else if (routing.layout == Layout::kRankMajor) {
          row = source_row;
          plan.recv_topk_idx[owner][static_cast<size_t>(source_row * shape.top_k + pair.k)] =
              static_cast<int32_t>(e);
        }
        const auto code = static_cast<int32_t>(
            (pair.source * static_cast<int64_t>(shape.max_tokens) + pair.token) * shape.top_k +
            pair.k);
        int32_t& src = plan.recv_src[owner][static_cast<size_t>(row)];
        src = src < 0 ? code : std::min(src, code);
        plan.pair_row[pair.source][cell] = row;
        plan.pair_owner[pair.source][cell] = owner;
        plan.send_slot[pair.source][cell] =
            static_cast<int32_t>(routing.mode == Mode::kLl
                                     ? owner * static_cast<int64_t>(num_ranks) * tokens + source_row
                                     : owner * routing.recv_rows + row);
        ++plan.send_counts[pair.source][owner];
        ++plan.recv_counts[owner][pair.source];
      }
      plan.group_counts[owner][local] = static_cast<int32_t>(position);
      plan.group_sizes[owner][local] = static_cast<int32_t>(is_major ? zones[local] : position);
      if (is_major) zone_begin += zones[local];
    }
  }
  for (const int32_t dropped : plan.num_dropped) plan.overflow |= dropped > 0 ? 1 : 0;
  return plan;
}

std::string DrawName(Draw draw) {
  switch (draw) {
    case Draw::kUniform:
      return "uniform";
    case Draw::kZipf:
      return "zipf";
    case Draw::kOneExpert:
      return "one_expert";
    case Draw::kIdleRank:
      return "idle_rank";
    case Draw::kMessy:
      return "messy";
  }
  return "";
}

std::vector<std::vector<int32_t>> DrawTopk(const GroupShape& shape, int64_t num_tokens, Draw draw,
                                           std::mt19937& random) {
  const auto num_experts = static_cast<int32_t>(shape.num_experts);
  const auto experts = static_cast<int32_t>(shape.experts_per_rank());
  std::vector<double> odds;
  for (int32_t e = 0; e < num_experts; ++e) {
    odds.push_back(draw == Draw::kZipf ? 1.0 / (1 + e) : 1.0);
    if (draw == Draw::kIdleRank && e < experts) odds.back() = 0.0;
  }
  if (shape.num_ranks == 1) odds.assign(odds.size(), 1.0);
  std::vector<std::vector<int32_t>> topk(shape.num_ranks);
  for (uint32_t source = 0; source < shape.num_ranks; ++source) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      std::vector<double> left = odds;
      for (uint32_t k = 0; k < shape.top_k; ++k) {
        std::discrete_distribution<int32_t> pick(left.begin(), left.end());
        const bool is_empty =
            std::all_of(left.begin(), left.end(), [](double p) { return p == 0; });
        int32_t e = is_empty ? -1 : pick(random);
        if (draw == Draw::kMessy) {
          const uint32_t dice = random() % 8;
          if (dice == 0) e = -1 - static_cast<int32_t>(random() % 5);
          if (dice == 1) e = num_experts + static_cast<int32_t>(random() % 1000);
        } else if (!is_empty) {
          left[static_cast<size_t>(e)] = 0;
        }
        if (draw == Draw::kOneExpert) e = k == 0 ? num_experts - 1 : -1;
        if (draw == Draw::kIdleRank && source == 1) e = -1;
        topk[source].push_back(e);
      }
    }
  }
  return topk;
}

int64_t WorstRecvRows(const GroupShape& shape, Layout layout, int64_t num_tokens) {
  const int64_t sources = shape.num_ranks * num_tokens;
  const int64_t experts = shape.experts_per_rank();
  if (layout == Layout::kExpertBatched) return experts * sources;
  if (layout == Layout::kRankMajor) return sources;
  const int64_t pairs = sources * shape.top_k;
  return (pairs + std::min(experts, pairs) * (shape.align - 1)) / shape.align * shape.align;
}

int64_t NeededRecvRows(const Routing& routing) {
  std::vector<int32_t> ignored(routing.shape.num_ranks);
  const auto demand = Demand(routing, ignored);
  int64_t needed = 0;
  int64_t sum = 0;
  for (size_t e = 0; e < demand.size(); ++e) {
    if (e % routing.shape.experts_per_rank() == 0) sum = 0;
    sum += Up(static_cast<int64_t>(demand[e].size()), routing.shape.align);
    needed = std::max(needed, sum);
  }
  return needed;
}

double DecodeElem(ElemType type, const std::byte* elem) {
  if (type == ElemType::kF32) {
    float value;
    std::memcpy(&value, elem, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, elem, sizeof(bits));
  const int mantissa_bits = type == ElemType::kBf16 ? 7 : 10;
  const int bias = type == ElemType::kBf16 ? 127 : 15;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int top = type == ElemType::kBf16 ? 255 : 31;
  if (exponent == top) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

void EncodeElem(ElemType type, double value, std::byte* elem) {
  if (type == ElemType::kF32) {
    const auto narrowed = static_cast<float>(value);
    std::memcpy(elem, &narrowed, sizeof(narrowed));
    return;
  }
  const int mantissa_bits = type == ElemType::kBf16 ? 7 : 10;
  const int bias = type == ElemType::kBf16 ? 127 : 15;
  uint32_t bits = std::signbit(value) ? 0x8000 : 0;
  if (value != 0) {
    int exponent;
    const double fraction = std::frexp(std::abs(value), &exponent);  // [0.5, 1)
    const auto mantissa =
        static_cast<uint32_t>(std::nearbyint(std::ldexp(fraction, mantissa_bits + 1)));
    if (exponent - 1 + bias < 1) {  // subnormal: a multiple of the smallest
      const double smallest = std::ldexp(1.0, 1 - bias - mantissa_bits);
      bits |= static_cast<uint32_t>(std::nearbyint(std::abs(value) / smallest));
      const auto narrowed = static_cast<uint16_t>(bits);
      std::memcpy(elem, &narrowed, sizeof(narrowed));
      return;
    }
    // A carry out of the mantissa runs into the exponent, as it should.
    bits |= (static_cast<uint32_t>(exponent - 1 + bias - 1) << mantissa_bits) + mantissa;
  }
  const auto narrowed = static_cast<uint16_t>(bits);
  std::memcpy(elem, &narrowed, sizeof(narrowed));
}

double Epsilon(ElemType type) {
  switch (type) {
    case ElemType::kF32:
      return 0x1p-24;
    case ElemType::kBf16:
      return 0x1p-8;
    case ElemType::kF16:
      return 0x1p-11;
  }
  return 0;
}

}  // namespace jax_ep::testing
