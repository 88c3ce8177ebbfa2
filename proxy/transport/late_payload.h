// LateBox: payload of the faulty transport that has "arrived" but is not visible yet. Between ranks
// of one process only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "proxy/transport/numbered.h"

namespace jax_ep {

// Bytes that have "arrived" but are not visible before the receiver's Flush.
struct LateBox {
  struct Late {
    std::vector<std::byte> bytes;
    uint32_t region;
    uint64_t offset;
  };
  explicit LateBox(uint64_t drawn) : token(drawn) {}

  const uint64_t token;  // random: boxes are numbered alike in all processes
  std::mutex mutex;
  std::vector<Late> late;                     // guarded by mutex
  std::vector<std::span<std::byte>> regions;  // guarded by mutex
};

using LateBoxes = Numbered<LateBox>;

}  // namespace jax_ep
