// The one socket that we open ourselves: only on the interface asked for, only for those with the
// token, whatever they send.
#include "proxy/transport/side_channel.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>
#include <vector>

#include "proxy/base/blob.h"
#include "proxy/transport/interfaces.h"
#include "proxy/transport/waker.h"
#include "tests/proxy/no_threads.h"

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kTimeout{10};

Deadline Soon() { return Deadline::After(kTimeout); }

// What the other end does with bytes of ours: all that it sends until it closes.
std::string Send(uint16_t port, const std::string& bytes) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(port);
  inet_pton(AF_INET, "127.0.0.1", &name.sin_addr);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  shutdown(fd, SHUT_WR);
  std::string answer;
  char buffer[256];
  for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return answer;
}

class SideChannel : public testing::Test {
 protected:
  void SetUp() override {
    auto made = SideListener::Create("127.0.0.1", [this](std::string_view question) {
      ++num_asked;
      return question == "refuse" ? Result<std::string>(InvalidArgument("refused"))
                                  : Result<std::string>("echo " + std::string(question));
    });
    ASSERT_TRUE(made.ok()) << made.status().message();
    listener = std::move(*made);
  }

  std::string Token() const {
    BlobReader reader(blob());
    reader.U64();
    reader.Text();
    reader.U64();
    return std::string(reader.Text());
  }
  const std::string& blob() const {
    static thread_local std::string text;
    text = listener->Blob();
    return text;
  }

  std::atomic<int> num_asked{0};
  std::unique_ptr<SideListener> listener;
};

TEST_F(SideChannel, answers_questions_and_passes_refusals_on) {
  const Result<std::string> answer = AskPeer(listener->Blob(), "hello", Soon());
  ASSERT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_EQ(*answer, "echo hello");
  const Result<std::string> refused = AskPeer(listener->Blob(), "refuse", Soon());
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("refused"), std::string::npos);
}

TEST_F(SideChannel, who_lacks_the_token_gets_no_word) {
  const std::string message = BlobWriter().U64(5).Take() + "hello";
  std::string token = Token();
  EXPECT_FALSE(Send(listener->port(), token + message).empty());
  for (char& byte : token) byte = static_cast<char>(byte ^ 1);
  EXPECT_EQ(Send(listener->port(), token + message), "");
  EXPECT_EQ(Send(listener->port(), ""), "");
  EXPECT_EQ(Send(listener->port(), std::string(kSideTokenBytes, '\0') + message), "");
  EXPECT_EQ(num_asked, 1);
}

// Strangers' connections, closed at the end.
class Strangers {
 public:
  explicit Strangers(uint16_t port) : port_(port) {}
  ~Strangers() {
    for (const int fd : fds_) close(fd);
  }
  void Connect(const std::string& bytes) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(port_);
    inet_pton(AF_INET, "127.0.0.1", &name.sin_addr);
    ASSERT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
    ASSERT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    fds_.push_back(fd);
  }

 private:
  uint16_t port_;
  std::vector<int> fds_;
};

// Once each of them held up all others for five seconds.
TEST_F(SideChannel, silent_connections_hold_up_nobody) {
  Strangers strangers(listener->port());
  for (int i = 0; i < 4; ++i) strangers.Connect("");
  strangers.Connect("half a token");
  strangers.Connect(Token());  // a member that stops after the token
  const Result<std::string> answer =
      AskPeer(listener->Blob(), "hello", Deadline::After(kSideServeTime / 2));
  ASSERT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_EQ(*answer, "echo hello");
}

TEST_F(SideChannel, of_too_many_without_the_token_the_oldest_are_closed) {
  Strangers strangers(listener->port());
  for (size_t i = 0; i < 2 * kMaxSideStrangers; ++i) {
    strangers.Connect("?");
    if (i % 16 == 0) {  // the listener keeps up
      ASSERT_TRUE(AskPeer(listener->Blob(), "hello", Soon()).ok());
    }
  }
  ASSERT_TRUE(AskPeer(listener->Blob(), "hello", Soon()).ok());
  EXPECT_LE(listener->num_open(), kMaxSideStrangers + 1);  // and the answered one, perhaps
}

// It ended the process.
TEST_F(SideChannel, a_handler_that_throws_costs_its_connection_only) {
  std::atomic<int> num_asked{0};
  auto listener = SideListener::Create("127.0.0.1", [&](std::string_view) -> Result<std::string> {
    if (num_asked.fetch_add(1) == 0) throw std::bad_alloc();
    return std::string("answer");
  });
  ASSERT_TRUE(listener.ok()) << listener.status().message();
  const std::string blob = (*listener)->Blob();
  const Result<std::string> refused = AskPeer(blob, "question", Deadline::After(kTimeout));
  EXPECT_FALSE(refused.ok());
  const Result<std::string> answer = AskPeer(blob, "question", Deadline::After(kTimeout));
  ASSERT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_EQ(*answer, "answer");
}

TEST_F(SideChannel, an_impossible_length_is_refused_before_it_is_used) {
  for (const uint64_t length : {kMaxSideMessageBytes + 1, UINT64_MAX, uint64_t{1} << 63}) {
    const std::string answer = Send(listener->port(), Token() + BlobWriter().U64(length).Take());
    EXPECT_NE(answer.find("are allowed"), std::string::npos);
  }
  EXPECT_EQ(num_asked, 0);
  EXPECT_TRUE(AskPeer(listener->Blob(), "still there", Soon()).ok());
}

TEST_F(SideChannel, listens_on_the_interface_asked_for_only) {
  // /proc/net/tcp: "sl local_address rem_address st ...", the address in hex, state 0A = listening.
  std::ifstream table("/proc/net/tcp");
  std::string line;
  char port_text[8];
  std::snprintf(port_text, sizeof(port_text), ":%04X", listener->port());
  int num_found = 0;
  while (std::getline(table, line)) {
    if (line.find(port_text) == std::string::npos || line.find(" 0A ") == std::string::npos) {
      continue;
    }
    ++num_found;
    EXPECT_NE(line.find(std::string("0100007F") + port_text), std::string::npos) << line;
  }
  EXPECT_EQ(num_found, 1);
}

TEST_F(SideChannel, garbage_blobs_and_absent_peers_are_errors) {
  EXPECT_FALSE(AskPeer("", "x", Soon()).ok());
  EXPECT_FALSE(AskPeer(listener->Blob() + "x", "x", Soon()).ok());
  const std::string old = listener->Blob();
  listener.reset();
  EXPECT_EQ(AskPeer(old, "x", Soon()).status().code(), StatusCode::kUnavailable);
}

// An exception on the way would end the process.
TEST(NetworkThreads, that_cannot_start_are_errors) {
  Doorbell bell{};
  const NoThreads none;
  const auto listener = SideListener::Create("127.0.0.1", [](std::string_view question) {
    return Result<std::string>(std::string(question));
  });
  EXPECT_EQ(listener.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(Waker::Create(&bell, {}).status().code(), StatusCode::kResourceExhausted);
}

TEST(Interfaces, loopback_comes_last_and_unknown_names_are_explained) {
  const Result<std::vector<Interface>> all = ListInterfaces();
  ASSERT_TRUE(all.ok()) << all.status().message();
  ASSERT_FALSE(all->empty());
  bool seen_loopback = false;
  for (const Interface& interface : *all) {
    EXPECT_FALSE(seen_loopback && !interface.is_loopback);
    seen_loopback |= interface.is_loopback;
  }
  EXPECT_EQ(ChooseInterfaces("lo,lo")->size(), 2u);
  const Status unknown = ChooseInterfaces("nosuch0").status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.message().find("lo"), std::string::npos);
}

}  // namespace
}  // namespace jax_ep
