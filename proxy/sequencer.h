// The receiver's order, as pure logic (no I/O, no clock, no threads): SequencedReceiver commits the
// messages of an HT or control flow in posting order, CountedReceiver completes LL epochs by
// counting, SendWindow keeps the sender inside the range that both can tell apart.
#pragma once

#include <cstdint>
#include <vector>

#include "proxy/abi/imm.h"

namespace jax_ep {

enum class Arrival : uint8_t {
  kAccepted,      // new; see the accessors for what it committed or completed
  kDuplicate,     // seen before or of a finished epoch: dropped and counted, no other effect
  kBeyondWindow,  // error: a sequence that no sender inside its window could have used
  kWrongEpoch,    // error: committed in order, but not of the epoch that is next
  kBadSlot,       // error: slot or count out of range, or more slots than the count message said
};
constexpr bool IsError(Arrival arrival) {
  return arrival != Arrival::kAccepted && arrival != Arrival::kDuplicate;
}

// One sequenced flow. Every message carries the low bits of its sequence (0, 1, 2, ...), whether it
// is a signal, and the low bits of its epoch: 1 + the number of signals before it. After an error
// the object must not be used again.
class SequencedReceiver {
 public:
  // 1 <= window <= kMaxWindowMessages, equal to the sender's. The start values are for tests near
  // wrap-around.
  explicit SequencedReceiver(uint32_t window, uint64_t first_sequence = 0,
                             uint64_t first_signals = 0);

  Arrival Arrive(uint32_t sequence_low, bool is_signal, uint32_t epoch_low);

  uint64_t next_sequence() const { return next_sequence_; }  // all before it are committed
  uint64_t num_signals() const { return num_signals_; }      // committed: the flag's value
  uint64_t num_reorders() const { return num_reorders_; }
  uint64_t max_reorder_depth() const { return max_reorder_depth_; }
  uint64_t num_duplicates() const { return num_duplicates_; }

 private:
  uint32_t window_;
  uint64_t mask_;                 // of the storage, a power of two >= window
  std::vector<uint8_t> waiting_;  // per sequence: 0, or present | signal | epoch << 4
  uint64_t next_sequence_;
  uint64_t num_signals_;
  uint64_t num_reorders_ = 0;
  uint64_t max_reorder_depth_ = 0;
  uint64_t num_duplicates_ = 0;
};

// Epochs of a counted flow that may be open at once. Half of what the epoch bits tell apart: the
// other half are finished ones, whose late duplicates are dropped.
inline constexpr uint64_t kOpenEpochs = (uint64_t{1} << kImmEpochBits) / 2;

// One counted flow: remembers one bit per (epoch, slot). An epoch completes when its count message
// and that many distinct slots have arrived, in any order, and all earlier epochs are complete.
class CountedReceiver {
 public:
  // Slots are 0 .. num_slots - 1. `first_completed` is for tests near wrap-around.
  explicit CountedReceiver(uint32_t num_slots, uint64_t first_completed = 0);

  Arrival ArriveSlot(uint32_t epoch_low, uint32_t slot);
  Arrival ArriveCount(uint32_t epoch_low, uint32_t count);

  uint64_t num_completed() const { return num_completed_; }  // epochs: the flag's value
  uint64_t num_arrived() const { return num_arrived_; }      // distinct messages, counts included
  uint64_t num_duplicates() const { return num_duplicates_; }

 private:
  struct Epoch {
    bool has_count = false;
    uint32_t count = 0;
    uint32_t num_slots_arrived = 0;
  };

  // The open epoch with these low bits, or nullptr for a finished one.
  Epoch* Find(uint32_t epoch_low);
  uint64_t* Bits(const Epoch& epoch);
  void CompleteReady();

  uint32_t num_slots_;
  uint32_t words_per_epoch_;
  Epoch epochs_[kOpenEpochs];        // epoch e at e % kOpenEpochs
  std::vector<uint64_t> slot_bits_;  // [kOpenEpochs][words_per_epoch_]
  uint64_t num_completed_;
  uint64_t num_arrived_ = 0;
  uint64_t num_duplicates_ = 0;
};

// The sender's end of one flow: how far it may run ahead of the receiver's acknowledgements. A
// *range* (next - lowest unacknowledged), because neither a count of outstanding messages nor local
// completions say which sequences the receiver can still confuse.
class SendWindow {
 public:
  // 1 <= max_messages <= kMaxWindowMessages.
  SendWindow(uint32_t max_messages, uint64_t max_bytes, uint64_t first_sequence = 0);

  // A message longer than the window passes when nothing else is under way.
  bool CanSend(uint64_t length_bytes) const {
    const uint64_t num_unacknowledged = next_ - acknowledged_;
    return num_unacknowledged == 0 ||
           (num_unacknowledged < max_messages_ &&
            posted_bytes_ - acknowledged_bytes_ + length_bytes <= max_bytes_);
  }
  // Takes the next sequence.
  void Record(uint64_t length_bytes) {
    posted_bytes_ += length_bytes;
    bytes_through_[next_ & mask_] = posted_bytes_;
    ++next_;
  }
  // `low` are the low bits of a cumulative acknowledgement; old and repeated ones change nothing.
  // Returns the number of newly acknowledged messages, or -1 if it covers unsent ones.
  int64_t Acknowledge(uint32_t low);
  // The peer has left: it needs nothing more.
  int64_t AcknowledgeAll();

  uint64_t next() const { return next_; }
  uint64_t acknowledged() const { return acknowledged_; }
  uint64_t num_unacknowledged() const { return next_ - acknowledged_; }

 private:
  int64_t AcknowledgeTo(uint64_t sequence);

  uint64_t max_messages_;
  uint64_t max_bytes_;
  uint64_t mask_;
  std::vector<uint64_t> bytes_through_;  // posted_bytes_ after each unacknowledged message
  uint64_t next_;
  uint64_t acknowledged_;
  uint64_t posted_bytes_ = 0;
  uint64_t acknowledged_bytes_ = 0;
};

}  // namespace jax_ep
