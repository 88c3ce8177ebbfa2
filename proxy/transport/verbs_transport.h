// The transport over rails that are open.
#pragma once

#include <memory>
#include <vector>

#include "proxy/base/env.h"
#include "proxy/base/status.h"
#include "proxy/transport.h"
#include "proxy/transport/verbs_rail.h"

namespace jax_ep {

// `rails`: at least one.
// \error kUnavailable        the side channel has no address to listen on
// \error kResourceExhausted  no thread
Result<std::unique_ptr<Transport>> MakeVerbsTransport(
    const TransportOptions& options, const Env& env, std::vector<std::unique_ptr<VerbsRail>> rails);

}  // namespace jax_ep
