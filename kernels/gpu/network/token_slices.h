// How an HT call between nodes is cut.
//
// A round is so many tokens of every rank as areas between nodes have room for (ht_rounds.h). Calls
// of few ranks are one round, whose tokens cross in slices: what has come of one is used while the
// next one is on its way. Of other calls each slice is a round: two are on their way, and the next
// one takes the places of the first when the ranks of this node have left it. How a call is cut
// follows from the group's shape, the call and NetworkConfig, so all ranks cut alike.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gpu/network/stage_layout.h"
#include "kernels/gpu/protocol/heap_layout.h"

namespace jax_ep::gpu {

// Of a fast wire: the kernels that use more slices take longer than they hide. The first and the
// last are short, so that the wire begins sooner, and less is left to do when it ends: those
// between them have so many times their tokens. Measured: docs/performance.md, Between nodes.
inline constexpr uint64_t kMostSlicesOfFastWire = 5;
inline constexpr uint64_t kShareOfMiddle = 2;
static_assert(kMostSlicesOfFastWire <= kMostTokenSlices);

// One slice more costs a call some 20 us: kernels, a batch of copies, a signal. It pays where its
// rows take the wire as long: at 380 GB/s, which was measured, or at the 50 GB/s of a NIC, which
// was not.
constexpr uint64_t LeastSliceBytes(bool has_fast_wire) {
  return uint64_t{has_fast_wire ? 6u : 1u} << 20;
}

struct TokenSlice {
  uint64_t begin = 0;  // a multiple of kNetChunkTokens
  uint64_t end = 0;
  uint32_t number = 0;    // in the call
  uint32_t count = 1;     // of the call
  bool is_round = false;  // else a part of the call's only round

  constexpr bool IsFirst() const { return number == 0; }
  constexpr bool IsLast() const { return number + 1 == count; }
  constexpr uint64_t num_tokens() const { return end - begin; }
  constexpr uint64_t num_chunks() const { return DivideUp(num_tokens(), kNetChunkTokens); }

  // Number of the round in the call, its first token, and where this slice is in it.
  constexpr uint32_t round() const { return is_round ? number : 0; }
  constexpr uint64_t round_begin() const { return is_round ? begin : 0; }
  constexpr uint32_t number_in_round() const { return is_round ? 0 : number; }
  constexpr bool BeginsRound() const { return is_round || IsFirst(); }
  constexpr bool EndsRound() const { return is_round || IsLast(); }
  // Slices of the call, from its first on, that the ranks of this node must have left before this
  // one has places in their reduce areas. 0: none.
  constexpr uint32_t num_left() const {
    return is_round && number >= kRoundsAhead ? number - kRoundsAhead + 1 : 0;
  }
};

// Of the chunk of the slice that begins with the token `first`.
constexpr uint32_t NumChunkTokens(const TokenSlice& slice, uint64_t first) {
  const uint64_t left = slice.end - first;
  return static_cast<uint32_t>(left < kNetChunkTokens ? left : kNetChunkTokens);
}

class SliceSpan;

// The slices of a call. Each ends with a signal and is used by kernels of its own. Calls of one
// node have one.
class TokenCut {
 public:
  // `rounds`: GpuHeapLayout::rounds. `num_least`: the call's bytes, in slices of the fewest that
  // pay (CutOf); by default they set no limit.
  constexpr TokenCut(uint64_t num_tokens, const HtRounds& rounds, uint32_t num_nodes,
                     bool has_fast_wire, uint64_t num_least = ~uint64_t{0})
      : num_tokens_(num_tokens), are_rounds_(rounds.are_several) {
    if (num_nodes > 1 && !has_fast_wire) {
      count_ = std::min({num_chunks(), kMostTokenSlices, num_least});
    } else if (num_nodes > 1) {
      // Rounds are alike: two short ones would be one of them.
      const uint64_t most = are_rounds_ ? kMostSlicesOfFastWire - 1 : kMostSlicesOfFastWire;
      // Of n slices with short ends the bytes are those of 2n - 2 short ones.
      count_ = std::min({num_chunks(), most, are_rounds_ ? num_least : num_least / 2 + 1});
    }
    // Of whole chunks: none that is cut evenly is longer than a round.
    if (are_rounds_) count_ = std::max(count_, DivideUp(num_tokens, rounds.tokens));
    count_ = std::max(count_, uint64_t{1});
    has_short_ends_ = has_fast_wire && !are_rounds_ && count_ > 2 && num_chunks() >= num_shares();
  }

  constexpr uint32_t num_slices() const { return static_cast<uint32_t>(count_); }
  constexpr TokenSlice SliceOf(uint32_t number) const {
    return {.begin = BeginOf(number),
            .end = BeginOf(number + 1),
            .number = number,
            .count = num_slices(),
            .is_round = are_rounds_};
  }
  // send(span) and use(slice) until each has been sent and used, in the order of their kernels: so
  // many are sent before the first is used. Either returns an error, or null. `sends_round`:
  // the slices of the only round by one call of send; else, and of rounds, each by its own.
  template <typename Send, typename Use>
  const char* ForEachSlice(bool sends_round, Send&& send, Use&& use) const;

 private:
  constexpr uint64_t num_chunks() const { return DivideUp(num_tokens_, kNetChunkTokens); }
  constexpr uint64_t BeginOf(uint64_t number) const {
    uint64_t share = number, of = count_;
    if (has_short_ends_) {
      of = num_shares();
      share = number == 0 ? 0 : number == count_ ? of : kShareOfMiddle * (number - 1) + 1;
    }
    return std::min(share * num_chunks() / of * kNetChunkTokens, num_tokens_);
  }
  // Of slices with short ends, which have one each.
  constexpr uint64_t num_shares() const { return kShareOfMiddle * (count_ - 2) + 2; }

  uint64_t num_tokens_;
  bool are_rounds_;
  bool has_short_ends_ = false;
  uint64_t count_ = 1;
};

// Slices side by side, which one kernel sends.
class SliceSpan {
 public:
  constexpr SliceSpan(const TokenCut& cut, uint32_t first, uint32_t end)
      : cut_(cut), first_(first), end_(end) {}

  constexpr uint32_t count() const { return end_ - first_; }
  constexpr TokenSlice At(uint32_t i) const { return cut_.SliceOf(first_ + i); }
  constexpr uint64_t begin() const { return At(0).begin; }
  constexpr uint64_t num_tokens() const { return At(count() - 1).end - begin(); }

 private:
  TokenCut cut_;
  uint32_t first_, end_;
};

template <typename Send, typename Use>
const char* TokenCut::ForEachSlice(bool sends_round, Send&& send, Use&& use) const {
  const uint32_t ahead = are_rounds_ ? kRoundsAhead : num_slices();
  const uint32_t at_once = sends_round && !are_rounds_ ? num_slices() : 1;
  for (uint32_t sent = 0, used = 0; used < num_slices();) {
    const char* error = nullptr;
    if (sent == num_slices() || sent == used + ahead) {
      error = use(SliceOf(used++));
    } else {
      error = send(SliceSpan(*this, sent, sent + at_once));
      sent += at_once;
    }
    if (error != nullptr) return error;
  }
  return nullptr;
}

}  // namespace jax_ep::gpu
