// What raw_ofi.cc and bench_wire.cc measure.
#pragma once

#include <cstddef>

namespace wire_cases {

struct Case {
  bool is_latency;
  size_t size;  // bytes
  long messages;
};

constexpr size_t kHeapBytes = size_t{32} << 20;
constexpr Case kCases[] = {
    {true, 16, 500},        // warm-up: makes the connection
    {true, 16, 5000},       // the shortest command
    {false, 14336, 30000},  // one token of 7168 bfloat16
    {false, 65536, 12000}, {false, 262144, 4000}, {false, 1048576, 1000},
};

}  // namespace wire_cases
