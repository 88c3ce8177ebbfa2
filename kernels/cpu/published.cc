#include "kernels/cpu/published.h"

#include <utility>

namespace jax_ep {
namespace {

// PublishedBuffers::state: this bit while open, and the number of Readings below it. One word, so
// that a reader either is counted by an owner that leaves, or learns that it has left.
constexpr uint32_t kOpen = uint32_t{1} << 31;

}  // namespace

void Publication::Open(PublishedBuffers* at, const std::byte* rows, const float* weights,
                       const float* pair_scalars) {
  at_ = at;
  at->rows = rows;
  at->weights = weights;
  at->pair_scalars = pair_scalars;
  at->state.fetch_or(kOpen, std::memory_order_release);
}

Publication::~Publication() {
  if (at_ == nullptr) return;
  // Acquire pairs with the release in ~Reading: the readers' loads are over.
  uint32_t readers = at_->state.fetch_and(~kOpen, std::memory_order_acquire) & ~kOpen;
  while (readers != 0) {
    at_->state.wait(readers, std::memory_order_acquire);
    readers = at_->state.load(std::memory_order_acquire);
  }
}

Reading::Reading(PublishedBuffers* at)
    : at_(at), is_open_((at->state.fetch_add(1, std::memory_order_acquire) & kOpen) != 0) {}

Reading::Reading(Reading&& other) noexcept
    : at_(std::exchange(other.at_, nullptr)), is_open_(other.is_open_) {}

Reading::~Reading() {
  if (at_ == nullptr) return;
  // Nobody waits while it is open.
  const uint32_t before = at_->state.fetch_sub(1, std::memory_order_release);
  if ((before & kOpen) == 0) at_->state.notify_all();
}

}  // namespace jax_ep
