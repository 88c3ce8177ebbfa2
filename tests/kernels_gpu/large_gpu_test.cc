// Large shapes: long rows, many tokens, an output of more than 4 GiB.
#include <gtest/gtest.h>

#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

class GpuLarge : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(GpuLarge, LongRowsGiveTheBitsOfTheCpu) {
  for (const uint64_t hidden : {8192u, 12288u, 16392u}) {
    for (const ElemType type : {ElemType::kBf16, ElemType::kF32}) {
      for (const Mode mode : {Mode::kLl, Mode::kHt}) {
        Scenario s{.mode = mode, .layout = Layout::kExpertMajor, .num_tokens = 24};
        s.shape.num_ranks = s.shape.node_size = 4;
        s.shape.num_experts = 8;
        s.shape.top_k = 4;
        s.shape.align = 4;
        s.shape.hidden = hidden;
        s.shape.max_tokens = s.shape.ll_tokens = 24;
        s.shape.elem_type = type;
        s.shape.f32_partials = type == ElemType::kBf16;
        s.shape.depth = 3;
        s.recv_rows = 24 * 4 * 5 / 4 + 8;
        SCOPED_TRACE(s.Name());
        Team cpu({.shape = s.shape});
        std::mt19937 random(31);
        const std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
        for (const bool use_tma : {true, false}) {
          SCOPED_TRACE(use_tma ? "bulk copies" : "plain");
          GpuTeam team({.shape = s.shape,
                        .use_tma = use_tma,
                        .timeout_ns = 10'000'000'000,
                        .arena_bytes = uint64_t{1} << 30});
          std::vector<DeviceArrays> whole, planned, halves, from;
          std::vector<DeviceArray<int32_t>> epochs;
          for (uint32_t r = 0; r < 4; ++r) {
            for (auto* arrays : {&whole, &planned, &halves, &from}) {
              arrays->push_back(Upload(s, team, r, host[r]));
            }
            epochs.push_back(DeviceArray<int32_t>::Output(team, r, 2));
          }
          std::string wrong;
          for (uint32_t r = 0; r < 4; ++r) {
            team.UseDeviceOf(r);
            Calls calls(s, team, r);
            RunWhole(s, calls, whole[r], planned[r]);
            RunHalves(s, calls, from[r], halves[r], epochs[r].data(), /*ends_in_order=*/true);
            if (calls.error() != nullptr) wrong += calls.error();
          }
          team.SynchronizeOrDie();
          ASSERT_EQ(wrong, "");
          ExpectNoFailure(team);
          for (uint32_t r = 0; r < 4 && !HasFailure(); ++r) {
            ExpectDispatch(whole[r], host[r], 0);
            if (HasHalves(s)) ExpectDispatch(halves[r], host[r], 0);
            for (int i = 0; i < HostArrays::kDispatches; ++i)
              ExpectDispatch(planned[r], host[r], i);
            for (int i = 0; i < HostArrays::kCombines; ++i) {
              ExpectCombine(whole[r], host[r], i);
              if (HasHalves(s)) ExpectCombine(halves[r], host[r], i);
            }
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Two ranks of 65,536 tokens whose rows fill more than 4 GiB at each: too much for the CPU to
// repeat, so rows are looked at here and there. All numbers are small integers, sums are exact.
class GpuHuge : public GpuLarge {
 protected:
  static constexpr uint64_t kTokens = 65536;
  static constexpr uint64_t kHidden = 4352;
  static constexpr uint32_t kTopK = 8;
  static constexpr uint64_t kRows =
      kTokens * kTopK;  // a source sends half of its pairs to each rank
  static constexpr uint64_t kRowBytes = kHidden * sizeof(uint16_t);
  static_assert(kRows * kRowBytes > uint64_t{4} << 30);
  static constexpr float kRowWeight = 2;

  // Of every element of a token's row; exact in bf16.
  static float ValueOf(uint64_t source, uint64_t token) {
    return static_cast<float>((token * 7 + source * 3) % 15 + 1);
  }
  static uint16_t Bf16Of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(bits >> 16);
  }

  void SetUp() override {
    GpuLarge::SetUp();
    if (IsSkipped()) return;
    constexpr uint64_t kBytesOfARank = uint64_t{17} << 30;
    size_t free_bytes = 0, total_bytes = 0;
    CheckCuda(cudaMemGetInfo(&free_bytes, &total_bytes), "memory");
    const uint64_t needed = kBytesOfARank * (NumDevices() > 1 ? 1 : 2);
    if (free_bytes < needed) {
      GTEST_SKIP() << "needs " << needed << " bytes of device memory, " << free_bytes
                   << " are free";
    }
    GroupShape shape;
    shape.num_ranks = shape.node_size = 2;
    shape.num_experts = 16;
    shape.top_k = kTopK;
    shape.align = 1;
    shape.hidden = kHidden;
    shape.max_tokens = kTokens;
    shape.ll_tokens = 0;
    shape.elem_type = ElemType::kBf16;
    shape.f32_partials = false;
    shape.depth = 1;
    team_ = std::make_unique<GpuTeam>(GpuTeamOptions{.shape = shape,
                                                     .max_sms = 24,
                                                     .timeout_ns = 15'000'000'000,
                                                     .arena_bytes = uint64_t{12} << 30});
    for (uint32_t r = 0; r < 2; ++r) {
      Arrays& a = arrays_.emplace_back();
      // Of each token four pairs for either rank, in an order that changes.
      std::vector<int32_t> topk(kTokens * kTopK);
      for (uint64_t i = 0; i < topk.size(); ++i) {
        const uint64_t token = i / kTopK;
        topk[i] = static_cast<int32_t>((i % kTopK * 2 + token % 2 + token / 2) % 16);
      }
      a.topk = DeviceArray<int32_t>::Input(*team_, r, topk);
      std::vector<uint16_t> x(kTokens * kHidden);
      for (uint64_t token = 0; token < kTokens; ++token) {
        std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(token * kHidden), kHidden,
                    Bf16Of(ValueOf(r, token)));
      }
      a.x = DeviceArray<uint16_t>::Input(*team_, r, x);
      a.send_slot = DeviceArray<int32_t>::Output(*team_, r, kTokens * kTopK);
      a.recv_src = DeviceArray<int32_t>::Output(*team_, r, kRows);
      a.group_sizes = DeviceArray<int32_t>::Output(*team_, r, 8);
      a.group_counts = DeviceArray<int32_t>::Output(*team_, r, 8);
      a.send_counts = DeviceArray<int32_t>::Output(*team_, r, 2);
      a.recv_counts = DeviceArray<int32_t>::Output(*team_, r, 2);
      a.words = DeviceArray<int32_t>::Output(*team_, r, 2);
      a.recv_x = DeviceArray<uint16_t>::Output(*team_, r, kRows * kHidden);
      a.out = DeviceArray<uint16_t>::Output(*team_, r, kTokens * kHidden);
      a.row_weights = DeviceArray<float>::Input(*team_, r, std::vector<float>(kRows, kRowWeight));
      a.weighted = DeviceArray<uint16_t>::Output(*team_, r, kRows * kHidden);
      a.dots = DeviceArray<float>::Output(*team_, r, kRows);
      CheckCuda(cudaDeviceSynchronize(), "upload");
    }
  }

  struct Arrays {
    DeviceArray<int32_t> topk, send_slot, recv_src, group_sizes, group_counts, send_counts,
        recv_counts, words;
    DeviceArray<uint16_t> x, recv_x, out, weighted;
    DeviceArray<float> row_weights, dots;
  };

  const char* RunAll(uint32_t r) {
    const Arrays& a = arrays_[r];
    PlanParams plan;
    plan.num_tokens = kTokens;
    plan.recv_rows = kRows;
    plan.topk_idx = a.topk.span();
    plan.out.group_sizes = a.group_sizes.span();
    plan.out.group_counts = a.group_counts.span();
    plan.out.send_slot = a.send_slot.span();
    plan.out.recv_src = a.recv_src.span();
    plan.out.send_counts = a.send_counts.span();
    plan.out.recv_counts = a.recv_counts.span();
    plan.out.num_dropped = a.words.data();
    plan.out.overflow = a.words.data() + 1;
    if (const char* error = Api().plan(team_->handle(r), &team_->shape(), &plan, team_->stream(r)))
      return error;
    DispatchParams dispatch;
    dispatch.num_tokens = kTokens;
    dispatch.recv_rows = kRows;
    dispatch.x = reinterpret_cast<const std::byte*>(a.x.data());
    dispatch.send_slot = a.send_slot.span();
    dispatch.recv_src = a.recv_src.span();
    dispatch.recv_x = reinterpret_cast<std::byte*>(a.recv_x.data());
    if (const char* error =
            Api().dispatch(team_->handle(r), &team_->shape(), &dispatch, team_->stream(r))) {
      return error;
    }
    CombineParams combine;
    combine.num_tokens = kTokens;
    combine.recv_rows = kRows;
    combine.y = reinterpret_cast<const std::byte*>(a.recv_x.data());
    combine.send_slot = a.send_slot.span();
    combine.recv_src = a.recv_src.span();
    combine.out = reinterpret_cast<std::byte*>(a.out.data());
    if (const char* error =
            Api().combine(team_->handle(r), &team_->shape(), &combine, team_->stream(r))) {
      return error;
    }
    // As the backward of a weighted combine would, of the rows that have arrived.
    dispatch.y = combine.y;
    dispatch.row_weights = a.row_weights.span();
    dispatch.recv_x = reinterpret_cast<std::byte*>(a.weighted.data());
    dispatch.recv_dots = a.dots.span();
    return Api().dispatch(team_->handle(r), &team_->shape(), &dispatch, team_->stream(r));
  }

  // Whether the row `number` of the array is `value` throughout.
  static void ExpectRow(const DeviceArray<uint16_t>& array, uint64_t number, float value) {
    std::vector<uint16_t> row(kHidden);
    CheckCuda(
        cudaMemcpy(row.data(), array.data() + number * kHidden, kRowBytes, cudaMemcpyDeviceToHost),
        "row");
    for (const uint16_t elem : row) ASSERT_EQ(elem, Bf16Of(value)) << "row " << number;
  }

  std::unique_ptr<GpuTeam> team_;
  std::vector<Arrays> arrays_;
};

TEST_F(GpuHuge, RowsBehind4GiBAreRight) {
  std::string wrong;
  for (uint32_t r = 0; r < 2; ++r) {
    team_->UseDeviceOf(r);
    if (const char* error = RunAll(r)) wrong += error;
  }
  team_->SynchronizeOrDie();
  ASSERT_EQ(wrong, "");
  ExpectNoFailure(*team_);
  constexpr uint64_t kLast = 64, kStep = 1021;
  constexpr uint64_t kAt4GiB = (uint64_t{4} << 30) / kRowBytes;
  for (uint32_t r = 0; r < 2 && !HasFailure(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    const std::vector<int32_t> recv_src = arrays_[r].recv_src.Download();
    const std::vector<float> dots = arrays_[r].dots.Download();
    uint64_t num_rows = 0;
    for (const int32_t src : recv_src) num_rows += src >= 0;
    ASSERT_EQ(num_rows, kRows);
    const auto check = [&](uint64_t row) {
      const auto code = static_cast<uint64_t>(recv_src[row]);
      const uint64_t source = code / (kTokens * kTopK);
      const float value = ValueOf(source, code % (kTokens * kTopK) / kTopK);
      ExpectRow(arrays_[r].recv_x, row, value);
      ExpectRow(arrays_[r].weighted, row, kRowWeight * value);
      EXPECT_EQ(dots[row], value * value * kHidden) << "row " << row;
    };
    for (uint64_t row = 0; row < kRows && !HasFailure(); row += kStep) check(row);
    for (uint64_t row = kRows - kLast; row < kRows && !HasFailure(); ++row) check(row);
    for (uint64_t row = kAt4GiB - 4; row < kAt4GiB + 4 && !HasFailure(); ++row) check(row);
    // Every pair came back: eight times the row, exact in bf16.
    for (uint64_t token = 0; token < kTokens && !HasFailure(); token += kStep) {
      ExpectRow(arrays_[r].out, token, 8 * ValueOf(r, token));
    }
    EXPECT_TRUE(arrays_[r].recv_x.HasCanary());
    EXPECT_TRUE(arrays_[r].out.HasCanary());
    EXPECT_TRUE(arrays_[r].weighted.HasCanary());
  }
}

}  // namespace
}  // namespace jax_ep::testing
