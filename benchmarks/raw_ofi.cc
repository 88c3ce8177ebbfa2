// The bare network: FI_RMA writes with remote CQ data between two processes, with no ring, no proxy
// and no protocol of ours, as a bound for bench_wire.cc. Same provider, window and size.
//
//   raw_ofi PROVIDER ADDRESS WINDOW      sizes and modes as in bench_wire.cc
//
// The receiver acknowledges every quarter of the window with an empty write.
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "benchmarks/two_processes.h"
#include "benchmarks/wire_cases.h"

namespace {

using two_processes::Die;
using two_processes::Now;

void Check(long rc, const char* what) {
  if (rc < 0) Die(std::string(what) + ": " + fi_strerror(static_cast<int>(-rc)));
}
#define CHECK_OK(call) Check(call, #call)

struct Remote {
  uint64_t key, base;
};

class Endpoint {
 public:
  Endpoint(const char* provider, const char* address, size_t num_bytes) {
    fi_info* hints = fi_allocinfo();
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->cq_data_size = 4;
    hints->fabric_attr->prov_name = strdup(provider);
    CHECK_OK(fi_getinfo(FI_VERSION(1, 17), address, nullptr, FI_SOURCE, hints, &info_));
    CHECK_OK(fi_fabric(info_->fabric_attr, &fabric_, nullptr));
    CHECK_OK(fi_domain(fabric_, info_, &domain_, nullptr));
    fi_av_attr av{};
    av.type = FI_AV_TABLE;
    CHECK_OK(fi_av_open(domain_, &av, &av_, nullptr));
    fi_cq_attr cq{};
    cq.format = FI_CQ_FORMAT_DATA;
    cq.size = 8192;
    CHECK_OK(fi_cq_open(domain_, &cq, &cq_, nullptr));
    CHECK_OK(fi_endpoint(domain_, info_, &ep_, nullptr));
    CHECK_OK(fi_ep_bind(ep_, &av_->fid, 0));
    CHECK_OK(fi_ep_bind(ep_, &cq_->fid, FI_TRANSMIT | FI_RECV));
    CHECK_OK(fi_enable(ep_));
    buffer_ = static_cast<char*>(aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096));
    memset(buffer_, 1, num_bytes);
    const uint64_t mode = static_cast<uint64_t>(info_->domain_attr->mr_mode);
    CHECK_OK(fi_mr_reg(domain_, buffer_, num_bytes, FI_WRITE | FI_REMOTE_WRITE, 0,
                       (mode & FI_MR_PROV_KEY) != 0 ? 0 : 0x1234, 0, &mr_, nullptr));
    if ((mode & FI_MR_LOCAL) != 0) descriptor_ = fi_mr_desc(mr_);
    own_.key = fi_mr_key(mr_);
    own_.base = (mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uint64_t>(buffer_) : 0;
  }

  void Connect(two_processes::Pipe& pipe) {
    char name[512];
    size_t size = sizeof(name);
    CHECK_OK(fi_getname(&ep_->fid, name, &size));
    const std::string peer = pipe.Exchange(std::string(name, size));
    if (fi_av_insert(av_, peer.data(), 1, &peer_, 0, nullptr) != 1) Die("fi_av_insert");
    const std::string remote =
        pipe.Exchange(std::string(reinterpret_cast<const char*>(&own_), sizeof(own_)));
    memcpy(&remote_, remote.data(), sizeof(remote_));
  }

  void Write(size_t offset, size_t size, uint32_t data) {
    while (fi_writedata(ep_, buffer_ + offset, size, descriptor_, data, peer_,
                        remote_.base + offset, remote_.key,
                        &contexts_[posted_ % kContexts]) == -FI_EAGAIN) {
      Poll();
    }
    ++posted_;
  }

  void Poll() {
    fi_cq_data_entry entries[16];
    const ssize_t count = fi_cq_read(cq_, entries, 16);
    if (count == -FI_EAGAIN) {
      sched_yield();
      return;
    }
    Check(count, "fi_cq_read");
    for (ssize_t i = 0; i < count; ++i) {
      if ((entries[i].flags & FI_REMOTE_CQ_DATA) != 0) {
        ++arrived;
        newest = static_cast<uint32_t>(entries[i].data);
      } else {
        ++completed_;
      }
    }
  }
  long outstanding() const { return posted_ - completed_; }

  long arrived = 0;
  uint32_t newest = 0;

 private:
  static constexpr long kContexts = 8192;

  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* av_ = nullptr;
  fid_cq* cq_ = nullptr;
  fid_ep* ep_ = nullptr;
  fid_mr* mr_ = nullptr;
  void* descriptor_ = nullptr;
  fi_addr_t peer_ = 0;
  Remote own_{}, remote_{};
  char* buffer_ = nullptr;
  std::vector<fi_context2> contexts_ = std::vector<fi_context2>(kContexts);
  long posted_ = 0, completed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) Die("usage: raw_ofi PROVIDER ADDRESS WINDOW");
  const long window = atol(argv[3]);
  two_processes::Sides sides = two_processes::Fork();
  const auto slots = [](const wire_cases::Case& c) { return wire_cases::kHeapBytes / 2 / c.size; };
  Endpoint ep(argv[1], argv[2], wire_cases::kHeapBytes);
  ep.Connect(sides.pipe);
  for (const wire_cases::Case& c : wire_cases::kCases) {
    sides.pipe.Barrier([&] { ep.Poll(); });
    ep.arrived = 0;
    ep.newest = 0;
    const double begin = Now();
    if (c.is_latency) {
      std::vector<double> times;
      for (long i = 1; i <= c.messages; ++i) {
        const double start = Now();
        if (sides.is_sender) ep.Write(0, c.size, 0);
        while (ep.arrived < i) ep.Poll();
        if (!sides.is_sender) ep.Write(0, c.size, 0);
        times.push_back(Now() - start);
      }
      if (sides.is_sender) two_processes::PrintLatency("raw", c.size, times);
    } else if (sides.is_sender) {
      for (long sent = 0; ep.newest < static_cast<uint32_t>(c.messages);) {
        if (sent < c.messages && sent < static_cast<long>(ep.newest) + window) {
          ep.Write(static_cast<size_t>(sent) % slots(c) * c.size, c.size, 0);
          ++sent;
        } else {
          ep.Poll();
        }
      }
      two_processes::PrintBandwidth("raw", c.size, c.messages, Now() - begin);
    } else {
      long acknowledged = 0;
      while (acknowledged < c.messages) {
        ep.Poll();
        if (ep.arrived - acknowledged >= (window + 3) / 4 || ep.arrived == c.messages) {
          acknowledged = ep.arrived;
          ep.Write(0, 0, static_cast<uint32_t>(acknowledged));
        }
      }
    }
    while (ep.outstanding() > 0) ep.Poll();
  }
  sides.pipe.Barrier([&] { ep.Poll(); });
  if (!sides.is_sender) wait(nullptr);
  std::_Exit(0);
}
