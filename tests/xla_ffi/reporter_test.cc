// The socket that `python -m jax_ep report` asks.
#include "xla_ffi/reporter.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "proxy/base/deadline.h"
#include "proxy/base/descriptor.h"

namespace jax_ep {
namespace {

// Less than `python -m jax_ep report` waits for.
constexpr std::chrono::milliseconds kSoon{1500};
// More than are answered at a time.
constexpr int kMany = 100;

Descriptor Connect() {
  Descriptor peer(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::string name = "jax_ep/report/" + std::to_string(getpid());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  EXPECT_EQ(connect(peer.fd(), reinterpret_cast<const sockaddr*>(&address), length), 0)
      << strerror(errno);
  return peer;
}

std::string ReadAll(const Descriptor& peer) {
  std::string all;
  std::array<char, 1 << 16> part;
  for (ssize_t length; (length = read(peer.fd(), part.data(), part.size())) > 0;) {
    all.append(part.data(), static_cast<size_t>(length));
  }
  return all;
}

std::string Ask(std::string_view request) {
  const Descriptor peer = Connect();
  EXPECT_EQ(write(peer.fd(), request.data(), request.size()), static_cast<ssize_t>(request.size()));
  shutdown(peer.fd(), SHUT_WR);
  return ReadAll(peer);
}

// Each idle one took 0.2 s before anybody else was answered.
TEST(Reporter, idle_connections_hold_up_nobody) {
  const auto listed = ListForReports({.page = [] { return std::string("page"); }, .counters = {}});
  std::vector<Descriptor> idle;
  for (int i = 0; i < kMany; ++i) idle.push_back(Connect());
  const Deadline soon = Deadline::After(kSoon);
  EXPECT_EQ(Ask(""), "page");
  EXPECT_FALSE(soon.expired());
  EXPECT_EQ(Ask(kCountersRequest), R"({"version": 1, "groups": [], "uncounted": 0})");
  EXPECT_NE(Ask("?").find("error"), std::string::npos);
  for (const Descriptor& peer : idle) EXPECT_EQ(ReadAll(peer), "page");
}

// Who did not read a long page took a second.
TEST(Reporter, who_does_not_read_holds_up_nobody) {
  const std::string page(8 << 20, 'p');
  const auto listed = ListForReports({.page = [&] { return page; }, .counters = {}});
  std::vector<Descriptor> idle;
  for (int i = 0; i < 5; ++i) {
    idle.push_back(Connect());
    shutdown(idle.back().fd(), SHUT_WR);
  }
  const Deadline soon = Deadline::After(kSoon);
  EXPECT_EQ(Ask(""), page);
  EXPECT_FALSE(soon.expired());
}

// The reporter's thread asked for the connection again and again, on a core of its own.
TEST(Reporter, who_comes_when_no_descriptor_is_left_waits_for_one) {
  const auto listed = ListForReports({.page = [] { return std::string("page"); }, .counters = {}});
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{std::min<rlim_t>(before.rlim_cur, 128), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<Descriptor> taken;
  while (taken.empty() || taken.back().fd() >= 0) taken.emplace_back(eventfd(0, EFD_CLOEXEC));
  const bool has_some = taken.size() > 1;
  taken.resize(has_some ? taken.size() - 2 : 0);  // one did not come, one is for the question
  const Descriptor peer = Connect();
  shutdown(peer.fd(), SHUT_WR);
  const std::clock_t began = std::clock();  // all threads' time on cores
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const double busy_s = static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
  pollfd answer{.fd = peer.fd(), .events = POLLIN, .revents = 0};
  const int is_answered = poll(&answer, 1, 0);
  taken.clear();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(has_some) << "this process has more than 128 descriptors";
  EXPECT_EQ(is_answered, 0);
  EXPECT_LT(busy_s, 0.1);
  const Deadline soon = Deadline::After(kSoon);
  EXPECT_EQ(ReadAll(peer), "page");
  EXPECT_FALSE(soon.expired());
}

// Its copy of the connection kept the stream open.
TEST(Reporter, an_answer_ends_while_a_forked_child_lives) {
  std::atomic<bool> is_asked{false};
  std::atomic<bool> may_answer{false};
  const auto listed = ListForReports({.page =
                                          [&] {
                                            is_asked = true;
                                            while (!may_answer) std::this_thread::yield();
                                            return std::string("page");
                                          },
                                      .counters = {}});
  const Descriptor peer = Connect();
  shutdown(peer.fd(), SHUT_WR);
  while (!is_asked) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // the end of the test, if it waits for this one
    while (true) pause();
  }
  may_answer = true;
  const Deadline soon = Deadline::After(kSoon);
  EXPECT_EQ(ReadAll(peer), "page");
  EXPECT_FALSE(soon.expired());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace jax_ep
