// The way of a GpuSession's ranks to other nodes: stages that kernels fill and proxies move,
// signals and command rings that both share in pinned memory, and the proxies. Groups of one node
// have none.
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
#include "proxy/base/descriptor.h"
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
  // Who moves the rows of this group's ranks between nodes, and so where their stages are.
  enum class Mover {
    kHost,     // the transport, from pinned host memory
    kNic,      // NICs, from the GPUs' memory (GPUDirect RDMA)
    kEngines,  // copy engines, from the GPUs' memory, to memory that every rank has mapped
  };
  static Mover MoverOf(const SessionOptions& options);
  // Whether stages are the GPUs' memory, which the session then has.
  static bool HasDeviceStages(const SessionOptions& options) {
    return MoverOf(options) != Mover::kHost;
  }

  // Stages, rings and endpoints of the local ranks. Each rank has JAX_EP_PROXY_THREADS proxies, on
  // CPUs of its GPU's NUMA node where the machine tells it. `device_stages`: of the local ranks;
  // empty: they are made here, of pinned host memory. `failure` outlives the network.
  // `transport_factory` overrides the group's transport, for tests.
  static Result<std::unique_ptr<GpuNetwork>> Create(
      const SessionOptions& options, const gpu::GpuApi& api,
      const std::vector<std::span<std::byte>>& device_stages, FailureLatch* failure,
      TransportFactory transport_factory = {});
  ~GpuNetwork();  // Stop, Release
  GpuNetwork(const GpuNetwork&) = delete;
  GpuNetwork& operator=(const GpuNetwork&) = delete;

  // What other processes need of local rank `index`; opaque.
  std::string LocalBlob(size_t index) const;
  // `blobs` has that of every rank of other processes, by (team, rank). `device_stages`: of each
  // local rank, the stages of its team by rank, as its device addresses them (null: it has not
  // mapped that one); empty without such.
  Status Connect(const std::map<std::pair<uint32_t, uint32_t>, std::string>& blobs,
                 const std::vector<std::vector<std::byte*>>& device_stages);
  Status Start();
  // For RankConfig; its arrays live as long as the network.
  gpu::NetworkConfig ConfigOf(size_t index) const;

  // Sends what is queued and joins the proxies. No kernel pushes any more. Idempotent.
  void Stop();
  // Waits for the copies that stopped proxies have left under way. Idempotent.
  Status EndCopies();
  // Gives the memory back; no kernel and no proxy uses it any more. Idempotent.
  Status Release();
  // Keeps the memory for ever: a device that cannot be waited for may still use it.
  void Leak();

  uint64_t pinned_stage_bytes() const;  // of this process's ranks together
  std::vector<FlowStats> flow_stats() const;
  std::string DumpState() const;
  std::string DumpOpenFlows(const FlowFilter& is_awaited) const;  // as Proxy has it

 private:
  struct Member;
  using Blobs = std::map<std::pair<uint32_t, uint32_t>, std::string>;

  GpuNetwork(const SessionOptions& options, const gpu::GpuApi& api, TransportFactory factory);
  Status AddMember(const LocalRank& local, std::span<std::byte> device_stage,
                   FailureLatch* failure);
  Status AddProxies(Member& member, FailureLatch* failure);
  Result<Descriptor> ExportStage(const Member& member) const;  // its dmabuf, or none
  Status ConnectMember(Member& member, const Blobs& blobs,
                       const std::vector<std::byte*>& device_stages);
  Result<SharedMemory> MakePinned(uint64_t bytes, bool shareable);
  Result<SharedMemory> ImportPinned(const std::string& who, const std::string& blob,
                                    uint64_t bytes);
  Status Pin(std::span<std::byte> memory);
  std::vector<Proxy*> Proxies() const;  // of all members, in their order

  const SessionOptions options_;
  const gpu::GpuApi& api_;
  const TransportFactory transport_factory_;  // null: the group's
  Env env_;
  std::shared_ptr<Tracer> tracer_;    // null unless JAX_EP_TRACE is set
  std::shared_ptr<LifeSigns> signs_;  // all proxies of the process live and die together
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<std::byte*> pinned_;  // registered with the GPU runtime
};

}  // namespace jax_ep
