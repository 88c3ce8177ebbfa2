#include "proxy/transport/choose_nics.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <tuple>

namespace jax_ep {
namespace {

struct Nearest {
  Distance distance = Distance::kSystem;
  std::vector<size_t> nics = {};  // indices, in PCI order

  // How many each of `num_sharers` (0: not known) may have for itself; 1 where they take turns.
  size_t Share(size_t num_sharers) const {
    const bool is_near = distance < Distance::kSystem && num_sharers > 0;
    return is_near ? std::max<size_t>(nics.size() / num_sharers, 1) : 1;
  }

  std::vector<size_t> Take(size_t sharer, size_t num_sharers, size_t num_rails) const {
    const size_t stride = num_sharers == 0 ? 1 : std::max<size_t>(nics.size() / num_sharers, 1);
    std::vector<size_t> taken;
    for (size_t rail = 0; rail < num_rails; ++rail) {
      taken.push_back(nics[(sharer * stride + rail) % nics.size()]);
    }
    return taken;
  }
};

Nearest FindNearest(const std::vector<Nic>& nics,
                    const std::function<Distance(const Nic&)>& distance_of) {
  std::vector<size_t> order(nics.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&nics](size_t a, size_t b) {
    return std::tie(nics[a].pci.address, nics[a].name) <
           std::tie(nics[b].pci.address, nics[b].name);
  });
  Nearest nearest;
  uint64_t fastest = 0;
  for (const size_t nic : order) {
    const Distance distance = distance_of(nics[nic]);
    const uint64_t speed = nics[nic].mbits_per_s;
    if (distance < nearest.distance || (distance == nearest.distance && speed > fastest)) {
      nearest = {.distance = distance};
      fastest = speed;
    }
    if (distance == nearest.distance && speed == fastest) nearest.nics.push_back(nic);
  }
  return nearest;
}

Nearest NearGpu(const std::vector<Nic>& nics, const PciDevice& gpu) {
  return FindNearest(nics, [&gpu](const Nic& nic) { return DistanceOf(gpu, nic.pci); });
}

Nearest NearNodes(const std::vector<Nic>& nics, const std::vector<int>& nodes) {
  return FindNearest(nics, [&nodes](const Nic& nic) {
    const bool is_near = std::find(nodes.begin(), nodes.end(), nic.pci.numa_node) != nodes.end();
    return is_near ? Distance::kNumaNode : Distance::kSystem;
  });
}

std::vector<size_t> ChooseForGpu(const std::vector<Nic>& nics, const NicUser& user, size_t own) {
  std::vector<Nearest> places;
  for (const PciDevice& gpu : user.gpus) places.push_back(NearGpu(nics, gpu));
  const auto count_sharers = [&places](const Nearest& nearest, size_t num_gpus) {
    const auto end = places.begin() + static_cast<std::ptrdiff_t>(num_gpus);
    const auto count = std::count_if(places.begin(), end, [&nearest](const Nearest& other) {
      return other.nics == nearest.nics;
    });
    return static_cast<size_t>(count);
  };
  size_t num_rails = kMaxRails;
  for (const Nearest& place : places) {
    num_rails = std::min(num_rails, place.Share(count_sharers(place, places.size())));
  }
  const Nearest& mine = places[own];
  return mine.Take(count_sharers(mine, own), count_sharers(mine, places.size()), num_rails);
}

std::vector<size_t> ChooseForCpus(const std::vector<Nic>& nics, const NicUser& user) {
  std::set<int> nodes;
  for (const Nic& nic : nics) {
    if (nic.pci.numa_node >= 0) nodes.insert(nic.pci.numa_node);
  }
  const bool is_known = !nodes.empty() && !user.numa_nodes.empty();
  size_t num_rails = is_known ? kMaxRails : 1;
  for (const int node : nodes) {
    num_rails = std::min(num_rails, NearNodes(nics, {node}).Share(user.num_local));
  }
  return NearNodes(nics, user.numa_nodes).Take(user.local_index, user.num_local, num_rails);
}

}  // namespace

NicUser NicUser::Read(std::string_view sysfs, uint32_t rank, const RankPlace& place) {
  NicUser user{.gpus = ListGpus(sysfs),
               .numa_nodes = NumaNodesOf(sysfs, AllowedCpus()),
               .local_index = place.num_local == 0 ? rank : place.local_index,
               .num_local = place.num_local};
  const PciDevice gpu = ReadPciDevice(sysfs, place.device_pci);
  user.gpu = gpu.address;
  const auto is_before = [](const PciDevice& a, const PciDevice& b) {
    return a.address < b.address;
  };
  const auto at = std::lower_bound(user.gpus.begin(), user.gpus.end(), gpu, is_before);
  const bool is_listed = at != user.gpus.end() && at->address == gpu.address;
  if (!gpu.address.empty() && !is_listed) user.gpus.insert(at, gpu);
  return user;
}

std::vector<size_t> ChooseNics(const std::vector<Nic>& nics, const NicUser& user) {
  const auto own = std::find_if(user.gpus.begin(), user.gpus.end(),
                                [&user](const PciDevice& gpu) { return gpu.address == user.gpu; });
  if (user.gpu.empty() || own == user.gpus.end()) return ChooseForCpus(nics, user);
  return ChooseForGpu(nics, user, static_cast<size_t>(own - user.gpus.begin()));
}

}  // namespace jax_ep
