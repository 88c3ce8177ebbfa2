// ProxyWorld: the ranks of a small group with their heaps, flags and proxies, all in this process,
// so that a test can play every kernel. Also the one exchange that the protocol tests check.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "proxy/abi/command.h"
#include "proxy/base/doorbell.h"
#include "proxy/base/failure.h"
#include "proxy/base/shared_memory.h"
#include "proxy/proxy.h"

namespace jax_ep {

struct WorldOptions {
  uint32_t num_ranks = 2;
  TeamId team = {};
  uint32_t node_size = 1;
  uint32_t ranks_per_process = 64;
  bool splits_processes = false;  // each rank has a proxy of its own, as on GPUs
  uint32_t ll_slots = 16;
  uint64_t data_bytes = 64 << 10;  // per rank, behind the flags
  uint32_t ring_slots = 256;
  uint64_t first_epoch = 0;  // what all flags but those of barriers start at
  bool share_heaps = true;
  std::vector<std::shared_ptr<TraceTrack>> traces = {};  // by rank, or none
  ProxyOptions proxy{.group_name = "test",
                     .transport = "loopback",
                     .faulty_spec = "",
                     .peer_timeout = std::chrono::seconds(30),
                     .timeout = std::chrono::seconds(60)};
};

class ProxyWorld {
 public:
  static constexpr std::chrono::seconds kTimeout{60};  // of each wait

  explicit ProxyWorld(WorldOptions options) : options_(std::move(options)) {}

  // Everything up to Start. Call once; EXPECTs on the way.
  void Start() {
    for (uint32_t rank = 0; rank < options_.num_ranks; ++rank) AddRank(rank);
    for (uint32_t rank = 0; rank < options_.num_ranks; ++rank) {
      for (const uint32_t peer : PeersOf(rank)) {
        const Status status =
            proxy(rank).Connect(ranks_[rank].endpoint, peer, Blob(peer), Deadline::After(kTimeout));
        ASSERT_TRUE(status.ok()) << status.message();
      }
    }
    for (uint32_t process = 0; process < num_processes(); ++process) {
      const Status status = Proxy::StartAll(ProxiesOf(process));
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }

  void Stop() {
    for (uint32_t process = 0; process < num_processes(); ++process) StopProcess(process);
  }
  void StopProcess(uint32_t process) { Proxy::StopAll(ProxiesOf(process)); }

  uint32_t num_ranks() const { return options_.num_ranks; }
  uint32_t num_processes() const { return static_cast<uint32_t>(processes_.size()); }
  uint64_t first_epoch() const { return options_.first_epoch; }
  Proxy& proxy(uint32_t rank) {
    const Process& process = processes_[rank / options_.ranks_per_process];
    return *process.proxies[options_.splits_processes ? rank % options_.ranks_per_process : 0];
  }
  FailureLatch& failure(uint32_t rank) {
    return *processes_[rank / options_.ranks_per_process].latch;
  }
  int endpoint(uint32_t rank) const { return ranks_[rank].endpoint; }
  std::string Blob(uint32_t rank) { return proxy(rank).LocalBlob(ranks_[rank].endpoint); }

  bool IsPeer(uint32_t a, uint32_t b) const {
    return a / options_.node_size != b / options_.node_size;
  }
  std::vector<uint32_t> PeersOf(uint32_t rank) const {
    std::vector<uint32_t> peers;
    for (uint32_t peer = 0; peer < options_.num_ranks; ++peer) {
      if (IsPeer(rank, peer)) peers.push_back(peer);
    }
    return peers;
  }

  // The heap: one cache line of doorbell, the flags, then data_bytes of data.
  static constexpr uint64_t kFlagsOffset = sizeof(Doorbell);
  uint64_t data_offset() const {
    return kFlagsOffset + (kNumChannels * options_.num_ranks * sizeof(uint64_t) + 63) / 64 * 64;
  }
  std::span<std::byte> heap(uint32_t rank) { return ranks_[rank].heap.bytes(); }
  std::span<std::byte> data(uint32_t rank) { return heap(rank).subspan(data_offset()); }
  std::atomic<uint64_t>* flag(uint32_t rank, Channel channel, uint32_t source) {
    auto* flags = reinterpret_cast<std::atomic<uint64_t>*>(heap(rank).data() + kFlagsOffset);
    return flags + static_cast<uint32_t>(channel) * options_.num_ranks + source;
  }
  Doorbell& doorbell(uint32_t rank) { return *reinterpret_cast<Doorbell*>(heap(rank).data()); }

  // Pushes as a kernel does: waits, bounded, while the ring is full. Offsets are relative to data.
  void Push(uint32_t rank, Command command) {
    if (IsWrite(command.op)) {
      command.local_offset += data_offset();
      command.remote_offset += data_offset();
    }
    const std::optional<PackedCommand> packed = TryPack(command);
    ASSERT_TRUE(packed.has_value());
    PushPacked(rank, *packed);
  }
  void PushPacked(uint32_t rank, const PackedCommand& packed) {
    const Deadline deadline = Deadline::After(kTimeout);
    const RingView ring = proxy(rank).ring(ranks_[rank].endpoint);
    while (!ring.TryPush(packed)) {
      if (failure(rank).failed()) return;  // nobody pops any more
      ASSERT_FALSE(deadline.expired()) << "the ring stays full\n" << proxy(rank).DumpState();
      proxy(rank).Kick();
      std::this_thread::yield();
    }
    proxy(rank).Kick();
  }

  // Waits until `rank` sees flag >= epoch; fails the test on a failure or timeout.
  void AwaitFlag(uint32_t rank, Channel channel, uint32_t source, uint64_t epoch) {
    std::atomic<uint64_t>* word = flag(rank, channel, source);
    const WaitResult result = WaitUntil(
        doorbell(rank), [&] { return word->load(std::memory_order_acquire) >= epoch; },
        Deadline::After(kTimeout), failure(rank), &proxy(rank));
    ASSERT_EQ(result, WaitResult::kReady)
        << "rank " << rank << " waits for " << source << " epoch " << epoch << ": "
        << failure(rank).status().message() << "\n"
        << proxy(rank).DumpState();
  }

  // A barrier of all proxies, as proxy.h says.
  void Barrier() {
    ++barrier_epoch_;
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
      Push(rank, Command{.op = Op::kQuiet, .epoch = barrier_epoch_});
    }
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) AwaitQuiet(rank, barrier_epoch_);
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
      Push(rank, Command{.op = Op::kBarrier, .epoch = barrier_epoch_});
    }
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
      for (const uint32_t peer : proxy(rank).BarrierPeers(endpoint(rank))) {
        AwaitFlag(rank, Channel::kBarrier, peer, barrier_epoch_);
      }
    }
  }
  void AwaitQuiet(uint32_t rank, uint64_t epoch) {
    std::atomic<uint64_t>* quiet = proxy(rank).quiet_flag(endpoint(rank));
    const WaitResult result = WaitUntil(
        doorbell(rank), [&] { return quiet->load(std::memory_order_acquire) >= epoch; },
        Deadline::After(kTimeout), failure(rank), &proxy(rank));
    ASSERT_EQ(result, WaitResult::kReady) << failure(rank).status().message() << "\n"
                                          << proxy(rank).DumpState();
  }

 private:
  struct Rank {
    SharedMemory heap;
    int endpoint = 0;
  };
  struct Process {
    std::unique_ptr<FailureLatch> latch;  // outlives the proxies
    std::shared_ptr<LifeSigns> signs;
    std::vector<std::unique_ptr<Proxy>> proxies = {};
  };

  std::vector<Proxy*> ProxiesOf(uint32_t process) {
    std::vector<Proxy*> proxies;
    for (const auto& proxy : processes_[process].proxies) proxies.push_back(proxy.get());
    return proxies;
  }

  void AddRank(uint32_t rank) {
    const bool is_first = rank % options_.ranks_per_process == 0;
    if (is_first) {
      Result<std::shared_ptr<LifeSigns>> signs = Proxy::MakeSigns(options_.proxy.group_name);
      ASSERT_TRUE(signs.ok()) << signs.status().message();
      processes_.push_back({.latch = std::make_unique<FailureLatch>(), .signs = *signs});
    }
    Process& process = processes_.back();
    if (is_first || options_.splits_processes) {
      ProxyOptions proxy_options = options_.proxy;
      proxy_options.signs = process.signs;
      Result<std::unique_ptr<Proxy>> proxy = Proxy::Create(proxy_options, process.latch.get());
      ASSERT_TRUE(proxy.ok()) << proxy.status().message();
      process.proxies.push_back(std::move(proxy.value()));
    }
    Result<SharedMemory> heap =
        SharedMemory::Create(data_offset() + options_.data_bytes, options_.share_heaps);
    ASSERT_TRUE(heap.ok()) << heap.status().message();
    ranks_.push_back(Rank{.heap = std::move(heap.value())});
    for (uint32_t channel = 0; channel < kNumChannels; ++channel) {
      if (static_cast<Channel>(channel) == Channel::kBarrier) continue;
      for (const uint32_t peer : PeersOf(rank)) {
        flag(rank, static_cast<Channel>(channel), peer)->store(options_.first_epoch);
      }
    }
    const Result<int> endpoint = process.proxies.back()->AddEndpoint(EndpointOptions{
        .rank = rank,
        .team = options_.team,
        .num_ranks = options_.num_ranks,
        .peers = PeersOf(rank),
        .ll_slots = options_.ll_slots,
        .heap = ranks_.back().heap.bytes(),
        .heap_export = ranks_.back().heap.Export(),
        .flag = [&](Channel channel, uint32_t source) { return flag(rank, channel, source); },
        .doorbell = &doorbell(rank),
        .ring_slots = options_.ring_slots,
        .trace = options_.traces.empty() ? nullptr : options_.traces[rank]});
    ASSERT_TRUE(endpoint.ok()) << endpoint.status().message();
    ranks_.back().endpoint = *endpoint;
  }

  WorldOptions options_;
  // Destroyed in reverse order: proxies before the heaps that they use.
  std::vector<Rank> ranks_;
  std::vector<Process> processes_;
  uint64_t barrier_epoch_ = 0;
};

// A deterministic exchange with the shape of real calls: HT rows with a signal behind them, "done"
// signals back, LL rows by slot with a count message, two slot sets (epoch modulo 2). Each payload
// is checked at the moment when its flag is seen.
class Exchange {
 public:
  static constexpr uint64_t kUnit = 16;
  static constexpr uint64_t kDepth = 2;
  static constexpr uint64_t kRowsPerPeer = 3;
  static constexpr uint64_t kRowUnits = 20;  // HT rows; LL rows are kLlUnits
  static constexpr uint64_t kLlUnits = 4;
  static constexpr uint32_t kLlSlots = 8;

  explicit Exchange(ProxyWorld* world) : world_(*world) {}

  // First half of every rank's data is what it sends, second half what it receives.
  void Run(uint64_t num_epochs) {
    const uint64_t first = world_.first_epoch() + 1;
    for (uint64_t epoch = first; epoch < first + num_epochs; ++epoch) {
      for (uint32_t rank = 0; rank < world_.num_ranks(); ++rank) SendEpoch(rank, epoch);
      if (epoch > first) Finish(epoch - 1);
      if (testing::Test::HasFatalFailure()) return;
    }
    Finish(world_.first_epoch() + num_epochs);
  }

 private:
  static constexpr uint64_t kHtBytes = kRowsPerPeer * kRowUnits * kUnit;
  static constexpr uint64_t kSetBytes = kHtBytes + kLlSlots * kLlUnits * kUnit;

  uint64_t SendOffset(uint32_t peer, uint64_t epoch) const {
    return (peer * kDepth + epoch % kDepth) * kSetBytes;
  }
  uint64_t RecvOffset(uint32_t rank, uint32_t source, uint64_t epoch) const {
    return (world_.num_ranks() + source) * kDepth * kSetBytes + epoch % kDepth * kSetBytes +
           0 * rank;
  }
  static std::byte ByteAt(uint32_t from, uint32_t to, uint64_t epoch, uint64_t i) {
    return static_cast<std::byte>(from * 7 + to * 13 + epoch * 29 + i * 3 + i / 251 + 1);
  }
  // How many slots a source uses, and which: some epochs have none.
  static uint32_t NumSlots(uint32_t from, uint32_t to, uint64_t epoch) {
    return static_cast<uint32_t>((from + to * 3 + epoch * 5) % (kLlSlots + 1));
  }
  static uint32_t Slot(uint64_t epoch, uint32_t i) {
    return static_cast<uint32_t>((i * 3 + epoch) % kLlSlots);
  }

  void SendEpoch(uint32_t rank, uint64_t epoch) {
    for (const uint32_t peer : world_.PeersOf(rank)) {
      if (epoch > world_.first_epoch() + kDepth) {
        world_.AwaitFlag(rank, Channel::kDispatchDone, peer, epoch - kDepth);
        if (testing::Test::HasFatalFailure()) return;
      }
      const uint64_t from = SendOffset(peer, epoch);
      const uint64_t to = RecvOffset(peer, rank, epoch);
      for (uint64_t i = 0; i < kSetBytes; ++i) {
        world_.data(rank)[from + i] = ByteAt(rank, peer, epoch, i);
      }
      for (uint64_t row = 0; row < kRowsPerPeer; ++row) {
        const uint64_t offset = row * kRowUnits * kUnit;
        world_.Push(rank, Command{.op = row + 1 < kRowsPerPeer ? Op::kWrite : Op::kWriteSignal,
                                  .dst_rank = peer,
                                  .length_bytes = kRowUnits * kUnit,
                                  .local_offset = from + offset,
                                  .remote_offset = to + offset,
                                  .channel = Channel::kDispatch,
                                  .epoch = epoch});
      }
      const uint32_t num_slots = NumSlots(rank, peer, epoch);
      for (uint32_t i = 0; i < num_slots; ++i) {
        const uint64_t offset = kHtBytes + Slot(epoch, i) * kLlUnits * kUnit;
        world_.Push(rank, Command{.op = Op::kWrite,
                                  .dst_rank = peer,
                                  .length_bytes = kLlUnits * kUnit,
                                  .local_offset = from + offset,
                                  .remote_offset = to + offset,
                                  .channel = Channel::kLlDispatch,
                                  .epoch = epoch,
                                  .value = Slot(epoch, i)});
      }
      world_.Push(rank, Command{.op = Op::kSignal,
                                .dst_rank = peer,
                                .channel = Channel::kLlDispatch,
                                .epoch = epoch,
                                .value = num_slots});
    }
  }

  // Every rank has received the epoch, has checked it, and says so.
  void Finish(uint64_t epoch) {
    for (uint32_t rank = 0; rank < world_.num_ranks(); ++rank) {
      for (const uint32_t peer : world_.PeersOf(rank)) {
        world_.AwaitFlag(rank, Channel::kDispatch, peer, epoch);
        if (testing::Test::HasFatalFailure()) return;
        CheckBytes(rank, peer, epoch, 0, kHtBytes);
        world_.AwaitFlag(rank, Channel::kLlDispatch, peer, epoch);
        if (testing::Test::HasFatalFailure()) return;
        for (uint32_t i = 0; i < NumSlots(peer, rank, epoch); ++i) {
          CheckBytes(rank, peer, epoch, kHtBytes + Slot(epoch, i) * kLlUnits * kUnit,
                     kLlUnits * kUnit);
        }
        world_.Push(rank, Command{.op = Op::kSignal,
                                  .dst_rank = peer,
                                  .channel = Channel::kDispatchDone,
                                  .epoch = epoch});
      }
    }
  }

  void CheckBytes(uint32_t rank, uint32_t source, uint64_t epoch, uint64_t begin,
                  uint64_t num_bytes) {
    const auto data = world_.data(rank).subspan(RecvOffset(rank, source, epoch));
    for (uint64_t i = begin; i < begin + num_bytes; ++i) {
      ASSERT_EQ(data[i], ByteAt(source, rank, epoch, i))
          << "rank " << rank << " source " << source << " epoch " << epoch << " byte " << i;
    }
  }

  ProxyWorld& world_;
};

}  // namespace jax_ep
