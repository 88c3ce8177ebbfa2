// kernels/gpu/ll/combine: rows back to the owners of their tokens, by bulk copies, in one kernel.
//   In: y, recv_src, send_slot. Out: partials in the owners' slots, the sum of each own token.
//   Waits: adders for the flag of each piece; senders for the readers of the set's previous use.
//
// What the parts of an LL combine with bulk copies share (ll_combine.cu): parameters, and the items
// of a block. An item is a token of an owner to whom this rank sends its rows' sum, or a token of
// its own, whose partials it adds.
#pragma once

#include "kernels/gpu/device/divisor.h"
#include "kernels/gpu/device/round_flags.cuh"
#include "kernels/gpu/lanes/slot_combine.cuh"
#include "kernels/gpu/sums/rank_sums.cuh"
#include "kernels/gpu/sums/token_rows.cuh"

namespace jax_ep::gpu::slot_combine {

// Shared memory of a block: the table, each warp's buffer, and what each adder gathers.
struct LlCombineParams {
  SlotCombineParams call;
  uint32_t table_bytes;
  uint32_t num_send_warps;     // of a sending block
  uint32_t sum_bytes;          // of a buffer: a piece of a partial
  uint32_t send_buffer_bytes;  // of a sending block's warp
  uint32_t add_buffer_bytes;   // of an adding block's warp
  uint32_t gather_bytes;       // likewise, behind all buffers: what comes in tagged words
  Divisor by_source_codes;     // of recv_src: the codes of a source
  Divisor by_top_k;
  Divisor by_pieces;
  Divisor by_owners;
  Divisor by_send_blocks, by_add_blocks;
  Divisor by_rank_rows;
};

extern __shared__ __align__(128) std::byte ll_combine_shared[];

// Ranks that a call pushes partials to: a whole one needs none of its own.
__host__ __device__ inline uint32_t NumOwners(const SlotCombineParams& call) {
  return call.device.shape.num_ranks - (call.part == CallPart::kWhole ? 1 : 0);
}

// Which items a block has of those that all blocks of its role have.
struct ItemPartition {
  const Divisor& by_blocks;
  uint32_t num_blocks;
  uint32_t block;

  __device__ uint32_t CountOf(uint32_t num_items) const {
    return num_items > block ? (num_items - block - 1) / num_blocks + 1 : 0;
  }
  __device__ uint32_t ItemAt(uint32_t number) const { return block + number * num_blocks; }
  __device__ bool IsMine(uint32_t item) const { return by_blocks.Remainder(item) == block; }
  __device__ uint32_t NumberOf(uint32_t item) const { return by_blocks.Quotient(item); }
};

// The rows of a block's items, by the item's number in the block and k.
class PairTable {
 public:
  __device__ PairTable(uint32_t top_k, uint32_t num_items)
      : rows_(reinterpret_cast<int32_t*>(ll_combine_shared)),
        top_k_(top_k),
        num_items_(num_items) {}

  // All threads of the block; a SyncBlock must follow.
  __device__ void Clear() const {
    for (uint32_t i = threadIdx.x; i < num_items_ * top_k_; i += blockDim.x) rows_[i] = kNoRow;
  }
  __device__ void Put(uint32_t number, uint32_t k, int32_t row) const {
    rows_[number * top_k_ + k] = row;
  }
  __device__ int32_t RowOf(uint32_t number, uint32_t k) const { return rows_[number * top_k_ + k]; }

 private:
  int32_t* rows_;
  uint32_t top_k_;
  uint32_t num_items_;
};

// One warp: the rows of an item, a lane for each pair.
using ItemRows = TokenRows<1>;
__device__ inline ItemRows RowsOf(const PairTable& table, uint32_t number, uint32_t top_k) {
  return {top_k, [&](uint32_t k) { return table.RowOf(number, k); }};
}

}  // namespace jax_ep::gpu::slot_combine
