// The transport over rails that are open.
#pragma once

#include <memory>
#include <vector>

#include "proxy/base/status.h"
#include "proxy/transport.h"
#include "proxy/transport/ofi_library.h"
#include "proxy/transport/ofi_rail.h"

namespace jax_ep {

// `rails`: at least one, all of one provider. `library` outlives the transport.
// \error kResourceExhausted  no thread
Result<std::unique_ptr<Transport>> MakeOfiTransport(const OfiLibrary& library,
                                                    const TransportOptions& options,
                                                    std::vector<std::unique_ptr<OfiRail>> rails);

}  // namespace jax_ep
