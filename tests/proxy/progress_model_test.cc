// Caller progress (proxy/progress.h) by exhaustive search: a model of the proxy thread, of threads
// that push and help, of the network and of Stop, in every interleaving of their accesses to what
// they share. Each rule is also broken once, to show that the search would notice.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace jax_ep {
namespace {

// What may be broken. As it stands: the rules of proxy/progress.h.
struct Rules {
  bool help_takes_mutex = true;
  bool kick_rings = true;  // where it has not done the round
  bool bell_is_read_before_round = true;
  bool leaving_rings = true;  // EndHelp(leaves_work)
  bool leaving_rings_after_count = true;
  bool rings_for_receives = true;  // left by a helper while the thread sleeps
  bool helpers_keep_off = true;    // while the thread waits for the mutex
  bool failing_helper_rings = true;
  bool stop_rings = true;
  bool stopping_thread_naps = true;
};

struct Caller {
  int num_pushes = 0;
  bool helps = false;  // then waits for the answer
};

struct World {
  std::vector<Caller> callers;
  bool stops = false;         // Stop is called when all callers are done
  bool helper_fails = false;  // any of its rounds may
  bool naps_end = true;       // else only the bell ends a nap
};

constexpr int kMaxCallers = 3;
constexpr int kHelpRounds = 1;
constexpr int kInlineCommands = 1;

enum class Mutex : uint8_t { kFree, kThread, kCaller };
enum class Seen : uint8_t { kAbsent, kAwake, kNaps, kSleeps };  // Progress::ThreadState
enum class ThreadAt : uint8_t {
  kStart,
  kReadBell,
  kLook,
  kRound,
  kAfterRound,
  kIdle,
  kUnlock,
  kPaused,
  kWantsMutex,
  kLock,
  kEnd
};
enum class CallerAt : uint8_t {
  kNext,
  kLook,
  kTryLock,
  kRound,
  kAfterRound,
  kRing,
  kReady,
  kLeave,
  kLeaveRing,
  kAsleep,
  kDone
};
enum class StopAt : uint8_t { kNever, kWaits, kRings, kDone };

struct CallerState {
  CallerAt at = CallerAt::kNext;
  uint8_t num_pushed = 0;
  uint8_t num_rounds = 0;
  bool is_kick = false;
  bool has_helped = false;
  bool leaves_work = false;
  bool operator==(const CallerState&) const = default;
};

struct State {
  ThreadAt thread = ThreadAt::kStart;
  Seen seen = Seen::kAbsent;  // state_
  Seen pause = Seen::kNaps;   // that begins at kUnlock
  bool did_work = false;
  Mutex mutex = Mutex::kFree;
  bool is_rung = false;  // since the thread read the count
  uint8_t num_helpers = 0;
  bool thread_waits = false;
  uint8_t num_in_round = 0;   // by whomever
  uint8_t num_overtaken = 0;  // rounds that began while the thread waited
  bool has_failed = false;
  StopAt stop = StopAt::kNever;
  std::array<CallerState, kMaxCallers> callers = {};
  // The endpoint, with a window of one message.
  uint8_t num_commands = 0;
  bool is_outstanding = false;
  bool is_ack_due = false;    // by us
  bool is_published = false;  // the answer
  // The network.
  bool is_armed = false;      // rings at the next event
  uint8_t num_under_way = 0;  // messages to the peer
  uint8_t num_ack_events = 0;
  uint8_t num_answer_events = 0;
  bool has_answered = false;
  bool operator==(const State&) const = default;
};
static_assert(std::has_unique_object_representations_v<State>, "its bytes are hashed");

struct StateHash {
  size_t operator()(const State& state) const {
    return std::hash<std::string_view>()(
        std::string_view(reinterpret_cast<const char*>(&state), sizeof(state)));
  }
};

class Search {
 public:
  Search(World world, Rules rules) : world_(std::move(world)), rules_(rules) {}

  // "", or what is wrong.
  std::string Run() {
    State first;
    first.stop = world_.stops ? StopAt::kWaits : StopAt::kNever;
    Add(first);
    for (size_t i = 0; i < states_.size(); ++i) {
      const State state = states_[i];
      from_ = i;
      can_move_ = false;
      Thread(state);
      for (size_t c = 0; c < world_.callers.size(); ++c) Call(state, c);
      Network(state);
      Stop(state);
      if (!wrong_.empty()) return wrong_;
      if (!can_move_ && !IsGood(state)) return "stuck: " + Text(state);
    }
    return HopelessState();
  }

  size_t num_states() const { return states_.size(); }

 private:
  struct Move {
    size_t from;
    size_t to;
  };

  void Add(const State& state) {
    const auto [it, is_new] = index_.try_emplace(state, states_.size());
    if (is_new) states_.push_back(state);
    can_move_ = true;
    if (states_.size() > 1) moves_.push_back({.from = from_, .to = it->second});
  }

  bool IsCallerDone(const State& state) const {
    for (size_t c = 0; c < world_.callers.size(); ++c) {
      if (state.callers[c].at != CallerAt::kDone) return false;
    }
    return true;
  }

  // Where it may end: a failure has been told, or everything has been sent, received and
  // acknowledged, and the thread has ended if it was to.
  bool IsGood(const State& state) const {
    if (state.has_failed) return state.thread == ThreadAt::kEnd;
    if (!IsCallerDone(state) || state.num_commands > 0) return false;
    if (!world_.naps_end) return true;  // what nobody waits for may stay for the end of the nap
    if (world_.stops) return state.thread == ThreadAt::kEnd;
    return !state.is_outstanding && !state.is_ack_due;
  }

  // A state from which no good one can be reached any more: somebody waits for ever, perhaps with
  // others going round in circles.
  std::string HopelessState() const {
    // Moves by where they lead, then backwards from the good ones.
    std::vector<size_t> first_move(states_.size() + 1);
    for (const Move& move : moves_) ++first_move[move.to + 1];
    std::partial_sum(first_move.begin(), first_move.end(), first_move.begin());
    std::vector<size_t> sources(moves_.size());
    std::vector<size_t> end = first_move;
    for (const Move& move : moves_) sources[end[move.to]++] = move.from;
    std::vector<bool> has_hope(states_.size());
    std::vector<size_t> open;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (IsGood(states_[i])) open.push_back(i);
    }
    while (!open.empty()) {
      const size_t i = open.back();
      open.pop_back();
      if (has_hope[i]) continue;
      has_hope[i] = true;
      for (size_t m = first_move[i]; m < first_move[i + 1]; ++m) open.push_back(sources[m]);
    }
    const auto bad = std::find(has_hope.begin(), has_hope.end(), false);
    if (bad == has_hope.end()) return "";
    return "hopeless: " + Text(states_[static_cast<size_t>(bad - has_hope.begin())]);
  }

  static std::string Text(const State& s) {
    std::string text = "thread at " + std::to_string(static_cast<int>(s.thread)) + ", state " +
                       std::to_string(static_cast<int>(s.seen)) + ", commands " +
                       std::to_string(s.num_commands) + ", ack due " +
                       std::to_string(s.is_ack_due) + ", callers at";
    for (const CallerState& c : s.callers) {
      text.append(" ").append(std::to_string(static_cast<int>(c.at)));
    }
    return text;
  }

  // ---- What a round does ----

  void BeginRound(State& state) {
    if (++state.num_in_round > 1) wrong_ = "two rounds at once: " + Text(state);
  }

  static void EndRound(State& state) {
    --state.num_in_round;
    state.did_work = false;
    SendOne(state);
    if (state.num_ack_events > 0) {
      --state.num_ack_events;
      state.is_outstanding = false;
      state.did_work = true;
      SendOne(state);
    }
    if (state.num_answer_events > 0) {
      --state.num_answer_events;
      state.is_published = true;
      state.is_ack_due = true;
      state.did_work = true;
    }
  }

  static void SendOne(State& state) {
    if (state.num_commands == 0 || state.is_outstanding) return;
    --state.num_commands;
    state.is_outstanding = true;
    ++state.num_under_way;
    state.did_work = true;
  }

  // ---- The proxy thread ----

  void Thread(const State& state) {
    State next = state;
    switch (state.thread) {
      case ThreadAt::kStart:
        if (state.mutex != Mutex::kFree) return;
        next.mutex = Mutex::kThread;
        next.seen = Seen::kAwake;
        next.thread = rules_.bell_is_read_before_round ? ThreadAt::kReadBell : ThreadAt::kLook;
        return Add(next);
      case ThreadAt::kReadBell:
        next.is_rung = false;
        next.thread = rules_.bell_is_read_before_round ? ThreadAt::kLook : ThreadAt::kIdle;
        return Add(next);
      case ThreadAt::kLook:
        if (state.has_failed) return EndThread(next);
        BeginRound(next);
        next.thread = ThreadAt::kRound;
        return Add(next);
      case ThreadAt::kRound:
        EndRound(next);
        next.thread = ThreadAt::kAfterRound;
        return Add(next);
      case ThreadAt::kAfterRound:
        if (state.stop >= StopAt::kRings && !state.did_work && state.num_commands == 0 &&
            !state.is_outstanding && !state.is_ack_due) {
          return EndThread(next);
        }
        next.thread = rules_.bell_is_read_before_round == state.did_work ? ThreadAt::kReadBell
                                                                         : ThreadAt::kIdle;
        if (!rules_.bell_is_read_before_round) {
          next.thread = state.did_work ? ThreadAt::kLook : ThreadAt::kReadBell;
        }
        return Add(next);
      case ThreadAt::kIdle:
        next.thread = ThreadAt::kUnlock;
        next.pause = state.num_helpers > 0 ? Seen::kNaps : Seen::kSleeps;
        if (next.pause == Seen::kSleeps) {  // PrepareToSleep
          next.is_ack_due = false;
          next.is_armed = state.num_ack_events + state.num_answer_events == 0;
          if (!next.is_armed) {
            next.thread = rules_.bell_is_read_before_round ? ThreadAt::kReadBell : ThreadAt::kLook;
          }
        }
        return Add(next);
      case ThreadAt::kUnlock:
        next.seen = state.pause;
        next.mutex = Mutex::kFree;
        next.thread = ThreadAt::kPaused;
        return Add(next);
      case ThreadAt::kPaused: {
        // Sleeps end by themselves, too, but nobody shall depend on that.
        const bool ends = (state.seen == Seen::kNaps && world_.naps_end) ||
                          (state.stop == StopAt::kDone && rules_.stopping_thread_naps);
        if (!state.is_rung && !ends) return;
        next.thread = ThreadAt::kWantsMutex;
        return Add(next);
      }
      case ThreadAt::kWantsMutex:
        next.thread_waits = true;
        next.num_overtaken = 0;
        next.thread = ThreadAt::kLock;
        return Add(next);
      case ThreadAt::kLock:
        if (state.mutex != Mutex::kFree) return;
        next.mutex = Mutex::kThread;
        next.thread_waits = false;
        next.num_overtaken = 0;
        next.seen = Seen::kAwake;
        next.thread = rules_.bell_is_read_before_round ? ThreadAt::kReadBell : ThreadAt::kLook;
        return Add(next);
      case ThreadAt::kEnd:
        return;
    }
  }

  void EndThread(State& next) {
    next.thread = ThreadAt::kEnd;
    next.seen = Seen::kAbsent;
    next.mutex = Mutex::kFree;
    Add(next);
  }

  // ---- A thread that pushes, kicks and helps ----

  void Call(const State& state, size_t index) {
    State next = state;
    CallerState& caller = next.callers[index];
    const Caller& program = world_.callers[index];
    const auto go = [&](CallerAt at) {
      caller.at = at;
      Add(next);
    };
    const CallerAt after_try = caller.is_kick ? CallerAt::kRing : CallerAt::kReady;
    switch (caller.at) {
      case CallerAt::kNext:
        if (caller.num_pushed < program.num_pushes) {
          ++caller.num_pushed;
          ++next.num_commands;
          caller.is_kick = true;
          return go(CallerAt::kLook);
        }
        if (!program.helps || caller.has_helped) return go(CallerAt::kDone);
        caller.has_helped = true;
        caller.is_kick = false;
        ++next.num_helpers;
        return go(CallerAt::kReady);
      case CallerAt::kReady:
        if (state.is_published || state.has_failed || caller.num_rounds == kHelpRounds) {
          caller.leaves_work = !state.is_published;
          return go(rules_.leaving_rings_after_count ? CallerAt::kLeave : CallerAt::kLeaveRing);
        }
        ++caller.num_rounds;
        return go(CallerAt::kLook);
      case CallerAt::kLook:
        return go(state.thread_waits && rules_.helpers_keep_off ? after_try : CallerAt::kTryLock);
      case CallerAt::kTryLock:
        if (rules_.help_takes_mutex) {
          if (state.mutex != Mutex::kFree) return go(after_try);
          next.mutex = Mutex::kCaller;
        }
        if (state.seen == Seen::kAbsent || state.has_failed ||
            (caller.is_kick && state.num_commands > kInlineCommands)) {
          Unlock(next);
          return go(after_try);
        }
        if (state.thread == ThreadAt::kEnd) wrong_ = "a round after the end: " + Text(state);
        if (state.thread_waits && ++next.num_overtaken > world_.callers.size()) {
          wrong_ = "the thread starves: " + Text(state);
        }
        BeginRound(next);
        return go(CallerAt::kRound);
      case CallerAt::kRound:
        EndRound(next);
        caller.at = CallerAt::kAfterRound;
        if (world_.helper_fails) {
          State failed = next;
          failed.has_failed = true;
          failed.is_rung |= rules_.failing_helper_rings;
          Add(failed);
        }
        if (state.seen == Seen::kSleeps && next.is_ack_due && rules_.rings_for_receives) {
          next.is_rung = true;
        }
        return Add(next);
      case CallerAt::kAfterRound: {
        const bool is_all_sent = state.num_commands == 0 && !state.has_failed;
        Unlock(next);
        return go(caller.is_kick && is_all_sent ? CallerAt::kNext : after_try);
      }
      case CallerAt::kRing:
        next.is_rung |= rules_.kick_rings;
        return go(CallerAt::kNext);
      case CallerAt::kLeave:
        --next.num_helpers;
        return go(rules_.leaving_rings_after_count ? CallerAt::kLeaveRing : CallerAt::kAsleep);
      case CallerAt::kLeaveRing:
        next.is_rung |= caller.leaves_work && rules_.leaving_rings;
        return go(rules_.leaving_rings_after_count ? CallerAt::kAsleep : CallerAt::kLeave);
      case CallerAt::kAsleep:  // who publishes the answer wakes it
        if (state.is_published || state.has_failed) go(CallerAt::kNext);
        return;
      case CallerAt::kDone:
        return;
    }
  }

  void Unlock(State& next) const {
    if (rules_.help_takes_mutex) next.mutex = Mutex::kFree;
  }

  // ---- The network and Stop ----

  void Network(const State& state) {
    if (state.num_under_way > 0) {
      State next = state;
      --next.num_under_way;
      ++next.num_ack_events;
      Add(next);
    }
    const bool was_asked = state.num_under_way + state.num_ack_events > 0 || !state.is_outstanding;
    if (!state.has_answered && was_asked && HasSent(state)) {
      State next = state;
      next.has_answered = true;
      ++next.num_answer_events;
      Add(next);
    }
    // A thread of the transport's sees events that nobody has polled before it.
    if (state.is_armed && state.num_ack_events + state.num_answer_events > 0) {
      State next = state;
      next.is_armed = false;
      next.is_rung = true;
      Add(next);
    }
  }

  bool HasSent(const State& state) const {
    int num_pushed = 0;
    for (const CallerState& caller : state.callers) num_pushed += caller.num_pushed;
    return num_pushed > state.num_commands;
  }

  void Stop(const State& state) {
    State next = state;
    switch (state.stop) {
      case StopAt::kNever:
      case StopAt::kDone:
        return;
      case StopAt::kWaits:
        if (!IsCallerDone(state)) return;
        next.stop = StopAt::kRings;
        return Add(next);
      case StopAt::kRings:
        next.is_rung |= rules_.stop_rings;
        // Once it is stopping, the thread's sleeps are short.
        next.stop = rules_.stop_rings ? StopAt::kDone : StopAt::kRings;
        if (rules_.stop_rings) Add(next);
        return;
    }
  }

  const World world_;
  const Rules rules_;
  std::unordered_map<State, size_t, StateHash> index_;
  std::vector<State> states_;
  std::vector<Move> moves_;
  size_t from_ = 0;
  bool can_move_ = false;
  std::string wrong_;
};

const Caller kPusher{.num_pushes = 1};
const Caller kHelper{.num_pushes = 1, .helps = true};
const Caller kWaiter{.helps = true};

// Naps end at any time, sleeps by the bell only.
const World kTwoHelpers{.callers = {kHelper, kWaiter}};
const World kPusherAndHelper{.callers = {kPusher, kHelper}};
const World kTwoPushes{.callers = {{.num_pushes = 2}}};
const World kStopped{.callers = {kHelper, kPusher}, .stops = true};
const World kFailing{.callers = {kHelper}, .helper_fails = true};
// Nobody waits for the end of a nap where one thread helps.
const World kPrompt{.callers = {kHelper}, .naps_end = false};

std::string Explore(const World& world, const Rules& rules) { return Search(world, rules).Run(); }

TEST(ProgressModel, loses_no_wake_up_in_any_interleaving) {
  for (const World& world :
       {kTwoHelpers, kPusherAndHelper, kTwoPushes, kStopped, kFailing, kPrompt}) {
    Search search(world, Rules());
    EXPECT_EQ(search.Run(), "");
    EXPECT_GT(search.num_states(), 100u);
  }
}

// What the search finds wrong if `rules` is broken, without the way there.
std::string WrongIn(const World& world, const Rules& rules) {
  const std::string wrong = Explore(world, rules);
  return wrong.substr(0, wrong.find(':'));
}

// The search finds what each rule is for.
TEST(ProgressModel, a_kick_that_does_not_ring_loses_a_command) {
  EXPECT_EQ(WrongIn(kTwoPushes, {.kick_rings = false}), "stuck");
}

TEST(ProgressModel, a_bell_read_after_the_round_loses_a_ring) {
  EXPECT_EQ(WrongIn(kTwoPushes, {.bell_is_read_before_round = false}), "stuck");
}

TEST(ProgressModel, a_helper_that_goes_to_sleep_must_ring) {
  EXPECT_EQ(WrongIn(kPrompt, {.leaving_rings = false}), "stuck");
}

TEST(ProgressModel, a_helper_must_not_ring_while_it_still_counts) {
  EXPECT_EQ(WrongIn(kPrompt, {.leaving_rings_after_count = false}), "stuck");
}

TEST(ProgressModel, an_acknowledgement_left_to_a_sleeping_thread_must_be_rung_for) {
  EXPECT_EQ(WrongIn(kPusherAndHelper, {.rings_for_receives = false}), "stuck");
}

TEST(ProgressModel, two_rounds_at_once_without_the_mutex) {
  EXPECT_EQ(WrongIn(kPusherAndHelper, {.help_takes_mutex = false}), "two rounds at once");
}

TEST(ProgressModel, helpers_that_do_not_keep_off_starve_the_thread) {
  EXPECT_EQ(WrongIn(kTwoHelpers, {.helpers_keep_off = false}), "the thread starves");
}

TEST(ProgressModel, a_helper_that_fails_must_ring) {
  EXPECT_EQ(WrongIn(kFailing, {.failing_helper_rings = false}), "stuck");
}

TEST(ProgressModel, a_stop_that_does_not_ring_waits_for_ever) {
  EXPECT_EQ(WrongIn(kStopped, {.stop_rings = false}), "stuck");
}

TEST(ProgressModel, a_stopping_thread_that_sleeps_misses_that_its_last_message_has_left) {
  EXPECT_EQ(WrongIn(kStopped, {.stopping_thread_naps = false}), "stuck");
}

}  // namespace
}  // namespace jax_ep
