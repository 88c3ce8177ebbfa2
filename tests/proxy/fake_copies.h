// Stands in for the copy engines of GPUs: memory of the host, copied late, in any order within a
// batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/base/device_copies.h"

namespace jax_ep {

class FakeCopies : public DeviceCopies {
 public:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    uint64_t bytes;
  };
  using Mapped = std::map<std::string, std::span<std::byte>, std::less<>>;

  // `mapped` outlives it. A batch is done `delay` looks after all before it.
  FakeCopies(const Mapped* mapped, uint64_t seed, int delay)
      : mapped_(*mapped), random_(seed), delay_(delay) {}

  std::span<std::byte> Find(std::string_view export_blob) const override {
    const auto found = mapped_.find(export_blob);
    return found == mapped_.end() ? std::span<std::byte>() : found->second;
  }
  Status Start(std::byte* to, const std::byte* from, uint64_t bytes) override {
    if (fails_) return Internal("cuda: made up");
    started_.push_back({to, from, bytes});
    ++num_copies_;
    return Status::Ok();
  }
  Status EndBatch() override {
    if (batches_.size() == kMaxBatches) return Internal("too many batches");
    batches_.push_back(std::move(started_));
    started_.clear();
    return Status::Ok();
  }
  Result<uint64_t> NewestDone() override {
    if (!batches_.empty() && ++looks_ > delay_) {
      looks_ = 0;
      std::vector<Copy>& batch = batches_.front();
      std::shuffle(batch.begin(), batch.end(), random_);
      for (const Copy& copy : batch) std::memcpy(copy.to, copy.from, copy.bytes);
      batches_.pop_front();
      ++num_done_;
    }
    return num_done_;
  }

  void Fail() { fails_ = true; }
  uint64_t num_copies() const { return num_copies_; }

 private:
  const Mapped& mapped_;
  std::mt19937_64 random_;
  const int delay_;
  int looks_ = 0;
  bool fails_ = false;
  std::vector<Copy> started_;
  std::deque<std::vector<Copy>> batches_;
  uint64_t num_done_ = 0, num_copies_ = 0;
};

}  // namespace jax_ep
