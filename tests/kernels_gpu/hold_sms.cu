#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/gpu/device/memory_order.cuh"
#include "tests/kernels_gpu/hold_sms.h"

namespace jax_ep::testing {
namespace {

using namespace gpu;

void Must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "hold: %s\n", cudaGetErrorString(error));
  std::abort();
}

// A block has all shared memory of its multiprocessor, so nothing else runs there.
__global__ void Kernel(const uint32_t* lets_go, uint32_t* phases, uint64_t at_most_ns) {
  if (threadIdx.x != 0) return;
  const uint64_t end = ClockNs() + at_most_ns;
  StoreReleaseSys(phases + blockIdx.x, static_cast<uint32_t>(HeldSms::State::kRuns));
  while (LoadRelaxedSys(lets_go) == 0 && ClockNs() < end) SleepBriefly();
  StoreReleaseSys(phases + blockIdx.x, static_cast<uint32_t>(HeldSms::State::kEnded));
}

}  // namespace

HeldSms::HeldSms() {
  Must(cudaGetDevice(&device_));
  Must(cudaDeviceGetAttribute(&shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_));
  void* memory = nullptr;
  Must(cudaHostAlloc(&memory, sizeof(State), cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(memory, 0, sizeof(State));
  state_ = static_cast<State*>(memory);
  Must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  Must(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_));
}

HeldSms::~HeldSms() {
  Must(cudaStreamDestroy(stream_));
  Must(cudaFreeHost(state_));
}

void HeldSms::Hold(uint32_t num_free, uint64_t at_most_ns) {
  Must(cudaSetDevice(device_));
  int num_sms = 0;
  Must(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_));
  num_blocks_ = static_cast<uint32_t>(num_sms) - num_free;
  Kernel<<<num_blocks_, 32, static_cast<size_t>(shared_bytes_), stream_>>>(
      reinterpret_cast<const uint32_t*>(&state_->lets_go),
      reinterpret_cast<uint32_t*>(state_->phases), at_most_ns);
  Must(cudaGetLastError());
  while (!AllAre(State::kRuns) && !AllAre(State::kEnded)) {  // the kernel ends in any case
  }
}

void HeldSms::LetGo() {
  state_->lets_go.store(1);
  Must(cudaStreamSynchronize(stream_));
}

bool HeldSms::AllAre(State::Phase phase) const {
  for (uint32_t block = 0; block < num_blocks_; ++block) {
    if (state_->phases[block].load() != phase) return false;
  }
  return true;
}

}  // namespace jax_ep::testing
