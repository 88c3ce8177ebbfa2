#include "xla_ffi/site.h"

#include <gtest/gtest.h>

namespace jax_ep {
namespace {

constexpr uint64_t kStep = uint64_t{7} << 32;
constexpr uint64_t kEval = uint64_t{9} << 32;

TEST(SiteNumbering, a_call_has_the_name_that_its_program_carries) {
  SiteNumbering here, there;
  for (uint64_t number = 5; number > 0; --number) (void)there.Next(kEval + number);
  for (uint64_t number = 1; number < 5; ++number) {
    EXPECT_EQ(here.Next(kStep + number).shared, kStep + number);
    EXPECT_EQ(there.Next(kStep + number).shared, kStep + number);
  }
}

TEST(SiteNumbering, a_program_that_is_compiled_twice_at_once_has_its_names_twice) {
  SiteNumbering sites;
  const uint64_t interleaved[] = {1, 1, 2, 3, 2, 3};
  for (const uint64_t number : interleaved) {
    EXPECT_EQ(sites.Next(kStep + number).shared, kStep + number);
  }
}

TEST(SiteNumbering, exported_programs_within_another_have_names_of_their_own) {
  SiteNumbering sites;  // an exported program that a jitted function calls twice, and another
  EXPECT_EQ(sites.Next(kStep).shared, kStep);
  EXPECT_EQ(sites.Next(kStep).shared, kStep + 1);
  EXPECT_EQ(sites.Next(kEval).shared, kEval);
}

TEST(SiteNumbering, a_program_without_a_key_says_so) {
  SiteNumbering sites;
  EXPECT_TRUE(sites.Next(kStep).has_key());
  EXPECT_TRUE(sites.Next(kStep + 1).has_key());
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(sites.Next(0).has_key());
}

TEST(SiteNumbering, unique_numbers_never_repeat) {
  SiteNumbering sites;
  const uint64_t first = sites.Next(kStep + 1).unique;
  EXPECT_NE(sites.Next(kStep + 1).unique, first);
}

}  // namespace
}  // namespace jax_ep
