// Those who have connected to the reporter's socket: each asks, and then reads the answer. None of
// them holds up another one, but by what it takes to make its answer.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "proxy/base/deadline.h"
#include "proxy/base/descriptor.h"

namespace jax_ep {

// Thread rule: on one thread. Allocates nothing but answers.
class ReportClients {
 public:
  // Others wait in the socket's queue, for as long as these may take.
  static constexpr size_t kMost = 32;
  using Events = std::array<pollfd, kMost>;
  // What to send to who sent `request`: "" if nothing.
  using Answer = std::function<std::string(std::string_view request)>;

  bool is_full() const;
  // Takes it in, if there is room.
  void Add(Descriptor peer);
  // What poll is to wait for, and until when (in ms; -1: for ever).
  int Watch(std::span<pollfd, kMost> events) const;
  // Goes on with each of them, after poll. Whose answer throws is left.
  void Serve(std::span<const pollfd, kMost> events, const Answer& answer);

 private:
  struct Client {
    Descriptor peer;                       // without one: nobody
    Deadline until = Deadline::After({});  // to ask; then to read all
    bool has_asked = false;
    std::string answer;
    size_t num_sent = 0;
  };

  static bool IsDone(Client& client, bool is_ready, const Answer& answer);

  std::array<Client, kMost> clients_;
};

}  // namespace jax_ep
