#include "tests/kernels_gpu/scenario.h"

#include <cstdlib>

namespace jax_ep::testing {
namespace {

std::vector<std::byte> RandomRows(const GroupShape& shape, int64_t count, std::mt19937& random) {
  std::vector<std::byte> rows(static_cast<size_t>(count) * shape.hidden *
                              ElemBytes(shape.elem_type));
  for (size_t i = 0; i < rows.size(); i += ElemBytes(shape.elem_type)) {
    // Exact in every type.
    const double value = static_cast<double>(static_cast<int32_t>(random() % 509) - 254) / 64;
    EncodeElem(shape.elem_type, value, rows.data() + i);
  }
  return rows;
}

std::vector<float> RandomFloats(size_t count, std::mt19937& random) {
  std::vector<float> floats(count);
  for (float& value : floats) {
    value = static_cast<float>(static_cast<int32_t>(random()) % 100000) * 1.234e-5f;
    if (random() % 16 == 0) value = -0.0f;
  }
  return floats;
}

template <typename T>
void ExpectSame(const DeviceArray<T>& got, const std::vector<T>& want, const char* what) {
  const std::vector<T> host = got.Download();
  EXPECT_TRUE(got.HasCanary()) << what;
  if (want.empty() || std::memcmp(host.data(), want.data(), want.size() * sizeof(T)) == 0) return;
  size_t first = 0;
  size_t count = 0;
  for (size_t i = want.size(); i-- > 0;) {
    if (std::memcmp(&host[i], &want[i], sizeof(T)) == 0) continue;
    first = i;
    ++count;
  }
  std::ostringstream values;
  if constexpr (std::is_same_v<T, std::byte>) {
    values << std::to_integer<int>(host[first]) << ", expected "
           << std::to_integer<int>(want[first]);
  } else {
    values << host[first] << ", expected " << want[first];
  }
  ADD_FAILURE() << what << ": " << count << " of " << want.size() << " differ, first at " << first
                << ": got " << values.str();
}

}  // namespace

std::string Scenario::Name() const {
  std::ostringstream name;
  name << (mode == Mode::kLl ? "ll " : "ht ") << shape.num_ranks << " ranks in nodes of "
       << shape.node_size << " E" << shape.num_experts << " K" << shape.top_k << " A" << shape.align
       << " T" << num_tokens << "/" << shape.max_tokens << " H" << shape.hidden << " R" << recv_rows
       << " type " << static_cast<int>(shape.elem_type) << " layout " << static_cast<int>(layout)
       << " " << DrawName(draw) << (shape.f32_partials ? "" : " dtype_partials")
       << (misalignment != 0 ? " misaligned" : "");
  if (active != ~uint64_t{0}) name << " active " << std::hex << active;
  return name.str();
}

int64_t DrawRecvRows(const Scenario& s, std::mt19937& random) {
  const int64_t worst = WorstRecvRows(s.shape, s.layout, s.num_tokens);
  if (s.layout != Layout::kExpertMajor || random() % 3 == 0) return worst;
  const int64_t align = s.shape.align;
  const int64_t fair = s.num_tokens * s.shape.top_k;
  if (random() % 2 == 0) return fair / 2 / align * align;
  return (fair * 5 / 4 + align - 1) / align * align + s.shape.experts_per_rank() * align;
}

uint32_t DrawNodeSize(uint32_t num_ranks, std::mt19937& random) {
  const auto num_nodes = Pick<uint32_t>(random, {1, 1, 1, 2, 3, 4, 8});
  return num_ranks % num_nodes == 0 ? num_ranks / num_nodes : num_ranks;
}

std::vector<HostArrays> RunOnCpu(const Scenario& s, Team& team, std::mt19937& random) {
  const GroupShape& shape = s.shape;
  auto topk = DrawTopk(shape, s.num_tokens, s.draw, random);
  const auto is_active = [&](uint32_t rank) {
    return rank >= shape.num_ranks || HasRank(s.active, rank);
  };
  for (uint32_t r = 0; r < shape.num_ranks; ++r) {
    for (int32_t& id : topk[r]) {
      const uint32_t owner = static_cast<uint32_t>(id) / shape.experts_per_rank();
      if (!is_active(r) || (id >= 0 && !is_active(owner))) id = -1;
    }
  }
  const auto cells = static_cast<size_t>(s.num_tokens * shape.top_k);
  const auto rows = static_cast<size_t>(s.recv_rows);
  const size_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const bool is_rank_major = s.layout == Layout::kRankMajor;
  const size_t row_cells = is_rank_major ? rows * shape.top_k : rows;
  std::vector<HostArrays> arrays(shape.num_ranks);
  for (uint32_t r = 0; r < shape.num_ranks; ++r) {
    HostArrays& a = arrays[r];
    a.topk_idx = topk[r];
    a.x = RandomRows(shape, s.num_tokens, random);
    a.y = RandomRows(shape, s.recv_rows, random);
    a.weights = RandomFloats(cells, random);
    a.row_weights = RandomFloats(rows, random);
    a.pair_scalars = RandomFloats(row_cells, random);
    a.group_sizes.resize(shape.experts_per_rank());
    a.group_counts.resize(shape.experts_per_rank());
    a.send_slot.resize(cells);
    a.recv_src.resize(rows);
    a.send_counts.resize(shape.num_ranks);
    a.recv_counts.resize(shape.num_ranks);
    a.recv_topk_idx.resize(is_rank_major ? row_cells : 0);
    a.num_dropped.resize(1);
    a.overflow.resize(1);
    for (auto& array : a.recv_x) array.resize(rows * row_bytes);
    for (auto& array : a.recv_weights) array.resize(row_cells);
    a.recv_dots.resize(rows);
    for (auto& array : a.out) array.resize(static_cast<size_t>(s.num_tokens) * row_bytes);
    for (auto& array : a.pair_scalars_out) array.resize(cells);
  }
  const auto statuses = team.Run([&](Rank& rank) -> Status {
    HostArrays& a = arrays[rank.rank];
    JAX_EP_RETURN_IF_ERROR(RunPlan(rank, PlanOf(s, a)));
    // Padding of y may hold anything.
    for (size_t row = 0; row < rows; ++row) {
      if (a.recv_src[row] >= 0) continue;
      std::fill_n(a.y.begin() + static_cast<std::ptrdiff_t>(row * row_bytes), row_bytes,
                  std::byte{0xff});
    }
    for (int i = 0; i < HostArrays::kDispatches; ++i) {
      JAX_EP_RETURN_IF_ERROR(RunDispatch(rank, DispatchOf(s, a, i)));
    }
    for (int i = 0; i < HostArrays::kCombines; ++i) {
      JAX_EP_RETURN_IF_ERROR(RunCombine(rank, CombineOf(s, a, i)));
    }
    return Status::Ok();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
  return arrays;
}

DeviceArrays Upload(const Scenario& s, GpuTeam& team, uint32_t r, const HostArrays& h) {
  DeviceArrays d;
  const uint64_t off = s.misalignment;
  const auto in = [&](auto& to, const auto& from, uint64_t by = 0) {
    to = std::remove_reference_t<decltype(to)>::Input(team, r, from, by);
  };
  const auto out = [&](auto& to, const auto& like, uint64_t by = 0) {
    to = std::remove_reference_t<decltype(to)>::Output(team, r, like.size(), by);
  };
  in(d.topk_idx, h.topk_idx);
  in(d.x, h.x, off);
  in(d.y, h.y, off);
  in(d.weights, h.weights);
  in(d.row_weights, h.row_weights);
  in(d.pair_scalars, h.pair_scalars);
  out(d.group_sizes, h.group_sizes);
  out(d.group_counts, h.group_counts);
  out(d.send_slot, h.send_slot);
  out(d.recv_src, h.recv_src);
  out(d.send_counts, h.send_counts);
  out(d.recv_counts, h.recv_counts);
  out(d.recv_topk_idx, h.recv_topk_idx);
  out(d.num_dropped, h.num_dropped);
  out(d.overflow, h.overflow);
  for (int i = 0; i < HostArrays::kDispatches; ++i) {
    out(d.recv_x[i], h.recv_x[i], off);
    out(d.recv_weights[i], h.recv_weights[i]);
  }
  out(d.recv_dots, h.recv_dots);
  for (int i = 0; i < HostArrays::kCombines; ++i) {
    out(d.out[i], h.out[i], off);
    out(d.pair_scalars_out[i], h.pair_scalars_out[i]);
  }
  CheckCuda(cudaDeviceSynchronize(), "upload");
  return d;
}

void Refresh(GpuTeam& team, uint32_t r, DeviceArrays& d, const HostArrays& h) {
  team.UseDeviceOf(r);
  d.topk_idx.Upload(h.topk_idx);
  d.x.Upload(h.x);
  d.y.Upload(h.y);
  d.weights.Upload(h.weights);
  d.row_weights.Upload(h.row_weights);
  d.pair_scalars.Upload(h.pair_scalars);
  CheckCuda(cudaDeviceSynchronize(), "upload");
}

void ExpectNoFailure(GpuTeam& team) {
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    const gpu::RankStatus& status = team.status(r);
    EXPECT_EQ(status.failed.load(), 0u)
        << "rank " << r << " kind " << status.kind << " operation " << status.operation << " peer "
        << status.peer << " epoch " << status.epoch << " expected " << status.expected << " actual "
        << status.actual;
  }
}

void ExpectPlan(const DeviceArrays& d, const HostArrays& h) {
  ExpectSame(d.group_sizes, h.group_sizes, "group_sizes");
  ExpectSame(d.group_counts, h.group_counts, "group_counts");
  ExpectSame(d.send_slot, h.send_slot, "send_slot");
  ExpectSame(d.recv_src, h.recv_src, "recv_src");
  ExpectSame(d.send_counts, h.send_counts, "send_counts");
  ExpectSame(d.recv_counts, h.recv_counts, "recv_counts");
  ExpectSame(d.recv_topk_idx, h.recv_topk_idx, "recv_topk_idx");
  ExpectSame(d.num_dropped, h.num_dropped, "num_dropped");
  ExpectSame(d.overflow, h.overflow, "overflow");
}

void ExpectDispatch(const DeviceArrays& d, const HostArrays& h, int number) {
  SCOPED_TRACE("dispatch " + std::to_string(number));
  if (number != 1) ExpectSame(d.recv_x[number], h.recv_x[number], "recv_x");
  if (number < 2) ExpectSame(d.recv_weights[number], h.recv_weights[number], "recv_weights");
  if (number == 2) ExpectSame(d.recv_dots, h.recv_dots, "recv_dots");
}

void ExpectCombine(const DeviceArrays& d, const HostArrays& h, int number) {
  SCOPED_TRACE("combine " + std::to_string(number));
  if (number < 2) ExpectSame(d.out[number], h.out[number], "out");
  if (number != 1) {
    ExpectSame(d.pair_scalars_out[number], h.pair_scalars_out[number], "pair_scalars_out");
  }
}

uint32_t NumSeeds(uint32_t usual) {
  const char* text = std::getenv("JAX_EP_TEST_SEEDS");
  return text != nullptr ? static_cast<uint32_t>(std::atoi(text)) : usual;
}

void ShrinkIfAsked(GroupShape& shape) {
  const char* ranks = std::getenv("JAX_EP_TEST_SMALL_RANKS");
  if (ranks == nullptr) return;
  const uint32_t experts = std::min(shape.experts_per_rank(), 4u);
  shape.num_ranks = std::min(shape.num_ranks, static_cast<uint32_t>(std::atoi(ranks)));
  shape.node_size = std::min(shape.node_size, shape.num_ranks);
  if (shape.num_ranks % shape.node_size != 0) shape.node_size = shape.num_ranks;
  shape.num_experts = shape.num_ranks * experts;
  shape.top_k = std::min({shape.top_k, shape.num_experts, 8u});
  shape.hidden = std::min<uint64_t>(shape.hidden, 1024);
  shape.max_tokens = std::min<uint64_t>(shape.max_tokens, 20);
}

}  // namespace jax_ep::testing
