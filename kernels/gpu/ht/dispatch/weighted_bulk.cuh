// The weighted pull with bulk copies (pull_weighted_rows.cu).
#pragma once

#include "kernels/gpu/device/ring_position.cuh"
#include "kernels/gpu/ht/dispatch/weighted_pull.cuh"

namespace jax_ep::gpu::weighted {

#if JAX_EP_BULK_COPIES
inline constexpr uint32_t kMaxBulkWarps = 15;  // and one that pads: 128 registers per thread

// Shared memory of a block with bulk copies: zeroes, then for each warp a row, a ring of pieces of
// y, the places of two rows' copies, and barriers. Warps are what the arithmetic lacks, so a warp
// has one row: a piece of the next one takes the place of a piece that was read for the last time.
struct WeightedShared {
  static constexpr uint32_t kPieceBytes = 4096;
  static constexpr uint32_t kRingSlots = 2;
  uint32_t pieces_per_row, row_stride, places_offset, barriers_offset, warp_bytes;

  __host__ __device__ WeightedShared(uint64_t row_bytes, uint32_t top_k) {
    pieces_per_row = static_cast<uint32_t>((row_bytes + kPieceBytes - 1) / kPieceBytes);
    row_stride = static_cast<uint32_t>(AlignUp(row_bytes, 128));
    places_offset = row_stride + kRingSlots * kPieceBytes;
    barriers_offset =
        places_offset + static_cast<uint32_t>(AlignUp(2 * top_k * sizeof(int32_t), 8));
    const auto num_barriers = pieces_per_row + kRingSlots;
    warp_bytes =
        static_cast<uint32_t>(AlignUp(barriers_offset + num_barriers * sizeof(uint64_t), 128));
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <typename Elem>
class BulkPuller {
 public:
  __device__ BulkPuller(const PullParams& params, uint64_t sequence, uint32_t num_warps,
                        const Progress& progress)
      : params_(params),
        device_(params.device),
        progress_(progress),
        shared_(params.row_bytes, params.device.shape.top_k),
        begin_(params.zero_bytes + WarpId() * shared_.warp_bytes),
        items_(params, sequence, num_warps) {
    if (LaneId() != 0) return;
    const uint32_t num_barriers = shared_.pieces_per_row + kRingSlots;
    for (uint32_t i = 0; i < num_barriers; ++i) BarrierInit(RowBarrier(i), 1);
    FenceBarrierInit();
  }

  // Remote rows read.
  __device__ uint64_t Run() {
    SyncWarp();
    FindRow();
    if (rows_found_ > 0) {
      for (uint32_t piece = 0; piece < shared_.pieces_per_row; ++piece) LoadPiece(piece);
      next_weight_ = WeightOf(PlacesOf(0)[0]);
    }
    for (uint32_t number = 0; number < rows_found_; ++number) {
      FindRow();  // its places were those of row number - 1
      const bool is_last_row = number + 1 == rows_found_;
      const int32_t* places = PlacesOf(number);
      const uint32_t num_copies = num_copies_;
      for (uint32_t copy = 0; copy < num_copies; ++copy) {
        const bool is_last = copy + 1 == num_copies;
        const float weight = next_weight_;
        if (!is_last || !is_last_row) {
          next_weight_ = WeightOf(is_last ? *PlacesOf(number + 1) : places[copy + 1]);
        }
        SendCopy(static_cast<uint64_t>(places[copy]), weight, number, is_last && !is_last_row);
      }
      SyncWarp();
      num_copies_ = next_num_copies_;
    }
    if (LaneId() == 0) progress_.SetDone();
    return num_pulled_;
  }

 private:
  static constexpr uint32_t kRingSlots = WeightedShared::kRingSlots;
  static constexpr uint32_t kElems = WordOf<Elem, true>::kElems;
  static constexpr uint32_t kRoundWords = kDotLanes / kElems / kWarpSize;  // per lane
  static constexpr uint32_t kPieceWords = WeightedShared::kPieceBytes / sizeof(uint4) / kWarpSize;
  static constexpr uint32_t kBatchWords = 4;  // of a piece, in registers at once
  static_assert(kPieceWords % kBatchWords == 0 && kBatchWords % kRoundWords == 0);

  // Places in the warp's part of shared memory. Found anew each time, from the array's own name:
  // the compiler knows a pointer that it has stored for no pointer to shared memory.
  __device__ unsigned char* RowAt(uint32_t offset) const { return shared_bytes + begin_ + offset; }
  __device__ unsigned char* RingAt(uint32_t slot) const {
    return RowAt(shared_.row_stride + slot * WeightedShared::kPieceBytes);
  }
  __device__ int32_t* PlacesOf(uint32_t number) const {
    return reinterpret_cast<int32_t*>(RowAt(shared_.places_offset)) +
           number % 2 * device_.shape.top_k;
  }
  __device__ uint64_t* RowBarrier(uint32_t piece) const {
    return reinterpret_cast<uint64_t*>(RowAt(shared_.barriers_offset)) + piece;
  }
  __device__ uint64_t* RingBarrier(uint32_t slot) const {
    return RowBarrier(shared_.pieces_per_row + slot);
  }
  __device__ float WeightOf(int32_t place) const {
    return params_.row_weights != nullptr ? params_.row_weights[place] : 1.0f;
  }

  // The next row, if there is one.
  __device__ void FindRow() {
    if (!items_.Next(PlacesOf(rows_found_))) return;
    (rows_found_ == 0 ? num_copies_ : next_num_copies_) = items_.num_rows();
    num_pulled_ += items_.source() != device_.rank;
    const auto* records = OwnHeapAt<DispatchRecord>(device_, device_.layout.records);
    from_ = PublishedArray(device_, items_.source(), records[items_.source()].x) +
            items_.token() * params_.row_bytes;
    if (LaneId() == 0) progress_.Set(items_.position());
    ++rows_found_;
  }

  // Starts to load a piece of the row that was found last.
  __device__ void LoadPiece(uint32_t piece) {
    if (LaneId() != 0) return;
    Load(RowAt(piece * WeightedShared::kPieceBytes), from_, piece, RowBarrier(piece));
  }
  // One lane: a piece of `row`.
  __device__ void Load(unsigned char* to, const std::byte* row, uint32_t piece,
                       uint64_t* barrier) const {
    const uint64_t begin = static_cast<uint64_t>(piece) * WeightedShared::kPieceBytes;
    const auto num_bytes = static_cast<uint32_t>(
        min(static_cast<uint64_t>(WeightedShared::kPieceBytes), params_.row_bytes - begin));
    BarrierExpectBytes(barrier, num_bytes);
    BulkLoad(to, row + begin, num_bytes, barrier);
  }

  // Starts to load pieces of y, as far ahead as the ring has room and rows are known.
  __device__ void FillRing() {
    while (num_in_flight_ < kRingSlots && y_row_ < rows_found_) {
      if (LaneId() == 0) {
        const auto row = static_cast<uint64_t>(PlacesOf(y_row_)[y_copy_]);
        Load(RingAt(issued_.slot), params_.y + row * params_.row_bytes, y_piece_,
             RingBarrier(issued_.slot));
      }
      issued_.Advance(kRingSlots);
      ++num_in_flight_;
      if (++y_piece_ < shared_.pieces_per_row) continue;
      y_piece_ = 0;
      // Two rows at most are known: the current one, and one more. After the last, both are that.
      const bool is_newest = y_row_ + 1 == rows_found_ && rows_found_ > 1;
      if (++y_copy_ < (is_newest ? next_num_copies_ : num_copies_)) continue;
      y_copy_ = 0;
      ++y_row_;
    }
  }

  __device__ static void AddProducts(const float (&values)[kElems], uint4 word,
                                     float (&sums)[kElems]) {
    float others[kElems];
    Unpack<Elem>(word, others);
#pragma unroll
    for (uint32_t e = 0; e < kElems; ++e) sums[e] = Add(sums[e], Multiply(values[e], others[e]));
  }

  // Scales row `number` to its place, and takes its dot product with y there. The last copy of a
  // row makes place for the next one.
  __device__ void SendCopy(uint64_t place, float weight, uint32_t number, bool loads_next) {
    const auto* from = reinterpret_cast<const uint4*>(RowAt(0));
    auto* to = reinterpret_cast<uint4*>(params_.recv_x + place * params_.row_bytes);
    const auto num_words = static_cast<uint32_t>(params_.row_bytes / sizeof(uint4));
    const bool has_dots = params_.recv_dots != nullptr;
    float sums[kRoundWords][kElems] = {};
    for (uint32_t piece = 0; piece < shared_.pieces_per_row; ++piece) {
      BarrierWait(RowBarrier(piece), number % 2);
      const uint4* y = nullptr;
      if (has_dots) {
        FillRing();
        BarrierWait(RingBarrier(used_.slot), used_.parity);
        y = reinterpret_cast<const uint4*>(RingAt(used_.slot));
      }
#pragma unroll 1
      for (uint32_t batch = 0; batch < kPieceWords; batch += kBatchWords) {
        const uint32_t in_piece = batch * kWarpSize + LaneId();
        const uint32_t first = piece * kPieceWords * kWarpSize + in_piece;
        const bool is_whole = first - LaneId() + kBatchWords * kWarpSize <= num_words;
        if (is_whole && has_dots && params_.row_weights != nullptr) {
          // Loads first: stores might be to the same memory for all that the compiler knows.
          uint4 words[kBatchWords], others[kBatchWords];
#pragma unroll
          for (uint32_t i = 0; i < kBatchWords; ++i) {
            words[i] = from[first + i * kWarpSize];
            others[i] = y[in_piece + i * kWarpSize];
          }
#pragma unroll
          for (uint32_t i = 0; i < kBatchWords; ++i) {
            float values[kElems];
            Unpack<Elem>(words[i], values);
            AddProducts(values, others[i], sums[i % kRoundWords]);
#pragma unroll
            for (uint32_t e = 0; e < kElems; ++e) values[e] = Multiply(weight, values[e]);
            words[i] = Pack<Elem, uint4>(values);
          }
#pragma unroll
          for (uint32_t i = 0; i < kBatchWords; ++i) to[first + i * kWarpSize] = words[i];
          continue;
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatchWords; ++i) {
          const uint32_t word = first + i * kWarpSize;
          if (word >= num_words) continue;
          float values[kElems];
          Unpack<Elem>(from[word], values);
          if (has_dots) AddProducts(values, y[in_piece + i * kWarpSize], sums[i % kRoundWords]);
          if (params_.row_weights == nullptr) {
            to[word] = from[word];
            continue;
          }
#pragma unroll
          for (uint32_t e = 0; e < kElems; ++e) values[e] = Multiply(weight, values[e]);
          to[word] = Pack<Elem, uint4>(values);
        }
      }
      SyncWarp();  // the piece and the slot have been read
      if (loads_next) LoadPiece(piece);
      if (!has_dots) continue;
      --num_in_flight_;
      used_.Advance(kRingSlots);
    }
    if (!has_dots) return;
    // Dot lane (i * kWarpSize + lane) * kElems + e is in sums[i][e].
#pragma unroll
    for (uint32_t e = 0; e < kElems; ++e) {
      float sum = sums[0][e];
      if constexpr (kRoundWords == 2) sum = Add(sum, sums[1][e]);
#pragma unroll
      for (uint32_t width = kWarpSize / 2; width > 0; width /= 2) {
        sum = Add(sum, FromLaneXor(sum, width));
      }
      sums[0][e] = sum;
    }
#pragma unroll
    for (uint32_t width = kElems / 2; width > 0; width /= 2) {
#pragma unroll
      for (uint32_t e = 0; e < width; ++e) sums[0][e] = Add(sums[0][e], sums[0][e + width]);
    }
    if (LaneId() == 0) params_.recv_dots[place] = sums[0][0];
  }

  const PullParams& params_;
  const DeviceRank& device_;
  const Progress& progress_;
  WeightedShared shared_;
  uint32_t begin_;  // of the warp's part
  ItemCursor items_;
  uint32_t num_copies_ = 0, next_num_copies_ = 0;  // of the current row and the one after it
  uint32_t rows_found_ = 0;
  const std::byte* from_ = nullptr;                // of the row that was found last
  float next_weight_ = 1.0f;                       // of the copy that comes next
  RingPosition issued_, used_;                     // of the ring of pieces of y
  uint32_t num_in_flight_ = 0;                     // of them
  uint32_t y_row_ = 0, y_copy_ = 0, y_piece_ = 0;  // next one to issue
  uint64_t num_pulled_ = 0;
};
#endif
#endif

}  // namespace jax_ep::gpu::weighted
