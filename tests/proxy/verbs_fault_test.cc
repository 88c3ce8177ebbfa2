// verbs over a libibverbs that fails on demand.
#include <errno.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/proxy/fake_verbs.h"

namespace jax_ep {
namespace {

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
