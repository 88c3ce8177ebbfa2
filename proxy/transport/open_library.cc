#include "proxy/transport/open_library.h"

#include <signal.h>

#include <array>

namespace jax_ep {
namespace {

// By address: the handler of either kind.
bool IsSame(const struct sigaction& a, const struct sigaction& b) {
  return a.sa_handler == b.sa_handler && a.sa_flags == b.sa_flags;
}

}  // namespace

void* OpenLibrary(const char* name) {
  std::array<struct sigaction, NSIG> before{};
  std::array<bool, NSIG> is_known{};
  for (int number = 1; number < NSIG; ++number) {
    const size_t i = static_cast<size_t>(number);
    is_known[i] = sigaction(number, nullptr, &before[i]) == 0;
  }
  void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  for (int number = 1; number < NSIG; ++number) {
    const size_t i = static_cast<size_t>(number);
    struct sigaction after{};
    if (is_known[i] && sigaction(number, nullptr, &after) == 0 && !IsSame(before[i], after)) {
      sigaction(number, &before[i], nullptr);
    }
  }
  return handle;
}

}  // namespace jax_ep
