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

// How often a wait looks whether its end is closing.
constexpr std::chrono::milliseconds kSlice{50};

// How long one exchange may take.
struct Patience {
  Deadline deadline;
  const std::atomic<bool>* is_closing = nullptr;

  // Waits until `events` are possible.
  Status Await(int fd, short events) const {
    pollfd waited{.fd = fd, .events = events, .revents = 0};
    while (true) {
      if (is_closing != nullptr && is_closing->load(std::memory_order_relaxed)) {
        return Unavailable("this rank is closing");
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining());
      const int rc = poll(&waited, 1, static_cast<int>(std::min(left, kSlice).count()));
      if (rc > 0) return Status::Ok();
      if (rc < 0 && errno != EINTR) return Internal(Errno("poll"));
      if (deadline.expired()) return DeadlineExceeded("no answer in time");
    }
  }
};

struct SideAddress {
  std::string address;
  uint16_t port = 0;
  std::string token;
};

Result<SideAddress> ParseBlob(std::string_view blob) {
  BlobReader reader(blob);
  const uint64_t magic = reader.U64();
  SideAddress parsed{.address = std::string(reader.Text()), .token = {}};
  const uint64_t port = reader.U64();
  parsed.token = reader.Text();
  if (!reader.finished() || magic != kSideBlobMagic || port == 0 || port > UINT16_MAX ||
      parsed.token.size() != kSideTokenBytes) {
    return InvalidArgument("not the address of a side channel");
  }
  parsed.port = static_cast<uint16_t>(port);
  return parsed;
}

Status SendAll(int fd, std::string_view bytes, const Patience& patience) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EINTR) {
      JAX_EP_RETURN_IF_ERROR(patience.Await(fd, POLLOUT));
    } else {
      return Unavailable(Errno("send"));
    }
  }
  return Status::Ok();
}

Result<std::string> ReceiveExactly(int fd, size_t num_bytes, const Patience& patience) {
  std::string bytes(num_bytes, '\0');
  for (size_t done = 0; done < num_bytes;) {
    const ssize_t received = recv(fd, bytes.data() + done, num_bytes - done, MSG_DONTWAIT);
    if (received > 0) {
      done += static_cast<size_t>(received);
    } else if (received == 0) {
      return Unavailable("the peer closed the connection");
    } else if (errno == EAGAIN || errno == EINTR) {
      JAX_EP_RETURN_IF_ERROR(patience.Await(fd, POLLIN));
    } else {
      return Unavailable(Errno("recv"));
    }
  }
  return bytes;
}

Result<std::string> ReceiveMessage(int fd, const Patience& patience) {
  JAX_EP_ASSIGN_OR_RETURN(const std::string header, ReceiveExactly(fd, sizeof(uint64_t), patience));
  const uint64_t num_bytes = BlobReader(header).U64();
  if (num_bytes > kMaxSideMessageBytes) return BadLength(num_bytes);
  return ReceiveExactly(fd, static_cast<size_t>(num_bytes), patience);
}

}  // namespace

Status CheckSideBlob(std::string_view blob) { return ParseBlob(blob).status(); }

Result<std::string> AskPeer(std::string_view blob, std::string_view question, Deadline deadline,
                            const std::atomic<bool>* is_closing) {
  const Patience patience{.deadline = deadline, .is_closing = is_closing};
  JAX_EP_ASSIGN_OR_RETURN(const SideAddress peer, ParseBlob(blob));
  socklen_t size = 0;
  JAX_EP_ASSIGN_OR_RETURN(const sockaddr_storage name,
                          ParseAddress(peer.address, peer.port, &size));
  const std::string where = peer.address + ":" + std::to_string(peer.port) + ": ";
  const Descriptor connection(
      socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connection.fd() < 0) return Internal(Errno("socket"));
  const int on = 1;
  setsockopt(connection.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (connect(connection.fd(), reinterpret_cast<const sockaddr*>(&name), size) != 0) {
    if (errno != EINPROGRESS) return Unavailable(where + Errno("connect"));
    JAX_EP_RETURN_IF_ERROR(patience.Await(connection.fd(), POLLOUT));
    int error = 0;
    socklen_t error_size = sizeof(error);
    getsockopt(connection.fd(), SOL_SOCKET, SO_ERROR, &error, &error_size);
    if (error != 0) return Unavailable(where + "connect: " + strerror(error));
  }
  std::string message(peer.token);
  message += BlobWriter().U64(question.size()).Take();
  message += question;
  JAX_EP_RETURN_IF_ERROR(SendAll(connection.fd(), message, patience));
  const Result<std::string> reply = ReceiveMessage(connection.fd(), patience);
  if (!reply.ok()) return reply.status();
  BlobReader answer(*reply);
  const uint64_t code = answer.U64();
  const std::string text(answer.Text());
  if (!answer.finished()) return InvalidArgument(where + "a damaged answer");
  if (code != 0) return InvalidArgument(where + text);
  return text;
}

}  // namespace jax_ep
