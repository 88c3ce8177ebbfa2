// Environment, blobs, shared memory, heartbeat watch: the small parts below the proxy.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "proxy/base/blob.h"
#include "proxy/base/env.h"
#include "proxy/base/failure.h"
#include "proxy/base/rank_name.h"
#include "proxy/base/shared_memory.h"
#include "proxy/life_signs.h"
#include "proxy/peer_blob.h"
#include "proxy/peer_watch.h"
#include "tests/proxy/no_memory.h"

namespace jax_ep {
namespace {

Result<Env> ReadEnv(const std::map<std::string, std::string>& variables) {
  return Env::Read([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

TEST(FailureLatch, keeps_the_first_and_its_culprit) {
  FailureLatch latch;
  EXPECT_TRUE(latch.status().ok());
  EXPECT_EQ(latch.blamed_rank(), FailureLatch::kNobody);
  EXPECT_TRUE(latch.Set(Internal("first"), RankOfTeam(1, 2)));
  EXPECT_FALSE(latch.Set(Internal("second"), 3));
  EXPECT_EQ(latch.status().message(), "first");
  EXPECT_EQ(latch.blamed_rank(), RankOfTeam(1, 2));
}

// A child made while a thread of the parent was looking found a lock that nobody gives back.
TEST(FailureLatch, can_be_read_in_a_forked_child_whatever_others_did) {
  FailureLatch latch;
  latch.Set(Internal(std::string(1 << 16, 'x')));  // long: looking takes a while
  std::vector<std::jthread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        (void)latch.failed(), (void)latch.blamed_rank(), (void)latch.status();
      }
    });
  }
  for (int i = 0; i < 30; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);  // a lock that is never given back ends the child by a signal
      _exit(latch.failed() && latch.blamed_rank() == FailureLatch::kNobody ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

// Copies are made where the group has just run out of memory.
TEST(Status, whose_copy_finds_no_memory_says_so) {
  const Status failed = Unavailable("rank 3 is gone: its process has ended");
  num_failing_allocations = 2;
  const Status copy = failed;
  Status assigned;
  assigned = failed;
  EXPECT_EQ(num_failing_allocations, 0);
  for (const Status& status : {copy, assigned}) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.message(), "out of memory");
  }
  EXPECT_EQ(Status(failed).message(), failed.message());
}

TEST(RankName, says_the_team_where_there_are_several) {
  EXPECT_EQ(RankName({}, 3), "rank 3");
  EXPECT_EQ(RankName({.index = 1, .num_teams = 2}, 30), "rank 30 of team 1");
  for (const char* name : {"rank 3", "rank 30 of team 12"}) EXPECT_TRUE(IsRankName(name)) << name;
  for (const char* name : {"", "rank ", "rank 3:", "rank 3 of team ", "rank x", "rank 3 of team 1,",
                           "a rank 3", "rank 3 (pid 7)"}) {
    EXPECT_FALSE(IsRankName(name)) << name;
  }
}

TEST(Env, unset_and_empty_give_the_defaults) {
  const Result<Env> env = ReadEnv({{"JAX_EP_WINDOW_BYTES", ""}});
  ASSERT_TRUE(env.ok());
  EXPECT_EQ(env->window_messages, Env().window_messages);
  EXPECT_EQ(env->caller_progress, 1u);
  EXPECT_EQ(env->window_bytes, Env().window_bytes);
  EXPECT_EQ(env->faulty_spec, "");
}

TEST(Env, values_are_taken_with_suffixes) {
  const Result<Env> env = ReadEnv({{"JAX_EP_LOG", "debug"},
                                   {"JAX_EP_WINDOW_MESSAGES", "4096"},
                                   {"JAX_EP_WINDOW_BYTES", "3M"},
                                   {"JAX_EP_RING_SLOTS", "64"},
                                   {"JAX_EP_INBOX_SLOTS", "128"},
                                   {"JAX_EP_CALLER_PROGRESS", "0"},
                                   {"JAX_EP_FAULTY", "seed=1"}});
  ASSERT_TRUE(env.ok()) << env.status().message();
  EXPECT_EQ(env->log_level, LogLevel::kDebug);
  EXPECT_EQ(env->window_messages, 4096u);
  EXPECT_EQ(env->window_bytes, uint64_t{3} << 20);
  EXPECT_EQ(env->ring_slots, 64u);
  EXPECT_EQ(env->inbox_slots, 128u);
  EXPECT_EQ(env->caller_progress, 0u);
  EXPECT_EQ(env->faulty_spec, "seed=1");
}

TEST(Env, a_bad_value_is_an_error_that_names_it) {
  const std::pair<const char*, const char*> bad[] = {
      {"JAX_EP_LOG", "loud"},
      {"JAX_EP_WINDOW_MESSAGES", "0"},
      {"JAX_EP_WINDOW_MESSAGES", "4097"},
      {"JAX_EP_WINDOW_MESSAGES", "12x"},
      {"JAX_EP_WINDOW_MESSAGES", "-1"},
      {"JAX_EP_WINDOW_BYTES", "15"},
      {"JAX_EP_WINDOW_BYTES", "1T"},
      {"JAX_EP_WINDOW_BYTES", "99999999999999G"},
      {"JAX_EP_RING_SLOTS", "100"},
      {"JAX_EP_TRACE", "/tmp/folder/"},
      {"JAX_EP_INBOX_SLOTS", "8"},
      {"JAX_EP_CALLER_PROGRESS", "2"},
  };
  for (const auto& [name, value] : bad) {
    const Result<Env> env = ReadEnv({{name, value}});
    ASSERT_FALSE(env.ok()) << name << "=" << value;
    EXPECT_EQ(env.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(env.status().message().find(std::string(name) + "=" + value), std::string::npos);
  }
}

TEST(Blob, a_damaged_blob_reads_as_nothing_and_never_past_its_end) {
  const std::string blob = BlobWriter().U64(7).Text("abc").Take();
  BlobReader good(blob);
  EXPECT_EQ(good.U64(), 7u);
  EXPECT_EQ(good.Text(), "abc");
  EXPECT_TRUE(good.finished());
  for (size_t length = 0; length < blob.size(); ++length) {
    BlobReader cut(std::string_view(blob).substr(0, length));
    cut.U64();
    cut.Text();
    EXPECT_FALSE(cut.ok());
  }
}

TEST(PeerBlob, round_trips_and_refuses_garbage) {
  const PeerBlob blob{.group_name = "g",
                      .rank = 3,
                      .num_ranks = 20,
                      .window_messages = 9,
                      .ll_slots = 8,
                      .transport_address = "address",
                      .heap_key = std::string("k\0y", 3),
                      .peers = {0, 1, 7, 8, 19}};
  const std::string text = blob.Encode();
  const Result<PeerBlob> read = PeerBlob::Decode(text);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->group_name, "g");
  EXPECT_EQ(read->rank, 3u);
  EXPECT_EQ(read->num_ranks, 20u);
  EXPECT_EQ(read->window_messages, 9u);
  EXPECT_EQ(read->ll_slots, 8u);
  EXPECT_EQ(read->heap_key, blob.heap_key);
  EXPECT_EQ(read->peers, blob.peers);
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_FALSE(PeerBlob::Decode(std::string_view(text).substr(0, length)).ok());
  }
  EXPECT_FALSE(read->secret_key.has_value());
  PeerBlob with_key = blob;
  with_key.secret_key = SipKey{1, uint64_t{2} << 60};
  const Result<PeerBlob> keyed = PeerBlob::Decode(with_key.Encode());
  ASSERT_TRUE(keyed.ok());
  EXPECT_EQ(keyed->secret_key, with_key.secret_key);
  EXPECT_EQ(keyed->peers, blob.peers);
  // A key cut to half, its length said to be so.
  std::string half = with_key.Encode();
  half.resize(half.size() - sizeof(uint64_t));
  half[half.size() - 2 * sizeof(uint64_t)] = sizeof(uint64_t);
  EXPECT_FALSE(PeerBlob::Decode(half).ok());
  std::string other_version = text;
  other_version[8] = 99;
  const Result<PeerBlob> refused = PeerBlob::Decode(other_version);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("version 99"), std::string::npos);
}

TEST(PeerBlob, is_hardly_longer_in_a_large_group) {
  PeerBlob blob{.group_name = "g", .num_ranks = 1024, .secret_key = SipKey{1, 2}};
  for (uint32_t rank = 8; rank < blob.num_ranks; ++rank) blob.peers.push_back(rank);
  EXPECT_LT(blob.Encode().size(), 300u);  // a bit for each rank
}

TEST(PeerBlob, each_pair_has_a_secret_of_its_own) {
  std::set<uint32_t> secrets;
  for (uint32_t rank = 0; rank < 1024; ++rank) {
    secrets.insert(SecretOf({1, 2}, rank));
    secrets.insert(SecretOf({2, 1}, rank));
  }
  EXPECT_EQ(secrets.size(), 2048u);  // of 2^32: no collision among these
}

TEST(SharedMemory, both_ends_see_the_same_bytes_and_start_with_zeros) {
  for (const size_t num_bytes : {size_t{1}, size_t{4096}, size_t{100'000}}) {
    Result<SharedMemory> memory = SharedMemory::Create(num_bytes, /*shareable=*/true);
    ASSERT_TRUE(memory.ok()) << memory.status().message();
    ASSERT_EQ(memory->bytes().size(), num_bytes);
    for (const std::byte byte : memory->bytes()) ASSERT_EQ(byte, std::byte{0});
    Result<SharedMemory> imported = SharedMemory::Import(memory->Export());
    ASSERT_TRUE(imported.ok()) << imported.status().message();
    ASSERT_EQ(imported->bytes().size(), num_bytes);
    EXPECT_NE(imported->bytes().data(), memory->bytes().data());
    memory->bytes()[num_bytes - 1] = std::byte{42};
    EXPECT_EQ(imported->bytes()[num_bytes - 1], std::byte{42});
  }
}

TEST(SharedMemory, an_importer_outlives_the_creator) {
  Result<SharedMemory> memory = SharedMemory::Create(64, true);
  ASSERT_TRUE(memory.ok());
  Result<SharedMemory> imported = SharedMemory::Import(memory->Export());
  ASSERT_TRUE(imported.ok());
  {
    const SharedMemory dropped = std::move(*memory);
  }
  imported->bytes()[0] = std::byte{1};
  EXPECT_EQ(imported->bytes()[0], std::byte{1});
}

TEST(SharedMemory, that_is_not_shareable_exports_nothing) {
  Result<SharedMemory> memory = SharedMemory::Create(size_t{1} << 33, /*shareable=*/false);
  ASSERT_TRUE(memory.ok());
  memory->bytes()[memory->bytes().size() - 1] = std::byte{1};
  EXPECT_EQ(memory->Export(), "");
}

TEST(SharedMemory, too_much_is_refused_with_both_numbers) {
  const Result<SharedMemory> memory = SharedMemory::Create(size_t{1} << 50, true);
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(memory.status().message().find("needs 1073741824.0 MiB"), std::string::npos);
  EXPECT_NE(memory.status().message().find("available"), std::string::npos);
  EXPECT_FALSE(SharedMemory::Create(0, true).ok());
}

TEST(SharedMemory, is_its_owners_alone) {
  const Result<SharedMemory> memory = SharedMemory::Create(100, /*shareable=*/true);
  ASSERT_TRUE(memory.ok());
  const std::string exported = memory->Export();
  BlobReader reader(exported);
  reader.U64();
  reader.U64();
  struct stat file{};
  ASSERT_EQ(fstat(static_cast<int>(reader.U64()), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
}

// A profiler's timer, say: the kernel gives up to reserve memory when a signal comes.
TEST(SharedMemory, signals_do_not_keep_it_from_being_reserved) {
  struct sigaction ignore{}, before{};
  ignore.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGALRM, &ignore, &before), 0);
  const itimerval often{.it_interval = {.tv_sec = 0, .tv_usec = 2000},
                        .it_value = {.tv_sec = 0, .tv_usec = 2000}};
  ASSERT_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  const Status status = SharedMemory::Create(size_t{128} << 20, /*shareable=*/true).status();
  const itimerval never{};
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(SharedMemory, garbage_and_dead_exporters_are_errors) {
  EXPECT_EQ(SharedMemory::Import("garbage").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(SharedMemory::Import("").status().code(), StatusCode::kInvalidArgument);
  std::string blob;
  {
    Result<SharedMemory> memory = SharedMemory::Create(64, true);
    ASSERT_TRUE(memory.ok());
    blob = memory->Export();
  }
  EXPECT_EQ(SharedMemory::Import(blob).status().code(), StatusCode::kUnavailable);
}

// A pid, and a descriptor number in it, come back after their owner is gone. Without the token an
// importer would then write into somebody else's memory.
TEST(SharedMemory, another_memory_behind_the_same_descriptor_is_detected) {
  std::string blob;
  {
    Result<SharedMemory> memory = SharedMemory::Create(64, true);
    ASSERT_TRUE(memory.ok());
    blob = memory->Export();
  }
  Result<SharedMemory> successor = SharedMemory::Create(64, true);
  ASSERT_TRUE(successor.ok());
  ASSERT_EQ(successor->Export().substr(0, 32), blob.substr(0, 32)) << "same pid, fd and size";
  const Result<SharedMemory> imported = SharedMemory::Import(blob);
  ASSERT_FALSE(imported.ok());
  EXPECT_EQ(imported.status().code(), StatusCode::kUnavailable);
}

class PeerWatchTest : public testing::Test {
 protected:
  using Time = PeerWatch::Time;
  static constexpr std::chrono::milliseconds kTimeout{1600};  // so the interval is 100 ms
  static constexpr std::chrono::seconds kFirst{10};

  // Ticks every interval until `end`; returns the first death.
  std::optional<PeerWatch::Dead> TickUntil(Time end, int heard_peer) {
    while (now_ < end) {
      now_ += watch_.interval();
      if (heard_peer >= 0) watch_.Heard(static_cast<uint32_t>(heard_peer));
      if (const auto dead = Tick(now_); !dead.empty()) return dead.front();
    }
    return std::nullopt;
  }

  std::vector<PeerWatch::Dead> Tick(Time now) {
    return watch_.Tick(now, [this](uint32_t peer) { return is_awaited_[peer]; });
  }

  // It is as long ago as a silent peer is allowed, and not more than two ticks longer.
  void ExpectTimeoutSince(Time begin) const {
    EXPECT_GT(now_ - begin, kTimeout);
    EXPECT_LE(now_ - begin, kTimeout + 2 * watch_.interval());
  }

  // Each peer has a process of its own.
  PeerWatchTest() {
    for (uint32_t peer = 0; peer < 2; ++peer) watch_.SetProcess(peer, signs_.IndexOf(10 + peer));
  }

  LifeSigns signs_{/*own_id=*/1};
  PeerWatch watch_{2, kTimeout, kFirst, &signs_};
  std::array<bool, 2> is_awaited_{};
  Time now_{};
};

TEST_F(PeerWatchTest, a_peer_that_falls_silent_is_dead_after_its_timeout) {
  watch_.Start(now_);
  watch_.Heard(0);
  watch_.Heard(1);
  EXPECT_TRUE(Tick(now_ += watch_.interval()).empty());
  const Time begin = now_;
  const auto dead = TickUntil(begin + 2 * kTimeout, /*heard_peer=*/1);
  ASSERT_TRUE(dead.has_value());
  EXPECT_EQ(dead->peer, 0u);
  EXPECT_TRUE(dead->was_heard);
  ExpectTimeoutSince(begin);
}

TEST_F(PeerWatchTest, a_peer_that_was_never_heard_has_the_longer_limit) {
  watch_.Start(now_);
  EXPECT_FALSE(TickUntil(now_ + kFirst, 1).has_value());
  const auto dead = TickUntil(now_ + kTimeout, 1);
  ASSERT_TRUE(dead.has_value());
  EXPECT_EQ(dead->peer, 0u);
  EXPECT_FALSE(dead->was_heard);
}

TEST_F(PeerWatchTest, a_peer_that_left_in_order_is_not_dead) {
  watch_.Start(now_);
  watch_.Heard(0);
  watch_.Depart(0);
  EXPECT_FALSE(TickUntil(now_ + 2 * kFirst, 1).has_value());
}

// Both are over the limit at the same tick. Once the one with the lower number was blamed.
TEST_F(PeerWatchTest, of_several_dead_the_one_that_fell_silent_first_is_the_culprit) {
  watch_.Start(now_);
  watch_.Heard(1);
  watch_.Heard(0);
  EXPECT_TRUE(Tick(now_ += watch_.interval()).empty());
  std::vector<PeerWatch::Dead> dead;
  while (dead.empty()) dead = Tick(now_ += watch_.interval());
  ASSERT_EQ(dead.size(), 2u);
  EXPECT_EQ(dead[0].peer, 1u);
  EXPECT_EQ(dead[1].peer, 0u);
}

TEST_F(PeerWatchTest, a_lost_peer_is_dead_at_the_second_tick_unless_it_departs_before) {
  watch_.Start(now_);
  watch_.Heard(0);
  watch_.Heard(1);
  watch_.Lose(0);
  watch_.Lose(1);
  EXPECT_TRUE(Tick(now_ += watch_.interval()).empty());
  watch_.Depart(0);
  const auto dead = Tick(now_ += watch_.interval());
  ASSERT_EQ(dead.size(), 1u);
  EXPECT_EQ(dead[0].peer, 1u);
  EXPECT_TRUE(dead[0].is_lost);
}

// A process that was stopped for a minute hears nobody in that time. That is not its peers' fault.
TEST_F(PeerWatchTest, time_in_which_we_did_not_run_is_not_counted) {
  watch_.Start(now_);
  watch_.Heard(0);
  watch_.Heard(1);
  EXPECT_TRUE(Tick(now_ += watch_.interval()).empty());
  now_ += std::chrono::seconds(60);
  EXPECT_TRUE(Tick(now_).empty());
  EXPECT_FALSE(TickUntil(now_ + kTimeout / 2, -1).has_value());
  EXPECT_TRUE(TickUntil(now_ + kTimeout, -1).has_value());
}

// Peer 1 does not say a word: what its process sends for another rank is enough.
TEST_F(PeerWatchTest, a_peer_lives_as_long_as_its_process_is_heard) {
  watch_.SetProcess(1, signs_.IndexOf(10));
  watch_.Start(now_);
  EXPECT_FALSE(TickUntil(now_ + 2 * kFirst, /*heard_peer=*/0).has_value());
  const Time begin = now_;
  std::vector<PeerWatch::Dead> dead;
  while (dead.empty()) dead = Tick(now_ += watch_.interval());
  EXPECT_LE(now_ - begin, kTimeout + 2 * watch_.interval());
  ASSERT_EQ(dead.size(), 2u);  // both, at once
  EXPECT_TRUE(dead[1].was_heard);
  EXPECT_FALSE(dead[0].is_cut_off || dead[1].is_cut_off);
}

// On another endpoint of ours, which has a watch of its own.
TEST_F(PeerWatchTest, a_peer_lives_if_its_process_is_heard_elsewhere) {
  watch_.Start(now_);
  for (const Time end = now_ + 2 * kFirst; now_ < end;) {
    now_ += watch_.interval();
    signs_.Heard(signs_.IndexOf(10));
    signs_.Heard(signs_.IndexOf(11));
    ASSERT_TRUE(Tick(now_).empty());
  }
}

TEST_F(PeerWatchTest, one_that_owes_an_answer_is_dead_though_its_process_is_heard) {
  watch_.SetProcess(1, signs_.IndexOf(10));
  watch_.Start(now_);
  EXPECT_FALSE(TickUntil(now_ + kTimeout, 0).has_value());
  is_awaited_[1] = true;
  const Time begin = now_;
  const auto dead = TickUntil(begin + 2 * kTimeout, 0);
  ASSERT_TRUE(dead.has_value());
  EXPECT_EQ(dead->peer, 1u);
  EXPECT_TRUE(dead->is_cut_off);
  ExpectTimeoutSince(begin);
}

// It was sent to before its process had come up.
TEST_F(PeerWatchTest, the_time_for_an_answer_begins_when_the_process_is_first_heard) {
  watch_.SetProcess(1, signs_.IndexOf(10));
  watch_.Start(now_);
  is_awaited_[1] = true;
  EXPECT_FALSE(TickUntil(now_ + kFirst - kTimeout, -1).has_value());
  EXPECT_FALSE(TickUntil(now_ + kTimeout, 0).has_value());
  const auto dead = TickUntil(now_ + kTimeout, 0);
  ASSERT_TRUE(dead.has_value());
  EXPECT_EQ(dead->peer, 1u);
}

// The rest of this very process is not silent, as long as it owes nothing.
TEST_F(PeerWatchTest, a_peer_of_the_own_process_needs_no_heartbeat) {
  watch_.SetProcess(0, LifeSigns::kOwn);
  watch_.SetProcess(1, LifeSigns::kOwn);
  watch_.Start(now_);
  EXPECT_FALSE(TickUntil(now_ + 2 * kFirst, -1).has_value());
  is_awaited_[0] = true;
  const auto dead = TickUntil(now_ + 2 * kTimeout, -1);
  ASSERT_TRUE(dead.has_value());
  EXPECT_EQ(dead->peer, 0u);
}

// Who carries it has a thread of its own, perhaps, which may stand while this one runs.
TEST_F(PeerWatchTest, a_peer_whose_heartbeat_another_pair_carries_owes_answers_alone) {
  watch_.SetCarrier(1, false);
  watch_.Start(now_);
  EXPECT_FALSE(TickUntil(now_ + kTimeout, /*heard_peer=*/1).has_value());
  const auto silent = TickUntil(now_ + 2 * kFirst, -1);
  ASSERT_TRUE(silent.has_value());
  EXPECT_EQ(silent->peer, 0u);
  is_awaited_[1] = true;
  const Time begin = now_;
  std::vector<PeerWatch::Dead> dead;
  while (dead.size() < 2 && now_ < begin + 2 * kTimeout) dead = Tick(now_ += watch_.interval());
  ASSERT_EQ(dead.size(), 2u);
  ExpectTimeoutSince(begin);
}

TEST_F(PeerWatchTest, a_goodbye_is_that_of_all_ranks_of_the_process) {
  watch_.SetProcess(1, signs_.IndexOf(10));
  watch_.Start(now_);
  watch_.Heard(0);
  watch_.Depart(0);
  EXPECT_TRUE(watch_.has_departed(1));
  EXPECT_EQ(signs_.num_departed(), 1u);
  EXPECT_FALSE(TickUntil(now_ + 2 * kFirst, -1).has_value());
}

}  // namespace
}  // namespace jax_ep
