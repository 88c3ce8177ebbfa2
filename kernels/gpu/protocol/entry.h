// How an HT operation begins: peers learn that this rank has entered and where it keeps what they
// will read, and the rows of recv_src are indexed. The blocks of the operation's main kernel do
// that (entry.cuh). A kernel of its own is in front of it where arrays have to be copied to the
// stage first, and between nodes (enter_operation.cu).
//
// So a rank has entered when a block of its main kernel has a multiprocessor: where several ranks
// share a GPU, a block of each must have one at the same time.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/divisor.h"
#include "kernels/gpu/protocol/device_rank.h"

namespace jax_ep::gpu {

struct Entry {
  Operation operation;
  bool is_over;      // a kernel of its own was launched for it
  bool has_record;   // of arrays that peers will read
  bool has_index;    // rows are indexed
  bool is_of_mates;  // the kernel needs no rank of another node; of one that is over
  // A number above 1 that no other call of this rank has that may run meanwhile. Captured calls
  // keep theirs, so a graph must not run beside itself, by way of two instances or parents.
  uint32_t launch;
  uint32_t num_tokens;
  uint32_t recv_rows;
  Divisor by_source_codes;  // max_tokens * top_k
  Divisor by_top_k;
  const int32_t* recv_src;  // [R]
  DispatchRecord record;
};

}  // namespace jax_ep::gpu
