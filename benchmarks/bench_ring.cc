// What a command costs: the ring alone (CPU producers on one side, a consumer on the other) and the
// whole proxy thread over a transport that does nothing. Prints one JSON object.
//
//   bench_ring [seconds per measurement, default 1]
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/null_transport.h"
#include "proxy/command_ring.h"
#include "proxy/proxy.h"

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kRingSlots = 4096;
constexpr int kRepeats = 5;  // the median is reported

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

double CpuSeconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// A waiter that gives its core away after a while: with fewer free cores than threads the figures
// then still say what the ring costs, not what the scheduler does.
class Waiter {
 public:
  void Wait() {
    if (++num_waits_ % kSpins == 0) {
      std::this_thread::yield();
    } else {
      Pause();
    }
  }

 private:
  static constexpr int kSpins = 256;
  int num_waits_ = 0;
};

struct RingRate {
  double mcmd_per_s = 0;  // wall clock
  double mcmd_per_s_of_cpu_time =
      0;  // by the busiest thread's CPU time: what free cores would give
};

// One ring with `num_producers` threads and this one as the consumer.
RingRate MeasureRing(int num_producers, double seconds) {
  std::unique_ptr<CommandRing> ring = std::move(CommandRing::Create(kRingSlots).value());
  std::atomic<bool> stop{false};
  std::vector<double> cpu_seconds(static_cast<size_t>(num_producers) + 1);
  std::vector<std::jthread> producers;
  const PackedCommand command =
      *TryPack(Command{.op = Op::kWrite, .dst_rank = 1, .length_bytes = 4096});
  for (int i = 0; i < num_producers; ++i) {
    producers.emplace_back([&, i] {
      const RingView view = ring->view();
      Waiter waiter;
      while (!stop.load(std::memory_order_relaxed)) {
        if (!view.TryPush(command)) waiter.Wait();
      }
      cpu_seconds[static_cast<size_t>(i)] = CpuSeconds(CLOCK_THREAD_CPUTIME_ID);
    });
  }
  std::array<PackedCommand, 64> batch;
  uint64_t num_popped = 0;
  Waiter waiter;
  const double cpu_before = CpuSeconds(CLOCK_THREAD_CPUTIME_ID);
  const auto begin = Clock::now();
  std::chrono::duration<double> elapsed{};
  while (elapsed.count() < seconds) {
    for (int i = 0; i < 1000; ++i) {
      const size_t count = ring->PopBatch(batch);
      if (count == 0) waiter.Wait();
      num_popped += count;
    }
    elapsed = Clock::now() - begin;
  }
  stop.store(true, std::memory_order_relaxed);
  cpu_seconds.back() = CpuSeconds(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
  producers.clear();
  const double num = static_cast<double>(num_popped) * 1e-6;
  return RingRate{
      .mcmd_per_s = num / elapsed.count(),
      .mcmd_per_s_of_cpu_time = num / *std::max_element(cpu_seconds.begin(), cpu_seconds.end())};
}

// Push and pop on one thread: the instructions without the traffic between cores.
double RingSelfNs(double seconds) {
  std::unique_ptr<CommandRing> ring = std::move(CommandRing::Create(kRingSlots).value());
  const RingView view = ring->view();
  const PackedCommand command = *TryPack(Command{.op = Op::kSignal, .dst_rank = 1});
  std::array<PackedCommand, 64> batch;
  uint64_t num_popped = 0;
  const auto begin = Clock::now();
  std::chrono::duration<double> elapsed{};
  while (elapsed.count() < seconds) {
    for (int i = 0; i < 100; ++i) {
      for (size_t j = 0; j < batch.size(); ++j) {
        if (!view.TryPush(command)) std::abort();
      }
      num_popped += ring->PopBatch(batch);
    }
    elapsed = Clock::now() - begin;
  }
  return elapsed.count() / static_cast<double>(num_popped) * 1e9;
}

struct ProxyCost {
  double mcmd_per_s = 0;
  double cpu_ns_per_command = 0;  // of the proxy thread
};

// The whole way of a command: push (this thread), pop, window, post, poll, acknowledge (the proxy
// thread). CPU time of the proxy thread is the process's minus this thread's.
ProxyCost MeasureProxy(double seconds) {
  FailureLatch failure;
  std::atomic<uint64_t> num_posted{0};
  std::vector<std::byte> heap(1 << 20);
  std::vector<std::atomic<uint64_t>> flags(2 * kNumChannels);
  ProxyOptions options{.group_name = "bench"};
  options.transport_factory = [&](const TransportOptions&) -> Result<std::unique_ptr<Transport>> {
    return std::unique_ptr<Transport>(std::make_unique<NullTransport>(&num_posted));
  };
  std::unique_ptr<Proxy> proxy = std::move(Proxy::Create(options, &failure).value());
  const auto add = [&](Proxy& to, uint32_t rank) {
    return to
        .AddEndpoint(EndpointOptions{
            .rank = rank,
            .num_ranks = 2,
            .peers = {1 - rank},
            .heap = heap,
            .flag = [&](Channel channel,
                        uint32_t) { return &flags[static_cast<uint32_t>(channel)]; },
            .ring_slots = kRingSlots})
        .value();
  };
  const int endpoint = add(*proxy, 0);
  // Only for its blob: the null transport answers in its place.
  std::unique_ptr<Proxy> other = std::move(Proxy::Create(options, &failure).value());
  const int other_endpoint = add(*other, 1);
  Status status = proxy->Connect(endpoint, 1, other->LocalBlob(other_endpoint),
                                 Deadline::After(std::chrono::seconds(1)));
  if (status.ok()) status = proxy->Start();
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(1);
  }
  const auto proxy_cpu = [] {
    return CpuSeconds(CLOCK_PROCESS_CPUTIME_ID) - CpuSeconds(CLOCK_THREAD_CPUTIME_ID);
  };
  const PackedCommand command = *TryPack(Command{.op = Op::kWrite,
                                                 .dst_rank = 1,
                                                 .length_bytes = 4096,
                                                 .channel = Channel::kDispatch,
                                                 .epoch = 1});
  const RingView ring = proxy->ring(endpoint);
  const auto push_for = [&](double limit) {
    const auto begin = Clock::now();
    std::chrono::duration<double> elapsed{};
    Waiter waiter;
    while (elapsed.count() < limit && !failure.failed()) {
      for (int i = 0; i < 256; ++i) {
        if (!ring.TryPush(command)) waiter.Wait();
      }
      proxy->Kick();
      elapsed = Clock::now() - begin;
    }
    return elapsed.count();
  };
  push_for(seconds / 10);  // warm-up
  const uint64_t posted_before = num_posted.load(std::memory_order_relaxed);
  const double cpu_before = proxy_cpu();
  const double elapsed = push_for(seconds);
  const double num = static_cast<double>(num_posted.load(std::memory_order_relaxed)) -
                     static_cast<double>(posted_before);
  const double cpu_used = proxy_cpu() - cpu_before;
  proxy->Stop();
  if (failure.failed()) {
    std::fprintf(stderr, "%s\n", failure.status().message().c_str());
    std::exit(1);
  }
  return ProxyCost{.mcmd_per_s = num / elapsed * 1e-6, .cpu_ns_per_command = cpu_used / num * 1e9};
}

int Main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  if (!(seconds > 0)) {
    std::fprintf(stderr, "usage: bench_ring [seconds > 0]\n");
    return 2;
  }
  std::vector<double> one, one_cpu, two, two_cpu, self, rate, cpu;
  for (int i = 0; i < kRepeats; ++i) {
    const RingRate one_producer = MeasureRing(1, seconds);
    one.push_back(one_producer.mcmd_per_s);
    one_cpu.push_back(one_producer.mcmd_per_s_of_cpu_time);
    const RingRate two_producers = MeasureRing(2, seconds);
    two.push_back(two_producers.mcmd_per_s);
    two_cpu.push_back(two_producers.mcmd_per_s_of_cpu_time);
    self.push_back(RingSelfNs(seconds / 4));
    const ProxyCost cost = MeasureProxy(seconds);
    rate.push_back(cost.mcmd_per_s);
    cpu.push_back(cost.cpu_ns_per_command);
  }
  double load = 0;
  getloadavg(&load, 1);
  std::printf(
      "{\"benchmark\": \"ring\", \"cores\": %u, \"load_average\": %.1f, \"repeats\": %d, "
      "\"seconds\": %g,\n \"ring_1_producer\": {\"mcmd_per_s\": %.1f, "
      "\"mcmd_per_s_of_cpu_time\": %.1f},\n \"ring_2_producers\": {\"mcmd_per_s\": %.1f, "
      "\"mcmd_per_s_of_cpu_time\": %.1f},\n \"ring_push_and_pop_on_one_thread_ns\": %.1f,\n "
      "\"proxy_null_transport\": {\"mcmd_per_s\": %.2f, \"cpu_ns_per_command\": %.1f}}\n",
      std::thread::hardware_concurrency(), load, kRepeats, seconds, Median(one), Median(one_cpu),
      Median(two), Median(two_cpu), Median(self), Median(rate), Median(cpu));
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) { return jax_ep::Main(argc, argv); }
