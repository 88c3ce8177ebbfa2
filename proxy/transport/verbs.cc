// What the registry sees of verbs: the rails that this host gives a rank, and the transport over
// them (verbs_transport.h).
#include "proxy/transport/verbs.h"

#include <string>
#include <utility>
#include <vector>

#include "proxy/base/env.h"
#include "proxy/base/log.h"
#include "proxy/transport/verbs_library.h"
#include "proxy/transport/verbs_rail.h"
#include "proxy/transport/verbs_transport.h"

namespace jax_ep {
namespace {

std::string Describe(const std::vector<VerbsPort>& ports) {
  std::string text = "ibverbs on";
  for (const VerbsPort& port : ports) {
    text += " " + port.device + ":" + std::to_string(port.port) + " (GID " +
            std::to_string(port.gid_index) + ")";
  }
  return text;
}

}  // namespace

Result<std::unique_ptr<Transport>> MakeVerbsTransport(const TransportOptions& options) {
  JAX_EP_ASSIGN_OR_RETURN(const VerbsLibrary* library, VerbsLibrary::Get());
  JAX_EP_ASSIGN_OR_RETURN(const Env env, Env::Read());
  JAX_EP_ASSIGN_OR_RETURN(const std::vector<VerbsPort> ports,
                          ChooseVerbsPorts(*library, env, options.rank, options.place));
  if (IsLogged(LogLevel::kInfo)) {
    LogInfo(RankName(options.team, options.rank) + ": " + Describe(ports));
  }
  std::vector<std::unique_ptr<VerbsRail>> rails;
  for (const VerbsPort& port : ports) {
    JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<VerbsRail> rail,
                            VerbsRail::Create(*library, port, env));
    rails.push_back(std::move(rail));
  }
  return MakeVerbsTransport(options, env, std::move(rails));
}

Status ProbeVerbs(std::string* description) {
  JAX_EP_ASSIGN_OR_RETURN(const VerbsLibrary* library, VerbsLibrary::Get());
  JAX_EP_ASSIGN_OR_RETURN(const Env env, Env::Read());
  JAX_EP_ASSIGN_OR_RETURN(const std::vector<VerbsPort> ports,
                          ChooseVerbsPorts(*library, env, /*rank=*/0, RankPlace{}));
  *description = Describe(ports);
  return Status::Ok();
}

}  // namespace jax_ep
