// A folder that looks like /sys of some machine, for tests of what is read from there.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace jax_ep {

class MadeUpSysfs {
 public:
  MadeUpSysfs() {
    std::string name = (std::filesystem::temp_directory_path() / "sysfs.XXXXXX").string();
    root_ = mkdtemp(name.data());
    for (const char* folder : {"bus/pci/devices", "class/infiniband", "devices/system/node"}) {
      std::filesystem::create_directories(root_ / folder);
    }
  }
  ~MadeUpSysfs() { std::filesystem::remove_all(root_); }
  MadeUpSysfs(const MadeUpSysfs&) = delete;
  MadeUpSysfs& operator=(const MadeUpSysfs&) = delete;

  std::string root() const { return root_.string(); }

  // `path`: below devices/, "pci0000:00/0000:00:01.0/0000:4f:00.0"; returns the address.
  std::string AddPci(const std::string& path, int numa_node, const std::string& vendor = "0x8086",
                     const std::string& pci_class = "0x020000") {
    const std::filesystem::path folder = root_ / "devices" / path;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "numa_node") << numa_node << "\n";
    std::ofstream(folder / "vendor") << vendor << "\n";
    std::ofstream(folder / "class") << pci_class << "\n";
    const std::string address = folder.filename().string();
    std::filesystem::create_symlink(folder, root_ / "bus/pci/devices" / address);
    return address;
  }

  std::string AddGpu(const std::string& path, int numa_node) {
    return AddPci(path, numa_node, "0x10de", "0x030200");
  }

  // As ibverbs' devices look: class/infiniband/NAME leads to a folder below the PCI device.
  void AddRdma(const std::string& name, const std::string& path, int numa_node) {
    AddPci(path, numa_node);
    const std::filesystem::path folder = root_ / "devices" / path / "infiniband" / name;
    std::filesystem::create_directories(folder);
    std::filesystem::create_symlink("../..", folder / "device");
    std::filesystem::create_symlink(folder, root_ / "class/infiniband" / name);
  }

  // As soft-RoCE's devices look: no PCI device above.
  void AddVirtualRdma(const std::string& name) {
    const std::filesystem::path folder = root_ / "devices/virtual/infiniband" / name;
    std::filesystem::create_directories(folder);
    std::filesystem::create_symlink(folder, root_ / "class/infiniband" / name);
  }

  void AddNumaNode(int node, int first_cpu, int num_cpus) {
    const std::filesystem::path folder =
        root_ / "devices/system/node" / ("node" + std::to_string(node));
    for (int cpu = first_cpu; cpu < first_cpu + num_cpus; ++cpu) {
      std::filesystem::create_directories(folder / ("cpu" + std::to_string(cpu)));
    }
  }

 private:
  std::filesystem::path root_;
};

}  // namespace jax_ep
