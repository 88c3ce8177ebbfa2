// libfabric as this process finds it: the library, opened at run time, and the provider and domains
// ("rails") that the environment and the hardware choose.
#pragma once

#include <rdma/fabric.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proxy/base/env.h"
#include "proxy/base/status.h"
#include "proxy/transport/choose_nics.h"

namespace jax_ep {

// The exported functions; everything else of libfabric is called through its objects.
struct OfiLibrary {
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
  decltype(&::fi_version) version = nullptr;

  // Opens it once per process, for good; a call after a failure tries again.
  // \error kUnavailable  not installed, or too old; or no descriptors are left
  static Result<const OfiLibrary*> Get();

  // "fi_x: Resource temporarily unavailable (11)"; `error` may have either sign.
  std::string Describe(const char* operation, long error) const;
};

struct OfiInfoDeleter {
  const OfiLibrary* library;
  void operator()(fi_info* info) const { library->freeinfo(info); }
};
using OfiInfo = std::unique_ptr<fi_info, OfiInfoDeleter>;

// Finds the rails of one provider after the other, the best first (or only the one that the
// environment names), until `open` can open them. Rails are the domains or interfaces that the
// environment names, else one interface for providers on IP, and for the others the domains that
// ChooseNics gives this rank. They register a GPU's memory where the options say that they will be
// asked to. Returns which better providers were there but did not do, and why; "" for none.
// `delivery_complete`: completions must mean that the bytes are at the target.
// \error kUnavailable  none opens; says what each answered
Result<std::string> ChooseOfiRails(const OfiLibrary& library, const Env& env,
                                   const TransportOptions& options, bool delivery_complete,
                                   const std::function<Status(std::vector<OfiInfo> rails)>& open);

}  // namespace jax_ep
