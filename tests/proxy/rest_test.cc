// Proxies without work rest: a group that nobody calls takes no core from those that compute.
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <thread>

#include "proxy/transport/registry.h"
#include "proxy/transport/waker.h"
#include "tests/proxy/proxy_world.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;

double ProcessorSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class ProxyAtRest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(All, ProxyAtRest, testing::Values("loopback", "shm", "ofi", "verbs"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(ProxyAtRest, takes_little_of_a_core) {
  for (const TransportInfo& info : ListTransports()) {
    if (info.name == GetParam() && !info.is_available) GTEST_SKIP() << info.reason;
  }
  WorldOptions options;
  options.proxy.transport = GetParam();
  options.num_ranks = 4;
  options.ranks_per_process = 2;
  ProxyWorld world(options);
  world.Start();
  Exchange(&world).Run(/*num_epochs=*/4);
  world.Barrier();
  std::this_thread::sleep_for(milliseconds(200));  // what follows a call has passed
  constexpr double kSeconds = 0.5;
  const double before = ProcessorSeconds();
  std::this_thread::sleep_for(std::chrono::duration<double>(kSeconds));
  // Of two proxies; where a network library cannot wake them, both nap 50 us between two looks.
  EXPECT_LT(ProcessorSeconds() - before, 0.4 * kSeconds);
  world.Stop();
}

// What a network library gives to wait for: descriptors behind one descriptor.
class Descriptors {
 public:
  Descriptors() : inner_(epoll_create1(EPOLL_CLOEXEC)) {
    for (int& fd : fds_) {
      fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
      epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
      epoll_ctl(inner_, EPOLL_CTL_ADD, fd, &event);
    }
  }
  ~Descriptors() {
    for (const int fd : fds_) close(fd);
    close(inner_);
  }
  int fd() const { return inner_; }
  void Write(int i) const {
    const uint64_t one = 1;
    EXPECT_EQ(write(fds_[i], &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }

 private:
  int inner_;
  int fds_[2];
};

class WakerOfDescriptors : public testing::Test {
 protected:
  // Whether the bell rings in that time after `act`.
  template <typename Act>
  bool RingsAfter(const Act& act, milliseconds limit) {
    const uint32_t before = bell.count.load();
    act();
    const auto end = std::chrono::steady_clock::now() + limit;
    while (bell.count.load() == before && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return bell.count.load() != before;
  }
  bool RingsOnceArmed(milliseconds limit) {
    return RingsAfter([this] { waker->Arm(); }, limit);
  }
  bool RingsOnceWritten(int i) {
    return RingsAfter([this, i] { descriptors.Write(i); }, kLong);
  }

  static constexpr milliseconds kLong{10'000};
  static constexpr milliseconds kShort{50};
  Doorbell bell{};
  Descriptors descriptors;
  std::unique_ptr<Waker> waker = std::move(Waker::Create(&bell, {descriptors.fd()}).value());
};

TEST_F(WakerOfDescriptors, rings_for_what_came_before_and_after_it_was_armed) {
  descriptors.Write(0);
  EXPECT_TRUE(RingsOnceArmed(kLong));
  EXPECT_FALSE(waker->is_armed());
  EXPECT_FALSE(RingsOnceArmed(kShort));
  EXPECT_TRUE(RingsOnceWritten(1));
  EXPECT_FALSE(waker->is_armed());
}

// libfabric before 1.18.1 leaves a descriptor of its own readable for good once a completion has
// come (its issue 8947).
TEST_F(WakerOfDescriptors, that_stay_readable_rings_once_for_each_event) {
  descriptors.Write(0);
  EXPECT_TRUE(RingsOnceArmed(kLong));
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(RingsOnceArmed(milliseconds(5))) << i;
    EXPECT_TRUE(RingsOnceWritten(i % 2)) << i;
  }
}

}  // namespace
}  // namespace jax_ep
