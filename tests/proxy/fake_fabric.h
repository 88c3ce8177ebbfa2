// A libfabric that fails on demand: its functions and objects are this file's.
#pragma once

#include <gtest/gtest.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "proxy/transport/ofi_transport.h"

namespace jax_ep {

// Receives that the endpoint holds.
inline constexpr size_t kFabricReceives = 4;

// One endpoint, which delivers to itself at once; what goes elsewhere waits for Fail.
class FakeFabric {
 public:
  FakeFabric() {
    instance = this;
    library_.dupinfo = [](const fi_info*) -> fi_info* { return nullptr; };
    library_.freeinfo = [](fi_info*) {};
    library_.fabric = [](fi_fabric_attr*, fid_fabric** fabric, void*) {
      *fabric = &instance->fabric_;
      return 0;
    };
    library_.strerror = [](int) -> const char* { return "made up"; };
    library_.version = []() -> uint32_t { return FI_VERSION(1, 17); };
    SetObjects();
    SetQueue();
    SetEndpoint();
    info_.mode = FI_RX_CQ_DATA;
    info_.tx_attr = &tx_;
    info_.rx_attr = &rx_;
    info_.ep_attr = &ep_attr_;
    info_.domain_attr = &domain_attr_;
    info_.fabric_attr = &fabric_attr_;
    tx_.inject_size = 64;
    tx_.size = 16;
    rx_.size = kFabricReceives;
    ep_attr_.max_msg_size = 1 << 20;
    domain_attr_.name = name_;
    domain_attr_.mr_key_size = 8;
    fabric_attr_.prov_name = name_;
  }
  FakeFabric(const FakeFabric&) = delete;

  std::unique_ptr<Transport> Make(const TransportOptions& options) {
    auto rail = OfiRail::Create(library_, OfiInfo(&info_, {&library_}), /*must_wake=*/false,
                                options.serves_device);
    EXPECT_TRUE(rail.ok()) << rail.status().message();
    std::vector<std::unique_ptr<OfiRail>> rails;
    rails.push_back(std::move(*rail));
    auto transport = MakeOfiTransport(library_, options, std::move(rails));
    EXPECT_TRUE(transport.ok()) << transport.status().message();
    return std::move(*transport);
  }

  // From the next Make on: a provider that registers GPU memory, and asks for `mr_mode`.
  void ServeGpuMemory(int mr_mode) {
    info_.caps |= FI_HMEM;
    domain_attr_.mr_mode = mr_mode;
  }
  // FI_OPT_FI_HMEM_P2P as it was set, or -1.
  int p2p() const { return p2p_; }
  // What the last region was registered with; its one part is `registered_part`.
  const fi_mr_attr& registered() const { return registered_; }
  const iovec& registered_part() const { return registered_part_; }
  // What a write must name as the descriptor of local bytes, and what the last one did.
  void* descriptor() { return &mr_; }
  void* written_descriptor() const { return written_descriptor_; }

  size_t num_receives() const { return receives_.size(); }
  void RefuseReceives(bool refuse) { refuses_receives_ = refuse; }
  void FailReceive() { Fail(&receives_, FI_EIO); }
  // The oldest write to another endpoint.
  void FailWrite(int error) { Fail(&writes_, error); }

 private:
  struct Entry {
    int error = 0;
    fi_cq_data_entry data = {};
  };
  static constexpr fi_addr_t kSelf = 0;

  static int Closed(fid*) { return 0; }

  void Fail(std::deque<void*>* operations, int error) {
    ASSERT_FALSE(operations->empty());
    Entry entry{.error = error};
    entry.data.op_context = operations->front();
    operations->pop_front();
    entries_.push_back(entry);
  }

  void Write(fi_addr_t to, void* context, uint64_t immediate) {
    if (to != kSelf) return writes_.push_back(context);
    Entry arrival;
    arrival.data.flags = FI_REMOTE_CQ_DATA;
    arrival.data.data = immediate;
    arrival.data.op_context = receives_.front();
    receives_.pop_front();
    entries_.push_back(arrival);
    if (context == nullptr) return;
    Entry sent;
    sent.data.op_context = context;
    entries_.push_back(sent);
  }

  void SetObjects() {
    fid_ops_.close = Closed;
    fid_ops_.bind = [](fid*, fid*, uint64_t) { return 0; };
    fid_ops_.control = [](fid*, int, void*) { return 0; };
    for (fid* object : {&fabric_.fid, &domain_.fid, &av_.fid, &cq_.fid, &ep_.fid, &mr_.fid}) {
      object->ops = &fid_ops_;
    }
    fabric_.ops = &fabric_ops_;
    fabric_ops_.domain = [](fid_fabric*, fi_info*, fid_domain** domain, void*) {
      *domain = &instance->domain_;
      return 0;
    };
    domain_.ops = &domain_ops_;
    domain_.mr = &mr_ops_;
    domain_ops_.av_open = [](fid_domain*, fi_av_attr*, fid_av** av, void*) {
      *av = &instance->av_;
      return 0;
    };
    domain_ops_.cq_open = [](fid_domain*, fi_cq_attr*, fid_cq** cq, void*) {
      *cq = &instance->cq_;
      return 0;
    };
    domain_ops_.endpoint = [](fid_domain*, fi_info*, fid_ep** ep, void*) {
      *ep = &instance->ep_;
      return 0;
    };
    mr_.mem_desc = &mr_;
    mr_ops_.regattr = [](fid*, const fi_mr_attr* attr, uint64_t, fid_mr** region) {
      instance->registered_ = *attr;
      instance->registered_part_ = *attr->mr_iov;
      *region = &instance->mr_;
      return 0;
    };
    av_.ops = &av_ops_;
    av_ops_.insert = [](fid_av*, const void*, size_t, fi_addr_t* handle, uint64_t, void*) {
      *handle = instance->num_addresses_++;
      return 1;
    };
  }

  void SetQueue() {
    cq_.ops = &cq_ops_;
    cq_ops_.read = [](fid_cq*, void* buffer, size_t) -> ssize_t {
      if (instance->entries_.empty()) return -FI_EAGAIN;
      if (instance->entries_.front().error != 0) return -FI_EAVAIL;
      *static_cast<fi_cq_data_entry*>(buffer) = instance->entries_.front().data;
      instance->entries_.pop_front();
      return 1;
    };
    cq_ops_.readerr = [](fid_cq*, fi_cq_err_entry* error, uint64_t) -> ssize_t {
      if (instance->entries_.empty()) return -FI_EAGAIN;
      error->err = instance->entries_.front().error;
      error->op_context = instance->entries_.front().data.op_context;
      instance->entries_.pop_front();
      return 1;
    };
    cq_ops_.strerror = [](fid_cq*, int, const void*, char*, size_t) -> const char* {
      return "on demand";
    };
  }

  void SetEndpoint() {
    ep_.ops = &ep_ops_;
    ep_ops_.setopt = [](fid*, int level, int option, const void* value, size_t bytes) {
      if (level != FI_OPT_ENDPOINT || option != FI_OPT_FI_HMEM_P2P || bytes != sizeof(int)) {
        return -FI_ENOPROTOOPT;
      }
      if ((instance->info_.caps & FI_HMEM) == 0) return -FI_EOPNOTSUPP;
      memcpy(&instance->p2p_, value, bytes);
      return 0;
    };
    ep_.cm = &cm_ops_;
    cm_ops_.getname = [](fid*, void* address, size_t* num_bytes) {
      if (address != nullptr) memset(address, 1, *num_bytes);
      *num_bytes = 8;
      return 0;
    };
    ep_.msg = &msg_ops_;
    msg_ops_.recv = [](fid_ep*, void*, size_t, void*, fi_addr_t, void* context) -> ssize_t {
      if (instance->refuses_receives_) return -FI_EAGAIN;
      instance->receives_.push_back(context);
      return 0;
    };
    ep_.rma = &rma_ops_;
    rma_ops_.writemsg = [](fid_ep*, const fi_msg_rma* message, uint64_t) -> ssize_t {
      instance->written_descriptor_ = message->desc == nullptr ? nullptr : *message->desc;
      instance->Write(message->addr, message->context, message->data);
      return 0;
    };
    rma_ops_.injectdata = [](fid_ep*, const void*, size_t, uint64_t immediate, fi_addr_t to,
                             uint64_t, uint64_t) -> ssize_t {
      instance->Write(to, nullptr, immediate);
      return 0;
    };
  }

  static inline FakeFabric* instance = nullptr;
  char name_[5] = "fake";
  OfiLibrary library_;
  fi_info info_{};
  fi_tx_attr tx_{};
  fi_rx_attr rx_{};
  fi_ep_attr ep_attr_{};
  fi_domain_attr domain_attr_{};
  fi_fabric_attr fabric_attr_{};
  fi_ops fid_ops_{};
  fi_ops_fabric fabric_ops_{};
  fi_ops_domain domain_ops_{};
  fi_ops_mr mr_ops_{};
  fi_ops_av av_ops_{};
  fi_ops_cq cq_ops_{};
  fi_ops_ep ep_ops_{};
  int p2p_ = -1;
  fi_ops_cm cm_ops_{};
  fi_ops_msg msg_ops_{};
  fi_ops_rma rma_ops_{};
  fid_fabric fabric_{};
  fid_domain domain_{};
  fid_av av_{};
  fid_cq cq_{};
  fid_ep ep_{};
  fid_mr mr_{};
  fi_addr_t num_addresses_ = kSelf;
  bool refuses_receives_ = false;
  fi_mr_attr registered_{};
  iovec registered_part_{};
  void* written_descriptor_ = nullptr;
  std::deque<void*> receives_, writes_;
  std::deque<Entry> entries_;
};

}  // namespace jax_ep
