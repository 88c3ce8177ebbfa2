// The end of a side channel that answers.
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "proxy/base/blob.h"
#include "proxy/base/descriptor.h"
#include "proxy/base/log.h"
#include "proxy/base/random.h"
#include "proxy/base/thread.h"
#include "proxy/transport/side_channel.h"
#include "proxy/transport/side_socket.h"

namespace jax_ep {
namespace {

constexpr int kBacklog = 128;

std::string EncodeAnswer(const Result<std::string>& answer) {
  const std::string message =
      BlobWriter()
          .U64(static_cast<uint64_t>(answer.status().code()))
          .Text(answer.ok() ? std::string_view(*answer) : answer.status().message())
          .Take();
  return BlobWriter().U64(message.size()).Take() + message;
}

// In constant time, so that its duration says nothing about the token.
bool IsEqual(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned>(static_cast<unsigned char>(a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace

Result<std::unique_ptr<SideListener>> SideListener::Create(const std::string& address,
                                                           Handler handler) {
  std::unique_ptr<SideListener> side(new SideListener());
  side->address_ = address;
  side->handler_ = std::move(handler);
  side->token_.resize(kSideTokenBytes);
  JAX_EP_RETURN_IF_ERROR(
      DrawRandom("side channel", std::as_writable_bytes(std::span(side->token_))));
  socklen_t size = 0;
  JAX_EP_ASSIGN_OR_RETURN(const sockaddr_storage name, ParseAddress(address, 0, &size));
  side->listener_ = socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (side->listener_ < 0) return Unavailable(Errno("socket"));
  if (bind(side->listener_, reinterpret_cast<const sockaddr*>(&name), size) != 0 ||
      listen(side->listener_, kBacklog) != 0) {
    return Unavailable("listening on " + address + ": " + Errno("bind"));
  }
  sockaddr_storage bound{};
  size = sizeof(bound);
  if (getsockname(side->listener_, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return Internal(Errno("getsockname"));
  }
  // The port is at the same place in both families.
  side->port_ = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  side->stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (side->stop_fd_ < 0) return Internal(Errno("eventfd"));
  JAX_EP_ASSIGN_OR_RETURN(side->thread_,
                          StartThread("jax_ep side", [listener = side.get()] { listener->Run(); }));
  return side;
}

SideListener::~SideListener() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t num_written = write(stop_fd_, &one, sizeof(one));
    thread_.join();
  }
  if (listener_ >= 0) close(listener_);
  if (stop_fd_ >= 0) close(stop_fd_);
}

std::string SideListener::Blob() const {
  return BlobWriter().U64(kSideBlobMagic).Text(address_).U64(port_).Text(token_).Take();
}

struct SideListener::Connection {
  enum class State : uint8_t { kToken, kLength, kQuestion, kAnswer };

  Descriptor socket;
  Deadline deadline = Deadline::After(kSideServeTime);
  State state = State::kToken;
  size_t num_wanted = kSideTokenBytes;
  std::string bytes = {};  // received of what the state wants; the answer in kAnswer
  size_t num_sent = 0;
};

void SideListener::Run() noexcept {
  std::vector<Connection> connections;
  bool goes_on = true;
  while (goes_on) {
    try {
      goes_on = RunOnce(&connections);
    } catch (...) {
      // No memory. Those that are connected are told by the end of their connections.
      LogError("a listener for peers met an exception (out of memory?); it drops its connections");
      connections.clear();
      pollfd stop{.fd = stop_fd_, .events = POLLIN, .revents = 0};
      goes_on = poll(&stop, 1, static_cast<int>(kAcceptNap.count())) == 0;
    }
  }
}

bool SideListener::RunOnce(std::vector<Connection>* connections) {
  std::vector<pollfd> waited{{.fd = stop_fd_, .events = POLLIN, .revents = 0},
                             {.fd = may_accept_ ? listener_ : -1, .events = POLLIN, .revents = 0}};
  auto limit = std::chrono::nanoseconds(may_accept_ ? kSideServeTime : kAcceptNap);
  for (const Connection& connection : *connections) {
    const bool sends = connection.state == Connection::State::kAnswer;
    waited.push_back({.fd = connection.socket.fd(),
                      .events = static_cast<short>(sends ? POLLOUT : POLLIN),
                      .revents = 0});
    limit = std::min(limit, connection.deadline.remaining());
  }
  const auto limit_ms = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  if (poll(waited.data(), waited.size(), static_cast<int>(limit_ms)) < 0 && errno != EINTR) {
    return false;
  }
  if ((waited[0].revents & POLLIN) != 0) return false;
  std::erase_if(*connections, [this](Connection& connection) {
    return !Advance(&connection) || connection.deadline.expired();
  });
  may_accept_ = AcceptAll(connections);
  num_open_.store(connections->size(), std::memory_order_relaxed);
  return true;
}

bool SideListener::AcceptAll(std::vector<Connection>* connections) {
  const auto is_stranger = [](const Connection& connection) {
    return connection.state == Connection::State::kToken;
  };
  // No more than can wait at once: who goes on connecting keeps this thread from nothing else.
  for (int i = 0; i < kBacklog; ++i) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && WasNobodyThere(errno)) return true;
    const auto num_strangers = std::count_if(connections->begin(), connections->end(), is_stranger);
    if (fd < 0 || num_strangers >= static_cast<ptrdiff_t>(kMaxSideStrangers)) {
      const auto oldest = std::find_if(connections->begin(), connections->end(), is_stranger);
      if (oldest == connections->end()) return false;
      connections->erase(oldest);
    }
    if (fd < 0) continue;
    connections->push_back(Connection{.socket = Descriptor(fd)});
    // Most have sent all by now.
    if (!Advance(&connections->back())) connections->pop_back();
  }
  return true;
}

bool SideListener::Advance(Connection* connection) {
  using State = Connection::State;
  const int fd = connection->socket.fd();
  std::string& bytes = connection->bytes;
  while (connection->state != State::kAnswer) {
    const size_t num_had = bytes.size();
    bytes.resize(connection->num_wanted);
    const ssize_t received = recv(fd, bytes.data() + num_had, bytes.size() - num_had, MSG_DONTWAIT);
    bytes.resize(num_had + static_cast<size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return true;
    if (received <= 0) return false;
    if (bytes.size() < connection->num_wanted) continue;
    switch (connection->state) {
      case State::kToken:
        if (!TakeToken(connection)) return false;
        break;
      case State::kLength: {
        const uint64_t num_bytes = BlobReader(bytes).U64();
        const bool is_possible = num_bytes > 0 && num_bytes <= kMaxSideMessageBytes;
        connection->state = is_possible ? State::kQuestion : State::kAnswer;
        connection->num_wanted = is_possible ? static_cast<size_t>(num_bytes) : 0;
        bytes = is_possible ? std::string() : EncodeAnswer(BadLength(num_bytes));
        break;
      }
      case State::kQuestion:
        connection->state = State::kAnswer;
        bytes = EncodeAnswer(handler_(bytes));
        break;
      case State::kAnswer:
        break;
    }
  }
  while (connection->num_sent < bytes.size()) {
    const ssize_t sent = send(fd, bytes.data() + connection->num_sent,
                              bytes.size() - connection->num_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return true;
    // If it does not get through, the peer's own deadline reports that.
    if (sent <= 0) return false;
    connection->num_sent += static_cast<size_t>(sent);
  }
  return false;
}

bool SideListener::TakeToken(Connection* connection) {
  if (!IsEqual(connection->bytes, token_)) {
    // No word to strangers, and one to the log: they may be many.
    if (!std::exchange(has_warned_, true)) {
      LogWarning("a connection without this group's token was closed");
    }
    return false;
  }
  connection->state = Connection::State::kLength;
  connection->num_wanted = sizeof(uint64_t);
  connection->bytes.clear();
  return true;
}

}  // namespace jax_ep
