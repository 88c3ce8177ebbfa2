// What both ends of a side channel use: sockets, addresses, and the form of a message.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "proxy/base/status.h"

namespace jax_ep {

// On the wire: token, then 8 bytes of length and a message; the answer is a length and a blob
// {status code, text or answer}.
inline constexpr uint64_t kSideBlobMagic = 0x3145444953504541;

// "connect: Connection refused (111)", of errno.
std::string Errno(const char* operation);

// A numeric address.
Result<sockaddr_storage> ParseAddress(const std::string& address, uint16_t port, socklen_t* size);

// The error of a message of that length.
Status BadLength(uint64_t num_bytes);

}  // namespace jax_ep
