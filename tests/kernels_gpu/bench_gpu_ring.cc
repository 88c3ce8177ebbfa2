// The GPU end of the command ring: how many commands per second warps push into the rings of real
// proxies over a transport that does nothing, by rings and proxy threads; and how long a SIGNAL
// takes from the GPU through its proxy, the loopback transport and the receiver's proxy back to the
// GPU, by the GPU's clock.
//
//   bench_gpu_ring OUT.json
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "benchmarks/null_transport.h"
#include "proxy/command_ring.h"
#include "proxy/proxy.h"
#include "tests/kernels_gpu/gpu_team.h"
#include "tests/kernels_gpu/ring_kernels.h"

namespace jax_ep::testing {
namespace {

using namespace gpu;

constexpr uint32_t kRingSlots = 4096;
constexpr uint32_t kRepeats = 7;
constexpr uint32_t kRoundTrips = 2000;

void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::abort();
}

std::byte* Pinned(uint64_t bytes) {
  void* memory = nullptr;
  CheckCuda(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "pinned");
  std::memset(memory, 0, bytes);
  return static_cast<std::byte*>(memory);
}
template <typename T>
T* OnDevice(uint64_t bytes) {
  void* memory = nullptr;
  CheckCuda(cudaMalloc(&memory, bytes), "malloc");
  CheckCuda(cudaMemset(memory, 0, bytes), "memset");
  return static_cast<T*>(memory);
}

// A rank with the given rings, as WarpPush and WaitSignals need it.
struct RankOnDevice {
  DeviceRank device{};
  RankStatus* status = reinterpret_cast<RankStatus*>(Pinned(sizeof(RankStatus)));
  DeviceNetwork table{};

  RankOnDevice(uint32_t rank, uint32_t num_ranks, std::byte* stage,
               const std::vector<std::byte*>& rings) {
    GroupShape shape;
    shape.num_ranks = num_ranks;
    shape.node_size = 1;
    shape.num_experts = num_ranks;
    shape.max_tokens = 1;
    device.shape = shape;
    device.layout = GpuHeapLayout::Make(shape);
    device.rank = device.node_begin = rank;
    device.timeout_ns = 20'000'000'000;
    device.status = status;
    device.peers[0].heap = OnDevice<std::byte>(device.layout.total_bytes);
    table.layout = NetLayout::Make(shape);
    table.num_rings = static_cast<uint32_t>(rings.size());
    table.ring_slots = kRingSlots;
    table.ring_slots_log2 = static_cast<uint32_t>(__builtin_ctz(kRingSlots));
    table.stages[0] = stage;
    for (size_t i = 0; i < rings.size(); ++i) {
      table.slots[i] = reinterpret_cast<uint64_t*>(rings[i] + sizeof(RingMemory));
      table.tails[i] = reinterpret_cast<uint64_t*>(rings[i] + offsetof(RingMemory, tail));
    }
    auto* network = OnDevice<DeviceNetwork>(sizeof(DeviceNetwork));
    CheckCuda(cudaMemcpy(network, &table, sizeof(table), cudaMemcpyHostToDevice), "table");
    device.network = network;
  }
};

// `num_rings` rings, dealt to `num_threads` proxies.
double MeasureRate(uint32_t num_rings, uint32_t num_threads) {
  FailureLatch failure;
  std::vector<std::atomic<uint64_t>> num_posted(num_rings);
  std::vector<std::byte> heap(1 << 20);
  std::vector<std::atomic<uint64_t>> flags(kNumChannels);
  std::vector<std::unique_ptr<Proxy>> proxies, others;
  std::vector<std::byte*> rings(num_rings);
  uint32_t next = 0;
  for (uint32_t t = 0; t < num_threads; ++t) {
    ProxyOptions options{.group_name = "bench"};
    options.transport_factory = [&](const TransportOptions&) -> Result<std::unique_ptr<Transport>> {
      return std::unique_ptr<Transport>(
          std::make_unique<NullTransport>(&num_posted[next % num_rings]));
    };
    proxies.push_back(std::move(Proxy::Create(options, &failure).value()));
    others.push_back(std::move(Proxy::Create(options, &failure).value()));
    // Commands to node n go to ring n % num_rings: ring of node 1 + i is (1 + i) % num_rings.
    for (uint32_t i = t; i < num_rings; i += num_threads) {
      next = i;
      const uint32_t ring = (1 + i) % num_rings;
      rings[ring] = Pinned(CommandRing::BytesFor(kRingSlots));
      const auto endpoint_of = [&](Proxy& proxy, uint32_t rank, uint32_t peer, bool is_polled) {
        EndpointOptions endpoint{
            .rank = rank,
            .num_ranks = num_rings + 1,
            .peers = {peer},
            .heap = heap,
            .flag = [&](Channel channel,
                        uint32_t) { return &flags[static_cast<uint32_t>(channel)]; },
            .ring_slots = kRingSlots};
        if (is_polled) endpoint.ring_memory = {rings[ring], CommandRing::BytesFor(kRingSlots)};
        return proxy.AddEndpoint(std::move(endpoint)).value();
      };
      const int mine = endpoint_of(*proxies[t], 0, 1 + i, true);
      const int other = endpoint_of(*others[t], 1 + i, 0, false);
      Must(proxies[t]->Connect(mine, 1 + i, others[t]->LocalBlob(other),
                               Deadline::After(std::chrono::seconds(5))));
    }
  }
  for (const auto& proxy : proxies) Must(proxy->Start());
  RankOnDevice rank(0, num_rings + 1, Pinned(1 << 20), rings);
  const uint32_t num_warps = std::max(num_rings, 8u) * 2;
  const uint32_t batches = 400'000 / num_warps;
  std::vector<double> rates;
  cudaEvent_t begin, end;
  CheckCuda(cudaEventCreate(&begin), "event");
  CheckCuda(cudaEventCreate(&end), "event");
  for (uint32_t i = 0; i <= kRepeats; ++i) {
    CheckCuda(cudaEventRecord(begin), "event");
    LaunchPushBatches(rank.device, batches, num_warps);
    CheckCuda(cudaEventRecord(end), "event");
    CheckCuda(cudaEventSynchronize(end), "push");
    float ms = 0;
    CheckCuda(cudaEventElapsedTime(&ms, begin, end), "time");
    const double commands = 32.0 * batches * num_warps;
    if (i > 0) rates.push_back(commands / ms * 1e-3);  // the first warms up
  }
  for (const auto& proxy : proxies) proxy->Stop();
  if (failure.failed()) Must(failure.status());
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

struct RoundTrips {
  std::vector<double> us;  // sorted
  double At(double share) const {
    return us[static_cast<size_t>(share * static_cast<double>(us.size() - 1))];
  }
};

// Two ranks on this device, a proxy thread each, loopback between them.
RoundTrips MeasureRoundTrips() {
  FailureLatch failure;
  std::vector<std::unique_ptr<RankOnDevice>> ranks;
  std::vector<std::unique_ptr<Proxy>> proxies;
  uint64_t* signals = nullptr;  // of rank 1 after the loop
  const NetLayout layout = [] {
    GroupShape shape;
    shape.num_ranks = 2;
    shape.node_size = 1;
    shape.num_experts = 2;
    shape.max_tokens = 1;
    return NetLayout::Make(shape);
  }();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    std::byte* stage = Pinned(layout.total_bytes);
    signals = reinterpret_cast<uint64_t*>(Pinned(NumSignals(2) * sizeof(uint64_t)));
    std::byte* ring = Pinned(CommandRing::BytesFor(kRingSlots));
    proxies.push_back(std::move(
        Proxy::Create({.group_name = "bench", .transport = "loopback"}, &failure).value()));
    Must(proxies.back()
             ->AddEndpoint({.rank = rank,
                            .num_ranks = 2,
                            .peers = {1 - rank},
                            .heap = {stage, layout.total_bytes},
                            .flag =
                                [signals](Channel channel, uint32_t source) {
                                  return reinterpret_cast<std::atomic<uint64_t>*>(
                                      signals + SignalIndex(2, channel, source));
                                },
                            .ring_slots = kRingSlots,
                            .ring_memory = {ring, CommandRing::BytesFor(kRingSlots)}})
             .status());
    ranks.push_back(std::make_unique<RankOnDevice>(rank, 2, stage, std::vector{ring}));
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    Must(proxies[rank]->Connect(0, 1 - rank, proxies[1 - rank]->LocalBlob(0),
                                Deadline::After(std::chrono::seconds(5))));
  }
  for (const auto& proxy : proxies) Must(proxy->Start());
  auto* times = OnDevice<uint64_t>(kRoundTrips * sizeof(uint64_t));
  const uint64_t* flag = signals + SignalIndex(2, Channel::kDispatch, 0);
  for (uint32_t run = 0; run < 2; ++run) {  // the first warms up
    LaunchSignalAndWait(ranks[0]->device, flag, 1 + run * kRoundTrips, kRoundTrips, times);
    CheckCuda(cudaDeviceSynchronize(), "signals");
  }
  for (const auto& proxy : proxies) proxy->Stop();
  if (failure.failed()) Must(failure.status());
  std::vector<uint64_t> ns(kRoundTrips);
  CheckCuda(cudaMemcpy(ns.data(), times, ns.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost),
            "times");
  RoundTrips result;
  for (const uint64_t value : ns) result.us.push_back(static_cast<double>(value) * 1e-3);
  std::sort(result.us.begin(), result.us.end());
  return result;
}

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: bench_gpu_ring OUT.json\n");
    return 2;
  }
  std::FILE* out = std::fopen(argv[1], "w");
  if (out == nullptr) {
    std::perror(argv[1]);
    return 1;
  }
  std::fprintf(out, "{\"ring\": [\n");
  bool is_first = true;
  for (const uint32_t threads : {1u, 2u, 4u}) {
    for (const uint32_t rings : {1u, 4u, 8u, 16u, 32u}) {
      if (rings < threads) continue;
      const double rate = MeasureRate(rings, threads);
      std::printf("%u rings %u threads: %.1f Mcmd/s\n", rings, threads, rate);
      std::fprintf(out, "%s {\"rings\": %u, \"threads\": %u, \"mcmd_per_s\": %.2f}",
                   is_first ? "" : ",\n", rings, threads, rate);
      is_first = false;
    }
  }
  const RoundTrips trips = MeasureRoundTrips();
  std::printf("signal, GPU to proxies to GPU: median %.2f us, p10 %.2f, p90 %.2f, p99 %.2f\n",
              trips.At(0.5), trips.At(0.1), trips.At(0.9), trips.At(0.99));
  std::fprintf(out,
               "],\n \"signal_us\": {\"p1\": %.2f, \"p10\": %.2f, \"p50\": %.2f, "
               "\"p90\": %.2f, \"p99\": %.2f}}\n",
               trips.At(0.01), trips.At(0.1), trips.At(0.5), trips.At(0.9), trips.At(0.99));
  std::fclose(out);
  return 0;
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) { return jax_ep::testing::Main(argc, argv); }
