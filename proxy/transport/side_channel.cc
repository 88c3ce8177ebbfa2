#include "proxy/transport/side_channel.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "proxy/base/blob.h"
#include "proxy/base/log.h"

namespace jax_ep {
namespace {

// On the wire: token, then 8 bytes of length and a message; the answer is a length and a blob
// {status code, text or answer}.
constexpr uint64_t kBlobMagic = 0x3145444953504541;
// A connection that does not say its question within this is closed.
constexpr std::chrono::seconds kServeTime{5};
constexpr int kBacklog = 128;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

std::string Errno(const char* operation) {
  return std::string(operation) + ": " + strerror(errno) + " (" + std::to_string(errno) + ")";
}

// Waits until `events` are possible.
Status Await(int fd, short events, const Deadline& deadline) {
  pollfd waited{.fd = fd, .events = events, .revents = 0};
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining());
    const int rc = poll(&waited, 1, static_cast<int>(std::min<int64_t>(left.count(), 1000)));
    if (rc > 0) return Status::Ok();
    if (rc < 0 && errno != EINTR) return Unavailable(Errno("poll"));
    if (deadline.expired()) return DeadlineExceeded("no answer in time");
  }
}

Status SendAll(int fd, std::string_view bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EINTR) {
      JAX_EP_RETURN_IF_ERROR(Await(fd, POLLOUT, deadline));
    } else {
      return Unavailable(Errno("send"));
    }
  }
  return Status::Ok();
}

Result<std::string> ReceiveExactly(int fd, size_t num_bytes, const Deadline& deadline) {
  std::string bytes(num_bytes, '\0');
  for (size_t done = 0; done < num_bytes;) {
    const ssize_t received = recv(fd, bytes.data() + done, num_bytes - done, MSG_DONTWAIT);
    if (received > 0) {
      done += static_cast<size_t>(received);
    } else if (received == 0) {
      return Unavailable("the peer closed the connection");
    } else if (errno == EAGAIN || errno == EINTR) {
      JAX_EP_RETURN_IF_ERROR(Await(fd, POLLIN, deadline));
    } else {
      return Unavailable(Errno("recv"));
    }
  }
  return bytes;
}

Result<std::string> ReceiveMessage(int fd, const Deadline& deadline) {
  JAX_EP_ASSIGN_OR_RETURN(const std::string header, ReceiveExactly(fd, sizeof(uint64_t), deadline));
  const uint64_t num_bytes = BlobReader(header).U64();
  if (num_bytes > kMaxSideMessageBytes) {
    return InvalidArgument("a message of " + std::to_string(num_bytes) + " bytes; at most " +
                           std::to_string(kMaxSideMessageBytes) + " are allowed");
  }
  return ReceiveExactly(fd, static_cast<size_t>(num_bytes), deadline);
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

// A numeric address.
Result<sockaddr_storage> ParseAddress(const std::string& address, uint16_t port, socklen_t* size) {
  sockaddr_storage storage{};
  auto* const ipv4 = reinterpret_cast<sockaddr_in*>(&storage);
  auto* const ipv6 = reinterpret_cast<sockaddr_in6*>(&storage);
  if (inet_pton(AF_INET, address.c_str(), &ipv4->sin_addr) == 1) {
    ipv4->sin_family = AF_INET;
    ipv4->sin_port = htons(port);
    *size = sizeof(sockaddr_in);
  } else if (inet_pton(AF_INET6, address.c_str(), &ipv6->sin6_addr) == 1) {
    ipv6->sin6_family = AF_INET6;
    ipv6->sin6_port = htons(port);
    *size = sizeof(sockaddr_in6);
  } else {
    return InvalidArgument("not a numeric address");
  }
  return storage;
}

}  // namespace

Result<std::unique_ptr<SideListener>> SideListener::Create(const std::string& address,
                                                           Handler handler) {
  std::unique_ptr<SideListener> side(new SideListener());
  side->address_ = address;
  side->handler_ = std::move(handler);
  side->token_.resize(kSideTokenBytes);
  if (getrandom(side->token_.data(), kSideTokenBytes, 0) != static_cast<ssize_t>(kSideTokenBytes)) {
    return Internal(Errno("getrandom"));
  }
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
  side->thread_ = std::thread([listener = side.get()] { listener->Run(); });
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
  return BlobWriter().U64(kBlobMagic).Text(address_).U64(port_).Text(token_).Take();
}

void SideListener::Run() {
  pollfd waited[] = {{.fd = listener_, .events = POLLIN, .revents = 0},
                     {.fd = stop_fd_, .events = POLLIN, .revents = 0}};
  while (true) {
    if (poll(waited, 2, -1) < 0 && errno != EINTR) return;
    if ((waited[1].revents & POLLIN) != 0) return;
    const Socket connection(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.fd() >= 0) Serve(connection.fd());
  }
}

void SideListener::Serve(int connection) {
  const Deadline deadline = Deadline::After(kServeTime);
  const Result<std::string> token = ReceiveExactly(connection, token_.size(), deadline);
  if (!token.ok() || !IsEqual(*token, token_)) {
    LogWarning("a connection without this group's token was closed");
    return;  // no word to strangers
  }
  const Result<std::string> question = ReceiveMessage(connection, deadline);
  Result<std::string> answer = question.ok() ? handler_(*question) : question.status();
  const std::string message =
      BlobWriter()
          .U64(static_cast<uint64_t>(answer.status().code()))
          .Text(answer.ok() ? std::string_view(*answer) : answer.status().message())
          .Take();
  // If it does not get through, the peer's own deadline reports that.
  const Status sent =
      SendAll(connection, BlobWriter().U64(message.size()).Take() + message, deadline);
  if (!sent.ok()) LogDebug("side channel: " + sent.message());
}

Result<std::string> AskPeer(std::string_view blob, std::string_view question, Deadline deadline) {
  BlobReader reader(blob);
  const uint64_t magic = reader.U64();
  const std::string address(reader.Text());
  const uint64_t port = reader.U64();
  const std::string_view token = reader.Text();
  if (!reader.finished() || magic != kBlobMagic || port == 0 || port > UINT16_MAX ||
      token.size() != kSideTokenBytes) {
    return InvalidArgument("not the address of a side channel");
  }
  socklen_t size = 0;
  JAX_EP_ASSIGN_OR_RETURN(const sockaddr_storage name,
                          ParseAddress(address, static_cast<uint16_t>(port), &size));
  const std::string where = address + ":" + std::to_string(port) + ": ";
  const Socket connection(socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connection.fd() < 0) return Unavailable(Errno("socket"));
  const int on = 1;
  setsockopt(connection.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (connect(connection.fd(), reinterpret_cast<const sockaddr*>(&name), size) != 0) {
    if (errno != EINPROGRESS) return Unavailable(where + Errno("connect"));
    JAX_EP_RETURN_IF_ERROR(Await(connection.fd(), POLLOUT, deadline));
    int error = 0;
    socklen_t error_size = sizeof(error);
    getsockopt(connection.fd(), SOL_SOCKET, SO_ERROR, &error, &error_size);
    if (error != 0) return Unavailable(where + "connect: " + strerror(error));
  }
  std::string message(token);
  message += BlobWriter().U64(question.size()).Take();
  message += question;
  JAX_EP_RETURN_IF_ERROR(SendAll(connection.fd(), message, deadline));
  JAX_EP_ASSIGN_OR_RETURN(const std::string reply, ReceiveMessage(connection.fd(), deadline));
  BlobReader answer(reply);
  const uint64_t code = answer.U64();
  const std::string text(answer.Text());
  if (!answer.finished()) return InvalidArgument(where + "a damaged answer");
  if (code != 0) return InvalidArgument(where + text);
  return text;
}

}  // namespace jax_ep
