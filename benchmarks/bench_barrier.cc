// A futex barrier between processes: the yardstick for an LL round trip on a machine with fewer
// cores than processes. Prints one JSON line with the median of the requested rounds.
//   bench_barrier [processes = 4] [rounds = 1000]
// Process i of n runs on the core that `python -m jax_ep launch --bind-to core` gives it.
#include <linux/futex.h>
#include <sched.h>
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

void BindToCore(uint32_t index, uint32_t num_processes) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  cpu_set_t mine;
  CPU_ZERO(&mine);
  CPU_SET(cores[index * cores.size() / num_processes], &mine);
  sched_setaffinity(0, sizeof(mine), &mine);
}

}  // namespace

int main(int argc, char** argv) {
  const auto num_processes = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 4);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1000;
  void* memory =
      mmap(nullptr, sizeof(Barrier), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || num_processes < 1 || rounds < 1) return 1;
  auto* barrier = static_cast<Barrier*>(memory);  // zero bytes are a fresh barrier
  uint32_t index = 0;
  for (uint32_t i = 1; i < num_processes && index == 0; ++i) {
    if (fork() == 0) index = i;
  }
  BindToCore(index, num_processes);
  std::vector<double> microseconds;
  for (int round = 0; round < rounds + 100; ++round) {  // 100 to warm up
    const auto start = std::chrono::steady_clock::now();
    barrier->Wait(num_processes);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    if (round >= 100) microseconds.push_back(took.count());
  }
  if (index != 0) return 0;
  while (wait(nullptr) > 0) {
  }
  std::sort(microseconds.begin(), microseconds.end());
  std::printf("{\"processes\": %u, \"rounds\": %d, \"p50_us\": %.2f, \"p99_us\": %.2f}\n",
              num_processes, rounds, microseconds[microseconds.size() / 2],
              microseconds[microseconds.size() * 99 / 100]);
  return 0;
}
