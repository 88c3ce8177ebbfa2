// Libraries that are opened at run time, in a process that has not opened them yet: each test's
// body runs in a new one ("threadsafe").
#include "proxy/transport/open_library.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <iostream>
#include <string>

#include "proxy/base/descriptor.h"
#include "proxy/transport/ofi_library.h"
#include "proxy/transport/verbs_library.h"

namespace jax_ep {
namespace {

template <typename Library>
class LibraryDeathTest : public testing::Test {};
using Libraries = testing::Types<OfiLibrary, VerbsLibrary>;
TYPED_TEST_SUITE(LibraryDeathTest, Libraries);

// What Get says while there are no descriptors.
template <typename Library>
std::string GetWithoutDescriptors() {
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = Descriptor(eventfd(0, EFD_CLOEXEC)).fd();
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  const std::string message = Library::Get().status().message();
  setrlimit(RLIMIT_NOFILE, &before);
  return message;
}

// A failure for lack of descriptors was remembered until the process ended, and taken for a library
// that is not installed.
TYPED_TEST(LibraryDeathTest, is_tried_again_after_a_failure) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto try_twice = [] {
    const std::string without = GetWithoutDescriptors<TypeParam>();
    const Result<const TypeParam*> with = TypeParam::Get();
    std::cerr << without << "; then: " << with.status().message();
    const bool has_tried =
        with.ok() || with.status().message().find("is not installed") != std::string::npos;
    exit(without.find("ulimit -n") != std::string::npos && has_tried ? 0 : 1);
  };
  EXPECT_EXIT(try_twice(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace jax_ep
