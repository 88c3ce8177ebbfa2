// Random bytes that nobody can guess, from the kernel.
#pragma once

#include <sys/random.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "proxy/base/status.h"

namespace jax_ep {

// Fills `bytes`, at most 256: so many come whole or not at all (getrandom(2)). `who` begins the
// error's message.
// \error kInternal  the kernel gives none, as in a sandbox that does not allow the call
inline Status DrawRandom(const std::string& who, std::span<std::byte> bytes) {
  if (getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size())) {
    return Status::Ok();
  }
  return Internal(who + ": getrandom: " + strerror(errno));
}
template <typename T>
  requires std::is_trivially_copyable_v<T>
Status DrawRandom(const std::string& who, T* value) {
  return DrawRandom(who, std::as_writable_bytes(std::span(value, 1)));
}

}  // namespace jax_ep
