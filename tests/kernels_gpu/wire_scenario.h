// Dispatches whose rows travel in FP8: inputs that are hard to quantise, and what must arrive. The
// oracle is the CPU's quantiser, which fp8_rows_test.cc checks against docs/semantics.md.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "tests/kernels_gpu/scenario.h"

namespace jax_ep::testing {

enum class Delivery { kRows, kScalesInRows, kScalesInColumns };

struct WireCase {
  Scenario scenario;
  uint32_t block = 128;
  Fp8Scale scale = Fp8Scale::kF32;
  Delivery delivery = Delivery::kRows;
  bool zero_padding = true;
  bool has_weights = true;

  uint64_t recv_row_bytes() const;  // of recv_x
  uint64_t scales_row_bytes() const;
  std::string Name() const;
};

// Rows of many sizes, with zeros, NaN, infinities and subnormals.
std::vector<std::byte> HardRows(const GroupShape& shape, int64_t count, std::mt19937& random);

// What a rank gets, by `sources`, whose x travels, and its own recv_src.
struct WireResult {
  std::vector<std::byte> recv_x, recv_scales;
};
WireResult ExpectedOf(const WireCase& wire, const std::vector<HostArrays>& sources,
                      const HostArrays& own);

// A rank's results on the device; `rows` is of its elements.
struct WireArrays {
  DeviceArray<std::byte> recv_x, recv_scales;
  DeviceArray<float> recv_weights;
};
WireArrays OutputsOf(const WireCase& wire, GpuTeam& team, uint32_t rank, const HostArrays& own);
DispatchParams WireDispatchOf(const WireCase& wire, DeviceArrays& arrays, WireArrays& out);
void ExpectWire(const WireCase& wire, const WireArrays& got, const WireResult& expected,
                const HostArrays& own);

}  // namespace jax_ep::testing
