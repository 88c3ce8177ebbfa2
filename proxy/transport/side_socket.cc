#include "proxy/transport/side_socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>

#include "proxy/transport/side_channel.h"

namespace jax_ep {

std::string Errno(const char* operation) {
  return std::string(operation) + ": " + strerror(errno) + " (" + std::to_string(errno) + ")";
}

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

Status BadLength(uint64_t num_bytes) {
  return InvalidArgument("a message of " + std::to_string(num_bytes) +
                         " bytes; at least 1 and at " + "most " +
                         std::to_string(kMaxSideMessageBytes) + " are allowed");
}

}  // namespace jax_ep
