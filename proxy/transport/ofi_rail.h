// OfiRail: one libfabric endpoint with its fabric, domain, address vector, completion queue and
// registered memory. Knows no peers by rank and no protocol. One that was made can write
// immediates: it has sent one to itself.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/transport/ofi_library.h"

namespace jax_ep {

// One write or posted receive under way. libfabric owns the first bytes until its completion.
struct OfiOperation {
  fi_context2 context;
  bool is_receive;
  uint32_t peer;
  uint64_t token;
};

// Where a peer's region is on one rail.
struct OfiRemote {
  uint64_t base = 0;
  uint64_t key = 0;
};

// Registered memory.
struct OfiLocal {
  OfiRemote remote;            // as peers address it
  void* descriptor = nullptr;  // for local use, where the provider wants one
  std::byte* bytes = nullptr;
};

// Thread rule: that of Transport, except the counters.
class OfiRail {
 public:
  // `must_wake`: make the completion queue waitable; wait_fd() is -1 where the provider cannot.
  // `serves_device`: the NIC itself reads and writes GPUs' memory. A provider that copied it
  // through the host would wait for the GPU, whose kernels wait for the copy.
  // \error kUnavailable  the provider cannot make it, or no immediate came through
  static Result<std::unique_ptr<OfiRail>> Create(const OfiLibrary& library, OfiInfo info,
                                                 bool must_wake, bool serves_device);
  ~OfiRail();

  const fi_info& info() const { return *info_; }
  int wait_fd() const { return wait_fd_; }
  // True if a wait on wait_fd() may begin; false: there is something to poll.
  bool MayWait();

  const std::string& address() const { return address_; }
  // Source and target of empty writes.
  const OfiLocal& signal() const { return signal_; }
  // 64 if all of Write::immediate arrives, else 32.
  uint32_t immediate_bits() const { return immediate_bits_; }
  Result<fi_addr_t> AddPeer(std::string_view address);
  Result<OfiLocal> Register(std::span<std::byte> bytes, int device);

  struct Write {
    fi_addr_t to = 0;
    uint32_t peer = 0;  // for the completion
    const OfiLocal* local = nullptr;
    uint64_t local_offset = 0;
    OfiRemote remote = {};
    uint64_t remote_offset = 0;
    uint64_t length_bytes = 0;
    bool has_immediate = false;
    uint64_t immediate = 0;
    uint64_t token = 0;
  };
  // 0 or libfabric's negative error; -FI_EAGAIN: poll and try again. Nothing is injected: a write
  // without a completion would fail without its peer's name.
  ssize_t Post(const Write& write);

  // As fi_cq_read, at most entries.size(); then call Finish on each operation.
  ssize_t ReadCompletions(std::span<fi_cq_data_entry> entries);
  ssize_t ReadError(fi_cq_err_entry* error);
  // The text of the provider about an error entry.
  std::string DescribeError(const fi_cq_err_entry& error) const;
  // Gives a write's operation back, or posts a receive again.
  void Finish(OfiOperation* operation);
  // Posts the receives that the provider refused before. Cheap when there are none.
  Status RepostReceives();

  // Any thread.
  uint64_t num_messages() const { return num_messages_.load(std::memory_order_relaxed); }
  uint64_t num_bytes() const { return num_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Close {
    template <typename Fid>
    void operator()(Fid* object) const {
      fi_close(&object->fid);
    }
  };
  template <typename Fid>
  using Owned = std::unique_ptr<Fid, Close>;

  OfiRail(const OfiLibrary& library, OfiInfo info) : library_(library), info_(std::move(info)) {}
  Status Open(bool must_wake, bool serves_device);
  Status OpenQueue(bool must_wake);
  Status CheckSelf();

  const OfiLibrary& library_;
  OfiInfo info_;
  bool delivery_complete_ = false;
  int wait_fd_ = -1;
  std::string address_;
  uint32_t immediate_bits_ = 32;
  alignas(64) std::array<std::byte, 64> signal_bytes_{};  // never written
  OfiLocal signal_;

  // In the order of creation; closed in the reverse order, endpoint first (see the destructor).
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_av> av_;
  Owned<fid_cq> cq_;
  std::vector<Owned<fid_mr>> regions_;
  Owned<fid_ep> ep_;

  std::vector<OfiOperation> operations_;
  std::vector<OfiOperation*> free_writes_;
  std::vector<OfiOperation*> owed_receives_;

  std::atomic<uint64_t> num_messages_{0};
  std::atomic<uint64_t> num_bytes_{0};
};

}  // namespace jax_ep
