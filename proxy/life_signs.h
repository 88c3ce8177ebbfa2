// LifeSigns: the other proxies of a group, and when each was last heard on any endpoint of this
// one.
//
// All ranks of a proxy share its thread: they live and die together. So what arrives from one is a
// sign of life of all, one pair of ranks carries the heartbeat of two proxies (leads.h), and one
// goodbye is that of all ranks. On CPUs a process has one proxy for all of its ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace jax_ep {

// Thread rule: whoever holds the proxy's mutex.
class LifeSigns {
 public:
  // Index of the proxy that this object belongs to. It lives as long as it can look.
  static constexpr uint32_t kOwn = 0;

  // `own_id` tells the proxy from all others of the group; it travels in PeerBlob.
  explicit LifeSigns(uint64_t own_id) : proxies_{Other{.id = own_id}} {}

  uint64_t own_id() const { return proxies_[kOwn].id; }
  // The index of that proxy, a new one if it was not named before. Set-up only.
  uint32_t IndexOf(uint64_t id) {
    for (uint32_t i = 0; i < proxies_.size(); ++i) {
      if (proxies_[i].id == id) return i;
    }
    proxies_.push_back(Other{.id = id});
    return static_cast<uint32_t>(proxies_.size() - 1);
  }

  // Something arrived from it. Cheap; returns the number of this arrival.
  uint64_t Heard(uint32_t proxy) { return proxies_[proxy].last_arrival = ++num_arrivals_; }
  // Number of its latest arrival; 0: none.
  uint64_t last_arrival(uint32_t proxy) const { return proxies_[proxy].last_arrival; }
  uint64_t num_arrivals() const { return num_arrivals_; }  // from all

  // It has said goodbye: its ranks send nothing more and are watched no more.
  void Depart(uint32_t proxy) {
    if (!proxies_[proxy].has_departed) ++num_departed_;
    proxies_[proxy].has_departed = true;
  }
  bool has_departed(uint32_t proxy) const { return proxies_[proxy].has_departed; }
  uint32_t num_departed() const { return num_departed_; }

 private:
  struct Other {
    uint64_t id = 0;
    uint64_t last_arrival = 0;
    bool has_departed = false;
  };

  std::vector<Other> proxies_;
  uint64_t num_arrivals_ = 0;
  uint32_t num_departed_ = 0;
};

}  // namespace jax_ep
