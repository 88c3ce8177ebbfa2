// Which NICs a rank uses, from where it and they sit. Pure logic; every rank chooses alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/base/topology.h"
#include "proxy/transport.h"

namespace jax_ep {

// Rails of one rank; what the transports' addresses have room for.
inline constexpr size_t kMaxRails = 16;

// A port of an RDMA device, or a libfabric domain.
struct Nic {
  std::string name = {};
  PciDevice pci = {};
  uint64_t mbits_per_s = 0;  // 0: not known
};

// Where the rank sits.
struct NicUser {
  std::string gpu = {};              // PCI address of its accelerator; "": a rank on CPUs
  std::vector<PciDevice> gpus = {};  // all of the host, `gpu` among them, in PCI order
  std::vector<int> numa_nodes = {};  // that its process may run on
  uint32_t local_index = 0;          // see RankPlace
  uint32_t num_local = 0;

  // `rank` stands for local_index where that is not known.
  static NicUser Read(std::string_view sysfs, uint32_t rank, const RankPlace& place);
};

// Indices into `nics` (not empty), in rail order; at least 1 and at most kMaxRails.
//
// 1. Near NICs are those of the least Distance from the anchor. The anchor is the rank's GPU; for a
//    rank on CPUs, its NUMA nodes. Of NICs equally near only the fastest count: rails get writes in
//    turn, so a slow one would slow all. NICs are in order of PCI address, then name.
// 2. Near NICs are shared by the GPUs that have the same ones; for ranks on CPUs, by all num_local
//    ranks. Sharer i (GPUs in PCI order; local_index) takes the i-th share, so equal places on
//    all hosts have the same rail, and shares do not overlap where there are NICs enough. Where
//    there are fewer NICs than sharers, each takes one, in turn.
// 3. The number of rails is the smallest share of any GPU of the host, or of any NUMA node that has
//    NICs: the same for all ranks of a host, and on all hosts that are built alike. It is 1 where
//    sysfs does not say that the NICs are near (kSystem), or num_local is not known.
std::vector<size_t> ChooseNics(const std::vector<Nic>& nics, const NicUser& user);

}  // namespace jax_ep
