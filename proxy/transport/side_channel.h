// SideChannel: one question and one answer over TCP, for transports that must agree on something
// with a peer while connecting (verbs: queue pairs). Every connection must present the token that
// the listener made and that only members of the group can read in the bootstrap's store.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "proxy/base/deadline.h"
#include "proxy/base/status.h"

namespace jax_ep {

inline constexpr size_t kSideTokenBytes = 32;
inline constexpr uint64_t kMaxSideMessageBytes = 64 << 10;
// A connection that has not asked and read its answer within this is closed.
inline constexpr std::chrono::seconds kSideServeTime{5};
// Open connections that have not presented the token; one more closes the oldest of them.
inline constexpr size_t kMaxSideStrangers = 128;

// One thread serves all connections at once, so a silent one holds up nobody. Nothing is allocated
// or asked of the handler for a connection before it has presented the token.
class SideListener {
 public:
  // Answers a question, or refuses it. Called on the listener's thread, one at a time.
  using Handler = std::function<Result<std::string>(std::string_view question)>;

  // Listens on `address` (numeric, of one interface) only.
  static Result<std::unique_ptr<SideListener>> Create(const std::string& address, Handler handler);
  ~SideListener();
  SideListener(const SideListener&) = delete;
  SideListener& operator=(const SideListener&) = delete;

  // For AskPeer: address, port and token.
  std::string Blob() const;
  uint16_t port() const { return port_; }
  // Connections being served. Any thread.
  size_t num_open() const { return num_open_.load(std::memory_order_relaxed); }

 private:
  struct Connection;

  SideListener() = default;
  void Run() noexcept;
  // Waits for something and handles it. False: the end.
  bool RunOnce(std::vector<Connection>* connections);
  // False: no descriptor is left for the connection that waits.
  bool AcceptAll(std::vector<Connection>* connections);
  // Goes on as far as it can without waiting. False: it is done with.
  bool Advance(Connection* connection);
  bool TakeToken(Connection* connection);

  std::string address_;
  std::string token_;
  uint16_t port_ = 0;
  int listener_ = -1;
  int stop_fd_ = -1;
  std::atomic<size_t> num_open_{0};
  bool may_accept_ = true;   // on the thread, like the next
  bool has_warned_ = false;  // of a stranger
  Handler handler_;
  std::thread thread_;
};

// Whether `blob` is one of a SideListener's.
// \error kInvalidArgument
Status CheckSideBlob(std::string_view blob);

// Asks the listener that made `blob`. Gives up soon after `is_closing`, if any, has become true.
// \error kInvalidArgument   not a blob of a SideListener, or the peer refused (with its words)
// \error kUnavailable       nobody answers there, or this end is closing
// \error kInternal          this host has no socket left
// \error kDeadlineExceeded
Result<std::string> AskPeer(std::string_view blob, std::string_view question, Deadline deadline,
                            const std::atomic<bool>* is_closing = nullptr);

}  // namespace jax_ep
