#include "tests/kernels_gpu/push_scenario.h"

#include <chrono>
#include <thread>

namespace jax_ep::testing {

void Delay(GpuTeam& team, uint32_t rank) {
  const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::microseconds(300)); };
  CheckCuda(cudaLaunchHostFunc(team.stream(rank), sleep, nullptr), "delay");
}

void RunWhole(const Scenario& s, Calls& calls, DeviceArrays& d, DeviceArrays& planned) {
  if (s.mode == Mode::kLl) {
    calls.LlDispatch(d);
  } else {
    calls.Plan(d);
    calls.Dispatch(d, 0);
  }
  calls.Plan(planned);
  for (int i = 0; i < HostArrays::kDispatches; ++i) calls.Dispatch(planned, i);
  for (int i = 0; i < HostArrays::kCombines; ++i) calls.Combine(d, i);
}

void RunHalves(const Scenario& s, Calls& calls, DeviceArrays& from, DeviceArrays& d,
               int32_t* epochs, bool ends_in_order) {
  if (!HasHalves(s)) return;
  int32_t* first = epochs;
  int32_t* second = epochs + 1;
  const bool has_spare = s.shape.depth > 2;
  calls.LlDispatchStart(from, first);
  calls.Plan(d);  // for the planned start
  calls.DispatchStart(d, 1, second);
  calls.Clobber(from.topk_idx);
  calls.Clobber(from.x);
  calls.Clobber(from.weights);
  if (has_spare) calls.Dispatch(d, 3);
  if (ends_in_order) calls.LlDispatchDone(d, first);
  calls.DispatchDone(d, 1, second);
  if (!ends_in_order) calls.LlDispatchDone(d, first);

  // The starts read the plan of `d`, which stays, and the rows of `from`, which do not.
  DeviceArrays rows = d;
  rows.y = from.y;
  rows.pair_scalars = from.pair_scalars;
  rows.row_weights = from.row_weights;
  calls.CombineStart(rows, 0, first);
  calls.CombineStart(rows, 1, second);
  calls.Clobber(from.y);
  calls.Clobber(from.pair_scalars);
  calls.Clobber(from.row_weights);
  if (has_spare) calls.Combine(d, 2);
  if (ends_in_order) calls.CombineDone(d, 0, first);
  calls.CombineDone(d, 1, second);
  if (!ends_in_order) calls.CombineDone(d, 0, first);
}

void RunPushScenario(const Scenario& s, Team& cpu, GpuTeam& team, std::mt19937& random,
                     const std::function<void()>& before_launch) {
  SCOPED_TRACE(s.Name());
  const std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
  if (::testing::Test::HasFailure()) return;
  const uint32_t num_ranks = team.num_ranks();
  team.Reset();
  std::vector<DeviceArrays> whole, planned, halves, from;
  std::vector<DeviceArray<int32_t>> epochs;
  for (uint32_t r = 0; r < num_ranks; ++r) {
    for (auto* arrays : {&whole, &planned, &halves, &from}) {
      arrays->push_back(Upload(s, team, r, host[r]));
    }
    epochs.push_back(DeviceArray<int32_t>::Output(team, r, 2));
  }
  const bool ends_in_order = random() % 2 == 0;
  const auto late_rank = static_cast<uint32_t>(random() % (2 * num_ranks));
  if (before_launch) before_launch();
  const std::string error = team.Run([&](uint32_t r) -> const char* {
    static thread_local std::string text;
    Calls calls(s, team, r);
    if (r == late_rank) Delay(team, r);
    RunWhole(s, calls, whole[r], planned[r]);
    if (r == (late_rank + 1) % num_ranks) Delay(team, r);
    RunHalves(s, calls, from[r], halves[r], epochs[r].data(), ends_in_order);
    if (calls.error() == nullptr) return nullptr;
    text = calls.error();
    return text.c_str();
  });
  ASSERT_EQ(error, "");
  ExpectNoFailure(team);
  for (uint32_t r = 0; r < num_ranks && !::testing::Test::HasFailure(); ++r) {
    if (!team.is_active(r)) continue;
    SCOPED_TRACE("rank " + std::to_string(r));
    ExpectPlan(whole[r], host[r]);
    ExpectPlan(planned[r], host[r]);
    ExpectDispatch(whole[r], host[r], 0);
    for (int i = 0; i < HostArrays::kDispatches; ++i) ExpectDispatch(planned[r], host[r], i);
    for (int i = 0; i < HostArrays::kCombines; ++i) ExpectCombine(whole[r], host[r], i);
    if (!HasHalves(s)) continue;
    SCOPED_TRACE("halves");
    ExpectPlan(halves[r], host[r]);
    ExpectDispatch(halves[r], host[r], 0);
    ExpectDispatch(halves[r], host[r], 1);
    ExpectCombine(halves[r], host[r], 0);
    ExpectCombine(halves[r], host[r], 1);
    if (s.shape.depth < 3) continue;
    ExpectDispatch(halves[r], host[r], 3);
    ExpectCombine(halves[r], host[r], 2);
  }
}

}  // namespace jax_ep::testing
