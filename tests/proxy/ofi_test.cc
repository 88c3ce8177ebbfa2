// ofi over libfabric's TCP providers on this host's loopback interface. Other providers need their
// hardware: tests/rdma_vm runs the same suite over verbs.
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "proxy/transport/ofi_library.h"
#include "tests/proxy/rails.h"
#include "tests/proxy/transport_conformance.h"

namespace jax_ep {
namespace {

using EnvMap = std::map<std::string, std::string>;

const EnvMap kTcp{{"JAX_EP_OFI_PROVIDER", "tcp"}, {"JAX_EP_SOCKET_IFNAME", "lo"}};
const EnvMap kNet{{"JAX_EP_OFI_PROVIDER", "net"}, {"JAX_EP_SOCKET_IFNAME", "lo"}};
const EnvMap kTwoRails{{"JAX_EP_OFI_PROVIDER", "tcp"}, {"JAX_EP_SOCKET_IFNAME", "lo,lo"}};
constexpr const char* kEverything =
    "seed=3,reorder=16,delay=4,duplicate=20,split=30,again=10,slow_completions=5";

INSTANTIATE_TEST_SUITE_P(Ofi, TransportConformance,
                         testing::Values(TransportParams{"tcp", "ofi", "", kTcp},
                                         TransportParams{"net", "ofi", "", kNet},
                                         TransportParams{"two_rails", "ofi", "", kTwoRails},
                                         TransportParams{"tcp_everything", "ofi", kEverything,
                                                         kTcp}),
                         TransportParamsName);

// The provider that the environment names, if it does (tests/rdma_vm/run: "verbs;ofi_rxm").
std::vector<TransportParams> FromEnvironment() {
  if (std::getenv("JAX_EP_OFI_PROVIDER") == nullptr) return {};
  return {{"plain", "ofi", ""}, {"everything", "ofi", kEverything}};
}
INSTANTIATE_TEST_SUITE_P(OfiEnvironment, TransportConformance, testing::ValuesIn(FromEnvironment()),
                         TransportParamsName);

TEST(Ofi, rails_share_the_load) {
  for (const TransportInfo& info : ListTransports()) {
    if (info.name == "ofi" && !info.is_available) GTEST_SKIP() << info.reason;
  }
  for (const auto& [name, value] : kTwoRails) setenv(name.c_str(), value.c_str(), 1);
  ExpectRailsShareTheLoad("ofi");
  for (const auto& [name, value] : kTwoRails) unsetenv(name.c_str());
}

// libfabric's TCP crashes where it gets no descriptors for a connection.
TEST(Ofi, without_descriptors_there_is_none) {
  for (const TransportInfo& info : ListTransports("ofi")) {
    if (!info.is_available) GTEST_SKIP() << info.reason;
  }
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const std::filesystem::directory_iterator opened("/proc/self/fd");
  const auto num_opened = static_cast<rlim_t>(std::distance(begin(opened), end(opened)) - 1);
  bool is_available = false;
  for (rlim_t spare = 0; !is_available && spare < 64; ++spare) {
    const rlimit few{num_opened + spare, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    const std::vector<TransportInfo> found = ListTransports("ofi");
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    ASSERT_EQ(found.size(), 1u);
    is_available = found[0].is_available;
    if (!is_available) {
      EXPECT_NE(found[0].reason.find("ulimit -n"), std::string::npos) << found[0].reason;
    }
  }
  EXPECT_TRUE(is_available);
}

TEST(Ofi, named_domains_are_the_rails) {
  for (const TransportInfo& info : ListTransports()) {
    if (info.name == "ofi" && !info.is_available) GTEST_SKIP() << info.reason;
  }
  setenv("JAX_EP_OFI_PROVIDER", "tcp", 1);
  setenv("JAX_EP_OFI_DOMAIN", "lo,lo", 1);
  auto transport = MakeTransport("ofi", TransportOptions{});
  unsetenv("JAX_EP_OFI_PROVIDER");
  unsetenv("JAX_EP_OFI_DOMAIN");
  ASSERT_TRUE(transport.ok()) << transport.status().message();
  std::string state;
  (*transport)->AppendState(&state);
  const size_t first = state.find("rail lo:");
  ASSERT_NE(first, std::string::npos) << state;
  EXPECT_NE(state.find("rail lo:", first + 1), std::string::npos) << state;
}

// Who has our endpoint's address but not the keys of our regions, which only readers of
// jax.distributed's store have, can write to none of them; and does not disturb who can. Writes
// without a target, which need no key, are ofi_stranger_test's.
TEST(Ofi, a_stranger_without_the_key_is_refused) {
  for (const TransportInfo& info : ListTransports()) {
    if (info.name == "ofi" && !info.is_available) GTEST_SKIP() << info.reason;
  }
  constexpr uint64_t kBytes = 1024;
  constexpr uint32_t kForged = 666;
  constexpr uint32_t kHonest = 7;
  for (const auto& [name, value] : kTcp) setenv(name.c_str(), value.c_str(), 1);
  for (const bool has_payload : {true, false}) {
    Result<SharedMemory> memory = SharedMemory::Create(3 * kBytes, /*shareable=*/false);
    ASSERT_TRUE(memory.ok());
    std::unique_ptr<Transport> ends[3];  // the target, a stranger, a member
    std::vector<LocalRegion> regions;
    for (uint32_t i = 0; i < 3; ++i) {
      auto made = MakeTransport("ofi", TransportOptions{.rank = i});
      ASSERT_TRUE(made.ok()) << made.status().message();
      ends[i] = std::move(*made);
      const auto own = memory->bytes().subspan(i * kBytes, kBytes);
      std::fill(own.begin(), own.end(), static_cast<std::byte>(i));
      auto region = ends[i]->Register(MemoryRegion{.bytes = own});
      ASSERT_TRUE(region.ok()) << region.status().message();
      regions.push_back(*region);
    }
    const Deadline deadline = Deadline::After(std::chrono::seconds(30));
    int num_honest = 0;
    const auto poll = [&] {
      for (auto& end : ends) {
        TransportEvent event;
        const Result<size_t> count = end->Poll({&event, 1});
        if (&end == &ends[1]) continue;  // the stranger's own trouble
        ASSERT_TRUE(count.ok()) << count.status().message();
        if (*count == 0 || event.kind != TransportEvent::Kind::kArrived) continue;
        EXPECT_EQ(event.immediate, kHonest);
        ++num_honest;
      }
    };
    const auto post = [&](uint32_t from, const std::string& address, const std::string& key,
                          uint32_t immediate) {
      const Result<uint32_t> peer = ends[from]->Connect(address, deadline);
      ASSERT_TRUE(peer.ok()) << peer.status().message();
      ASSERT_TRUE(ends[from]->ImportRemoteKey(*peer, key).ok());
      const WriteRequest write{.peer = *peer,
                               .length_bytes = has_payload ? kBytes : 0,
                               .has_immediate = true,
                               .immediate = immediate};
      while (!ends[from]->PostWrite(write).ok()) {  // until the connection stands
        ASSERT_FALSE(deadline.expired());
        poll();
      }
    };
    // Both texts end with a key: that of the region, and that of the target of empty writes.
    const std::string address = ends[0]->LocalAddress();
    const auto forge = [](std::string text) {
      text.back() = static_cast<char>(text.back() ^ 1);
      return text;
    };
    post(1, forge(address), forge(regions[0].key), kForged);
    post(2, address, regions[0].key, kHonest);
    const Deadline quiet = Deadline::After(std::chrono::milliseconds(500));
    while (!quiet.expired() || (num_honest == 0 && !deadline.expired())) poll();
    EXPECT_EQ(num_honest, 1);
    const std::byte wanted{static_cast<unsigned char>(has_payload ? 2 : 0)};
    for (const std::byte byte : memory->bytes().first(kBytes)) ASSERT_EQ(byte, wanted);
  }
  for (const auto& [name, value] : kTcp) unsetenv(name.c_str());
}

// A provider that is there but cannot do what we need once failed at its first heartbeat.
TEST(Ofi, a_provider_that_does_not_open_is_left_out_with_the_reason) {
  const Result<const OfiLibrary*> library = OfiLibrary::Get();
  if (!library.ok()) GTEST_SKIP() << library.status().message();
  Env env;
  env.socket_ifname = "lo";
  std::vector<std::string> opened;
  const auto choose = [&](size_t num_refused) {
    opened.clear();
    return ChooseOfiRails(**library, env, TransportOptions{},
                          /*delivery_complete=*/false, [&](const std::vector<OfiInfo>& rails) {
                            opened.push_back(rails.front()->fabric_attr->prov_name);
                            return opened.size() <= num_refused ? Unavailable("no immediates")
                                                                : Status::Ok();
                          });
  };
  const Result<std::string> none = choose(0);
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_EQ(*none, "");
  const std::string best = opened.front();
  EXPECT_NE(best, "tcp;ofi_rxm");  // it crashes where it is all that "tcp" means
  const Result<std::string> second = choose(1);
  if (second.ok()) {
    EXPECT_EQ(*second, "no immediates");
    ASSERT_EQ(opened.size(), 2u);
    EXPECT_NE(opened[1], best);
  }
  const Status all = choose(100).status();
  EXPECT_EQ(all.code(), StatusCode::kUnavailable);
  EXPECT_NE(all.message().find("(no immediates)"), std::string::npos) << all.message();
}

// libfabric of this machine, perhaps, knows no GPU.
TEST(Ofi, a_provider_that_registers_no_memory_of_a_gpu_is_left_out_with_the_reason) {
  const Result<const OfiLibrary*> library = OfiLibrary::Get();
  if (!library.ok()) GTEST_SKIP() << library.status().message();
  Env env;
  env.socket_ifname = "lo";
  const Result<std::string> left_out =
      ChooseOfiRails(**library, env, TransportOptions{.serves_device = true},
                     /*delivery_complete=*/false, [](const std::vector<OfiInfo>& rails) {
                       EXPECT_NE(rails.front()->caps & FI_HMEM, 0u);
                       return Status::Ok();
                     });
  if (left_out.ok()) GTEST_SKIP() << "this libfabric serves GPUs";
  EXPECT_NE(left_out.status().message().find("registers no memory of a GPU"), std::string::npos)
      << left_out.status().message();
}

TEST(Ofi, an_unknown_provider_or_interface_is_explained) {
  setenv("JAX_EP_OFI_PROVIDER", "nosuch", 1);
  const Status provider = MakeTransport("ofi", TransportOptions{}).status();
  unsetenv("JAX_EP_OFI_PROVIDER");
  setenv("JAX_EP_SOCKET_IFNAME", "nosuch0", 1);
  const Status interface = MakeTransport("ofi", TransportOptions{}).status();
  unsetenv("JAX_EP_SOCKET_IFNAME");
  if (provider.message().find("is not installed") != std::string::npos) {
    GTEST_SKIP() << provider.message();
  }
  EXPECT_NE(provider.message().find("nosuch"), std::string::npos) << provider.message();
  EXPECT_NE(interface.message().find("nosuch0"), std::string::npos) << interface.message();
}

}  // namespace
}  // namespace jax_ep
