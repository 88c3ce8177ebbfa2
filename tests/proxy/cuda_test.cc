// The cuda transport over made-up copy engines: what it joins, and what it does when peers or the
// runtime fail. tests/kernels_gpu and tests/gpu run it on GPUs.
#include <array>

#include "tests/proxy/transport_conformance.h"

namespace jax_ep {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Cuda, TransportConformance,
    testing::Values(TransportParams{.name = "plain", .transport = "cuda", .is_gpu = true},
                    TransportParams{
                        .name = "faulty",
                        .transport = "cuda",
                        .faulty_spec = "seed=3,reorder=8,delay=4,duplicate=10,again=10,split=20",
                        .is_gpu = true}),
    TransportParamsName);

// Two endpoints; `from` writes into `to`.
class Cuda : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 4096;

  void SetUp() override {
    mapped_["to"] = to_bytes_;
    for (size_t i = 0; i < kBytes; ++i) from_bytes_[i] = static_cast<std::byte>(i % 251);
    auto from = MakeTransport("cuda", TransportOptions{.rank = 0, .copies = &copies_});
    auto to = MakeTransport("cuda",
                            TransportOptions{.rank = 1, .inbox_slots = 16, .copies = &to_copies_});
    ASSERT_TRUE(from.ok() && to.ok());
    from_ = std::move(*from);
    to_ = std::move(*to);
    const auto own = from_->Register({.bytes = from_bytes_, .export_blob = "from", .device = 0});
    const auto its = to_->Register({.bytes = to_bytes_, .export_blob = "to", .device = 1});
    const auto peer = from_->Connect(to_->LocalAddress(), Deadline::After(std::chrono::seconds(1)));
    ASSERT_TRUE(own.ok() && its.ok() && peer.ok());
    ASSERT_TRUE(from_->ImportRemoteKey(*peer, its->key).ok());
  }

  Status Write(uint64_t local, uint64_t remote, uint64_t bytes, uint32_t immediate) {
    return from_->PostWrite({.peer = 0,
                             .local_offset = local,
                             .remote_offset = remote,
                             .length_bytes = bytes,
                             .has_immediate = true,
                             .immediate = immediate,
                             .token = immediate});
  }
  size_t Poll(Transport& transport) {
    std::array<TransportEvent, 64> events;
    const Result<size_t> count = transport.Poll(events);
    EXPECT_TRUE(count.ok()) << count.status().message();
    return count.ok() ? *count : 0;
  }

  // Whether look() says so within a second: writes wait a little for more.
  template <typename Look>
  static bool Soon(Look&& look) {
    const Deadline deadline = Deadline::After(std::chrono::seconds(1));
    while (!look()) {
      if (deadline.expired()) return false;
    }
    return true;
  }

  std::array<std::byte, kBytes> from_bytes_{}, to_bytes_{};
  FakeCopies::Mapped mapped_;
  // Long enough that both batches run until a test has posted what shall wait for them.
  FakeCopies copies_{&mapped_, /*seed=*/1, /*delay=*/1000}, to_copies_{&mapped_, 2, 2};
  std::unique_ptr<Transport> from_, to_;
};

TEST_F(Cuda, joins_writes_that_continue_each_other_whatever_their_order) {
  for (const uint32_t row : {3u, 0u, 2u, 1u}) {
    ASSERT_TRUE(Write(64 * row, 128 + 64 * row, 64, row).ok());
  }
  ASSERT_TRUE(Write(1024, 2048, 64, 4).ok());  // apart from them on both sides
  ASSERT_TRUE(Write(1088, 3072, 64, 5).ok());  // follows that one on one side alone
  size_t num_sent = 0, num_arrived = 0;
  EXPECT_TRUE(Soon([&] {
    num_sent += Poll(*from_);
    num_arrived += Poll(*to_);
    return num_sent == 6 && num_arrived == 6;  // each has its own arrival
  }));
  EXPECT_EQ(copies_.num_copies(), 3u);
  const auto at = [](auto& bytes, std::ptrdiff_t offset) { return bytes.begin() + offset; };
  EXPECT_TRUE(std::equal(at(from_bytes_, 0), at(from_bytes_, 256), at(to_bytes_, 128)));
  EXPECT_TRUE(std::equal(at(from_bytes_, 1024), at(from_bytes_, 1088), at(to_bytes_, 2048)));
  EXPECT_TRUE(std::equal(at(from_bytes_, 1088), at(from_bytes_, 1152), at(to_bytes_, 3072)));
}

// Writes of a batch are reported together: the oldest must not wait for the end of much that came
// after them.
TEST(CudaBatches, end_at_16_MiB_of_the_oldest_writes) {
  constexpr uint64_t kWrite = uint64_t{1} << 20, kWrites = 40, kOfBatch = 16;
  std::vector<std::byte> from_bytes(kWrite * kWrites), to_bytes(kWrite * kWrites);
  const FakeCopies::Mapped mapped{{"to", to_bytes}};
  FakeCopies copies(&mapped, /*seed=*/1, /*delay=*/50), to_copies(&mapped, 2, 2);
  auto from = MakeTransport("cuda", TransportOptions{.rank = 0, .copies = &copies});
  auto to =
      MakeTransport("cuda", TransportOptions{.rank = 1, .inbox_slots = 64, .copies = &to_copies});
  ASSERT_TRUE(from.ok() && to.ok());
  const auto own = (*from)->Register({.bytes = from_bytes, .export_blob = "from", .device = 0});
  const auto its = (*to)->Register({.bytes = to_bytes, .export_blob = "to", .device = 1});
  const auto peer =
      (*from)->Connect((*to)->LocalAddress(), Deadline::After(std::chrono::seconds(1)));
  ASSERT_TRUE(own.ok() && its.ok() && peer.ok());
  ASSERT_TRUE((*from)->ImportRemoteKey(*peer, its->key).ok());
  // The oldest lie behind the others.
  for (uint32_t i = 0; i < kWrites; ++i) {
    const uint64_t at = (kWrites - 1 - i) * kWrite;
    ASSERT_TRUE((*from)
                    ->PostWrite({.peer = 0,
                                 .local_offset = at,
                                 .remote_offset = at,
                                 .length_bytes = kWrite,
                                 .has_immediate = true,
                                 .immediate = i,
                                 .token = i})
                    .ok());
  }
  std::array<TransportEvent, 64> events;
  std::vector<size_t> reported;
  size_t num_sent = 0;
  const Deadline deadline = Deadline::After(std::chrono::seconds(5));
  while (num_sent < kWrites && !deadline.expired()) {
    const Result<size_t> count = (*from)->Poll(events);
    ASSERT_TRUE(count.ok()) << count.status().message();
    for (size_t i = 0; i < *count; ++i) {
      EXPECT_EQ(events[i].token / kOfBatch, reported.size()) << "the oldest come first";
    }
    if (*count > 0) reported.push_back(*count);
    num_sent += *count;
  }
  EXPECT_EQ(reported, (std::vector<size_t>{kOfBatch, kOfBatch, kWrites - 2 * kOfBatch}));
  EXPECT_EQ(copies.num_copies(), 3u);  // each continues itself
}

TEST_F(Cuda, gathers_what_comes_while_copies_run) {
  size_t num_sent = 0;
  const auto begin = [&](uint32_t row) {
    ASSERT_TRUE(Write(64 * row, 64 * row, 64, row).ok());
    const uint64_t num_copies = copies_.num_copies();
    while (copies_.num_copies() == num_copies) num_sent += Poll(*from_);
  };
  begin(0);
  begin(1);  // as many as may be under way
  for (uint32_t row = 2; row < 10; ++row) {
    ASSERT_TRUE(Write(64 * row, 64 * row, 64, row).ok());
    if (row == 5) num_sent += Poll(*from_);
  }
  EXPECT_FALSE(from_->PrepareToSleep());  // no bell will ring when they end
  EXPECT_TRUE(Soon([&] { return (num_sent += Poll(*from_)) == 10; }));
  EXPECT_EQ(copies_.num_copies(), 3u);
  EXPECT_TRUE(from_->PrepareToSleep());
}

TEST_F(Cuda, writes_that_never_cease_do_not_hold_up_the_first) {
  for (uint32_t i = 0; copies_.num_copies() == 0 && i < 1000; ++i) {
    ASSERT_TRUE(Write(0, 0, 16, i).ok());
    Poll(*from_);
  }
  EXPECT_GT(copies_.num_copies(), 0u);
}

TEST_F(Cuda, an_arrival_never_comes_before_its_bytes) {
  ASSERT_TRUE(Write(0, 0, kBytes, 7).ok());
  while (Poll(*to_) == 0) {
    EXPECT_EQ(to_bytes_[kBytes - 1], std::byte{0});
    Poll(*from_);
  }
  EXPECT_EQ(to_bytes_, from_bytes_);
}

TEST_F(Cuda, a_full_inbox_delays_its_own_peer_alone) {
  auto third = MakeTransport("cuda", TransportOptions{.rank = 2, .copies = &to_copies_});
  ASSERT_TRUE(third.ok());
  const auto peer =
      from_->Connect((*third)->LocalAddress(), Deadline::After(std::chrono::seconds(1)));
  ASSERT_TRUE(peer.ok());
  std::array<std::byte, kBytes> bytes{};
  mapped_["third"] = bytes;
  const auto region = (*third)->Register({.bytes = bytes, .export_blob = "third", .device = 0});
  ASSERT_TRUE(region.ok() && from_->ImportRemoteKey(*peer, region->key).ok());
  for (uint32_t row = 0; row < 32; ++row) ASSERT_TRUE(Write(64 * row, 64 * row, 64, row).ok());
  ASSERT_TRUE(from_->PostWrite({.peer = *peer, .length_bytes = 64, .has_immediate = true}).ok());
  size_t num_sent = 0;
  EXPECT_TRUE(Soon([&] { return (num_sent += Poll(*from_)) == 16 + 1; }));
  for (int i = 0; i < 20; ++i) num_sent += Poll(*from_);
  EXPECT_EQ(num_sent, 16u + 1);  // the inbox is full
  EXPECT_EQ(Poll(**third), 1u);
  size_t num_arrived = 0;
  EXPECT_TRUE(Soon([&] {
    num_arrived += Poll(*to_);
    num_sent += Poll(*from_);
    return num_arrived == 32 && num_sent == 32 + 1;
  }));
}

TEST_F(Cuda, a_peer_that_closes_takes_nothing_with_it) {
  ASSERT_TRUE(Write(0, 0, 64, 0).ok());
  to_.reset();
  size_t num_sent = 0;
  EXPECT_TRUE(Soon([&] { return (num_sent += Poll(*from_)) == 1; }));
  EXPECT_EQ(Write(0, 0, 64, 1).code(), StatusCode::kUnavailable);
}

TEST_F(Cuda, an_error_of_the_runtime_is_the_error_of_poll) {
  copies_.Fail();
  ASSERT_TRUE(Write(0, 0, 64, 0).ok());
  std::array<TransportEvent, 4> events;
  Result<size_t> count = 0;
  ASSERT_TRUE(Soon([&] { return !(count = from_->Poll(events)).ok(); }));
  EXPECT_EQ(count.status().message(), "cuda: made up");
}

TEST_F(Cuda, memory_that_is_not_mapped_here_is_refused) {
  mapped_.clear();
  const auto its = to_->Register({.bytes = to_bytes_, .export_blob = "to", .device = 1});
  ASSERT_TRUE(its.ok());
  const Status refused = from_->ImportRemoteKey(0, its->key).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("not mapped in this process"), std::string::npos);
}

TEST_F(Cuda, memory_of_the_host_is_refused) {
  const Status refused = from_->Register({.bytes = from_bytes_, .export_blob = "from"}).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("not a GPU's memory"), std::string::npos);
}

TEST(CudaWithoutGpus, is_refused_with_what_to_do) {
  const Status refused = MakeTransport("cuda", TransportOptions{}).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("use \"shm\""), std::string::npos);
}

}  // namespace
}  // namespace jax_ep
