// put+signal through the whole host path (ring, proxy thread, transport, sequencer, flag) between
// two processes. Its bound is raw_ofi.cc.
//
//   bench_wire TRANSPORT WINDOW_MESSAGES WINDOW_BYTES [FAULTY [DIVISOR]]
//
// FAULTY: spec of the faulty wrapper, "" for none. DIVISOR: that many times fewer messages.
// The environment counts (JAX_EP_CALLER_PROGRESS, JAX_EP_OFI_PROVIDER, JAX_EP_SOCKET_IFNAME, ...).
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "benchmarks/two_processes.h"
#include "benchmarks/wire_cases.h"
#include "proxy/abi/command.h"
#include "proxy/base/doorbell.h"
#include "proxy/base/env.h"
#include "proxy/base/shared_memory.h"
#include "proxy/proxy.h"

namespace {

using namespace jax_ep;  // NOLINT: a program, not a library
using two_processes::Die;
using two_processes::Now;

constexpr size_t kFlagsOffset = sizeof(Doorbell);  // the heap: doorbell, flags, data
constexpr size_t kDataOffset = 4096;
constexpr std::chrono::seconds kLimit{60};  // of one wait

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) Die("usage: bench_wire TRANSPORT WINDOW_MESSAGES WINDOW_BYTES [FAULTY [DIVISOR]]");
  two_processes::Sides sides = two_processes::Fork();
  const uint32_t rank = sides.is_sender ? 1 : 0;
  const uint32_t peer = 1 - rank;
  auto memory = SharedMemory::Create(kDataOffset + wire_cases::kHeapBytes, /*shareable=*/true);
  if (!memory.ok()) Die(memory.status().message());
  std::byte* const heap = memory->bytes().data();
  std::fill(heap + kDataOffset, heap + memory->bytes().size(), std::byte{1});
  const auto flag = [heap](Channel channel, uint32_t source) {
    return reinterpret_cast<std::atomic<uint64_t>*>(heap + kFlagsOffset) +
           2 * static_cast<uint32_t>(channel) + source;
  };
  Doorbell& doorbell = *reinterpret_cast<Doorbell*>(heap);
  FailureLatch failure;
  const Result<Env> env = Env::Read();
  if (!env.ok()) Die(env.status().message());
  auto proxy = Proxy::Create(ProxyOptions{.group_name = "wire",
                                          .transport = argv[1],
                                          .faulty_spec = argc > 4 ? argv[4] : "",
                                          .window_messages = static_cast<uint32_t>(atol(argv[2])),
                                          .window_bytes = static_cast<uint64_t>(atol(argv[3])),
                                          .caller_progress = env->caller_progress != 0},
                             &failure);
  if (!proxy.ok()) Die(proxy.status().message());
  const auto endpoint = (*proxy)->AddEndpoint(EndpointOptions{.rank = rank,
                                                              .num_ranks = 2,
                                                              .peers = {peer},
                                                              .heap = memory->bytes(),
                                                              .heap_export = memory->Export(),
                                                              .flag = flag,
                                                              .doorbell = &doorbell});
  if (!endpoint.ok()) Die(endpoint.status().message());
  const std::string blob = sides.pipe.Exchange((*proxy)->LocalBlob(0));
  const Status connected =
      (*proxy)->Connect(0, peer, blob, Deadline::After(std::chrono::seconds(20)));
  if (!connected.ok()) Die(connected.message());
  if (const Status started = (*proxy)->Start(); !started.ok()) Die(started.message());
  RingView ring = (*proxy)->ring(0);
  uint64_t sent = 0;  // epoch of kDispatch
  uint64_t quiets = 0;
  const auto check = [&failure] {
    if (failure.failed()) Die(failure.status().message());
    std::this_thread::yield();
  };
  // Waits as kernels do: by helping, then asleep.
  const auto wait_until = [&](auto&& ready) {
    const WaitResult result =
        WaitUntil(doorbell, ready, Deadline::After(kLimit), failure, proxy->get());
    if (result == WaitResult::kFailed) Die(failure.status().message());
    if (result == WaitResult::kTimeout) Die("a wait timed out");
  };
  const auto push = [&](const Command& command) {
    while (!ring.TryPush(*TryPack(command))) {
      check();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    (*proxy)->Kick();
  };
  const auto put = [&](size_t offset, size_t size) {
    ++sent;
    push(Command{.op = Op::kWriteSignal,
                 .dst_rank = peer,
                 .length_bytes = size,
                 .local_offset = kDataOffset + offset,
                 .remote_offset = kDataOffset + offset,
                 .channel = Channel::kDispatch,
                 .epoch = sent});
  };
  const auto arrived = [&] {
    return flag(Channel::kDispatch, peer)->load(std::memory_order_acquire);
  };
  uint64_t expected = 0;
  const long divisor = argc > 5 ? std::max(atol(argv[5]), 1L) : 1;
  for (wire_cases::Case c : wire_cases::kCases) {
    c.messages = std::max(c.messages / divisor, 1L);
    sides.pipe.Barrier(check);
    const double begin = Now();
    if (c.is_latency) {
      std::vector<double> times;
      for (long i = 0; i < c.messages; ++i) {
        const double start = Now();
        if (sides.is_sender) put(0, c.size);
        ++expected;
        wait_until([&] { return arrived() >= expected; });
        if (!sides.is_sender) put(0, c.size);
        times.push_back(Now() - start);
      }
      if (sides.is_sender) two_processes::PrintLatency("jax_ep", c.size, times);
    } else if (sides.is_sender) {
      const size_t slots = wire_cases::kHeapBytes / 2 / c.size;
      for (long i = 0; i < c.messages; ++i) put(static_cast<size_t>(i) % slots * c.size, c.size);
      // All of it has been acknowledged by the receiver when the quiet completes.
      push(Command{.op = Op::kQuiet, .epoch = ++quiets});
      wait_until(
          [&] { return (*proxy)->quiet_flag(0)->load(std::memory_order_acquire) >= quiets; });
      two_processes::PrintBandwidth("jax_ep", c.size, c.messages, Now() - begin);
    } else {
      expected += static_cast<uint64_t>(c.messages);
      wait_until([&] { return arrived() >= expected; });
    }
  }
  sides.pipe.Barrier(check);
  if (sides.is_sender) {
    for (const FlowStats& flow : (*proxy)->Stats()) {
      std::printf("jax_ep flow channel=%d messages=%lu stalls=%lu retries=%lu reorders=%lu\n",
                  static_cast<int>(flow.channel), flow.messages, flow.stalls, flow.retries,
                  flow.reorders);
    }
  }
  (*proxy)->Stop();
  if (!sides.is_sender) wait(nullptr);
  std::fflush(stdout);
  std::_Exit(0);
}
