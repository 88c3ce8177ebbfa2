#include "xla_ffi/epoch.h"

#include <gtest/gtest.h>

namespace jax_ep {
namespace {

TEST(Epoch, comes_back_from_32_bits_while_newer_ones_start) {
  for (const uint64_t wrap :
       {uint64_t{8}, uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 33, uint64_t{1} << 40}) {
    for (uint64_t epoch = wrap - 5; epoch < wrap + 5; ++epoch) {
      for (uint64_t newest = epoch; newest < epoch + 20; ++newest) {
        EXPECT_EQ(ExtendEpoch(TruncateEpoch(epoch), newest), epoch) << newest;
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep
