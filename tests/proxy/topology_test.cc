// What is read from sysfs, and the distances that follow.
#include "proxy/base/topology.h"

#include <gtest/gtest.h>

#include <utility>

#include "tests/proxy/made_up_sysfs.h"

namespace jax_ep {
namespace {

using Strings = std::vector<std::string>;

TEST(Topology, a_pci_device_is_where_its_real_path_says) {
  MadeUpSysfs sysfs;
  sysfs.AddPci("pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:01.0/0000:4f:00.0", 1);
  for (const char* spelling : {"0000:4f:00.0", "00000000:4F:00.0"}) {
    const PciDevice device = ReadPciDevice(sysfs.root(), spelling);
    EXPECT_EQ(device.address, "0000:4f:00.0");
    EXPECT_EQ(device.path, (Strings{"pci0000:40", "0000:40:01.1", "0000:41:00.0", "0000:42:01.0",
                                    "0000:4f:00.0"}));
    EXPECT_EQ(device.numa_node, 1);
  }
}

TEST(Topology, what_is_not_there_is_nowhere) {
  MadeUpSysfs sysfs;
  for (const char* address : {"", "0000:4f:00.0", "../../..", "gpu0"}) {
    const PciDevice device = ReadPciDevice(sysfs.root(), address);
    EXPECT_EQ(device.address, "");
    EXPECT_TRUE(device.path.empty());
    EXPECT_EQ(device.numa_node, -1);
  }
  EXPECT_TRUE(ListGpus(sysfs.root()).empty());
  EXPECT_TRUE(ListGpus("/nonexistent").empty());
  EXPECT_TRUE(NumaNodesOf("/nonexistent", {0}).empty());
}

TEST(Topology, rdma_devices_lead_to_their_pci_device_if_they_have_one) {
  MadeUpSysfs sysfs;
  sysfs.AddRdma("mlx5_0", "pci0000:00/0000:00:01.0/0000:18:00.0", 0);
  sysfs.AddVirtualRdma("rxe0");
  EXPECT_EQ(ReadRdmaDevice(sysfs.root(), "mlx5_0").address, "0000:18:00.0");
  EXPECT_EQ(ReadRdmaDevice(sysfs.root(), "mlx5_0").numa_node, 0);
  EXPECT_EQ(ReadRdmaDevice(sysfs.root(), "rxe0").address, "");
  EXPECT_EQ(ReadRdmaDevice(sysfs.root(), "nosuch").address, "");
}

// A function's own function (mlx5's scalable functions) is where the function is.
TEST(Topology, a_folder_below_a_pci_device_is_that_device) {
  MadeUpSysfs sysfs;
  sysfs.AddRdma("mlx5_2", "pci0000:00/0000:00:01.0/0000:18:00.0/mlx5_core.sf.4", -1);
  EXPECT_EQ(ReadRdmaDevice(sysfs.root(), "mlx5_2").address, "0000:18:00.0");
}

TEST(Topology, gpus_are_told_from_other_devices) {
  MadeUpSysfs sysfs;
  sysfs.AddGpu("pci0000:80/0000:80:01.0/0000:90:00.0", 1);
  sysfs.AddGpu("pci0000:00/0000:00:01.0/0000:10:00.0", 0);
  sysfs.AddPci("pci0000:00/0000:00:02.0/0000:11:00.0", 0, "0x1002", "0x120000");  // MI300X
  sysfs.AddPci("pci0000:00/0000:00:01.0/0000:10:00.1", 0, "0x10de", "0x040300");  // its sound
  sysfs.AddPci("pci0000:00/0000:00:03.0/0000:12:00.0", 0, "0x1a03", "0x030000");  // the BMC's
  sysfs.AddPci("pci0000:00/0000:00:04.0/0000:13:00.0", 0, "0x10de", "0x068000");  // NVSwitch
  Strings addresses;
  for (const PciDevice& gpu : ListGpus(sysfs.root())) addresses.push_back(gpu.address);
  EXPECT_EQ(addresses, (Strings{"0000:10:00.0", "0000:11:00.0", "0000:90:00.0"}));
}

TEST(Topology, distances_are_those_of_nvidia_smi) {
  MadeUpSysfs sysfs;
  const std::string root_port = "pci0000:00/0000:00:01.0/";
  const std::string upper = root_port + "0000:01:00.0/";
  const auto at = [&sysfs](const std::string& path, int node) {
    return ReadPciDevice(sysfs.root(), sysfs.AddPci(path, node));
  };
  const PciDevice gpu = at(upper + "0000:02:00.0/0000:03:00.0", 0);
  const std::pair<PciDevice, Distance> others[] = {
      {at(upper + "0000:02:01.0/0000:04:00.0", 0), Distance::kSwitch},
      {at(upper + "0000:02:02.0/0000:05:00.0/0000:06:00.0/0000:07:00.0", 0), Distance::kSwitches},
      {at("pci0000:00/0000:00:02.0/0000:08:00.0", 0), Distance::kHostBridge},
      {at("pci0000:40/0000:40:01.0/0000:41:00.0", 0), Distance::kNumaNode},
      {at("pci0000:80/0000:80:01.0/0000:81:00.0", 1), Distance::kSystem},
      {PciDevice{}, Distance::kSystem}};
  for (const auto& [other, distance] : others) {
    EXPECT_EQ(DistanceOf(gpu, other), distance) << other.address;
    EXPECT_EQ(DistanceOf(other, gpu), distance) << other.address;
  }
  EXPECT_EQ(DistanceOf(gpu, gpu), Distance::kSwitch);
}

TEST(Topology, two_devices_without_a_numa_node_are_not_near) {
  MadeUpSysfs sysfs;
  const std::string a = sysfs.AddPci("pci0001:00/0001:00:00.0", -1);
  const std::string b = sysfs.AddPci("pci0002:00/0002:00:00.0", -1);
  EXPECT_EQ(DistanceOf(ReadPciDevice(sysfs.root(), a), ReadPciDevice(sysfs.root(), b)),
            Distance::kSystem);
  EXPECT_EQ(DistanceOf(PciDevice{}, PciDevice{}), Distance::kSystem);
}

TEST(Topology, numa_nodes_are_those_of_the_cpus) {
  MadeUpSysfs sysfs;
  sysfs.AddNumaNode(0, 0, 4);
  sysfs.AddNumaNode(1, 4, 4);
  sysfs.AddNumaNode(10, 0, 0);  // memory only
  EXPECT_EQ(NumaNodesOf(sysfs.root(), {1, 2}), (std::vector<int>{0}));
  EXPECT_EQ(NumaNodesOf(sysfs.root(), {7}), (std::vector<int>{1}));
  EXPECT_EQ(NumaNodesOf(sysfs.root(), {3, 4}), (std::vector<int>{0, 1}));
  EXPECT_TRUE(NumaNodesOf(sysfs.root(), {100}).empty());
  EXPECT_FALSE(AllowedCpus().empty());
}

}  // namespace
}  // namespace jax_ep
