// The rules of docs/protocol.md by exhaustive search: every order in which a network may deliver,
// repeat and delay, for small windows and few messages. The first part drives the real classes, the
// others small models, which also show that one step beyond each rule is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <vector>

#include "proxy/sequencer.h"

namespace jax_ep {
namespace {

// One flow: SendWindow, SequencedReceiver, and a network that holds messages and acknowledgements.
struct FlowState {
  SendWindow window;
  SequencedReceiver receiver;
  std::vector<uint64_t> messages = {};  // under way, sorted; sequence
  std::vector<uint64_t> acks = {};      // under way, sorted; cumulative
  std::set<uint64_t> delivered = {};
  int num_repeats = 0;  // that the network may still make

  auto Key() const {
    return std::tuple(window.next(), window.acknowledged(), receiver.next_sequence(), messages,
                      acks, delivered, num_repeats);
  }
};

constexpr uint64_t kLow = kSequenceSpace - 1;

class FlowSearch {
 public:
  FlowSearch(uint64_t first, uint64_t num_messages) : first_(first), end_(first + num_messages) {}

  void Explore(const FlowState& state) {
    if (testing::Test::HasFatalFailure() || !seen_.insert(state.Key()).second) return;
    ++num_states;
    const uint64_t committed = state.receiver.next_sequence();
    // Nothing is committed that was not delivered, and the sender never runs beyond its window.
    for (uint64_t s = first_; s < committed; ++s) ASSERT_TRUE(state.delivered.contains(s));
    bool can_move = false;
    if (state.window.next() < end_ && state.window.CanSend(1)) {
      can_move = true;
      FlowState next = state;
      Insert(next.messages, next.window.next());
      next.window.Record(1);
      Explore(next);
    }
    for (size_t i = 0; i < state.messages.size(); ++i) {
      can_move = true;
      const uint64_t sequence = state.messages[i];
      for (const bool is_repeated : {false, true}) {
        if (is_repeated && state.num_repeats == 0) continue;
        FlowState next = state;
        if (is_repeated) {
          --next.num_repeats;
        } else {
          next.messages.erase(next.messages.begin() + static_cast<std::ptrdiff_t>(i));
        }
        const bool is_signal = sequence % 2 == 0;
        const uint64_t signals_before = (sequence - first_ + 1) / 2;
        const Arrival arrival =
            next.receiver.Arrive(static_cast<uint32_t>(sequence & kLow), is_signal,
                                 static_cast<uint32_t>((1 + signals_before) & 15));
        ASSERT_FALSE(IsError(arrival)) << "sequence " << sequence;
        ASSERT_EQ(arrival == Arrival::kDuplicate, !next.delivered.insert(sequence).second);
        if (next.acks.empty() || next.acks.back() != next.receiver.next_sequence()) {
          Insert(next.acks, next.receiver.next_sequence());
        }
        Explore(next);
      }
    }
    for (size_t i = 0; i < state.acks.size(); ++i) {
      can_move = true;
      FlowState next = state;
      next.acks.erase(next.acks.begin() + static_cast<std::ptrdiff_t>(i));
      ASSERT_GE(next.window.Acknowledge(static_cast<uint32_t>(state.acks[i] & kLow)), 0);
      Explore(next);
    }
    // Wherever nothing more can happen, everything has arrived and is acknowledged.
    if (!can_move) {
      ASSERT_EQ(committed, end_);
      ASSERT_EQ(state.window.acknowledged(), end_);
    }
  }

  size_t num_states = 0;

 private:
  static void Insert(std::vector<uint64_t>& sorted, uint64_t value) {
    sorted.insert(std::upper_bound(sorted.begin(), sorted.end(), value), value);
  }

  uint64_t first_;
  uint64_t end_;
  std::set<decltype(std::declval<FlowState>().Key())> seen_;
};

class FlowModel : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Windows, FlowModel, testing::Values(1, 2, 3, 4));

TEST_P(FlowModel, commits_all_in_order_in_every_interleaving) {
  constexpr uint64_t kFirst = 2 * kSequenceSpace - 2;  // the low bits wrap after two messages
  FlowSearch search(kFirst, /*num_messages=*/6);
  search.Explore(FlowState{.window = SendWindow(GetParam(), 1 << 20, kFirst),
                           .receiver = SequencedReceiver(GetParam(), kFirst),
                           .num_repeats = 1});
  EXPECT_GT(search.num_states, 20u * GetParam());
}

// Whether a model can come to a bad state. `visit(state, open)` says if this one is, and appends
// those that may follow to `open`; it sees each state once.
template <typename State, typename Visit>
bool Reaches(const Visit& visit) {
  std::set<State> seen;
  std::vector<State> open{State{}};
  while (!open.empty()) {
    const State state = open.back();
    open.pop_back();
    if (seen.insert(state).second && visit(state, open)) return true;
  }
  return false;
}

// A receiver with few bits of sequence, as a model: what it takes a message for.
// Returns true if some interleaving makes it commit a message in place of another.
bool SomeOrderIsMisjudged(int bits, uint64_t window, bool window_is_a_range) {
  constexpr uint64_t kNumMessages = 7;
  const uint64_t space = uint64_t{1} << bits;
  struct State {
    uint64_t next = 0;                  // to be sent
    uint64_t expected = 0;              // by the receiver
    std::set<uint64_t> under_way = {};  // sequences
    std::set<uint64_t> early = {};      // distances ahead that the receiver holds, as sequences
    auto operator<=>(const State&) const = default;
  };
  return Reaches<State>([=](const State& state, std::vector<State>& open) {
    // The acknowledgement of `expected` reaches the sender at once: the sender's best case.
    const uint64_t outstanding =
        window_is_a_range ? state.next - state.expected : state.under_way.size();
    if (state.next < kNumMessages && outstanding < window) {
      State sent = state;
      sent.under_way.insert(sent.next++);
      open.push_back(sent);
    }
    for (const uint64_t sequence : state.under_way) {
      const uint64_t distance = (sequence - state.expected) % space;  // all that the bits say
      const uint64_t taken_for = state.expected + distance;
      const bool is_duplicate = distance >= space / 2;
      if (is_duplicate || taken_for != sequence) return true;
      State delivered = state;
      delivered.under_way.erase(sequence);
      delivered.early.insert(sequence);
      while (delivered.early.erase(delivered.expected) > 0) ++delivered.expected;
      open.push_back(delivered);
    }
    return false;
  });
}

TEST(SequenceModel, half_of_the_space_is_the_largest_safe_window) {
  for (const int bits : {1, 2}) {
    const uint64_t half = uint64_t{1} << (bits - 1);
    for (uint64_t window = 1; window <= half; ++window) {
      EXPECT_FALSE(SomeOrderIsMisjudged(bits, window, /*window_is_a_range=*/true)) << window;
    }
    EXPECT_TRUE(SomeOrderIsMisjudged(bits, half + 1, /*window_is_a_range=*/true));
  }
}

TEST(SequenceModel, a_window_that_counts_messages_is_not_safe) {
  EXPECT_TRUE(SomeOrderIsMisjudged(/*bits=*/2, /*window=*/2, /*window_is_a_range=*/false));
}

// LL buffers: call e writes into set e % depth of every other rank as soon as all of them are known
// to have consumed call e - wait_for. Returns true if some interleaving overwrites a set that its
// reader is not done with.
bool SomeSetIsOverwritten(int num_ranks, int depth, int wait_for) {
  constexpr int kNumCalls = 5;
  struct State {
    std::array<int, 3> started{};                   // newest call that each rank has sent
    std::array<int, 3> consumed{};                  // newest call that each rank is done with
    std::array<std::array<int, 3>, 3> known{};      // [rank][peer]: consumed, as far as told
    std::array<std::array<int, 3>, 3> arrived{};    // [rank][source]: bits of calls that are there
    std::array<std::array<int, 3>, 3> under_way{};  // [rank][source]: bits of calls
    auto operator<=>(const State&) const = default;
  };
  return Reaches<State>([=](const State& state, std::vector<State>& open) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const size_t r = static_cast<size_t>(rank);
      const int call = state.started[r] + 1;
      bool may_start = call <= kNumCalls && state.consumed[r] >= call - wait_for;
      bool may_consume = state.consumed[r] < state.started[r];
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer == rank) continue;
        const size_t p = static_cast<size_t>(peer);
        may_start = may_start && state.known[r][p] >= call - wait_for;
        may_consume = may_consume && (state.arrived[r][p] >> (state.consumed[r] + 1) & 1) != 0;
        if (state.known[r][p] < state.consumed[p]) {  // the newest credit arrives, or later
          State told = state;
          told.known[r][p] = state.consumed[p];
          open.push_back(told);
        }
        for (int arriving = 1; arriving <= kNumCalls; ++arriving) {
          if ((state.under_way[r][p] >> arriving & 1) == 0) continue;
          // The set holds call `arriving - depth` until it is consumed.
          if (state.consumed[r] < arriving - depth) return true;
          State next = state;
          next.under_way[r][p] &= ~(1 << arriving);
          next.arrived[r][p] |= 1 << arriving;
          open.push_back(next);
        }
      }
      if (may_start) {
        State next = state;
        next.started[r] = call;
        for (int peer = 0; peer < num_ranks; ++peer) {
          if (peer != rank) next.under_way[static_cast<size_t>(peer)][r] |= 1 << call;
        }
        open.push_back(next);
      }
      if (may_consume) {
        State next = state;
        ++next.consumed[r];
        open.push_back(next);
      }
    }
    return false;
  });
}

TEST(LlBufferModel, waiting_for_the_call_that_used_the_set_before_is_enough) {
  for (const int depth : {1, 2, 3}) EXPECT_FALSE(SomeSetIsOverwritten(2, depth, depth)) << depth;
  EXPECT_FALSE(SomeSetIsOverwritten(3, 1, 1));
}

TEST(LlBufferModel, waiting_for_one_call_less_is_not) {
  for (const int depth : {1, 2, 3}) EXPECT_TRUE(SomeSetIsOverwritten(2, depth, depth + 1)) << depth;
}

// Two ranks of one proxy send two messages each, over ways of their own; then one of them tells the
// other proxy that all have arrived: a barrier signal or a goodbye. True if it can come too early.
bool NoticeOvertakesAMessage(bool waits_for_all_ranks) {
  constexpr int kNumMessages = 2;
  struct State {
    std::array<int, 2> sent{};          // by rank; rank 0 leads
    std::array<int, 2> arrived{};       // bits
    std::array<int, 2> acknowledged{};  // bits
    bool is_notice_sent = false;
    auto operator<=>(const State&) const = default;
  };
  constexpr int kAll = (1 << kNumMessages) - 1;
  return Reaches<State>([=](const State& state, std::vector<State>& open) {
    if (state.is_notice_sent && (state.arrived[0] != kAll || state.arrived[1] != kAll)) {
      return true;  // the notice may arrive now
    }
    for (size_t rank = 0; rank < 2; ++rank) {
      if (state.sent[rank] < kNumMessages) {
        State next = state;
        ++next.sent[rank];
        open.push_back(next);
      }
      for (int message = 0; message < state.sent[rank]; ++message) {
        State next = state;
        ((state.arrived[rank] >> message & 1) == 0 ? next.arrived : next.acknowledged)[rank] |=
            1 << message;
        open.push_back(next);
      }
    }
    const bool may_say =
        state.acknowledged[0] == kAll && (state.acknowledged[1] == kAll || !waits_for_all_ranks);
    if (may_say && !state.is_notice_sent) {
      State next = state;
      next.is_notice_sent = true;
      open.push_back(next);
    }
    return false;
  });
}

TEST(LeadModel, a_notice_after_the_acknowledgements_of_all_ranks_overtakes_nothing) {
  EXPECT_FALSE(NoticeOvertakesAMessage(/*waits_for_all_ranks=*/true));
}

TEST(LeadModel, one_that_waits_for_its_own_ranks_only_does) {
  EXPECT_TRUE(NoticeOvertakesAMessage(/*waits_for_all_ranks=*/false));
}

}  // namespace
}  // namespace jax_ep
