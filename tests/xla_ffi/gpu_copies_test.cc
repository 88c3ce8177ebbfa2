// GpuCopies over a made-up GPU library: whose copies it asks for, and that its streams are closed.
#include "xla_ffi/gpu_copies.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>
#include <vector>

// Opaque to GpuCopies.
struct jax_ep::gpu::CopyStream {};

namespace jax_ep {
namespace {

struct Runtime {
  std::set<gpu::CopyStream*> open;
  std::vector<std::byte*> targets;
  const char* error = nullptr;  // of the next copy
};
Runtime runtime;

const gpu::DeviceMemoryApi& FakeApi() {
  static const gpu::DeviceMemoryApi api{
      .open_copies = [](int, gpu::CopyStream** out) -> const char* {
        runtime.open.insert(*out = new gpu::CopyStream);
        return nullptr;
      },
      .start_copy = [](gpu::CopyStream*, std::byte* to, const std::byte* from,
                       uint64_t bytes) -> const char* {
        runtime.targets.push_back(to);
        if (runtime.error == nullptr) std::memcpy(to, from, bytes);
        return runtime.error;
      },
      .end_batch = [](gpu::CopyStream*) -> const char* { return nullptr; },
      .newest_batch = [](gpu::CopyStream*, uint64_t* number) -> const char* {
        *number = 7;
        return nullptr;
      },
      .close_copies = [](gpu::CopyStream* stream) -> const char* {
        runtime.open.erase(stream);
        delete stream;
        return nullptr;
      }};
  return api;
}

class GpuCopiesTest : public testing::Test {
 protected:
  void SetUp() override {
    runtime = {};
    auto copies = GpuCopies::Open(FakeApi(), /*device=*/0);
    ASSERT_TRUE(copies.ok());
    copies_ = std::move(*copies);
    copies_->Map("0/1", one_);
    copies_->Map("0/2", two_);
  }
  void TearDown() override {
    copies_.reset();
    EXPECT_TRUE(runtime.open.empty());
  }

  std::array<std::byte, 64> own_{}, one_{}, two_{};
  std::unique_ptr<GpuCopies> copies_;
};

TEST_F(GpuCopiesTest, finds_what_was_mapped_and_nothing_else) {
  EXPECT_EQ(copies_->Find("0/2").data(), two_.data());
  EXPECT_TRUE(copies_->Find("0/3").empty());
  EXPECT_TRUE(copies_->Find("").empty());
}

TEST_F(GpuCopiesTest, warms_the_way_to_each_peer_on_a_stream_of_its_own) {
  own_.fill(std::byte{3});
  ASSERT_TRUE(copies_->Warm(own_.data()).ok());
  EXPECT_EQ(runtime.targets, (std::vector<std::byte*>{one_.data(), two_.data()}));
  EXPECT_EQ(one_[0], std::byte{3});
  EXPECT_EQ(runtime.open.size(), 1u);  // that of the copies to come, whose batches count from 1
}

TEST_F(GpuCopiesTest, a_failed_copy_is_an_error_with_the_runtimes_words) {
  runtime.error = "cudaErrorPeerAccessUnsupported";
  EXPECT_EQ(copies_->Warm(own_.data()).message(), runtime.error);
  EXPECT_EQ(copies_->Start(one_.data(), own_.data(), 16).message(), runtime.error);
  EXPECT_EQ(runtime.open.size(), 1u);
}

TEST_F(GpuCopiesTest, closes_once) {
  EXPECT_EQ(*copies_->NewestDone(), 7u);
  EXPECT_TRUE(copies_->Close().ok());
  EXPECT_TRUE(runtime.open.empty());
  EXPECT_TRUE(copies_->Close().ok());
}

}  // namespace
}  // namespace jax_ep
