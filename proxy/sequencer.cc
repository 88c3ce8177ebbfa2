#include "proxy/sequencer.h"

#include <algorithm>
#include <bit>

namespace jax_ep {
namespace {

constexpr uint8_t kPresent = 1;
constexpr uint8_t kIsSignal = 2;
constexpr int kWaitingEpochShift = 4;
static_assert(kImmEpochBits + kWaitingEpochShift <= 8, "a waiting message fits a byte");

constexpr uint32_t kBitsPerWord = 64;
constexpr uint64_t kEpochMask = BitMask(kImmEpochBits);

}  // namespace

SequencedReceiver::SequencedReceiver(uint32_t window, uint64_t first_sequence,
                                     uint64_t first_signals)
    : window_(window),
      mask_(std::bit_ceil(window) - 1),
      waiting_(mask_ + 1),
      next_sequence_(first_sequence),
      num_signals_(first_signals) {}

Arrival SequencedReceiver::Arrive(uint32_t sequence_low, bool is_signal, uint32_t epoch_low) {
  const uint64_t ahead = (sequence_low - next_sequence_) & (kSequenceSpace - 1);
  if (ahead >= kSequenceSpace / 2) {  // behind: committed long ago
    ++num_duplicates_;
    return Arrival::kDuplicate;
  }
  if (ahead >= window_) return Arrival::kBeyondWindow;
  uint8_t& entry = waiting_[(next_sequence_ + ahead) & mask_];
  if (entry != 0) {
    ++num_duplicates_;
    return Arrival::kDuplicate;
  }
  entry = static_cast<uint8_t>(kPresent | (is_signal ? kIsSignal : 0) |
                               ((epoch_low & kEpochMask) << kWaitingEpochShift));
  if (ahead > 0) {
    ++num_reorders_;
    max_reorder_depth_ = std::max(max_reorder_depth_, ahead);
    return Arrival::kAccepted;
  }
  // The epoch is checked at commit, when the number of signals before the message is known.
  for (uint8_t* next = &entry; *next != 0; next = &waiting_[next_sequence_ & mask_]) {
    if ((*next >> kWaitingEpochShift) != ((num_signals_ + 1) & kEpochMask)) {
      return Arrival::kWrongEpoch;
    }
    if ((*next & kIsSignal) != 0) ++num_signals_;
    *next = 0;
    ++next_sequence_;
  }
  return Arrival::kAccepted;
}

CountedReceiver::CountedReceiver(uint32_t num_slots, uint64_t first_completed)
    : num_slots_(num_slots),
      words_per_epoch_((num_slots + kBitsPerWord - 1) / kBitsPerWord),
      slot_bits_(kOpenEpochs * words_per_epoch_),
      num_completed_(first_completed) {}

CountedReceiver::Epoch* CountedReceiver::Find(uint32_t epoch_low) {
  const uint64_t first_open = num_completed_ + 1;
  const uint64_t ahead = (epoch_low - first_open) & kEpochMask;
  if (ahead >= kOpenEpochs) return nullptr;
  return &epochs_[(first_open + ahead) % kOpenEpochs];
}

uint64_t* CountedReceiver::Bits(const Epoch& epoch) {
  return slot_bits_.data() + static_cast<size_t>(&epoch - epochs_) * words_per_epoch_;
}

Arrival CountedReceiver::ArriveSlot(uint32_t epoch_low, uint32_t slot) {
  if (slot >= num_slots_) return Arrival::kBadSlot;
  Epoch* epoch = Find(epoch_low);
  uint64_t* word = epoch == nullptr ? nullptr : Bits(*epoch) + slot / kBitsPerWord;
  const uint64_t bit = uint64_t{1} << (slot % kBitsPerWord);
  if (word == nullptr || (*word & bit) != 0) {
    ++num_duplicates_;
    return Arrival::kDuplicate;
  }
  if (epoch->has_count && epoch->num_slots_arrived == epoch->count) return Arrival::kBadSlot;
  *word |= bit;
  ++epoch->num_slots_arrived;
  ++num_arrived_;
  CompleteReady();
  return Arrival::kAccepted;
}

Arrival CountedReceiver::ArriveCount(uint32_t epoch_low, uint32_t count) {
  if (count > num_slots_) return Arrival::kBadSlot;
  Epoch* epoch = Find(epoch_low);
  if (epoch == nullptr || (epoch->has_count && epoch->count == count)) {
    ++num_duplicates_;
    return Arrival::kDuplicate;
  }
  if (epoch->has_count || epoch->num_slots_arrived > count) return Arrival::kBadSlot;
  epoch->has_count = true;
  epoch->count = count;
  ++num_arrived_;
  CompleteReady();
  return Arrival::kAccepted;
}

void CountedReceiver::CompleteReady() {
  while (true) {
    Epoch& epoch = epochs_[(num_completed_ + 1) % kOpenEpochs];
    if (!epoch.has_count || epoch.num_slots_arrived != epoch.count) return;
    std::fill_n(Bits(epoch), words_per_epoch_, 0);
    epoch = Epoch{};
    ++num_completed_;
  }
}

SendWindow::SendWindow(uint32_t max_messages, uint64_t max_bytes, uint64_t first_sequence)
    : max_messages_(max_messages),
      max_bytes_(max_bytes),
      mask_(std::bit_ceil(max_messages) - 1),
      bytes_through_(mask_ + 1),
      next_(first_sequence),
      acknowledged_(first_sequence) {}

int64_t SendWindow::Acknowledge(uint32_t low) {
  return AcknowledgeTo(ExtendNearest(acknowledged_, low, kImmPayloadBits));
}

int64_t SendWindow::AcknowledgeAll() { return AcknowledgeTo(next_); }

int64_t SendWindow::AcknowledgeTo(uint64_t sequence) {
  if (sequence > next_) return -1;
  if (sequence <= acknowledged_) return 0;
  const uint64_t num_new = sequence - acknowledged_;
  acknowledged_ = sequence;
  acknowledged_bytes_ = bytes_through_[(sequence - 1) & mask_];
  return static_cast<int64_t>(num_new);
}

}  // namespace jax_ep
