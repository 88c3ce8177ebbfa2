// What can go wrong: held acknowledgements, dead peers, bad commands, garbage arrivals, mismatched
// peers. Every failure names the culprit, reaches every rank, and nothing ever hangs.
#include <gtest/gtest.h>

#include "proxy/abi/imm.h"
#include "proxy/transport/registry.h"
#include "tests/proxy/gate_transport.h"
#include "tests/proxy/proxy_world.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// A world in which rank `gated_rank`'s transport is behind a gate.
WorldOptions Gated(std::shared_ptr<Gate> gate, uint32_t gated_rank, uint32_t num_ranks = 2) {
  WorldOptions options;
  options.num_ranks = num_ranks;
  options.ranks_per_process = 1;
  options.proxy.transport_factory =
      [gate, gated_rank](
          const TransportOptions& transport_options) -> Result<std::unique_ptr<Transport>> {
    Result<std::unique_ptr<Transport>> inner = MakeTransport("loopback", transport_options);
    if (!inner.ok() || transport_options.rank != gated_rank) return inner;
    return std::unique_ptr<Transport>(std::make_unique<GateTransport>(std::move(*inner), gate));
  };
  return options;
}

Command Signal(uint32_t to, uint64_t epoch) {
  return Command{.op = Op::kSignal, .dst_rank = to, .channel = Channel::kPlan, .epoch = epoch};
}

// Waits until the latch of `rank` is set and returns what it says.
std::string AwaitFailure(ProxyWorld& world, uint32_t rank) {
  const Deadline deadline = Deadline::After(ProxyWorld::kTimeout);
  while (!world.failure(rank).failed()) {
    if (deadline.expired()) return "";
    std::this_thread::sleep_for(milliseconds(1));
  }
  return world.failure(rank).status().message();
}

bool Contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(Quiet, waits_for_the_receivers_acknowledgement) {
  auto gate = std::make_shared<Gate>();
  ProxyWorld world(Gated(gate, /*gated_rank=*/0));
  world.Start();
  gate->HoldArrivals(true);  // rank 0 sends, but hears no acknowledgement
  world.Push(0, Signal(1, 1));
  world.Push(0, Command{.op = Op::kQuiet, .epoch = 1});
  world.AwaitFlag(1, Channel::kPlan, 0, 1);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(world.proxy(0).quiet_flag(0)->load(), 0u);
  gate->HoldArrivals(false);
  world.proxy(0).Kick();
  world.AwaitQuiet(0, 1);
  world.Stop();
}

TEST(Quiet, waits_for_the_local_completion_too) {
  auto gate = std::make_shared<Gate>();
  ProxyWorld world(Gated(gate, 0));
  world.Start();
  gate->HoldSent(true);
  world.Push(0, Signal(1, 1));
  world.Push(0, Command{.op = Op::kQuiet, .epoch = 1});
  world.AwaitFlag(1, Channel::kPlan, 0, 1);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(world.proxy(0).quiet_flag(0)->load(), 0u);
  gate->HoldSent(false);
  world.proxy(0).Kick();
  world.AwaitQuiet(0, 1);
  world.Stop();
}

TEST(Quiet, of_an_idle_ring_completes_at_once_and_counts_over_the_epoch_wrap) {
  ProxyWorld world(WorldOptions{});
  world.Start();
  for (uint64_t epoch = 1; epoch <= 40; ++epoch) {
    world.Push(0, Command{.op = Op::kQuiet, .epoch = epoch});
  }
  world.AwaitQuiet(0, 40);
  world.Stop();
}

TEST(Window, lets_no_more_out_than_its_range_and_other_flows_go_on) {
  auto gate = std::make_shared<Gate>();
  WorldOptions options = Gated(gate, 0, /*num_ranks=*/3);
  options.proxy.window_messages = 4;
  ProxyWorld world(options);
  world.Start();
  gate->HoldArrivals(true);
  for (uint64_t epoch = 1; epoch <= 10; ++epoch) world.Push(0, Signal(1, epoch));
  world.Push(0, Signal(2, 1));  // behind a stalled flow of the same ring
  world.AwaitFlag(2, Channel::kPlan, 0, 1);
  world.AwaitFlag(1, Channel::kPlan, 0, 4);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(world.flag(1, Channel::kPlan, 0)->load(), 4u);
  gate->HoldArrivals(false);
  world.proxy(0).Kick();
  world.AwaitFlag(1, Channel::kPlan, 0, 10);
  uint64_t num_stalls = 0;
  for (const FlowStats& flow : world.proxy(0).Stats()) num_stalls += flow.stalls;
  EXPECT_GT(num_stalls, 0u);
  EXPECT_TRUE(Contains(world.proxy(0).DumpState(), "channel plan: posted 10"))
      << world.proxy(0).DumpState();
  world.Stop();
}

TEST(ProxyOptions, windows_that_cannot_be_told_apart_are_refused) {
  FailureLatch latch;
  ProxyOptions options{.group_name = "g", .transport = "loopback"};
  for (const uint32_t bad : {0u, kMaxWindowMessages + 1, 8192u}) {
    options.window_messages = bad;
    const auto proxy = Proxy::Create(options, &latch);
    ASSERT_FALSE(proxy.ok());
    EXPECT_EQ(proxy.status().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(Contains(proxy.status().message(), "half of the sequence space"));
  }
  options.window_messages = kMaxWindowMessages;
  EXPECT_TRUE(Proxy::Create(options, &latch).ok());
}

TEST(ProxyOptions, an_unknown_transport_or_spec_is_refused) {
  FailureLatch latch;
  std::byte heap[64] = {};
  const auto add = [&](const std::string& transport, const std::string& spec) {
    auto proxy = Proxy::Create(
        ProxyOptions{.group_name = "g", .transport = transport, .faulty_spec = spec}, &latch);
    EXPECT_TRUE(proxy.ok());
    return (*proxy)
        ->AddEndpoint(EndpointOptions{.rank = 0,
                                      .num_ranks = 2,
                                      .peers = {1},
                                      .heap = heap,
                                      .flag = [](Channel, uint32_t) { return nullptr; }})
        .status();
  };
  EXPECT_TRUE(add("loopback", "").ok());
  EXPECT_TRUE(Contains(add("pigeon", "").message(), "known are: loopback, shm"));
  EXPECT_TRUE(Contains(add("loopback", "speed=9").message(), "speed=9"));
}

TEST(EndpointOptions, impossible_peers_are_refused) {
  FailureLatch latch;
  std::byte heap[64] = {};
  auto proxy = Proxy::Create(ProxyOptions{.group_name = "g", .transport = "loopback"}, &latch);
  ASSERT_TRUE(proxy.ok());
  EndpointOptions good{
      .rank = 0, .num_ranks = 1024, .peers = {1}, .heap = heap, .flag = [](Channel, uint32_t) {
        return nullptr;
      }};
  const auto refused = [&](auto change) {
    EndpointOptions options = good;
    change(options);
    return !(*proxy)->AddEndpoint(options).ok();
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto& o) { o.rank = 1024; }));
  EXPECT_TRUE(refused([](auto& o) { o.peers = {1024}; }));
  EXPECT_TRUE(refused([](auto& o) { o.peers = {0}; }));
  EXPECT_TRUE(refused([](auto& o) { o.peers = {1, 2, 1}; }));
  EXPECT_TRUE(refused([](auto& o) { o.ll_slots = 4097; }));
  EXPECT_TRUE(refused([](auto& o) { o.heap = {}; }));
  EXPECT_TRUE(refused([](auto& o) { o.ring_slots = 100; }));
  EXPECT_TRUE(refused([](auto& o) { o.num_ranks = 1025; }));
  EXPECT_FALSE(refused([](auto& o) {
    o.peers.clear();
    for (uint32_t i = 1; i < 1024; ++i) o.peers.push_back(i);
  }));
}

TEST(Connect, names_what_differs_between_the_two) {
  std::byte heap[2][64] = {};
  FailureLatch latch;
  struct Side {
    std::unique_ptr<Proxy> proxy;
    int endpoint = 0;
  };
  const auto make = [&](uint32_t rank, const std::string& group, uint32_t window, uint32_t ll_slots,
                        uint32_t num_ranks, std::vector<uint32_t> peers) {
    auto proxy = Proxy::Create(
        ProxyOptions{.group_name = group, .transport = "loopback", .window_messages = window},
        &latch);
    EXPECT_TRUE(proxy.ok());
    const Result<int> endpoint =
        (*proxy)->AddEndpoint(EndpointOptions{.rank = rank,
                                              .num_ranks = num_ranks,
                                              .peers = peers,
                                              .ll_slots = ll_slots,
                                              .heap = heap[rank],
                                              .flag = [](Channel, uint32_t) { return nullptr; }});
    EXPECT_TRUE(endpoint.ok());
    return Side{std::move(*proxy), *endpoint};
  };
  const Side a = make(0, "g", 8, 4, 2, {1});
  const auto connect = [&](const Side& b) {
    return a.proxy
        ->Connect(a.endpoint, 1, b.proxy->LocalBlob(b.endpoint),
                  Deadline::After(std::chrono::seconds(1)))
        .message();
  };
  EXPECT_TRUE(Contains(connect(make(1, "other", 8, 4, 2, {0})), "group is other, ours g"));
  EXPECT_TRUE(Contains(connect(make(1, "g", 9, 4, 2, {0})), "window"));
  EXPECT_TRUE(Contains(connect(make(1, "g", 8, 5, 2, {0})), "LL slots is 5, ours 4"));
  EXPECT_TRUE(Contains(connect(make(1, "g", 8, 4, 4, {0})), "num_ranks is 4, ours 2"));
  EXPECT_TRUE(Contains(connect(make(1, "g", 8, 4, 2, {})), "node_size"));
  EXPECT_FALSE(a.proxy->Start().ok());  // still not connected
  EXPECT_EQ(connect(make(1, "g", 8, 4, 2, {0})), "");
  EXPECT_FALSE(
      a.proxy->Connect(a.endpoint, 1, "garbage", Deadline::After(std::chrono::seconds(1))).ok());
}

TEST(BadCommand, is_latched_with_the_rank_and_reaches_the_peers) {
  const Command bad[] = {
      {.op = Op::kSignal, .dst_rank = 0, .channel = Channel::kPlan, .epoch = 1},    // itself
      {.op = Op::kSignal, .dst_rank = 700, .channel = Channel::kPlan, .epoch = 1},  // nobody
      {.op = Op::kWrite, .dst_rank = 1, .length_bytes = 16, .remote_offset = 1 << 20},
      {.op = Op::kWrite, .dst_rank = 1, .length_bytes = 16, .local_offset = 1 << 20},
      {.op = Op::kWriteSignal, .dst_rank = 1, .length_bytes = 16, .channel = Channel::kLlCombine},
      {.op = Op::kWrite,
       .dst_rank = 1,
       .length_bytes = 16,
       .channel = Channel::kLlCombine,
       .value = 16},
      {.op = Op::kSignal, .dst_rank = 1, .channel = Channel::kLlCombine, .value = 17},
      {.op = Op::kQuiet, .epoch = 5},
      {.op = Op::kBarrier, .epoch = 2},
  };
  for (const Command& command : bad) {
    WorldOptions options;
    options.ranks_per_process = 1;
    ProxyWorld world(options);
    world.Start();
    world.Push(0, command);
    EXPECT_TRUE(Contains(AwaitFailure(world, 0), "group test: rank 0"));
    EXPECT_EQ(world.failure(0).status().code(), StatusCode::kInvalidArgument)
        << world.failure(0).status().message();
    const std::string told = AwaitFailure(world, 1);
    EXPECT_TRUE(Contains(told, "rank 0 reported a failure")) << told;
    world.Stop();
  }
}

TEST(BadCommand, with_unknown_op_or_channel_is_an_error) {
  for (const uint64_t commit_word :
       {uint64_t{7} << kCommandOpShift, uint64_t{63} << kCommandChannelShift}) {
    ProxyWorld world(WorldOptions{});
    world.Start();
    world.PushPacked(0, PackedCommand{{0, commit_word}});
    EXPECT_TRUE(Contains(AwaitFailure(world, 0), "unknown"));
    world.Stop();
  }
}

// A stray or damaged immediate must never become a write outside a flag, and the error names the
// peer whose flow it claims.
TEST(BadArrival, is_an_error_with_the_peers_name) {
  const auto flow = [](Channel channel) { return static_cast<uint32_t>(channel); };
  const Imm bad[] = {
      {.kind = ImmKind::kSignal, .flow = flow(Channel::kPlan), .epoch = 1, .payload = 300},
      {.kind = ImmKind::kSignal, .flow = flow(Channel::kPlan), .epoch = 2, .payload = 0},
      {.kind = ImmKind::kSlot, .flow = flow(Channel::kLlDispatch), .epoch = 1, .payload = 16},
      {.kind = ImmKind::kCount, .flow = flow(Channel::kLlDispatch), .epoch = 1, .payload = 17},
      {.kind = ImmKind::kControl,
       .flow = 0,
       .epoch = static_cast<uint32_t>(ImmControl::kAck),
       .payload = 1},  // acknowledges nothing sent
      {.kind = ImmKind::kControl, .flow = 0, .epoch = 9},
  };
  std::vector<uint32_t> all;
  for (const Imm& imm : bad) all.push_back(*TryEncodeImm(imm));
  all.push_back((1u << kImmMarkShift) | (kImmControlChannel << kImmFlowShift));  // no kind
  for (const uint32_t bits : all) {
    auto gate = std::make_shared<Gate>();
    ProxyWorld world(Gated(gate, 0));
    world.Start();
    gate->Inject(bits);
    world.proxy(0).Kick();
    const std::string message = AwaitFailure(world, 0);
    EXPECT_TRUE(Contains(message, "rank 1 sent a message that breaks the protocol")) << message;
    EXPECT_TRUE(Contains(AwaitFailure(world, 1), "blames this rank"));
    world.Stop();
  }
}

TEST(BadArrival, of_an_unknown_flow_is_an_error) {
  for (const uint32_t flow : {16u, kMaxFlows - kNumChannels}) {
    auto gate = std::make_shared<Gate>();
    ProxyWorld world(Gated(gate, 0));
    world.Start();
    gate->Inject(*TryEncodeImm(Imm{.kind = ImmKind::kSignal, .flow = flow, .epoch = 1}));
    world.proxy(0).Kick();
    EXPECT_TRUE(Contains(AwaitFailure(world, 0), "flow " + std::to_string(flow) + " of 16"));
    world.Stop();
  }
}

TEST(StaleArrival, is_dropped_and_counted) {
  auto gate = std::make_shared<Gate>();
  ProxyWorld world(Gated(gate, /*gated_rank=*/1));
  world.Start();
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) world.Push(0, Signal(1, epoch));
  world.AwaitFlag(1, Channel::kPlan, 0, 3);
  for (uint32_t sequence = 0; sequence < 3; ++sequence) {
    gate->Inject(*TryEncodeImm(Imm{.kind = ImmKind::kSignal,
                                   .flow = static_cast<uint32_t>(Channel::kPlan),
                                   .epoch = sequence + 1,
                                   .payload = sequence}));
  }
  world.proxy(1).Kick();
  world.Barrier();
  EXPECT_EQ(world.flag(1, Channel::kPlan, 0)->load(), 3u);
  uint64_t num_duplicates = 0;
  for (const FlowStats& flow : world.proxy(1).Stats()) num_duplicates += flow.duplicates;
  EXPECT_EQ(num_duplicates, 3u);
  world.Stop();
  EXPECT_FALSE(world.failure(1).failed());
}

TEST(TransportError, is_latched_with_its_words) {
  auto gate = std::make_shared<Gate>();
  ProxyWorld world(Gated(gate, 0));
  world.Start();
  gate->Break(Internal("the cable burns"));
  world.proxy(0).Kick();
  EXPECT_TRUE(Contains(AwaitFailure(world, 0), "the cable burns"));
  const auto begin = steady_clock::now();
  world.proxy(0).Stop();
  EXPECT_LT(steady_clock::now() - begin, Proxy::kMaxStopTime);
}

TEST(PeerDeath, is_reported_by_every_survivor_with_the_dead_ranks_name_in_time) {
  WorldOptions options;
  options.num_ranks = 4;
  options.ranks_per_process = 1;
  options.proxy.peer_timeout = milliseconds(1000);
  options.proxy.faulty_spec = "seed=1,die_after=40,die_rank=2";
  ProxyWorld world(options);
  world.Start();
  for (uint64_t epoch = 1; epoch <= 20; ++epoch) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      for (const uint32_t peer : world.PeersOf(rank)) world.Push(rank, Signal(peer, epoch));
    }
    if (epoch == 2) {  // all have heard of each other before one dies
      for (uint32_t rank = 0; rank < 4; ++rank) {
        for (const uint32_t peer : world.PeersOf(rank)) {
          world.AwaitFlag(rank, Channel::kPlan, peer, epoch);
        }
      }
    }
  }
  const auto begin = steady_clock::now();
  for (const uint32_t rank : {0u, 1u, 3u}) {
    const std::string message = AwaitFailure(world, rank);
    EXPECT_EQ(world.failure(rank).status().code(), StatusCode::kUnavailable);
    EXPECT_TRUE(Contains(message, "rank 2")) << message;
    EXPECT_TRUE(Contains(message, "group test: ")) << message;
  }
  EXPECT_LT(steady_clock::now() - begin, 3 * options.proxy.peer_timeout);
  EXPECT_FALSE(AwaitFailure(world, 2).empty());  // it hears nobody
  const auto stop_begin = steady_clock::now();
  world.Stop();
  EXPECT_LT(steady_clock::now() - stop_begin, Proxy::kMaxStopTime);
}

TEST(PeerDeath, is_noticed_by_an_idle_group_too) {
  WorldOptions options;
  options.ranks_per_process = 1;
  options.proxy.peer_timeout = milliseconds(500);
  options.proxy.faulty_spec = "seed=1,die_after=20,die_rank=1";
  ProxyWorld world(options);
  world.Start();
  const std::string message = AwaitFailure(world, 0);
  EXPECT_TRUE(Contains(message, "group test: rank 1 stopped answering: no heartbeat for"))
      << message;
  world.Stop();
}

// Once heartbeats stopped at the first peer whose queue was full, a dead one's, and those behind it
// in the list found this rank, which lived, silent first.
TEST(Heartbeats, pass_a_full_queue_so_that_all_blame_the_dead_rank) {
  auto gate = std::make_shared<Gate>();
  WorldOptions options = Gated(gate, /*gated_rank=*/0, /*num_ranks=*/4);
  options.proxy.peer_timeout = milliseconds(1000);
  options.proxy.faulty_spec = "seed=1,die_after=20,die_rank=1";
  ProxyWorld world(options);
  world.Start();
  for (uint32_t rank = 0; rank < 4; ++rank) {  // all have heard of each other
    for (const uint32_t peer : world.PeersOf(rank)) world.Push(rank, Signal(peer, 1));
  }
  for (const uint32_t peer : {1u, 2u, 3u}) world.AwaitFlag(peer, Channel::kPlan, 0, 1);
  gate->Answer(/*peer=*/0, ResourceExhausted("queue full"));  // rank 0 to rank 1
  for (const uint32_t rank : {0u, 2u, 3u}) {
    const std::string message = AwaitFailure(world, rank);
    EXPECT_TRUE(Contains(message, "rank 1")) << message;
    EXPECT_FALSE(Contains(message, "rank 0 stopped")) << message;
  }
  world.Stop();
}

// A rank that ends because another died leaves a broken connection too, and its own report may come
// a moment after. Once the first connection that broke was blamed.
TEST(PeerDeath, a_report_that_comes_with_the_broken_connection_names_the_culprit) {
  auto gate = std::make_shared<Gate>();
  ProxyWorld world(Gated(gate, /*gated_rank=*/1, /*num_ranks=*/3));
  world.Start();
  world.Barrier();
  gate->Answer(/*peer=*/0, Unavailable("connection reset"));  // rank 1 to rank 0
  world.Push(1, Signal(0, 1));
  std::this_thread::sleep_for(milliseconds(20));  // the write has been tried
  gate->Inject(*TryEncodeImm(Imm{.kind = ImmKind::kControl,
                                 .flow = 0,
                                 .epoch = static_cast<uint32_t>(ImmControl::kFailed),
                                 .payload = 1 + 2}));
  world.proxy(1).Kick();
  const std::string message = AwaitFailure(world, 1);
  EXPECT_TRUE(Contains(message, "rank 0 reported a failure of rank 2")) << message;
  world.Stop();
}

TEST(LivePeer, that_does_nothing_is_kept_alive_by_heartbeats) {
  WorldOptions options;
  options.ranks_per_process = 1;
  options.proxy.peer_timeout = milliseconds(500);
  options.proxy.faulty_spec = "seed=1,reorder=4,again=20";
  ProxyWorld world(options);
  world.Start();
  std::this_thread::sleep_for(milliseconds(1500));
  EXPECT_FALSE(world.failure(0).failed()) << world.failure(0).status().message();
  EXPECT_FALSE(world.failure(1).failed()) << world.failure(1).status().message();
  world.Stop();
}

WorldOptions ThreeProxies(TeamId team) {
  WorldOptions options;
  options.num_ranks = 3;
  options.ranks_per_process = 1;
  options.team = team;
  return options;
}

TEST(FailureOfOthers, latched_in_this_process_ends_the_group_everywhere_and_names_the_blamed) {
  ProxyWorld world(ThreeProxies({}));
  world.Start();
  world.failure(0).Set(Unavailable("the monitor saw that rank 2 died"), /*blamed=*/2);
  world.proxy(0).Kick();
  const std::string message = AwaitFailure(world, 1);
  EXPECT_TRUE(Contains(message, "rank 0 reported a failure of rank 2")) << message;
  EXPECT_EQ(world.failure(1).blamed_rank(), 2);
  world.Stop();
}

// Ranks count from 0 in each team: the culprit of one team was taken for its namesake in another.
// Who has ranks in both may hear of it here first, so it is named.
TEST(FailureOfOthers, in_another_team_names_its_rank) {
  ProxyWorld world(ThreeProxies({.index = 1, .num_teams = 2}));
  world.Start();
  world.failure(0).Set(Unavailable("rank 2 of team 0 died"), RankOfTeam(0, 2));
  world.proxy(0).Kick();
  const std::string message = AwaitFailure(world, 1);
  EXPECT_TRUE(Contains(message, "rank 0 of team 1 reported a failure of rank 2 of team 0"))
      << message;
  EXPECT_EQ(world.failure(1).blamed_rank(), RankOfTeam(0, 2));
  world.Stop();
}

// Who passed it on without a rank was blamed itself.
TEST(FailureOfOthers, that_has_no_name_blames_none_of_those_who_pass_it_on) {
  ProxyWorld world(ThreeProxies({.index = 1, .num_teams = 2}));
  world.Start();
  world.failure(1).Set(Unavailable("rank 0 reported a failure of somebody"),
                       FailureLatch::kUnnamed);
  world.proxy(1).Kick();
  const std::string message = AwaitFailure(world, 2);
  EXPECT_TRUE(Contains(message, "a failure of a rank that its message has no room")) << message;
  EXPECT_EQ(world.failure(2).blamed_rank(), FailureLatch::kUnnamed);
  world.Stop();
}

TEST(FailureOfOthers, in_a_later_team_names_its_rank) {
  ProxyWorld world(ThreeProxies({.index = 1, .num_teams = 2}));
  world.Start();
  world.failure(0).Set(Unavailable("rank 2 died"), RankOfTeam(1, 2));
  world.proxy(0).Kick();
  const std::string message = AwaitFailure(world, 1);
  EXPECT_TRUE(Contains(message, ": rank 1 of team 1: ")) << message;
  EXPECT_TRUE(Contains(message, "rank 0 of team 1 reported a failure of rank 2 of team 1"))
      << message;
  EXPECT_EQ(world.failure(1).blamed_rank(), RankOfTeam(1, 2));
  world.Stop();
}

// It was logged as an error that "its own error says more" of; there was none.
TEST(FailureOfOthers, is_none_where_the_processes_agree_anew) {
  ProxyWorld world(ThreeProxies({}));
  world.Start();
  testing::internal::CaptureStderr();
  world.failure(0).Set(FailedPrecondition("this process called agree"), FailureLatch::kAgreement);
  world.proxy(0).Kick();
  const std::string message = AwaitFailure(world, 1);
  AwaitFailure(world, 2);
  world.Stop();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_TRUE(Contains(message, "rank 0 says that the processes of the group agree anew"))
      << message;
  EXPECT_EQ(world.failure(1).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(world.failure(1).blamed_rank(), FailureLatch::kAgreement);
}

TEST(Stop, of_one_side_after_a_barrier_is_no_death_for_the_other) {
  WorldOptions options;
  options.ranks_per_process = 1;
  options.proxy.peer_timeout = milliseconds(300);
  options.proxy.faulty_spec = "seed=1,reorder=4,delay=2,duplicate=20";
  ProxyWorld world(options);
  world.Start();
  world.Barrier();
  world.proxy(0).Stop();
  std::this_thread::sleep_for(milliseconds(900));
  EXPECT_FALSE(world.failure(1).failed()) << world.failure(1).status().message();
  const auto begin = steady_clock::now();
  world.proxy(1).Stop();
  EXPECT_LT(steady_clock::now() - begin, milliseconds(1500));
  EXPECT_FALSE(world.failure(1).failed()) << world.failure(1).status().message();
}

TEST(Stop, sends_what_is_still_queued) {
  WorldOptions options;
  options.ranks_per_process = 1;
  options.ring_slots = 1024;
  options.proxy.window_messages = 2;
  options.proxy.faulty_spec = "seed=1,reorder=4,delay=2";
  ProxyWorld world(options);
  world.Start();
  for (uint64_t epoch = 1; epoch <= 100; ++epoch) world.Push(0, Signal(1, epoch));
  world.proxy(0).Stop();
  world.AwaitFlag(1, Channel::kPlan, 0, 100);
  world.Stop();
}

TEST(Stop, is_bounded_when_the_peer_never_answers_and_twice_is_once) {
  auto gate = std::make_shared<Gate>();
  ProxyWorld world(Gated(gate, 0));
  world.Start();
  gate->HoldArrivals(true);
  world.Push(0, Signal(1, 1));
  const auto begin = steady_clock::now();
  world.proxy(0).Stop();
  world.proxy(0).Stop();
  EXPECT_LT(steady_clock::now() - begin, Proxy::kMaxStopTime);
  world.Stop();
}

TEST(Stop, without_start_does_nothing) {
  FailureLatch latch;
  auto proxy = Proxy::Create(ProxyOptions{.group_name = "g", .transport = "loopback"}, &latch);
  ASSERT_TRUE(proxy.ok());
  (*proxy)->Stop();
  EXPECT_FALSE(latch.failed());
}

TEST(Sending, to_a_rank_that_has_closed_is_an_error_that_says_so) {
  WorldOptions options;
  options.ranks_per_process = 1;
  ProxyWorld world(options);
  world.Start();
  world.Barrier();
  world.proxy(1).Stop();
  std::this_thread::sleep_for(milliseconds(20));
  world.Push(0, Signal(1, 1));
  EXPECT_TRUE(Contains(AwaitFailure(world, 0), "rank 1 has closed the group"));
  world.Stop();
}

}  // namespace
}  // namespace jax_ep
