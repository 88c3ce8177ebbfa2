#include "kernels/epoch.h"

#include <gtest/gtest.h>

namespace jax_ep {
namespace {

TEST(Epoch, comes_back_from_24_bits_while_newer_ones_start) {
  for (const uint64_t wrap : {uint64_t{8}, uint64_t{1} << 24, uint64_t{1} << 31, uint64_t{1} << 32,
                              uint64_t{1} << 33, uint64_t{1} << 40}) {
    for (uint64_t epoch = wrap - 5; epoch < wrap + 5; ++epoch) {
      for (uint64_t newest = epoch; newest < epoch + 20; ++newest) {
        for (const uint32_t generation : {0u, 1u, 255u, 256u, 1000u}) {
          const int32_t packed = PackEpoch(epoch, generation);
          EXPECT_EQ(ExtendEpoch(packed, newest), epoch) << newest;
          EXPECT_TRUE(IsOfGeneration(packed, generation));
          EXPECT_FALSE(IsOfGeneration(packed, generation + 1));
        }
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep
