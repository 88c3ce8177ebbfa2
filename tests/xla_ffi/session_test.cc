// The life of a session from several threads: create, call, look, fail, close, in one process and
// as several, whose sessions live side by side here and exchange their blobs.
#include "xla_ffi/session.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/proxy/no_threads.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kTokens = 4;

// One group: `ranks_per_process` ranks of each team in each of `num_processes` sessions.
class Group {
 public:
  struct Sizes {
    uint32_t num_teams = 1;
    uint32_t num_processes = 1;
    uint32_t ranks_per_process = 1;
    uint32_t node_size = 0;  // 0: one node
    seconds timeout{30};
    milliseconds peer_timeout{10'000};
    int threads_per_rank = 1;
  };

  static SessionOptions Options(const Sizes& sizes, uint32_t process) {
    const uint32_t num_ranks = sizes.num_processes * sizes.ranks_per_process;
    const uint32_t node_size = sizes.node_size == 0 ? num_ranks : sizes.node_size;
    SessionOptions options{.session_id = 1,
                           .name = "test",
                           .shape = {.num_ranks = num_ranks,
                                     .node_size = node_size,
                                     .num_experts = num_ranks,
                                     .max_tokens = kTokens},
                           .team_processes = {},
                           .local_ranks = {},
                           .host_ranks = {},
                           .process_index = process,
                           .transport = node_size == num_ranks     ? "none"
                                        : sizes.num_processes == 1 ? "loopback"
                                                                   : "shm",
                           .timeout = sizes.timeout,
                           .peer_timeout = sizes.peer_timeout,
                           .threads_per_rank = sizes.threads_per_rank};
    options.team_processes.resize(sizes.num_teams);
    for (uint32_t place = 0; place < sizes.num_teams * num_ranks; ++place) {
      const uint32_t team = place / num_ranks;
      const uint32_t rank = place % num_ranks;
      options.team_processes[team].push_back(rank / sizes.ranks_per_process);
      options.host_ranks.emplace_back(team, rank);
      if (rank / sizes.ranks_per_process == process) {
        options.local_ranks.push_back({.device_ordinal = place, .team = team, .rank = rank});
      }
    }
    return options;
  }

  explicit Group(const Sizes& sizes) {
    std::map<uint32_t, std::string> blobs;
    for (uint32_t process = 0; process < sizes.num_processes; ++process) {
      Result<std::unique_ptr<Session>> session = Session::Create(Options(sizes, process));
      EXPECT_TRUE(session.ok()) << session.status().message();
      sessions.push_back(std::move(*session));
      blobs[process] = sessions.back()->LocalBlob();
    }
    for (const auto& session : sessions) Expect(session->Connect(blobs));
    for (const auto& session : sessions) Expect(session->Start());
    OnAll([](Session& session) { Expect(session.Barrier(seconds(30))); });
  }

  static void Expect(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

  template <typename Body>
  void OnAll(Body&& body) {
    std::vector<std::thread> threads;
    for (const auto& session : sessions) threads.emplace_back([&] { body(*session); });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::shared_ptr<Session>> sessions;
};

// A plan: the smallest call in which every rank waits for every other. Lives until it has ended.
struct PlanCall {
  explicit PlanCall(uint32_t num_ranks)
      : send_counts(num_ranks), recv_counts(num_ranks), recv_src(num_ranks * kTokens) {}

  Status Run(Rank& rank) {
    has_begun.store(true, std::memory_order_release);
    has_begun.notify_all();
    return RunPlan(rank, {.num_tokens = kTokens,
                          .recv_rows = static_cast<int64_t>(recv_src.size()),
                          .topk_idx = topk_idx,
                          .out = {.group_sizes = group_sizes,
                                  .group_counts = group_counts,
                                  .send_slot = send_slot,
                                  .recv_src = recv_src,
                                  .send_counts = send_counts,
                                  .recv_counts = recv_counts,
                                  .num_dropped = &num_dropped,
                                  .overflow = &overflow}});
  }
  // As a handler does it.
  void Enqueue(Session& session, int64_t device) {
    const Lifecycle::Lease lease = session.Enter();
    if (!lease) return End(session.lifecycle().Refusal("test", session.FailureText()));
    session.FindExecutor(device)->Enqueue(
        Call{.key = {.run_id = 1, .site = 1},
             .operation = "plan",
             .run = [this](Rank& rank) { return Run(rank); },
             .complete = [this](Status status) { End(std::move(status)); }});
  }
  void End(Status status) {
    outcome = std::move(status);
    ended.store(true, std::memory_order_release);
    ended.notify_all();
  }
  Status Wait() {
    ended.wait(false, std::memory_order_acquire);
    return outcome;
  }

  std::array<int32_t, kTokens> topk_idx{};
  std::array<int32_t, 1> group_sizes{}, group_counts{};
  std::array<int32_t, kTokens> send_slot{};
  std::vector<int32_t> send_counts, recv_counts, recv_src;
  int32_t num_dropped = 0, overflow = 0;
  Status outcome;
  std::atomic<bool> has_begun{false}, ended{false};
};

// One call on every local rank of `session`; the first error.
Status CallOnce(Session& session) {
  const uint32_t num_ranks = session.options().shape.num_ranks;
  std::vector<std::unique_ptr<PlanCall>> calls;
  for (const LocalRank& local : session.options().local_ranks) {
    calls.push_back(std::make_unique<PlanCall>(num_ranks));
    calls.back()->Enqueue(session, local.device_ordinal);
  }
  Status first;
  for (const auto& call : calls) {
    Status status = call->Wait();
    if (first.ok()) first = std::move(status);
  }
  return first;
}

size_t NumThreads() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                                           std::filesystem::directory_iterator{}));
}

size_t NumSharedMappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:jax_ep") != std::string::npos;
  }
  return count;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Session, any_thread_may_look_and_call_while_others_close) {
  for (const Group::Sizes sizes : {Group::Sizes{.num_processes = 1, .ranks_per_process = 3},
                                   Group::Sizes{.num_processes = 3, .ranks_per_process = 1},
                                   Group::Sizes{.num_processes = 2, .node_size = 1}}) {
    for (int round = 0; round < 5; ++round) {
      Group group(sizes);
      std::atomic<bool> stop{false};
      std::atomic<int> looks{0};
      std::vector<std::thread> lookers;
      for (int i = 0; i < 2; ++i) {
        lookers.emplace_back([&] {
          while (!stop.load()) {
            for (const auto& session : group.sessions) {
              EXPECT_TRUE(Contains(session->DumpState(), "group test"));
              (void)session->flow_stats();
              (void)session->heap_bytes();
              (void)session->FailureText();
              EXPECT_TRUE(session->totals().ok());
            }
            looks.fetch_add(1);
            looks.notify_all();
          }
        });
      }
      group.OnAll([](Session& session) {
        for (int call = 0; call < 5; ++call) Group::Expect(CallOnce(session));
      });
      // Each is closed twice at once, and called: a call ends well or is refused.
      group.OnAll([](Session& session) {
        std::thread second([&] { session.Close(); });
        std::thread caller([&] { (void)CallOnce(session); });
        session.Close();
        EXPECT_EQ(session.heap_bytes(), 0u);
        second.join();
        caller.join();
      });
      const int seen = looks.load();
      looks.wait(seen);  // a closed session is looked at, too
      stop.store(true);
      for (std::thread& looker : lookers) looker.join();
      for (const auto& session : group.sessions) {
        EXPECT_TRUE(Contains(session->DumpState(), "closed")) << session->DumpState();
      }
    }
  }
}

TEST(Session, close_frees_everything_although_the_object_lives) {
  std::thread([] {}).join();  // TSan starts a thread of its own beside the first
  const size_t threads = NumThreads();
  const size_t mappings = NumSharedMappings();
  Group group({.num_processes = 2, .ranks_per_process = 2, .node_size = 2, .threads_per_rank = 2});
  group.OnAll([](Session& session) { Group::Expect(CallOnce(session)); });
  EXPECT_GT(NumThreads(), threads);
  EXPECT_GT(NumSharedMappings(), mappings);
  group.OnAll([](Session& session) { session.Close(); });
  // A thread that was joined stays in the kernel's list for a moment.
  const Deadline deadline = Deadline::After(std::chrono::seconds(10));
  while (NumThreads() != threads && !deadline.expired()) std::this_thread::yield();
  EXPECT_EQ(NumThreads(), threads);
  EXPECT_EQ(NumSharedMappings(), mappings);
  for (const auto& session : group.sessions) {
    EXPECT_EQ(session->FailureText(), "");
    ASSERT_EQ(session->totals()->size(), 2u);
    EXPECT_EQ(session->totals()->front().plans, 1u);
    EXPECT_GT(session->flow_stats().size(), 0u);
    EXPECT_FALSE(CallOnce(*session).ok());
  }
}

TEST(Session, a_rank_that_closes_late_is_no_failure) {
  for (const uint32_t node_size : {0u, 1u}) {
    Group group({.num_processes = 2, .node_size = node_size, .peer_timeout = milliseconds(400)});
    group.OnAll([](Session& session) { Group::Expect(CallOnce(session)); });
    std::atomic<bool> first_closed{false};
    std::thread first([&] {
      group.sessions[0]->Close();
      first_closed.store(true);
    });
    std::this_thread::sleep_for(milliseconds(1200));  // three times peer_timeout
    EXPECT_FALSE(first_closed.load());
    EXPECT_EQ(group.sessions[1]->FailureText(), "");
    group.sessions[1]->Close();
    first.join();
    for (const auto& session : group.sessions) EXPECT_EQ(session->FailureText(), "");
  }
}

TEST(Session, a_call_that_needs_a_rank_which_has_left_is_told_so_at_once) {
  for (const uint32_t node_size : {0u, 1u}) {
    for (const Departure departure : {Departure::kClosed, Departure::kProgramEnded}) {
      Group group({.num_processes = 2, .node_size = node_size});
      group.OnAll([](Session& session) { Group::Expect(CallOnce(session)); });
      std::thread first([&] { group.sessions[1]->Close(departure); });
      const Status status = CallOnce(*group.sessions[0]);
      const std::string expected = departure == Departure::kProgramEnded
                                       ? "group test: rank 1 closed it: its program ended"
                                       : "group test: rank 1 closed the group while rank 0 still";
      EXPECT_TRUE(Contains(status.message(), expected)) << status.message();
      EXPECT_TRUE(group.sessions[0]->FailureText().starts_with(expected));
      EXPECT_EQ(group.sessions[0]->failure().blamed_rank(), 1);
      const Status failure = group.sessions[0]->failure().status();
      EXPECT_EQ(group.sessions[0]->WhyClosed().message(), failure.message());
      EXPECT_EQ(group.sessions[0]->WhyClosed().code(), failure.code());
      first.join();  // the failure ends its wait
      EXPECT_EQ(group.sessions[1]->FailureText(), "");
    }
  }
}

// It waited for timeout, and was left out by whoever had agreed.
TEST(Session, a_call_that_needs_a_rank_which_agrees_is_told_so_at_once) {
  for (const uint32_t node_size : {0u, 1u, 2u}) {
    const uint32_t ranks_per_process = std::max(node_size, 1u);
    Group group(
        {.num_processes = 2, .ranks_per_process = ranks_per_process, .node_size = node_size});
    group.OnAll([](Session& session) { Group::Expect(CallOnce(session)); });
    group.sessions[1]->BeginToAgree();
    const Status status = CallOnce(*group.sessions[0]);
    EXPECT_TRUE(Contains(status.message(), " says that the processes of the group agree anew"))
        << status.message();
    EXPECT_EQ(group.sessions[0]->failure().blamed_rank(), FailureLatch::kAgreement);
    group.OnAll([](Session& session) { session.Close(); });
  }
}

// The others' call is under way when one of them, which has taken its part in it, agrees.
TEST(Session, a_call_that_a_rank_which_agrees_has_taken_part_in_ends) {
  for (const uint32_t node_size : {0u, 1u}) {
    Group group({.num_processes = 3, .node_size = node_size});
    group.OnAll([](Session& session) { Group::Expect(CallOnce(session)); });
    PlanCall first(3), second(3);
    first.Enqueue(*group.sessions[0], /*device=*/0);
    second.Enqueue(*group.sessions[1], /*device=*/1);
    group.sessions[0]->BeginToAgree();
    group.sessions[1]->BeginToAgree();
    std::this_thread::sleep_for(milliseconds(300));  // rounds of the monitors
    Group::Expect(CallOnce(*group.sessions[2]));
    Group::Expect(first.Wait());
    Group::Expect(second.Wait());
    group.OnAll([](Session& session) { session.Close(); });
    for (const auto& session : group.sessions) EXPECT_EQ(session->FailureText(), "");
  }
}

TEST(Session, a_call_on_some_ranks_of_a_process_ends_with_its_close) {
  Group group({.ranks_per_process = 2, .peer_timeout = milliseconds(300)});
  PlanCall call(2);
  call.Enqueue(*group.sessions[0], /*device=*/1);
  group.sessions[0]->Close();
  const Status status = call.Wait();
  EXPECT_TRUE(Contains(status.message(), "was closed while a call")) << status.message();
  EXPECT_TRUE(Contains(group.sessions[0]->FailureText(), "rank 1: 1 calls"));
}

// It was told to create a new group, as if it had come after the close.
TEST(Session, a_call_that_its_own_process_cuts_is_told_so) {
  Group group({.num_processes = 2});
  group.OnAll([](Session& session) { Group::Expect(CallOnce(session)); });
  std::thread closer([&] { group.sessions[0]->Close(); });  // waits for the other process
  while (!Contains(group.sessions[0]->Report(), "closing")) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  const Status status = CallOnce(*group.sessions[0]);
  EXPECT_EQ(status.message().find("group test was closed by this process while this step ran"), 0u)
      << status.message();
  group.sessions[1]->Close();
  closer.join();
  EXPECT_EQ(group.sessions[0]->WhyClosed().message(), status.message());
  EXPECT_TRUE(Contains(CallOnce(*group.sessions[0]).message(), "is closed; create a new one"));
}

// What comes between the last look and the refusal is taken by some ranks only, and cannot end.
TEST(Session, a_call_that_races_with_close_does_not_hold_it_up) {
  for (int round = 0; round < 10; ++round) {
    Group group({.ranks_per_process = 2});
    Session& session = *group.sessions[0];
    std::atomic<int> num_calls{0};
    std::deque<PlanCall> calls;
    std::thread caller([&] {
      for (int i = 0; i < 100; ++i) {
        for (const int64_t device : {0, 1}) calls.emplace_back(2).Enqueue(session, device);
        num_calls.fetch_add(1);
        num_calls.notify_all();
      }
    });
    num_calls.wait(0);
    session.Close();
    caller.join();
    for (PlanCall& call : calls) (void)call.Wait();
    EXPECT_FALSE(Contains(session.FailureText(), "did not end within")) << session.FailureText();
  }
}

// By the control block to node-mates, by the proxy to other nodes.
TEST(Session, all_processes_blame_whom_the_first_to_fail_blames) {
  for (const uint32_t node_size : {4u, 2u, 1u}) {
    Group group({.num_processes = 4, .node_size = node_size});
    group.sessions[0]->failure().Set(Unavailable("group test: rank 3 is gone"), /*blamed=*/3);
    for (const auto& session : group.sessions) {
      const Deadline deadline = Deadline::After(seconds(20));
      while (!session->failure().failed() && !deadline.expired()) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      EXPECT_EQ(session->failure().blamed_rank(), 3) << session->FailureText();
      EXPECT_TRUE(Contains(session->FailureText(), "rank 3")) << session->FailureText();
    }
  }
}

// Two teams of the ranks 0 and 1: "rank 1" alone would be either.
TEST(Teams, are_named_with_a_rank_that_has_left) {
  for (const uint32_t node_size : {2u, 1u}) {
    Group group({.num_teams = 2, .num_processes = 2, .node_size = node_size});
    PlanCall call(2);
    call.Enqueue(*group.sessions[0], /*device=*/2);  // rank 0 of team 1
    // A group that has failed begins none.
    call.has_begun.wait(false);
    std::thread leaver([&] { group.sessions[1]->Close(); });
    const std::string message = call.Wait().message();
    EXPECT_TRUE(Contains(message, "rank 0 of team 1, plan epoch 1: ")) << message;
    EXPECT_TRUE(Contains(message, "group test: rank 1 of team 1 closed the group")) << message;
    group.sessions[0]->Close();
    leaver.join();
  }
}

TEST(Teams, are_named_with_a_rank_that_is_late) {
  Group group({.num_teams = 2, .ranks_per_process = 2, .timeout = seconds(1)});
  PlanCall call(2);
  call.Enqueue(*group.sessions[0], /*device=*/3);  // rank 1 of team 1
  const std::string message = call.Wait().message();
  EXPECT_TRUE(Contains(message, "rank 1 of team 1, plan epoch 1: ")) << message;
  EXPECT_TRUE(Contains(message, "waiting for rank 0 of team 1: ")) << message;
}

// The text travels through the shared memory of whichever team's ranks, and is of the same rank in
// each process.
TEST(Teams, are_named_once_by_all_who_pass_a_failure_on) {
  Group group({.num_teams = 2, .num_processes = 3});
  group.sessions[1]->failure().Set(Unavailable("group test: rank 1 of team 1, plan: broke"),
                                   RankOfTeam(1, 1));
  for (const uint32_t process : {0u, 2u}) {
    FailureLatch& failure = group.sessions[process]->failure();
    const Deadline deadline = Deadline::After(seconds(20));
    while (!failure.failed() && !deadline.expired()) std::this_thread::yield();
    const std::string message = group.sessions[process]->FailureText();
    EXPECT_TRUE(
        message == "group test: rank 1 of team 0 failed first: rank 1 of team 1, plan: broke" ||
        message == "group test: rank 1 of team 1 failed first: rank 1 of team 1, plan: broke")
        << message;
  }
}

// Killed after it has said what others need, before they have opened it.
TEST(Session, a_rank_that_died_before_it_was_connected_is_named) {
  for (const uint32_t node_size : {2u, 1u}) {  // its heap; its inbox
    const Group::Sizes sizes{.num_processes = 2, .node_size = node_size};
    std::array<int, 2> pipe_ends{};
    ASSERT_EQ(pipe(pipe_ends.data()), 0);
    const pid_t child = fork();
    if (child == 0) {
      const auto session = Session::Create(Group::Options(sizes, 1));
      const std::string blob = session.ok() ? (*session)->LocalBlob() : std::string();
      _exit(write(pipe_ends[1], blob.data(), blob.size()) > 0 ? 0 : 1);
    }
    close(pipe_ends[1]);
    std::string blob;
    std::array<char, 4096> part{};
    for (ssize_t got = 0; (got = read(pipe_ends[0], part.data(), part.size())) > 0;) {
      blob.append(part.data(), static_cast<size_t>(got));
    }
    close(pipe_ends[0]);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);

    Result<std::unique_ptr<Session>> session = Session::Create(Group::Options(sizes, 0));
    ASSERT_TRUE(session.ok()) << session.status().message();
    const Status connected = (*session)->Connect({{1, blob}});
    EXPECT_EQ(connected.code(), StatusCode::kUnavailable);
    const std::string& message = connected.message();
    EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
    EXPECT_NE(message.find("pid " + std::to_string(child) + " has ended"), std::string::npos)
        << message;
    // "group G: rank 1: ..." is what rank 1 says: readers, and the chaos tests, blamed nobody.
    EXPECT_EQ(message.find(": rank 1:"), std::string::npos) << message;
  }
}

TEST(Session, a_forked_child_touches_nothing) {
  Group group({.num_processes = 2});
  group.OnAll([](Session& session) { Group::Expect(CallOnce(session)); });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Session& session = *group.sessions[0];
    // It was told that the group is closed and to create a new one, which a child cannot.
    const Status told = session.lifecycle().Refusal("test", "");
    const bool is_refused =
        !session.Enter() && Contains(told.message(), "is a fork of the group's");
    const bool is_dumped = Contains(session.DumpState(), "group test: this process is a fork of");
    group.sessions[0]->Close();
    group.sessions.clear();  // the destructors of what the parent uses
    _exit(is_refused && is_dumped ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  group.OnAll([](Session& session) {
    Group::Expect(CallOnce(session));
    session.Close();
  });
}

TEST(Session, a_thread_that_cannot_start_is_an_error_and_leaves_nothing) {
  const size_t threads = NumThreads();
  Group::Sizes sizes{.ranks_per_process = 2, .node_size = 1, .threads_per_rank = 2};
  {
    NoThreads none;
    const auto session = Session::Create(Group::Options(sizes, 0));
    ASSERT_FALSE(session.ok());
    EXPECT_EQ(session.status().code(), StatusCode::kResourceExhausted);
    EXPECT_TRUE(Contains(session.status().message(), "could not start the thread"));
  }
  for (const uint32_t node_size : {1u, 2u}) {  // the proxy's is the first, or the watch's
    sizes.node_size = node_size;
    Result<std::unique_ptr<Session>> session = Session::Create(Group::Options(sizes, 0));
    ASSERT_TRUE(session.ok()) << session.status().message();
    Group::Expect((*session)->Connect({{0, (*session)->LocalBlob()}}));
    Status status;
    {
      NoThreads none;
      status = (*session)->Start();
    }
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.message();
    (*session)->Close();
    EXPECT_EQ(NumThreads(), threads);
  }
  Group again({.ranks_per_process = 2});
  Group::Expect(CallOnce(*again.sessions[0]));
}

TEST(Failures, are_passed_on_once_with_their_cause) {
  const std::string own = "group ep[4]#0: rank 1 (pid 7) is gone";
  const std::string shown = ShownFailure("ep[4]#0", own, 100);
  EXPECT_EQ(shown, "rank 1 (pid 7) is gone");
  const std::string second = FailedFirst("ep[4]#0", "rank 3", shown);
  EXPECT_EQ(second, "group ep[4]#0: rank 3 failed first: rank 1 (pid 7) is gone");
  const std::string third = FailedFirst("ep[4]#0", "rank 2", ShownFailure("ep[4]#0", second, 100));
  EXPECT_EQ(third, second);
  const std::string of_team = FailedFirst("g", "rank 3 of team 1", "it broke");
  EXPECT_EQ(of_team, "group g: rank 3 of team 1 failed first: it broke");
  EXPECT_EQ(FailedFirst("g", "rank 2 of team 0", ShownFailure("g", of_team, 100)), of_team);
  const std::string cut = ShownFailure("g", "group g: " + std::string(200, 'a') + "cause", 60);
  EXPECT_EQ(cut.size(), 60u);
  EXPECT_TRUE(cut.starts_with("aaa") && cut.ends_with("cause") && Contains(cut, "[...]")) << cut;
}

}  // namespace
}  // namespace jax_ep
