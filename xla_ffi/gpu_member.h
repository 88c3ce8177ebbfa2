// What a GpuSession holds of each local rank, for the files that implement it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "proxy/base/thread.h"
#include "xla_ffi/gpu_session.h"

namespace jax_ep {

// The runtime's current device belongs to XLA on XLA's and Python's threads, so everything that
// changes it runs on a thread of its own.
inline Status OnOwnThread(const std::function<Status()>& body) {
  Status status;
  JAX_EP_ASSIGN_OR_RETURN(std::thread thread,
                          StartThread("jax_ep device", [&] { status = body(); }));
  thread.join();
  return status;
}

// "dispatch (ll)"; gpu_session_failures.cc.
const char* NameOf(gpu::Operation operation);

struct GpuSession::Member {
  LocalRank id;
  gpu::DeviceRange heap;
  gpu::DeviceRange arena;
  std::string no_arena;  // why there is none
  gpu::RankStatus* status = nullptr;
  SharedMemory control;                    // a ControlBlock, for heartbeats between processes
  std::vector<gpu::PeerMemory> peers;      // [node_size]
  std::vector<gpu::DeviceRange> imported;  // mappings of other processes' memory
  std::vector<std::byte*> stages;      // [N], as this device addresses them; empty: not its kind
  std::vector<SharedMemory> controls;  // of mates in other processes
  std::vector<MonitorOptions::Peer> watched;
  gpu::RankHandle* handle = nullptr;
  std::atomic<uint64_t> launches{0};  // relaxed: a statistic
  // Of the watch: when it saw that a mate has left, and whether the kernels were told to end.
  std::optional<std::chrono::steady_clock::time_point> left_at;
  bool is_aborted = false;
  // Of the watch: the note of its kernels that it has shown, and when that was new.
  uint64_t shown_note_ns = 0, shown_at_ns = 0;
  // Null without JAX_EP_TRACE.
  std::shared_ptr<TraceTrack> trace;
  gpu::OperationStamp* stamps = nullptr;
  uint64_t next_stamp = 1;  // of the watch: the operation that it reads next
  int64_t clock_shift = 0;  // MonotonicNs less the device's clock

  int device() const { return static_cast<int>(id.device_ordinal); }
  ControlBlock* control_block() const {
    return reinterpret_cast<ControlBlock*>(control.bytes().data());
  }
};

struct GpuSession::PeerRecord {
  uint64_t pid = 0;
  std::string control_export;
  uint64_t heap_bytes = 0;
  uint64_t kept_bytes = 0;  // of the heap
  uint64_t arena_bytes = 0;
  std::array<int, 2> heap_fds{-1, -1};
  int arena_fd = -1;
};

}  // namespace jax_ep
