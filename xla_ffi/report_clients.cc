#include "xla_ffi/report_clients.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace jax_ep {
namespace {

// How long one may take to ask. Who asks for pages has shut its side down, and is answered at once.
constexpr std::chrono::milliseconds kRequestTime{200};

// How long it may take to read: as long as `python -m jax_ep report` waits.
constexpr std::chrono::seconds kAnswerTime{2};

// What the peer has sent, or "" if it has not.
std::string_view Read(int peer, std::span<char> buffer) {
  const ssize_t length = recv(peer, buffer.data(), buffer.size(), MSG_DONTWAIT);
  return {buffer.data(), static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

}  // namespace

bool ReportClients::is_full() const {
  return std::all_of(clients_.begin(), clients_.end(),
                     [](const Client& client) { return client.peer.fd() >= 0; });
}

void ReportClients::Add(Descriptor peer) {
  for (Client& client : clients_) {
    if (client.peer.fd() >= 0) continue;
    client.peer = std::move(peer);
    client.until = Deadline::After(kRequestTime);
    return;
  }
}

int ReportClients::Watch(std::span<pollfd, kMost> events) const {
  std::chrono::nanoseconds next = std::chrono::nanoseconds::max();
  for (size_t i = 0; i < kMost; ++i) {
    const Client& client = clients_[i];
    const short event = client.has_asked ? POLLOUT : POLLIN;
    events[i] = {.fd = client.peer.fd(), .events = event, .revents = 0};  // poll ignores -1
    if (client.peer.fd() >= 0) next = std::min(next, client.until.remaining());
  }
  if (next == std::chrono::nanoseconds::max()) return -1;
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(next).count());
}

void ReportClients::Serve(std::span<const pollfd, kMost> events, const Answer& answer) {
  for (size_t i = 0; i < kMost; ++i) {
    Client& client = clients_[i];
    if (client.peer.fd() < 0) continue;
    bool is_done = true;
    try {
      is_done = IsDone(client, events[i].revents != 0, answer);
    } catch (...) {  // no memory: it gets none
    }
    if (!is_done) continue;
    shutdown(client.peer.fd(), SHUT_RDWR);  // a child forked meanwhile has a copy, and keeps it
    client = Client();
  }
}

bool ReportClients::IsDone(Client& client, bool is_ready, const Answer& answer) {
  if (!is_ready && !client.until.expired()) return false;
  if (!client.has_asked) {
    std::array<char, 256> buffer;
    client.answer = answer(Read(client.peer.fd(), buffer));
    client.has_asked = true;
    client.until = Deadline::After(kAnswerTime);
  }
  while (client.num_sent < client.answer.size()) {
    const std::string_view left = std::string_view(client.answer).substr(client.num_sent);
    const ssize_t sent =
        send(client.peer.fd(), left.data(), left.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno != EAGAIN || client.until.expired();
    client.num_sent += static_cast<size_t>(sent);
  }
  return true;
}

}  // namespace jax_ep
