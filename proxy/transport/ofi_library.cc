#include "proxy/transport/ofi_library.h"

#include <dlfcn.h>
#include <netinet/in.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "proxy/base/descriptor.h"
#include "proxy/base/log.h"
#include "proxy/transport/interfaces.h"
#include "proxy/transport/open_library.h"

namespace jax_ep {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 17);
constexpr size_t kImmediateBytes = 4;
// From here on "tcp" is what was "net" before: reliable datagrams without ofi_rxm.
constexpr uint32_t kTcpIsNetVersion = FI_VERSION(1, 18);

bool HasTcpRxmFault(const OfiLibrary& library) {
  return FI_VERSION_LT(library.version(), kTcpIsNetVersion);
}

// Best first. Providers that join only processes of one host ("shm") must be asked for by name:
// joined with another host's they show no error, they only answer "again" for ever.
// Below 1.18 tcp;ofi_rxm ends a process whose peer dies during a large write by SIGSEGV (4 of 5
// runs with rows of 32 KiB; net: 0 of 10).
std::vector<std::string> Preferred(const OfiLibrary& library) {
  std::vector<std::string> providers = {"efa", "cxi", "verbs;ofi_rxm"};
  if (HasTcpRxmFault(library)) providers.push_back("net");
  providers.push_back("tcp");
  return providers;
}

bool IsTcpRxm(const OfiLibrary& library, std::string_view provider) {
  return provider.starts_with("tcp") && (HasTcpRxmFault(library) || provider != "tcp");
}

// Providers whose endpoints have an IP address take the address of the interface to use.
bool HasIpAddresses(std::string_view provider) {
  for (const std::string_view prefix : {"tcp", "net", "sockets", "udp", "verbs"}) {
    if (provider.starts_with(prefix)) return true;
  }
  return false;
}

struct Wanted {
  std::string provider = {};
  std::string source = {};  // numeric address, or "" for any
  std::string domain = {};  // or "" for any
  bool delivery_complete = false;
  bool hmem = false;
};

bool IsUsable(const fi_info& info, const Wanted& wanted) {
  return info.domain_attr->cq_data_size >= kImmediateBytes &&
         (wanted.domain.empty() || wanted.domain == info.domain_attr->name);
}

// The best entry of each domain, in the provider's order.
std::vector<OfiInfo> Query(const OfiLibrary& library, const Wanted& wanted) {
  const OfiInfo hints(library.dupinfo(nullptr), {&library});
  if (hints == nullptr) return {};
  hints->ep_attr->type = FI_EP_RDM;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  // All that we can obey; the provider answers with those that it needs.
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (wanted.hmem) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->cq_data_size = kImmediateBytes;
  if (wanted.delivery_complete) hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  hints->fabric_attr->prov_name = strdup(wanted.provider.c_str());  // fi_freeinfo frees it
  fi_info* found = nullptr;
  const bool has_source = !wanted.source.empty();
  if (library.getinfo(kApiVersion, has_source ? wanted.source.c_str() : nullptr, nullptr,
                      has_source ? FI_SOURCE : 0, hints.get(), &found) != 0) {
    return {};
  }
  const OfiInfo all(found, {&library});
  std::vector<OfiInfo> best;
  // Where every address of a NIC is an entry, IPv4 ones are the least surprising.
  for (const bool must_be_ipv4 : {true, false}) {
    for (const fi_info* info = all.get(); info != nullptr; info = info->next) {
      const bool is_ipv4 = info->src_addr == nullptr ||
                           static_cast<const sockaddr*>(info->src_addr)->sa_family == AF_INET;
      if (must_be_ipv4 && HasIpAddresses(wanted.provider) && !is_ipv4) continue;
      // From 1.18 on both may answer to "tcp".
      if (wanted.provider == "tcp" && !HasTcpRxmFault(library) &&
          IsTcpRxm(library, info->fabric_attr->prov_name)) {
        continue;
      }
      const auto is_same = [info](const OfiInfo& other) {
        return strcmp(other->domain_attr->name, info->domain_attr->name) == 0;
      };
      if (!IsUsable(*info, wanted) || std::any_of(best.begin(), best.end(), is_same)) continue;
      best.push_back(OfiInfo(library.dupinfo(info), {&library}));
    }
  }
  return best;
}

Nic NicOf(const fi_info& info) {
  Nic nic{.name = info.domain_attr->name};
  std::string device = nic.name;
  if (info.nic != nullptr) {
    const fid_nic& of = *info.nic;
    if (of.link_attr != nullptr) nic.mbits_per_s = of.link_attr->speed / 1000000;
    if (of.device_attr != nullptr && of.device_attr->name != nullptr) device = of.device_attr->name;
    if (of.bus_attr != nullptr && of.bus_attr->bus_type == FI_BUS_PCI) {
      const fi_pci_attr& pci = of.bus_attr->attr.pci;
      char address[sizeof("0000:00:00.0")];
      snprintf(address, sizeof(address), "%04x:%02x:%02x.%x", unsigned{pci.domain_id},
               unsigned{pci.bus_id}, unsigned{pci.device_id}, pci.function_id & 7u);
      nic.pci = ReadPciDevice(kSysfs, address);
    }
  }
  if (nic.pci.address.empty()) nic.pci = ReadRdmaDevice(kSysfs, device);
  return nic;
}

std::vector<OfiInfo> QueryNics(const OfiLibrary& library, const Wanted& wanted, uint32_t rank,
                               const RankPlace& place) {
  std::vector<OfiInfo> all = Query(library, wanted);
  if (all.empty()) return {};
  std::vector<Nic> nics;
  for (const OfiInfo& info : all) nics.push_back(NicOf(*info));
  std::vector<OfiInfo> rails;
  for (const size_t index : ChooseNics(nics, NicUser::Read(kSysfs, rank, place))) {
    rails.push_back(std::move(all[index]));
  }
  return rails;
}

std::vector<OfiInfo> QueryRails(const OfiLibrary& library, const Env& env, Wanted wanted,
                                const std::vector<Interface>& interfaces, uint32_t rank,
                                const RankPlace& place) {
  std::vector<OfiInfo> rails;
  const std::vector<std::string> domains = SplitNames(env.ofi_domain);
  // RDMA NICs are chosen by domain, or by interface where the user names one.
  const bool by_interface = domains.empty() && HasIpAddresses(wanted.provider) &&
                            (!wanted.provider.starts_with("verbs") || !env.socket_ifname.empty());
  if (domains.empty() && !by_interface) return QueryNics(library, wanted, rank, place);
  const size_t num_rails = by_interface ? interfaces.size() : domains.size();
  for (size_t rail = 0; rail < num_rails; ++rail) {
    wanted.source = by_interface ? interfaces[rail].address : "";
    wanted.domain = by_interface ? "" : domains[rail];
    std::vector<OfiInfo> found = Query(library, wanted);
    if (found.empty()) return {};
    rails.push_back(std::move(found.front()));
  }
  return rails;
}

Result<const OfiLibrary*> Open() {
  JAX_EP_RETURN_IF_ERROR(CheckDescriptors(kOpenDescriptors, "ofi"));
  void* handle = OpenLibrary("libfabric.so.1");
  if (handle == nullptr) {
    return Unavailable("libfabric is not installed (Debian: libfabric1): " +
                       std::string(dlerror()));
  }
  static OfiLibrary library;
  if (!LoadFunction(handle, "fi_getinfo", &library.getinfo) ||
      !LoadFunction(handle, "fi_freeinfo", &library.freeinfo) ||
      !LoadFunction(handle, "fi_dupinfo", &library.dupinfo) ||
      !LoadFunction(handle, "fi_fabric", &library.fabric) ||
      !LoadFunction(handle, "fi_strerror", &library.strerror) ||
      !LoadFunction(handle, "fi_version", &library.version)) {
    return Unavailable("libfabric.so.1 lacks a function: " + std::string(dlerror()));
  }
  if (FI_VERSION_LT(library.version(), kApiVersion)) {
    return Unavailable("libfabric " + std::to_string(FI_MAJOR(library.version())) + "." +
                       std::to_string(FI_MINOR(library.version())) +
                       " is too old; 1.17 or newer is needed");
  }
  return &library;
}

}  // namespace

Result<const OfiLibrary*> OfiLibrary::Get() {
  static std::mutex mutex;
  static const OfiLibrary* opened = nullptr;
  const std::lock_guard lock(mutex);
  if (opened == nullptr) {
    JAX_EP_ASSIGN_OR_RETURN(opened, Open());
  }
  return opened;
}

std::string OfiLibrary::Describe(const char* operation, long error) const {
  const int number = static_cast<int>(std::abs(error));
  return std::string(operation) + ": " + strerror(number) + " (" + std::to_string(number) + ")" +
         DescriptorAdvice(number);
}

Result<std::string> ChooseOfiRails(const OfiLibrary& library, const Env& env,
                                   const TransportOptions& options, bool delivery_complete,
                                   const std::function<Status(std::vector<OfiInfo> rails)>& open) {
  JAX_EP_ASSIGN_OR_RETURN(const std::vector<Interface> interfaces,
                          ChooseInterfaces(env.socket_ifname));
  Wanted wanted{.delivery_complete = delivery_complete, .hmem = options.serves_device};
  std::vector<std::string> candidates = Preferred(library);
  if (!env.ofi_provider.empty()) candidates = {env.ofi_provider};
  std::string tried;
  std::string left_out;
  const auto query = [&](bool hmem) {
    Wanted asked = wanted;
    asked.hmem = hmem;
    return QueryRails(library, env, asked, interfaces, options.rank, options.place);
  };
  const auto leave_out = [&](const std::string& reason) {
    left_out += (left_out.empty() ? "" : "; ") + reason;
    tried += " (" + reason + ")";
  };
  for (const std::string& provider : candidates) {
    wanted.provider = provider;
    std::vector<OfiInfo> rails = query(wanted.hmem);
    tried += (tried.empty() ? "" : ", ") + provider;
    if (rails.empty()) {
      if (wanted.hmem && !query(/*hmem=*/false).empty()) {
        leave_out(provider + " registers no memory of a GPU");
      }
      continue;
    }
    const Status opened = open(std::move(rails));
    if (opened.ok()) {
      if (IsTcpRxm(library, provider) && HasTcpRxmFault(library)) {
        LogWarning(
            "ofi: libfabric below 1.18 can crash over tcp;ofi_rxm when a peer dies; prefer "
            "JAX_EP_OFI_PROVIDER=net, or a newer libfabric");
      }
      return left_out;
    }
    leave_out(opened.message());
  }
  std::string on;
  if (!env.ofi_domain.empty()) on = " on JAX_EP_OFI_DOMAIN=" + env.ofi_domain;
  if (!env.socket_ifname.empty()) on += " on JAX_EP_SOCKET_IFNAME=" + env.socket_ifname;
  return Unavailable("libfabric has no provider" + on + " with reliable datagrams, RMA" +
                     (wanted.hmem ? ", a GPU's memory (FI_HMEM)" : "") +
                     " and 4 bytes of remote CQ data; tried: " + tried);
}

}  // namespace jax_ep
