// Buffers of XLA's that node-mates of the same process read in place. XLA frees them as soon as
// their owner's call returns, also when it returns an error, so that call counts its readers and
// leaves when none is left. That wait has no deadline of its own and needs none: a reader waits for
// nobody between taking a Reading and dropping it.
#pragma once

#include "kernels/layout.h"

namespace jax_ep {

// The owner's side: its buffers can be read from Open until this is destroyed.
class Publication {
 public:
  Publication() = default;
  ~Publication();
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;

  // Call before the flag that tells the node-mates.
  void Open(PublishedBuffers* at, const std::byte* rows, const float* weights,
            const float* pair_scalars);

 private:
  PublishedBuffers* at_ = nullptr;
};

// A reader's side. Take it when the owner's flag has come, look at is_open, copy, drop it.
class Reading {
 public:
  explicit Reading(PublishedBuffers* at);
  ~Reading();
  Reading(Reading&& other) noexcept;
  Reading& operator=(Reading&&) = delete;

  // False if the owner's call has ended: nothing may be read.
  bool is_open() const { return is_open_; }
  const PublishedBuffers& buffers() const { return *at_; }

 private:
  PublishedBuffers* at_;
  bool is_open_;
};

}  // namespace jax_ep
