// 32 bits of immediate data travel with each write: all that a receiver learns about an arrival.
// One encode, one decode. What the fields mean to the protocol is in proxy/sequencer.h.
#pragma once

#include <cstdint>
#include <optional>

#include "proxy/abi/command.h"

namespace jax_ep {

enum class ImmKind : uint8_t {
  kData = 0,     // sequenced channel: payload = sequence of the message
  kSignal = 1,   // the same, and the flag is bumped when it commits
  kSlot = 2,     // counted channel: payload = slot
  kCount = 3,    // counted channel: payload = how many slots the epoch has
  kControl = 4,  // between proxies: `epoch` holds an ImmControl
  kUnknown = 5,  // bits that nobody sends
};

// Control immediates. `flow` names the peer or, for kAck, the channel that is acknowledged; payload
// as said.
enum class ImmControl : uint8_t {
  kHeartbeat = 0,  // 0
  kFailed = 1,     // whom the sender blames (proxy/blame.h)
  kBye = 2,        // 0: the sender has left after draining; it is not dead
  kAck = 16,       // low bits of the cumulative acknowledgement of (peer, channel)
};

// On the wire, from bit 0: payload, epoch, flow (channel, then peer), mark. The mark tells kSignal
// from kData and kCount from kSlot; which pair it is, the channel says. Control messages have two
// channels that no flow uses: one for acknowledgements, whose epoch bits are the channel that is
// acknowledged, one for all others, whose epoch bits are the ImmControl. Their mark is clear.
inline constexpr int kImmMarkBits = 1;
inline constexpr int kImmPeerBits = 10;
inline constexpr int kImmChannelBits = 4;
inline constexpr int kImmFlowBits = kImmPeerBits + kImmChannelBits;
inline constexpr int kImmEpochBits = 4;
inline constexpr int kImmPayloadBits = 13;
static_assert(kImmMarkBits + kImmFlowBits + kImmEpochBits + kImmPayloadBits == 32,
              "an immediate is 32 bits, the least that every network carries");
static_assert(kImmEpochBits == kCommandEpochBits, "the epoch travels unchanged");
static_assert(kNumChannels == 1u << kImmChannelBits, "a channel fits its bits");
static_assert(kImmChannelBits == kImmEpochBits, "an acknowledgement names its channel");
static_assert(kMaxRanks <= 1u << kImmPeerBits, "every other rank of a group may be a peer");

inline constexpr int kImmEpochShift = kImmPayloadBits;
inline constexpr int kImmFlowShift = kImmEpochShift + kImmEpochBits;
inline constexpr int kImmMarkShift = kImmFlowShift + kImmFlowBits;

inline constexpr uint32_t kImmAckChannel = kNumChannels - 2;
inline constexpr uint32_t kImmControlChannel = kNumChannels - 1;
static_assert(static_cast<uint32_t>(kLastChannel) < kImmAckChannel,
              "no flow uses the channels of control messages");

// Payloads of kFailed: a rank for which there are not bits enough; nobody failed, the processes
// agree.
inline constexpr uint32_t kImmUnnamed = (1u << kImmPayloadBits) - 1;
inline constexpr uint32_t kImmAgreement = kImmUnnamed - 1;
static_assert(kMaxRanks < kImmAgreement, "every rank of a group of one team has a name");
static_assert(kMaxCommandValue < 1u << kImmPayloadBits, "slots and counts fit");

inline constexpr uint32_t kMaxFlows = 1u << kImmFlowBits;
inline constexpr uint64_t kSequenceSpace = uint64_t{1} << kImmPayloadBits;
// Half the space: with more, a late duplicate and a new message could not be told apart.
inline constexpr uint32_t kMaxWindowMessages = static_cast<uint32_t>(kSequenceSpace / 2);

struct Imm {
  ImmKind kind = ImmKind::kData;
  uint32_t flow = 0;     // flow id assigned by the receiver: peer index * kNumChannels + channel
  uint32_t epoch = 0;    // low bits of the epoch, or ImmControl
  uint32_t payload = 0;  // sequence | slot | count | credit
};

// nullopt if a field does not fit, or a message of this kind does not go to this flow.
constexpr std::optional<uint32_t> TryEncodeImm(const Imm& imm) {
  uint32_t channel = imm.flow % kNumChannels;
  uint32_t epoch = imm.epoch;
  bool is_marked = false;
  if (imm.kind == ImmKind::kControl) {
    const bool is_ack = epoch == static_cast<uint32_t>(ImmControl::kAck);
    if (is_ack) epoch = channel;
    channel = is_ack ? kImmAckChannel : kImmControlChannel;
  } else {
    const bool is_counted = imm.kind == ImmKind::kSlot || imm.kind == ImmKind::kCount;
    if (imm.kind == ImmKind::kUnknown || channel >= kImmAckChannel ||
        is_counted != IsCounted(static_cast<Channel>(channel))) {
      return std::nullopt;
    }
    is_marked = imm.kind == ImmKind::kSignal || imm.kind == ImmKind::kCount;
  }
  if (imm.flow >= kMaxFlows || epoch > BitMask(kImmEpochBits) ||
      imm.payload > BitMask(kImmPayloadBits)) {
    return std::nullopt;
  }
  const uint32_t flow = imm.flow / kNumChannels * kNumChannels + channel;
  return (uint32_t{is_marked} << kImmMarkShift) | (flow << kImmFlowShift) |
         (epoch << kImmEpochShift) | imm.payload;
}

// Total: every 32-bit value decodes, those that nobody sends to kUnknown.
constexpr Imm DecodeImm(uint32_t bits) {
  Imm imm{.flow = (bits >> kImmFlowShift) & static_cast<uint32_t>(BitMask(kImmFlowBits)),
          .epoch = (bits >> kImmEpochShift) & static_cast<uint32_t>(BitMask(kImmEpochBits)),
          .payload = bits & static_cast<uint32_t>(BitMask(kImmPayloadBits))};
  const bool is_marked = (bits >> kImmMarkShift) != 0;
  const uint32_t channel = imm.flow % kNumChannels;
  if (channel >= kImmAckChannel) {
    imm.kind = is_marked ? ImmKind::kUnknown : ImmKind::kControl;
    if (channel == kImmAckChannel) {
      imm.flow += imm.epoch - channel;
      imm.epoch = static_cast<uint32_t>(ImmControl::kAck);
    }
  } else if (IsCounted(static_cast<Channel>(channel))) {
    imm.kind = is_marked ? ImmKind::kCount : ImmKind::kSlot;
  } else {
    imm.kind = is_marked ? ImmKind::kSignal : ImmKind::kData;
  }
  return imm;
}

// The 64-bit value nearest to `reference` whose low `bits` are `low`. Of two equally near, the
// larger. Never below zero.
constexpr uint64_t ExtendNearest(uint64_t reference, uint64_t low, int bits) {
  const uint64_t space = uint64_t{1} << bits;
  const uint64_t ahead = (low - reference) & (space - 1);  // distance going up
  if (ahead <= space / 2 || reference < space - ahead) return reference + ahead;
  return reference - (space - ahead);
}

}  // namespace jax_ep
