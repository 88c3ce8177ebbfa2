// What every transport must do, as one suite. A transport's test file includes this and
// instantiates TransportConformance with a factory; see loopback_test.cc.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proxy/base/shared_memory.h"
#include "proxy/transport.h"
#include "proxy/transport/registry.h"
#include "tests/proxy/fake_copies.h"

namespace jax_ep {

struct TransportParams {
  std::string name;       // of the test
  std::string transport;  // of the registry
  std::string faulty_spec = {};
  std::map<std::string, std::string> env = {};  // set while the test runs
  bool is_gpu = false;                          // heaps are a (made up) GPU's memory
};

inline std::string TransportParamsName(const testing::TestParamInfo<TransportParams>& info) {
  return info.param.name;
}

// Three endpoints, each connected to both others, each with one heap.
class TransportConformance : public testing::TestWithParam<TransportParams> {
 protected:
  static constexpr size_t kNumEndpoints = 3;
  static constexpr uint64_t kHeapBytes = 1 << 16;
  static constexpr std::chrono::seconds kTimeout{30};

  struct End {
    SharedMemory heap;
    std::unique_ptr<FakeCopies> copies;  // null: on CPUs
    std::unique_ptr<Transport> transport;
    LocalRegion region;
    std::array<uint32_t, kNumEndpoints> peer{};    // handle by endpoint
    std::array<uint32_t, kNumEndpoints> remote{};  // heap region by endpoint
    std::map<uint32_t, int> arrived;               // immediates and how often
    std::map<uint64_t, int> sent;                  // tokens and how often
    bool is_flushed = false;

    std::span<std::byte> bytes() { return heap.bytes(); }
  };

  Result<std::unique_ptr<Transport>> Make(uint32_t rank, FakeCopies* copies) {
    return MakeTransport(GetParam().transport,
                         TransportOptions{.rank = rank,
                                          .inbox_slots = 256,
                                          .faulty_spec = GetParam().faulty_spec,
                                          .copies = copies});
  }
  std::unique_ptr<FakeCopies> MakeCopies(uint32_t rank) {
    constexpr int kDelay = 3;
    return GetParam().is_gpu ? std::make_unique<FakeCopies>(&mapped_, rank, kDelay) : nullptr;
  }

  void SetUp() override {
    for (const auto& [name, value] : GetParam().env) setenv(name.c_str(), value.c_str(), 1);
    for (const TransportInfo& info : ListTransports()) {
      if (info.name == GetParam().transport && !info.is_available) GTEST_SKIP() << info.reason;
    }
    for (uint32_t i = 0; i < kNumEndpoints; ++i) {
      Result<SharedMemory> heap = SharedMemory::Create(kHeapBytes, /*shareable=*/true);
      ASSERT_TRUE(heap.ok());
      ends_[i].heap = std::move(*heap);
      ends_[i].copies = MakeCopies(i);
      mapped_[ends_[i].heap.Export()] = ends_[i].bytes();
      Result<std::unique_ptr<Transport>> transport = Make(i, ends_[i].copies.get());
      ASSERT_TRUE(transport.ok()) << transport.status().message();
      ends_[i].transport = std::move(*transport);
      Result<LocalRegion> region =
          ends_[i].transport->Register(MemoryRegion{.bytes = ends_[i].bytes(),
                                                    .export_blob = ends_[i].heap.Export(),
                                                    .device = GetParam().is_gpu ? 0 : -1});
      ASSERT_TRUE(region.ok()) << region.status().message();
      ends_[i].region = *region;
    }
    for (size_t i = 0; i < kNumEndpoints; ++i) {
      for (size_t j = 0; j < kNumEndpoints; ++j) {
        if (i == j) continue;
        const Result<uint32_t> peer = ends_[i].transport->Connect(
            ends_[j].transport->LocalAddress(), Deadline::After(kTimeout));
        ASSERT_TRUE(peer.ok()) << peer.status().message();
        ends_[i].peer[j] = *peer;
        const Result<uint32_t> remote =
            ends_[i].transport->ImportRemoteKey(*peer, ends_[j].region.key);
        ASSERT_TRUE(remote.ok()) << remote.status().message();
        ends_[i].remote[j] = *remote;
      }
    }
  }

  void TearDown() override {
    for (End& end : ends_) end.transport.reset();
    for (const auto& [name, value] : GetParam().env) unsetenv(name.c_str());
  }

  WriteRequest Write(size_t from, size_t to, uint64_t local, uint64_t remote, uint64_t length,
                     uint32_t immediate, uint64_t token) {
    return WriteRequest{.peer = ends_[from].peer[to],
                        .local_region = ends_[from].region.handle,
                        .remote_region = ends_[from].remote[to],
                        .local_offset = local,
                        .remote_offset = remote,
                        .length_bytes = length,
                        .has_immediate = true,
                        .immediate = immediate,
                        .secret = ~immediate,
                        .token = token};
  }

  void Poll(size_t i, size_t max_events = 16) {
    End& end = ends_[i];
    std::vector<TransportEvent> events(max_events);
    const Result<size_t> count = end.transport->Poll(events);
    ASSERT_TRUE(count.ok()) << count.status().message();
    ASSERT_LE(*count, max_events);
    for (size_t e = 0; e < *count; ++e) {
      switch (events[e].kind) {
        case TransportEvent::Kind::kSent:
          ++end.sent[events[e].token];
          break;
        case TransportEvent::Kind::kArrived:
          if (end.transport->Caps().immediate_bits >= 64) {
            EXPECT_EQ(events[e].secret, ~events[e].immediate);
          }
          ++end.arrived[events[e].immediate];
          break;
        case TransportEvent::Kind::kFlushed:
          end.is_flushed = true;
          break;
      }
    }
  }
  void PollAll() {
    for (size_t i = 0; i < kNumEndpoints; ++i) Poll(i);
  }

  // Posts, polling while the answer is "poll and try again".
  void Post(size_t from, const WriteRequest& request) {
    const Deadline deadline = Deadline::After(kTimeout);
    while (true) {
      const Status status = ends_[from].transport->PostWrite(request);
      if (status.ok()) return;
      ASSERT_EQ(status.code(), StatusCode::kResourceExhausted) << status.message();
      ASSERT_FALSE(deadline.expired());
      PollAll();
      if (HasFatalFailure()) return;
    }
  }

  void PollUntil(const std::function<bool()>& done) {
    const Deadline deadline = Deadline::After(kTimeout);
    while (!done()) {
      ASSERT_FALSE(deadline.expired());
      PollAll();
      if (HasFatalFailure()) return;
    }
  }

  // Makes everything that endpoint i has been told of visible, if arrival alone does not.
  void FlushArrivals(size_t i) {
    if (ends_[i].transport->Caps().arrival_implies_visible) return;
    ends_[i].is_flushed = false;
    const Result<bool> is_done = ends_[i].transport->Flush(/*token=*/1);
    ASSERT_TRUE(is_done.ok()) << is_done.status().message();
    if (!*is_done) PollUntil([&] { return ends_[i].is_flushed; });
  }

  void Fill(size_t i, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::byte& byte : ends_[i].bytes()) byte = static_cast<std::byte>(random());
  }

  FakeCopies::Mapped mapped_;
  std::array<End, kNumEndpoints> ends_;
};

TEST_P(TransportConformance, promises_what_the_protocol_needs) {
  const TransportCaps& caps = ends_[0].transport->Caps();
  EXPECT_GE(caps.immediate_bits, 32u);
  EXPECT_GE(caps.max_message_bytes, 16u);
}

TEST_P(TransportConformance, bytes_are_visible_once_their_arrival_is_flushed) {
  for (uint32_t round = 0; round < 50; ++round) {
    Fill(0, round);
    const uint64_t length = 16 * (1 + round);
    const uint64_t capped = std::min(length, ends_[0].transport->Caps().max_message_bytes);
    Post(0, Write(0, 1, 32, 4096, capped, round, round));
    PollUntil([&] { return ends_[1].arrived.contains(round); });
    FlushArrivals(1);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_TRUE(std::equal(ends_[0].bytes().begin() + 32,
                           ends_[0].bytes().begin() + 32 + static_cast<std::ptrdiff_t>(capped),
                           ends_[1].bytes().begin() + 4096));
  }
  EXPECT_TRUE(ends_[2].arrived.empty());
  EXPECT_TRUE(ends_[0].arrived.empty());
}

TEST_P(TransportConformance, an_empty_write_carries_its_immediate_and_touches_nothing) {
  const std::vector<std::byte> before(ends_[1].bytes().begin(), ends_[1].bytes().end());
  Fill(0, 1);
  Post(0, Write(0, 1, 0, 0, /*length=*/0, /*immediate=*/0xFFFFFFFF, 1));
  Post(0, Write(0, 1, 0, 0, /*length=*/0, /*immediate=*/0, 2));
  PollUntil([&] { return ends_[1].arrived.size() == 2; });
  FlushArrivals(1);
  EXPECT_TRUE(ends_[1].arrived.contains(0xFFFFFFFF));
  EXPECT_TRUE(ends_[1].arrived.contains(0));
  EXPECT_TRUE(std::equal(before.begin(), before.end(), ends_[1].bytes().begin()));
}

TEST_P(TransportConformance, a_write_without_immediate_is_delivered_and_reports_no_arrival) {
  Fill(0, 1);
  WriteRequest silent = Write(0, 1, 0, 512, 16, 0, /*token=*/1);
  silent.has_immediate = false;
  Post(0, silent);
  PollUntil([&] { return ends_[0].sent.contains(1); });
  Post(0, Write(0, 1, 0, 0, 0, 77, 2));
  PollUntil([&] { return ends_[1].arrived.contains(77); });
  FlushArrivals(1);
  EXPECT_EQ(ends_[1].arrived.size(), 1u);
  EXPECT_TRUE(std::equal(ends_[0].bytes().begin(), ends_[0].bytes().begin() + 16,
                         ends_[1].bytes().begin() + 512));
}

TEST_P(TransportConformance, every_post_completes_exactly_once_and_then_frees_its_source) {
  Fill(0, 1);
  const std::vector<std::byte> original(ends_[0].bytes().begin(), ends_[0].bytes().end());
  for (uint32_t i = 0; i < 100; ++i) Post(0, Write(0, 1, 16 * i, 16 * i, 16, i, 1000 + i));
  PollUntil([&] { return ends_[0].sent.size() == 100; });
  std::fill(ends_[0].bytes().begin(), ends_[0].bytes().end(), std::byte{0xEE});
  PollUntil([&] { return ends_[1].arrived.size() == 100; });
  FlushArrivals(1);
  for (int i = 0; i < 200; ++i) PollAll();
  for (const auto& [token, count] : ends_[0].sent) EXPECT_EQ(count, 1) << token;
  EXPECT_TRUE(std::equal(original.begin(), original.begin() + 1600, ends_[1].bytes().begin()));
}

TEST_P(TransportConformance, a_full_queue_asks_to_poll_and_loses_nothing) {
  constexpr uint32_t kMany = 100'000;  // more than any queue holds
  uint32_t posted = 0;
  while (posted < kMany &&
         ends_[0].transport->PostWrite(Write(0, 1, 0, 0, 0, posted, posted)).ok()) {
    ++posted;
  }
  ASSERT_LT(posted, kMany) << "nobody polls, yet everything fits";
  const uint32_t total = posted + 500;
  for (uint32_t i = posted; i < total; ++i) Post(0, Write(0, 1, 0, 0, 0, i, i));
  PollUntil([&] { return ends_[1].arrived.size() == total && ends_[0].sent.size() == total; });
}

TEST_P(TransportConformance, nothing_is_written_outside_a_region) {
  Fill(0, 1);
  const std::vector<std::byte> before(ends_[1].bytes().begin(), ends_[1].bytes().end());
  const auto refused = [&](const WriteRequest& request) {
    // A transport that says "poll and retry" has not judged the request yet.
    Status status = ends_[0].transport->PostWrite(request);
    for (int i = 0; i < 1000 && status.code() == StatusCode::kResourceExhausted; ++i) {
      PollAll();
      status = ends_[0].transport->PostWrite(request);
    }
    return status.code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(Write(0, 1, kHeapBytes, 0, 16, 1, 1)));
  EXPECT_TRUE(refused(Write(0, 1, kHeapBytes - 8, 0, 16, 1, 1)));
  EXPECT_TRUE(refused(Write(0, 1, 0, kHeapBytes, 16, 1, 1)));
  EXPECT_TRUE(refused(Write(0, 1, 0, kHeapBytes - 15, 16, 1, 1)));
  EXPECT_TRUE(refused(Write(0, 1, 0, UINT64_MAX - 7, 16, 1, 1)));
  EXPECT_TRUE(refused(Write(0, 1, UINT64_MAX - 7, 0, 16, 1, 1)));
  EXPECT_TRUE(refused(Write(0, 1, 0, 0, ends_[0].transport->Caps().max_message_bytes + 16, 1, 1)));
  WriteRequest bad = Write(0, 1, 0, 0, 16, 1, 1);
  bad.peer = 99;
  EXPECT_TRUE(refused(bad));
  bad = Write(0, 1, 0, 0, 16, 1, 1);
  bad.local_region = 99;
  EXPECT_TRUE(refused(bad));
  bad = Write(0, 1, 0, 0, 16, 1, 1);
  bad.remote_region = 99;
  EXPECT_TRUE(refused(bad));
  for (int i = 0; i < 200; ++i) PollAll();
  FlushArrivals(1);
  EXPECT_TRUE(ends_[1].arrived.empty());
  EXPECT_TRUE(ends_[0].sent.empty());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), ends_[1].bytes().begin()));
}

TEST_P(TransportConformance, garbage_addresses_and_keys_are_refused) {
  const std::string address = ends_[1].transport->LocalAddress();
  for (const std::string& bad : {std::string(), std::string("garbage"), address + "x",
                                 address.substr(0, address.size() - 1), std::string(100, '\0')}) {
    EXPECT_FALSE(ends_[0].transport->Connect(bad, Deadline::After(kTimeout)).ok());
  }
  const std::string key = ends_[1].region.key;
  for (const std::string& bad : {std::string(), std::string("garbage"), key + "x",
                                 key.substr(0, key.size() - 1), std::string(100, '\0')}) {
    EXPECT_FALSE(ends_[0].transport->ImportRemoteKey(ends_[0].peer[1], bad).ok());
  }
  EXPECT_FALSE(ends_[0].transport->ImportRemoteKey(/*peer=*/99, key).ok());
}

TEST_P(TransportConformance, random_writes_between_all_arrive) {
  std::mt19937_64 random(7);
  for (size_t i = 0; i < kNumEndpoints; ++i) Fill(i, i);
  std::vector<std::vector<std::byte>> expected;
  for (End& end : ends_) expected.emplace_back(end.bytes().begin(), end.bytes().end());
  // Sources are the first half of each heap; each write has its own target, so order is irrelevant.
  std::array<uint64_t, kNumEndpoints> next_target{};
  next_target.fill(kHeapBytes / 2);
  std::array<size_t, kNumEndpoints> num_expected{};
  uint32_t immediate = 0;
  while (true) {
    const size_t from = random() % kNumEndpoints;
    const size_t to = (from + 1 + random() % (kNumEndpoints - 1)) % kNumEndpoints;
    const uint64_t length =
        std::min<uint64_t>(16 * (random() % 20), ends_[from].transport->Caps().max_message_bytes);
    if (next_target[to] + length > kHeapBytes) break;
    const uint64_t local = random() % (kHeapBytes / 2 - length);
    Post(from, Write(from, to, local, next_target[to], length, immediate, immediate));
    ASSERT_FALSE(HasFatalFailure());
    std::copy_n(ends_[from].bytes().begin() + static_cast<std::ptrdiff_t>(local), length,
                expected[to].begin() + static_cast<std::ptrdiff_t>(next_target[to]));
    next_target[to] += length;
    ++num_expected[to];
    ++immediate;
    if (random() % 4 == 0) Poll(random() % kNumEndpoints, 1 + random() % 5);
  }
  for (size_t i = 0; i < kNumEndpoints; ++i) {
    PollUntil([&] { return ends_[i].arrived.size() == num_expected[i]; });
    FlushArrivals(i);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_TRUE(std::equal(expected[i].begin(), expected[i].end(), ends_[i].bytes().begin()));
  }
}

TEST_P(TransportConformance, rings_the_bell_of_who_has_something_to_poll) {
  Result<SharedMemory> bell = SharedMemory::Create(sizeof(Doorbell), /*shareable=*/true);
  ASSERT_TRUE(bell.ok());
  auto* doorbell = reinterpret_cast<Doorbell*>(bell->bytes().data());
  const std::unique_ptr<FakeCopies> copies = MakeCopies(/*rank=*/5);
  Result<std::unique_ptr<Transport>> sleeper =
      MakeTransport(GetParam().transport, TransportOptions{.rank = 5,
                                                           .bell = doorbell,
                                                           .bell_export = bell->Export(),
                                                           .faulty_spec = GetParam().faulty_spec,
                                                           .copies = copies.get()});
  ASSERT_TRUE(sleeper.ok());
  const Result<uint32_t> peer =
      ends_[0].transport->Connect((*sleeper)->LocalAddress(), Deadline::After(kTimeout));
  ASSERT_TRUE(peer.ok()) << peer.status().message();
  WriteRequest request = Write(0, 1, 0, 0, 0, 9, 9);
  request.peer = *peer;
  // The first messages may make connections, for which the sleeper must be awake. Then it polls in
  // vain and asks whether it may sleep, as a proxy does, and again if the bell rang meanwhile.
  const Deadline deadline = Deadline::After(kTimeout);
  constexpr size_t kFirst = 64;  // enough, at this pace, that every rail is connected
  constexpr std::chrono::milliseconds kPace{4};
  auto next_post = std::chrono::steady_clock::now();
  size_t num_posted = 0;
  size_t num_arrived = 0;
  uint32_t count = 0;
  for (int num_quiet = 0; num_quiet < 100;) {
    ASSERT_FALSE(deadline.expired());
    const uint32_t count_now = doorbell->count.load(std::memory_order_acquire);
    if (count_now != count) num_quiet = 0;
    count = count_now;
    if (num_posted < kFirst && std::chrono::steady_clock::now() >= next_post &&
        ends_[0].transport->PostWrite(request).ok()) {
      ++num_posted;
      next_post += kPace;
    }
    TransportEvent event;
    const Result<size_t> num_events = (*sleeper)->Poll({&event, 1});
    ASSERT_TRUE(num_events.ok()) << num_events.status().message();
    num_arrived += *num_events;
    const bool is_quiet = *num_events == 0 && num_arrived >= kFirst && (*sleeper)->PrepareToSleep();
    num_quiet = is_quiet ? num_quiet + 1 : 0;
    PollAll();
  }
  Post(0, request);
  PollUntil([&] { return doorbell->count.load(std::memory_order_acquire) > count; });
  // As in life, nobody closes while its peers are still at work.
  for (size_t num_empty = 0; num_empty < 1000; ++num_empty) {
    TransportEvent event;
    ASSERT_TRUE((*sleeper)->Poll({&event, 1}).ok());
    PollAll();
  }
}

}  // namespace jax_ep
