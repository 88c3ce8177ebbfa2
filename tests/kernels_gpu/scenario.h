// One routing with all calls that can follow it: parameters for the CPU and the GPU alike, what the
// CPU makes of them, and the comparison bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "tests/kernels/oracle.h"
#include "tests/kernels/team.h"
#include "tests/kernels_gpu/gpu_team.h"

namespace jax_ep::testing {

inline const gpu::GpuApi& Api() { return *jax_ep_gpu_api(); }

// Arrays of one rank: vectors on the host, DeviceArray on a GPU. `recv` and `out` hold the results
// of the calls in the order of Calls.
template <template <typename> typename Array>
struct ScenarioArrays {
  Array<int32_t> topk_idx;
  Array<std::byte> x, y;
  Array<float> weights, row_weights, pair_scalars;
  Array<int32_t> group_sizes, group_counts, send_slot, recv_src, send_counts, recv_counts,
      recv_topk_idx, num_dropped, overflow;
  static constexpr int kDispatches = 4;  // rows and weights, weights, weighted with dots, scaled
  static constexpr int kCombines = 3;    // rows and pair scalars, rows, pair scalars
  Array<std::byte> recv_x[kDispatches];
  Array<float> recv_weights[kDispatches];
  Array<float> recv_dots;
  Array<std::byte> out[kCombines];
  Array<float> pair_scalars_out[kCombines];
};
template <typename T>
using HostVector = std::vector<T>;
using HostArrays = ScenarioArrays<HostVector>;
using DeviceArrays = ScenarioArrays<DeviceArray>;

struct Scenario {
  GroupShape shape;
  Mode mode = Mode::kLl;
  Layout layout = Layout::kExpertMajor;
  int64_t num_tokens = 7;
  int64_t recv_rows = 0;
  Draw draw = Draw::kUniform;
  uint64_t misalignment = 0;  // of x, y and their results
  // Bits of the ranks that take part: pairs of and to the others are none.
  uint64_t active = ~uint64_t{0};

  std::string Name() const;
};

template <typename T>
std::span<T> SpanOf(std::vector<T>& array) {
  return array;
}
template <typename T>
std::span<T> SpanOf(const DeviceArray<T>& array) {
  return array.span();
}

template <typename Arrays>
PlanParams PlanOf(const Scenario& s, Arrays& a) {
  PlanParams params;
  params.mode = s.mode;
  params.layout = s.layout;
  params.num_tokens = s.num_tokens;
  params.recv_rows = s.recv_rows;
  params.topk_idx = SpanOf(a.topk_idx);
  params.out = {.group_sizes = SpanOf(a.group_sizes),
                .group_counts = SpanOf(a.group_counts),
                .send_slot = SpanOf(a.send_slot),
                .recv_src = SpanOf(a.recv_src),
                .send_counts = SpanOf(a.send_counts),
                .recv_counts = SpanOf(a.recv_counts),
                .num_dropped = a.num_dropped.data(),
                .overflow = a.overflow.data(),
                .recv_topk_idx = SpanOf(a.recv_topk_idx)};
  return params;
}

template <typename Arrays>
DispatchParams DispatchOf(const Scenario& s, Arrays& a, int number) {
  DispatchParams params;
  params.mode = s.mode;
  params.layout = s.layout;
  params.num_tokens = s.num_tokens;
  params.recv_rows = s.recv_rows;
  params.send_slot = SpanOf(a.send_slot);
  params.recv_src = SpanOf(a.recv_src);
  params.recv_topk_idx = SpanOf(a.recv_topk_idx);
  if (number != 1) {
    params.x = a.x.data();
    params.recv_x = a.recv_x[number].data();
  }
  if (number < 2) {
    params.weights = SpanOf(a.weights);
    params.recv_weights = SpanOf(a.recv_weights[number]);
  } else {
    params.row_weights = SpanOf(a.row_weights);
  }
  if (number == 2) {
    params.y = a.y.data();
    params.recv_dots = SpanOf(a.recv_dots);
  }
  return params;
}

template <typename Arrays>
CombineParams CombineOf(const Scenario& s, Arrays& a, int number) {
  CombineParams params;
  params.mode = s.mode;
  params.layout = s.layout;
  params.num_tokens = s.num_tokens;
  params.recv_rows = s.recv_rows;
  params.send_slot = SpanOf(a.send_slot);
  params.recv_src = SpanOf(a.recv_src);
  if (number < 2) {
    params.y = a.y.data();
    params.out = a.out[number].data();
  }
  if (number != 1) {
    params.pair_scalars = SpanOf(a.pair_scalars);
    params.pair_scalars_out = SpanOf(a.pair_scalars_out[number]);
  }
  if (number == 0 && s.layout != Layout::kRankMajor) params.row_weights = SpanOf(a.row_weights);
  return params;
}

template <typename Arrays>
LlDispatchParams LlDispatchOf(const Scenario& s, Arrays& a) {
  LlDispatchParams params{.plan = PlanOf(s, a), .dispatch = DispatchOf(s, a, 0)};
  params.dispatch.send_slot = {};
  params.dispatch.recv_src = {};
  params.dispatch.recv_topk_idx = {};
  return params;
}

// Draws a routing and its inputs, and runs all calls on the CPU: what each rank must get.
std::vector<HostArrays> RunOnCpu(const Scenario& scenario, Team& team, std::mt19937& random);
int64_t DrawRecvRows(const Scenario& scenario, std::mt19937& random);

// Inputs, and outputs with poison in them.
DeviceArrays Upload(const Scenario& scenario, GpuTeam& team, uint32_t rank, const HostArrays& host);
// New contents of the inputs.
void Refresh(GpuTeam& team, uint32_t rank, DeviceArrays& device, const HostArrays& host);

void ExpectNoFailure(GpuTeam& team);
void ExpectPlan(const DeviceArrays& device, const HostArrays& host);
void ExpectDispatch(const DeviceArrays& device, const HostArrays& host, int number);
void ExpectCombine(const DeviceArrays& device, const HostArrays& host, int number);

// Half of the teams are one node.
uint32_t DrawNodeSize(uint32_t num_ranks, std::mt19937& random);
// JAX_EP_TEST_SEEDS, or `usual`.
uint32_t NumSeeds(uint32_t usual);
// With JAX_EP_TEST_SMALL_RANKS=R: at most R ranks, few experts and tokens, short rows. For
// sanitizers, under which kernels take a hundred times as long.
void ShrinkIfAsked(GroupShape& shape);

// Operations that a random group has behind it: none, or so many that the numbers of the next ones
// lose their low bits (31 and 32) one after the other.
inline uint64_t OperationsBefore(uint32_t seed) {
  constexpr uint32_t kStarts = 3;
  constexpr uint64_t kBoundaries[kStarts] = {0, uint64_t{1} << 31, uint64_t{1} << 32};
  const uint64_t boundary = kBoundaries[seed % kStarts];
  return boundary == 0 ? 0 : boundary - 1 - seed / kStarts % 8;
}

template <typename T>
T Pick(std::mt19937& random, std::initializer_list<T> choices) {
  return *(choices.begin() + random() % choices.size());
}

}  // namespace jax_ep::testing
