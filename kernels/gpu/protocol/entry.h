// How an HT operation begins: peers learn that this rank has entered and where it keeps what they
// will read, and the rows of recv_src are indexed. The blocks of the operation's main kernel do
// that (entry.cuh). A kernel of its own is in front of it where arrays have to be copied to the
// stage first, and between nodes (enter_operation.cu).
#pragma once

#include <cstdint>

#include "kernels/gpu/device/divisor.h"
#include "kernels/gpu/protocol/device_rank.h"

namespace jax_ep::gpu {

struct Entry {
  Operation operation;
  bool is_over;     // a kernel of its own was launched for it
  bool has_record;  // of arrays that peers will read
  uint32_t launch;  // a number above 1 that no other call of this rank has that may run meanwhile
  uint32_t num_tokens;
  uint32_t recv_rows;
  Divisor by_source_codes;  // max_tokens * top_k
  Divisor by_top_k;
  const int32_t* recv_src;  // [R]
  DispatchRecord record;
};

}  // namespace jax_ep::gpu
