// The faulty transport passes the same suite as the others, whatever it does to the traffic; and it
// really does what its keys say.
#include "proxy/transport/faulty.h"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/proxy/transport_conformance.h"

namespace jax_ep {
namespace {

constexpr const char* kEverything =
    "seed=3,reorder=16,delay=4,duplicate=20,split=30,again=10,slow_completions=5";

INSTANTIATE_TEST_SUITE_P(
    Faulty, TransportConformance,
    testing::Values(TransportParams{"harmless", "loopback", "seed=1"},
                    TransportParams{"reorder", "loopback", "seed=1,reorder=8"},
                    TransportParams{"per_flow", "loopback", "seed=1,reorder=8,per_flow=1"},
                    TransportParams{"delay", "loopback", "seed=1,delay=10"},
                    TransportParams{"duplicate", "loopback", "seed=1,duplicate=50"},
                    TransportParams{"split", "loopback", "seed=1,split=80"},
                    TransportParams{"again", "loopback", "seed=1,again=30"},
                    TransportParams{"slow_completions", "loopback", "seed=1,slow_completions=20"},
                    TransportParams{"payload_late", "loopback", "seed=1,payload_late=1"},
                    TransportParams{"payload_late_reorder", "loopback",
                                    "seed=1,payload_late=1,reorder=8,slow_completions=3"},
                    TransportParams{"max_message", "loopback", "seed=1,max_message=64"},
                    TransportParams{"everything", "loopback", kEverything},
                    TransportParams{"everything_shm", "shm", kEverything}),
    TransportParamsName);

// As with a network that loses what is under way to a peer that has gone.
TEST(Faulty, writes_to_a_peer_that_closes_complete_in_pieces_or_twice) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const TransportOptions options{.faulty_spec = "seed=" + std::to_string(seed) +
                                                  ",split=60,duplicate=60,reorder=4"};
    auto from = MakeTransport("loopback", options);
    auto to = MakeTransport("loopback", options);
    ASSERT_TRUE(from.ok() && to.ok());
    std::array<std::byte, 256> bytes{};
    const auto own = (*from)->Register({.bytes = bytes});
    const auto its = (*to)->Register({.bytes = bytes});
    const auto peer =
        (*from)->Connect((*to)->LocalAddress(), Deadline::After(std::chrono::seconds(1)));
    ASSERT_TRUE(own.ok() && its.ok() && peer.ok());
    ASSERT_TRUE((*from)->ImportRemoteKey(*peer, its->key).ok());
    constexpr uint64_t kWrites = 30;
    for (uint64_t i = 0; i < kWrites; ++i) {
      ASSERT_TRUE((*from)
                      ->PostWrite({.peer = *peer,
                                   .length_bytes = 256,
                                   .has_immediate = true,
                                   .immediate = static_cast<uint32_t>(i),
                                   .token = i})
                      .ok());
    }
    to->reset();
    size_t num_sent = 0;
    std::array<TransportEvent, 16> events;
    for (int i = 0; i < 1000; ++i) num_sent += (*from)->Poll(events).value();
    EXPECT_EQ(num_sent, kWrites) << "seed " << seed;
  }
}

TEST(FaultySpec, parses_every_key) {
  const Result<FaultySpec> spec = FaultySpec::Parse(
      "seed=1,reorder=2,per_flow=1,delay=3,duplicate=4,split=5,again=6,slow_completions=7,"
      "payload_late=1,die_after=8,die_rank=9,max_message=32");
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->seed, 1u);
  EXPECT_EQ(spec->reorder, 2u);
  EXPECT_EQ(spec->per_flow, 1u);
  EXPECT_EQ(spec->delay, 3u);
  EXPECT_EQ(spec->duplicate, 4u);
  EXPECT_EQ(spec->split, 5u);
  EXPECT_EQ(spec->again, 6u);
  EXPECT_EQ(spec->slow_completions, 7u);
  EXPECT_EQ(spec->payload_late, 1u);
  EXPECT_EQ(spec->die_after, 8u);
  EXPECT_EQ(spec->die_rank, 9u);
  EXPECT_EQ(spec->max_message, 32u);
}

TEST(FaultySpec, a_bad_part_is_named_with_the_known_keys) {
  for (const char* bad : {"speed=1", "seed", "seed=", "seed=x", "split=101", "payload_late=2",
                          "seed=1,,delay=1", "max_message=8"}) {
    const Result<FaultySpec> spec = FaultySpec::Parse(bad);
    EXPECT_FALSE(spec.ok()) << bad;
  }
  EXPECT_NE(FaultySpec::Parse("speed=1").status().message().find("slow_completions"),
            std::string::npos);
  EXPECT_EQ(FaultySpec::Parse("seed=1,delay=1000001").status().message(),
            "faulty transport: got \"delay=1000001\", expected delay= and a number of at most "
            "1000000; change JAX_EP_FAULTY");
}

// Two endpoints; 0 posts `count` empty writes to 1. Returns the immediates in order of arrival.
std::vector<uint32_t> Traffic(const std::string& spec, uint32_t count) {
  std::unique_ptr<Transport> ends[2];
  for (uint32_t i = 0; i < 2; ++i) {
    auto made = MakeTransport("loopback", TransportOptions{.rank = i, .faulty_spec = spec});
    EXPECT_TRUE(made.ok());
    ends[i] = std::move(*made);
  }
  EXPECT_TRUE(
      ends[0]->Connect(ends[1]->LocalAddress(), Deadline::After(std::chrono::seconds(1))).ok());
  std::vector<uint32_t> arrived;
  TransportEvent events[16];
  const auto poll = [&] {
    EXPECT_TRUE(ends[0]->Poll(events).ok());
    const Result<size_t> num = ends[1]->Poll(events);
    EXPECT_TRUE(num.ok());
    for (size_t i = 0; i < *num; ++i) arrived.push_back(events[i].immediate);
  };
  for (uint32_t i = 0; i < count; ++i) {
    while (!ends[0]->PostWrite(WriteRequest{.has_immediate = true, .immediate = i}).ok()) poll();
  }
  for (int i = 0; i < 2000; ++i) poll();
  return arrived;
}

TEST(Faulty, reorders_and_repeats_by_its_seed) {
  const std::string spec = ",reorder=8,duplicate=20";
  const std::vector<uint32_t> first = Traffic("seed=1" + spec, 200);
  EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
  EXPECT_GT(first.size(), 200u);
  EXPECT_EQ(first, Traffic("seed=1" + spec, 200));
  EXPECT_NE(first, Traffic("seed=2" + spec, 200));
}

TEST(Faulty, without_reordering_keeps_the_order) {
  const std::vector<uint32_t> arrived = Traffic("seed=1,delay=5,again=20", 200);
  EXPECT_EQ(arrived.size(), 200u);
  EXPECT_TRUE(std::is_sorted(arrived.begin(), arrived.end()));
}

// Numbers of boxes are alike in all processes.
TEST(Faulty, late_payload_is_refused_between_processes) {
  const TransportOptions options{.faulty_spec = "payload_late=1"};
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto made = MakeTransport("loopback", options);
    const std::string address = made.ok() ? (*made)->LocalAddress() : "";
    const bool is_sent = write(pipe_fds[1], address.data(), address.size()) > 0;
    _exit(is_sent ? 0 : 1);
  }
  close(pipe_fds[1]);  // else a child that dies would leave the read waiting
  char address[512];
  const ssize_t length = read(pipe_fds[0], address, sizeof(address));
  int how = 0;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  close(pipe_fds[0]);
  ASSERT_EQ(how, 0);
  ASSERT_GT(length, 0);
  const auto made = MakeTransport("loopback", options);
  ASSERT_TRUE(made.ok());
  const Status refused =
      (*made)->Connect({address, static_cast<size_t>(length)}, Deadline::After({})).status();
  EXPECT_EQ(refused.message(), "faulty: payload_late works between ranks of one process only");
}

TEST(Faulty, a_dead_endpoint_says_nothing_more) {
  const std::vector<uint32_t> arrived = Traffic("seed=1,die_after=50", 200);
  EXPECT_LE(arrived.size(), 50u);
}

}  // namespace
}  // namespace jax_ep
