#include "xla_ffi/site.h"

#include <gtest/gtest.h>

namespace jax_ep {
namespace {

TEST(SiteNumbering, calls_of_one_module_are_numbered_in_order) {
  SiteNumbering sites;
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(sites.Next().index, i);
}

TEST(SiteNumbering, a_module_starts_at_zero_after_a_compilation_ended) {
  SiteNumbering sites;
  (void)sites.Next();
  (void)sites.Next();
  sites.NoteModuleComplete();
  sites.NoteModuleComplete();  // a compile event and an execution may both say so
  EXPECT_EQ(sites.Next().index, 0u);
  EXPECT_EQ(sites.Next().index, 1u);
}

TEST(SiteNumbering, processes_that_compiled_other_modules_first_agree_on_the_index) {
  SiteNumbering here, there;
  (void)there.Next();  // there, another program was compiled before
  there.NoteModuleComplete();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(here.Next().index, there.Next().index);
}

TEST(SiteNumbering, unique_numbers_never_repeat) {
  SiteNumbering sites;
  const uint64_t first = sites.Next().unique;
  sites.NoteModuleComplete();
  EXPECT_NE(sites.Next().unique, first);
}

}  // namespace
}  // namespace jax_ep
