// A rank's host-side state and the launchers behind the table of api.h, one file per operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <mutex>

#include "kernels/gpu/api.h"
#include "kernels/gpu/device/vendor.h"
#include "kernels/gpu/protocol/device_rank.h"
#include "kernels/gpu/protocol/entry.h"
#include "kernels/gpu/sm_budget.h"

namespace jax_ep::gpu {

struct RankHandle {
  DeviceRank device;
  int device_index = 0;
  uint32_t num_sms = 0;              // of the device
  uint32_t max_blocks = kFewestSms;  // of HT kernels
  bool has_fast_wire = false;        // NetworkConfig.has_fast_wire
  uint64_t least_slice_bytes = 1;    // NetworkConfig.least_slice_bytes, or what is best
  uint64_t sums_pitch = 0;           // NetLayout.sums_pitch of the group
  bool has_device_stages = false;    // NetworkConfig.has_device_stages
  bool has_budget = false;           // they choose it call by call (MostBlocks)
  uint32_t ll_blocks = 64;           // of LL kernels
  bool use_bulk_copies = false;
  bool is_elastic = false;              // RankConfig.is_elastic
  uint32_t shared_bytes_per_block = 0;  // most dynamic shared memory that a block may have
  uint32_t piece_bytes = 0;             // most bytes of one bulk copy
  uint32_t ring_slots = 0;              // pieces in flight per warp
  // Held by a launcher: the kernels of an operation stand side by side on the stream, whatever
  // other threads launch there.
  std::mutex launching;
  uint32_t num_entries = 0;  // Entry.launch of the next one
  // Launches that had to copy an array of the caller to the stage first; relaxed: a statistic.
  std::atomic<uint64_t> staged_launches{0};
};

// Blocks of a whole HT call that handles `num_rows` rows, at most.
uint32_t MostBlocks(const RankHandle& rank, RowWork work, int64_t num_tokens, int64_t num_rows);

// The same of an HT kernel between nodes. Over a fast wire it is memory that decides, which more
// SMs keep busier.
uint32_t BlocksBetweenNodes(const RankHandle& rank);

// The same of a dispatch's kernels that only copy rows beside the wire: more take bandwidth of the
// memory from the copy engines.
uint32_t BlocksBesideWire(const RankHandle& rank);

// Word of the device between the start and the done that a whole call is made of in mode ll where
// there are several nodes.
int32_t* WholeEpochOf(const RankHandle& rank);

// Whether the code that the current device runs has bulk copies in it. The device alone does not
// say: a library without code for it runs what the driver makes of older PTX.
const char* FindBulkCopies(bool* has_bulk_copies);

const char* PrepareAbandonKernel(const RankHandle& rank);
const char* PreparePositionKernel(const RankHandle& rank);
const char* PrepareActiveKernel(const RankHandle& rank);
const char* PreparePlanKernels(const RankHandle& rank);
const char* PrepareEntryKernels(const RankHandle& rank);
const char* PrepareDispatchKernels(const RankHandle& rank);
const char* PrepareCombineKernels(const RankHandle& rank);
const char* PrepareLlDispatchKernels(const RankHandle& rank);
const char* PrepareSlotCombineKernels(const RankHandle& rank);

// Ends an operation of which only the first kernels could be launched.
const char* LaunchAbandon(RankHandle& rank, Operation operation, cudaStream_t stream);
// Before a call: the rank fails unless the word at `position` is `expected`.
const char* LaunchCheckPosition(RankHandle& rank, const int32_t* position, int32_t expected,
                                cudaStream_t stream);
// An array of numbers of which each belongs to a rank, that of number / per_rank; negative ones to
// none, but for those that kUnreachable says.
struct RankNames {
  const int32_t* values = nullptr;
  uint64_t count = 0;
  uint64_t per_rank = 1;
};
inline constexpr uint32_t kRankNameArrays = 2;  // of a call, at most
// Before a call of an elastic group: the rank fails (kNotActive) unless the call fits the mask.
const char* LaunchCheckActive(RankHandle& rank, Operation operation, bool are_ids,
                              std::initializer_list<RankNames> names, cudaStream_t stream);
// Stores the device's clock in a word of mapped memory.
const char* LaunchReadClock(uint64_t* out, cudaStream_t stream);
const char* LaunchPlan(RankHandle& rank, const PlanParams& params, cudaStream_t stream);
const char* LaunchDispatch(RankHandle& rank, const DispatchParams& params, cudaStream_t stream);
// Mode ll, whole or half. `plan` is null where the caller brings one; of the epochs a start has the
// second, a done the first.
enum class CallPart : uint8_t { kWhole = 0, kStart = 1, kDone = 2 };
// Which tokens of a call its parameters have: that part of every array by token. Arrays by received
// row are the call's. Of a dispatch of several rounds that brings no plan the first makes it, and
// moves nothing; the others follow it.
struct LlRound {
  uint32_t first_token = 0;
  uint32_t call_tokens = 0;  // T of the call
  bool is_plan_alone = false;
  bool is_planned = false;
};
const char* LaunchLlDispatch(RankHandle& rank, const PlanParams* plan, const DispatchParams& call,
                             const LlRound& round, CallPart part, const int32_t* epoch_in,
                             int32_t* epoch_out, cudaStream_t stream);
const char* LaunchSlotCombine(RankHandle& rank, const CombineParams& call, const LlRound& round,
                              CallPart part, const int32_t* epoch_in, int32_t* epoch_out,
                              cudaStream_t stream);
// Whole calls between nodes (network/ll_calls.cc).
const char* LaunchNetLlDispatch(RankHandle& rank, const PlanParams* plan,
                                const DispatchParams& call, cudaStream_t stream);
const char* LaunchNetSlotCombine(RankHandle& rank, const CombineParams& call, cudaStream_t stream);
const char* LaunchCombine(RankHandle& rank, const CombineParams& params, cudaStream_t stream);

// The beginning of a dispatch or combine (entry.h).
struct EntryParams {
  Operation operation;
  const int32_t* recv_src;
  uint64_t recv_rows;
  uint64_t num_tokens;
  // What peers will read, null when the call has none.
  const std::byte* x;
  const float* weights;
};
// What its main kernel has to know; launches a kernel in front of that where it has to.
const char* PrepareEntry(RankHandle& rank, const EntryParams& call, Entry& entry,
                         cudaStream_t stream);

}  // namespace jax_ep::gpu
