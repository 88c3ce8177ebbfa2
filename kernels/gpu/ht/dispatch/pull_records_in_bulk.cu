// The pull of a dispatch whose rows travel quantised, with bulk copies. A block has
//   pulling warps     records stream through a ring in shared memory. What becomes of one leaves
//                     from there: its values and scales as they are, or a row of elements, which
//                     has a place of its own beside the ring;
//   padding warps     as in a pull of plain rows;
//   quantizing warps  this rank's rows into its stage (quantize_rows.cuh).
// What bounds the pull is the wire, and what one SM can store; few warps keep enough on its way.
#include "kernels/gpu/device/deliver_records.cuh"
#include "kernels/gpu/device/ring_position.cuh"
#include "kernels/gpu/ht/dispatch/pull.cuh"
#include "kernels/gpu/ht/dispatch/quantize_rows.cuh"

namespace jax_ep::gpu {
#if JAX_EP_BULK_COPIES
namespace {

constexpr uint32_t kMostPullWarps = 8;
constexpr uint32_t kPaddingWarps = 4;
constexpr uint32_t kQuantizeWarps = 8;
constexpr uint32_t kMostThreads = (kMostPullWarps + kPaddingWarps + kQuantizeWarps) * kWarpSize;

extern __shared__ __align__(128) unsigned char shared_bytes[];

// Shared memory of a block: for each warp barriers, the places of the records in its ring and of
// the one that comes next, the ring, and a row of elements.
template <typename Rows>
struct RecordShared {
  // One slot of those whose records leave from the ring is still being read when the next is
  // filled.
  static constexpr uint32_t kSlots = Rows::kAreSplit ? 3 : 2;
  uint32_t places_offset, ring_offset, record_stride, row_offset, warp_bytes;

  __host__ __device__ RecordShared(uint64_t wire_bytes, uint64_t row_bytes, uint32_t top_k) {
    constexpr uint64_t kAlign = 128;
    places_offset = kSlots * static_cast<uint32_t>(sizeof(uint64_t));
    const uint64_t places = (kSlots + 1) * top_k * sizeof(int32_t);
    ring_offset = static_cast<uint32_t>(AlignUp(places_offset + places, kAlign));
    record_stride = static_cast<uint32_t>(AlignUp(wire_bytes, kAlign));
    row_offset = ring_offset + kSlots * record_stride;
    warp_bytes =
        row_offset + static_cast<uint32_t>(Rows::kAreSplit ? 0 : AlignUp(row_bytes, kAlign));
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <typename Rows>
class RecordPuller {
 public:
  __device__ RecordPuller(const PullParams& params, uint64_t sequence, uint32_t num_warps,
                          const Progress& progress)
      : params_(params),
        device_(params.device),
        sequence_(sequence),
        progress_(progress),
        shared_(params.wire_bytes, params.row_bytes, params.device.shape.top_k),
        begin_(WarpId() * shared_.warp_bytes),
        items_(params, sequence, num_warps) {
    if (LaneId() != 0) return;
    for (uint32_t slot = 0; slot < Shared::kSlots; ++slot) BarrierInit(BarrierOf(slot), 1);
    FenceBarrierInit();
  }

  // Remote records read.
  __device__ uint64_t Run() {
    SyncWarp();
    has_item_ = items_.Next(PlacesOf(Shared::kSlots));
    while (true) {
      while (has_item_ && num_in_flight_ < kMostInFlight) Issue();
      if (num_in_flight_ == 0) break;
      const std::byte* record = RecordAt(used_.slot);
      BarrierWait(BarrierOf(used_.slot), used_.parity);
      if constexpr (Rows::kAreSplit) {
        Split(record, PlacesOf(used_.slot), num_rows_);
      } else {
        Dequantize(record, PlacesOf(used_.slot), num_rows_);
      }
      SyncWarp();  // the record and its places have been read
      num_rows_ = next_num_rows_;
      used_.Advance(Shared::kSlots);
      --num_in_flight_;
    }
    if (LaneId() == 0) progress_.SetDone();
    return num_pulled_;
  }

 private:
  using Shared = RecordShared<Rows>;
  static constexpr uint32_t kMostInFlight = 2;  // records

  __device__ std::byte* At(uint32_t offset) const {
    return reinterpret_cast<std::byte*>(shared_bytes + begin_ + offset);
  }
  __device__ uint64_t* BarrierOf(uint32_t slot) const {
    return reinterpret_cast<uint64_t*>(At(0)) + slot;
  }
  __device__ int32_t* PlacesOf(uint32_t slot) const {
    return reinterpret_cast<int32_t*>(At(shared_.places_offset)) + slot * device_.shape.top_k;
  }
  __device__ std::byte* RecordAt(uint32_t slot) const {
    return At(shared_.ring_offset + slot * shared_.record_stride);
  }

  // Starts to load the record of the item at hand, once it is there, and looks for the next item.
  __device__ void Issue() {
    bool is_ok = true;
    if (LaneId() == 0) {
      is_ok = WaitRecord(params_, sequence_, items_.source(), items_.token());
      if (is_ok) {
        // All but the newest record have left the ring; those read by lanes, before a SyncWarp.
        if constexpr (Rows::kAreSplit) BulkWaitRead<1>();
        FenceProxyAsync();  // what the flag has announced, before a bulk load
        const auto num_bytes = static_cast<uint32_t>(params_.wire_bytes);
        BarrierExpectBytes(BarrierOf(issued_.slot), num_bytes);
        BulkLoad(RecordAt(issued_.slot), RecordOf(params_, items_.source(), items_.token()),
                 num_bytes, BarrierOf(issued_.slot));
      }
    }
    if (!AllHaveWaited(is_ok)) {
      has_item_ = false;
      return;
    }
    const int32_t* found = PlacesOf(Shared::kSlots);
    int32_t* places = PlacesOf(issued_.slot);
    for (uint32_t i = LaneId(); i < items_.num_rows(); i += kWarpSize) places[i] = found[i];
    SyncWarp();  // lane 0 reads them, and no next item may come
    (num_in_flight_ == 0 ? num_rows_ : next_num_rows_) = items_.num_rows();
    num_pulled_ += items_.source() != device_.rank;
    ++num_in_flight_;
    issued_.Advance(Shared::kSlots);
    has_item_ = items_.Next(PlacesOf(Shared::kSlots));
    if (LaneId() == 0) progress_.Set(items_.position());
  }

  __device__ void Dequantize(const std::byte* record, const int32_t* places, uint32_t num_rows) {
    if (LaneId() == 0) BulkWaitRead<0>();  // the row before has left its place
    SyncWarp();
    std::byte* row = At(shared_.row_offset);
    ForUnits(RecordUnits(params_.format, record), 0, params_.format.num_units,
             [&](uint32_t unit, uint32_t end, const Unit& in_hand) {
               if (unit >= end) return;
               DequantizedUnit<typename Rows::Elem>(params_.format, in_hand).StoreInRow(row, unit);
             });
    FenceProxyAsyncShared();  // each lane's stores, before bulk stores read them
    SyncWarp();
    SendRows(row, places, num_rows);
  }
  __device__ void Split(const std::byte* record, const int32_t* places, uint32_t num_rows) {
    SendRows(record, places, num_rows);
    const RecordFormat& format = params_.format;
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      StoreScales(format, params_.scales, record, static_cast<uint64_t>(places[copy]));
    }
  }
  // The bytes of a row in shared memory, to all of its places. They are many times what the L2
  // holds, where the records of this rank had better stay until the peers have read them.
  __device__ void SendRows(const std::byte* row, const int32_t* places, uint32_t num_rows) const {
    if (LaneId() != 0) return;
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      BulkStoreEvictFirst(params_.recv_x + static_cast<uint64_t>(places[copy]) * params_.row_bytes,
                          row, static_cast<uint32_t>(params_.row_bytes));
    }
    BulkCommit();
  }

  const PullParams& params_;
  const DeviceRank& device_;
  uint64_t sequence_;
  const Progress& progress_;
  Shared shared_;
  uint32_t begin_;  // of the warp's part
  ItemCursor items_;
  bool has_item_ = false;
  RingPosition issued_, used_;
  uint32_t num_in_flight_ = 0;
  uint32_t num_rows_ = 0, next_num_rows_ = 0;  // places of those, the older first
  uint64_t num_pulled_ = 0;
};
#endif

template <typename Rows>
__global__ void __launch_bounds__(kMostThreads)
    PullRecordsInBulk(const __grid_constant__ PullParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ uint32_t shared_flag;
  __shared__ uint32_t positions[kMostPullWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const uint32_t num_warps = blockDim.x / kWarpSize - kPaddingWarps - kQuantizeWarps;
  const bool quantizes = WarpId() >= num_warps + kPaddingWarps;
  const Progress progress(params, positions, num_warps);
  if (threadIdx.x < kMostPullWarps) positions[threadIdx.x] = 0;
  RowQuantizer<typename Rows::Elem> quantizer(params, sequence);
  EntryPart entry(device, params.entry, sequence);
  const bool can_read = entry.Begin();
  if (can_read) quantizer.QuantizeOne();  // before the wait for peers: they wait for these
  uint64_t num_pulled = 0;
  if (can_read && entry.Finish() && CheckRecords(params)) {
    if (quantizes) {
      quantizer.QuantizeAll();
    } else if (WarpId() >= num_warps) {
      FillWeightsAndPadding(params, WarpId() - num_warps, kPaddingWarps,
                            [&](uint64_t row, uint32_t number, uint32_t total) {
                              progress.WaitFor(number, total);
                              ZeroRowByWarp(params, row);
                              ZeroScales(params.format, params.scales, row);
                            });
    } else {
      num_pulled = RecordPuller<Rows>(params, sequence, num_warps, progress).Run();
      BulkWaitAll();
      FenceProxyAsync();  // own bulk copies, before the tail flags
    }
  }
  FinishPull(params, sequence, num_pulled, &shared_flag);
#endif
}

using Kernel = void (*)(PullParams);

Kernel KernelOf(ElemType type, bool are_split) {
  return WithRecordRows(type, are_split,
                        [&]<typename Rows>() -> Kernel { return &PullRecordsInBulk<Rows>; });
}

}  // namespace

const char* PreparePullRecordsInBulk(const RankHandle& rank) {
  const ElemType type = rank.device.shape.elem_type;
  return PrepareKernels(rank.shared_bytes_per_block, KernelOf(type, false), KernelOf(type, true));
}

bool LaunchPullRecordsInBulk(RankHandle& rank, const PullParams& params, cudaStream_t stream,
                             const char** error) {
  const GroupShape& shape = params.device.shape;
  const bool are_split = params.scales.scales != nullptr;
  const uint32_t warp_bytes = WithRecordRows(shape.elem_type, are_split, [&]<typename Rows>() {
    return RecordShared<Rows>(params.wire_bytes, params.row_bytes, shape.top_k).warp_bytes;
  });
  const uint32_t num_warps = std::min(rank.shared_bytes_per_block / warp_bytes, kMostPullWarps);
  if (num_warps == 0) return false;
  KernelOf(shape.elem_type, are_split)<<<PullBlocks(params, num_warps),
                                         (num_warps + kPaddingWarps + kQuantizeWarps) * kWarpSize,
                                         num_warps * warp_bytes, stream>>>(params);
  *error = LaunchResult("PullRecordsInBulk");
  return true;
}
#endif

}  // namespace jax_ep::gpu
