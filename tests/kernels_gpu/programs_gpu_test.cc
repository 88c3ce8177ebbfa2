// Ranks that execute calls of different programs as the same operation: each kind of call finds it
// and says so, and no result is made of the other's rows. A done may belong to another program than
// its start.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

constexpr uint32_t kRanks = 4;
constexpr uint32_t kProgram = 0x1234'5678;
constexpr uint32_t kOtherProgram = 0x1234'5679;

using Body = std::function<void(uint32_t rank, Calls& calls)>;

class GpuPrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }

  // A new group; its ranks have made a plan.
  void Begin(Mode mode, uint32_t node_size) {
    s_ = {};
    GroupShape& shape = s_.shape;
    shape.num_ranks = kRanks;
    shape.node_size = node_size;
    shape.num_experts = 8;
    shape.top_k = 2;
    shape.align = 4;
    shape.hidden = 64;
    shape.max_tokens = shape.ll_tokens = 32;
    s_.mode = mode;
    s_.layout = Layout::kExpertBatched;
    s_.num_tokens = 32;
    s_.recv_rows = WorstRecvRows(shape, s_.layout, s_.num_tokens);
    arrays_.clear();
    epochs_.clear();
    team_ = std::make_unique<GpuTeam>(GpuTeamOptions{.shape = shape,
                                                     .max_sms = 6,
                                                     .timeout_ns = 5'000'000'000,
                                                     .arena_bytes = uint64_t{64} << 20});
    Team cpu({.shape = shape});
    std::mt19937 random(1);
    host_ = RunOnCpu(s_, cpu, random);
    for (uint32_t r = 0; r < kRanks; ++r) {
      arrays_.push_back(Upload(s_, *team_, r, host_[r]));
      epochs_.push_back(DeviceArray<int32_t>::Output(*team_, r, 1));
    }
    Run([&](uint32_t r, Calls& calls) { calls.Plan(arrays_[r]); });
    ExpectNoFailure(*team_);
  }

  void Run(const Body& body) {
    const std::string error = team_->Run([&](uint32_t r) -> const char* {
      static thread_local std::string text;
      Calls calls(s_, *team_, r);
      calls.UseProgram(kProgram);
      body(r, calls);
      if (calls.error() == nullptr) return nullptr;
      text = calls.error();
      return text.c_str();
    });
    ASSERT_EQ(error, "");
  }

  // The second half of the ranks calls from another program.
  static bool IsOther(uint32_t rank) { return rank >= kRanks / 2; }
  void RunInTwoPrograms(const Body& body) {
    Run([&](uint32_t r, Calls& calls) {
      calls.UseProgram(IsOther(r) ? kOtherProgram : kProgram);
      body(r, calls);
    });
  }

  // Every rank has failed; who names a peer names one of the other program.
  void ExpectTwoPrograms() {
    using enum gpu::FailureKind;
    uint32_t num_named = 0;
    for (uint32_t r = 0; r < kRanks; ++r) {
      const gpu::RankStatus& status = team_->status(r);
      EXPECT_EQ(status.failed.load(), 1u) << "rank " << r;
      const auto kind = static_cast<gpu::FailureKind>(status.kind);
      EXPECT_TRUE(kind == kWrongOrder || kind == kPeerFailed)
          << "rank " << r << " kind " << status.kind << " peer " << status.peer;
      if (kind != kWrongOrder) continue;
      ++num_named;
      EXPECT_NE(IsOther(r), IsOther(status.peer)) << r << " names " << status.peer;
      EXPECT_NE(status.expected, status.actual);
    }
    EXPECT_GE(num_named, 1u);
  }
  static void ExpectPoison(const DeviceArray<std::byte>& array) {
    for (const std::byte value : array.Download()) ASSERT_EQ(value, std::byte{0xff});
    EXPECT_TRUE(array.HasCanary());
  }
  void ExpectNoDispatch() {
    for (const DeviceArrays& arrays : arrays_) ExpectPoison(arrays.recv_x[0]);
  }
  void ExpectNoCombine() {
    for (const DeviceArrays& arrays : arrays_) ExpectPoison(arrays.out[0]);
  }

  Scenario s_;
  std::unique_ptr<GpuTeam> team_;
  std::vector<HostArrays> host_;
  std::vector<DeviceArrays> arrays_;
  std::vector<DeviceArray<int32_t>> epochs_;
};

TEST_F(GpuPrograms, PlansOfTwoAreFound) {
  for (const uint32_t node_size : {kRanks, kRanks / 2}) {
    SCOPED_TRACE("node size " + std::to_string(node_size));
    Begin(Mode::kHt, node_size);
    RunInTwoPrograms([&](uint32_t r, Calls& calls) { calls.Plan(arrays_[r]); });
    ExpectTwoPrograms();
    for (const DeviceArrays& arrays : arrays_) {
      for (const int32_t src : arrays.recv_src.Download()) ASSERT_EQ(src, -1);
    }
  }
}

TEST_F(GpuPrograms, HtDispatchesOfTwoAreFound) {
  for (const uint32_t node_size : {kRanks, kRanks / 2, 1u}) {
    SCOPED_TRACE("node size " + std::to_string(node_size));
    Begin(Mode::kHt, node_size);
    RunInTwoPrograms([&](uint32_t r, Calls& calls) { calls.Dispatch(arrays_[r], 0); });
    ExpectTwoPrograms();
    ExpectNoDispatch();
  }
}

TEST_F(GpuPrograms, HtCombinesOfTwoAreFound) {
  for (const uint32_t node_size : {kRanks, kRanks / 2, 1u}) {
    SCOPED_TRACE("node size " + std::to_string(node_size));
    Begin(Mode::kHt, node_size);
    RunInTwoPrograms([&](uint32_t r, Calls& calls) { calls.Combine(arrays_[r], 0); });
    ExpectTwoPrograms();
    ExpectNoCombine();
  }
}

TEST_F(GpuPrograms, LlDispatchesOfTwoAreFound) {
  for (const uint32_t node_size : {kRanks, kRanks / 2}) {
    for (const bool is_routed : {true, false}) {
      SCOPED_TRACE("node size " + std::to_string(node_size) + (is_routed ? " routed" : ""));
      Begin(Mode::kLl, node_size);
      RunInTwoPrograms([&](uint32_t r, Calls& calls) {
        is_routed ? calls.LlDispatch(arrays_[r]) : calls.Dispatch(arrays_[r], 0);
      });
      ExpectTwoPrograms();
      ExpectNoDispatch();
    }
  }
}

TEST_F(GpuPrograms, LlCombinesOfTwoAreFound) {
  for (const uint32_t node_size : {kRanks, kRanks / 2}) {
    SCOPED_TRACE("node size " + std::to_string(node_size));
    Begin(Mode::kLl, node_size);
    RunInTwoPrograms([&](uint32_t r, Calls& calls) { calls.Combine(arrays_[r], 0); });
    ExpectTwoPrograms();
    ExpectNoCombine();
  }
}

// The dones belong to one program: they find whose rows the starts have put there.
TEST_F(GpuPrograms, StartsOfTwoAreFoundByTheirDones) {
  for (const uint32_t node_size : {kRanks, kRanks / 2}) {
    SCOPED_TRACE("node size " + std::to_string(node_size));
    Begin(Mode::kLl, node_size);
    RunInTwoPrograms([&](uint32_t r, Calls& calls) {
      calls.DispatchStart(arrays_[r], 0, epochs_[r].data());
      calls.UseProgram(kProgram);
      calls.DispatchDone(arrays_[r], 0, epochs_[r].data());
    });
    ExpectTwoPrograms();
    ExpectNoDispatch();

    Begin(Mode::kLl, node_size);
    RunInTwoPrograms([&](uint32_t r, Calls& calls) {
      calls.CombineStart(arrays_[r], 0, epochs_[r].data());
      calls.UseProgram(kProgram);
      calls.CombineDone(arrays_[r], 0, epochs_[r].data());
    });
    ExpectTwoPrograms();
    ExpectNoCombine();
  }
}

// A program may carry where it holds its ranks to stand (xla_ffi/signatures.h).
TEST_F(GpuPrograms, ARankThatStandsElsewhereFailsAll) {
  Begin(Mode::kHt, kRanks);
  std::vector<DeviceArray<int32_t>> places;
  const auto plan = [&](uint32_t r, Calls& calls) {
    ASSERT_EQ(jax_ep_gpu_api()->check_position(team_->handle(r), places[r].data(),
                                               static_cast<int32_t>(r), team_->stream(r)),
              nullptr);
    calls.Plan(arrays_[r]);
  };
  for (uint32_t r = 0; r < kRanks; ++r) {
    const auto place = static_cast<int32_t>(r);
    places.push_back(DeviceArray<int32_t>::Input(*team_, r, std::span(&place, 1)));
  }
  Run(plan);
  ExpectNoFailure(*team_);
  const int32_t elsewhere = 3;
  places[2].Upload(std::span(&elsewhere, 1));
  Run(plan);
  for (uint32_t r = 0; r < kRanks; ++r) {
    const gpu::RankStatus& status = team_->status(r);
    ASSERT_EQ(status.failed.load(), 1u) << "rank " << r;
    const auto kind = static_cast<gpu::FailureKind>(status.kind);
    EXPECT_EQ(kind, r == 2 ? gpu::FailureKind::kWrongPosition : gpu::FailureKind::kPeerFailed);
    for (const int32_t src : arrays_[r].recv_src.Download()) ASSERT_EQ(src, -1);
  }
  EXPECT_EQ(team_->status(2).peer, 2u);
  EXPECT_EQ(team_->status(2).expected, 2u);
  EXPECT_EQ(team_->status(2).actual, 3u);
}

// All ranks in the same programs, one after the other.
TEST_F(GpuPrograms, StartAndDoneMayBelongToTwo) {
  for (const uint32_t node_size : {kRanks, kRanks / 2}) {
    SCOPED_TRACE("node size " + std::to_string(node_size));
    Begin(Mode::kLl, node_size);
    Run([&](uint32_t r, Calls& calls) {
      calls.DispatchStart(arrays_[r], 0, epochs_[r].data());
      calls.UseProgram(kOtherProgram);
      calls.DispatchDone(arrays_[r], 0, epochs_[r].data());
      calls.CombineStart(arrays_[r], 0, epochs_[r].data());
      calls.UseProgram(kProgram);
      calls.CombineDone(arrays_[r], 0, epochs_[r].data());
      calls.UseProgram(kOtherProgram);
      calls.Dispatch(arrays_[r], 3);
      calls.Combine(arrays_[r], 1);
    });
    ExpectNoFailure(*team_);
    for (uint32_t r = 0; r < kRanks && !HasFailure(); ++r) {
      ExpectDispatch(arrays_[r], host_[r], 0);
      ExpectDispatch(arrays_[r], host_[r], 3);
      ExpectCombine(arrays_[r], host_[r], 0);
      ExpectCombine(arrays_[r], host_[r], 1);
    }
  }
}

}  // namespace
}  // namespace jax_ep::testing
