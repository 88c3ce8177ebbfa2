#include "xla_ffi/site.h"

#include <gtest/gtest.h>

namespace jax_ep {
namespace {

constexpr uint64_t kStep = uint64_t{7} << 32;
constexpr uint64_t kEval = uint64_t{9} << 32;

TEST(SiteNumbering, calls_of_one_module_are_numbered_in_order) {
  SiteNumbering sites;
  sites.Begin(kStep);
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(sites.Next(kStep).shared, kStep + i);
}

TEST(SiteNumbering, modules_that_are_compiled_at_once_do_not_disturb_each_other) {
  SiteNumbering sites;
  for (const uint64_t key : {kStep, kEval}) sites.Begin(key);
  for (uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(sites.Next(kStep).shared, kStep + i);
    EXPECT_EQ(sites.Next(kEval).shared, kEval + i);
  }
}

TEST(SiteNumbering, processes_that_compiled_other_modules_first_agree) {
  SiteNumbering here, there;
  (void)there.Next(kEval);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(here.Next(kStep).shared, there.Next(kStep).shared);
}

TEST(SiteNumbering, a_key_that_is_used_again_starts_at_zero) {
  SiteNumbering sites;
  sites.Begin(kStep);
  (void)sites.Next(kStep);
  sites.Begin(kStep);
  EXPECT_EQ(sites.Next(kStep).shared, kStep);
}

TEST(SiteNumbering, programs_within_one_module_have_names_of_their_own) {
  SiteNumbering sites;  // an exported program that a jitted function calls twice, and another
  EXPECT_EQ(sites.Next(kStep).shared, kStep);
  EXPECT_EQ(sites.Next(kStep).shared, kStep + 1);
  EXPECT_EQ(sites.Next(kEval).shared, kEval);
}

TEST(SiteNumbering, a_module_without_a_key_says_so) {
  SiteNumbering sites;
  EXPECT_TRUE(sites.Next(kStep).has_key());
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(sites.Next(0).has_key());
}

TEST(SiteNumbering, unique_numbers_never_repeat) {
  SiteNumbering sites;
  const uint64_t first = sites.Next(kStep).unique;
  sites.Begin(kStep);
  EXPECT_NE(sites.Next(kStep).unique, first);
}

}  // namespace
}  // namespace jax_ep
