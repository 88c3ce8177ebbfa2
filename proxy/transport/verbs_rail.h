// VerbsRail: one port of one RDMA device with its protection domain, completion queue, shared
// receive queue, queue pairs and registered memory. Knows no peers by rank and no protocol.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/transport/verbs_library.h"

namespace jax_ep {

// ibv_wc::wr_id of a receive; writes have smaller ones.
inline constexpr uint64_t kVerbsReceiveId = UINT64_MAX;

// One end of a connection, as the other end must know it.
struct VerbsAddress {
  uint32_t qp_number = 0;
  uint32_t sequence = 0;  // first packet sequence number
  uint32_t lid = 0;       // InfiniBand only
  uint32_t mtu = 0;       // ibv_mtu
  ibv_gid gid = {};
};

// A queue pair that we write through. The receiving ones need no handling after Accept.
struct VerbsSender {
  ibv_qp* qp = nullptr;
  uint32_t num_posted = 0;  // not completed
};

// Thread rule: that of Transport, except Open, Complete, Accept and the counters: any thread.
class VerbsRail {
 public:
  static Result<std::unique_ptr<VerbsRail>> Create(const VerbsLibrary& library,
                                                   const VerbsPort& port, const Env& env);
  ~VerbsRail();

  const VerbsPort& port() const { return port_; }
  uint64_t max_message_bytes() const { return port_attr_.max_msg_sz; }
  // Readable after Arm when there is something to poll.
  int wait_fd() const { return channel_->fd; }
  // Asks for an event on wait_fd(); false: there is something to poll already.
  bool Arm();

  // A new queue pair and its address; Complete joins it to the peer's.
  // \error kUnavailable  of Complete: no way leads to the peer
  Result<VerbsSender> Open(VerbsAddress* address);
  Status Complete(ibv_qp* qp, const VerbsAddress& own, const VerbsAddress& peer);
  // The receiving end for a peer's queue pair.
  Result<VerbsAddress> Accept(const VerbsAddress& peer);

  Result<ibv_mr*> Register(const MemoryRegion& region);

  // False: the send queue is full.
  bool HasRoom(const VerbsSender& sender) const { return sender.num_posted < max_sends_; }
  struct Write {
    uint64_t id = 0;  // comes back in ibv_wc::wr_id
    uint64_t local_address = 0;
    uint32_t local_key = 0;
    uint64_t remote_address = 0;
    uint32_t remote_key = 0;
    uint32_t length_bytes = 0;
    bool has_immediate = false;
    uint32_t immediate = 0;
  };
  // 0 or errno.
  int Post(VerbsSender* sender, const Write& write);

  // Fills completions; negative: the queue is broken. Receives are posted again.
  int Poll(std::span<ibv_wc> completions);
  Status RepostReceives();

  const char* StatusText(ibv_wc_status status) const { return library_.wc_status_str(status); }

  // Any thread.
  uint64_t num_messages() const { return num_messages_.load(std::memory_order_relaxed); }
  uint64_t num_bytes() const { return num_bytes_.load(std::memory_order_relaxed); }

 private:
  VerbsRail(const VerbsLibrary& library, const VerbsPort& port, const Env& env)
      : library_(library), port_(port), env_(env) {}
  Status Start();
  Status Failed(const char* operation) const;
  Result<ibv_qp*> CreateQp();
  VerbsAddress AddressOf(const ibv_qp& qp) const;

  const VerbsLibrary& library_;
  const VerbsPort port_;
  const Env env_;
  ibv_context* context_ = nullptr;
  ibv_port_attr port_attr_{};
  ibv_gid gid_{};
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  uint32_t max_sends_ = 0;
  uint32_t num_owed_receives_ = 0;
  std::vector<ibv_mr*> regions_;
  std::mutex mutex_;          // guards qps_
  std::vector<ibv_qp*> qps_;  // all, for the end
  unsigned num_unacknowledged_events_ = 0;
  std::atomic<uint64_t> num_messages_{0};
  std::atomic<uint64_t> num_bytes_{0};
};

}  // namespace jax_ep
