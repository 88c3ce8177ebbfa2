#include "tests/kernels/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <sstream>

namespace jax_ep::testing {
namespace {

using Bytes = Guarded<std::byte>;
using Ints = Guarded<int32_t>;
using Floats = Guarded<float>;

size_t Size(int64_t count) { return static_cast<size_t>(count); }

// Prime, so that rows of any width read it differently.
constexpr size_t kPoolSize = 65521;

// Normally distributed elements of a type, drawn once: drawing was most of the test's time.
const std::vector<std::byte>& NormalElems(ElemType type) {
  static const std::vector<std::vector<std::byte>> pools = [] {
    std::vector<std::vector<std::byte>> made;
    for (const ElemType each : {ElemType::kF32, ElemType::kBf16, ElemType::kF16}) {
      std::mt19937 random(17);
      std::normal_distribution<float> normal;
      std::vector<std::byte>& pool = made.emplace_back(kPoolSize * ElemBytes(each));
      for (size_t i = 0; i < pool.size(); i += ElemBytes(each)) {
        EncodeElem(each, normal(random), pool.data() + i);
      }
    }
    return made;
  }();
  return pools[static_cast<size_t>(type)];
}

// Inputs and outputs of one rank in one round.
struct RankArrays {
  std::vector<std::byte> x, x2, g, y;
  std::vector<float> weights, row_weights, pair_scalars;
  Ints group_sizes, group_counts, send_slot, recv_src, send_counts, recv_counts, recv_topk_idx;
  Guarded<int32_t> num_dropped{1}, overflow{1};
  Bytes recv_x, recv_x2, recv_g, out, out2;
  Floats recv_weights, recv_weights2, recv_dots, pair_scalars_out, pair_scalars_out2;
};

class Round {
 public:
  Round(const Scenario& scenario, Team& team, uint32_t seed)
      : scenario_(scenario), shape_(scenario.shape), team_(team), random_(seed) {
    routing_.shape = shape_;
    routing_.mode = scenario.mode;
    routing_.layout = scenario.layout;
    routing_.num_tokens = scenario.num_tokens;
    routing_.topk_idx = DrawTopk(shape_, scenario.num_tokens, scenario.draw, random_);
    routing_.recv_rows = PickRecvRows();
    plan_ = MakePlanOracle(routing_);
    for (uint32_t r = 0; r < shape_.num_ranks; ++r) arrays_.push_back(MakeArrays());
  }

  void Run() {
    const auto statuses = team_.Run([this](Rank& rank) {
      rank.TakeSizes(shape_);
      return scenario_.in_halves ? RunHalves(rank, arrays_[rank.rank])
                                 : RunWhole(rank, arrays_[rank.rank]);
    });
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
    for (uint32_t r = 0; r < shape_.num_ranks; ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      CheckPlan(r);
      CheckDispatch(r, arrays_[r].recv_x, &RankArrays::x);
      CheckWeights(r, arrays_[r].recv_weights);
      if (scenario_.in_halves) {
        CheckDispatch(r, arrays_[r].recv_x2, &RankArrays::x2);
      } else {
        CheckWeights(r, arrays_[r].recv_weights2);
        CheckBackward(r);
      }
      CheckCombine(r, arrays_[r].out, arrays_[r].pair_scalars_out);
      CheckCombine(r, arrays_[r].out2, arrays_[r].pair_scalars_out2);
      CheckCanaries(arrays_[r]);
      if (::testing::Test::HasFailure()) return;
    }
  }

  void AppendSums(std::vector<std::byte>& bytes) const {
    for (const RankArrays& a : arrays_) {
      for (const Bytes* out : {&a.out, &a.out2, &a.recv_g}) {
        bytes.insert(bytes.end(), out->span().begin(), out->span().end());
      }
    }
  }

 private:
  bool is_rank_major() const { return scenario_.layout == Layout::kRankMajor; }
  int64_t tokens() const { return scenario_.num_tokens; }
  int64_t rows() const { return routing_.recv_rows; }
  int64_t row_bytes() const {
    return static_cast<int64_t>(shape_.hidden * ElemBytes(shape_.elem_type));
  }
  int64_t cells() const { return tokens() * shape_.top_k; }

  int64_t PickRecvRows() {
    const int64_t worst = WorstRecvRows(shape_, scenario_.layout, tokens());
    if (scenario_.layout != Layout::kExpertMajor) return worst;
    const int64_t align = shape_.align;
    const int64_t needed = NeededRecvRows(routing_);
    switch (scenario_.capacity) {
      case Capacity::kWorst:
        return worst;
      case Capacity::kExact:
        return needed;
      case Capacity::kOneShort:
        return std::max<int64_t>(0, needed - align);
      case Capacity::kHalf:
        return (needed / 2 + align - 1) / align * align;
    }
    return worst;
  }

  std::vector<std::byte> RandomRows(int64_t num_rows) {
    const std::vector<std::byte>& pool = NormalElems(shape_.elem_type);
    const uint64_t elem_bytes = ElemBytes(shape_.elem_type);
    std::vector<std::byte> rows(Size(num_rows * row_bytes()));
    size_t from = random_() % kPoolSize * elem_bytes;
    for (size_t i = 0; i < rows.size(); ++i, ++from) {
      if (from == pool.size()) from = 0;
      rows[i] = pool[from];
    }
    return rows;
  }

  std::vector<float> RandomFloats(int64_t count) {
    const std::vector<std::byte>& pool = NormalElems(ElemType::kF32);
    std::vector<float> floats(Size(count));
    for (float& value : floats) {
      std::memcpy(&value, pool.data() + random_() % kPoolSize * sizeof(value), sizeof(value));
      if (random_() % 16 == 0) value = -0.0f;
    }
    return floats;
  }

  RankArrays MakeArrays() {
    RankArrays a;
    a.x = RandomRows(tokens());
    a.x2 = RandomRows(tokens());
    a.g = RandomRows(tokens());
    a.y = RandomRows(rows());
    a.weights = RandomFloats(cells());
    a.row_weights = RandomFloats(rows());
    a.pair_scalars = RandomFloats(is_rank_major() ? rows() * shape_.top_k : rows());
    const uint32_t experts = shape_.experts_per_rank();
    a.group_sizes = Ints(experts);
    a.group_counts = Ints(experts);
    a.send_slot = Ints(Size(cells()));
    a.recv_src = Ints(Size(rows()));
    a.send_counts = Ints(shape_.num_ranks);
    a.recv_counts = Ints(shape_.num_ranks);
    a.recv_topk_idx = Ints(is_rank_major() ? Size(rows() * shape_.top_k) : 0);
    for (Bytes* bytes : {&a.recv_x, &a.recv_x2, &a.recv_g})
      *bytes = Bytes(Size(rows() * row_bytes()));
    for (Bytes* bytes : {&a.out, &a.out2}) *bytes = Bytes(Size(tokens() * row_bytes()));
    for (Floats* floats : {&a.recv_weights, &a.recv_weights2}) {
      *floats = Floats(Size(is_rank_major() ? rows() * shape_.top_k : rows()));
    }
    a.recv_dots = Floats(Size(rows()));
    a.pair_scalars_out = Floats(Size(cells()));
    a.pair_scalars_out2 = Floats(Size(cells()));
    return a;
  }

  PlanParams MakePlan(uint32_t r, RankArrays& a) const {
    PlanParams params;
    params.mode = scenario_.mode;
    params.layout = scenario_.layout;
    params.num_tokens = tokens();
    params.recv_rows = rows();
    params.topk_idx = routing_.topk_idx[r];
    params.out.group_sizes = a.group_sizes.span();
    params.out.group_counts = a.group_counts.span();
    params.out.send_slot = a.send_slot.span();
    params.out.recv_src = a.recv_src.span();
    params.out.send_counts = a.send_counts.span();
    params.out.recv_counts = a.recv_counts.span();
    params.out.num_dropped = a.num_dropped.data();
    params.out.overflow = a.overflow.data();
    params.out.recv_topk_idx = a.recv_topk_idx.span();
    return params;
  }

  DispatchParams MakeDispatch(const RankArrays& a) const {
    DispatchParams params;
    params.mode = scenario_.mode;
    params.layout = scenario_.layout;
    params.num_tokens = tokens();
    params.recv_rows = rows();
    params.send_slot = a.send_slot.span();
    params.recv_src = a.recv_src.span();
    params.recv_topk_idx = a.recv_topk_idx.span();
    return params;
  }

  CombineParams MakeCombine(const RankArrays& a) const {
    CombineParams params;
    params.mode = scenario_.mode;
    params.layout = scenario_.layout;
    params.num_tokens = tokens();
    params.recv_rows = rows();
    params.y = a.y.data();
    if (!is_rank_major()) params.row_weights = a.row_weights;
    params.pair_scalars = a.pair_scalars;
    params.send_slot = a.send_slot.span();
    params.recv_src = a.recv_src.span();
    return params;
  }

  // Padding of y may hold anything: make it NaN once the plan says what is padding.
  void PoisonPadding(RankArrays& a) const {
    for (int64_t row = 0; row < rows(); ++row) {
      if (a.recv_src[Size(row)] >= 0) continue;
      std::fill_n(a.y.begin() + row * row_bytes(), row_bytes(), std::byte{0xff});
    }
  }

  Status RunWhole(Rank& rank, RankArrays& a) const {
    const bool is_ll = scenario_.mode == Mode::kLl;
    DispatchParams dispatch = MakeDispatch(a);
    dispatch.x = a.x.data();
    dispatch.weights = a.weights;
    dispatch.recv_x = a.recv_x.data();
    dispatch.recv_weights = a.recv_weights.span();
    if (is_ll) {
      JAX_EP_RETURN_IF_ERROR(RunLlDispatch(rank, {MakePlan(rank.rank, a), dispatch}));
      JAX_EP_RETURN_IF_ERROR(RunPlan(rank, MakePlan(rank.rank, a)));
      JAX_EP_RETURN_IF_ERROR(RunDispatch(rank, dispatch));
    } else {
      JAX_EP_RETURN_IF_ERROR(RunPlan(rank, MakePlan(rank.rank, a)));
      JAX_EP_RETURN_IF_ERROR(RunDispatch(rank, dispatch));
    }
    PoisonPadding(a);
    DispatchParams only_weights = MakeDispatch(a);
    only_weights.weights = a.weights;
    only_weights.recv_weights = a.recv_weights2.span();
    JAX_EP_RETURN_IF_ERROR(RunDispatch(rank, only_weights));

    CombineParams combine = MakeCombine(a);
    combine.out = a.out.data();
    combine.pair_scalars_out = a.pair_scalars_out.span();
    JAX_EP_RETURN_IF_ERROR(RunCombine(rank, combine));
    combine.pair_scalars = {};
    combine.pair_scalars_out = {};
    combine.out = a.out2.data();
    JAX_EP_RETURN_IF_ERROR(RunCombine(rank, combine));
    CombineParams only_scalars = MakeCombine(a);
    only_scalars.y = nullptr;
    only_scalars.row_weights = {};
    only_scalars.pair_scalars_out = a.pair_scalars_out2.span();
    JAX_EP_RETURN_IF_ERROR(RunCombine(rank, only_scalars));

    DispatchParams backward = MakeDispatch(a);
    backward.x = a.g.data();
    backward.y = a.y.data();
    backward.row_weights = a.row_weights;
    backward.recv_x = a.recv_g.data();
    backward.recv_dots = a.recv_dots.span();
    return RunDispatch(rank, backward);
  }

  // Two starts before the first done; odd seeds finish them in the opposite order.
  Status RunHalves(Rank& rank, RankArrays& a) const {
    const bool is_ll = scenario_.mode == Mode::kLl;
    const PlanParams plan = MakePlan(rank.rank, a);
    DispatchParams first = MakeDispatch(a);
    first.x = a.x.data();
    first.weights = a.weights;
    first.recv_x = a.recv_x.data();
    first.recv_weights = a.recv_weights.span();
    DispatchParams second = MakeDispatch(a);
    second.x = a.x2.data();
    second.recv_x = a.recv_x2.data();
    JAX_EP_RETURN_IF_ERROR(RunPlan(rank, plan));
    PoisonPadding(a);

    uint64_t epochs[2];
    if (is_ll) {
      JAX_EP_RETURN_IF_ERROR(StartLlDispatch(rank, {plan, WithoutOutputs(first)}, &epochs[0]));
    } else {
      JAX_EP_RETURN_IF_ERROR(StartDispatch(rank, WithoutOutputs(first), &epochs[0]));
    }
    JAX_EP_RETURN_IF_ERROR(StartDispatch(rank, WithoutOutputs(second), &epochs[1]));
    for (const int which : {0, 1}) {
      const bool is_first = (which == 0) != (scenario_.seed % 2 == 1);
      const DispatchParams done = WithoutInputs(is_first ? first : second);
      if (is_ll && is_first) {
        JAX_EP_RETURN_IF_ERROR(FinishLlDispatch(rank, {plan, done}, epochs[0]));
      } else {
        JAX_EP_RETURN_IF_ERROR(FinishDispatch(rank, done, epochs[is_first ? 0 : 1]));
      }
    }

    CombineParams combine = MakeCombine(a);
    JAX_EP_RETURN_IF_ERROR(StartCombine(rank, combine, &epochs[0]));
    // A whole call of the same kind between start and done.
    CombineParams whole = MakeCombine(a);
    whole.out = a.out2.data();
    whole.pair_scalars_out = a.pair_scalars_out2.span();
    JAX_EP_RETURN_IF_ERROR(RunCombine(rank, whole));
    JAX_EP_RETURN_IF_ERROR(StartCombine(rank, combine, &epochs[1]));
    for (const int which : {1, 0}) {  // the outputs of both are the same
      CombineParams done = combine;
      done.y = nullptr;
      done.row_weights = {};
      done.pair_scalars = {};
      done.out = a.out.data();
      done.pair_scalars_out = a.pair_scalars_out.span();
      JAX_EP_RETURN_IF_ERROR(FinishCombine(rank, done, epochs[which]));
    }
    return Status::Ok();
  }

  static DispatchParams WithoutOutputs(DispatchParams params) {
    params.recv_x = nullptr;
    params.recv_weights = {};
    return params;
  }
  static DispatchParams WithoutInputs(DispatchParams params) {
    params.x = nullptr;
    params.weights = {};
    return params;
  }

  template <typename Got, typename Want>
  static void ExpectEqual(const Got& got, const Want& want, const char* what) {
    ASSERT_EQ(got.size(), want.size()) << what;
    for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i], want[i]) << what << " at " << i;
  }

  void CheckPlan(uint32_t r) const {
    const RankArrays& a = arrays_[r];
    ExpectEqual(a.group_sizes, plan_.group_sizes[r], "group_sizes");
    ExpectEqual(a.group_counts, plan_.group_counts[r], "group_counts");
    ExpectEqual(a.send_slot, plan_.send_slot[r], "send_slot");
    ExpectEqual(a.recv_src, plan_.recv_src[r], "recv_src");
    ExpectEqual(a.send_counts, plan_.send_counts[r], "send_counts");
    ExpectEqual(a.recv_counts, plan_.recv_counts[r], "recv_counts");
    if (is_rank_major()) ExpectEqual(a.recv_topk_idx, plan_.recv_topk_idx[r], "recv_topk_idx");
    ASSERT_EQ(a.num_dropped[0], plan_.num_dropped[r]);
    ASSERT_EQ(a.overflow[0], plan_.overflow);
  }

  struct Origin {
    uint32_t source;
    int64_t token;
    int64_t k;
  };
  Origin OriginOf(int32_t src) const {
    const auto source_codes = static_cast<int64_t>(shape_.max_tokens) * shape_.top_k;
    return {static_cast<uint32_t>(src / source_codes), src % source_codes / shape_.top_k,
            src % shape_.top_k};
  }

  void CheckDispatch(uint32_t r, const Bytes& got,
                     std::vector<std::byte> RankArrays::* sent) const {
    const std::vector<std::byte> zero(Size(row_bytes()), std::byte{0});
    for (int64_t row = 0; row < rows(); ++row) {
      const int32_t src = plan_.recv_src[r][Size(row)];
      const std::byte* want = zero.data();
      if (src >= 0) {
        const Origin from = OriginOf(src);
        want = (arrays_[from.source].*sent).data() + from.token * row_bytes();
      }
      ASSERT_EQ(std::memcmp(got.data() + row * row_bytes(), want, Size(row_bytes())), 0)
          << "row " << row << " of src " << src;
    }
  }

  void CheckWeights(uint32_t r, const Floats& got) const {
    if (is_rank_major()) {
      for (int64_t i = 0; i < rows() * shape_.top_k; ++i) {
        const int64_t cell = i % cells();
        const auto source = static_cast<uint32_t>(i / cells());
        const bool is_here = plan_.recv_topk_idx[r][Size(i)] >= 0;
        const float want = is_here ? arrays_[source].weights[Size(cell)] : 0.0f;
        ASSERT_EQ(std::memcmp(&got[Size(i)], &want, sizeof(want)), 0) << "weight " << i;
      }
      return;
    }
    for (int64_t row = 0; row < rows(); ++row) {
      const int32_t src = plan_.recv_src[r][Size(row)];
      float want = 0;
      if (src >= 0) {
        const Origin from = OriginOf(src);
        want = arrays_[from.source].weights[Size(from.token * shape_.top_k + from.k)];
      }
      ASSERT_EQ(std::memcmp(&got[Size(row)], &want, sizeof(want)), 0) << "weight of row " << row;
    }
  }

  double ElemAt(const std::byte* rows_begin, int64_t row, uint64_t h) const {
    return DecodeElem(shape_.elem_type,
                      rows_begin + row * row_bytes() + h * ElemBytes(shape_.elem_type));
  }
  double Tiny() const { return shape_.elem_type == ElemType::kF16 ? 0x1p-24 : 1e-37; }

  void CheckBackward(uint32_t r) const {
    const RankArrays& a = arrays_[r];
    for (int64_t row = 0; row < rows(); ++row) {
      const int32_t src = plan_.recv_src[r][Size(row)];
      double dot = 0;
      double magnitude = 0;
      for (uint64_t h = 0; h < shape_.hidden; ++h) {
        const double got = ElemAt(a.recv_g.data(), row, h);
        double want = 0;
        if (src >= 0) {
          const Origin from = OriginOf(src);
          const double g = ElemAt(arrays_[from.source].g.data(), from.token, h);
          const double product = g * ElemAt(a.y.data(), row, h);
          dot += product;
          magnitude += std::abs(product);
          want = g * a.row_weights[Size(row)];
        }
        const double bound = std::abs(want) * (Epsilon(shape_.elem_type) + 0x1p-23) + Tiny();
        ASSERT_LE(std::abs(got - want), bound) << "row " << row << " element " << h;
      }
      const double bound = magnitude * static_cast<double>(shape_.hidden) * 0x1p-24;
      ASSERT_LE(std::abs(a.recv_dots[Size(row)] - dot), bound) << "dot of row " << row;
    }
  }

  void CheckCombine(uint32_t r, const Bytes& out, const Floats& pair_scalars_out) const {
    // Roundings on the way: products and sums in f32, partials (dtype) twice, the result once.
    const double eps = 4.0 * (shape_.top_k + 1) * 0x1p-24 +
                       (shape_.f32_partials ? 1.01 : 4.0) * Epsilon(shape_.elem_type);
    for (int64_t token = 0; token < tokens(); ++token) {
      std::set<std::pair<int64_t, int64_t>> places;
      for (uint32_t k = 0; k < shape_.top_k; ++k) {
        const size_t cell = Size(token * shape_.top_k + k);
        const int64_t owner = plan_.pair_owner[r][cell];
        const int64_t row = plan_.pair_row[r][cell];
        float want_scalar = 0;
        if (row >= 0) {
          places.insert({owner, row});
          const auto& pair_scalars = arrays_[Size(owner)].pair_scalars;
          want_scalar = pair_scalars[Size(is_rank_major() ? row * shape_.top_k + k : row)];
        }
        ASSERT_EQ(std::memcmp(&pair_scalars_out[cell], &want_scalar, sizeof(float)), 0)
            << "pair_scalars of token " << token << " k " << k;
      }
      for (uint64_t h = 0; h < shape_.hidden; ++h) {
        double want = 0;
        double magnitude = 0;
        for (const auto& [owner, row] : places) {
          const RankArrays& a = arrays_[Size(owner)];
          const double weight = is_rank_major() ? 1.0 : a.row_weights[Size(row)];
          const double product = weight * ElemAt(a.y.data(), row, h);
          want += product;
          magnitude += std::abs(product);
        }
        const double got = ElemAt(out.data(), token, h);
        ASSERT_LE(std::abs(got - want), magnitude * eps + Tiny() * shape_.top_k)
            << "token " << token << " element " << h;
      }
    }
  }

  static void CheckCanaries(const RankArrays& a) {
    for (const Ints* ints :
         {&a.group_sizes, &a.group_counts, &a.send_slot, &a.recv_src, &a.send_counts,
          &a.recv_counts, &a.recv_topk_idx, &a.num_dropped, &a.overflow}) {
      ASSERT_TRUE(ints->HasCanary());
    }
    for (const Bytes* bytes : {&a.recv_x, &a.recv_x2, &a.recv_g, &a.out, &a.out2}) {
      ASSERT_TRUE(bytes->HasCanary());
    }
    for (const Floats* floats : {&a.recv_weights, &a.recv_weights2, &a.recv_dots,
                                 &a.pair_scalars_out, &a.pair_scalars_out2}) {
      ASSERT_TRUE(floats->HasCanary());
    }
  }

  const Scenario& scenario_;
  const GroupShape& shape_;
  Team& team_;
  std::mt19937 random_;
  Routing routing_;
  PlanOracle plan_;
  std::vector<RankArrays> arrays_;
};

}  // namespace

std::string Scenario::Name() const {
  const char* layouts[] = {"major", "batched", "rank"};
  const char* capacities[] = {"worst", "exact", "one_short", "half"};
  const char* types[] = {"f32", "bf16", "f16"};
  std::ostringstream name;
  name << "N" << shape.num_ranks << "/" << shape.node_size << " E" << shape.num_experts << " K"
       << shape.top_k << " T" << num_tokens << " H" << shape.hidden << " "
       << types[static_cast<int>(shape.elem_type)] << " " << layouts[static_cast<int>(layout)]
       << " " << capacities[static_cast<int>(capacity)] << " " << DrawName(draw)
       << (mode == Mode::kLl ? " ll" : " ht") << (shape.f32_partials ? "" : " dtype_partials")
       << (in_process ? "" : " staged") << (in_halves ? " halves" : "")
       << (is_view ? " view " : " ");
  if (shape.round_tokens != 0) name << "rounds of " << shape.round_tokens << " ";
  name << faulty_spec << " seed" << seed << " after " << first_epoch;
  return name.str();
}

GroupShape MakeShape(uint32_t num_ranks, uint32_t node_size, uint32_t num_experts, uint32_t top_k,
                     uint64_t hidden, uint64_t max_tokens, ElemType type) {
  GroupShape shape;
  shape.num_ranks = num_ranks;
  shape.node_size = node_size;
  shape.num_experts = num_experts;
  shape.top_k = top_k;
  shape.align = 4;
  shape.hidden = hidden;
  shape.max_tokens = max_tokens;
  shape.ll_tokens = max_tokens;
  shape.elem_type = type;
  return shape;
}

std::vector<std::byte> RunScenario(const Scenario& scenario) {
  SCOPED_TRACE(scenario.Name());
  TeamOptions options;
  options.shape = scenario.is_view ? ShapeWithMoreRoom(scenario.shape) : scenario.shape;
  options.in_process = scenario.in_process;
  options.threads_per_rank = scenario.threads_per_rank;
  options.faulty_spec = scenario.faulty_spec;
  options.first_epoch = scenario.first_epoch;
  Team team(options);
  std::vector<std::byte> sums;
  for (int i = 0; i < scenario.num_rounds; ++i) {
    SCOPED_TRACE("round " + std::to_string(i));
    Round round(scenario, team, scenario.seed * 1000 + static_cast<uint32_t>(i));
    round.Run();
    if (::testing::Test::HasFailure()) break;
    round.AppendSums(sums);
  }
  return sums;
}

}  // namespace jax_ep::testing
