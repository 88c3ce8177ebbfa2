// The 16-byte command: what a kernel asks of its proxy thread. One encode and one decode, used
// unchanged by CPU kernels, GPU kernels and the proxy. The ring that carries it is in ring.h.
#pragma once

#include <cstdint>
#include <optional>

#include "proxy/abi/channel.h"

namespace jax_ep {

enum class Op : uint8_t {
  kWrite = 0,        // copy length_bytes to the destination rank
  kWriteSignal = 1,  // the same, then bump the flag (sequenced channels only)
  kSignal = 2,       // bump the flag; on a counted channel: the count message
  kQuiet = 3,        // marker: complete when everything before it in this ring is acknowledged
  kBarrier = 4,      // signal Channel::kBarrier to the peers that the endpoint leads to
};
inline constexpr uint32_t kNumOps = 5;

// A command before packing. Lengths and offsets are bytes and multiples of kCommandUnitBytes.
//
// Sequenced channels: kWrite moves data, kWriteSignal / kSignal bump the flag after every earlier
// message of the flow. Counted channels (IsCounted): kWrite carries its slot in `value`; kSignal
// carries in `value` the number of distinct slots that the epoch has (0 is legal).
// kQuiet and kBarrier use `epoch` alone; each counts 1, 2, 3, ... per ring.
struct Command {
  Op op = Op::kWrite;
  uint32_t dst_rank = 0;
  uint64_t length_bytes = 0;   // ignored (and decoded as 0) unless op is a write; a write has >= 16
  uint64_t local_offset = 0;   // where the bytes are, in the sender's heap
  uint64_t remote_offset = 0;  // where they go, in the receiver's heap
  Channel channel = Channel::kOrder;
  uint64_t epoch = 0;  // only the low kCommandEpochBits travel; all else is refused, not truncated
  uint32_t value = 0;
};

struct PackedCommand {
  uint64_t words[2];  // [0] payload word, [1] commit word (holds the ring's lap bit)
};

inline constexpr uint64_t kCommandUnitBytes = 16;

// The bit budget. Payload word, from bit 0: low bits of the local offset, low bits of the remote
// offset. Commit word, from bit 0: value, epoch, channel, length - 1, destination, op, high bits of
// the remote offset, high bits of the local offset, lap.
inline constexpr int kCommandLapBits = 1;
inline constexpr int kCommandOpBits = 3;
inline constexpr int kCommandRankBits = 10;
inline constexpr int kCommandLengthBits = 20;  // length - 1 in units: 16 B .. 16 MiB
inline constexpr int kCommandOffsetBits = 36;  // units, on either side: 1 TiB
inline constexpr int kCommandChannelBits = 6;
inline constexpr int kCommandEpochBits = 4;
inline constexpr int kCommandValueBits = 12;

inline constexpr int kCommandOffsetLowBits = 32;  // part of an offset in the payload word
inline constexpr int kCommandOffsetHighBits = kCommandOffsetBits - kCommandOffsetLowBits;

static_assert(2 * kCommandOffsetLowBits == 64, "the payload word is full");
static_assert(kCommandLapBits + kCommandOpBits + kCommandRankBits + kCommandLengthBits +
                      kCommandChannelBits + kCommandEpochBits + kCommandValueBits +
                      2 * kCommandOffsetHighBits ==
                  64,
              "the commit word is full");
static_assert(sizeof(PackedCommand) == 16, "a command is two 64-bit words");
static_assert(kNumChannels <= (1u << kCommandChannelBits), "a channel fits its field");
static_assert(kNumOps <= (1u << kCommandOpBits), "an op fits its field");

inline constexpr int kCommandValueShift = 0;
inline constexpr int kCommandEpochShift = kCommandValueShift + kCommandValueBits;
inline constexpr int kCommandChannelShift = kCommandEpochShift + kCommandEpochBits;
inline constexpr int kCommandLengthShift = kCommandChannelShift + kCommandChannelBits;
inline constexpr int kCommandRankShift = kCommandLengthShift + kCommandLengthBits;
inline constexpr int kCommandOpShift = kCommandRankShift + kCommandRankBits;
inline constexpr int kCommandRemoteHighShift = kCommandOpShift + kCommandOpBits;
inline constexpr int kCommandLocalHighShift = kCommandRemoteHighShift + kCommandOffsetHighBits;
inline constexpr int kCommandLapShift = kCommandLocalHighShift + kCommandOffsetHighBits;
static_assert(kCommandLapShift == 63, "the lap bit is the top bit of the commit word");

inline constexpr uint64_t kCommandLapMask = uint64_t{1} << kCommandLapShift;
inline constexpr uint64_t kMaxHeapBytes = kCommandUnitBytes << kCommandOffsetBits;
inline constexpr uint64_t kMaxCommandBytes = kCommandUnitBytes << kCommandLengthBits;
inline constexpr uint32_t kMaxCommandValue = (1u << kCommandValueBits) - 1;
inline constexpr uint32_t kMaxRanks = 1u << kCommandRankBits;

constexpr uint64_t BitMask(int bits) { return (uint64_t{1} << bits) - 1; }

constexpr bool IsWrite(Op op) { return op == Op::kWrite || op == Op::kWriteSignal; }

// The two words of `command`, lap bit clear; nullopt if any field does not fit, an offset or length
// is not a multiple of 16, or a write is empty (use kSignal). Nothing but `epoch` is ever cut.
constexpr std::optional<PackedCommand> TryPack(const Command& command) {
  const uint64_t length_bytes = IsWrite(command.op) ? command.length_bytes : kCommandUnitBytes;
  if (static_cast<uint32_t>(command.op) >= kNumOps || command.dst_rank >= kMaxRanks ||
      length_bytes == 0 || length_bytes > kMaxCommandBytes ||
      length_bytes % kCommandUnitBytes != 0 || command.local_offset % kCommandUnitBytes != 0 ||
      command.remote_offset % kCommandUnitBytes != 0 ||
      static_cast<uint32_t>(command.channel) >= kNumChannels || command.value > kMaxCommandValue) {
    return std::nullopt;
  }
  if (command.local_offset >= kMaxHeapBytes || command.remote_offset >= kMaxHeapBytes) {
    return std::nullopt;
  }
  const uint64_t local_units = command.local_offset / kCommandUnitBytes;
  const uint64_t remote_units = command.remote_offset / kCommandUnitBytes;
  PackedCommand packed{};
  packed.words[0] =
      (local_units & BitMask(kCommandOffsetLowBits)) | (remote_units << kCommandOffsetLowBits);
  packed.words[1] = (uint64_t{command.value} << kCommandValueShift) |
                    ((command.epoch & BitMask(kCommandEpochBits)) << kCommandEpochShift) |
                    (static_cast<uint64_t>(command.channel) << kCommandChannelShift) |
                    ((length_bytes / kCommandUnitBytes - 1) << kCommandLengthShift) |
                    (uint64_t{command.dst_rank} << kCommandRankShift) |
                    (static_cast<uint64_t>(command.op) << kCommandOpShift) |
                    ((remote_units >> kCommandOffsetLowBits) << kCommandRemoteHighShift) |
                    ((local_units >> kCommandOffsetLowBits) << kCommandLocalHighShift);
  return packed;
}

// The inverse. Total: any 128 bits decode to something (op and channel may be out of range, which
// the proxy checks). The lap bit is ignored; `epoch` holds the low bits only.
constexpr Command Unpack(const PackedCommand& packed) {
  const auto field = [&packed](int shift, int bits) {
    return (packed.words[1] >> shift) & BitMask(bits);
  };
  Command command;
  command.op = static_cast<Op>(field(kCommandOpShift, kCommandOpBits));
  command.dst_rank = static_cast<uint32_t>(field(kCommandRankShift, kCommandRankBits));
  command.length_bytes =
      IsWrite(command.op) ? (field(kCommandLengthShift, kCommandLengthBits) + 1) * kCommandUnitBytes
                          : 0;
  const uint64_t local_high = field(kCommandLocalHighShift, kCommandOffsetHighBits);
  const uint64_t remote_high = field(kCommandRemoteHighShift, kCommandOffsetHighBits);
  command.local_offset =
      ((packed.words[0] & BitMask(kCommandOffsetLowBits)) | (local_high << kCommandOffsetLowBits)) *
      kCommandUnitBytes;
  command.remote_offset =
      ((packed.words[0] >> kCommandOffsetLowBits) | (remote_high << kCommandOffsetLowBits)) *
      kCommandUnitBytes;
  command.channel = static_cast<Channel>(field(kCommandChannelShift, kCommandChannelBits));
  command.epoch = field(kCommandEpochShift, kCommandEpochBits);
  command.value = static_cast<uint32_t>(field(kCommandValueShift, kCommandValueBits));
  return command;
}

}  // namespace jax_ep
