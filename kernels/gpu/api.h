// What xla_ffi sees of libjax_ep_gpu.so: one table of functions, plain data, no CUDA types. The
// library is built once (CUDA or HIP), has no Python in it, and is loaded only when JAX has such a
// device, so this header must compile without a GPU toolkit.
//
// Operations and their parameters are those of kernels/launch.h, with device pointers; shapes and
// semantics are the same. Any threads may call launchers of one rank; a lock keeps the kernels of
// an operation together. Everything is asynchronous: a launcher enqueues kernels on the stream,
// allocates nothing, reads nothing back and never synchronises, so it may be captured in a graph
// and replayed with other contents (and, captured anew, with other addresses).
//
// Errors: a launcher returns nullptr or a text that lives until the thread's next call. What a
// kernel finds (a peer that is late, gone, or in another operation) cannot be returned; it goes to
// RankConfig.status, this call and all later ones of the rank end within the limit, and their
// outputs are poisoned: NaN in floats, -1 or 0 in integers, never a usable index.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/launch.h"

namespace jax_ep::gpu {

inline constexpr uint32_t kAbiVersion = 14;
inline constexpr uint32_t kMaxNodeRanks = 64;     // ranks of a node
inline constexpr uint32_t kMaxRanks = 1024;       // ranks of a group
inline constexpr uint32_t kMaxNetworkRings = 32;  // of one rank

using Stream = void*;  // cudaStream_t or hipStream_t

// What a rank's kernels wait for, for whoever asks why a job stands still. Written only by threads
// that have waited for kLongWaitNs, by each of them once in kLongWaitNs: it may mix two waits, is
// true as long as `written_ns` moves, and costs calls that need not wait nothing. In pinned host
// memory; all stores and loads are relaxed.
struct alignas(64) WaitNote {
  std::atomic<uint64_t> written_ns;  // by the device's clock; 0: never
  std::atomic<uint64_t> waited_ns;   // until then
  std::atomic<uint64_t> epoch;       // of the operation on this rank
  std::atomic<uint64_t> site;        // PlanParams.site of its call
  std::atomic<uint64_t> expected;    // value waited for
  std::atomic<uint64_t> actual;      // value seen last
  std::atomic<uint32_t> operation;   // Operation
  std::atomic<uint32_t> peer;        // rank that is waited for; this rank: its proxy
};
inline constexpr uint64_t kLongWaitNs = 50'000'000;

// One operation as its first and its last thread saw it, for JAX_EP_TRACE. In pinned host memory,
// in slot epoch % kStampSlots, so that whoever reads them in time misses none.
struct alignas(64) OperationStamp {
  std::atomic<uint64_t> begin_ns;   // by the device's clock
  std::atomic<uint64_t> end_ns;     // likewise
  std::atomic<uint64_t> operation;  // Operation
  std::atomic<uint64_t> site;       // PlanParams.site of its call
  std::atomic<uint64_t> epoch;      // of the operation on this rank; written last (release)
};
inline constexpr uint64_t kStampSlots = 4096;

// A failure that a kernel found, or a request to give up. In pinned host memory that the device
// maps; one per rank, zero-initialised.
struct alignas(64) RankStatus {
  // Host -> device: not 0 ends every wait of this rank's kernels (a peer process is gone, ...).
  std::atomic<uint32_t> abort;
  // Device -> host: 0, or 1 once the fields below are written (system-scope release). First wins.
  std::atomic<uint32_t> failed;
  uint32_t kind;       // FailureKind
  uint32_t operation;  // Operation
  uint32_t peer;       // rank that was waited for, or this rank
  uint32_t reserved;
  uint64_t epoch;     // of the operation on this rank
  uint64_t expected;  // value waited for
  uint64_t actual;    // value seen last
  WaitNote wait;      // device -> host
};

enum class FailureKind : uint32_t {
  kNone = 0,
  kTimeout = 1,         // `peer` did not arrive within RankConfig.timeout_ns
  kPeerFailed = 2,      // `peer` said that it gave up
  kAborted = 3,         // RankStatus.abort
  kBusy = 4,            // a second call of the group ran at the same time on this device
  kWrongOrder = 5,      // `peer` is in another operation, or in a call of another program
  kTooManyOpen = 6,     // more than max_in_flight starts before a done, mode ll
  kStaleEpoch = 7,      // a done's slot set holds another start by now
  kInvalidId = 8,       // debug: an expert id was out of range
  kRingFull = 9,        // this rank's proxy took no command within RankConfig.timeout_ns
  kBadCommand = 10,     // a command that the proxy would refuse: a fault of this library
  kNotLaunched = 11,    // one of the operation's kernels could not be launched; its call said why
  kWrongPosition = 12,  // check_position: what it expected and saw; `operation` says nothing
  // The call knows another mask than RankConfig.active: `expected` is a Misfit, about `peer`.
  kNotActive = 13,
};

enum class Misfit : uint32_t {
  kExpert = 0,   // it has an expert of a rank that takes no part
  kPlan = 1,     // its plan has rows of such a rank
  kMaskOut = 2,  // it leaves out an expert of a rank that takes part
};

enum class Operation : uint32_t {
  kPlan = 0,
  kDispatch = 1,
  kCombine = 2,
  kLlDispatch = 3,
  kLlCombine = 4,
  kLlDispatchStart = 5,
  kLlDispatchDone = 6,
  kLlCombineStart = 7,
  kLlCombineDone = 8,
};
// What a wait of such an operation is for, unless it is for readers of an earlier call's memory.
constexpr WaitPhase WaitPhaseOf(Operation operation) {
  switch (operation) {
    case Operation::kPlan:
      return WaitPhase::kPlan;
    case Operation::kDispatch:
    case Operation::kLlDispatch:
    case Operation::kLlDispatchStart:
    case Operation::kLlDispatchDone:
      return WaitPhase::kDispatch;
    case Operation::kCombine:
    case Operation::kLlCombine:
    case Operation::kLlCombineStart:
    case Operation::kLlCombineDone:
      break;
  }
  return WaitPhase::kCombine;
}

// Memory of one rank of this node as this process addresses it, from this rank's device.
struct PeerMemory {
  std::byte* heap = nullptr;   // GpuApi.heap_bytes bytes, zero-initialised at creation
  std::byte* arena = nullptr;  // first byte of the peer's exported range, null: not mapped
  uint64_t arena_bytes = 0;
};

// The ring of a rank that takes all of its commands to a node, so that a flow has one.
constexpr uint32_t RingOfNode(uint32_t num_rings, uint32_t node) { return node % num_rings; }
// Whether two nodes meet in the proxies of that ring: it takes the commands of one to the other.
constexpr bool RingServes(uint32_t ring, uint32_t num_rings, uint32_t node, uint32_t other) {
  return node != other &&
         (RingOfNode(num_rings, other) == ring || RingOfNode(num_rings, node) == ring);
}

// The way to other nodes: stages that all GPUs of the node map, signals, and the rings of this
// rank's proxies. Signals and rings are pinned host memory, zero-initialised; so are the stages, or
// each is memory of its rank's GPU.
struct NetworkConfig {
  std::byte* const* stages = nullptr;  // [node_size] GpuApi.stage_bytes each
  bool has_device_stages = false;      // `stages` are as this rank's device addresses them
  // Rows pass between nodes as fast as inside one: calls take more SMs and fewer slices. Alike on
  // all ranks.
  bool has_fast_wire = false;
  // Bytes of a slice of an HT call, at least, but for calls of fewer; alike on all ranks. 0: as is
  // best over such a wire (network/token_slices.h). Tests ask for slices of few.
  uint64_t least_slice_bytes = 0;
  std::byte* const* signals = nullptr;  // [node_size] GpuApi.signal_bytes each
  std::byte* const* rings = nullptr;    // [num_rings] made by CommandRing::Create
  uint32_t num_rings = 0;               // 1 to kMaxNetworkRings
};

struct RankConfig {
  GroupShape shape;
  uint32_t rank = 0;
  int device = 0;  // the runtime's index in this process
  // [shape.node_size] memory of this rank's node-mates, itself included, by local rank. A buffer
  // inside one's own arena is published as an offset and read in place by peers; any other goes
  // through the stage in the heap, call by call. Peers need no agreement about it.
  const PeerMemory* peers = nullptr;
  // By local rank, a bit of those that take part; the others have no memory, send nothing and are
  // not waited for. Others than all: in a group of one node.
  uint64_t active = ~uint64_t{0};
  bool is_elastic = false;                 // calls are checked for another mask than `active`
  uint32_t generation = 0;                 // of the session: epochs of another one mean nothing
  const NetworkConfig* network = nullptr;  // null in a group of one node
  RankStatus* status = nullptr;            // pinned, mapped
  OperationStamp* stamps = nullptr;        // [kStampSlots] pinned, mapped; null: no trace
  uint64_t timeout_ns = 0;                 // Config.timeout_s, bound of each wait
  uint32_t max_sms = 0;                    // blocks of HT kernels (JAX_EP_GPU_SMS); 0: by need
  bool use_tma = true;                     // false: the path for devices without bulk copies
  // For measurements; 0: the default. Bytes of one bulk copy at most, and copies in flight per
  // warp.
  uint32_t piece_bytes = 0;
  uint32_t ring_slots = 0;
  bool debug = false;  // expert ids out of range fail the call
};

// Whether a mask leaves out ranks.
constexpr bool HasHoles(const GroupShape& shape, uint64_t active) {
  const uint64_t all = ~uint64_t{0} >> (kMaxNodeRanks - shape.node_size);
  return (active & all) != all;
}

struct RankHandle;  // one rank's launch state

// Copied from device counters on demand (a small device-to-host copy; never while capturing).
struct RankCountersSnapshot {
  uint64_t plans, dispatches, combines, rows_received, rows_dropped, bytes_pulled, bytes_staged;
  uint64_t last_overflow, invalid_ids;
};

struct GpuApi {
  uint32_t abi_version;

  // Bytes of one rank's heap, a function of the shape alone.
  uint64_t (*heap_bytes)(const GroupShape* shape);
  // The first bytes of a heap that outlive its rank, see destroy.
  uint64_t (*kept_bytes)(const GroupShape* shape);
  // Bytes of one rank's network stage and of its signals, 0 in a group of one node, and where among
  // these the proxy counts those of a channel from `source` (u64).
  uint64_t (*stage_bytes)(const GroupShape* shape);
  uint64_t (*signal_bytes)(const GroupShape* shape);
  uint64_t (*signal_offset)(const GroupShape* shape, Channel channel, uint32_t source);
  // Copies the tables to the device, loads and warms every kernel there. Synchronous. The heaps
  // must outlive the handle.
  const char* (*create)(const RankConfig* config, RankHandle** out);
  // Waits until the device is idle and tells all kernels of the rank that run from now on, in
  // graphs that were captured before, that it is gone: they poison their outputs and end. They
  // touch the kept bytes of the rank's own heap, which must stay mapped for the life of the process
  // (DeviceMemoryApi.retire), and nothing else of the group. The text says that the device could
  // not be waited for: then nothing of the group may be freed.
  const char* (*destroy)(RankHandle* handle);

  // Before a call of a program that was lowered without its devices: the rank fails unless the word
  // of device memory at `position` is `expected`.
  const char* (*check_position)(RankHandle* rank, const int32_t* position, int32_t expected,
                                Stream stream);
  // Operations. `shape`: the group's, or of a call of a view of it (Group.view): num_experts, top_k
  // and hidden no larger, any align. Calls of all ranks with one number must have equal shapes.
  const char* (*plan)(RankHandle* rank, const GroupShape* shape, const PlanParams* params,
                      Stream stream);
  const char* (*dispatch)(RankHandle* rank, const GroupShape* shape, const DispatchParams* params,
                          Stream stream);
  const char* (*ll_dispatch)(RankHandle* rank, const GroupShape* shape,
                             const LlDispatchParams* params, Stream stream);
  const char* (*combine)(RankHandle* rank, const GroupShape* shape, const CombineParams* params,
                         Stream stream);  // HT, LL
  // Halves, of mode ll alone: in mode ht a start has nothing to do, and its done is a whole call
  // (jax_ep/_ops/halves.py). `epoch` is a device word (i32) that start writes and done reads.
  const char* (*dispatch_start)(RankHandle* rank, const GroupShape* shape,
                                const DispatchParams* params, int32_t* epoch, Stream stream);
  const char* (*dispatch_done)(RankHandle* rank, const GroupShape* shape,
                               const DispatchParams* params, const int32_t* epoch, Stream stream);
  const char* (*ll_dispatch_start)(RankHandle* rank, const GroupShape* shape,
                                   const LlDispatchParams* params, int32_t* epoch, Stream stream);
  const char* (*ll_dispatch_done)(RankHandle* rank, const GroupShape* shape,
                                  const LlDispatchParams* params, const int32_t* epoch,
                                  Stream stream);
  const char* (*combine_start)(RankHandle* rank, const GroupShape* shape,
                               const CombineParams* params, int32_t* epoch, Stream stream);
  const char* (*combine_done)(RankHandle* rank, const GroupShape* shape,
                              const CombineParams* params, const int32_t* epoch, Stream stream);

  const char* (*counters)(RankHandle* rank, RankCountersSnapshot* out);
  // As RankCounters has them: [E_l] of the group; read likewise.
  const char* (*pairs_per_expert)(RankHandle* rank, uint64_t* out);
  // [kNumWaitPhases][N]: nanoseconds that the rank has waited for each, by phase; read likewise. Of
  // waits for the same rank at the same time the longest counts, from its 64th look on (9 us on an
  // H100; more where a kernel looks in its own way first, and at flags in the host's memory).
  const char* (*wait_ns)(RankHandle* rank, uint64_t* out);
  // The device's clock, by a kernel; waits for it. `host_ns`: what `host_clock` says then.
  const char* (*device_clock)(RankHandle* rank, uint64_t (*host_clock)(), uint64_t* device_ns,
                              uint64_t* host_ns);
  // Calls (not replays of graphs) whose arrays peers could not read in place, so that kernels copy
  // them to the stage first. Any thread.
  uint64_t (*staged_launches)(const RankHandle* rank);
  bool (*uses_bulk_copies)(const RankHandle* rank);

  // device_memory.h: heaps that other processes can map, arenas, pinned status words.
  const struct DeviceMemoryApi* memory;
};

}  // namespace jax_ep::gpu

// The library's only exported symbol.
extern "C" const jax_ep::gpu::GpuApi* jax_ep_gpu_api();
