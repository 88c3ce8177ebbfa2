// The weighted pull without bulk copies, and what both ways share (pull_weighted_rows.cu).
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/ht/dispatch/pull.cuh"
#include "kernels/gpu/launch_state.h"

namespace jax_ep::gpu::weighted {

inline constexpr uint32_t kMaxWarps = 512 / kWarpSize;
inline constexpr uint32_t kMaxThreads = (kMaxWarps + 1) * kWarpSize;
inline constexpr uint32_t kMaxPieceBytes = 8192;
inline constexpr uint32_t kDotsPerLane = kDotLanes / kWarpSize;
// Copies of a row that are handled together without bulk copies.
inline constexpr uint32_t kCopies = 8;

extern __shared__ __align__(128) unsigned char shared_bytes[];

// Without bulk copies.
__host__ __device__ constexpr uint32_t WarpBytes(uint32_t piece_bytes) {
  return piece_bytes + kMaxTopK * static_cast<uint32_t>(sizeof(int32_t)) +
         kCopies * kDotLanes * static_cast<uint32_t>(sizeof(float));
}

// One warp: dot lane i * kWarpSize + lane is in sums[i].
__device__ inline float AddDotLanes(float (&sums)[kDotsPerLane]) {
#pragma unroll
  for (uint32_t width = kDotsPerLane / 2; width > 0; width /= 2) {
#pragma unroll
    for (uint32_t i = 0; i < width; ++i) sums[i] = Add(sums[i], sums[i + width]);
  }
#pragma unroll
  for (uint32_t width = kWarpSize / 2; width > 0; width /= 2) {
    sums[0] = Add(sums[0], FromLaneXor(sums[0], width));
  }
  return sums[0];
}

template <typename Elem, bool kIsVectorised>
__device__ uint64_t PullWeighted(const PullParams& params, uint64_t sequence, uint32_t num_warps) {
  using Storage = typename Elem::Storage;
  using Word = typename WordOf<Elem, kIsVectorised>::Type;
  constexpr uint32_t kElems = WordOf<Elem, kIsVectorised>::kElems;
  constexpr uint32_t kInFlight = 4;
  const DeviceRank& device = params.device;
  const auto* records = OwnHeapAt<DispatchRecord>(device, device.layout.records);
  unsigned char* own_bytes =
      shared_bytes + static_cast<uint64_t>(WarpId()) * WarpBytes(params.piece_bytes);
  auto* piece = reinterpret_cast<Word*>(own_bytes);
  auto* sums = reinterpret_cast<float*>(own_bytes + params.piece_bytes);  // [kCopies][kDotLanes]
  auto* rows = reinterpret_cast<int32_t*>(sums + kCopies * kDotLanes);
  const uint32_t words_per_piece = params.piece_bytes / sizeof(Word);
  const uint64_t num_words = params.row_bytes / sizeof(Word);

  uint64_t num_pulled = 0;
  ItemCursor items(params, sequence, num_warps);
  while (items.Next(rows)) {
    num_pulled += items.source() != device.rank;
    const auto* from = reinterpret_cast<const Word*>(
        PublishedArray(device, items.source(), records[items.source()].x) +
        items.token() * params.row_bytes);
    for (uint32_t first_copy = 0; first_copy < items.num_rows(); first_copy += kCopies) {
      const uint32_t num_copies = min(kCopies, items.num_rows() - first_copy);
      const int32_t* copy_rows = rows + first_copy;
      for (uint32_t i = LaneId(); i < num_copies * kDotLanes; i += kWarpSize) sums[i] = 0.0f;
      for (uint64_t begin = 0; begin < num_words; begin += words_per_piece) {
        const auto count =
            static_cast<uint32_t>(min(static_cast<uint64_t>(words_per_piece), num_words - begin));
        SyncWarp();  // the piece before has been read
        for (uint32_t first = LaneId(); first < count; first += kInFlight * kWarpSize) {
          Word words[kInFlight];
#pragma unroll
          for (uint32_t i = 0; i < kInFlight; ++i) {
            if (first + i * kWarpSize < count) words[i] = from[begin + first + i * kWarpSize];
          }
#pragma unroll
          for (uint32_t i = 0; i < kInFlight; ++i) {
            if (first + i * kWarpSize < count) piece[first + i * kWarpSize] = words[i];
          }
        }
        SyncWarp();
        for (uint32_t copy = 0; copy < num_copies; ++copy) {
          const auto row = static_cast<uint64_t>(copy_rows[copy]);
          auto* to = reinterpret_cast<Word*>(params.recv_x + row * params.row_bytes) + begin;
          if (params.row_weights == nullptr) {
            for (uint32_t i = LaneId(); i < count; i += kWarpSize) to[i] = piece[i];
            continue;
          }
          const float weight = params.row_weights[row];
          for (uint32_t i = LaneId(); i < count; i += kWarpSize) {
            float values[kElems];
            Unpack<Elem>(piece[i], values);
#pragma unroll
            for (uint32_t j = 0; j < kElems; ++j) values[j] = Multiply(weight, values[j]);
            to[i] = Pack<Elem, Word>(values);
          }
        }
        if (params.recv_dots == nullptr) continue;
        const auto* elems = reinterpret_cast<const Storage*>(piece);
        const uint32_t num_elems = count * kElems;
        for (uint32_t copy = 0; copy < num_copies; ++copy) {
          const auto row = static_cast<uint64_t>(copy_rows[copy]);
          const auto* y =
              reinterpret_cast<const Storage*>(params.y + row * params.row_bytes) + begin * kElems;
          float* kept = sums + copy * kDotLanes;
          float dots[kDotsPerLane];
#pragma unroll
          for (uint32_t j = 0; j < kDotsPerLane; ++j) dots[j] = kept[j * kWarpSize + LaneId()];
          for (uint32_t first = LaneId(); first < num_elems; first += kDotLanes) {
#pragma unroll
            for (uint32_t j = 0; j < kDotsPerLane; ++j) {
              const uint32_t i = first + j * kWarpSize;
              if (i >= num_elems) continue;
              dots[j] = Add(dots[j], Multiply(Elem::Load(elems[i]), Elem::Load(y[i])));
            }
          }
#pragma unroll
          for (uint32_t j = 0; j < kDotsPerLane; ++j) kept[j * kWarpSize + LaneId()] = dots[j];
        }
      }
      if (params.recv_dots == nullptr) continue;
      for (uint32_t copy = 0; copy < num_copies; ++copy) {
        float dots[kDotsPerLane];
#pragma unroll
        for (uint32_t j = 0; j < kDotsPerLane; ++j) {
          dots[j] = sums[copy * kDotLanes + j * kWarpSize + LaneId()];
        }
        const float dot = AddDotLanes(dots);
        if (LaneId() == 0) params.recv_dots[copy_rows[copy]] = dot;
      }
      SyncWarp();  // the sums have been read
    }
  }
  return num_pulled;
}

}  // namespace jax_ep::gpu::weighted
