// The calls of a scenario, whole and, in mode ll, in halves, on the GPUs of a team.
#pragma once

#include <functional>

#include "tests/kernels_gpu/scenario.h"

namespace jax_ep::testing {

// Makes the stream of a rank late.
void Delay(GpuTeam& team, uint32_t rank);

// PlanParams.site of a call of that program.
constexpr uint64_t SiteOf(uint32_t program) { return uint64_t{program} << 32; }

// Launches the calls of one rank.
class Calls {
 public:
  Calls(const Scenario& scenario, GpuTeam& team, uint32_t rank)
      : scenario_(scenario), team_(team), rank_(rank) {}

  // The calls from now on belong to that program (upper half of PlanParams.site).
  void UseProgram(uint32_t program) { program_ = program; }

  const char* error() const { return error_.empty() ? nullptr : error_.c_str(); }

  void Plan(DeviceArrays& to) {
    const PlanParams params = Of(PlanOf(scenario_, to));
    Check(Api().plan(handle(), &scenario_.shape, &params, stream()));
  }
  void LlDispatch(DeviceArrays& to) {
    const LlDispatchParams params = LlOf(to);
    Check(Api().ll_dispatch(handle(), &scenario_.shape, &params, stream()));
  }
  void Dispatch(DeviceArrays& to, int number) {
    const DispatchParams params = Of(DispatchOf(scenario_, to, number));
    Check(Api().dispatch(handle(), &scenario_.shape, &params, stream()));
  }
  void Combine(DeviceArrays& to, int number) {
    const CombineParams params = Of(CombineOf(scenario_, to, number));
    Check(Api().combine(handle(), &scenario_.shape, &params, stream()));
  }

  // Halves: a start reads `from`, a done writes `to` and gets no address of what a start reads.
  void LlDispatchStart(DeviceArrays& from, int32_t* epoch) {
    LlDispatchParams params = LlOf(from);
    params.dispatch.recv_x = nullptr;
    params.dispatch.recv_weights = {};
    params.plan.out = {};
    params.plan.recv_rows = 0;
    Check(Api().ll_dispatch_start(handle(), &scenario_.shape, &params, epoch, stream()));
  }
  void LlDispatchDone(DeviceArrays& to, const int32_t* epoch) {
    LlDispatchParams params = LlOf(to);
    params.dispatch.x = nullptr;
    params.dispatch.weights = {};
    Check(Api().ll_dispatch_done(handle(), &scenario_.shape, &params, epoch, stream()));
  }
  void DispatchStart(DeviceArrays& from, int number, int32_t* epoch) {
    DispatchParams params = Of(DispatchOf(scenario_, from, number));
    params.recv_x = nullptr;
    params.recv_weights = {};
    Check(Api().dispatch_start(handle(), &scenario_.shape, &params, epoch, stream()));
  }
  void DispatchDone(DeviceArrays& to, int number, const int32_t* epoch) {
    DispatchParams params = Of(DispatchOf(scenario_, to, number));
    params.x = nullptr;
    params.weights = {};
    Check(Api().dispatch_done(handle(), &scenario_.shape, &params, epoch, stream()));
  }
  void CombineStart(DeviceArrays& from, int number, int32_t* epoch) {
    CombineParams params = Of(CombineOf(scenario_, from, number));
    params.out = nullptr;
    params.pair_scalars_out = {};
    Check(Api().combine_start(handle(), &scenario_.shape, &params, epoch, stream()));
  }
  void CombineDone(DeviceArrays& to, int number, const int32_t* epoch) {
    CombineParams params = Of(CombineOf(scenario_, to, number));
    params.y = nullptr;
    params.pair_scalars = {};
    params.row_weights = {};
    Check(Api().combine_done(handle(), &scenario_.shape, &params, epoch, stream()));
  }
  // The caller's buffers go when a start's kernel has ended.
  template <typename T>
  void Clobber(DeviceArray<T>& array) {
    CheckCuda(cudaMemsetAsync(array.data(), 0xff, array.span().size_bytes(), team_.stream(rank_)),
              "clobber");
  }

 private:
  template <typename Params>
  Params Of(Params params) const {
    params.site = SiteOf(program_);
    return params;
  }
  LlDispatchParams LlOf(DeviceArrays& arrays) const {
    LlDispatchParams params = LlDispatchOf(scenario_, arrays);
    params.plan.site = params.dispatch.site = SiteOf(program_);
    return params;
  }
  gpu::RankHandle* handle() { return team_.handle(rank_); }
  cudaStream_t stream() { return team_.stream(rank_); }
  void Check(const char* error) {
    if (error != nullptr && error_.empty()) error_ = error;
  }

  const Scenario& scenario_;
  GpuTeam& team_;
  uint32_t rank_;
  uint32_t program_ = 0;
  std::string error_;
};

// All calls of the scenario, whole. `planned` gets a plan beforehand.
void RunWhole(const Scenario& s, Calls& calls, DeviceArrays& d, DeviceArrays& planned);
// Mode ht has no halves on GPUs, nor has a call of several rounds: the start does nothing, and the
// done is a whole call.
constexpr bool HasHalves(const Scenario& s) {
  return s.mode == Mode::kLl && s.shape.depth > 1 &&
         static_cast<uint64_t>(s.num_tokens) <= GpuLlRoundTokens(s.shape);
}
// The same in halves, if it has any: two starts are open at a time, ended in either order, and with
// a set to spare a whole call runs between them.
void RunHalves(const Scenario& s, Calls& calls, DeviceArrays& from, DeviceArrays& d,
               int32_t* epochs, bool ends_in_order);

// All of that on all ranks, ranks in turn late: the bits of the CPU. before_launch() is called when
// all memory is there.
void RunPushScenario(const Scenario& s, Team& cpu, GpuTeam& team, std::mt19937& random,
                     const std::function<void()>& before_launch = {});

}  // namespace jax_ep::testing
