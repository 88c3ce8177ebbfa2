#include "proxy/transport/verbs_rail.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include <algorithm>

#include "proxy/base/random.h"

namespace jax_ep {
namespace {

// Posted writes of one queue pair.
constexpr uint32_t kMaxSends = 256;
// Posted receives, shared by all peers; each arrival uses one. More windows than fit make a
// sender's NIC wait and try again (RNR), which costs time and nothing else.
constexpr uint32_t kMaxReceives = 4096;
// Completions of up to this many peers' full send queues fit, within what soft-RoCE allows.
constexpr int kMaxCompletions = 32767;
// 7 attempts, JAX_EP_VERBS_TIMEOUT apart. Not the largest number, 7: soft-RoCE repeats for ever
// then.
constexpr uint8_t kRetries = 6;
constexpr uint8_t kForEver = 7;    // rnr_retry: a slow receiver is no failure
constexpr uint8_t kRnrTimer = 12;  // 0.64 ms
constexpr uint8_t kHopLimit = 64;
constexpr uint32_t kSequenceMask = (1u << 24) - 1;

ibv_mtu MtuOf(uint32_t bytes) {
  switch (bytes) {
    case 256:
      return IBV_MTU_256;
    case 512:
      return IBV_MTU_512;
    case 1024:
      return IBV_MTU_1024;
    case 2048:
      return IBV_MTU_2048;
    default:
      return IBV_MTU_4096;
  }
}

}  // namespace

Status VerbsRail::Failed(const char* operation) const {
  return Unavailable("verbs: " + port_.device + ":" + std::to_string(port_.port) + ": " +
                     operation + ": " + strerror(errno) + " (" + std::to_string(errno) + ")");
}

Result<std::unique_ptr<VerbsRail>> VerbsRail::Create(const VerbsLibrary& library,
                                                     const VerbsPort& port, const Env& env) {
  std::unique_ptr<VerbsRail> rail(new VerbsRail(library, port, env));
  JAX_EP_RETURN_IF_ERROR(rail->Start());
  return rail;
}

Status VerbsRail::Start() {
  int num_devices = 0;
  ibv_device** const list = library_.get_device_list(&num_devices);
  for (int i = 0; list != nullptr && i < num_devices; ++i) {
    if (port_.device == library_.get_device_name(list[i])) context_ = library_.open_device(list[i]);
  }
  if (list != nullptr) library_.free_device_list(list);
  if (context_ == nullptr) return Failed("ibv_open_device");
  ibv_device_attr device{};
  if (library_.query_device(context_, &device) != 0) return Failed("ibv_query_device");
  if (library_.query_port(context_, port_.port, &port_attr_) != 0) return Failed("ibv_query_port");
  if (library_.query_gid(context_, port_.port, port_.gid_index, &gid_) != 0) {
    return InvalidArgument("verbs: " + port_.device + " has no entry " +
                           std::to_string(port_.gid_index) +
                           " in its table of GIDs (JAX_EP_VERBS_GID_INDEX)");
  }
  pd_ = library_.alloc_pd(context_);
  if (pd_ == nullptr) return Failed("ibv_alloc_pd");
  channel_ = library_.create_comp_channel(context_);
  if (channel_ == nullptr) return Failed("ibv_create_comp_channel");
  fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  cq_ = library_.create_cq(context_, std::min(device.max_cqe, kMaxCompletions), nullptr, channel_,
                           /*comp_vector=*/0);
  if (cq_ == nullptr) return Failed("ibv_create_cq");
  max_sends_ = std::min<uint32_t>(kMaxSends, static_cast<uint32_t>(device.max_qp_wr));
  num_owed_receives_ = std::min<uint32_t>(kMaxReceives, static_cast<uint32_t>(device.max_srq_wr));
  ibv_srq_init_attr attr{};
  attr.attr.max_wr = num_owed_receives_;
  attr.attr.max_sge = 1;
  srq_ = library_.create_srq(pd_, &attr);
  if (srq_ == nullptr) return Failed("ibv_create_srq");
  return RepostReceives();
}

VerbsRail::~VerbsRail() {
  for (ibv_qp* qp : qps_) library_.destroy_qp(qp);
  for (ibv_mr* region : regions_) library_.dereg_mr(region);
  if (srq_ != nullptr) library_.destroy_srq(srq_);
  if (cq_ != nullptr) {
    if (num_unacknowledged_events_ > 0) library_.ack_cq_events(cq_, num_unacknowledged_events_);
    library_.destroy_cq(cq_);
  }
  if (channel_ != nullptr) library_.destroy_comp_channel(channel_);
  if (pd_ != nullptr) library_.dealloc_pd(pd_);
  if (context_ != nullptr) library_.close_device(context_);
}

bool VerbsRail::Arm() {
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  bool had_event = false;
  while (library_.get_cq_event(channel_, &cq, &cq_context) == 0) {
    ++num_unacknowledged_events_;
    had_event = true;
  }
  // After a request the queue must be looked at once more: what came before it rings no bell.
  return ibv_req_notify_cq(cq_, /*solicited_only=*/0) == 0 && !had_event;
}

Result<ibv_qp*> VerbsRail::CreateQp() {
  ibv_qp_init_attr init{};
  init.send_cq = cq_;
  init.recv_cq = cq_;
  init.srq = srq_;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = max_sends_;
  init.cap.max_send_sge = 1;
  ibv_qp* const qp = library_.create_qp(pd_, &init);
  if (qp == nullptr) return Failed("ibv_create_qp");
  {
    std::lock_guard lock(mutex_);
    qps_.push_back(qp);
  }
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = port_.port;
  attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  if ((errno = library_.modify_qp(
           qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) != 0) {
    return Failed("ibv_modify_qp(INIT)");
  }
  return qp;
}

VerbsAddress VerbsRail::AddressOf(const ibv_qp& qp) const {
  uint32_t sequence = 0;  // no secret; seldom that of an older queue pair of this number
  if (!DrawRandom("verbs", &sequence).ok()) sequence = qp.qp_num;
  const ibv_mtu mtu = env_.verbs_mtu != 0 ? MtuOf(env_.verbs_mtu) : port_attr_.active_mtu;
  return {.qp_number = qp.qp_num,
          .sequence = sequence & kSequenceMask,
          .lid = port_attr_.lid,
          .mtu = static_cast<uint32_t>(std::min(mtu, port_attr_.active_mtu)),
          .gid = gid_};
}

Result<VerbsSender> VerbsRail::Open(VerbsAddress* address) {
  JAX_EP_ASSIGN_OR_RETURN(ibv_qp * qp, CreateQp());
  *address = AddressOf(*qp);
  return VerbsSender{.qp = qp};
}

Status VerbsRail::Complete(ibv_qp* qp, const VerbsAddress& own, const VerbsAddress& peer) {
  if (peer.mtu < IBV_MTU_256 || peer.mtu > IBV_MTU_4096 || peer.qp_number > kSequenceMask ||
      peer.sequence > kSequenceMask || peer.lid > UINT16_MAX) {
    return InvalidArgument("verbs: an impossible queue pair address");
  }
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = static_cast<ibv_mtu>(std::min(own.mtu, peer.mtu));
  attr.dest_qp_num = peer.qp_number;
  attr.rq_psn = peer.sequence;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = kRnrTimer;
  attr.ah_attr.port_num = port_.port;
  attr.ah_attr.sl = static_cast<uint8_t>(env_.verbs_sl);
  attr.ah_attr.dlid = static_cast<uint16_t>(peer.lid);
  attr.ah_attr.is_global = port_attr_.link_layer == IBV_LINK_LAYER_ETHERNET ? 1 : 0;
  attr.ah_attr.grh.dgid = peer.gid;
  attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(port_.gid_index);
  attr.ah_attr.grh.hop_limit = kHopLimit;
  attr.ah_attr.grh.traffic_class = static_cast<uint8_t>(env_.verbs_tc);
  if ((errno = library_.modify_qp(qp, &attr,
                                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                      IBV_QP_MIN_RNR_TIMER)) != 0) {
    // RoCE looks for the peer's address here.
    const bool is_far = errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH;
    const Status failed = Failed("ibv_modify_qp(RTR)");
    return is_far ? failed : Internal(failed.message());
  }
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = own.sequence;
  attr.timeout = static_cast<uint8_t>(env_.verbs_timeout);
  attr.retry_cnt = kRetries;
  attr.rnr_retry = kForEver;
  attr.max_rd_atomic = 1;
  if ((errno =
           library_.modify_qp(qp, &attr,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) != 0) {
    return Internal(Failed("ibv_modify_qp(RTS)").message());
  }
  return Status::Ok();
}

Result<VerbsAddress> VerbsRail::Accept(const VerbsAddress& peer) {
  JAX_EP_ASSIGN_OR_RETURN(ibv_qp * qp, CreateQp());
  const VerbsAddress own = AddressOf(*qp);
  JAX_EP_RETURN_IF_ERROR(Complete(qp, own, peer));
  return own;
}

Result<ibv_mr*> VerbsRail::Register(const MemoryRegion& region) {
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const std::span<std::byte> bytes = region.bytes;
  const bool has_dmabuf = region.dmabuf_fd >= 0;
  ibv_mr* memory = nullptr;
  if (has_dmabuf) {
    if (library_.reg_dmabuf_mr == nullptr) {
      return Unimplemented("verbs: this libibverbs cannot register a dmabuf");
    }
    memory =
        library_.reg_dmabuf_mr(pd_, /*offset=*/0, bytes.size(),
                               reinterpret_cast<uint64_t>(bytes.data()), region.dmabuf_fd, kAccess);
  } else {
    // Also GPU memory where the kernel's peer memory module serves it.
    memory = library_.reg_mr(pd_, bytes.data(), bytes.size(), kAccess);
  }
  if (memory == nullptr) {
    const char* hint = "is the locked memory limit (ulimit -l) large enough?";
    if (region.device >= 0) {
      hint = has_dmabuf ? "can this NIC's driver import the memory of a GPU (dmabuf)?"
                        : "is the kernel module nvidia_peermem loaded?";
    }
    const Status status = Failed(has_dmabuf ? "ibv_reg_dmabuf_mr" : "ibv_reg_mr");
    return Status(status.code(),
                  status.message() + " for " + std::to_string(bytes.size()) + " bytes; " + hint);
  }
  regions_.push_back(memory);
  return memory;
}

int VerbsRail::Post(VerbsSender* sender, const Write& write) {
  ibv_sge part{.addr = write.local_address, .length = write.length_bytes, .lkey = write.local_key};
  ibv_send_wr request{};
  request.wr_id = write.id;
  request.sg_list = &part;
  request.num_sge = write.length_bytes > 0 ? 1 : 0;
  request.opcode = write.has_immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  request.imm_data = htonl(write.immediate);
  request.wr.rdma.remote_addr = write.remote_address;
  request.wr.rdma.rkey = write.remote_key;
  ibv_send_wr* bad = nullptr;
  const int rc = ibv_post_send(sender->qp, &request, &bad);
  if (rc == 0) {
    ++sender->num_posted;
    num_messages_.store(num_messages() + 1, std::memory_order_relaxed);
    num_bytes_.store(num_bytes() + write.length_bytes, std::memory_order_relaxed);
  }
  return rc;
}

int VerbsRail::Poll(std::span<ibv_wc> completions) {
  const int count = ibv_poll_cq(cq_, static_cast<int>(completions.size()), completions.data());
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = completions[static_cast<size_t>(i)];
    if (completion.wr_id == kVerbsReceiveId) ++num_owed_receives_;
  }
  return count;
}

Status VerbsRail::RepostReceives() {
  for (; num_owed_receives_ > 0; --num_owed_receives_) {
    ibv_recv_wr request{};  // no buffer: the data lands where the write says
    request.wr_id = kVerbsReceiveId;
    ibv_recv_wr* bad = nullptr;
    if ((errno = ibv_post_srq_recv(srq_, &request, &bad)) != 0) {
      if (errno == ENOMEM) return Status::Ok();  // full: later
      return Failed("ibv_post_srq_recv");
    }
  }
  return Status::Ok();
}

}  // namespace jax_ep
