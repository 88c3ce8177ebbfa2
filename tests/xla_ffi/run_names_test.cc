#include "xla_ffi/run_names.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace jax_ep {
namespace {

constexpr uint64_t kStep = uint64_t{7} << 32;
constexpr uint64_t kEval = uint64_t{9} << 32;

TEST(RunNames, are_xlas_until_ranks_have_agreed_anew) {
  RunNames runs("test", 0);
  for (const int64_t run : {5, 3, -515396011}) EXPECT_EQ(*runs.Name(kStep + 1, run, false), run);
}

TEST(RunNames, then_count_from_the_first_execution_of_each_program) {
  RunNames ahead("test", 1), fresh("test", 1);
  for (int64_t run = 0; run < 5; ++run) {
    for (const uint64_t call : {1, 2}) {
      EXPECT_EQ(*ahead.Name(kStep + call, -515396011 + 40 + run, false), run);
      EXPECT_EQ(*fresh.Name(kStep + call, -515396011 + run, false), run);
    }
    EXPECT_EQ(*ahead.Name(kEval + 1, 100 + run, false), run);
  }
}

TEST(RunNames, count_beyond_32_bits_as_XLA_does) {
  RunNames runs("test", 3);
  EXPECT_EQ(*runs.Name(kStep, INT32_MAX, false), 0);
  EXPECT_EQ(*runs.Name(kStep, INT32_MIN, false), 1);
}

TEST(RunNames, of_one_process_are_xlas) {
  RunNames runs("test", 2);
  EXPECT_EQ(*runs.Name(kStep, 9, true), 9);
  EXPECT_EQ(*runs.Name(kStep, 8, true), 8);
}

TEST(RunNames, an_execution_that_began_before_the_first_is_refused) {
  RunNames runs("test", 1);
  EXPECT_EQ(*runs.Name(kStep + 1, 6, false), 0);
  const Result<int64_t> late = runs.Name(kStep + 1, 5, false);
  ASSERT_FALSE(late.ok());
  const std::string text = late.status().message();
  EXPECT_NE(text.find("group test: got the executions of a program out of order"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace jax_ep
