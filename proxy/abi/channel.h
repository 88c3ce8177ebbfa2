// Channels: the independent streams between two ranks. Shared by kernels (producers and waiters)
// and the proxy (which turns arrivals into flag updates).
#pragma once

#include <cstdint>
#include <string_view>

namespace jax_ep {

// Each ordered pair of ranks has one flow per channel. A flag word flag[channel][source] in the
// receiver's heap counts, for HT and control channels, the signals committed from that source, and
// for LL channels the epochs completed. Every producer sends exactly one signal (LL: one count
// message) per peer and epoch, so the count equals the epoch (epochs start at 1).
enum class Channel : uint8_t {
  kOrder = 0,           // rank 0 -> leader of each other node: one entry of the agreed order
  kPlan = 1,            // routing records
  kBarrier = 2,         // create_group and close
  kDispatch = 3,        // HT rows
  kDispatchDone = 4,    // the node has read the rows of an epoch
  kReduce = 5,          // inside a node only: partials are staged
  kCombine = 6,         // HT node partials
  kCombineDone = 7,     // the owner has read the partials of an epoch
  kLlDispatch = 8,      // LL rows (counted)
  kLlDispatchDone = 9,  // LL dispatch set of an epoch was unpacked
  kLlCombine = 10,      // LL partials (counted)
  kLlCombineDone = 11,  // LL combine set of an epoch was summed
  kReduceDone = 12,     // inside a node only: staged partials were read
};
inline constexpr Channel kLastChannel = Channel::kReduceDone;
inline constexpr uint32_t kNumChannels = 16;  // 6 bits in a command, 4 used

// For messages.
constexpr std::string_view ChannelName(Channel channel) {
  switch (channel) {
    case Channel::kOrder:
      return "order";
    case Channel::kPlan:
      return "plan";
    case Channel::kBarrier:
      return "barrier";
    case Channel::kDispatch:
      return "dispatch";
    case Channel::kDispatchDone:
      return "dispatch-done";
    case Channel::kReduce:
      return "reduce";
    case Channel::kCombine:
      return "combine";
    case Channel::kCombineDone:
      return "combine-done";
    case Channel::kLlDispatch:
      return "ll-dispatch";
    case Channel::kLlDispatchDone:
      return "ll-dispatch-done";
    case Channel::kLlCombine:
      return "ll-combine";
    case Channel::kLlCombineDone:
      return "ll-combine-done";
    case Channel::kReduceDone:
      return "reduce-done";
  }
  return "unused";
}

// What a wait for a signal is for, as statistics tell it apart.
enum class WaitPhase : uint8_t {
  kPlan = 0,      // routing
  kDispatch = 1,  // rows to experts, with the routing in LL mode
  kCombine = 2,   // rows back, and partials inside a node
  kReuse = 3,     // readers of an earlier call's memory
};
inline constexpr uint32_t kNumWaitPhases = 4;

constexpr std::string_view WaitPhaseName(WaitPhase phase) {
  switch (phase) {
    case WaitPhase::kPlan:
      return "plan";
    case WaitPhase::kDispatch:
      return "dispatch";
    case WaitPhase::kCombine:
      return "combine";
    case WaitPhase::kReuse:
      return "reuse";
  }
  return "unused";
}

constexpr WaitPhase WaitPhaseOf(Channel channel) {
  switch (channel) {
    case Channel::kPlan:
      return WaitPhase::kPlan;
    case Channel::kDispatch:
    case Channel::kLlDispatch:
      return WaitPhase::kDispatch;
    case Channel::kReduce:
    case Channel::kCombine:
    case Channel::kLlCombine:
      return WaitPhase::kCombine;
    case Channel::kDispatchDone:
    case Channel::kCombineDone:
    case Channel::kLlDispatchDone:
    case Channel::kLlCombineDone:
    case Channel::kReduceDone:
    case Channel::kOrder:    // no call waits on these two
    case Channel::kBarrier:  //
      break;
  }
  return WaitPhase::kReuse;
}

// Counted channels carry a slot per message and a count per epoch; arrival order is irrelevant.
// Every other channel is sequenced: messages are committed in posting order.
constexpr bool IsCounted(Channel channel) {
  return channel == Channel::kLlDispatch || channel == Channel::kLlCombine;
}

}  // namespace jax_ep
