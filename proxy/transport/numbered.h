// Numbered: objects of this process that others find by a number, for transports between ranks of
// one process: an address must mean something to an endpoint that shares nothing else.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace jax_ep {

// The process's objects of one type. Thread rule: any thread.
template <typename T>
class Numbered {
 public:
  static Numbered& Get() {
    static Numbered numbered;
    return numbered;
  }

  uint64_t Add(std::weak_ptr<T> object) {
    std::lock_guard lock(mutex_);
    objects_[++last_id_] = std::move(object);
    return last_id_;
  }
  void Remove(uint64_t id) {
    std::lock_guard lock(mutex_);
    objects_.erase(id);
  }
  // Null if it was removed, or is gone.
  std::shared_ptr<T> Find(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto it = objects_.find(id);
    return it == objects_.end() ? nullptr : it->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<T>> objects_;
  uint64_t last_id_ = 0;
};

}  // namespace jax_ep
