// verbs over a libibverbs that fails on demand: its functions and objects are this file's.
#include <errno.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "proxy/transport/verbs_transport.h"

namespace jax_ep {
namespace {

constexpr int kReceives = 4;

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
    library_.wc_status_str = [](ibv_wc_status) -> const char* { return "on demand"; };
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

  std::unique_ptr<Transport> Make() {
    Env env;
    env.socket_ifname = "lo";
    auto rail = VerbsRail::Create(library_, {.device = "fake0"}, env);
    EXPECT_TRUE(rail.ok()) << rail.status().message();
    std::vector<std::unique_ptr<VerbsRail>> rails;
    rails.push_back(std::move(*rail));
    auto transport = MakeVerbsTransport({}, env, std::move(rails));
    EXPECT_TRUE(transport.ok()) << transport.status().message();
    return std::move(*transport);
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
  static inline FakeVerbs* instance = nullptr;
  VerbsLibrary library_;
  ibv_device device_{};
  ibv_device* devices_[2] = {&device_, nullptr};
  ibv_context context_{};
  ibv_pd pd_{};
  ibv_comp_channel channel_{};
  ibv_cq cq_{};
  ibv_srq srq_{};
  int num_receives_ = 0;
  int receive_error_ = 0;
  std::deque<ibv_wc> completions_;
};

class VerbsFaults : public testing::Test {
 protected:
  FakeVerbs verbs;
  std::unique_ptr<Transport> transport = verbs.Make();
  TransportEvent events[4];
};

TEST_F(VerbsFaults, a_receive_that_failed_is_posted_again_and_no_arrival) {
  ASSERT_EQ(verbs.num_receives(), kReceives);
  verbs.EndReceive(IBV_WC_WR_FLUSH_ERR);
  verbs.EndReceive(IBV_WC_SUCCESS);
  size_t num_events = 0;
  for (int i = 0; i < 2; ++i) {
    const Result<size_t> count = transport->Poll(events);
    ASSERT_TRUE(count.ok()) << count.status().message();
    num_events += *count;
  }
  EXPECT_EQ(num_events, 1u);
  EXPECT_EQ(verbs.num_receives(), kReceives);
}

TEST_F(VerbsFaults, a_receive_that_finds_no_room_is_posted_later) {
  verbs.AnswerReceives(ENOMEM);
  verbs.EndReceive(IBV_WC_WR_FLUSH_ERR);
  ASSERT_TRUE(transport->Poll(events).ok());
  EXPECT_EQ(verbs.num_receives(), kReceives - 1);
  verbs.AnswerReceives(0);
  ASSERT_TRUE(transport->Poll(events).ok());
  EXPECT_EQ(verbs.num_receives(), kReceives);
}

TEST_F(VerbsFaults, a_receive_that_cannot_be_posted_is_an_error_that_names_the_device) {
  verbs.AnswerReceives(EINVAL);
  verbs.EndReceive(IBV_WC_SUCCESS);
  const Status broken = transport->Poll(events).status();
  EXPECT_EQ(broken.code(), StatusCode::kUnavailable);
  EXPECT_NE(broken.message().find("fake0:1: ibv_post_srq_recv"), std::string::npos)
      << broken.message();
}

}  // namespace
}  // namespace jax_ep
