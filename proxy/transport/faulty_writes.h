// FaultyWrites: the writes that the faulty transport holds back. They go to the inner transport in
// another order, late, in pieces, or twice; so both bytes and immediates really arrive that way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/transport.h"
#include "proxy/transport/faulty.h"

namespace jax_ep {

// One sequence of choices, from a seed.
class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  uint64_t Below(uint64_t limit) { return limit <= 1 ? 0 : random_() % limit; }
  bool Chance(uint64_t percent) { return percent > 0 && random_() % 100 < percent; }

 private:
  std::mt19937_64 random_;
};

// `inner` and `dice` must outlive it. A write of valid bounds is Held; from then on each poll of
// the transport Drives, gives OnInnerSent the inner transport's kSent events, and passes on its
// own.
class FaultyWrites {
 public:
  // With payload_late: takes the bytes of a write whose message goes without them.
  using PutLate = std::function<void(const WriteRequest&)>;

  FaultyWrites(const FaultySpec& spec, Transport* inner, Dice* dice, PutLate put_late)
      : spec_(spec), inner_(inner), dice_(dice), put_late_(std::move(put_late)) {}

  void Hold(const WriteRequest& request) {
    held_.push_back(Held{.request = request, .polls = dice_->Below(spec_.delay + 1)});
  }
  // Hands held writes to the inner transport as far as the dice allow.
  Status Drive();
  void OnInnerSent(uint64_t token);
  // kSent events whose time has come; how many.
  size_t TakeSent(std::span<TransportEvent> events);

  // Writes that were not yet posted as a whole.
  size_t num_held() const { return held_.size() + splits_.size(); }
  bool is_idle() const {
    return num_held() == 0 && duplicates_.empty() && sent_.empty() && num_inner_posted_ == 0;
  }

 private:
  struct Held {
    WriteRequest request;
    uint64_t polls;
    bool is_last_piece = false;
    uint64_t num_overtaken = 0;
  };
  struct Split {
    WriteRequest last_piece;
    uint64_t num_pieces_under_way;
  };
  struct Duplicate {
    WriteRequest request;
    uint64_t original;  // its inner token
    uint64_t polls;
    int num_overtaken = 0;
  };
  struct Sent {
    uint64_t token;
    uint64_t polls;
  };
  struct InnerWrite {  // what an inner token stands for
    enum class Kind : uint8_t { kWhole, kPiece, kDuplicate };
    Kind kind;
    uint64_t value;  // the caller's token, or the split's number
  };

  // A duplicate has no bytes, so it must not come before those of its original.
  bool HasLeft(const Duplicate& duplicate) const {
    return !inner_writes_.contains(duplicate.original);
  }
  size_t Choose();
  void Forget(size_t index);
  Status Release(size_t index, bool* is_full);
  Status PostDuplicate(size_t index, bool* is_full);
  Status StartSplit(const WriteRequest& request, uint64_t units);
  Status PostPieces();
  void FinishPiece(uint64_t number);
  // Posts to the inner transport. `late_payload`: the write whose bytes are put.
  Status PostInner(WriteRequest request, InnerWrite meaning, bool* is_full,
                   const WriteRequest* late_payload);

  const FaultySpec spec_;
  Transport* const inner_;
  Dice* const dice_;
  const PutLate put_late_;

  std::vector<size_t> candidates_;  // of Choose
  std::deque<Held> held_;           // accepted, not yet posted to the inner transport; oldest first
  std::deque<Duplicate> duplicates_;
  std::map<uint64_t, Split> splits_;
  std::deque<std::pair<WriteRequest, uint64_t>> pieces_;  // of splits, to be posted
  uint64_t next_split_ = 0;
  std::deque<Sent> sent_;  // kSent events held back
  std::map<uint64_t, InnerWrite> inner_writes_;
  uint64_t next_inner_token_ = 0;
  uint64_t num_inner_posted_ = 0;
};

}  // namespace jax_ep
