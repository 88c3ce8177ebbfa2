// Where the devices of this host sit, as sysfs tells it, and how far they are from each other.
// Reading only; `sysfs` is "/sys", or a made-up tree in tests. What sysfs does not tell is not an
// error: the fields stay empty, and distances become the farthest.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jax_ep {

inline constexpr std::string_view kSysfs = "/sys";

struct PciDevice {
  std::string address = {};            // "0000:4f:00.0"; "" if it is none (soft-RoCE)
  std::vector<std::string> path = {};  // host bridge ("pci0000:00"), bridges, the device itself
  int numa_node = -1;                  // -1: the machine does not say
};

// Nearest first. In brackets: the word of `nvidia-smi topo`.
enum class Distance : uint8_t {
  kSwitch,      // below one PCIe switch, or one root port (PIX)
  kSwitches,    // below one root port, with several switches between (PXB)
  kHostBridge,  // below one host bridge, through the CPU (PHB)
  kNumaNode,    // of one NUMA node (NODE)
  kSystem,      // of different NUMA nodes, or not known (SYS)
};

Distance DistanceOf(const PciDevice& a, const PciDevice& b);

// `address` in any spelling of the vendors' tools: "0000:4f:00.0", "00000000:4F:00.0".
PciDevice ReadPciDevice(std::string_view sysfs, std::string_view address);

// What the RDMA device `name` (of /sys/class/infiniband) is a function of.
PciDevice ReadRdmaDevice(std::string_view sysfs, const std::string& name);

// GPUs of NVIDIA and AMD, in PCI order.
std::vector<PciDevice> ListGpus(std::string_view sysfs);

// CPUs that this thread may run on, ascending.
std::vector<int> AllowedCpus();

// Ascending; empty where the kernel has no NUMA.
std::vector<int> NumaNodesOf(std::string_view sysfs, const std::vector<int>& cpus);

}  // namespace jax_ep
