// Times mode ll on all GPUs of one process, without JAX: plan and dispatch in one call, combine,
// and both halves of each. Graphs of many calls; median over launches of the slowest rank.
//
//   bench_ll [plain] [rank_major] [ranks=N] [sms=M] [nodes=N] [cuda] [round=C] [tokens...]
//
// DeepSeek-V3 shape, layout expert_batched or rank_major, padding undefined. plain: without bulk
// copies; ranks: several per GPU, whose blocks (8/3 of M; without it all SMs but 32) must all fit
// on it. nodes: so many virtual ones, over loopback, or with `cuda` over that transport. round:
// between nodes calls come in rounds of so many tokens, and have no halves (0.0 us).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels_gpu/graph_timer.h"
#include "tests/kernels_gpu/scenario.h"

namespace jax_ep::testing {
namespace {

constexpr GraphTimes kTimes = {.calls_per_graph = 40, .launches = 11};

struct Machine {
  uint32_t num_ranks = static_cast<uint32_t>(NumDevices());
  uint32_t sms = 0;  // by need
  bool use_tma = true;
  Layout layout = Layout::kExpertBatched;
  uint32_t num_nodes = 1;
  bool has_device_stages = false;
  uint32_t round_tokens = 0;  // as many as fit
};

void Run(int64_t num_tokens, const Machine& machine) {
  const bool use_tma = machine.use_tma;
  Scenario s;
  s.shape.num_ranks = machine.num_ranks;
  s.shape.node_size = machine.num_ranks / machine.num_nodes;
  s.shape.num_experts = 256;
  s.shape.top_k = 8;
  s.shape.hidden = 7168;
  s.shape.max_tokens = s.shape.ll_tokens = static_cast<uint64_t>(num_tokens);
  s.shape.elem_type = ElemType::kBf16;
  s.shape.f32_partials = false;
  s.shape.has_ht = false;
  s.shape.round_tokens = machine.round_tokens;
  s.layout = machine.layout;
  const bool is_rank_major = s.layout == Layout::kRankMajor;
  s.num_tokens = num_tokens;
  s.recv_rows = WorstRecvRows(s.shape, s.layout, num_tokens);
  const uint64_t rows_bytes = static_cast<uint64_t>(s.recv_rows) * s.shape.hidden * 2;
  GpuTeam team({.shape = s.shape,
                .use_tma = use_tma,
                .max_sms = machine.sms,
                .arena_bytes = 2 * rows_bytes + (uint64_t{64} << 20),
                .network_slots = 4096,
                .has_device_stages = machine.has_device_stages});
  std::mt19937 random(5);
  const auto topk = DrawTopk(s.shape, num_tokens, Draw::kUniform, random);
  std::vector<DeviceArrays> arrays;
  std::vector<DeviceArray<int32_t>> epochs;
  int64_t most_remote = 0;
  for (uint32_t r = 0; r < s.shape.num_ranks; ++r) {
    const auto cells = static_cast<size_t>(num_tokens) * s.shape.top_k;
    const auto rows = static_cast<size_t>(s.recv_rows);
    int64_t remote = 0;
    for (size_t t = 0; t < static_cast<size_t>(num_tokens); ++t) {
      uint64_t dests = 0;
      for (size_t k = 0; k < s.shape.top_k; ++k) {
        const auto expert = static_cast<uint32_t>(topk[r][t * s.shape.top_k + k]);
        dests |= uint64_t{1} << (expert / s.shape.experts_per_rank());
      }
      remote += __builtin_popcountll(dests & ~(uint64_t{1} << r));
    }
    most_remote = std::max(most_remote, remote);
    const std::vector<std::byte> x(static_cast<size_t>(num_tokens) * s.shape.hidden * 2,
                                   std::byte{0x3f});
    const std::vector<float> weights(cells, 0.5f);
    DeviceArrays d;
    d.topk_idx = DeviceArray<int32_t>::Input(team, r, topk[r]);
    d.x = DeviceArray<std::byte>::Input(team, r, x);
    d.weights = DeviceArray<float>::Input(team, r, weights);
    d.group_sizes = DeviceArray<int32_t>::Output(team, r, s.shape.experts_per_rank());
    d.group_counts = DeviceArray<int32_t>::Output(team, r, s.shape.experts_per_rank());
    d.send_slot = DeviceArray<int32_t>::Output(team, r, cells);
    d.recv_src = DeviceArray<int32_t>::Output(team, r, rows);
    d.send_counts = DeviceArray<int32_t>::Output(team, r, s.shape.num_ranks);
    d.recv_counts = DeviceArray<int32_t>::Output(team, r, s.shape.num_ranks);
    d.recv_topk_idx =
        DeviceArray<int32_t>::Output(team, r, is_rank_major ? rows * s.shape.top_k : 0);
    d.num_dropped = DeviceArray<int32_t>::Output(team, r, 1);
    d.overflow = DeviceArray<int32_t>::Output(team, r, 1);
    d.recv_x[0] = DeviceArray<std::byte>::Output(team, r, rows_bytes);
    d.recv_weights[0] =
        DeviceArray<float>::Output(team, r, rows * (is_rank_major ? s.shape.top_k : 1));
    d.row_weights = d.recv_weights[0];
    d.y = d.recv_x[0];
    d.out[1] = DeviceArray<std::byte>::Output(team, r, x.size());
    d.out[0] = d.out[1];
    arrays.push_back(d);
    epochs.push_back(DeviceArray<int32_t>::Output(team, r, 1));
    CheckCuda(cudaDeviceSynchronize(), "upload");
  }

  const auto dispatch_params = [&](uint32_t r) {
    LlDispatchParams params = LlDispatchOf(s, arrays[r]);
    params.dispatch.zero_padding = false;
    return params;
  };
  const auto combine_params = [&](uint32_t r) {
    CombineParams params = CombineOf(s, arrays[r], 1);
    if (!is_rank_major) params.row_weights = arrays[r].row_weights.span();
    return params;
  };
  const auto dispatch = [&](uint32_t r) {
    const LlDispatchParams params = dispatch_params(r);
    return Api().ll_dispatch(team.handle(r), &team.shape(), &params, team.stream(r));
  };
  const auto combine = [&](uint32_t r) {
    const CombineParams params = combine_params(r);
    return Api().combine(team.handle(r), &team.shape(), &params, team.stream(r));
  };
  const double dispatch_us = TimeInGraphs(team, kTimes, dispatch);
  const double combine_us = TimeInGraphs(team, kTimes, combine);
  const double both_us = TimeInGraphs(team, kTimes, [&](uint32_t r) {
    const char* error = dispatch(r);
    return error != nullptr ? error : combine(r);
  });
  const bool has_halves = GpuLlRoundTokens(s.shape) >= s.shape.ll_tokens;
  const double halves_us = !has_halves ? 0 : TimeInGraphs(team, kTimes, [&](uint32_t r) {
    const LlDispatchParams params = dispatch_params(r);
    const char* error = Api().ll_dispatch_start(team.handle(r), &team.shape(), &params,
                                                epochs[r].data(), team.stream(r));
    return error != nullptr ? error
                            : Api().ll_dispatch_done(team.handle(r), &team.shape(), &params,
                                                     epochs[r].data(), team.stream(r));
  });
  const double combine_halves_us = !has_halves ? 0 : TimeInGraphs(team, kTimes, [&](uint32_t r) {
    const CombineParams params = combine_params(r);
    const char* error = Api().combine_start(team.handle(r), &team.shape(), &params,
                                            epochs[r].data(), team.stream(r));
    return error != nullptr ? error
                            : Api().combine_done(team.handle(r), &team.shape(), &params,
                                                 epochs[r].data(), team.stream(r));
  });
  const double wire = static_cast<double>(most_remote) * static_cast<double>(s.shape.hidden) * 2;
  std::printf(
      "%s%stokens %ld: %ld remote rows; dispatch %.1f us (%.0f GB/s) combine %.1f us (%.0f GB/s) "
      "both "
      "%.1f us; start+done: dispatch %.1f us combine %.1f us\n",
      use_tma ? "" : "plain ", is_rank_major ? "rank_major " : "", num_tokens, most_remote,
      dispatch_us, wire / dispatch_us / 1e3, combine_us, wire / combine_us / 1e3, both_us,
      halves_us, combine_halves_us);
  std::fflush(stdout);
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  if (NumDevices() == 0) {
    std::fprintf(stderr, "bench_ll needs a CUDA device\n");
    return 2;
  }
  Machine machine;
  std::vector<int64_t> tokens;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto value_of = [&](const char* name) {
      return static_cast<uint32_t>(std::atoi(text.c_str() + std::string(name).size()));
    };
    if (text == "plain") {
      machine.use_tma = false;
    } else if (text == "rank_major") {
      machine.layout = jax_ep::Layout::kRankMajor;
    } else if (text.starts_with("ranks=")) {
      machine.num_ranks = value_of("ranks=");
    } else if (text.starts_with("nodes=")) {
      machine.num_nodes = value_of("nodes=");
    } else if (text == "cuda") {
      machine.has_device_stages = true;
    } else if (text.starts_with("round=")) {
      machine.round_tokens = value_of("round=");
    } else if (text.starts_with("sms=")) {
      machine.sms = value_of("sms=");
    } else {
      tokens.push_back(std::atoll(text.c_str()));
    }
  }
  if (tokens.empty()) tokens = {1, 8, 32, 64, 128, 256, 512};
  for (const int64_t count : tokens) Run(count, machine);
  return 0;
}
