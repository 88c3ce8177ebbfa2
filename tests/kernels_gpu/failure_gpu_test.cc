// A rank that is late, gone, or in another operation: every wait ends, every rank learns of it, and
// no output looks valid.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kernels_gpu/gpu_team.h"

namespace jax_ep::testing {
namespace {

const gpu::GpuApi& Api() { return *jax_ep_gpu_api(); }

class GpuFailure : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 32;
  static constexpr int64_t kRows = 128;
  static constexpr uint64_t kSite = 0x1234567800000009;

  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
    GroupShape shape;
    shape.num_ranks = shape.node_size = 4;
    shape.num_experts = 8;
    shape.top_k = 2;
    shape.align = 4;
    shape.hidden = 64;
    shape.max_tokens = kTokens;
    shape_ = shape;
    team_ = std::make_unique<GpuTeam>(
        GpuTeamOptions{.shape = shape, .debug = true, .timeout_ns = 300'000'000});
    for (uint32_t r = 0; r < 4; ++r) {
      std::vector<int32_t> topk(kTokens * 2);
      for (size_t i = 0; i < topk.size(); ++i) topk[i] = static_cast<int32_t>((i * 5 + r) % 8);
      Arrays a;
      a.topk = DeviceArray<int32_t>::Input(*team_, r, topk);
      const std::vector<float> x(kTokens * 64, 1.5f);
      a.x = DeviceArray<float>::Input(*team_, r, x);
      a.send_slot = DeviceArray<int32_t>::Output(*team_, r, kTokens * 2);
      a.recv_src = DeviceArray<int32_t>::Output(*team_, r, kRows);
      a.group_sizes = DeviceArray<int32_t>::Output(*team_, r, 2);
      a.group_counts = DeviceArray<int32_t>::Output(*team_, r, 2);
      a.send_counts = DeviceArray<int32_t>::Output(*team_, r, 4);
      a.recv_counts = DeviceArray<int32_t>::Output(*team_, r, 4);
      a.words = DeviceArray<int32_t>::Output(*team_, r, 2);
      a.recv_x = DeviceArray<float>::Output(*team_, r, kRows * 64);
      a.out = DeviceArray<float>::Output(*team_, r, kTokens * 64);
      arrays_.push_back(a);
      CheckCuda(cudaDeviceSynchronize(), "upload");
    }
  }

  struct Arrays {
    DeviceArray<int32_t> topk, send_slot, recv_src, group_sizes, group_counts, send_counts,
        recv_counts, words;
    DeviceArray<float> x, recv_x, out;
  };

  const char* Plan(uint32_t r) { return Plan(r, team_->stream(r)); }
  const char* Plan(uint32_t r, cudaStream_t stream) {
    const Arrays& a = arrays_[r];
    PlanParams params;
    params.site = kSite;
    params.num_tokens = kTokens;
    params.recv_rows = kRows;
    params.topk_idx = a.topk.span();
    params.out.group_sizes = a.group_sizes.span();
    params.out.group_counts = a.group_counts.span();
    params.out.send_slot = a.send_slot.span();
    params.out.recv_src = a.recv_src.span();
    params.out.send_counts = a.send_counts.span();
    params.out.recv_counts = a.recv_counts.span();
    params.out.num_dropped = a.words.data();
    params.out.overflow = a.words.data() + 1;
    return Api().plan(team_->handle(r), &shape_, &params, stream);
  }
  const char* Dispatch(uint32_t r) { return Dispatch(r, team_->stream(r)); }
  const char* Dispatch(uint32_t r, cudaStream_t stream) {
    const Arrays& a = arrays_[r];
    DispatchParams params;
    params.num_tokens = kTokens;
    params.recv_rows = kRows;
    params.x = reinterpret_cast<const std::byte*>(a.x.data());
    params.send_slot = a.send_slot.span();
    params.recv_src = a.recv_src.span();
    params.recv_x = reinterpret_cast<std::byte*>(a.recv_x.data());
    return Api().dispatch(team_->handle(r), &shape_, &params, stream);
  }
  const char* Combine(uint32_t r) { return Combine(r, team_->stream(r)); }
  const char* Combine(uint32_t r, cudaStream_t stream) {
    const Arrays& a = arrays_[r];
    CombineParams params;
    params.num_tokens = kTokens;
    params.recv_rows = kRows;
    params.y = reinterpret_cast<const std::byte*>(a.recv_x.data());
    params.send_slot = a.send_slot.span();
    params.recv_src = a.recv_src.span();
    params.out = reinterpret_cast<std::byte*>(a.out.data());
    return Api().combine(team_->handle(r), &shape_, &params, stream);
  }

  void ExpectKind(uint32_t r, std::initializer_list<gpu::FailureKind> kinds) {
    const gpu::RankStatus& status = team_->status(r);
    EXPECT_EQ(status.failed.load(), 1u) << "rank " << r;
    const auto kind = static_cast<gpu::FailureKind>(status.kind);
    EXPECT_TRUE(std::find(kinds.begin(), kinds.end(), kind) != kinds.end())
        << "rank " << r << " kind " << status.kind << " peer " << status.peer;
  }
  // All ranks have failed, one or more as another was in another operation.
  void ExpectWrongOrder() {
    using enum gpu::FailureKind;
    bool is_named = false;
    for (uint32_t r = 0; r < 4; ++r) {
      ExpectKind(r, {kWrongOrder, kPeerFailed});
      is_named |= static_cast<gpu::FailureKind>(team_->status(r).kind) == kWrongOrder;
    }
    EXPECT_TRUE(is_named);
  }
  static void ExpectNan(const DeviceArray<float>& array) {
    for (const float value : array.Download()) ASSERT_TRUE(std::isnan(value)) << value;
    EXPECT_TRUE(array.HasCanary());
  }
  static void ExpectAll(const DeviceArray<int32_t>& array, int32_t want) {
    for (const int32_t value : array.Download()) ASSERT_EQ(value, want);
  }

  GroupShape shape_;
  std::unique_ptr<GpuTeam> team_;
  std::vector<Arrays> arrays_;
};

using enum gpu::FailureKind;

TEST_F(GpuFailure, ARankThatDoesNotComeEndsThePlanOfAllOthers) {
  ASSERT_EQ(team_->Run([&](uint32_t r) { return r == 1 ? nullptr : Plan(r); }), "");
  for (const uint32_t r : {0u, 2u, 3u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectAll(arrays_[r].recv_src, -1);
    ExpectAll(arrays_[r].send_slot, -1);
    ExpectAll(arrays_[r].group_sizes, 0);
  }
  EXPECT_EQ(team_->status(1).failed.load(), 0u);
  // The late rank learns of it at once, and so does every later call.
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  for (uint32_t r = 0; r < 4; ++r) ExpectKind(r, {kTimeout, kPeerFailed});
}

TEST_F(GpuFailure, ARankThatWaitsForLongSaysForWhom) {
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  for (uint32_t r = 0; r < 4; ++r) EXPECT_EQ(team_->status(r).wait.written_ns.load(), 0u);
  ASSERT_EQ(team_->Run([&](uint32_t r) { return r == 2 ? nullptr : Plan(r); }), "");
  uint32_t num_timeouts = 0;
  for (const uint32_t r : {0u, 1u, 3u}) {
    const gpu::RankStatus& status = team_->status(r);
    if (static_cast<gpu::FailureKind>(status.kind) != kTimeout) continue;
    ++num_timeouts;
    const gpu::WaitNote& note = status.wait;
    EXPECT_EQ(note.peer.load(), 2u);
    EXPECT_EQ(static_cast<gpu::Operation>(note.operation.load()), gpu::Operation::kPlan);
    EXPECT_EQ(note.epoch.load(), 2u);
    EXPECT_EQ(note.site.load(), kSite);
    EXPECT_GE(note.waited_ns.load(), gpu::kLongWaitNs);
    EXPECT_NE(note.written_ns.load(), 0u);
  }
  EXPECT_GT(num_timeouts, 0u);
  EXPECT_EQ(team_->status(2).wait.written_ns.load(), 0u);
}

// Many threads wait for the late rank at the same time: that counts once.
TEST_F(GpuFailure, WaitsAreCountedByPhaseAndByWhomTheyAreFor) {
  constexpr std::chrono::milliseconds kLate{40};
  constexpr uint32_t kLateRank = 2;
  using Call = std::function<const char*(uint32_t)>;
  const auto waits_of = [&](uint32_t r) {
    std::vector<uint64_t> waits(size_t{kNumWaitPhases} * 4);
    EXPECT_EQ(Api().wait_ns(team_->handle(r), waits.data()), nullptr);
    return waits;
  };
  const std::pair<WaitPhase, Call> calls[] = {
      {WaitPhase::kPlan, [&](uint32_t r) { return Plan(r); }},
      {WaitPhase::kDispatch, [&](uint32_t r) { return Dispatch(r); }},
      {WaitPhase::kCombine, [&](uint32_t r) { return Combine(r); }}};
  for (const auto& [phase, call] : calls) {
    std::vector<std::vector<uint64_t>> before;
    for (uint32_t r = 0; r < 4; ++r) before.push_back(waits_of(r));
    const auto begin = std::chrono::steady_clock::now();
    for (const uint32_t r : {0u, 1u, 3u}) ASSERT_EQ(call(r), nullptr);
    std::this_thread::sleep_for(kLate);
    ASSERT_EQ(call(kLateRank), nullptr);
    team_->Synchronize();
    const std::chrono::nanoseconds passed = std::chrono::steady_clock::now() - begin;
    for (uint32_t r = 0; r < 4; ++r) {
      SCOPED_TRACE(std::string(WaitPhaseName(phase)) + " of rank " + std::to_string(r));
      EXPECT_EQ(team_->status(r).failed.load(), 0u);
      const std::vector<uint64_t> after = waits_of(r);
      for (size_t i = 0; i < after.size(); ++i) {
        SCOPED_TRACE("phase and peer " + std::to_string(i));
        const auto waited = std::chrono::nanoseconds(after[i] - before[r][i]);
        const bool is_of_late = i == static_cast<size_t>(phase) * 4 + kLateRank;
        EXPECT_LE(waited, passed);
        if (i % 4 == r) {
          EXPECT_EQ(after[i], 0u);
        } else if (r != kLateRank && is_of_late) {
          EXPECT_GT(waited, kLate * 8 / 10);
        } else {
          EXPECT_LT(waited, kLate / 2);
        }
      }
    }
  }
}

TEST_F(GpuFailure, ARankThatDoesNotComePoisonsDispatch) {
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  ASSERT_EQ(team_->Run([&](uint32_t r) { return r == 2 ? nullptr : Dispatch(r); }), "");
  for (const uint32_t r : {0u, 1u, 3u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectNan(arrays_[r].recv_x);
  }
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Combine(r); }), "");
  for (uint32_t r = 0; r < 4; ++r) ExpectNan(arrays_[r].out);
}

TEST_F(GpuFailure, ARankThatDoesNotComePoisonsCombine) {
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Dispatch(r); }), "");
  ASSERT_EQ(team_->Run([&](uint32_t r) { return r == 0 ? nullptr : Combine(r); }), "");
  for (const uint32_t r : {1u, 2u, 3u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectNan(arrays_[r].out);
  }
}

TEST_F(GpuFailure, RanksInDifferentOperationsAreFound) {
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  ASSERT_EQ(team_->Run([&](uint32_t r) { return r == 3 ? Combine(r) : Dispatch(r); }), "");
  ExpectWrongOrder();
  ExpectNan(arrays_[3].out);
  for (const uint32_t r : {0u, 1u, 2u}) ExpectNan(arrays_[r].recv_x);
}

TEST_F(GpuFailure, ARankInAPlanIsFoundByThoseInADispatch) {
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  ASSERT_EQ(team_->Run([&](uint32_t r) { return r == 3 ? Plan(r) : Dispatch(r); }), "");
  ExpectWrongOrder();
}

TEST_F(GpuFailure, ASecondCallAtTheSameTimeEndsBothAndPoisonsAllLaterOnes) {
  team_->UseDeviceOf(0);
  cudaStream_t other = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
  ASSERT_EQ(Plan(0), nullptr);  // waits for the others, who do not come
  ASSERT_EQ(Plan(0, other), nullptr);
  CheckCuda(cudaStreamSynchronize(other), "synchronize");
  team_->Synchronize();
  ExpectKind(0, {kBusy});
  for (int later = 0; later < 3; ++later) {
    arrays_[0].recv_src.Upload(std::vector<int32_t>(kRows, 7));
    arrays_[0].send_slot.Upload(std::vector<int32_t>(kTokens * 2, 7));
    ASSERT_EQ(Plan(0), nullptr);
    team_->Synchronize();
    ExpectAll(arrays_[0].recv_src, -1);
    ExpectAll(arrays_[0].send_slot, -1);
  }
  CheckCuda(cudaStreamDestroy(other), "stream");
}

// All blocks of a dispatch or combine take the busy word.
TEST_F(GpuFailure, TwoCallsOfAnyKindAtTheSameTimeAreFound) {
  using Call = std::function<const char*(cudaStream_t)>;
  const Call plan = [&](cudaStream_t stream) { return Plan(0, stream); };
  const Call dispatch = [&](cudaStream_t stream) { return Dispatch(0, stream); };
  const Call combine = [&](cudaStream_t stream) { return Combine(0, stream); };
  for (const auto& [first, second] :
       {std::pair{dispatch, dispatch}, {combine, combine}, {plan, dispatch}, {dispatch, plan}}) {
    arrays_.clear();
    SetUp();
    ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
    team_->UseDeviceOf(0);
    cudaStream_t other = nullptr;
    CheckCuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
    ASSERT_EQ(first(team_->stream(0)), nullptr);  // waits for the others, who do not come
    ASSERT_EQ(second(other), nullptr);
    CheckCuda(cudaStreamSynchronize(other), "synchronize");
    team_->Synchronize();
    ExpectKind(0, {kBusy});
    CheckCuda(cudaStreamDestroy(other), "stream");
  }
}

TEST_F(GpuFailure, AnAbortEndsAllWaits) {
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  team_->status(0).abort.store(1);
  ASSERT_EQ(team_->Run([&](uint32_t r) { return r == 2 ? nullptr : Dispatch(r); }), "");
  ExpectKind(0, {kAborted});
  for (const uint32_t r : {1u, 3u}) ExpectKind(r, {kPeerFailed});
  for (const uint32_t r : {0u, 1u, 3u}) ExpectNan(arrays_[r].recv_x);
}

TEST_F(GpuFailure, DebugFindsAnInvalidId) {
  std::vector<int32_t> topk(kTokens * 2, 0);
  topk[5] = 8;
  team_->UseDeviceOf(1);
  arrays_[1].topk.Upload(topk);
  ASSERT_EQ(team_->Run([&](uint32_t r) { return Plan(r); }), "");
  ExpectKind(1, {kInvalidId});
  for (const uint32_t r : {0u, 2u, 3u}) ExpectKind(r, {kPeerFailed, kTimeout});
}

}  // namespace
}  // namespace jax_ep::testing
