// How a received row gets to its places: copied, or scaled and multiplied.
#pragma once

#include <type_traits>

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/lanes/ll_send.cuh"
#include "kernels/gpu/ll/dispatch/place_bulk.cuh"
#include "kernels/gpu/ll/dispatch/send_bulk.cuh"

namespace jax_ep::gpu::ll {

// Copies pieces as they are.
template <typename W>
struct PlainRows {
  using Word = W;
  static constexpr bool kTakesWholeRows = false;
  static constexpr bool kFitBulkCopies = std::is_same_v<Word, uint4>;
  static constexpr bool kFitTaggedWords = true;
  static constexpr uint32_t kWireBytes = sizeof(Word);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Sender = RowSender;

  __device__ static void PlaceInBulk(const LlDispatchKernelParams& params, const CallSlot& slot,
                                     const SourceWords& words, const TokenPartition& partition,
                                     const RowIndex& index, PlacedRows& item) {
    PlaceRowsInBulk(params, slot, words, partition, index, item);
  }
#endif

  __device__ static void Send(const LlDispatchKernelParams& params, const CallSlot& slot) {
    params.is_tagged ? SendTaggedRows<Word>(params, slot) : SendRows<Word>(params, slot);
  }

  __device__ static bool PlaceTagged(const LlDispatchKernelParams& params,
                                     const TaggedSource& source, const int32_t* rows,
                                     uint32_t num_rows, WordRange words) {
    const PairRange range = PairsOf<Word>(words);
    constexpr uint32_t kInFlight = 4;  // pairs of a lane
    bool is_ok = true;
    for (uint32_t first = range.begin + LaneId(); first < range.end && is_ok;
         first += kInFlight * kWarpSize) {
      uint2 data[kInFlight];
      is_ok = source.Load(first, kWarpSize, range.end, data);
      if (!is_ok) break;
      for (uint32_t copy = 0; copy < num_rows; ++copy) {
        std::byte* to = params.recv_x + static_cast<uint64_t>(rows[copy]) * params.row_bytes;
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          const uint32_t pair = first + i * kWarpSize;
          if (pair < range.end) StorePair<Word>(to, pair, data[i]);
        }
      }
    }
    return AllHaveWaited(is_ok);  // lanes without words have none to wait for
  }

  __device__ static void Place(const LlDispatchKernelParams& params, const std::byte* from,
                               bool /*is_pushed*/, const int32_t* rows, uint32_t num_rows,
                               WordRange range) {
    LaneWords<Word> words;
    for (uint32_t first = range.begin; first < range.end; first += words.kStep) {
      words.Load(from, first, range.end);
      for (uint32_t copy = 0; copy < num_rows; ++copy) {
        words.Store(params.recv_x + static_cast<uint64_t>(rows[copy]) * params.row_bytes, first,
                    range.end);
      }
    }
  }
};

// Scales each copy by its own weight, and multiplies it with y's row.
template <typename Elem, bool kIsVectorised>
struct WeightedRows {
  using Storage = typename Elem::Storage;
  using Word = typename WordOf<Elem, kIsVectorised>::Type;
  static constexpr bool kTakesWholeRows = true;  // dot products have one order
  static constexpr bool kFitBulkCopies = false;
  static constexpr bool kFitTaggedWords = false;
  static constexpr uint32_t kWireBytes = sizeof(Word);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Sender = RowSender;
#endif

  __device__ static void Send(const LlDispatchKernelParams& params, const CallSlot& slot) {
    SendRows<Word>(params, slot);
  }

  __device__ static void Place(const LlDispatchKernelParams& params, const std::byte* from,
                               bool /*is_pushed*/, const int32_t* rows, uint32_t num_rows,
                               WordRange range) {
    constexpr uint32_t kElems = WordOf<Elem, kIsVectorised>::kElems;
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      const auto row = static_cast<uint64_t>(rows[copy]);
      auto* to = reinterpret_cast<Word*>(params.recv_x + row * params.row_bytes);
      const bool is_scaled = params.row_weights != nullptr;
      const float weight = is_scaled ? params.row_weights[row] : 1.0f;
      for (uint32_t i = range.begin + LaneId(); i < range.end; i += kWarpSize) {
        const Word word = reinterpret_cast<const Word*>(from)[i];
        if (!is_scaled) {
          to[i] = word;
          continue;
        }
        float values[kElems];
        Unpack<Elem>(word, values);
#pragma unroll
        for (uint32_t j = 0; j < kElems; ++j) values[j] = Multiply(weight, values[j]);
        to[i] = Pack<Elem, Word>(values);
      }
    }
    if (params.recv_dots == nullptr) return;
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      const auto row = static_cast<uint64_t>(rows[copy]);
      const float dot =
          Dot(reinterpret_cast<const Word*>(from),
              reinterpret_cast<const Word*>(params.y + row * params.row_bytes), params.row_words);
      if (LaneId() == 0) params.recv_dots[row] = dot;
    }
  }

 private:
  // One warp. kDotLanes interleaved sums, then those pairwise (docs/semantics.md): elements of one
  // sum are words of one thread.
  __device__ static float Dot(const Word* lhs, const Word* rhs, uint32_t num_words) {
    constexpr uint32_t kElems = WordOf<Elem, kIsVectorised>::kElems;
    constexpr uint32_t kThreadsOfDot =
        kDotLanes / kElems < kWarpSize ? kDotLanes / kElems : kWarpSize;
    constexpr uint32_t kSums = kDotLanes / kElems / kThreadsOfDot;
    float sums[kSums][kElems] = {};
    if (LaneId() < kThreadsOfDot) {
      for (uint32_t first = LaneId(); first < num_words; first += kSums * kThreadsOfDot) {
#pragma unroll
        for (uint32_t i = 0; i < kSums; ++i) {
          if (first + i * kThreadsOfDot >= num_words) continue;
          float left[kElems], right[kElems];
          Unpack<Elem>(lhs[first + i * kThreadsOfDot], left);
          Unpack<Elem>(rhs[first + i * kThreadsOfDot], right);
#pragma unroll
          for (uint32_t j = 0; j < kElems; ++j) {
            sums[i][j] = Add(sums[i][j], Multiply(left[j], right[j]));
          }
        }
      }
    }
#pragma unroll
    for (uint32_t width = kSums / 2; width > 0; width /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < width; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < kElems; ++j) sums[i][j] = Add(sums[i][j], sums[i + width][j]);
      }
    }
#pragma unroll
    for (uint32_t width = kThreadsOfDot / 2; width > 0; width /= 2) {
#pragma unroll
      for (uint32_t j = 0; j < kElems; ++j) {
        sums[0][j] = Add(sums[0][j], FromLaneXor(sums[0][j], width));
      }
    }
#pragma unroll
    for (uint32_t width = kElems / 2; width > 0; width /= 2) {
#pragma unroll
      for (uint32_t j = 0; j < width; ++j) sums[0][j] = Add(sums[0][j], sums[0][j + width]);
    }
    return sums[0][0];
  }
};

}  // namespace jax_ep::gpu::ll
