// GpuNetwork over a made-up GPU library, whose device memory is the host's: which stages are
// registered for whom, that rows and flags come over a network that NICs would serve, and which
// pairs of ranks write when nothing happens.
#include "xla_ffi/gpu_network.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proxy/abi/command.h"
#include "proxy/abi/ring.h"
#include "proxy/transport/registry.h"
#include "tests/proxy/forwarding_transport.h"
#include "tests/proxy/watched_transport.h"

namespace jax_ep {
namespace {

constexpr uint64_t kStageBytes = 5000;  // no whole pages
constexpr uint64_t kSignalBytes = 4096;
constexpr uint64_t kRowBytes = 64;
constexpr uint32_t kNumRanks = 2;  // a node each
constexpr uint32_t kMostRanks = 4;
constexpr int kFirstDevice = 4;

struct Stage {
  alignas(4096) std::array<std::byte, 8192> bytes{};
};

// What the library was asked for.
struct Runtime {
  bool has_dmabuf = true;
  std::vector<gpu::DeviceRange> exported;  // by export_dmabuf
  std::vector<int> descriptors;            // that it gave
};
std::unique_ptr<Runtime> runtime;

uint64_t SignalOffset(const GroupShape*, Channel channel, uint32_t source) {
  return (static_cast<uint64_t>(channel) * kMostRanks + source) * sizeof(uint64_t);
}

const gpu::GpuApi& FakeApi() {
  static const gpu::DeviceMemoryApi memory{
      .use_device = [](int) -> const char* { return nullptr; },
      .export_dmabuf = [](int, gpu::DeviceRange pages, int* fd) -> const char* {
        *fd = -1;
        if (!runtime->has_dmabuf) return nullptr;
        runtime->exported.push_back(pages);
        runtime->descriptors.push_back(*fd = open("/dev/null", O_RDONLY));
        return nullptr;
      },
      .pin = [](void*, uint64_t) -> const char* { return nullptr; },
      .unpin = [](void*) -> const char* { return nullptr; },
      .pci_address = [](int, char* text, size_t size) -> const char* {
        std::snprintf(text, size, "0000:00:00.0");
        return nullptr;
      }};
  static const gpu::GpuApi api{
      .stage_bytes = [](const GroupShape*) { return kStageBytes; },
      .signal_bytes = [](const GroupShape*) { return kSignalBytes; },
      .signal_offset = SignalOffset,
      .memory = &memory,
  };
  return api;
}

// What transports were asked for.
struct Asked {
  std::vector<bool> serves_device;
  std::vector<MemoryRegion> regions;
  std::vector<bool> was_open;  // whether the region's descriptor was
};

// Loopback that takes a GPU's memory, as a NIC would.
class NicTransport : public ForwardingTransport {
 public:
  NicTransport(std::unique_ptr<Transport> inner, Asked* asked)
      : ForwardingTransport(std::move(inner)), asked_(*asked) {}

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    asked_.regions.push_back(region);
    asked_.was_open.push_back(fcntl(region.dmabuf_fd, F_GETFD) >= 0);
    return ForwardingTransport::Register({.bytes = region.bytes});
  }

 private:
  Asked& asked_;
};

// Both ranks in this process.
SessionOptions Group(const char* transport, bool gpu_direct) {
  return {.name = "direct",
          .shape = {.num_ranks = kNumRanks, .node_size = 1, .num_experts = 2, .has_ht = true},
          .team_processes = {{0, 0}},
          .local_ranks = {{.device_ordinal = kFirstDevice, .rank = 0},
                          {.device_ordinal = kFirstDevice + 1, .rank = 1}},
          .transport = transport,
          .timeout = std::chrono::seconds(20),
          .peer_timeout = std::chrono::seconds(20),
          .gpu_direct = gpu_direct};
}

class GpuNetworkTest : public testing::Test {
 protected:
  void SetUp() override { runtime = std::make_unique<Runtime>(); }
  void TearDown() override { End(); }

  void End() {
    network_.reset();
    for (const int fd : runtime->descriptors) {
      EXPECT_EQ(fcntl(fd, F_GETFD), -1) << "a descriptor was left open";
    }
  }

  TransportFactory Factory() {
    return [this](const TransportOptions& transport) -> Result<std::unique_ptr<Transport>> {
      asked_.serves_device.push_back(transport.serves_device);
      JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<Transport> inner,
                              MakeTransport("loopback", transport));
      return std::unique_ptr<Transport>(new NicTransport(std::move(inner), &asked_));
    };
  }

  // A started network of the group, over loopback.
  Status Start(const SessionOptions& options) {
    std::vector<std::span<std::byte>> own;
    std::vector<std::vector<std::byte*>> seen;
    if (GpuNetwork::HasDeviceStages(options)) {
      for (uint32_t rank = 0; rank < kNumRanks; ++rank) {
        own.emplace_back(stages_[rank].bytes.data(), kStageBytes);
      }
      seen = {{own[0].data(), nullptr}, {nullptr, own[1].data()}};
    } else {
      seen.resize(kNumRanks);
    }
    JAX_EP_ASSIGN_OR_RETURN(network_,
                            GpuNetwork::Create(options, FakeApi(), own, &failure_, Factory()));
    JAX_EP_RETURN_IF_ERROR(network_->Connect({}, seen));
    return network_->Start();
  }

  // As a kernel of rank 0 does: a row of its stage to rank 1, with a signal.
  void SendRow() {
    const gpu::NetworkConfig sender = network_->ConfigOf(0);
    std::memset(sender.stages[0], 7, kRowBytes);
    const auto command = TryPack({.op = Op::kWriteSignal,
                                  .dst_rank = 1,
                                  .length_bytes = kRowBytes,
                                  .remote_offset = 2 * kRowBytes,
                                  .channel = Channel::kDispatch,
                                  .epoch = 1});
    ASSERT_TRUE(command.has_value());
    const RingView ring{.memory = reinterpret_cast<RingMemory*>(sender.rings[0])};
    ASSERT_TRUE(ring.TryPush(*command));
  }
  uint64_t Signal() const {
    const uint64_t offset = SignalOffset(nullptr, Channel::kDispatch, /*source=*/0);
    const std::byte* const flag = network_->ConfigOf(1).signals[0] + offset;
    return reinterpret_cast<const std::atomic<uint64_t>*>(flag)->load(std::memory_order_acquire);
  }
  bool WaitUntil(const std::function<bool()>& done) const {
    const Deadline deadline = Deadline::After(std::chrono::seconds(20));
    while (!done() && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return done();
  }

  std::array<Stage, kNumRanks> stages_;
  FailureLatch failure_;
  Asked asked_;
  std::unique_ptr<GpuNetwork> network_;
};

TEST_F(GpuNetworkTest, nics_move_rows_between_stages_of_gpus) {
  for (const char* transport : {"verbs", "ofi"}) {
    asked_ = {};
    ASSERT_TRUE(Start(Group(transport, /*gpu_direct=*/true)).ok());
    EXPECT_EQ(asked_.serves_device, std::vector<bool>(kNumRanks, true));
    ASSERT_EQ(asked_.regions.size(), kNumRanks);
    for (uint32_t rank = 0; rank < kNumRanks; ++rank) {
      const MemoryRegion& region = asked_.regions[rank];
      EXPECT_EQ(region.device, kFirstDevice + static_cast<int>(rank));
      EXPECT_EQ(region.bytes.data(), stages_[rank].bytes.data());
      EXPECT_EQ(region.bytes.size(), kStageBytes);
      if (transport == std::string("verbs")) {
        EXPECT_EQ(region.dmabuf_fd, runtime->descriptors[rank]);
        EXPECT_TRUE(asked_.was_open[rank]);
        EXPECT_EQ(runtime->exported[rank].base, region.bytes.data());
        EXPECT_EQ(runtime->exported[rank].bytes, 8192u);  // pages
      } else {
        EXPECT_TRUE(runtime->exported.empty());  // libfabric exports it
      }
      EXPECT_TRUE(network_->ConfigOf(rank).has_device_stages);
      EXPECT_FALSE(network_->ConfigOf(rank).has_fast_wire);  // else hosts could cut differently
    }
    EXPECT_EQ(network_->pinned_stage_bytes(), 0u);
    SendRow();
    EXPECT_TRUE(WaitUntil([this] { return Signal() == 1; }));
    EXPECT_EQ(stages_[1].bytes[2 * kRowBytes], std::byte{7});
    End();
    runtime = std::make_unique<Runtime>();
  }
}

// Where the driver exports no descriptor a kernel module knows the memory by its address.
TEST_F(GpuNetworkTest, without_dmabufs_nics_get_addresses) {
  runtime->has_dmabuf = false;
  ASSERT_TRUE(Start(Group("verbs", /*gpu_direct=*/true)).ok());
  for (const MemoryRegion& region : asked_.regions) {
    EXPECT_EQ(region.dmabuf_fd, -1);
    EXPECT_GE(region.device, kFirstDevice);
  }
}

// Ranks 0 and 1 are one node, of two processes.
TEST_F(GpuNetworkTest, processes_of_a_node_say_alike_who_moves_their_rows) {
  const auto make = [this](uint32_t rank, bool gpu_direct) {
    SessionOptions options = Group("verbs", gpu_direct);
    options.shape.num_ranks = 4;
    options.shape.node_size = 2;
    options.team_processes = {{0, 1, 2, 3}};
    options.local_ranks = {{.device_ordinal = kFirstDevice, .rank = rank}};
    options.process_index = rank;
    std::vector<std::span<std::byte>> stages;
    if (gpu_direct) stages.emplace_back(stages_[rank].bytes.data(), kStageBytes);
    return GpuNetwork::Create(options, FakeApi(), stages, &failure_, Factory());
  };
  const auto direct = make(0, true);
  const auto pinned = make(1, false);
  ASSERT_TRUE(direct.ok() && pinned.ok());
  const Status of_direct = (*direct)->Connect({{{0, 1}, (*pinned)->LocalBlob(0)}}, {{}});
  const Status of_pinned = (*pinned)->Connect({{{0, 0}, (*direct)->LocalBlob(0)}}, {{}});
  for (const Status& refused : {of_direct, of_pinned}) {
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.message().find("set JAX_EP_GPU_DIRECT alike"), std::string::npos)
        << refused.message();
  }
}

TEST_F(GpuNetworkTest, else_rows_go_through_host_memory) {
  for (const SessionOptions& options : {Group("loopback", true), Group("ofi", false)}) {
    asked_ = {};
    ASSERT_TRUE(Start(options).ok());
    EXPECT_EQ(asked_.serves_device, std::vector<bool>(kNumRanks, false));
    for (const MemoryRegion& region : asked_.regions) {
      EXPECT_EQ(region.device, -1);
      EXPECT_EQ(region.dmabuf_fd, -1);
    }
    EXPECT_FALSE(network_->ConfigOf(0).has_device_stages);
    EXPECT_GE(network_->pinned_stage_bytes(), kNumRanks * kStageBytes);
    SendRow();
    EXPECT_TRUE(WaitUntil([this] { return Signal() == 1; }));
    EXPECT_EQ(network_->ConfigOf(1).stages[0][2 * kRowBytes], std::byte{7});
    End();
  }
  EXPECT_TRUE(runtime->exported.empty());
}

// Two processes of two ranks, a node each. The parameter: proxies for each rank.
class GpuProcesses : public testing::TestWithParam<const char*> {
 protected:
  static constexpr std::chrono::milliseconds kPeerTimeout{800};

  void SetUp() override {
    runtime = std::make_unique<Runtime>();
    setenv("JAX_EP_PROXY_THREADS", GetParam(), 1);
    std::map<std::pair<uint32_t, uint32_t>, std::string> blobs;
    for (uint32_t process = 0; process < 2; ++process) {
      auto network =
          GpuNetwork::Create(OptionsOf(process), FakeApi(), {}, &failures_[process], Factory());
      ASSERT_TRUE(network.ok()) << network.status().message();
      networks_.push_back(std::move(*network));
      for (uint32_t local = 0; local < 2; ++local) {
        blobs[{0, 2 * process + local}] = networks_.back()->LocalBlob(local);
      }
    }
    for (const auto& network : networks_) {
      const Status connected = network->Connect(blobs, {{}, {}});
      ASSERT_TRUE(connected.ok()) << connected.message();
    }
    for (const auto& network : networks_) ASSERT_TRUE(network->Start().ok());
  }
  void TearDown() override { unsetenv("JAX_EP_PROXY_THREADS"); }

  static SessionOptions OptionsOf(uint32_t process) {
    SessionOptions options{
        .name = "processes",
        .shape = {.num_ranks = 4, .node_size = 2, .num_experts = 4, .has_ht = true},
        .team_processes = {{0, 0, 1, 1}},
        .process_index = process,
        .transport = "loopback",
        .timeout = std::chrono::seconds(20),
        .peer_timeout = kPeerTimeout};
    for (uint32_t local = 0; local < 2; ++local) {
      options.local_ranks.push_back({.device_ordinal = local, .rank = 2 * process + local});
    }
    return options;
  }
  TransportFactory Factory() {
    return [this](const TransportOptions& made) -> Result<std::unique_ptr<Transport>> {
      JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<Transport> inner, MakeTransport("loopback", made));
      const bool is_of_first = made.rank < 2;
      const std::vector<uint32_t> peers = {is_of_first ? 2u : 0u, is_of_first ? 3u : 1u};
      return std::unique_ptr<Transport>(
          new WatchedTransport(std::move(inner), made.rank, peers, wire_));
    };
  }

  std::array<FailureLatch, 2> failures_;
  std::shared_ptr<Wire> wire_ = std::make_shared<Wire>();
  std::vector<std::unique_ptr<GpuNetwork>> networks_;
};

INSTANTIATE_TEST_SUITE_P(ProxyThreads, GpuProcesses, testing::Values("1", "2"));

TEST_P(GpuProcesses, have_one_heartbeat_and_one_goodbye) {
  const auto begin = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(2 * kPeerTimeout);
  networks_[0]->Stop();
  std::this_thread::sleep_for(2 * kPeerTimeout);  // without a goodbye it would be dead
  networks_[1]->Stop();
  const auto num_ticks = 16 * (std::chrono::steady_clock::now() - begin) / kPeerTimeout;
  for (const FailureLatch& failure : failures_) EXPECT_FALSE(failure.failed()) << failure.message();
  const Wire::Pairs pairs = wire_->pairs();
  ASSERT_EQ(pairs.size(), 2u);
  EXPECT_TRUE(pairs.contains({0, 2}));
  EXPECT_TRUE(pairs.contains({2, 0}));
  for (const auto& [pair, num_writes] : pairs) {
    EXPECT_LE(num_writes, static_cast<uint64_t>(num_ticks) + 3);  // the first, goodbye, rounding
  }
}

TEST_P(GpuProcesses, name_one_that_is_silent) {
  std::this_thread::sleep_for(kPeerTimeout / 2);  // until they were heard
  wire_->Cut(2);
  wire_->Cut(3);
  const Deadline deadline = Deadline::After(3 * kPeerTimeout);
  while (!failures_[0].failed() && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_TRUE(failures_[0].failed());
  EXPECT_GE(failures_[0].blamed_rank(), 2) << failures_[0].message();
}

}  // namespace
}  // namespace jax_ep
