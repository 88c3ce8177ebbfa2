// The device side of entry.h.
//
// Each block has a slice of recv_src, the first one publishes the entry. While other kernels hold
// the multiprocessors some may not be running, and wait for others of their grid to end: so a block
// that misses something does it itself. All that is the same whoever does it, and however often.
#pragma once

#include "kernels/gpu/protocol/control.cuh"
#include "kernels/gpu/protocol/entry.h"
#include "kernels/gpu/protocol/row_index.cuh"

namespace jax_ep::gpu {

struct RowRange {
  uint32_t begin = 0, end = 0;
};

// The first entries of recv_src in a range that a thread indexes, of `num_threads`. Loads only:
// nothing waits for them here.
struct RowCodes {
  static constexpr uint32_t kInFlight = 4;

  __device__ RowCodes(const Entry& entry, RowRange range, uint32_t thread, uint32_t num_threads)
      : rows{range.begin + thread, range.end}, step(num_threads) {
    Load(entry);
  }
  __device__ void Load(const Entry& entry) {
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t row = rows.begin + i * step;
      codes[i] = row < rows.end ? entry.recv_src[row] : -1;
    }
  }

  RowRange rows;
  uint32_t step;
  int32_t codes[kInFlight];
};

// All of the thread's rows.
__device__ inline void IndexRows(const DeviceRank& device, const Entry& entry,
                                 const RowIndex& index, RowCodes rows) {
  while (rows.rows.begin < rows.rows.end) {
#pragma unroll
    for (uint32_t i = 0; i < RowCodes::kInFlight; ++i) {
      if (rows.codes[i] < 0) continue;
      const auto code = static_cast<uint32_t>(rows.codes[i]);
      const uint32_t source = entry.by_source_codes.Quotient(code);
      const uint32_t pair = entry.by_source_codes.Remainder(code);
      const uint32_t token = entry.by_top_k.Quotient(pair);
      // Plans come from the caller: what no plan says is ignored.
      if (source >= device.shape.num_ranks || token >= entry.num_tokens) continue;
      index.Put(source, token, entry.by_top_k.Remainder(pair),
                static_cast<int32_t>(rows.rows.begin + i * rows.step));
    }
    rows.rows.begin += RowCodes::kInFlight * rows.step;
    rows.Load(entry);
  }
}

// One warp. `before_peers` runs when this rank's own heap says what it has to: what ranks that take
// no part would have written is there, too.
template <typename BeforePeers>
__device__ inline void PublishEntry(const DeviceRank& device, const Entry& entry, uint64_t value,
                                    BeforePeers&& before_peers) {
  const auto for_mates = [&](bool is_own_heap, auto&& visit) {
    for (uint32_t peer = device.node_begin + LaneId(); peer < MatesEnd(device); peer += kWarpSize) {
      if ((peer == device.rank || !IsActive(device, peer)) == is_own_heap) visit(peer);
    }
  };
  const auto publish = [&](uint32_t peer) {
    const uint32_t sender = SenderTo(device, peer);
    if (entry.has_record) {
      HeapAt<DispatchRecord>(device, peer, device.layout.records)[sender] = entry.record;
    }
    if (peer == device.rank) return;
    // Publishes the record, and the arrays that it names.
    StoreReleaseSys(HeapAt<uint64_t>(device, peer, device.layout.entry_flags) + sender, value);
  };
  for_mates(true, publish);
  SyncWarp();
  before_peers();
  for_mates(false, publish);
}

// What the blocks of a main kernel, of two warps or more, do before its own work. All threads of
// every block call Begin, then Finish; between them they may do what needs neither peers nor the
// index.
class EntryPart {
 public:
  __device__ EntryPart(const DeviceRank& device, const Entry& entry, uint64_t sequence)
      : device_(device),
        entry_(entry),
        sequence_(sequence),
        value_(FlagValue(sequence, entry.operation, device.program)) {}

  // False: this rank has failed, and no heap may be touched.
  __device__ bool Begin() {
    if (entry_.is_over) return !SyncBlockAny(threadIdx.x == 0 && HasFailed(device_));
    RowCodes codes(entry_, RowsOf(OwnSlice()), threadIdx.x, blockDim.x);  // on its way
    bool is_ok = true;
    if (threadIdx.x == 0) {
      const bool has_failed = HasFailed(device_);
      is_ok = ShareBusyWord(device_, entry_.operation, sequence_, entry_.launch) && !has_failed;
    }
    if (SyncBlockAny(!is_ok)) return false;
    if (blockIdx.x == 0 && WarpId() == 0) Publish();
    IndexRows(device_, entry_, Index(), codes);
    SyncBlock();  // the slice is stored
    if (threadIdx.x == kWarpSize && OwnSlice() < NumSlices()) {
      OrReleaseGpu(DoneWord(), uint64_t{1} << OwnSlice());
    }
    return true;
  }

  // True: all peers have entered; what they published and the row index can be read.
  __device__ bool Finish() {
    if (entry_.is_over) return FinishLate(device_, entry_, sequence_);
    bool is_here = true;
    if (threadIdx.x == kWarpSize) {
      is_here = AreDoneSoon();
    } else if (WarpId() == 0) {
      is_here = HavePeersEnteredSoon();
    }
    return !SyncBlockAny(!is_here) || FinishLate(device_, entry_, sequence_);
  }

 private:
  static constexpr uint64_t kPublished = uint64_t{1} << kMostRowSlices;
  static constexpr uint64_t kPatienceNs = 20'000;

  // The first block has none where there are others: a release takes microseconds.
  __device__ uint32_t OwnSlice() const { return gridDim.x > 1 ? blockIdx.x - 1 : 0; }
  __device__ uint32_t NumSlices() const {
    constexpr uint32_t kFewestRows = 256;
    if (!entry_.has_index) return 0;
    const uint32_t by_rows = (entry_.recv_rows + kFewestRows - 1) / kFewestRows;
    return min(min(by_rows, kMostRowSlices), max(static_cast<uint32_t>(gridDim.x), 2u) - 1);
  }
  __device__ RowRange RowsOf(uint32_t slice) const {
    const uint32_t num_slices = NumSlices();
    if (slice >= num_slices) return {};
    const uint32_t num_rows = (entry_.recv_rows + num_slices - 1) / num_slices;
    const uint32_t begin = min(slice * num_rows, entry_.recv_rows);
    return {begin, min(begin + num_rows, entry_.recv_rows)};
  }
  __device__ uint64_t* DoneWord() const { return &ControlOf(device_)->slices_done; }
  __device__ uint64_t AllDone() const { return ((uint64_t{1} << NumSlices()) - 1) | kPublished; }

  __device__ RowIndex Index() const { return {device_, sequence_, entry_.num_tokens}; }

  // One warp.
  __device__ void Publish() const {
    PublishEntry(device_, entry_, value_, [&] {
      if (LaneId() == 0) OrReleaseGpu(DoneWord(), kPublished);
    });
  }

  // One thread.
  __device__ bool AreDoneSoon() const {
    const uint64_t all = AllDone();
    return ComesSoon(DoneWord(), kPatienceNs, [&](uint64_t done) { return done == all; });
  }
  // One warp.
  __device__ bool HavePeersEnteredSoon() const {
    const uint64_t* flags = OwnHeapAt<uint64_t>(device_, device_.layout.entry_flags);
    bool is_ok = true;
    for (uint32_t peer = LaneId(); peer < device_.shape.num_ranks; peer += kWarpSize) {
      if (peer == device_.rank || !is_ok) continue;
      is_ok = FlagComesSoon(flags + peer, value_, kPatienceNs);
    }
    return AllHaveWaited(is_ok);
  }

  // All threads of the block, with something still missing: of this rank, which the block does
  // itself now, or of peers. Several blocks may do the same; they store the same. Not inline: most
  // kernels do not come here.
  __device__ __noinline__ static bool FinishLate(const DeviceRank& device, const Entry& entry,
                                                 uint64_t sequence) {
    const EntryPart part(device, entry, sequence);
    if (!entry.is_over) part.DoMissing();
    bool is_ok = true;
    if (WarpId() == 0) {
      const uint32_t begin = entry.is_of_mates ? device.node_begin : 0;
      const uint32_t end = entry.is_of_mates ? MatesEnd(device) : device.shape.num_ranks;
      is_ok = WarpWaitFlags(device, device.layout.entry_flags, begin, end, entry.operation,
                            part.value_);
    }
    return !SyncBlockAny(!is_ok);
  }
  __device__ void DoMissing() const {
    __shared__ uint64_t missing;
    if (threadIdx.x == 0) {
      missing = HasFailed(device_) ? 0 : AllDone() & ~LoadAcquireSys(DoneWord());
    }
    SyncBlock();
    if ((missing & kPublished) != 0 && WarpId() == 0) Publish();
    for (uint32_t slice = 0; slice < NumSlices(); ++slice) {
      if ((missing >> slice & 1) == 0) continue;
      IndexRows(device_, entry_, Index(), RowCodes(entry_, RowsOf(slice), threadIdx.x, blockDim.x));
    }
    SyncBlock();
    if (threadIdx.x == 0 && missing != 0) OrReleaseGpu(DoneWord(), missing);
  }

  const DeviceRank& device_;
  const Entry& entry_;
  uint64_t sequence_;
  uint64_t value_;
};

// All threads of every block of a main kernel that has nothing to do meanwhile.
__device__ inline bool Enter(const DeviceRank& device, const Entry& entry, uint64_t sequence) {
  EntryPart part(device, entry, sequence);
  return part.Begin() && part.Finish();
}

// One thread, when all blocks of the operation have entered: for the next one.
__device__ inline void ForgetEntry(const DeviceRank& device) { ControlOf(device)->slices_done = 0; }

}  // namespace jax_ep::gpu
