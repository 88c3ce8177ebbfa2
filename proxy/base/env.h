// Every environment variable that the C++ code reads, in one struct. docs/tuning.md repeats it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "proxy/base/log.h"
#include "proxy/base/status.h"

namespace jax_ep {

struct Env {
  // JAX_EP_LOG: error | warning | info | debug.
  LogLevel log_level = LogLevel::kWarning;
  // JAX_EP_WINDOW_MESSAGES: 1..4096. Messages of one flow that may await their acknowledgement.
  uint32_t window_messages = 256;
  // JAX_EP_WINDOW_BYTES: >= 16, suffix K, M or G allowed. The same in bytes; a single larger
  // message still goes when nothing else of its flow is under way. 0 (unset): by transport.
  uint64_t window_bytes = 0;
  // JAX_EP_RING_SLOTS: power of two, 16..1048576. Commands that fit into one rank's ring.
  uint32_t ring_slots = 4096;
  // JAX_EP_PROXY_THREADS: 1..8. Proxies of one GPU rank, each with a ring of its own; nodes are
  // dealt to them.
  uint32_t proxy_threads = 1;
  // JAX_EP_INBOX_SLOTS: power of two, 16..1048576. Arrivals that a loopback or shm endpoint holds
  // before its senders have to retry.
  uint32_t inbox_slots = 8192;
  // JAX_EP_CALLER_PROGRESS: 0: only the proxy thread moves messages. 1: threads that wait for
  // another node help it where its network does not wake it cheaply (proxy/base/proxy_port.h).
  uint32_t caller_progress = 1;
  // JAX_EP_FAULTY: spec of the faulty transport (proxy/transport/faulty.h); empty: none. Tests
  // only.
  std::string faulty_spec;
  // JAX_EP_TRACE: beginning of the path of this process's trace (proxy/base/trace.h); empty: none.
  std::string trace;
  // JAX_EP_TEST_STALL: "CHANNEL:RANK:SECONDS", where that rank stands once (xla_ffi/report.h).
  // Tests only.
  std::string stall_spec;

  // JAX_EP_SOCKET_IFNAME: interfaces "eth0" or "eth0,eth1" that network transports use and listen
  // on; several are rails. Empty: the first that is up and has an address, loopback last.
  std::string socket_ifname;
  // JAX_EP_OFI_PROVIDER: libfabric's name of a provider, e.g. "tcp" or "efa"; empty: the best one.
  std::string ofi_provider;
  // JAX_EP_OFI_DOMAIN: libfabric's names of the domains (NICs) to use, e.g. "rdmap0s31,rdmap1s31";
  // several are rails. Empty: by provider, interface and where the NICs are.
  std::string ofi_domain;
  // JAX_EP_VERBS_DEVICE: RDMA devices "mlx5_0" or "mlx5_0:1,mlx5_1:1" (port after the colon);
  // several are rails. Empty: active ones, by where they are (proxy/transport/choose_nics.h).
  std::string verbs_device;
  // JAX_EP_VERBS_GID_INDEX: index into the port's table; -1 (unset): the RoCE v2 entry with an IPv4
  // address, else the first.
  int32_t verbs_gid_index = -1;
  // JAX_EP_VERBS_SL: 0..15 service level; JAX_EP_VERBS_TC: 0..255 traffic class.
  uint32_t verbs_sl = 0;
  uint32_t verbs_tc = 0;
  // JAX_EP_VERBS_MTU: 256, 512, 1024, 2048 or 4096; 0 (unset): the port's active one.
  uint32_t verbs_mtu = 0;
  // JAX_EP_VERBS_TIMEOUT: 1..22; a packet is repeated 8 times, each after 4.096 us << this: about 9
  // s.
  uint32_t verbs_timeout = 18;
  // JAX_EP_VERBS_QPS: 1..16 queue pairs per peer and rail.
  uint32_t verbs_qps = 1;

  using Lookup = std::function<const char*(const char* name)>;

  // Reads and validates all of them. An empty value counts as unset.
  // \error kInvalidArgument  names the variable, its value and what is allowed
  static Result<Env> Read();
  static Result<Env> Read(const Lookup& lookup);  // for tests
};

}  // namespace jax_ep
