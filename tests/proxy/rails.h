// Two endpoints with two rails each: what one writes goes over both, by the rails' own counters.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proxy/base/shared_memory.h"
#include "proxy/transport/registry.h"

namespace jax_ep {

// How many messages each rail of `transport` has posted.
inline std::vector<uint64_t> MessagesOfRails(const Transport& transport) {
  std::string state;
  transport.AppendState(&state);
  std::vector<uint64_t> messages;
  // "; rail NAME: NUMBER messages, ..."; names may contain colons.
  for (size_t end = state.find(" messages"); end != std::string::npos;
       end = state.find(" messages", end + 1)) {
    messages.push_back(std::stoull(state.substr(state.rfind(' ', end - 1) + 1)));
  }
  return messages;
}

inline void ExpectRailsShareTheLoad(const std::string& transport) {
  constexpr uint32_t kNumWrites = 100;
  constexpr uint64_t kWriteBytes = 1024;
  Result<SharedMemory> memory = SharedMemory::Create(2 * kWriteBytes, /*shareable=*/false);
  ASSERT_TRUE(memory.ok());
  std::unique_ptr<Transport> ends[2];
  for (uint32_t i = 0; i < 2; ++i) {
    auto made = MakeTransport(transport, TransportOptions{.rank = i});
    ASSERT_TRUE(made.ok()) << made.status().message();
    ends[i] = std::move(*made);
  }
  const Deadline deadline = Deadline::After(std::chrono::seconds(30));
  const Result<LocalRegion> source =
      ends[0]->Register(MemoryRegion{.bytes = memory->bytes().first(kWriteBytes)});
  const Result<LocalRegion> target =
      ends[1]->Register(MemoryRegion{.bytes = memory->bytes().subspan(kWriteBytes)});
  ASSERT_TRUE(source.ok() && target.ok());
  const Result<uint32_t> peer = ends[0]->Connect(ends[1]->LocalAddress(), deadline);
  ASSERT_TRUE(peer.ok()) << peer.status().message();
  ASSERT_TRUE(ends[0]->ImportRemoteKey(*peer, target->key).ok());
  uint32_t num_posted = 0;
  uint32_t num_sent = 0;
  uint32_t num_arrived = 0;
  // Posts until `num_writes` have been posted by all calls; one at a time if `one_by_one`.
  const auto post = [&](uint32_t num_writes, bool one_by_one) {
    while (num_sent < num_writes || num_arrived < num_writes) {
      ASSERT_FALSE(deadline.expired());
      if (num_posted < num_writes && (!one_by_one || num_sent == num_posted) &&
          ends[0]
              ->PostWrite(WriteRequest{.peer = *peer,
                                       .length_bytes = kWriteBytes,
                                       .has_immediate = true,
                                       .immediate = num_posted})
              .ok()) {
        ++num_posted;
      }
      TransportEvent events[16];
      for (auto& end : ends) {
        const Result<size_t> count = end->Poll(events);
        ASSERT_TRUE(count.ok()) << count.status().message();
        for (size_t i = 0; i < *count; ++i) {
          ++(events[i].kind == TransportEvent::Kind::kSent ? num_sent : num_arrived);
        }
      }
    }
  };
  // A rail may connect at its first write, and the others take its turns until it has.
  std::vector<uint64_t> before;
  do {
    post(num_posted + 1, /*one_by_one=*/true);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    before = MessagesOfRails(*ends[0]);
    ASSERT_EQ(before.size(), 2u);
  } while (std::min(before[0], before[1]) == 0);

  post(num_posted + kNumWrites, /*one_by_one=*/false);
  ASSERT_FALSE(::testing::Test::HasFatalFailure());
  const std::vector<uint64_t> after = MessagesOfRails(*ends[0]);
  EXPECT_EQ(after[0] + after[1], num_posted);
  // Each a fair share: a rail that is full passes its turn on, so not exactly half.
  EXPECT_GE(std::min(after[0] - before[0], after[1] - before[1]), kNumWrites / 4)
      << after[0] << " and " << after[1];
}

}  // namespace jax_ep
