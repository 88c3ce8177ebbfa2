// A file descriptor that is closed when its owner goes.
#pragma once

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "proxy/base/status.h"

namespace jax_ep {

inline constexpr const char* kMoreDescriptors =
    "raise the limit of open files (ulimit -n) or create fewer groups";

// To follow what the system says of an errno: "", or what to do where descriptors are lacking.
inline std::string DescriptorAdvice(int error) {
  return error == EMFILE ? std::string("; ") + kMoreDescriptors : "";
}

// Before the next try to accept after one that failed, unless nobody was there any more.
inline constexpr std::chrono::milliseconds kAcceptNap{50};
inline bool WasNobodyThere(int accept_error) {
  return accept_error == EAGAIN || accept_error == EINTR || accept_error == ECONNABORTED;
}

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

// For libraries that crash where there are none left: whether `count` more can be opened, by
// trying. Other threads may take them meanwhile.
// \error kUnavailable
inline Status CheckDescriptors(size_t count, const std::string& whose) {
  std::vector<Descriptor> opened;
  for (size_t i = 0; i < count; ++i) {
    opened.emplace_back(eventfd(0, EFD_CLOEXEC));
    if (opened.back().fd() < 0) {
      return Unavailable(whose + ": got " + std::to_string(i) +
                         " more file descriptors, expected at least " + std::to_string(count) +
                         "; " + kMoreDescriptors);
    }
  }
  return Status::Ok();
}

}  // namespace jax_ep
