#include "proxy/transport/ofi_rail.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "proxy/base/deadline.h"
#include "proxy/base/descriptor.h"
#include "proxy/base/random.h"

namespace jax_ep {
namespace {

// Writes under way, at most; the provider's own limit may be lower.
constexpr size_t kMaxWrites = 1024;
// Receives posted where each arrival consumes one: all flows' windows of small groups fit.
constexpr size_t kMaxReceives = 4096;
constexpr size_t kQueueEntries = 8192;
constexpr int kDrainPolls = 256;
constexpr int kKeyAttempts = 8;  // random keys that may collide before we give up
// How long an immediate to ourselves may take. Only providers that lose it take long, and a machine
// that hardly runs us.
constexpr std::chrono::seconds kSelfTime{5};
// Of an endpoint that writes to itself: 7 over TCP. With fewer libfabric 1.17 reads from address 0.
constexpr size_t kDescriptors = 16;
constexpr uint64_t kSelfImmediate = 0x53454c46696d6d73;

// A key that nobody can guess: whoever connects to our endpoint without having read it in the
// bootstrap's store can write nothing and signal nothing.
Result<uint64_t> RandomKey(size_t num_bytes) {
  uint64_t key = 0;
  JAX_EP_RETURN_IF_ERROR(DrawRandom("ofi", &key));
  return num_bytes >= sizeof(key) ? key : key & ((uint64_t{1} << (8 * num_bytes)) - 1);
}

}  // namespace

Result<std::unique_ptr<OfiRail>> OfiRail::Create(const OfiLibrary& library, OfiInfo info,
                                                 bool must_wake, bool serves_device) {
  JAX_EP_RETURN_IF_ERROR(CheckDescriptors(kDescriptors, "ofi"));
  std::unique_ptr<OfiRail> rail(new OfiRail(library, std::move(info)));
  JAX_EP_RETURN_IF_ERROR(rail->Open(must_wake, serves_device));
  JAX_EP_ASSIGN_OR_RETURN(rail->signal_, rail->Register(rail->signal_bytes_, /*device=*/-1));
  JAX_EP_RETURN_IF_ERROR(rail->CheckSelf());
  return rail;
}

OfiRail::~OfiRail() {
  // libfabric 1.17's rxm over verbs can crash when it closes with events of its own under way.
  if (ep_ != nullptr) {
    std::array<fi_cq_data_entry, 16> entries;
    fi_cq_err_entry error;
    for (int i = 0; i < kDrainPolls; ++i) {
      if (ReadCompletions(entries) == -FI_EAVAIL) ReadError(&error);
    }
  }
  // Memory that is still a target must outlive the endpoint; endpoint-bound regions the reverse.
  if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) regions_.clear();
  ep_.reset();
  regions_.clear();
  cq_.reset();
  av_.reset();
}

Status OfiRail::Open(bool must_wake, bool serves_device) {
  const auto failed = [this](const char* operation, int error) {
    return Unavailable("ofi: provider " + std::string(info_->fabric_attr->prov_name) + ", domain " +
                       info_->domain_attr->name + ": " + library_.Describe(operation, error));
  };
  delivery_complete_ = (info_->tx_attr->op_flags & FI_DELIVERY_COMPLETE) != 0;
  fid_fabric* fabric = nullptr;
  if (const int rc = library_.fabric(info_->fabric_attr, &fabric, nullptr); rc != 0) {
    return failed("fi_fabric", rc);
  }
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int rc = fi_domain(fabric, info_.get(), &domain, nullptr); rc != 0) {
    return failed("fi_domain", rc);
  }
  domain_.reset(domain);
  fi_av_attr av_attr{};
  av_attr.type = FI_AV_TABLE;
  fid_av* av = nullptr;
  if (const int rc = fi_av_open(domain, &av_attr, &av, nullptr); rc != 0) {
    return failed("fi_av_open", rc);
  }
  av_.reset(av);
  JAX_EP_RETURN_IF_ERROR(OpenQueue(must_wake));
  fid_ep* ep = nullptr;
  if (const int rc = fi_endpoint(domain, info_.get(), &ep, nullptr); rc != 0) {
    return failed("fi_endpoint", rc);
  }
  ep_.reset(ep);
  if (const int rc = fi_ep_bind(ep, &av->fid, 0); rc != 0) return failed("fi_ep_bind(av)", rc);
  if (const int rc = fi_ep_bind(ep, &cq_->fid, FI_TRANSMIT | FI_RECV); rc != 0) {
    return failed("fi_ep_bind(cq)", rc);
  }
  if (serves_device) {
    const int p2p = FI_HMEM_P2P_REQUIRED;
    if (const int rc = fi_setopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &p2p, sizeof(p2p));
        rc != 0) {
      return failed("fi_setopt(FI_OPT_FI_HMEM_P2P)", rc);
    }
  }
  if (const int rc = fi_enable(ep); rc != 0) {
    return failed("fi_enable (on soft-RoCE set FI_UNIVERSE_SIZE=16)", rc);
  }
  size_t num_bytes = 0;
  fi_getname(&ep->fid, nullptr, &num_bytes);
  address_.resize(num_bytes);
  if (const int rc = fi_getname(&ep->fid, address_.data(), &num_bytes); rc != 0) {
    return failed("fi_getname", rc);
  }
  address_.resize(num_bytes);

  const size_t num_writes = std::clamp<size_t>(info_->tx_attr->size, 1, kMaxWrites);
  const bool needs_receives = (info_->mode & FI_RX_CQ_DATA) != 0;
  const size_t num_receives =
      needs_receives ? std::clamp<size_t>(info_->rx_attr->size, 1, kMaxReceives) : 0;
  operations_.resize(num_writes + num_receives);
  for (size_t i = 0; i < operations_.size(); ++i) {
    operations_[i].is_receive = i >= num_writes;
    (operations_[i].is_receive ? owed_receives_ : free_writes_).push_back(&operations_[i]);
  }
  return RepostReceives();
}

Status OfiRail::OpenQueue(bool must_wake) {
  fi_cq_attr attr{};
  attr.format = FI_CQ_FORMAT_DATA;
  attr.size = kQueueEntries;
  attr.wait_obj = must_wake ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_cq* cq = nullptr;
  int rc = fi_cq_open(domain_.get(), &attr, &cq, nullptr);
  if (rc != 0 && must_wake) {  // shm and efa have nothing to wait for
    attr.wait_obj = FI_WAIT_NONE;
    rc = fi_cq_open(domain_.get(), &attr, &cq, nullptr);
  }
  if (rc != 0) return Unavailable("ofi: " + library_.Describe("fi_cq_open", rc));
  cq_.reset(cq);
  if (attr.wait_obj == FI_WAIT_FD && fi_control(&cq->fid, FI_GETWAIT, &wait_fd_) != 0) {
    wait_fd_ = -1;
  }
  return Status::Ok();
}

Status OfiRail::CheckSelf() {
  const auto failed = [this](const std::string& why) {
    return Unavailable("ofi: provider " + std::string(info_->fabric_attr->prov_name) +
                       " carries no immediate (RMA write with remote CQ data) to itself: " + why);
  };
  JAX_EP_ASSIGN_OR_RETURN(const fi_addr_t self, AddPeer(address_));
  const Write write{.to = self,
                    .local = &signal_,
                    .remote = signal_.remote,
                    .has_immediate = true,
                    .immediate = kSelfImmediate};
  const Deadline deadline = Deadline::After(kSelfTime);
  bool is_posted = false;
  bool is_sent = false;
  bool has_arrived = false;
  while (!is_sent || !has_arrived) {
    if (deadline.expired()) return failed("none came within 5 s");
    if (!is_posted) {
      const ssize_t rc = Post(write);
      if (rc != 0 && rc != -FI_EAGAIN) return failed(library_.Describe("posting", rc));
      is_posted = rc == 0;
    }
    fi_cq_data_entry entry;
    const ssize_t num_read = ReadCompletions({&entry, 1});
    if (num_read == -FI_EAVAIL) {
      fi_cq_err_entry error;
      if (ReadError(&error) == 1) return failed(DescribeError(error));
    } else if (num_read == 1) {
      auto* const operation = static_cast<OfiOperation*>(entry.op_context);
      if ((entry.flags & FI_REMOTE_CQ_DATA) == 0) {
        is_sent |= operation != nullptr && !operation->is_receive;
      } else if (static_cast<uint32_t>(entry.data) == static_cast<uint32_t>(kSelfImmediate)) {
        has_arrived = true;
        immediate_bits_ = entry.data == kSelfImmediate ? 64 : 32;
      }
      if (operation != nullptr) Finish(operation);
      JAX_EP_RETURN_IF_ERROR(RepostReceives());
    } else if (num_read != -FI_EAGAIN) {
      return failed(library_.Describe("fi_cq_read", num_read));
    }
  }
  num_messages_.store(0, std::memory_order_relaxed);
  return Status::Ok();
}

bool OfiRail::MayWait() {
  fid* waited = &cq_->fid;
  return fi_trywait(fabric_.get(), &waited, 1) == 0;
}

Result<fi_addr_t> OfiRail::AddPeer(std::string_view address) {
  if (address.size() != address_.size()) {
    return InvalidArgument("ofi: an endpoint address of " + std::to_string(address.size()) +
                           " bytes; this provider's have " + std::to_string(address_.size()));
  }
  // A copy, because libfabric reads it as a struct.
  const std::string aligned(address);
  fi_addr_t handle = FI_ADDR_UNSPEC;
  const int num_inserted = fi_av_insert(av_.get(), aligned.data(), 1, &handle, 0, nullptr);
  if (num_inserted != 1) {
    return InvalidArgument("ofi: " + library_.Describe("fi_av_insert", num_inserted));
  }
  return handle;
}

Result<OfiLocal> OfiRail::Register(std::span<std::byte> bytes, int device) {
  const uint64_t mode = static_cast<uint64_t>(info_->domain_attr->mr_mode);
  const bool is_gpu = device >= 0;
  if (is_gpu && (info_->caps & FI_HMEM) == 0) {
    return Unimplemented("ofi: provider " + std::string(info_->fabric_attr->prov_name) +
                         " does not register a GPU's memory");
  }
  const iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
  fi_mr_attr attr{};
  attr.mr_iov = &part;
  attr.iov_count = 1;
  attr.access = FI_WRITE | FI_REMOTE_WRITE;
  if (is_gpu) {
    attr.iface = FI_HMEM_CUDA;
    attr.device.cuda = device;
  }
  fid_mr* region = nullptr;
  int rc = 0;
  for (int attempt = 0; attempt < kKeyAttempts; ++attempt) {
    if ((mode & FI_MR_PROV_KEY) == 0) {
      JAX_EP_ASSIGN_OR_RETURN(attr.requested_key, RandomKey(info_->domain_attr->mr_key_size));
    }
    rc = fi_mr_regattr(domain_.get(), &attr, 0, &region);
    if (rc != -FI_ENOKEY) break;
  }
  if (rc != 0) {
    return Unavailable("ofi: registering " + std::to_string(bytes.size()) +
                       " bytes: " + library_.Describe("fi_mr_regattr", rc) +
                       "; is the locked memory limit (ulimit -l) large enough?");
  }
  regions_.emplace_back(region);
  if ((mode & FI_MR_ENDPOINT) != 0) {
    rc = fi_mr_bind(region, &ep_->fid, 0);
    if (rc == 0) rc = fi_mr_enable(region);
    if (rc != 0) return Unavailable("ofi: " + library_.Describe("fi_mr_enable", rc));
  }
  OfiLocal local;
  local.bytes = bytes.data();
  // fi_mr(3): FI_MR_HMEM asks for descriptors of device memory only.
  const uint64_t asks = FI_MR_LOCAL | (is_gpu ? FI_MR_HMEM : 0);
  local.descriptor = (mode & asks) != 0 ? fi_mr_desc(region) : nullptr;
  local.remote.key = fi_mr_key(region);
  local.remote.base = (mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uint64_t>(bytes.data()) : 0;
  return local;
}

ssize_t OfiRail::Post(const Write& write) {
  if (free_writes_.empty()) return -FI_EAGAIN;
  OfiOperation* const operation = free_writes_.back();
  operation->peer = write.peer;
  operation->token = write.token;
  const iovec part{.iov_base = write.local->bytes + write.local_offset,
                   .iov_len = write.length_bytes};
  const fi_rma_iov target{.addr = write.remote.base + write.remote_offset,
                          .len = write.length_bytes,
                          .key = write.remote.key};
  void* descriptor = write.local->descriptor;
  const fi_msg_rma message{.msg_iov = &part,
                           .desc = &descriptor,
                           .iov_count = 1,
                           .addr = write.to,
                           .rma_iov = &target,
                           .rma_iov_count = 1,
                           .context = &operation->context,
                           .data = write.immediate};
  const ssize_t rc = fi_writemsg(ep_.get(), &message,
                                 FI_COMPLETION | (write.has_immediate ? FI_REMOTE_CQ_DATA : 0) |
                                     (delivery_complete_ ? FI_DELIVERY_COMPLETE : 0));
  if (rc != 0) return rc;
  free_writes_.pop_back();
  num_messages_.store(num_messages() + 1, std::memory_order_relaxed);
  num_bytes_.store(num_bytes() + write.length_bytes, std::memory_order_relaxed);
  return 0;
}

ssize_t OfiRail::ReadCompletions(std::span<fi_cq_data_entry> entries) {
  return fi_cq_read(cq_.get(), entries.data(), entries.size());
}

ssize_t OfiRail::ReadError(fi_cq_err_entry* error) {
  *error = {};
  return fi_cq_readerr(cq_.get(), error, 0);
}

std::string OfiRail::DescribeError(const fi_cq_err_entry& error) const {
  char text[256] = {};
  const char* provider_text =
      fi_cq_strerror(cq_.get(), error.prov_errno, error.err_data, text, sizeof(text));
  return library_.Describe("completion", error.err) + ", provider's " +
         std::to_string(error.prov_errno) +
         (provider_text == nullptr ? "" : " (" + std::string(provider_text) + ")");
}

void OfiRail::Finish(OfiOperation* operation) {
  (operation->is_receive ? owed_receives_ : free_writes_).push_back(operation);
}

Status OfiRail::RepostReceives() {
  while (!owed_receives_.empty()) {
    const ssize_t rc =
        fi_recv(ep_.get(), nullptr, 0, nullptr, FI_ADDR_UNSPEC, &owed_receives_.back()->context);
    if (rc == -FI_EAGAIN) break;
    if (rc != 0) return Internal("ofi: " + library_.Describe("fi_recv", rc));
    owed_receives_.pop_back();
  }
  return Status::Ok();
}

}  // namespace jax_ep
