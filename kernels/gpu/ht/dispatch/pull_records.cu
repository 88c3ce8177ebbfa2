// The pull of a dispatch whose rows travel quantised, without bulk copies: each warp loads units of
// a record and stores what becomes of them at all of its places.
#include "kernels/gpu/device/deliver_records.cuh"
#include "kernels/gpu/ht/dispatch/pull.cuh"
#include "kernels/gpu/ht/dispatch/quantize_rows.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kPullWarps = 256 / kWarpSize;
constexpr uint32_t kQuantizeWarps = 256 / kWarpSize;
constexpr uint32_t kThreads = (kPullWarps + kQuantizeWarps + 1) * kWarpSize;

template <typename Rows>
__device__ uint64_t Pull(const PullParams& params, uint64_t sequence, int32_t* rows) {
  uint64_t num_pulled = 0;
  ItemCursor items(params, sequence, kPullWarps);
  while (items.Next(rows)) {
    const bool is_ok = LaneId() != 0 || WaitRecord(params, sequence, items.source(), items.token());
    if (!AllHaveWaited(is_ok)) break;
    num_pulled += items.source() != params.device.rank;
    const std::byte* record = RecordOf(params, items.source(), items.token());
    ForUnits(RecordUnits(params.format, record), 0, params.format.num_units,
             [&](uint32_t unit, uint32_t end, const Unit& in_hand) {
               Rows::Store(params.format, params.recv_x, params.scales, rows, items.num_rows(),
                           unit, end, in_hand);
             });
  }
  return num_pulled;
}

template <typename Rows>
__global__ void __launch_bounds__(kThreads) PullRecords(const __grid_constant__ PullParams params) {
  __shared__ uint32_t shared_flag;
  __shared__ int32_t rows[kPullWarps][kMaxTopK];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const bool pulls = WarpId() < kPullWarps;
  const bool quantizes = WarpId() > kPullWarps;
  RowQuantizer<typename Rows::Elem> quantizer(params, sequence);
  EntryPart entry(device, params.entry, sequence);
  const bool can_read = entry.Begin();
  if (can_read) quantizer.QuantizeOne();  // before the wait for peers: they wait for these
  uint64_t num_pulled = 0;
  if (can_read && entry.Finish() && CheckRecords(params)) {
    if (quantizes) {
      quantizer.QuantizeAll();
    } else if (pulls) {
      num_pulled = Pull<Rows>(params, sequence, rows[WarpId()]);
    } else {
      FillWeightsAndPadding(params, 0, 1, [&](uint64_t row, uint32_t, uint32_t) {
        ZeroRowByWarp(params, row);
        ZeroScales(params.format, params.scales, row);
      });
    }
  }
  FinishPull(params, sequence, num_pulled, &shared_flag);
}

using Kernel = void (*)(PullParams);

Kernel KernelOf(ElemType type, bool are_split) {
  return WithRecordRows(type, are_split,
                        [&]<typename Rows>() -> Kernel { return &PullRecords<Rows>; });
}

}  // namespace

const char* PreparePullRecords(const RankHandle& rank) {
  const ElemType type = rank.device.shape.elem_type;
  return PrepareKernels(0, KernelOf(type, false), KernelOf(type, true));
}

const char* LaunchPullRecords(RankHandle&, const PullParams& params, cudaStream_t stream) {
  const bool are_split = params.scales.scales != nullptr;
  const uint32_t blocks = PullBlocks(params, kPullWarps);
  KernelOf(params.device.shape.elem_type, are_split)<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("PullRecords");
}

}  // namespace jax_ep::gpu
