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
  const CallSite last = sites.Next();
  sites.NoteCompileEnd();
  sites.NoteCompileEnd();  // that of a module without calls
  sites.NoteRun(last);
  EXPECT_EQ(sites.Next().index, 0u);
  EXPECT_EQ(sites.Next().index, 1u);
}

TEST(SiteNumbering, a_module_starts_at_zero_after_a_call_of_the_last_one_ran) {
  SiteNumbering sites;
  (void)sites.Next();
  sites.NoteRun(sites.Next());
  EXPECT_EQ(sites.Next().index, 0u);
}

TEST(SiteNumbering, a_call_that_runs_while_the_next_module_is_compiled_does_not_end_it) {
  SiteNumbering sites;
  const CallSite ran = sites.Next();
  sites.NoteCompileEnd();
  for (uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(sites.Next().index, i);
    sites.NoteRun(ran);
  }
}

TEST(SiteNumbering, processes_that_compiled_other_modules_first_agree_on_the_index) {
  SiteNumbering here, there;
  (void)there.Next();  // there, another program was compiled before
  there.NoteCompileEnd();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(here.Next().index, there.Next().index);
}

TEST(SiteNumbering, unique_numbers_never_repeat) {
  SiteNumbering sites;
  const uint64_t first = sites.Next().unique;
  sites.NoteCompileEnd();
  EXPECT_NE(sites.Next().unique, first);
}

}  // namespace
}  // namespace jax_ep
