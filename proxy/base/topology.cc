#include "proxy/base/topology.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace jax_ep {
namespace {

namespace fs = std::filesystem;

std::string ReadLine(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool IsHex(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char character) {
    return std::isxdigit(character) != 0;
  });
}

// "0000:4f:00.0": the folder of a device or bridge.
bool IsPciAddress(std::string_view name) {
  const size_t end_of_domain = name.find(':');
  if (end_of_domain == std::string_view::npos || name.size() != end_of_domain + 8) return false;
  const std::string_view rest = name.substr(end_of_domain + 1);
  return IsHex(name.substr(0, end_of_domain)) && IsHex(rest.substr(0, 2)) && rest[2] == ':' &&
         IsHex(rest.substr(3, 2)) && rest[5] == '.' && IsHex(rest.substr(6));
}

// "pci0000:00": the folder of a host bridge.
bool IsHostBridge(std::string_view name) {
  const size_t colon = name.find(':');
  return name.starts_with("pci") && colon != std::string_view::npos &&
         IsHex(name.substr(3, colon - 3)) && IsHex(name.substr(colon + 1));
}

std::string Normalized(std::string_view address) {
  constexpr size_t kBytes = 12;  // "0000:4f:00.0"
  std::string text(address);
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char character) {
    return static_cast<char>(std::tolower(character));
  });
  while (text.size() > kBytes && text.front() == '0') text.erase(0, 1);
  return text;
}

// `link` leads to the device's folder, or to one below it (a function's own functions).
PciDevice ReadDevice(const fs::path& link) {
  std::error_code error;
  const fs::path real = fs::canonical(link, error);
  PciDevice device;
  if (error) return device;
  fs::path folder;
  fs::path of_device;
  for (const fs::path& part : real) {
    folder /= part;
    const std::string name = part.string();
    if (IsPciAddress(name)) {
      device.address = name;
      of_device = folder;
    } else if (!IsHostBridge(name)) {
      continue;
    }
    device.path.push_back(name);
  }
  if (device.address.empty()) return PciDevice{};
  const std::string node = ReadLine(of_device / "numa_node");
  if (!node.empty()) device.numa_node = std::atoi(node.c_str());
  return device;
}

bool IsGpu(const fs::path& folder) {
  constexpr std::string_view kVendors[] = {"0x10de", "0x1002"};
  // VGA, 3D and other display controllers; AMD's compute-only GPUs are "processing accelerators".
  constexpr std::string_view kClasses[] = {"0x0300", "0x0302", "0x0380", "0x1200"};
  const std::string vendor = ReadLine(folder / "vendor");
  const std::string pci_class = ReadLine(folder / "class");
  const auto is_of = [&pci_class](std::string_view known) { return pci_class.starts_with(known); };
  return std::find(std::begin(kVendors), std::end(kVendors), vendor) != std::end(kVendors) &&
         std::any_of(std::begin(kClasses), std::end(kClasses), is_of);
}

}  // namespace

Distance DistanceOf(const PciDevice& a, const PciDevice& b) {
  const size_t length = std::min(a.path.size(), b.path.size());
  size_t num_common = 0;
  while (num_common < length && a.path[num_common] == b.path[num_common]) ++num_common;
  if (num_common > 0) {
    if (IsHostBridge(a.path[num_common - 1])) return Distance::kHostBridge;
    // Below the common bridge: at most one more (the switch's port) and the device itself.
    const size_t num_below = std::max(a.path.size(), b.path.size()) - num_common;
    return num_below <= 2 ? Distance::kSwitch : Distance::kSwitches;
  }
  return a.numa_node >= 0 && a.numa_node == b.numa_node ? Distance::kNumaNode : Distance::kSystem;
}

PciDevice ReadPciDevice(std::string_view sysfs, std::string_view address) {
  const std::string name = Normalized(address);
  return IsPciAddress(name) ? ReadDevice(fs::path(sysfs) / "bus/pci/devices" / name) : PciDevice{};
}

PciDevice ReadRdmaDevice(std::string_view sysfs, const std::string& name) {
  return ReadDevice(fs::path(sysfs) / "class/infiniband" / name / "device");
}

std::vector<PciDevice> ListGpus(std::string_view sysfs) {
  std::vector<PciDevice> gpus;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(sysfs) / "bus/pci/devices", error)) {
    if (IsGpu(entry.path())) gpus.push_back(ReadDevice(entry.path()));
  }
  std::sort(gpus.begin(), gpus.end(),
            [](const PciDevice& a, const PciDevice& b) { return a.address < b.address; });
  return gpus;
}

std::vector<int> AllowedCpus() {
  std::vector<int> cpus;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &allowed)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<int> NumaNodesOf(std::string_view sysfs, const std::vector<int>& cpus) {
  std::vector<int> nodes;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(sysfs) / "devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node")) continue;
    const auto is_here = [&entry](int cpu) {
      return fs::exists(entry.path() / ("cpu" + std::to_string(cpu)));
    };
    if (std::any_of(cpus.begin(), cpus.end(), is_here)) nodes.push_back(std::atoi(&name[4]));
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

}  // namespace jax_ep
