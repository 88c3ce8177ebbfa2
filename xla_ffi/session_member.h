// What a Session has of each of its ranks; for the files that implement it.
#pragma once

#include <memory>
#include <vector>

#include "xla_ffi/session.h"

namespace jax_ep {

struct Session::Member {
  LocalRank id;
  SharedMemory heap;
  std::vector<SharedMemory> imported;  // node-mates' heaps of other processes
  std::vector<MonitorOptions::Peer> watched;
  std::unique_ptr<WorkerPool> pool;
  std::shared_ptr<TraceTrack> trace;    // null unless JAX_EP_TRACE is set
  int endpoint = -1;                    // of the proxy; -1 in a group of one node
  std::vector<uint32_t> barrier_peers;  // of that endpoint, by the proxy
  std::unique_ptr<Rank> rank;           // until Start gives it to the executor
  std::unique_ptr<Executor> executor;

  ControlBlock* control_block() const {
    return reinterpret_cast<ControlBlock*>(heap.bytes().data());
  }
};

}  // namespace jax_ep
