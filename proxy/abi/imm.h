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
  kCounted = 2,  // counted channel: payload = slot, or count with kImmCountBit
  kControl = 3,  // between proxies: `epoch` holds an ImmControl
};

// Control immediates. `flow` names the peer (any of its flows) or, for kAck, the channel that is
// acknowledged; payload as said.
enum class ImmControl : uint8_t {
  kAck = 0,        // low bits of the cumulative acknowledgement of (peer, channel)
  kHeartbeat = 1,  // 0
  kFailed = 2,     // 0, or 1 + the rank that the sender blames, or kImmOtherTeam
  kBye = 3,        // 0: the sender has left after draining; it is not dead
};
inline constexpr uint32_t kNumImmControls = 4;

inline constexpr int kImmKindBits = 2;
inline constexpr int kImmFlowBits = 13;
inline constexpr int kImmEpochBits = 4;
inline constexpr int kImmPayloadBits = 13;
static_assert(kImmKindBits + kImmFlowBits + kImmEpochBits + kImmPayloadBits == 32,
              "an immediate is 32 bits, the least that every network carries");
static_assert(kImmEpochBits == kCommandEpochBits, "the epoch travels unchanged");

inline constexpr int kImmEpochShift = kImmPayloadBits;
inline constexpr int kImmFlowShift = kImmEpochShift + kImmEpochBits;
inline constexpr int kImmKindShift = kImmFlowShift + kImmFlowBits;

// Payload of kFailed: the rank that the sender blames is one of another team.
inline constexpr uint32_t kImmOtherTeam = (1u << kImmPayloadBits) - 1;
static_assert(kMaxRanks < kImmOtherTeam, "1 + a rank is none of it");

// Distinguishes the count message of a counted channel from its slots.
inline constexpr uint32_t kImmCountBit = 1u << (kImmPayloadBits - 1);
static_assert(kMaxCommandValue < kImmCountBit, "slots and counts fit beside the count bit");

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

// nullopt if a field does not fit.
constexpr std::optional<uint32_t> TryEncodeImm(const Imm& imm) {
  if (static_cast<uint32_t>(imm.kind) > BitMask(kImmKindBits) || imm.flow >= kMaxFlows ||
      imm.epoch > BitMask(kImmEpochBits) || imm.payload > BitMask(kImmPayloadBits)) {
    return std::nullopt;
  }
  return (static_cast<uint32_t>(imm.kind) << kImmKindShift) | (imm.flow << kImmFlowShift) |
         (imm.epoch << kImmEpochShift) | imm.payload;
}

// Total: every 32-bit value decodes.
constexpr Imm DecodeImm(uint32_t bits) {
  return Imm{.kind = static_cast<ImmKind>(bits >> kImmKindShift),
             .flow = (bits >> kImmFlowShift) & static_cast<uint32_t>(BitMask(kImmFlowBits)),
             .epoch = (bits >> kImmEpochShift) & static_cast<uint32_t>(BitMask(kImmEpochBits)),
             .payload = bits & static_cast<uint32_t>(BitMask(kImmPayloadBits))};
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
