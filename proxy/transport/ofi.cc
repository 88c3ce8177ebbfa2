// What the registry sees of ofi: the rails that this host gives a rank, and the transport over them
// (ofi_transport.h).
#include "proxy/transport/ofi.h"

#include <string>
#include <utility>
#include <vector>

#include "proxy/base/env.h"
#include "proxy/base/log.h"
#include "proxy/transport/ofi_library.h"
#include "proxy/transport/ofi_rail.h"
#include "proxy/transport/ofi_transport.h"

namespace jax_ep {
namespace {

struct OpenedRails {
  std::vector<std::unique_ptr<OfiRail>> rails;
  std::string description;
};

// The first provider, in order of preference, whose rails all work.
Result<OpenedRails> OpenRails(const OfiLibrary& library, const TransportOptions& options) {
  JAX_EP_ASSIGN_OR_RETURN(const Env env, Env::Read());
  // Only a wrapper that splits writes needs to know when bytes have arrived; it costs a message.
  const bool delivery_complete = options.faulty_spec.find("split") != std::string::npos;
  OpenedRails opened;
  const auto open = [&](std::vector<OfiInfo> infos) -> Status {
    opened.rails.clear();
    for (OfiInfo& info : infos) {
      JAX_EP_ASSIGN_OR_RETURN(
          std::unique_ptr<OfiRail> rail,
          OfiRail::Create(library, std::move(info), /*must_wake=*/options.bell != nullptr,
                          options.serves_device));
      opened.rails.push_back(std::move(rail));
    }
    return Status::Ok();
  };
  JAX_EP_ASSIGN_OR_RETURN(const std::string left_out,
                          ChooseOfiRails(library, env, options, delivery_complete, open));
  opened.description = "libfabric " + std::to_string(FI_MAJOR(library.version())) + "." +
                       std::to_string(FI_MINOR(library.version())) + ", provider " +
                       opened.rails.front()->info().fabric_attr->prov_name + " on";
  for (const auto& rail : opened.rails) {
    opened.description += " " + std::string(rail->info().domain_attr->name);
  }
  if (!left_out.empty()) opened.description += "; left out: " + left_out;
  return opened;
}

}  // namespace

Result<std::unique_ptr<Transport>> MakeOfiTransport(const TransportOptions& options) {
  JAX_EP_ASSIGN_OR_RETURN(const OfiLibrary* library, OfiLibrary::Get());
  JAX_EP_ASSIGN_OR_RETURN(OpenedRails opened, OpenRails(*library, options));
  if (IsLogged(LogLevel::kInfo)) {
    LogInfo(RankName(options.team, options.rank) + ": ofi: " + opened.description);
  }
  return MakeOfiTransport(*library, options, std::move(opened.rails));
}

Status ProbeOfi(std::string* description) {
  JAX_EP_ASSIGN_OR_RETURN(const OfiLibrary* library, OfiLibrary::Get());
  JAX_EP_ASSIGN_OR_RETURN(const OpenedRails opened, OpenRails(*library, TransportOptions{}));
  *description = opened.description;
  return Status::Ok();
}

}  // namespace jax_ep
