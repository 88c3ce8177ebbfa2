// What a monitor does when its own thread fails.
#include "xla_ffi/monitor.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "proxy/base/shared_memory.h"
#include "tests/proxy/no_memory.h"

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kTimeout{20};

template <typename Ready>
void WaitFor(Ready&& ready) {
  const Deadline deadline = Deadline::After(kTimeout);
  while (!ready()) {
    ASSERT_FALSE(deadline.expired());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Nobody failed, and nobody is blamed.
TEST(Monitor, tells_its_mates_that_the_processes_agree_anew) {
  SharedMemory mate = std::move(*SharedMemory::Create(sizeof(ControlBlock), /*shareable=*/false));
  auto* const control = reinterpret_cast<ControlBlock*>(mate.bytes().data());
  const auto monitor_of = [&](FailureLatch* failure, bool is_own) {
    MonitorOptions options{.group_name = "test", .peer_timeout = kTimeout};
    if (is_own) {
      options.own.push_back(control);
    } else {
      options.peers.push_back(
          {.rank = 1, .pid = static_cast<uint64_t>(getpid()), .control = control});
    }
    return std::move(*Monitor::Create(std::move(options), failure));
  };
  FailureLatch of_mate, failure;
  const std::unique_ptr<Monitor> monitor_of_mate = monitor_of(&of_mate, /*is_own=*/true);
  const std::unique_ptr<Monitor> monitor = monitor_of(&failure, /*is_own=*/false);
  of_mate.Set(FailedPrecondition("this process called agree"), FailureLatch::kAgreement);
  WaitFor([&] { return failure.failed(); });
  EXPECT_EQ(failure.message(),
            "group test: rank 1 says that the processes of the group agree anew on who takes part; "
            "call group.agree in this process, too");
  EXPECT_EQ(failure.blamed_rank(), FailureLatch::kAgreement);
  // Also if it leaves at once.
  EXPECT_TRUE(monitor_of_mate->ShowAgreement());
  EXPECT_FALSE(monitor_of_mate->ShowAgreement());
  monitor_of_mate->Leave(Departure::kClosed);
  EXPECT_EQ(control->departure.load(std::memory_order_relaxed), Departure::kAgrees);
}

TEST(Monitor, knows_whose_process_has_ended) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    pause();
    _exit(0);
  }
  SharedMemory mate = std::move(*SharedMemory::Create(sizeof(ControlBlock), /*shareable=*/false));
  auto* const control = reinterpret_cast<ControlBlock*>(mate.bytes().data());
  MonitorOptions options{.group_name = "test", .peer_timeout = kTimeout};
  for (const pid_t pid : {child, getpid()}) {
    options.peers.push_back({.rank = 1, .pid = static_cast<uint64_t>(pid), .control = control});
  }
  FailureLatch failure;
  const std::unique_ptr<Monitor> monitor = std::move(*Monitor::Create(options, &failure));
  EXPECT_FALSE(monitor->HasEnded(static_cast<uint64_t>(child)));
  ASSERT_EQ(kill(child, SIGKILL), 0);
  WaitFor([&] { return monitor->HasEnded(static_cast<uint64_t>(child)); });  // not reaped yet
  EXPECT_FALSE(monitor->HasEnded(static_cast<uint64_t>(getpid())));
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(monitor->HasEnded(static_cast<uint64_t>(child)));
}

// It said "rank 1 failed first: rank 2 closed it".
TEST(Monitor, passes_on_who_left_and_not_who_missed_it) {
  SharedMemory mate = std::move(*SharedMemory::Create(sizeof(ControlBlock), /*shareable=*/false));
  auto* const control = reinterpret_cast<ControlBlock*>(mate.bytes().data());
  const auto told = [&](int64_t blamed, const std::string& text) {
    control->blamed_plus_1 = static_cast<uint64_t>(blamed) + 1;
    std::memcpy(control->failure_text, text.c_str(), text.size() + 1);
    control->state.store(MemberState::kFailed, std::memory_order_release);
    MonitorOptions options{.group_name = "test", .peer_timeout = kTimeout};
    options.peers.push_back(
        {.rank = 1, .pid = static_cast<uint64_t>(getpid()), .control = control});
    FailureLatch failure;
    const std::unique_ptr<Monitor> monitor =
        std::move(*Monitor::Create(std::move(options), &failure));
    WaitFor([&] { return failure.failed(); });
    EXPECT_EQ(failure.blamed_rank(), blamed);
    return std::string(failure.message());
  };
  EXPECT_EQ(told(2, "rank 2 closed it: its program ended"),
            "group test: rank 2 closed it: its program ended");
  EXPECT_EQ(told(2, "rank 2 (pid 7) is gone"), "group test: rank 2 (pid 7) is gone");
  EXPECT_EQ(told(1, "rank 1 has no memory"),
            "group test: rank 1 failed first: rank 1 has no memory");
  EXPECT_EQ(told(2, "rank 1 missed it"), "group test: rank 1 failed first: rank 1 missed it");
}

// It ended the process. Its mates must hear of it all the same, and not take it for dead.
TEST(Monitor, that_runs_out_of_memory_fails_the_group_and_shows_its_mates) {
  SharedMemory own = std::move(*SharedMemory::Create(sizeof(ControlBlock), /*shareable=*/false));
  SharedMemory mate = std::move(*SharedMemory::Create(sizeof(ControlBlock), /*shareable=*/false));
  auto* const control = reinterpret_cast<ControlBlock*>(own.bytes().data());
  MonitorOptions options{.group_name = "test", .peer_timeout = kTimeout};
  options.own.push_back(control);
  options.peers.push_back({.rank = 1,
                           .pid = static_cast<uint64_t>(getpid()),
                           .control = reinterpret_cast<ControlBlock*>(mate.bytes().data())});
  options.check = [] { num_failing_allocations = 3; };  // of the next round's looks and texts
  FailureLatch failure;
  Result<std::unique_ptr<Monitor>> monitor = Monitor::Create(std::move(options), &failure);
  ASSERT_TRUE(monitor.ok()) << monitor.status().message();
  WaitFor([&] { return failure.failed(); });
  EXPECT_EQ(failure.status().message(),
            "group test: the monitor met an exception (out of memory?)");
  WaitFor([&] { return control->state.load(std::memory_order_acquire) == MemberState::kFailed; });
  EXPECT_EQ(std::string(control->failure_text), "the monitor met an exception (out of memory?)");
  const uint64_t beat = control->heartbeat.load(std::memory_order_relaxed);
  WaitFor([&] { return control->heartbeat.load(std::memory_order_relaxed) > beat + 1; });
}

}  // namespace
}  // namespace jax_ep
