// What processes tell each other of their ranks, and what becomes of a damaged record.
#include "xla_ffi/rank_records.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace jax_ep {
namespace {

SessionOptions TwoRanks() {
  SessionOptions options;
  options.name = "test";
  options.local_ranks = {{.team = 0, .rank = 3}, {.team = 1, .rank = 3}};
  return options;
}

std::string Written(const SessionOptions& options) {
  return WriteRankRecords(options, [](size_t index, BlobWriter& record) {
    record.U64(index).Text("of " + std::to_string(index));
  });
}

Status Read(std::string_view text, std::vector<std::string>* ranks) {
  return ReadRankRecords(TwoRanks(), /*process=*/5, text, [&](const RankRecord& peer) {
    EXPECT_EQ(peer.pid, static_cast<uint64_t>(getpid()));
    const uint64_t index = peer.record.U64();
    ranks->push_back(std::to_string(peer.team) + "." + std::to_string(peer.rank) + ": " +
                     std::to_string(index) + " " + std::string(peer.record.Text()));
  });
}

TEST(RankRecords, say_what_was_written_of_each_rank) {
  std::vector<std::string> ranks;
  const Status read = Read(Written(TwoRanks()), &ranks);
  ASSERT_TRUE(read.ok()) << read.message();
  EXPECT_EQ(ranks, (std::vector<std::string>{"0.3: 0 of 0", "1.3: 1 of 1"}));
}

TEST(RankRecords, that_are_damaged_or_of_another_version_are_errors_that_name_the_process) {
  std::vector<std::string> ranks;
  const std::string whole = Written(TwoRanks());
  for (const std::string& damaged : {whole.substr(0, whole.size() - 1), whole + "x"}) {
    const Status read = Read(damaged, &ranks);
    EXPECT_EQ(read.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(read.message().find("the bootstrap record of process 5 is malformed"),
              std::string::npos)
        << read.message();
  }
  std::string other = whole;
  other[0] = 1;
  const std::string message = Read(other, &ranks).message();
  EXPECT_NE(message.find("group test: process 5 speaks bootstrap version 1, this one 3"),
            std::string::npos)
      << message;
}

}  // namespace
}  // namespace jax_ep
