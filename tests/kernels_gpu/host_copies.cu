#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/kernels_gpu/host_copies.h"

namespace jax_ep::testing {
namespace {

constexpr size_t kBytes = size_t{64} << 20;
constexpr int kRepeats = 5;

__global__ void CopyWords(uint4* to, const uint4* from, size_t num_words) {
  constexpr int kInFlight = 8;
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (kInFlight - 1) * step < num_words; i += kInFlight * step) {
    uint4 words[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) words[j] = from[i + j * step];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) to[i + j * step] = words[j];
  }
  for (; i < num_words; i += step) to[i] = from[i];
}

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "host copies: %s\n", cudaGetErrorString(error));
  std::abort();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Device {
  uint4* memory = nullptr;
  uint4* host = nullptr;
  uint4* other_host = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
};

double TimeKernels(std::vector<Device>& devices, uint32_t sms, bool stores) {
  std::vector<double> rates;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    for (size_t d = 0; d < devices.size(); ++d) {
      Device& device = devices[d];
      Check(cudaSetDevice(static_cast<int>(d)));
      Check(cudaEventRecord(device.begin, device.stream));
      CopyWords<<<sms, 512, 0, device.stream>>>(stores ? device.host : device.memory,
                                                stores ? device.memory : device.host,
                                                kBytes / sizeof(uint4));
      Check(cudaEventRecord(device.end, device.stream));
    }
    double slowest = 0;
    for (Device& device : devices) {
      Check(cudaEventSynchronize(device.end));
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, device.begin, device.end));
      slowest = std::max(slowest, static_cast<double>(ms));
    }
    if (repeat > 0) rates.push_back(static_cast<double>(kBytes) / slowest / 1e6);
  }
  return Median(rates);
}

double TimeThreads(std::vector<Device>& devices, uint32_t threads) {
  std::vector<double> rates;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    {
      std::vector<std::jthread> running;
      for (Device& device : devices) {
        for (uint32_t t = 0; t < threads; ++t) {
          running.emplace_back([&device, t, threads] {
            const size_t share = kBytes / threads;
            std::memcpy(reinterpret_cast<char*>(device.other_host) + t * share,
                        reinterpret_cast<char*>(device.host) + t * share, share);
          });
        }
      }
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (repeat > 0) rates.push_back(static_cast<double>(kBytes) / elapsed.count() / 1e9);
  }
  return Median(rates);
}

}  // namespace

HostStageRates MeasureHostStage(uint32_t sms, uint32_t threads) {
  int count = 0;
  Check(cudaGetDeviceCount(&count));
  std::vector<Device> devices(static_cast<size_t>(count));
  for (size_t d = 0; d < devices.size(); ++d) {
    Device& device = devices[d];
    Check(cudaSetDevice(static_cast<int>(d)));
    Check(cudaMalloc(&device.memory, kBytes));
    constexpr unsigned kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
    Check(cudaHostAlloc(&device.host, kBytes, kFlags));
    Check(cudaHostAlloc(&device.other_host, kBytes, kFlags));
    std::memset(device.host, 1, kBytes);
    std::memset(device.other_host, 1, kBytes);
    Check(cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking));
    Check(cudaEventCreate(&device.begin));
    Check(cudaEventCreate(&device.end));
  }
  const HostStageRates rates = {.kernel_stores = TimeKernels(devices, sms, /*stores=*/true),
                                .kernel_loads = TimeKernels(devices, sms, /*stores=*/false),
                                .copies = TimeThreads(devices, threads)};
  for (size_t d = 0; d < devices.size(); ++d) {
    Check(cudaSetDevice(static_cast<int>(d)));
    Check(cudaFree(devices[d].memory));
    Check(cudaFreeHost(devices[d].host));
    Check(cudaFreeHost(devices[d].other_host));
  }
  return rates;
}

}  // namespace jax_ep::testing
