// verbs where there is an RDMA device; elsewhere every case is skipped with the reason. The virtual
// machine of tests/rdma_vm has two soft-RoCE devices.
#include <cstdlib>

#include "tests/proxy/rails.h"
#include "tests/proxy/transport_conformance.h"

namespace jax_ep {
namespace {

using EnvMap = std::map<std::string, std::string>;

constexpr const char* kEverything =
    "seed=3,reorder=16,delay=4,duplicate=20,split=30,again=10,slow_completions=5";
const EnvMap kFourQps{{"JAX_EP_VERBS_QPS", "4"}};

INSTANTIATE_TEST_SUITE_P(Verbs, TransportConformance,
                         testing::Values(TransportParams{"plain", "verbs", ""},
                                         TransportParams{"four_queue_pairs", "verbs", "", kFourQps},
                                         TransportParams{"everything", "verbs", kEverything,
                                                         kFourQps}),
                         TransportParamsName);

TEST(Verbs, rails_share_the_load) {
  const char* two = std::getenv("JAX_EP_TEST_TWO_DEVICES");  // e.g. "rxe0,rxe1"
  if (two == nullptr) GTEST_SKIP() << "JAX_EP_TEST_TWO_DEVICES names no two RDMA devices";
  const char* before = std::getenv("JAX_EP_VERBS_DEVICE");
  const std::string saved = before == nullptr ? "" : before;
  setenv("JAX_EP_VERBS_DEVICE", two, 1);
  ExpectRailsShareTheLoad("verbs");
  setenv("JAX_EP_VERBS_DEVICE", saved.c_str(), 1);
}

// Soft-RoCE has no PCI device, so nothing is known of what is near whom.
TEST(Verbs, without_a_name_ranks_take_turns_with_one_rail) {
  const char* two = std::getenv("JAX_EP_TEST_TWO_DEVICES");
  if (two == nullptr) GTEST_SKIP() << "JAX_EP_TEST_TWO_DEVICES names no two RDMA devices";
  const char* before = std::getenv("JAX_EP_VERBS_DEVICE");
  const std::string saved = before == nullptr ? "" : before;
  unsetenv("JAX_EP_VERBS_DEVICE");
  std::string states[2];
  for (uint32_t i = 0; i < 2; ++i) {
    auto transport = MakeTransport(
        "verbs", TransportOptions{.rank = i, .place = {.local_index = i, .num_local = 2}});
    ASSERT_TRUE(transport.ok()) << transport.status().message();
    (*transport)->AppendState(&states[i]);
    EXPECT_EQ(states[i].find("; rail"), states[i].rfind("; rail")) << states[i];
  }
  setenv("JAX_EP_VERBS_DEVICE", saved.c_str(), 1);
  EXPECT_NE(states[0], states[1]);
}

}  // namespace
}  // namespace jax_ep
