// What the two-process benchmarks share: the second process, a pipe between both, and percentiles.
#pragma once

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace two_processes {

[[noreturn]] inline void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(2);
}

inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// After Fork both sides have one: strings and a barrier.
class Pipe {
 public:
  explicit Pipe(int fd) : fd_(fd) {}
  void Send(const std::string& text) {
    const uint64_t size = text.size();
    if (write(fd_, &size, sizeof(size)) != static_cast<ssize_t>(sizeof(size)) ||
        write(fd_, text.data(), size) != static_cast<ssize_t>(size)) {
      Die("pipe: write");
    }
  }
  std::string Receive() {
    uint64_t size = 0;
    if (recv(fd_, &size, sizeof(size), MSG_WAITALL) != static_cast<ssize_t>(sizeof(size))) {
      Die("pipe: the other process is gone");
    }
    std::string text(size, '\0');
    if (size > 0 && recv(fd_, text.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
      Die("pipe: read");
    }
    return text;
  }
  std::string Exchange(const std::string& text) {
    Send(text);
    return Receive();
  }
  // Both call it; `progress` is called until the other side is there too.
  template <typename Progress>
  void Barrier(Progress progress) {
    const char byte = 'b';
    if (write(fd_, &byte, 1) != 1) Die("pipe: write");
    char got = 0;
    while (recv(fd_, &got, 1, MSG_DONTWAIT) != 1) progress();
  }

 private:
  int fd_;
};

struct Sides {
  bool is_sender;
  Pipe pipe;
};

inline Sides Fork() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) Die("socketpair");
  const bool is_sender = fork() == 0;
  return {is_sender, Pipe(fds[is_sender ? 1 : 0])};
}

// One line that bench --wire reads: NAME size messages gigabytes_per_s p50_us.
inline void PrintBandwidth(const char* name, size_t size, long messages, double seconds) {
  std::printf("%s bandwidth %zu %ld %.4f\n", name, size, messages,
              static_cast<double>(size) * static_cast<double>(messages) / seconds / 1e9);
  std::fflush(stdout);
}
inline void PrintLatency(const char* name, size_t size, std::vector<double> round_trips) {
  std::sort(round_trips.begin(), round_trips.end());
  std::printf("%s latency %zu %zu %.3f\n", name, size, round_trips.size(),
              round_trips[round_trips.size() / 2] * 5e5);
  std::fflush(stdout);
}

}  // namespace two_processes
