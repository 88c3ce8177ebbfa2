// Where a warp of an LL combine sums the rows of an item.
#pragma once

#include "kernels/gpu/ll/combine/params.cuh"

namespace jax_ep::gpu::slot_combine {

// What a buffer has outside of its bytes, in shared memory as well.
struct SumBufferState {
  uint64_t loaded;           // mbarrier, of one arrival
  float weights[kWarpSize];  // of the rows in the buffer
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One warp's buffer: a sum, and the rows that it is made of, a range of their words. If they do not
// fit, in steps; rows of the first one are on their way between Begin and Finish.
template <typename T>
class SumBuffer {
 public:
  __device__ SumBuffer(const LlCombineParams& params, uint32_t number, uint32_t buffer_bytes,
                       SumBufferState& state)
      : call_(&params.call),
        state_(&state),
        sum_(ll_combine_shared + params.table_bytes + number * buffer_bytes),
        row_bytes_(sum_ + params.sum_bytes),
        num_words_((buffer_bytes - params.sum_bytes) / static_cast<uint32_t>(sizeof(Word))) {}

  __device__ const ItemRows& rows() const { return rows_; }
  // A piece of a partial, once it is finished.
  __device__ const std::byte* sum() const { return sum_; }

  __device__ void Begin(const ItemRows& rows, WordRange range) {
    rows_ = rows;
    if (rows.count == 0) return;
    range_ = range;
    const uint32_t wanted = range.end - range.begin;
    step_ = rows.count * wanted <= num_words_ ? wanted : num_words_ / rows.count;
    float weight = 1.0f;
    if (rows.row[0] >= 0 && call_->row_weights != nullptr) weight = call_->row_weights[rows.row[0]];
    Load(range.begin);
    if (rows.row[0] >= 0) state_->weights[rows.lower[0]] = weight;
    SyncWarp();
  }
  // Leaves the buffer without rows to load.
  __device__ void Finish() {
    if (rows_.count == 0) return;
    for (uint32_t begin = range_.begin;;) {
      BarrierWait(&state_->loaded, parity_);
      parity_ ^= 1;
      Sum(begin);
      begin += step_;
      if (begin >= range_.end) return;
      Load(begin);
    }
  }

 private:
  using Word = typename T::Word;
  static constexpr uint32_t kWords = 4;  // of a lane at once

  __device__ uint32_t WordsFrom(uint32_t begin) const { return min(step_, range_.end - begin); }
  __device__ void Load(uint32_t begin) const {
    const auto num_bytes = WordsFrom(begin) * static_cast<uint32_t>(sizeof(Word));
    SyncWarp();  // the rows before have been read
    if (LaneId() == 0) BarrierExpectBytes(&state_->loaded, rows_.count * num_bytes);
    SyncWarp();
    if (rows_.row[0] < 0) return;
    const std::byte* row = call_->y + static_cast<uint64_t>(rows_.row[0]) * call_->row_bytes;
    BulkLoad(row_bytes_ + rows_.lower[0] * num_bytes, row + begin * sizeof(Word), num_bytes,
             &state_->loaded);
  }
  __device__ void Sum(uint32_t begin) const {
    const uint32_t num_words = WordsFrom(begin);
    auto* to = reinterpret_cast<typename T::Storage*>(sum_) +
               static_cast<uint64_t>(begin - range_.begin) * T::kElems;
    for (uint32_t word = LaneId(); word < num_words; word += kWords * kWarpSize) {
      float sums[kWords][T::kElems];
#pragma unroll
      for (uint32_t j = 0; j < kWords; ++j) {
        // A sum begins with its first product: -0 leaves every number as it is.
#pragma unroll
        for (uint32_t e = 0; e < T::kElems; ++e) sums[j][e] = -0.0f;
      }
      for (uint32_t i = 0; i < rows_.count; ++i) {
        const Word* row = reinterpret_cast<const Word*>(row_bytes_) + i * num_words + word;
        Word words[kWords];
#pragma unroll
        for (uint32_t j = 0; j < kWords; ++j) {
          if (word + j * kWarpSize < num_words) words[j] = row[j * kWarpSize];
        }
        AddRow<typename T::Elem>(words, state_->weights[i], /*is_first=*/false, sums);
      }
#pragma unroll
      for (uint32_t j = 0; j < kWords; ++j) {
        const uint32_t at = word + j * kWarpSize;
        if (at < num_words) StoreElems<typename T::Partial>(to + at * T::kElems, sums[j]);
      }
    }
  }

  const SlotCombineParams* call_;
  SumBufferState* state_;
  std::byte* sum_;
  std::byte* row_bytes_;
  uint32_t num_words_;  // of all rows together
  uint32_t parity_ = 0;
  ItemRows rows_;
  WordRange range_{};
  uint32_t step_ = 0;
};
#endif

}  // namespace jax_ep::gpu::slot_combine
