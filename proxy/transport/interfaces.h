// The network interfaces of this host, and the choice among them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "proxy/base/status.h"

namespace jax_ep {

struct Interface {
  std::string name = {};
  std::string address =
      {};  // numeric IPv4, or IPv6 where there is no IPv4 (link-local ones excluded)
  bool is_loopback = false;
};

// Interfaces that are up and have an address, in the kernel's order, loopback last.
// \error kUnavailable  the kernel does not say, as to a process without descriptors
Result<std::vector<Interface>> ListInterfaces();

// "a,b" -> {"a", "b"}; empty parts are dropped.
std::vector<std::string> SplitNames(std::string_view text);

// Those that `wanted` (JAX_EP_SOCKET_IFNAME) names, in its order; the first of all if it is empty.
// \error kInvalidArgument  no such interface; the message lists the existing ones
Result<std::vector<Interface>> ChooseInterfaces(std::string_view wanted);

}  // namespace jax_ep
