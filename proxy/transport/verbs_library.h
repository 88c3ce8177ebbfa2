// libibverbs as this process finds it: the library, opened at run time, and the devices ("rails")
// that the environment and the hardware choose.
#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <string>
#include <vector>

#include "proxy/base/env.h"
#include "proxy/base/status.h"
#include "proxy/transport/choose_nics.h"

namespace jax_ep {

// The exported functions; posting and polling are inline calls through the context. Some names are
// macros in the header, hence the plain types.
struct VerbsLibrary {
  ibv_device** (*get_device_list)(int*) = nullptr;
  void (*free_device_list)(ibv_device**) = nullptr;
  const char* (*get_device_name)(ibv_device*) = nullptr;
  ibv_context* (*open_device)(ibv_device*) = nullptr;
  int (*close_device)(ibv_context*) = nullptr;
  int (*query_device)(ibv_context*, ibv_device_attr*) = nullptr;
  int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*) = nullptr;
  int (*query_gid)(ibv_context*, uint8_t, int, ibv_gid*) = nullptr;
  ibv_pd* (*alloc_pd)(ibv_context*) = nullptr;
  int (*dealloc_pd)(ibv_pd*) = nullptr;
  ibv_comp_channel* (*create_comp_channel)(ibv_context*) = nullptr;
  int (*destroy_comp_channel)(ibv_comp_channel*) = nullptr;
  ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int) = nullptr;
  int (*destroy_cq)(ibv_cq*) = nullptr;
  int (*get_cq_event)(ibv_comp_channel*, ibv_cq**, void**) = nullptr;
  void (*ack_cq_events)(ibv_cq*, unsigned int) = nullptr;
  ibv_srq* (*create_srq)(ibv_pd*, ibv_srq_init_attr*) = nullptr;
  int (*destroy_srq)(ibv_srq*) = nullptr;
  ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*) = nullptr;
  int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int) = nullptr;
  int (*destroy_qp)(ibv_qp*) = nullptr;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int) = nullptr;
  // nullptr before libibverbs 34
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int) = nullptr;
  int (*dereg_mr)(ibv_mr*) = nullptr;
  const char* (*wc_status_str)(ibv_wc_status) = nullptr;

  // Opens it once per process, for good; a call after a failure tries again.
  // \error kUnavailable  not installed; or no descriptors are left
  static Result<const VerbsLibrary*> Get();
};

// A port of a device, and how it is reached.
struct VerbsPort {
  std::string device = {};
  uint8_t port = 1;
  int gid_index = 0;
};

// What the rails of a rank will use, in rail order: the ports that the environment names, else
// those active ones that ChooseNics gives it.
Result<std::vector<VerbsPort>> ChooseVerbsPorts(const VerbsLibrary& library, const Env& env,
                                                uint32_t rank, const RankPlace& place);

}  // namespace jax_ep
