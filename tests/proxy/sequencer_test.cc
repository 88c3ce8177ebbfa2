// The sequencer: every permutation for windows up to 6, with duplicates; random above; counters
// that start near wrap-around; misuse.
#include "proxy/sequencer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace jax_ep {
namespace {

constexpr uint64_t kStarts[] = {0, kSequenceSpace - 3, (uint64_t{1} << 31) - 2,
                                (uint64_t{1} << 32) - 2, (uint64_t{1} << 40) * kSequenceSpace - 2};

// What is sent: message i is a signal if the pattern says so; its epoch follows from that.
struct Message {
  uint64_t sequence;
  bool is_signal;
  uint64_t epoch;
};

std::vector<Message> MakeMessages(uint64_t first_sequence, uint64_t first_signals, size_t count,
                                  uint64_t signal_pattern) {
  std::vector<Message> messages;
  uint64_t signals = first_signals;
  for (size_t i = 0; i < count; ++i) {
    const bool is_signal = (signal_pattern >> (i % 64) & 1) != 0;
    messages.push_back({first_sequence + i, is_signal, signals + 1});
    if (is_signal) ++signals;
  }
  return messages;
}

Arrival Deliver(SequencedReceiver& receiver, const Message& message) {
  return receiver.Arrive(static_cast<uint32_t>(message.sequence % kSequenceSpace),
                         message.is_signal, static_cast<uint32_t>(message.epoch % 16));
}

// The model: a set of what has arrived; committed is its longest prefix.
struct Model {
  uint64_t first;
  uint64_t first_signals;
  std::map<uint64_t, bool> arrived;

  uint64_t next() const {
    uint64_t sequence = first;
    while (arrived.contains(sequence)) ++sequence;
    return sequence;
  }
  uint64_t signals() const {
    uint64_t count = first_signals;
    for (const auto& [sequence, is_signal] : arrived) {
      if (sequence < next() && is_signal) ++count;
    }
    return count;
  }
};

TEST(SequencedReceiver, commits_in_order_whatever_the_permutation_and_duplicates) {
  for (uint32_t window = 1; window <= 6; ++window) {
    for (const uint64_t start : kStarts) {
      const std::vector<Message> messages = MakeMessages(start, /*first_signals=*/14, window,
                                                         /*signal_pattern=*/0b101101);
      std::vector<size_t> order(window);
      std::iota(order.begin(), order.end(), size_t{0});
      do {
        // Each arrival is repeated at each later point: one duplicate of each earlier message
        // after every new one covers every single interleaving of one repeat.
        SequencedReceiver receiver(window, start, 14);
        Model model{start, 14, {}};
        uint64_t duplicates = 0;
        for (size_t i = 0; i < window; ++i) {
          const Message& message = messages[order[i]];
          ASSERT_EQ(Deliver(receiver, message), Arrival::kAccepted);
          model.arrived[message.sequence] = message.is_signal;
          ASSERT_EQ(receiver.next_sequence(), model.next());
          ASSERT_EQ(receiver.num_signals(), model.signals());
          for (size_t j = 0; j <= i; ++j) {
            ASSERT_EQ(Deliver(receiver, messages[order[j]]), Arrival::kDuplicate);
            ++duplicates;
            ASSERT_EQ(receiver.next_sequence(), model.next());
          }
        }
        ASSERT_EQ(receiver.next_sequence(), start + window);
        ASSERT_EQ(receiver.num_duplicates(), duplicates);
      } while (std::next_permutation(order.begin(), order.end()));
    }
  }
}

// A sender with a range window and a network that holds messages for as long as it likes, repeats
// them, and delays acknowledgements: the receiver must follow the model over several wraps.
TEST(SequencedReceiver, and_window_agree_over_random_networks) {
  for (const uint32_t window_messages : {1u, 2u, 7u, 64u, 1000u, 4096u}) {
    std::mt19937_64 random(window_messages);
    const uint64_t start = kSequenceSpace - 5;
    SequencedReceiver receiver(window_messages, start, 3);
    SendWindow window(window_messages, /*max_bytes=*/UINT64_MAX >> 1, start);
    uint64_t signals = 3;
    uint64_t sent_signals = 3;
    std::vector<Message> network;
    std::map<uint64_t, Message> sent;
    std::vector<uint64_t> acknowledgements;
    const uint64_t num_messages = 40'000;
    while (window.acknowledged() < start + num_messages) {
      switch (random() % 4) {
        case 0:
        case 1:
          if (window.next() < start + num_messages && window.CanSend(16)) {
            const bool is_signal = random() % 3 == 0;
            const Message message{window.next(), is_signal, sent_signals + 1};
            if (is_signal) ++sent_signals;
            network.push_back(message);
            if (random() % 4 == 0) network.push_back(message);
            window.Record(16);
          }
          break;
        case 2:
          if (!network.empty()) {
            const size_t i = random() % network.size();
            const Message message = network[i];
            network[i] = network.back();
            network.pop_back();
            const Arrival arrival = Deliver(receiver, message);
            ASSERT_FALSE(IsError(arrival)) << static_cast<int>(arrival);
            if (random() % 2 == 0) acknowledgements.push_back(receiver.next_sequence());
          }
          break;
        case 3:
          // Late, repeated and reordered acknowledgements, but never older than half the space.
          if (network.empty()) acknowledgements.push_back(receiver.next_sequence());
          if (!acknowledgements.empty()) {
            const size_t i = random() % acknowledgements.size();
            const uint64_t value = acknowledgements[i];
            acknowledgements.erase(acknowledgements.begin() + static_cast<std::ptrdiff_t>(i));
            if (value + kSequenceSpace / 2 > window.next()) {
              ASSERT_GE(window.Acknowledge(static_cast<uint32_t>(value % kSequenceSpace)), 0);
            }
          }
          break;
      }
      ASSERT_LE(window.next() - window.acknowledged(), window_messages);
      ASSERT_LE(window.acknowledged(), receiver.next_sequence());
      ASSERT_LE(receiver.next_sequence(), window.next());
      signals = std::max(signals, receiver.num_signals());
    }
    EXPECT_EQ(receiver.next_sequence(), start + num_messages);
    EXPECT_EQ(receiver.num_signals(), sent_signals);
  }
}

TEST(SequencedReceiver, reports_a_sequence_beyond_the_window) {
  SequencedReceiver receiver(4);
  EXPECT_EQ(receiver.Arrive(3, false, 1), Arrival::kAccepted);
  EXPECT_EQ(receiver.Arrive(4, false, 1), Arrival::kBeyondWindow);
  EXPECT_EQ(receiver.Arrive(kSequenceSpace / 2 - 1, false, 1), Arrival::kBeyondWindow);
  EXPECT_EQ(receiver.Arrive(kSequenceSpace / 2, false, 1), Arrival::kDuplicate);
  EXPECT_EQ(receiver.Arrive(kSequenceSpace - 1, false, 1), Arrival::kDuplicate);
  EXPECT_EQ(receiver.next_sequence(), 0u);
}

TEST(SequencedReceiver, reports_a_message_of_another_epoch_when_its_turn_comes) {
  SequencedReceiver receiver(4);
  EXPECT_EQ(receiver.Arrive(1, true, 7), Arrival::kAccepted);  // not yet judged
  EXPECT_EQ(receiver.Arrive(0, true, 1), Arrival::kWrongEpoch);
  EXPECT_EQ(receiver.num_signals(), 1u);  // what came before it stands
}

TEST(SequencedReceiver, counts_reorders_and_their_depth) {
  SequencedReceiver receiver(8);
  EXPECT_EQ(receiver.Arrive(5, false, 1), Arrival::kAccepted);
  EXPECT_EQ(receiver.Arrive(2, false, 1), Arrival::kAccepted);
  EXPECT_EQ(receiver.Arrive(0, false, 1), Arrival::kAccepted);
  EXPECT_EQ(receiver.num_reorders(), 2u);
  EXPECT_EQ(receiver.max_reorder_depth(), 5u);
}

// Every order of {slots of an epoch, its count message} with a repeat of each after every step.
TEST(CountedReceiver, completes_whatever_the_permutation_and_duplicates) {
  constexpr uint32_t kCountMessage = 1000;
  for (uint32_t count = 0; count <= 5; ++count) {
    for (const uint64_t start : {uint64_t{0}, uint64_t{14}, uint64_t{15}, (uint64_t{1} << 31) - 1,
                                 (uint64_t{1} << 32) - 1, uint64_t{1} << 40}) {
      std::vector<uint32_t> order;
      for (uint32_t i = 0; i < count; ++i) order.push_back(i * 3 + 1);
      order.push_back(kCountMessage);
      const uint32_t epoch = static_cast<uint32_t>((start + 1) % 16);
      do {
        CountedReceiver receiver(/*num_slots=*/70, start);
        const auto deliver = [&](uint32_t what) {
          return what == kCountMessage ? receiver.ArriveCount(epoch, count)
                                       : receiver.ArriveSlot(epoch, what);
        };
        for (size_t i = 0; i < order.size(); ++i) {
          ASSERT_EQ(receiver.num_completed(), start);
          ASSERT_EQ(deliver(order[i]), Arrival::kAccepted);
          ASSERT_EQ(receiver.num_arrived(), i + 1);
          for (size_t j = 0; j <= i; ++j) ASSERT_EQ(deliver(order[j]), Arrival::kDuplicate);
        }
        ASSERT_EQ(receiver.num_completed(), start + 1);
      } while (std::next_permutation(order.begin(), order.end()));
    }
  }
}

// Three open epochs, all their messages in every order: completion is in epoch order and complete.
TEST(CountedReceiver, completes_epochs_in_order_whatever_the_permutation) {
  const uint64_t start = 13;
  // (epoch offset, slot or -1 for the count): epoch 1 has 2 slots, epoch 2 none, epoch 3 has 1.
  const std::vector<std::pair<uint32_t, int>> messages = {{1, 0},  {1, 9},  {1, -1},
                                                          {2, -1}, {3, 63}, {3, -1}};
  const uint32_t counts[] = {0, 2, 0, 1};
  std::vector<size_t> order(messages.size());
  std::iota(order.begin(), order.end(), size_t{0});
  do {
    CountedReceiver receiver(64, start);
    std::set<size_t> arrived;
    for (const size_t i : order) {
      const auto [epoch, slot] = messages[i];
      const uint32_t low = static_cast<uint32_t>((start + epoch) % 16);
      ASSERT_EQ(slot < 0 ? receiver.ArriveCount(low, counts[epoch])
                         : receiver.ArriveSlot(low, static_cast<uint32_t>(slot)),
                Arrival::kAccepted);
      arrived.insert(i);
      uint64_t expected = start;
      if (arrived.contains(0) && arrived.contains(1) && arrived.contains(2)) {
        ++expected;
        if (arrived.contains(3)) {
          ++expected;
          if (arrived.contains(4) && arrived.contains(5)) ++expected;
        }
      }
      ASSERT_EQ(receiver.num_completed(), expected);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(CountedReceiver, late_duplicates_of_finished_epochs_change_nothing) {
  CountedReceiver receiver(8);
  for (uint32_t epoch = 1; epoch <= 100; ++epoch) {
    EXPECT_EQ(receiver.ArriveSlot(epoch % 16, 3), Arrival::kAccepted);
    EXPECT_EQ(receiver.ArriveCount(epoch % 16, 1), Arrival::kAccepted);
    for (uint32_t back = 0; back < 8 && back < epoch; ++back) {
      EXPECT_EQ(receiver.ArriveSlot((epoch - back) % 16, 3), Arrival::kDuplicate);
      EXPECT_EQ(receiver.ArriveCount((epoch - back) % 16, 1), Arrival::kDuplicate);
    }
    EXPECT_EQ(receiver.num_completed(), epoch);
  }
}

TEST(CountedReceiver, reports_impossible_slots_and_counts) {
  CountedReceiver receiver(8);
  EXPECT_EQ(receiver.ArriveSlot(1, 8), Arrival::kBadSlot);
  EXPECT_EQ(receiver.ArriveCount(1, 9), Arrival::kBadSlot);
  EXPECT_EQ(receiver.ArriveSlot(2, 0), Arrival::kAccepted);
  EXPECT_EQ(receiver.ArriveSlot(2, 1), Arrival::kAccepted);
  EXPECT_EQ(receiver.ArriveCount(2, 1), Arrival::kBadSlot);  // two have come already
  EXPECT_EQ(receiver.ArriveCount(2, 2), Arrival::kAccepted);
  EXPECT_EQ(receiver.ArriveCount(2, 3), Arrival::kBadSlot);  // two counts that differ
  EXPECT_EQ(receiver.ArriveSlot(2, 5), Arrival::kBadSlot);   // one more than the count
  EXPECT_EQ(receiver.num_completed(), 0u);
}

TEST(CountedReceiver, without_slots_refuses_every_slot) {
  CountedReceiver receiver(0);
  EXPECT_EQ(receiver.ArriveSlot(1, 0), Arrival::kBadSlot);
  EXPECT_EQ(receiver.ArriveCount(1, 0), Arrival::kAccepted);
  EXPECT_EQ(receiver.num_completed(), 1u);
}

// Neither a count of outstanding messages nor a local completion may open the window: with the
// oldest message held back, everything behind it is acknowledged in vain.
TEST(SendWindow, is_a_range_that_only_the_receiver_opens) {
  SendWindow window(4, 1 << 20);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(window.CanSend(16));
    window.Record(16);
  }
  EXPECT_FALSE(window.CanSend(16));
  EXPECT_EQ(window.Acknowledge(0), 0);  // the receiver still misses message 0
  EXPECT_FALSE(window.CanSend(16));
  EXPECT_EQ(window.Acknowledge(2), 2);
  EXPECT_TRUE(window.CanSend(16));
  EXPECT_EQ(window.Acknowledge(1), 0);  // an old one
  EXPECT_EQ(window.num_unacknowledged(), 2u);
}

TEST(SendWindow, limits_bytes_but_lets_one_large_message_pass) {
  SendWindow window(8, 100);
  EXPECT_TRUE(window.CanSend(1000));
  window.Record(1000);
  EXPECT_FALSE(window.CanSend(16));
  EXPECT_EQ(window.Acknowledge(1), 1);
  window.Record(60);
  EXPECT_TRUE(window.CanSend(40));
  EXPECT_FALSE(window.CanSend(41));
}

TEST(SendWindow, reports_an_acknowledgement_of_unsent_messages) {
  SendWindow window(4, 1 << 20);
  window.Record(16);
  EXPECT_EQ(window.Acknowledge(2), -1);
  EXPECT_EQ(window.Acknowledge(1), 1);
}

TEST(SendWindow, closes_when_the_peer_leaves) {
  SendWindow window(4, 1 << 20, kSequenceSpace - 1);
  window.Record(16);
  window.Record(16);
  EXPECT_EQ(window.AcknowledgeAll(), 2);
  EXPECT_EQ(window.num_unacknowledged(), 0u);
}

}  // namespace
}  // namespace jax_ep
