#include "proxy/transport/interfaces.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string.h>

#include <algorithm>
#include <memory>

#include "proxy/base/descriptor.h"

namespace jax_ep {
namespace {

// "" if it is no address that peers can use.
std::string AddressText(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET) {
    const auto* ipv4 = reinterpret_cast<const sockaddr_in*>(address);
    return inet_ntop(AF_INET, &ipv4->sin_addr, text, sizeof(text)) == nullptr ? "" : text;
  }
  if (address->sa_family == AF_INET6) {
    const auto* ipv6 = reinterpret_cast<const sockaddr_in6*>(address);
    if (IN6_IS_ADDR_LINKLOCAL(&ipv6->sin6_addr)) return "";
    return inet_ntop(AF_INET6, &ipv6->sin6_addr, text, sizeof(text)) == nullptr ? "" : text;
  }
  return "";
}

}  // namespace

Result<std::vector<Interface>> ListInterfaces() {
  std::vector<Interface> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    const int error = errno;
    return Unavailable(std::string("the network interfaces cannot be listed: ") + strerror(error) +
                       DescriptorAdvice(error));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, &freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family ||
          (entry->ifa_flags & IFF_UP) == 0) {
        continue;
      }
      const std::string address = AddressText(entry->ifa_addr);
      const auto is_same = [entry](const Interface& other) {
        return other.name == entry->ifa_name;
      };
      if (address.empty() || std::any_of(found.begin(), found.end(), is_same)) continue;
      found.push_back({.name = entry->ifa_name,
                       .address = address,
                       .is_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0});
    }
  }
  std::stable_partition(found.begin(), found.end(),
                        [](const Interface& interface) { return !interface.is_loopback; });
  return found;
}

std::vector<std::string> SplitNames(std::string_view text) {
  std::vector<std::string> names;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    if (comma > 0) names.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return names;
}

Result<std::vector<Interface>> ChooseInterfaces(std::string_view wanted) {
  JAX_EP_ASSIGN_OR_RETURN(const std::vector<Interface> all, ListInterfaces());
  std::vector<Interface> chosen;
  for (const std::string& name : SplitNames(wanted)) {
    const auto it = std::find_if(all.begin(), all.end(),
                                 [&name](const Interface& other) { return other.name == name; });
    if (it == all.end()) {
      std::string known;
      for (const Interface& interface : all) known += (known.empty() ? "" : ", ") + interface.name;
      return InvalidArgument("JAX_EP_SOCKET_IFNAME: no interface \"" + name +
                             "\" is up with an address; there are: " + known);
    }
    chosen.push_back(*it);
  }
  if (chosen.empty()) {
    if (all.empty()) return Unavailable("no network interface is up and has an address");
    chosen.push_back(all.front());
  }
  return chosen;
}

}  // namespace jax_ep
