// The end of a side channel that asks.
#include "proxy/transport/side_channel.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>

#include <algorithm>

#include "proxy/base/blob.h"
#include "proxy/base/descriptor.h"
#include "proxy/transport/side_socket.h"

namespace jax_ep {
namespace {

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
  if (num_bytes > kMaxSideMessageBytes) return BadLength(num_bytes);
  return ReceiveExactly(fd, static_cast<size_t>(num_bytes), deadline);
}

}  // namespace

Result<std::string> AskPeer(std::string_view blob, std::string_view question, Deadline deadline) {
  BlobReader reader(blob);
  const uint64_t magic = reader.U64();
  const std::string address(reader.Text());
  const uint64_t port = reader.U64();
  const std::string_view token = reader.Text();
  if (!reader.finished() || magic != kSideBlobMagic || port == 0 || port > UINT16_MAX ||
      token.size() != kSideTokenBytes) {
    return InvalidArgument("not the address of a side channel");
  }
  socklen_t size = 0;
  JAX_EP_ASSIGN_OR_RETURN(const sockaddr_storage name,
                          ParseAddress(address, static_cast<uint16_t>(port), &size));
  const std::string where = address + ":" + std::to_string(port) + ": ";
  const Descriptor connection(
      socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
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
