#include "proxy/transport/verbs_library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <utility>

#include "proxy/base/descriptor.h"
#include "proxy/transport/interfaces.h"
#include "proxy/transport/open_library.h"

namespace jax_ep {
namespace {

constexpr const char* kSysClass = "/sys/class/infiniband/";

Result<const VerbsLibrary*> Open() {
  JAX_EP_RETURN_IF_ERROR(CheckDescriptors(kOpenDescriptors, "verbs"));
  void* handle = OpenLibrary("libibverbs.so.1");
  if (handle == nullptr) {
    return Unavailable("libibverbs is not installed (Debian: libibverbs1, ibverbs-providers): " +
                       std::string(dlerror()));
  }
  static VerbsLibrary library;
  const bool has_all =
      LoadFunction(handle, "ibv_get_device_list", &library.get_device_list) &&
      LoadFunction(handle, "ibv_free_device_list", &library.free_device_list) &&
      LoadFunction(handle, "ibv_get_device_name", &library.get_device_name) &&
      LoadFunction(handle, "ibv_open_device", &library.open_device) &&
      LoadFunction(handle, "ibv_close_device", &library.close_device) &&
      LoadFunction(handle, "ibv_query_device", &library.query_device) &&
      LoadFunction(handle, "ibv_query_port", &library.query_port) &&
      LoadFunction(handle, "ibv_query_gid", &library.query_gid) &&
      LoadFunction(handle, "ibv_alloc_pd", &library.alloc_pd) &&
      LoadFunction(handle, "ibv_dealloc_pd", &library.dealloc_pd) &&
      LoadFunction(handle, "ibv_create_comp_channel", &library.create_comp_channel) &&
      LoadFunction(handle, "ibv_destroy_comp_channel", &library.destroy_comp_channel) &&
      LoadFunction(handle, "ibv_create_cq", &library.create_cq) &&
      LoadFunction(handle, "ibv_destroy_cq", &library.destroy_cq) &&
      LoadFunction(handle, "ibv_get_cq_event", &library.get_cq_event) &&
      LoadFunction(handle, "ibv_ack_cq_events", &library.ack_cq_events) &&
      LoadFunction(handle, "ibv_create_srq", &library.create_srq) &&
      LoadFunction(handle, "ibv_destroy_srq", &library.destroy_srq) &&
      LoadFunction(handle, "ibv_create_qp", &library.create_qp) &&
      LoadFunction(handle, "ibv_modify_qp", &library.modify_qp) &&
      LoadFunction(handle, "ibv_destroy_qp", &library.destroy_qp) &&
      LoadFunction(handle, "ibv_reg_mr", &library.reg_mr) &&
      LoadFunction(handle, "ibv_dereg_mr", &library.dereg_mr) &&
      LoadFunction(handle, "ibv_wc_status_str", &library.wc_status_str);
  if (!has_all) return Unavailable("libibverbs.so.1 lacks a function: " + std::string(dlerror()));
  LoadFunction(handle, "ibv_reg_dmabuf_mr", &library.reg_dmabuf_mr);
  return &library;
}

std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "400 Gb/sec (4X NDR)"
uint64_t MbitsPerSecond(const std::string& rate) {
  return static_cast<uint64_t>(1000 * strtod(rate.c_str(), nullptr));
}

bool IsIpv4(const ibv_gid& gid) {
  constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
  return memcmp(gid.raw, kMapped, sizeof(kMapped)) == 0;
}

bool IsZero(const ibv_gid& gid) {
  return std::all_of(std::begin(gid.raw), std::end(gid.raw),
                     [](uint8_t byte) { return byte == 0; });
}

// InfiniBand: entry 0. RoCE: version 2 with an IPv4 address, else any of version 2, else any.
int ChooseGid(const VerbsLibrary& library, ibv_context* context, const std::string& device,
              uint8_t port, const ibv_port_attr& attr) {
  if (attr.link_layer != IBV_LINK_LAYER_ETHERNET) return 0;
  int best = 0;
  int best_score = -1;
  for (int index = 0; index < attr.gid_tbl_len; ++index) {
    ibv_gid gid{};
    if (library.query_gid(context, port, index, &gid) != 0 || IsZero(gid)) continue;
    const std::string type = ReadLine(kSysClass + device + "/ports/" + std::to_string(port) +
                                      "/gid_attrs/types/" + std::to_string(index));
    const int score = (type == "RoCE v2" ? 2 : 0) + (IsIpv4(gid) ? 1 : 0);
    if (score > best_score) {
      best = index;
      best_score = score;
    }
  }
  return best;
}

// Every active port, in the library's order.
Result<std::vector<VerbsPort>> ListPorts(const VerbsLibrary& library, const Env& env) {
  int num_devices = 0;
  ibv_device** const list = library.get_device_list(&num_devices);
  if (list == nullptr || num_devices == 0) {  // null: the kernel has no RDMA at all
    if (list != nullptr) library.free_device_list(list);
    return Unavailable("this host has no RDMA device");
  }
  std::vector<VerbsPort> ports;
  for (int i = 0; i < num_devices; ++i) {
    const std::string name = library.get_device_name(list[i]);
    ibv_context* const context = library.open_device(list[i]);
    if (context == nullptr) continue;
    ibv_device_attr attr{};
    if (library.query_device(context, &attr) == 0) {
      for (uint8_t port = 1; port <= attr.phys_port_cnt; ++port) {
        ibv_port_attr port_attr{};
        if (library.query_port(context, port, &port_attr) != 0 ||
            port_attr.state != IBV_PORT_ACTIVE) {
          continue;
        }
        ports.push_back({.device = name,
                         .port = port,
                         .gid_index = env.verbs_gid_index >= 0
                                          ? env.verbs_gid_index
                                          : ChooseGid(library, context, name, port, port_attr)});
      }
    }
    library.close_device(context);
  }
  library.free_device_list(list);
  if (ports.empty()) return Unavailable("no port of an RDMA device of this host is active");
  return ports;
}

Nic NicOf(const VerbsPort& port) {
  const std::string number = std::to_string(port.port);
  return {.name = port.device + ":" + number,
          .pci = ReadRdmaDevice(kSysfs, port.device),
          .mbits_per_s =
              MbitsPerSecond(ReadLine(kSysClass + port.device + "/ports/" + number + "/rate"))};
}

}  // namespace

Result<const VerbsLibrary*> VerbsLibrary::Get() {
  static std::mutex mutex;
  static const VerbsLibrary* opened = nullptr;
  const std::lock_guard lock(mutex);
  if (opened == nullptr) {
    JAX_EP_ASSIGN_OR_RETURN(opened, Open());
  }
  return opened;
}

Result<std::vector<VerbsPort>> ChooseVerbsPorts(const VerbsLibrary& library, const Env& env,
                                                uint32_t rank, const RankPlace& place) {
  JAX_EP_ASSIGN_OR_RETURN(const std::vector<VerbsPort> all, ListPorts(library, env));
  std::vector<VerbsPort> chosen;
  for (const std::string& wanted : SplitNames(env.verbs_device)) {
    const auto it = std::find_if(all.begin(), all.end(), [&wanted](const VerbsPort& port) {
      return wanted == port.device || wanted == port.device + ":" + std::to_string(port.port);
    });
    if (it == all.end()) {
      std::string known;
      for (const VerbsPort& port : all) {
        known += (known.empty() ? "" : ", ") + port.device + ":" + std::to_string(port.port);
      }
      return InvalidArgument("JAX_EP_VERBS_DEVICE: \"" + wanted +
                             "\" is no device with an active port; there are: " + known);
    }
    chosen.push_back(*it);
  }
  if (!chosen.empty()) return chosen;
  std::vector<Nic> nics;
  for (const VerbsPort& port : all) nics.push_back(NicOf(port));
  for (const size_t index : ChooseNics(nics, NicUser::Read(kSysfs, rank, place))) {
    chosen.push_back(all[index]);
  }
  return chosen;
}

}  // namespace jax_ep
