// The pull of an HT dispatch with bulk copies (dispatch.cc): a warp's rows stream through a ring in
// shared memory, and one lane issues all of its copies.
#include <string>

#include "kernels/gpu/device/ring_position.cuh"
#include "kernels/gpu/ht/dispatch/pull.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"

namespace jax_ep::gpu {
#if JAX_EP_BULK_COPIES
namespace {

constexpr uint32_t kMaxPullWarps = 512 / kWarpSize;
// Warps that zero padding beside those: the bulk copies of so many let the stores of one through
// too slowly, and padding was what a call took longest for (docs/performance.md).
constexpr uint32_t kPaddingWarps = 4;
constexpr uint32_t kMaxThreads = (kMaxPullWarps + kPaddingWarps) * kWarpSize;

extern __shared__ __align__(128) unsigned char shared_bytes[];

// One piece of a row on its way through shared memory; the num_rows places follow it.
struct Slot {
  uint32_t num_rows;
  uint32_t piece_offset;
  uint32_t piece_bytes;
};

// Shared memory of a block.
struct PullShared {
  uint32_t slot_stride;
  uint64_t slots_offset, current_offset, ring_offset, total_bytes;

  __host__ __device__ PullShared(uint32_t num_warps, uint32_t top_k, uint32_t ring_slots,
                                 uint32_t piece_bytes) {
    const uint64_t num_slots = static_cast<uint64_t>(num_warps) * ring_slots;
    slot_stride = static_cast<uint32_t>(sizeof(Slot) + top_k * sizeof(int32_t));
    slots_offset = AlignUp(num_slots * sizeof(uint64_t), 128);  // barriers come first
    current_offset = AlignUp(slots_offset + num_slots * slot_stride, 128);
    ring_offset = AlignUp(current_offset + num_warps * kMaxTopK * sizeof(int32_t), 128);
    total_bytes = ring_offset + num_slots * piece_bytes;
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ inline int32_t* RowsOf(Slot& slot) { return reinterpret_cast<int32_t*>(&slot + 1); }

// One warp: a ring of pieces. Lane 0 issues all copies; a slot is refilled one piece after its
// stores were issued, when they have read it.
__device__ uint64_t PullBulk(const PullParams& params, uint64_t sequence, uint32_t num_warps,
                             const PullShared& shared, const Progress& progress) {
  const DeviceRank& device = params.device;
  const auto* records = OwnHeapAt<DispatchRecord>(device, device.layout.records);
  const uint32_t num_slots = params.ring_slots;
  auto* barriers = reinterpret_cast<uint64_t*>(shared_bytes) + WarpId() * num_slots;
  const auto slot_at = [&](uint32_t slot) -> Slot& {
    const uint64_t number = static_cast<uint64_t>(WarpId()) * num_slots + slot;
    return *reinterpret_cast<Slot*>(shared_bytes + shared.slots_offset +
                                    number * shared.slot_stride);
  };
  auto* rows =
      reinterpret_cast<int32_t*>(shared_bytes + shared.current_offset) + WarpId() * kMaxTopK;
  unsigned char* ring = shared_bytes + shared.ring_offset +
                        static_cast<uint64_t>(WarpId()) * num_slots * params.piece_bytes;
  const auto row_bytes = static_cast<uint32_t>(params.row_bytes);

  ItemCursor items(params, sequence, num_warps);
  bool has_item = items.Next(rows);
  uint32_t piece_offset = 0;
  uint64_t num_pulled = has_item && items.source() != device.rank ? 1 : 0;
  RingPosition issue, store;
  uint32_t issued = 0, stored = 0;
  while (true) {
    while (has_item && issued - stored < num_slots - 1) {
      const uint32_t piece = min(params.piece_bytes, row_bytes - piece_offset);
      Slot& slot = slot_at(issue.slot);
      SyncWarp();  // lane 0 has read what this slot held
      for (uint32_t i = LaneId(); i < items.num_rows(); i += kWarpSize) RowsOf(slot)[i] = rows[i];
      if (LaneId() == 0) {
        slot.num_rows = items.num_rows();
        slot.piece_offset = piece_offset;
        slot.piece_bytes = piece;
        const std::byte* from = PublishedArray(device, items.source(), records[items.source()].x) +
                                items.token() * params.row_bytes + piece_offset;
        BulkWaitRead<1>();
        BarrierExpectBytes(&barriers[issue.slot], piece);
        BulkLoad(ring + static_cast<uint64_t>(issue.slot) * params.piece_bytes, from, piece,
                 &barriers[issue.slot]);
      }
      SyncWarp();
      ++issued;
      issue.Advance(num_slots);
      piece_offset += piece;
      if (piece_offset == row_bytes) {
        piece_offset = 0;
        has_item = items.Next(rows);
        num_pulled += has_item && items.source() != device.rank ? 1 : 0;
        if (LaneId() == 0) progress.Set(items.position());
      }
    }
    if (issued == stored) break;
    if (LaneId() == 0) {
      Slot& slot = slot_at(store.slot);
      const unsigned char* piece = ring + static_cast<uint64_t>(store.slot) * params.piece_bytes;
      BarrierWait(&barriers[store.slot], store.parity);
      for (uint32_t copy = 0; copy < slot.num_rows; ++copy) {
        BulkStore(params.recv_x + static_cast<uint64_t>(RowsOf(slot)[copy]) * params.row_bytes +
                      slot.piece_offset,
                  piece, slot.piece_bytes);
      }
      BulkCommit();
    }
    ++stored;
    store.Advance(num_slots);
  }
  if (LaneId() == 0) progress.SetDone();
  return num_pulled;
}
#endif

__global__ void __launch_bounds__(kMaxThreads)
    PullRowsInBulk(const __grid_constant__ PullParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ uint32_t shared_flag;
  __shared__ uint32_t positions[kMaxPullWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const uint32_t num_warps = blockDim.x / kWarpSize - kPaddingWarps;
  const Progress progress(params, positions, num_warps);
  if (threadIdx.x < kMaxPullWarps) positions[threadIdx.x] = 0;
  const PullShared shared(num_warps, device.shape.top_k, params.ring_slots, params.piece_bytes);
  if (LaneId() == 0) {  // each warp some, as one takes 30 ns
    for (uint32_t i = WarpId(); i < num_warps * params.ring_slots; i += blockDim.x / kWarpSize) {
      BarrierInit(reinterpret_cast<uint64_t*>(shared_bytes) + i, 1);
    }
    FenceBarrierInit();
  }
  uint64_t num_pulled = 0;
  if (Enter(device, params.entry, sequence) && CheckRecords(params)) {
    FenceProxyAsync();  // what the peers published, before bulk loads read it
    if (WarpId() >= num_warps) {
      FillWeightsAndPadding(params, WarpId() - num_warps, kPaddingWarps,
                            [&](uint64_t row, uint32_t number, uint32_t total) {
                              progress.WaitFor(number, total);
                              // Not in bulk: pulled rows keep the copy engine of the multiprocessor
                              // busy.
                              ZeroRowByWarp(params, row);
                            });
    } else if (params.recv_x != nullptr) {
      num_pulled = PullBulk(params, sequence, num_warps, shared, progress);
    }
    BulkWaitAll();
    FenceProxyAsync();  // own bulk copies, before the tail flags
  }
  FinishPull(params, sequence, num_pulled, &shared_flag);
#endif
}

}  // namespace

const char* PreparePullRowsInBulk(const RankHandle& rank) {
  return PrepareKernel(&PullRowsInBulk, rank.shared_bytes_per_block);
}

const char* LaunchPullRowsInBulk(RankHandle& rank, const PullParams& call, cudaStream_t stream) {
  PullParams params = call;
  const GroupShape& shape = rank.device.shape;
  const uint64_t row_bytes = params.row_bytes;
  // Equal pieces, as large as allowed.
  const uint64_t num_pieces = DivideUp(row_bytes, rank.piece_bytes);
  params.piece_bytes =
      static_cast<uint32_t>(AlignUp(DivideUp(row_bytes, num_pieces), kWireUnitBytes));
  params.ring_slots = rank.ring_slots;
  uint32_t num_warps = kMaxPullWarps;
  const auto shared_bytes_of = [&](uint32_t warps) {
    return PullShared(warps, shape.top_k, params.ring_slots, params.piece_bytes).total_bytes;
  };
  while (num_warps > 1 && shared_bytes_of(num_warps) > rank.shared_bytes_per_block) --num_warps;
  PullRowsInBulk<<<PullBlocks(params, num_warps), (num_warps + kPaddingWarps) * kWarpSize,
                   shared_bytes_of(num_warps), stream>>>(params);
  return LaunchResult("PullRowsInBulk");
}
#endif

const char* FindBulkCopies(bool* has_bulk_copies) {
  *has_bulk_copies = false;
#if JAX_EP_BULK_COPIES
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&PullRowsInBulk));
  if (error != cudaSuccess) {
    return KeepText(std::string("a kernel cannot be loaded: ") + cudaGetErrorString(error));
  }
  // Of what was compiled (__CUDA_ARCH__ / 10): binaryVersion is the device's also where the driver
  // has made the binary from PTX.
  constexpr int kFirstWithBulkCopies = 90;
  *has_bulk_copies = attributes.ptxVersion >= kFirstWithBulkCopies;
#endif
  return nullptr;
}

}  // namespace jax_ep::gpu
