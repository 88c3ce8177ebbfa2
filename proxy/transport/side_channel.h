// SideChannel: one question and one answer over TCP, for transports that must agree on something
// with a peer while connecting (verbs: queue pairs). Every connection must present the token that
// the listener made and that only members of the group can read in the bootstrap's store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "proxy/base/deadline.h"
#include "proxy/base/status.h"

namespace jax_ep {

inline constexpr size_t kSideTokenBytes = 32;
inline constexpr uint64_t kMaxSideMessageBytes = 64 << 10;

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

 private:
  SideListener() = default;
  void Run();
  void Serve(int connection);

  std::string address_;
  std::string token_;
  uint16_t port_ = 0;
  int listener_ = -1;
  int stop_fd_ = -1;
  Handler handler_;
  std::thread thread_;
};

// Asks the listener that made `blob`.
// \error kInvalidArgument   not a blob of a SideListener, or the peer refused (with its words)
// \error kUnavailable       nobody answers there
// \error kDeadlineExceeded
Result<std::string> AskPeer(std::string_view blob, std::string_view question, Deadline deadline);

}  // namespace jax_ep
