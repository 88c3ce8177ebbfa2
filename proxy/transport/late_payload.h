// LateBox: payload of the faulty transport that has "arrived" but is not visible yet. Between ranks
// of one process only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace jax_ep {

// Bytes that have "arrived" but are not visible before the receiver's Flush.
struct LateBox {
  struct Late {
    std::vector<std::byte> bytes;
    uint32_t region;
    uint64_t offset;
  };
  std::mutex mutex;
  std::vector<Late> late;                     // guarded by mutex
  std::vector<std::span<std::byte>> regions;  // guarded by mutex
};

// The LateBoxes of this process by number.
class LateBoxes {
 public:
  static LateBoxes& Get() {
    static LateBoxes boxes;
    return boxes;
  }
  uint64_t Add(std::weak_ptr<LateBox> box) {
    std::lock_guard lock(mutex_);
    boxes_[++last_id_] = std::move(box);
    return last_id_;
  }
  void Remove(uint64_t id) {
    std::lock_guard lock(mutex_);
    boxes_.erase(id);
  }
  std::shared_ptr<LateBox> Find(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto it = boxes_.find(id);
    return it == boxes_.end() ? nullptr : it->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<LateBox>> boxes_;
  uint64_t last_id_ = 0;
};

}  // namespace jax_ep
