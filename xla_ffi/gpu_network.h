// The way of a GpuSession's ranks to other nodes: pinned stages that GPUs and proxies share,
// command rings whose producers are kernels, and the proxies. Groups of one node have none.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/gpu/api.h"
#include "kernels/gpu/memory/device_memory.h"
#include "proxy/base/shared_memory.h"
#include "proxy/base/trace.h"
#include "proxy/proxy.h"
#include "xla_ffi/session_options.h"

namespace jax_ep {

// What the GPU library said: `error` is its text, null where all went well.
Status ToStatus(const char* error, const std::string& what);

// Thread rule: everything but stats and DumpState on a thread that may change the runtime's current
// device.
class GpuNetwork {
 public:
  // Stages, rings and endpoints of the local ranks. Each rank has JAX_EP_PROXY_THREADS proxies, on
  // CPUs of its GPU's NUMA node where the machine tells it. `failure` outlives the network.
  static Result<std::unique_ptr<GpuNetwork>> Create(const SessionOptions& options,
                                                    const gpu::GpuApi& api, FailureLatch* failure);
  ~GpuNetwork();  // Stop, Release
  GpuNetwork(const GpuNetwork&) = delete;
  GpuNetwork& operator=(const GpuNetwork&) = delete;

  // What other processes need of local rank `index`; opaque.
  std::string LocalBlob(size_t index) const;
  // `blobs` has that of every rank of other processes, by (team, rank).
  Status Connect(const std::map<std::pair<uint32_t, uint32_t>, std::string>& blobs);
  Status Start();
  // For RankConfig; its arrays live as long as the network.
  gpu::NetworkConfig ConfigOf(size_t index) const;

  // Sends what is queued and joins the proxies. No kernel pushes any more. Idempotent.
  void Stop();
  // Gives the memory back; no kernel and no proxy uses it any more. Idempotent.
  Status Release();
  // Keeps the memory for ever: a device that cannot be waited for may still use it.
  void Leak();

  uint64_t stage_bytes() const;  // pinned, of this process's ranks together
  std::vector<FlowStats> flow_stats() const;
  std::string DumpState() const;
  std::string DumpOpenFlows(const FlowFilter& is_awaited) const;  // as Proxy has it

 private:
  struct Member;
  using Blobs = std::map<std::pair<uint32_t, uint32_t>, std::string>;

  GpuNetwork(const SessionOptions& options, const gpu::GpuApi& api);
  Status AddMember(const LocalRank& local, FailureLatch* failure);
  Status AddProxies(Member& member, FailureLatch* failure);
  Status ConnectMember(Member& member, const Blobs& blobs);
  Status Pin(std::span<std::byte> memory);

  const SessionOptions options_;
  const gpu::GpuApi& api_;
  Env env_;
  std::shared_ptr<Tracer> tracer_;  // null unless JAX_EP_TRACE is set
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<std::byte*> pinned_;  // registered with the GPU runtime
};

}  // namespace jax_ep
