// The hint for huge pages reaches the kernel, stays inside its range and changes no content.
#include "kernels/cpu/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

namespace jax_ep {
namespace {

constexpr uint64_t kMebibyte = uint64_t{1} << 20;

// Whether the mapping that holds `address` is advised (VmFlags "hg").
bool IsAdvised(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool is_inside = false;
  while (std::getline(maps, line)) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto wanted = reinterpret_cast<uintptr_t>(address);
      is_inside = begin <= wanted && wanted < end;
    } else if (is_inside && line.starts_with("VmFlags:")) {
      return line.find(" hg") != std::string::npos;
    }
  }
  return false;
}

class HugePages : public ::testing::Test {
 protected:
  void SetUp() override {
    void* memory =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    memory_ = static_cast<std::byte*>(memory);
    std::memset(memory_, 7, kBytes);
  }
  void TearDown() override { munmap(memory_, kBytes); }

  static constexpr uint64_t kBytes = 16 * kMebibyte;
  std::byte* memory_ = nullptr;
};

TEST_F(HugePages, LargeArraysAreAdvisedInsideTheirRange) {
  if (madvise(memory_ + kBytes - 2 * kMebibyte, kMebibyte, MADV_HUGEPAGE) != 0) {
    GTEST_SKIP() << "this kernel has no transparent huge pages";
  }
  PreferHugePages(memory_ + 4096, 8 * kMebibyte);
  EXPECT_TRUE(IsAdvised(memory_ + 4 * kMebibyte));
  EXPECT_FALSE(IsAdvised(memory_));
  EXPECT_FALSE(IsAdvised(memory_ + 9 * kMebibyte));
  for (uint64_t i = 0; i < kBytes; ++i) ASSERT_EQ(memory_[i], std::byte{7}) << i;
}

TEST_F(HugePages, SmallOrAbsentArraysAreLeftAlone) {
  PreferHugePages(memory_, kMebibyte);
  PreferHugePages(nullptr, 8 * kMebibyte);
  EXPECT_FALSE(IsAdvised(memory_));
}

}  // namespace
}  // namespace jax_ep
