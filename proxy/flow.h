// The state of one direction of one (peer, channel) pair, as the proxy thread keeps it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "proxy/abi/channel.h"
#include "proxy/abi/command.h"
#include "proxy/sequencer.h"
#include "proxy/stats.h"

namespace jax_ep {

// Commands of a flow that wait for its window or for the transport. When they are full, the ring
// that they come from is popped no further: order inside a flow holds, other flows of the ring go
// on as long as possible.
inline constexpr uint32_t kMaxPendingCommands = 16;

struct SendFlow {
  SendFlow(uint32_t window_messages, uint64_t window_bytes)
      : window(window_messages, window_bytes) {}

  SendWindow window;
  uint32_t peer = 0;  // index
  Channel channel = Channel::kOrder;
  bool is_counted = false;
  bool is_listed = false;    // in Endpoint::pending_flows_
  bool has_stalled = false;  // the newest attempt met a closed window
  uint32_t remote_flow = 0;  // its id at the receiver

  PackedCommand pending[kMaxPendingCommands];
  uint32_t pending_first = 0;
  uint32_t num_pending = 0;
  uint64_t pending_since_ns[kMaxPendingCommands];  // when it was taken; of a traced endpoint
  uint64_t head_sent_bytes = 0;  // of the oldest pending command: pieces already posted

  Counter messages, bytes, signals, stalls, retries, acknowledged;
  Counter last_command[2];  // words of the newest command taken from the ring
};

struct RecvFlow {
  // Exactly one of the two; a counted flow of an endpoint without LL slots has neither.
  std::optional<SequencedReceiver> sequenced;
  std::optional<CountedReceiver> counted;
  std::atomic<uint64_t>* flag = nullptr;

  // Three stages: arrived (the receivers above), being flushed, visible.
  uint64_t flushing_progress = 0;
  uint64_t flushing_flag = 0;
  uint64_t visible_progress = 0;
  uint64_t visible_flag = 0;
  uint64_t acknowledged = 0;  // progress that the sender was told
  bool is_dirty = false;      // in Endpoint::dirty_flows_
  bool is_ack_due = false;    // in Endpoint::ack_flows_

  Counter received, committed, signals, reorders, max_reorder_depth, duplicates;

  uint64_t progress() const {
    return sequenced ? sequenced->next_sequence() : counted ? counted->num_arrived() : 0;
  }
  uint64_t flag_value() const {
    return sequenced ? sequenced->num_signals() : counted ? counted->num_completed() : 0;
  }
};

}  // namespace jax_ep
