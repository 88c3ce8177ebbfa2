// Times dispatches whose rows travel in FP8 beside those of plain bf16 rows, in one run, on all
// GPUs of one process without JAX. What it prints has quantisation inside.
//
//   bench_fp8 [ht] [ll] [plain] [ranks=N] [sms=M] [tokens=T] [form=F] [launches=L]
//   sms=0: by need; plain: no bulk copies; form: 0, 1 or 2 alone of the three that are printed;
//   launches: of the graph that is timed, 20 calls in mode ht and 40 in mode ll
//
// DeepSeek-V3 shape. ht: 4,096 tokens, rows by expert with zeroed padding, and one row per token
// and rank. ll: 8 and 128 tokens, plan and dispatch in one, layout expert_batched, padding
// undefined.
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels_gpu/graph_timer.h"
#include "tests/kernels_gpu/scenario.h"

namespace jax_ep::testing {
namespace {

struct Machine {
  uint32_t num_ranks = static_cast<uint32_t>(NumDevices());
  uint32_t sms = 0;
  bool use_tma = true;
  int64_t tokens = 0;  // 0: those above
  int form = -1;       // of kForms; -1: all
  int launches = GraphTimes{}.launches;
};

// How rows travel and arrive.
enum class Form { kPlain, kRows, kSplit };
constexpr std::pair<Form, const char*> kForms[] = {
    {Form::kPlain, "bf16"}, {Form::kRows, "fp8 to bf16"}, {Form::kSplit, "fp8 values and scales"}};

class Bench {
 public:
  Bench(const Machine& machine, Mode mode, Layout layout, int64_t num_tokens) {
    GroupShape& shape = scenario_.shape;
    shape.num_ranks = shape.node_size = machine.num_ranks;
    shape.num_experts = 256;
    shape.top_k = 8;
    shape.align = 16;
    shape.hidden = 7168;
    shape.elem_type = ElemType::kBf16;
    shape.f32_partials = false;
    shape.has_ht = mode == Mode::kHt;
    shape.max_tokens = static_cast<uint64_t>(num_tokens);
    shape.ll_tokens = mode == Mode::kLl ? shape.max_tokens : 0;
    scenario_.mode = mode;
    scenario_.layout = layout;
    scenario_.num_tokens = num_tokens;
    scenario_.recv_rows = layout == Layout::kExpertMajor ? num_tokens * shape.top_k * 5 / 4
                                                         : WorstRecvRows(shape, layout, num_tokens);
    const uint64_t row_bytes = shape.hidden * 2;
    const uint64_t rows = static_cast<uint64_t>(scenario_.recv_rows + num_tokens);
    team_.emplace(GpuTeamOptions{.shape = shape,
                                 .use_tma = machine.use_tma,
                                 .max_sms = machine.sms,
                                 .arena_bytes = rows * (row_bytes + 512) + (uint64_t{64} << 20)});
    std::mt19937 random(5);
    const auto topk = DrawTopk(shape, num_tokens, Draw::kUniform, random);
    for (uint32_t r = 0; r < shape.num_ranks; ++r) MakeArrays(r, topk[r]);
  }

  double Time(Form form, int launches) {
    if (scenario_.mode == Mode::kHt) {
      const std::string error = team_->Run([&](uint32_t r) {
        const PlanParams plan = PlanOf(scenario_, arrays_[r]);
        return Api().plan(team_->handle(r), &team_->shape(), &plan, team_->stream(r));
      });
      if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
    }
    const GraphTimes times{.calls_per_graph = scenario_.mode == Mode::kHt ? 20 : 40,
                           .launches = launches};
    return TimeInGraphs(*team_, times, [&](uint32_t r) { return Launch(r, form); });
  }

 private:
  void MakeArrays(uint32_t r, const std::vector<int32_t>& topk) {
    const GroupShape& shape = scenario_.shape;
    const auto rows = static_cast<size_t>(scenario_.recv_rows);
    const size_t cells = topk.size();
    const size_t row_cells = scenario_.layout == Layout::kRankMajor ? rows * shape.top_k : rows;
    std::mt19937 random(100 + r);
    std::vector<std::byte> x(static_cast<size_t>(scenario_.num_tokens) * shape.hidden * 2);
    for (size_t i = 0; i < x.size(); i += 2) {
      const auto bits = static_cast<uint16_t>(0x3f00 + random() % 256);
      std::memcpy(&x[i], &bits, sizeof(bits));
    }
    GpuTeam& team = *team_;
    DeviceArrays d;
    d.topk_idx = DeviceArray<int32_t>::Input(team, r, topk);
    d.x = DeviceArray<std::byte>::Input(team, r, x);
    d.weights = DeviceArray<float>::Input(team, r, std::vector<float>(cells, 0.5f));
    d.group_sizes = DeviceArray<int32_t>::Output(team, r, shape.experts_per_rank());
    d.group_counts = DeviceArray<int32_t>::Output(team, r, shape.experts_per_rank());
    d.send_slot = DeviceArray<int32_t>::Output(team, r, cells);
    d.recv_src = DeviceArray<int32_t>::Output(team, r, rows);
    d.send_counts = DeviceArray<int32_t>::Output(team, r, shape.num_ranks);
    d.recv_counts = DeviceArray<int32_t>::Output(team, r, shape.num_ranks);
    d.recv_topk_idx = DeviceArray<int32_t>::Output(
        team, r, scenario_.layout == Layout::kRankMajor ? row_cells : 0);
    d.num_dropped = DeviceArray<int32_t>::Output(team, r, 1);
    d.overflow = DeviceArray<int32_t>::Output(team, r, 1);
    d.recv_x[0] = DeviceArray<std::byte>::Output(team, r, rows * shape.hidden * 2);
    d.recv_weights[0] = DeviceArray<float>::Output(team, r, row_cells);
    scales_.push_back(DeviceArray<std::byte>::Output(team, r, rows * shape.hidden / 128 * 4));
    arrays_.push_back(d);
    CheckCuda(cudaDeviceSynchronize(), "upload");
  }

  const char* Launch(uint32_t r, Form form) {
    LlDispatchParams params = LlDispatchOf(scenario_, arrays_[r]);
    DispatchParams dispatch = DispatchOf(scenario_, arrays_[r], 0);
    dispatch.zero_padding = params.dispatch.zero_padding = scenario_.mode == Mode::kHt;
    Fp8Wire wire;
    if (form != Form::kPlain) wire.block = 128;
    if (form == Form::kSplit) wire.recv_scales = scales_[r].data();
    dispatch.wire = params.dispatch.wire = wire;
    if (scenario_.mode == Mode::kHt) {
      return Api().dispatch(team_->handle(r), &team_->shape(), &dispatch, team_->stream(r));
    }
    return Api().ll_dispatch(team_->handle(r), &team_->shape(), &params, team_->stream(r));
  }

  Scenario scenario_;
  std::optional<GpuTeam> team_;
  std::vector<DeviceArrays> arrays_;
  std::vector<DeviceArray<std::byte>> scales_;
};

void Run(const Machine& machine, Mode mode, Layout layout, const char* name, int64_t num_tokens) {
  Bench bench(machine, mode, layout, num_tokens);
  std::printf("%s, %ld tokens:", name, num_tokens);
  double first = 0;
  for (int i = 0; i < static_cast<int>(std::size(kForms)); ++i) {
    if (machine.form >= 0 && i != machine.form) continue;
    const double us = bench.Time(kForms[i].first, machine.launches);
    if (first == 0) first = us;
    std::printf(" %s %.1f us (%.2f)", kForms[i].second, us, us / first);
  }
  std::printf("\n");
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  if (NumDevices() == 0) {
    std::fprintf(stderr, "bench_fp8 needs a CUDA device\n");
    return 2;
  }
  Machine machine;
  bool has_ht = false, has_ll = false;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto value = [&] { return std::atoi(text.c_str() + text.find('=') + 1); };
    if (text == "ht") {
      has_ht = true;
    } else if (text == "ll") {
      has_ll = true;
    } else if (text == "plain") {
      machine.use_tma = false;
    } else if (text.starts_with("ranks=")) {
      machine.num_ranks = static_cast<uint32_t>(value());
    } else if (text.starts_with("sms=")) {
      machine.sms = static_cast<uint32_t>(value());
    } else if (text.starts_with("tokens=")) {
      machine.tokens = value();
    } else if (text.starts_with("form=")) {
      machine.form = value();
    } else if (text.starts_with("launches=")) {
      machine.launches = value();
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
  }
  if (machine.form >= static_cast<int>(std::size(kForms))) {
    std::fprintf(stderr, "form: got %d, expected 0, 1 or 2\n", machine.form);
    return 2;
  }
  std::printf("%s, %u ranks, sms %u\n", machine.use_tma ? "bulk copies" : "plain",
              machine.num_ranks, machine.sms);
  if (has_ht || !has_ll) {
    const int64_t tokens = machine.tokens != 0 ? machine.tokens : 4096;
    Run(machine, Mode::kHt, Layout::kExpertMajor, "ht by expert", tokens);
    Run(machine, Mode::kHt, Layout::kRankMajor, "ht by rank", tokens);
  }
  if (has_ll || !has_ht) {
    for (const int64_t tokens : machine.tokens != 0 ? std::vector<int64_t>{machine.tokens}
                                                    : std::vector<int64_t>{8, 32, 128}) {
      Run(machine, Mode::kLl, Layout::kExpertBatched, "ll", tokens);
    }
  }
  return 0;
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) { return jax_ep::testing::Main(argc, argv); }
