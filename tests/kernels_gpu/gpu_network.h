// The network between the virtual nodes of a GpuTeam: stages and rings, and proxies over the
// loopback transport with pinned stages, or over the cuda transport with stages in the GPUs'
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/gpu/api.h"
#include "proxy/base/failure.h"
#include "proxy/proxy.h"
#include "xla_ffi/gpu_copies.h"

namespace jax_ep::testing {

class GpuNetwork {
 public:
  // Each rank has `num_rings` proxies, each with a ring of `ring_slots`. `devices`: of the ranks,
  // where stages are; empty: pinned ones.
  GpuNetwork(const GroupShape& shape, uint32_t num_rings, uint32_t ring_slots,
             const std::vector<int>& devices);
  ~GpuNetwork();  // after the streams have been drained
  GpuNetwork(const GpuNetwork&) = delete;
  GpuNetwork& operator=(const GpuNetwork&) = delete;

  gpu::NetworkConfig ConfigOf(uint32_t rank) const;

 private:
  void AddProxy(uint32_t rank, uint32_t ring);
  Proxy& ProxyOf(uint32_t rank, uint32_t ring) { return *proxies_[rank * num_rings_ + ring]; }
  bool IsServedBy(uint32_t ring, uint32_t rank, uint32_t peer) const;

  GroupShape shape_;
  uint32_t num_rings_;
  uint32_t ring_slots_;
  const std::vector<int> devices_;
  FailureLatch failure_;
  std::vector<std::byte*> stages_;                  // [N]
  std::vector<std::byte*> signals_;                 // [N]
  std::vector<std::byte*> rings_;                   // [N][num_rings]
  std::vector<std::unique_ptr<GpuCopies>> copies_;  // [N][num_rings]
  std::vector<std::unique_ptr<Proxy>> proxies_;     // [N][num_rings]
};

}  // namespace jax_ep::testing
