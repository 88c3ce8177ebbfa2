// A libibverbs that fails on demand: its functions and objects are this file's. Nothing travels.
#pragma once

#include <errno.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "proxy/transport/verbs_transport.h"

namespace jax_ep {

// Receives that its shared queue holds.
inline constexpr int kReceives = 4;

class FakeVerbs {
 public:
  FakeVerbs() {
    instance = this;
    channel_.fd = eventfd(0, EFD_CLOEXEC);
    for (ibv_context** context : {&pd_.context, &cq_.context, &srq_.context}) *context = &context_;
    library_.get_device_list = [](int* count) -> ibv_device** {
      *count = 1;
      return instance->devices_;
    };
    library_.free_device_list = [](ibv_device**) {};
    library_.get_device_name = [](ibv_device*) -> const char* { return "fake0"; };
    library_.open_device = [](ibv_device*) { return &instance->context_; };
    library_.close_device = [](ibv_context*) { return 0; };
    library_.query_device = [](ibv_context*, ibv_device_attr* attr) {
      attr->max_cqe = 64;
      attr->max_qp_wr = 16;
      attr->max_srq_wr = kReceives;
      return 0;
    };
    library_.query_port = [](ibv_context*, uint8_t, ibv_port_attr* attr) {
      attr->max_msg_sz = 1 << 20;
      attr->active_mtu = IBV_MTU_1024;
      return 0;
    };
    library_.query_gid = [](ibv_context*, uint8_t, int, ibv_gid*) { return 0; };
    library_.alloc_pd = [](ibv_context*) { return &instance->pd_; };
    library_.dealloc_pd = [](ibv_pd*) { return 0; };
    library_.create_comp_channel = [](ibv_context*) { return &instance->channel_; };
    library_.destroy_comp_channel = [](ibv_comp_channel*) { return 0; };
    library_.create_cq = [](ibv_context*, int, void*, ibv_comp_channel*, int) {
      return &instance->cq_;
    };
    library_.destroy_cq = [](ibv_cq*) { return 0; };
    library_.create_srq = [](ibv_pd*, ibv_srq_init_attr*) { return &instance->srq_; };
    library_.destroy_srq = [](ibv_srq*) { return 0; };
    library_.create_qp = [](ibv_pd*, ibv_qp_init_attr*) -> ibv_qp* {
      std::lock_guard lock(instance->mutex_);
      if (instance->qp_error_ != 0) {
        errno = instance->qp_error_;
        return nullptr;
      }
      ibv_qp& qp = instance->qps_.emplace_back();
      qp.context = &instance->context_;
      qp.qp_num = static_cast<uint32_t>(instance->qps_.size());
      return &qp;
    };
    library_.reg_mr = [](ibv_pd* pd, void* address, size_t length, int access) {
      return instance->Register({.pd = pd,
                                 .length = length,
                                 .iova = reinterpret_cast<uint64_t>(address),
                                 .access = access});
    };
    library_.reg_dmabuf_mr = [](ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                int access) {
      return instance->Register(
          {.pd = pd, .offset = offset, .length = length, .iova = iova, .fd = fd, .access = access});
    };
    library_.dereg_mr = [](ibv_mr*) { return 0; };
    library_.modify_qp = [](ibv_qp*, ibv_qp_attr*, int) { return 0; };
    library_.destroy_qp = [](ibv_qp*) { return 0; };
    library_.wc_status_str = [](ibv_wc_status) -> const char* { return "on demand"; };
    context_.ops.post_send = [](ibv_qp*, ibv_send_wr*, ibv_send_wr**) { return 0; };
    context_.ops.poll_cq = [](ibv_cq*, int, ibv_wc* completions) {
      if (instance->completions_.empty()) return 0;
      completions[0] = instance->completions_.front();
      instance->completions_.pop_front();
      return 1;
    };
    context_.ops.post_srq_recv = [](ibv_srq*, ibv_recv_wr*, ibv_recv_wr**) {
      if (instance->receive_error_ == 0) ++instance->num_receives_;
      return instance->receive_error_;
    };
  }
  ~FakeVerbs() { close(channel_.fd); }
  FakeVerbs(const FakeVerbs&) = delete;

  std::unique_ptr<Transport> Make(uint32_t rank = 0, uint32_t num_qps = 1) {
    Env env;
    env.verbs_qps = num_qps;
    env.socket_ifname = "lo";
    auto rail = VerbsRail::Create(library_, {.device = "fake0"}, env);
    EXPECT_TRUE(rail.ok()) << rail.status().message();
    std::vector<std::unique_ptr<VerbsRail>> rails;
    rails.push_back(std::move(*rail));
    auto transport = MakeVerbsTransport({.rank = rank}, env, std::move(rails));
    EXPECT_TRUE(transport.ok()) << transport.status().message();
    return std::move(*transport);
  }

  // What the last region was registered with; no descriptor: -1.
  struct Registration {
    ibv_pd* pd = nullptr;
    uint64_t offset = 0;
    size_t length = 0;
    uint64_t iova = 0;
    int fd = -1;
    int access = 0;
  };
  const Registration& registered() const { return registered_; }
  // A libibverbs before 34.
  void ForgetDmabuf() { library_.reg_dmabuf_mr = nullptr; }

  // Queue pairs made so far, of all transports.
  size_t num_qps() {
    std::lock_guard lock(mutex_);
    return qps_.size();
  }
  // The answer to every later request for a queue pair.
  void AnswerQueuePairs(int error) {
    std::lock_guard lock(mutex_);
    qp_error_ = error;
  }
  int num_receives() const { return num_receives_; }
  // The answer to every later post of a receive.
  void AnswerReceives(int error) { receive_error_ = error; }
  void EndReceive(ibv_wc_status status) {
    ibv_wc completion{};
    completion.wr_id = kVerbsReceiveId;
    completion.status = status;
    completions_.push_back(completion);
    --num_receives_;
  }

 private:
  ibv_mr* Register(const Registration& registration) {
    registered_ = registration;
    return &mr_;
  }

  static inline FakeVerbs* instance = nullptr;
  VerbsLibrary library_;
  ibv_device device_{};
  ibv_device* devices_[2] = {&device_, nullptr};
  ibv_context context_{};
  ibv_pd pd_{};
  ibv_comp_channel channel_{};
  ibv_cq cq_{};
  ibv_srq srq_{};
  ibv_mr mr_{};
  Registration registered_;
  std::mutex mutex_;  // guards the next two
  std::deque<ibv_qp> qps_;
  int qp_error_ = 0;
  int num_receives_ = 0;
  int receive_error_ = 0;
  std::deque<ibv_wc> completions_;
};

}  // namespace jax_ep
