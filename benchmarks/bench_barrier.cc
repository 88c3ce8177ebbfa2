// A futex barrier between processes: the yardstick for an LL round trip on a machine with fewer
// cores than processes. Prints one JSON line with the median of the requested rounds.
//   bench_barrier [processes = 4] [rounds = 1000]
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

// Central barrier: the last to arrive starts the next generation and wakes the others.
struct Barrier {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> generation;

  void Wait(uint32_t num_processes) {
    const uint32_t mine = generation.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_processes) {
      arrived.store(0, std::memory_order_relaxed);
      generation.fetch_add(1, std::memory_order_release);
      syscall(SYS_futex, &generation, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
      return;
    }
    while (generation.load(std::memory_order_acquire) == mine) {
      syscall(SYS_futex, &generation, FUTEX_WAIT, mine, nullptr, nullptr, 0);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  const auto num_processes = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 4);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1000;
  void* memory =
      mmap(nullptr, sizeof(Barrier), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || num_processes < 1 || rounds < 1) return 1;
  auto* barrier = static_cast<Barrier*>(memory);  // zero bytes are a fresh barrier
  bool is_first = true;
  for (uint32_t i = 1; i < num_processes; ++i) {
    if (fork() == 0) {
      is_first = false;
      break;
    }
  }
  std::vector<double> microseconds;
  for (int round = 0; round < rounds + 100; ++round) {  // 100 to warm up
    const auto start = std::chrono::steady_clock::now();
    barrier->Wait(num_processes);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    if (round >= 100) microseconds.push_back(took.count());
  }
  if (!is_first) return 0;
  while (wait(nullptr) > 0) {
  }
  std::sort(microseconds.begin(), microseconds.end());
  std::printf("{\"processes\": %u, \"rounds\": %d, \"p50_us\": %.2f, \"p99_us\": %.2f}\n",
              num_processes, rounds, microseconds[microseconds.size() / 2],
              microseconds[microseconds.size() * 99 / 100]);
  return 0;
}
