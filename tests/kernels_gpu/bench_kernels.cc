// Times plan, dispatch, combine, the weighted dispatch of a backward pass and a combine of scalars
// alone on all GPUs of one process, without JAX: graphs of many calls, events on every rank, median
// over launches of the slowest rank. Also the copy engines' all-to-all in the same run, which is
// the ceiling.
//
//   bench_kernels OUT.json [name=value...]   tokens hidden topk experts align rows iterations, and
//   lists: sms=24,16 (0: by need) piece=4096 slots=3 tma=1; ranks=N: so many, several per GPU,
//   whose SMs must all fit on it; layout=2: rank_major; zipf=1: expert e has odds of 1 / (1 + e),
//   and as many rows as the fullest rank needs
//
// nodes=2: that many virtual nodes, over loopback with `rings` proxy threads per rank; the bound is
// then what a host stage can carry, measured in the same run. With cuda=1 over that transport, with
// stages in the GPUs' memory; the bound is the copy engines' rate. round=N: in rounds of at most so
// many tokens, as in groups of many ranks. slice=N: in slices of at least so many bytes.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/gpu/sm_budget.h"
#include "tests/kernels_gpu/gpu_team.h"
#include "tests/kernels_gpu/graph_timer.h"
#include "tests/kernels_gpu/host_copies.h"

namespace jax_ep::testing {
namespace {

const gpu::GpuApi& Api() { return *jax_ep_gpu_api(); }

struct Options {
  std::map<std::string, std::vector<int64_t>> values = {
      {"tokens", {4096}}, {"hidden", {7168}},    {"topk", {8}},        {"experts", {256}},
      {"align", {16}},    {"rows", {0}},         {"iterations", {20}}, {"launches", {9}},
      {"sms", {24}},      {"piece", {0}},        {"slots", {0}},       {"tma", {1}},
      {"in_place", {1}},  {"f32_partials", {0}}, {"nodes", {1}},       {"rings", {1}},
      {"cuda", {0}},      {"ranks", {0}},        {"layout", {0}},      {"zipf", {0}},
      {"round", {0}},     {"slice", {0}}};
  int64_t operator[](const char* name) const { return values.at(name).front(); }
};

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 2; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t equals = text.find('=');
    const auto found = options.values.find(text.substr(0, equals));
    if (equals == std::string::npos || found == options.values.end()) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      std::exit(2);
    }
    found->second.clear();
    for (size_t at = equals; at != std::string::npos; at = text.find(',', at + 1)) {
      found->second.push_back(std::atoll(text.c_str() + at + 1));
    }
  }
  return options;
}

struct Buffers {
  DeviceArray<int32_t> topk, group_sizes, group_counts, send_slot, recv_src, send_counts,
      recv_counts, recv_topk_idx, words;
  DeviceArray<float> weights, recv_weights, recv_dots, scalars;
  DeviceArray<uint16_t> x, recv_x, recv_g, out;
};

class Bench {
 public:
  Bench(const Options& options, int64_t sms, int64_t piece, int64_t slots, bool tma)
      : options_(options),
        layout_(static_cast<Layout>(options["layout"])),
        num_tokens_(options["tokens"]) {
    shape_.num_ranks =
        static_cast<uint32_t>(options["ranks"] != 0 ? options["ranks"] : NumDevices());
    shape_.node_size = shape_.num_ranks / static_cast<uint32_t>(options["nodes"]);
    shape_.num_experts = static_cast<uint32_t>(options["experts"]);
    shape_.top_k = static_cast<uint32_t>(options["topk"]);
    shape_.align = static_cast<uint32_t>(options["align"]);
    shape_.hidden = static_cast<uint64_t>(options["hidden"]);
    shape_.max_tokens = static_cast<uint64_t>(num_tokens_);
    shape_.round_tokens = static_cast<uint64_t>(options["round"]);
    shape_.elem_type = ElemType::kBf16;
    shape_.f32_partials = options["f32_partials"] != 0;
    for (uint32_t r = 0; r < shape_.num_ranks; ++r) topk_.push_back(DrawTopkOf(r));
    recv_rows_ = options["rows"] != 0 ? options["rows"] : RecvRows();
    const uint64_t row_bytes = shape_.hidden * 2;
    const uint64_t arena =
        (static_cast<uint64_t>(recv_rows_) * 2 + static_cast<uint64_t>(num_tokens_) * 2) *
            row_bytes +
        (uint64_t{64} << 20);
    team_ = std::make_unique<GpuTeam>(
        GpuTeamOptions{.shape = shape_,
                       .in_place = options["in_place"] != 0,
                       .use_tma = tma,
                       .max_sms = static_cast<uint32_t>(sms),
                       .piece_bytes = static_cast<uint32_t>(piece),
                       .ring_slots = static_cast<uint32_t>(slots),
                       .arena_bytes = arena,
                       .num_rings = static_cast<uint32_t>(options["rings"]),
                       .network_slots = 4096,
                       .has_device_stages = options["cuda"] != 0,
                       .least_slice_bytes = static_cast<uint64_t>(options["slice"])});
    for (uint32_t r = 0; r < shape_.num_ranks; ++r) buffers_.push_back(MakeBuffers(r));
  }

  const GroupShape& shape() const { return shape_; }
  // Most rows that one rank gets from others, once per (token, rank).
  int64_t remote_rows() const {
    return *std::max_element(remote_rows_.begin(), remote_rows_.end());
  }
  // Most rows that leave a rank for other nodes, once per (token, node).
  int64_t network_rows() const {
    return *std::max_element(network_rows_.begin(), network_rows_.end());
  }
  int64_t copies() const { return *std::max_element(copies_.begin(), copies_.end()); }
  int64_t recv_rows() const { return recv_rows_; }

  const char* Plan(uint32_t r) {
    Buffers& b = buffers_[r];
    PlanParams params;
    params.layout = layout_;
    params.num_tokens = num_tokens_;
    params.recv_rows = recv_rows_;
    params.topk_idx = b.topk.span();
    params.out.group_sizes = b.group_sizes.span();
    params.out.group_counts = b.group_counts.span();
    params.out.send_slot = b.send_slot.span();
    params.out.recv_src = b.recv_src.span();
    params.out.send_counts = b.send_counts.span();
    params.out.recv_counts = b.recv_counts.span();
    params.out.recv_topk_idx = b.recv_topk_idx.span();
    params.out.num_dropped = b.words.data();
    params.out.overflow = b.words.data() + 1;
    return Api().plan(team_->handle(r), &shape_, &params, team_->stream(r));
  }
  const char* Dispatch(uint32_t r, bool is_backward) {
    Buffers& b = buffers_[r];
    DispatchParams params;
    params.layout = layout_;
    params.num_tokens = num_tokens_;
    params.recv_rows = recv_rows_;
    params.send_slot = b.send_slot.span();
    params.recv_src = b.recv_src.span();
    params.recv_topk_idx = b.recv_topk_idx.span();
    params.x = reinterpret_cast<const std::byte*>(b.x.data());
    params.recv_x = reinterpret_cast<std::byte*>(b.recv_x.data());
    if (is_backward) {
      params.recv_x = reinterpret_cast<std::byte*>(b.recv_g.data());
      params.y = reinterpret_cast<const std::byte*>(b.recv_x.data());
      if (layout_ != Layout::kRankMajor) params.row_weights = b.recv_weights.span();
      params.recv_dots = b.recv_dots.span();
    } else {
      params.weights = b.weights.span();
      params.recv_weights = b.recv_weights.span();
    }
    return Api().dispatch(team_->handle(r), &shape_, &params, team_->stream(r));
  }
  const char* Combine(uint32_t r) {
    Buffers& b = buffers_[r];
    CombineParams params = CombineOf(b);
    params.y = reinterpret_cast<const std::byte*>(b.recv_x.data());
    if (layout_ != Layout::kRankMajor) params.row_weights = b.recv_weights.span();
    params.out = reinterpret_cast<std::byte*>(b.out.data());
    return Api().combine(team_->handle(r), &shape_, &params, team_->stream(r));
  }
  // The gradients of the weights, where they go back in a call of their own.
  const char* CombineScalars(uint32_t r) {
    Buffers& b = buffers_[r];
    CombineParams params = CombineOf(b);
    params.pair_scalars = b.recv_weights.span();
    params.pair_scalars_out = b.scalars.span();
    return Api().combine(team_->handle(r), &shape_, &params, team_->stream(r));
  }

  // Microseconds per call, as TimeInGraphs says.
  template <typename Launch>
  double Time(Launch&& launch) {
    const GraphTimes times{.calls_per_graph = static_cast<int>(options_["iterations"]),
                           .launches = static_cast<int>(options_["launches"])};
    return TimeInGraphs(*team_, times, launch);
  }

 private:
  // A combine that moves nothing yet.
  CombineParams CombineOf(const Buffers& b) const {
    CombineParams params;
    params.layout = layout_;
    params.num_tokens = num_tokens_;
    params.recv_rows = recv_rows_;
    params.send_slot = b.send_slot.span();
    params.recv_src = b.recv_src.span();
    return params;
  }

  // Expert ids of a rank [T * K], and what they mean for the wire.
  std::vector<int32_t> DrawTopkOf(uint32_t r) {
    std::mt19937 random(100 + r);
    const bool is_zipf = options_["zipf"] != 0;
    std::vector<int32_t> topk(static_cast<size_t>(num_tokens_) * shape_.top_k);
    std::vector<int32_t> experts(shape_.num_experts);
    for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
    std::vector<double> odds;
    for (size_t e = 0; e < experts.size(); ++e) odds.push_back(1.0 / static_cast<double>(1 + e));
    remote_rows_.resize(shape_.num_ranks);
    copies_.resize(shape_.num_ranks);
    network_rows_.resize(shape_.num_ranks);
    demand_.resize(shape_.num_experts);
    for (int64_t t = 0; t < num_tokens_; ++t) {
      std::set<uint32_t> owners, nodes;
      std::vector<double> left = odds;
      for (uint32_t k = 0; k < shape_.top_k; ++k) {
        if (is_zipf) {
          std::discrete_distribution<size_t> pick(left.begin(), left.end());
          const size_t expert = pick(random);
          left[expert] = 0;
          experts[k] = static_cast<int32_t>(expert);
        } else {
          std::swap(experts[k], experts[k + random() % (experts.size() - k)]);
        }
        topk[static_cast<size_t>(t) * shape_.top_k + k] = experts[k];
        const uint32_t owner = static_cast<uint32_t>(experts[k]) / shape_.experts_per_rank();
        ++demand_[static_cast<size_t>(experts[k])];
        ++copies_[owner];
        if (owner != r && owners.insert(owner).second) ++remote_rows_[owner];
        if (owner / shape_.node_size != r / shape_.node_size)
          nodes.insert(owner / shape_.node_size);
      }
      network_rows_[r] += static_cast<int64_t>(nodes.size());
    }
    return topk;
  }
  int64_t RecvRows() const {
    if (layout_ == Layout::kRankMajor) return num_tokens_ * shape_.num_ranks;
    if (options_["zipf"] == 0) return num_tokens_ * shape_.top_k * 5 / 4;
    std::vector<int64_t> rows(shape_.num_ranks);
    for (size_t e = 0; e < demand_.size(); ++e) {
      const int64_t align = shape_.align;
      rows[e / shape_.experts_per_rank()] += (demand_[e] + align - 1) / align * align;
    }
    return *std::max_element(rows.begin(), rows.end());
  }

  Buffers MakeBuffers(uint32_t r) {
    std::mt19937 random(200 + r);
    const auto cells = static_cast<size_t>(num_tokens_) * shape_.top_k;
    const auto rows = static_cast<size_t>(recv_rows_);
    const auto row_elems = static_cast<size_t>(shape_.hidden);
    const size_t row_cells = rows * (layout_ == Layout::kRankMajor ? shape_.top_k : 1);
    std::vector<uint16_t> x(static_cast<size_t>(num_tokens_) * row_elems);
    for (uint16_t& elem : x) elem = static_cast<uint16_t>(0x3f00 + random() % 256);
    std::vector<float> weights(cells);
    for (float& weight : weights) weight = 0.25f + static_cast<float>(random() % 100) * 0.01f;
    Buffers b;
    b.topk = DeviceArray<int32_t>::Input(*team_, r, topk_[r]);
    b.x = DeviceArray<uint16_t>::Input(*team_, r, x);
    b.weights = DeviceArray<float>::Input(*team_, r, weights);
    b.group_sizes = DeviceArray<int32_t>::Output(*team_, r, shape_.experts_per_rank());
    b.group_counts = DeviceArray<int32_t>::Output(*team_, r, shape_.experts_per_rank());
    b.send_slot = DeviceArray<int32_t>::Output(*team_, r, cells);
    b.recv_src = DeviceArray<int32_t>::Output(*team_, r, rows);
    b.send_counts = DeviceArray<int32_t>::Output(*team_, r, shape_.num_ranks);
    b.recv_counts = DeviceArray<int32_t>::Output(*team_, r, shape_.num_ranks);
    b.words = DeviceArray<int32_t>::Output(*team_, r, 2);
    b.recv_topk_idx =
        DeviceArray<int32_t>::Output(*team_, r, layout_ == Layout::kRankMajor ? row_cells : 0);
    b.recv_weights = DeviceArray<float>::Output(*team_, r, row_cells);
    b.recv_dots = DeviceArray<float>::Output(*team_, r, rows);
    b.recv_x = DeviceArray<uint16_t>::Output(*team_, r, rows * row_elems);
    b.recv_g = DeviceArray<uint16_t>::Output(*team_, r, rows * row_elems);
    b.out = DeviceArray<uint16_t>::Output(*team_, r, x.size());
    b.scalars = DeviceArray<float>::Output(*team_, r, cells);
    CheckCuda(cudaDeviceSynchronize(), "upload");
    return b;
  }

  const Options& options_;
  GroupShape shape_;
  Layout layout_;
  int64_t num_tokens_;
  int64_t recv_rows_;
  std::vector<std::vector<int32_t>> topk_;
  std::vector<int64_t> remote_rows_, copies_, network_rows_, demand_;
  std::unique_ptr<GpuTeam> team_;
  std::vector<Buffers> buffers_;
};

// GB/s per GPU and direction of the copy engines, every GPU to all its peers at once.
double CopyEngineCeiling() {
  const int count = NumDevices();
  if (count < 2) return 0;
  constexpr size_t kBytes = size_t{64} << 20;
  std::vector<std::byte*> from(static_cast<size_t>(count)), to(static_cast<size_t>(count));
  std::vector<std::vector<cudaStream_t>> streams(static_cast<size_t>(count));
  std::vector<cudaEvent_t> begin(static_cast<size_t>(count));
  std::vector<std::vector<cudaEvent_t>> end(static_cast<size_t>(count));
  for (int d = 0; d < count; ++d) {
    const auto i = static_cast<size_t>(d);
    CheckCuda(cudaSetDevice(d), "device");
    CheckCuda(cudaMalloc(&from[i], kBytes), "malloc");
    CheckCuda(cudaMalloc(&to[i], kBytes * static_cast<size_t>(count)), "malloc");
    CheckCuda(cudaEventCreate(&begin[i]), "event");
    for (int p = 0; p < count - 1; ++p) {
      CheckCuda(cudaStreamCreateWithFlags(&streams[i].emplace_back(), cudaStreamNonBlocking), "s");
      CheckCuda(cudaEventCreate(&end[i].emplace_back()), "event");
    }
  }
  std::vector<double> rates;
  constexpr int kCopies = 8;
  for (int round = 0; round < 7; ++round) {
    for (int d = 0; d < count; ++d) {
      const auto i = static_cast<size_t>(d);
      CheckCuda(cudaSetDevice(d), "device");
      CheckCuda(cudaEventRecord(begin[i], streams[i][0]), "record");
      for (int step = 1; step < count; ++step) {
        const auto peer = static_cast<size_t>((d + step) % count);
        const cudaStream_t stream = streams[i][static_cast<size_t>(step - 1)];
        if (step > 1) CheckCuda(cudaStreamWaitEvent(stream, begin[i], 0), "wait");
        for (int copy = 0; copy < kCopies; ++copy) {
          CheckCuda(cudaMemcpyAsync(to[peer] + i * kBytes, from[i], kBytes,
                                    cudaMemcpyDeviceToDevice, stream),
                    "copy");
        }
        CheckCuda(cudaEventRecord(end[i][static_cast<size_t>(step - 1)], stream), "record");
      }
    }
    double slowest = 0;
    for (int d = 0; d < count; ++d) {
      const auto i = static_cast<size_t>(d);
      for (const cudaEvent_t event : end[i]) {
        CheckCuda(cudaEventSynchronize(event), "sync");
        float ms = 0;
        CheckCuda(cudaEventElapsedTime(&ms, begin[i], event), "elapsed");
        slowest = std::max(slowest, static_cast<double>(ms));
      }
    }
    rates.push_back(static_cast<double>(kBytes) * kCopies * (count - 1) / slowest / 1e6);
  }
  for (int d = 0; d < count; ++d) {
    const auto i = static_cast<size_t>(d);
    CheckCuda(cudaSetDevice(d), "device");
    CheckCuda(cudaFree(from[i]), "free");
    CheckCuda(cudaFree(to[i]), "free");
  }
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

int Main(int argc, char** argv) {
  if (argc < 2 || NumDevices() == 0) {
    std::fprintf(stderr, "usage: bench_kernels OUT.json [name=value...]; needs a CUDA device\n");
    return 2;
  }
  const Options options = Parse(argc, argv);
  {
    GpuTeam peers_enabled({.shape = {.max_tokens = 1}, .arena_bytes = 1024});
  }
  const double ceiling = CopyEngineCeiling();
  std::FILE* json = std::fopen(argv[1], "w");
  if (json == nullptr) return 1;
  std::fprintf(json, "{\"copy_engine_gb_per_s\": %.1f, \"runs\": [", ceiling);
  std::printf("copy engines: %.1f GB/s per GPU and direction\n", ceiling);
  const char* separator = "";
  for (const int64_t tma : options.values.at("tma")) {
    for (const int64_t sms : options.values.at("sms")) {
      for (const int64_t piece : options.values.at("piece")) {
        for (const int64_t slots : options.values.at("slots")) {
          Bench bench(options, sms, piece, slots, tma != 0);
          const double row_bytes = static_cast<double>(bench.shape().hidden) * 2;
          const double wire = static_cast<double>(bench.remote_rows()) * row_bytes;
          if (*separator == 0) {
            std::printf(
                "%ld remote rows, %ld copies, %ld rows; %.1f MB on the wire, floor %.0f us\n",
                bench.remote_rows(), bench.copies(), bench.recv_rows(), wire / 1e6,
                ceiling > 0 ? wire / ceiling / 1e3 : 0);
          }
          const double plan = bench.Time([&](uint32_t r) { return bench.Plan(r); });
          const double dispatch =
              bench.Time([&](uint32_t r) { return bench.Dispatch(r, /*is_backward=*/false); });
          const double both = bench.Time([&](uint32_t r) {
            const char* error = bench.Plan(r);
            return error != nullptr ? error : bench.Dispatch(r, /*is_backward=*/false);
          });
          const double combine = bench.Time([&](uint32_t r) { return bench.Combine(r); });
          // What a layer's combine needs in its backward pass; in rank_major weights are the
          // caller's.
          const double backward =
              options["layout"] == static_cast<int64_t>(Layout::kRankMajor)
                  ? 0
                  : bench.Time([&](uint32_t r) { return bench.Dispatch(r, /*is_backward=*/true); });
          const double scalars = bench.Time([&](uint32_t r) { return bench.CombineScalars(r); });
          std::printf(
              "tma %ld sms %ld piece %ld slots %ld: plan %.1f dispatch %.1f (%.0f GB/s) both %.1f "
              "combine %.1f (%.0f GB/s) backward %.1f scalars %.1f us\n",
              tma, sms, piece, slots, plan, dispatch, wire / dispatch / 1e3, both, combine,
              wire / combine / 1e3, backward, scalars);
          const double network = static_cast<double>(bench.network_rows()) * row_bytes;
          HostStageRates host{};
          if (options["cuda"] != 0) {
            const double bound = network / ceiling / 1e3;
            std::printf("copy engines: bound %.0f us: dispatch %.2f, combine %.2f of it\n", bound,
                        bound / dispatch, bound / combine);
          } else if (bench.shape().num_nodes() > 1) {
            const uint32_t blocks = sms != 0 ? static_cast<uint32_t>(sms) : gpu::kFewestSms;
            host = MeasureHostStage(blocks, static_cast<uint32_t>(options["rings"]));
            const double bound = network / host.least() / 1e3;
            std::printf(
                "host stage: kernels store %.1f, load %.1f, threads copy %.1f GB/s; bound %.0f us: "
                "dispatch %.2f, combine %.2f of it\n",
                host.kernel_stores, host.kernel_loads, host.copies, bound, bound / dispatch,
                bound / combine);
          }
          std::fprintf(
              json,
              "%s\n{\"nodes\": %u, \"cuda\": %ld, \"rings\": %ld, \"host_stores_gb_per_s\": %.1f, "
              "\"host_loads_gb_per_s\": %.1f, \"host_copies_gb_per_s\": %.1f, \"tma\": %ld, "
              "\"sms\": %ld, \"piece\": %ld, \"slots\": %ld, \"ranks\": %u, "
              "\"layout\": %ld, \"zipf\": %ld, \"round\": %ld, "
              "\"tokens\": %ld, \"hidden\": %lu, \"top_k\": %u, \"experts\": %u, \"rows\": %ld, "
              "\"remote_rows\": %ld, \"network_bytes\": %.0f, \"copies\": %ld, \"plan_us\": %.2f, "
              "\"dispatch_us\": %.2f, "
              "\"plan_and_dispatch_us\": %.2f, \"combine_us\": %.2f, \"backward_us\": %.2f, "
              "\"scalars_us\": %.2f}",
              separator, bench.shape().num_nodes(), options["cuda"], options["rings"],
              host.kernel_stores, host.kernel_loads, host.copies, tma, sms, piece, slots,
              bench.shape().num_ranks, options["layout"], options["zipf"], options["round"],
              options["tokens"], bench.shape().hidden, bench.shape().top_k,
              bench.shape().num_experts, bench.recv_rows(), bench.remote_rows(), network,
              bench.copies(), plan, dispatch, both, combine, backward, scalars);
          separator = ",";
        }
      }
    }
  }
  std::fprintf(json, "\n]}\n");
  std::fclose(json);
  return 0;
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) { return jax_ep::testing::Main(argc, argv); }
