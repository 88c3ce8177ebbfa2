// Proxies over the loopback transport for the ranks of a test team.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/launch.h"
#include "proxy/base/failure.h"

namespace jax_ep::testing {

class Network {
 public:
  virtual ~Network() = default;
  // Connects all ranks of different nodes and fills ring and proxy of each.
  static std::unique_ptr<Network> Create(std::vector<Rank>& ranks, const std::string& faulty_spec,
                                         FailureLatch* failure);
};

}  // namespace jax_ep::testing
