// SessionTable: who is found under an id, and what is said of the others.
#include "xla_ffi/session_table.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace jax_ep {
namespace {

struct FakeSession {
  struct Options {
    int64_t session_id;
    std::string name;
  };
  Options made_with;
  int64_t run = kNoRun;
  const Options& options() const { return made_with; }
  int64_t newest_run() const { return run; }
};

using Table = SessionTable<FakeSession>;

std::shared_ptr<FakeSession> Make(int64_t id, const std::string& name) {
  return std::make_shared<FakeSession>(FakeSession{{.session_id = id, .name = name}});
}

TEST(SessionTable, finds_what_is_open_and_names_what_was_closed) {
  Table table;
  const auto session = Make(1, "ep[2]#1");
  ASSERT_TRUE(table.Add(session).ok());
  EXPECT_EQ(*table.Find(1), session);
  EXPECT_NE(table.Find(2).status().message().find("expected one of those that this process has: "
                                                  "ep[2]#1;"),
            std::string::npos);
  table.Remove(*session, FailedPrecondition("agrees"), Status::Ok());
  EXPECT_EQ(table.Find(1).status().message(), "agrees");
  table.Remove(*session, FailedPrecondition("is closed"),
               Status::Ok());  // the newest is what is said
  EXPECT_EQ(table.Find(1).status().message(), "is closed");
  table.Remove(*Make(2, "ep[2]#2"), FailedPrecondition("is closed"),
               Status::Ok());  // was never there
  EXPECT_EQ(table.Find(2).status().message().find("is closed"), std::string::npos);
}

// A step with a long computation between its calls was told to create a new group.
TEST(SessionTable, an_execution_that_a_close_has_cut_is_told_so) {
  Table table;
  const auto session = Make(1, "ep[2]#1");
  ASSERT_TRUE(table.Add(session).ok());
  session->run = 7;
  table.Remove(*session, FailedPrecondition("is closed"), FailedPrecondition("was closed"));
  EXPECT_EQ(table.Find(1, /*run_id=*/7).status().message(), "was closed");
  EXPECT_EQ(table.Find(1, /*run_id=*/8).status().message(), "is closed");
  EXPECT_EQ(table.Find(1).status().message(), "is closed");
}

TEST(SessionTable, a_session_that_was_refused_does_not_take_the_open_one_with_it) {
  Table table;
  const auto open = Make(1, "ep[2]#1");
  const auto refused = Make(1, "ep[2]#2");
  ASSERT_TRUE(table.Add(open).ok());
  const Status status = table.Add(refused);
  ASSERT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("ep[2]#1"), std::string::npos) << status.message();
  table.Remove(*refused, FailedPrecondition("is closed"), Status::Ok());  // as its close does
  ASSERT_TRUE(table.Find(1).ok()) << table.Find(1).status().message();
  EXPECT_EQ(*table.Find(1), open);
}

}  // namespace
}  // namespace jax_ep
