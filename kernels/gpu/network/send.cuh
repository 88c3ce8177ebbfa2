// What kernels share that send slices to other nodes: the rows of a chunk of kNetChunkTokens go by
// as few commands as possible.
#pragma once

#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/commands.cuh"
#include "kernels/gpu/network/token_slices.h"

namespace jax_ep::gpu {

// The rank of another node that holds the row of a pair, or kNoRank. `rank_rows`: slots of one
// rank.
inline constexpr uint32_t kNoRank = ~0u;
__device__ inline uint32_t RemoteHolderOf(const DeviceRank& device, int32_t slot,
                                          uint32_t rank_rows) {
  const uint32_t rank = static_cast<uint32_t>(slot) / rank_rows;
  // Plans come from the caller: a slot beyond the last rank is none.
  const bool is_remote = slot >= 0 && rank < device.shape.num_ranks && !IsMate(device, rank);
  return is_remote ? rank : kNoRank;
}

// Which tokens of a chunk another node wants, as bits, from the warps that put their rows into the
// stage to the block that pushes the commands. Zero between the kernels that send, unless the rank
// has failed.
__device__ inline uint32_t* WantedOf(const DeviceRank& device, const TokenSlice& slice,
                                     uint64_t token, uint32_t other) {
  const uint64_t chunk = (token - slice.round_begin()) / kNetChunkTokens;
  return OwnHeapAt<uint32_t>(device, device.layout.net_wanted) +
         chunk * (device.shape.num_nodes() - 1) + other;
}
// One thread.
__device__ inline void WantToken(const DeviceRank& device, const TokenSlice& slice, uint64_t token,
                                 uint32_t other) {
  atomicOr(WantedOf(device, slice, token, other), 1u << token % kNetChunkTokens);
}

// One warp copies a row, 16 bytes a lane where both ends allow it.
__device__ inline void WarpCopyBytes(std::byte* to, const std::byte* from, uint64_t num_bytes) {
  const auto ends = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  const uint64_t num_words = ends % sizeof(uint4) == 0 ? num_bytes / sizeof(uint4) : 0;
  constexpr uint32_t kInFlight = 8;
  for (uint64_t first = LaneId(); first < num_words; first += kInFlight * kWarpSize) {
    uint4 words[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kWarpSize < num_words) {
        words[i] = reinterpret_cast<const uint4*>(from)[first + i * kWarpSize];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kWarpSize < num_words) {
        reinterpret_cast<uint4*>(to)[first + i * kWarpSize] = words[i];
      }
    }
  }
  // Rows are made of elements of at least two bytes.
  for (uint64_t i = num_words * (sizeof(uint4) / 2) + LaneId(); i < num_bytes / 2; i += kWarpSize) {
    reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
  }
}

// How many bits of a word are set from bit `at` on, without a gap.
__device__ inline uint32_t RunLength(uint32_t bits, uint32_t at) {
  const uint64_t rest = ~(uint64_t{bits} >> at);  // its lowest bit is behind the run
  return static_cast<uint32_t>(__ffsll(static_cast<long long>(rest))) - 1;
}
// Of bits in a word, by lane: where a run of them begins, and how many it has.
struct Run {
  bool begins;
  uint32_t length;
};
__device__ inline Run RunOfLane(uint32_t bits) {
  constexpr uint32_t kBits = 32;
  const uint32_t lane = LaneId();
  Run run{.begins = lane < kBits && (bits >> lane & 1) != 0 &&
                    (lane == 0 || (bits >> (lane - 1) & 1) == 0),
          .length = 0};
  if (run.begins) run.length = RunLength(bits, lane);
  return run;
}

// Tokens that are neighbours in a chunk, counted from the round's first one.
struct TokenRun {
  uint64_t begin;
  uint32_t length;

  // Their command: like `command`, whose offsets are those of token 0. What it is widened by, to
  // whole units of the wire, are rows of the same chunk.
  __device__ Command Of(Command command, uint64_t pitch) const {
    const uint64_t first = begin * pitch / kWireUnitBytes * kWireUnitBytes;
    command.local_offset += first;
    command.remote_offset += first;
    command.length_bytes = AlignUp((begin + length) * pitch, kWireUnitBytes) - first;
    return command;
  }
};

// The signal of a slice, made of a write: with so many bytes from its offsets on, or none.
__device__ inline Command SliceSignal(Command write, uint64_t num_bytes) {
  write.op = num_bytes > 0 ? Op::kWriteSignal : Op::kSignal;
  write.length_bytes = num_bytes;
  return write;
}

// Blocks of a kernel that sends slices. All but the last, the makers, put a slice into the stage
// and go on with the next one; the last pushes the commands of each slice when the makers are
// through with it, in the order of the slices, as their signals are counted. It is the last, since
// blocks start in their order and it would keep makers from a GPU without room for all.
__device__ inline uint32_t NumMakers() { return gridDim.x - 1; }
__device__ inline bool IsPusher() { return blockIdx.x == NumMakers(); }
// Blocks of such a kernel, of `most` but two at least, for `items`, of which a maker handles
// `items_per_block` at once.
constexpr uint32_t BlocksToSend(uint64_t items, uint64_t items_per_block, uint32_t most) {
  return BlocksFor(items, items_per_block, most > 1 ? most - 1 : 1) + 1;
}

// All threads of a maker, for each slice, even if the rank has failed.
__device__ inline void EndSlice(const DeviceRank& device, const TokenSlice& slice) {
  SyncBlock();
  if (threadIdx.x == 0) {
    AddReleaseGpu(&NetStateOf(device)->blocks_through[slice.number_in_round()], 1u);
  }
}
// All threads of the pusher, for each slice, as it clears what makers count: what they have stored
// of it can be pushed. False: this rank has failed, or `is_ok` is false in a thread, and nothing
// may be.
__device__ inline bool AwaitMakers(const DeviceRank& device, const TokenSlice& slice, bool is_ok) {
  bool has_failed = false;
  if (threadIdx.x == 0) {
    uint32_t* through = &NetStateOf(device)->blocks_through[slice.number_in_round()];
    while (LoadAcquireSys(through) != NumMakers()) {  // what they wait for has deadlines
    }
    *through = 0;
    has_failed = HasFailed(device);
  }
  return !SyncBlockAny(has_failed || !is_ok);
}

// The pusher's commands. Each warp has the nodes WarpId(), WarpId() + warps of the block, ...
class SlicePusher {
 public:
  // What is needed of the first node is here before makers are awaited: behind that each load takes
  // a microsecond that the wire waits.
  __device__ SlicePusher(const DeviceRank& device, Operation operation)
      : device_(device),
        operation_(operation),
        has_fast_wire_(device.network->has_fast_wire),
        ring_(device, NodeOfNumber(min(WarpId(), device.shape.num_nodes() - 2))) {}

  // All threads, for slices side by side, when the makers are through with each: its commands, then
  // its signal to each node, which is signal_to(slice, node). The commands of a run of tokens that
  // another node wants are command_of(slice, part, node, run) for part < num_parts. Of 32 chunks at
  // once, and the signal with the last of them, since each push waits for its stores to the host.
  // If the rank fails, no signal follows what was not pushed.
  template <typename CommandOf, typename SignalTo>
  __device__ void PushAll(const SliceSpan& slices, uint32_t num_parts, CommandOf&& command_of,
                          SignalTo&& signal_to) const {
    bool is_ok = true;
    for (uint32_t i = 0; i < slices.count(); ++i) {
      const TokenSlice slice = slices.At(i);
      is_ok = AwaitMakers(device_, slice, is_ok);
      for (uint32_t other = WarpId(); is_ok && other + 1 < device_.shape.num_nodes();
           other += blockDim.x / kWarpSize) {
        const uint32_t node = NodeOfNumber(other);
        const Ring ring = other == WarpId() ? ring_ : Ring(device_, node);
        is_ok = PushTo(ring, node, other, slice, num_parts, command_of, signal_to);
      }
    }
  }

 private:
  __device__ uint32_t NodeOfNumber(uint32_t other) const {
    return NodeOfOther(device_.shape.num_nodes(), NodeOf(device_), other);
  }

  // Of a chunk of `count` tokens, those with a bit in `wanted`, or all where that is quicker: a
  // copy more takes a copy engine longer than the rows of a gap. Nobody reads what those bring.
  __device__ uint32_t WithGaps(uint32_t wanted, uint32_t count) const {
    constexpr uint32_t kBits = 32;
    const bool is_dense = 2 * static_cast<uint32_t>(__popc(wanted)) >= count;
    return has_fast_wire_ && is_dense ? ~0u >> (kBits - count) : wanted;
  }

  // One warp. False: this rank has failed.
  template <typename CommandOf, typename SignalTo>
  __device__ bool PushTo(const Ring& ring, uint32_t node, uint32_t other, const TokenSlice& slice,
                         uint32_t num_parts, CommandOf&& command_of, SignalTo&& signal_to) const {
    static_assert(kNetChunkTokens <= 32, "tokens are bits");
    const auto num_chunks = static_cast<uint32_t>(slice.num_chunks());
    bool is_signalled = false;
    for (uint32_t before = 0; before < num_chunks; before += kWarpSize) {
      const uint32_t chunk = before + LaneId();
      const uint64_t first = slice.begin + chunk * kNetChunkTokens;
      uint32_t left =
          chunk < num_chunks ? atomicExch(WantedOf(device_, slice, first, other), 0u) : 0;
      if (left != 0) left = WithGaps(left, NumChunkTokens(slice, first));
      while (Ballot(left != 0) != 0) {
        TokenRun run{.begin = 0, .length = 0};
        const bool has_run = left != 0;
        if (has_run) {
          const uint32_t bit = static_cast<uint32_t>(__ffs(static_cast<int>(left))) - 1;
          run.begin = first - slice.round_begin() + bit;
          run.length = RunLength(left, bit);
          left &= ~static_cast<uint32_t>(((uint64_t{1} << run.length) - 1) << bit);
        }
        const bool are_last = before + kWarpSize >= num_chunks && Ballot(left != 0) == 0;
        for (uint32_t part = 0; part < num_parts; ++part) {
          // By the last lane, whose command comes behind those of the others.
          const bool signals =
              are_last && part + 1 == num_parts && LaneId() + 1 == kWarpSize && !has_run;
          const Command command =
              signals ? signal_to(slice, node) : command_of(slice, part, node, run);
          if (!WarpPush(device_, operation_, ring, has_run || signals, command)) return false;
          is_signalled = Ballot(signals) != 0;
        }
      }
    }
    return is_signalled ||
           WarpPush(device_, operation_, ring, LaneId() == 0, signal_to(slice, node));
  }

  const DeviceRank& device_;
  Operation operation_;
  bool has_fast_wire_;
  Ring ring_;
};

}  // namespace jax_ep::gpu
