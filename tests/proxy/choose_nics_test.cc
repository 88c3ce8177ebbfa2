// Which NICs the ranks of well-known kinds of hosts get, and what holds on any host.
#include "proxy/transport/choose_nics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/proxy/made_up_sysfs.h"

namespace jax_ep {
namespace {

using Names = std::vector<std::string>;

// One host: a made-up sysfs, and the NICs that a transport found on it.
class Host {
 public:
  void AddGpu(const std::string& path, int node) { gpus_.push_back(sysfs_.AddGpu(path, node)); }
  void AddNic(const std::string& name, const std::string& path, int node,
              uint64_t mbits_per_s = 400000) {
    sysfs_.AddRdma(name, path, node);
    nics_.push_back({name, ReadRdmaDevice(sysfs_.root(), name), mbits_per_s});
  }
  void AddVirtualNic(const std::string& name) {
    sysfs_.AddVirtualRdma(name);
    nics_.push_back({name, ReadRdmaDevice(sysfs_.root(), name), 10000});
  }

  Names Choose(const NicUser& user) const {
    Names names;
    for (const size_t index : ChooseNics(nics_, user)) names.push_back(nics_[index].name);
    return names;
  }
  // Of the rank on GPU `index`, in the order in which they were added.
  Names OfGpu(size_t index) const {
    return Choose(NicUser::Read(sysfs_.root(), /*rank=*/100,
                                {.local_index = static_cast<uint32_t>(index),
                                 .num_local = static_cast<uint32_t>(gpus_.size()),
                                 .device_pci = gpus_[index]}));
  }
  Names OfCpus(std::vector<int> nodes, uint32_t local_index, uint32_t num_local) const {
    return Choose({.gpus = ListGpus(sysfs_.root()),
                   .numa_nodes = std::move(nodes),
                   .local_index = local_index,
                   .num_local = num_local});
  }
  MadeUpSysfs& sysfs() { return sysfs_; }

 private:
  MadeUpSysfs sysfs_;
  Names gpus_;
  std::vector<Nic> nics_;
};

std::string Hex(size_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  return {kDigits[value / 16], kDigits[value % 16]};
}

// "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:PORT.0/0000:BUS:00.0": a device on a switch that
// has a host bridge of its own.
std::string OnSwitch(size_t bridge, size_t port, size_t bus) {
  const std::string base = Hex(bridge);
  return "pci0000:" + base + "/0000:" + base + ":01.0/0000:" + Hex(bridge + 1) +
         ":00.0/0000:" + Hex(bridge + 2) + ":" + Hex(port) + ".0/0000:" + Hex(bus) + ":00.0";
}

// Eight GPUs in two NUMA nodes; each has a switch with `nics_per_switch` NICs.
void AddSwitches(Host& host, size_t nics_per_switch) {
  for (size_t i = 0; i < 8; ++i) {
    const size_t bridge = 0x10 * (i + 1);
    const int node = i < 4 ? 0 : 1;
    host.AddGpu(OnSwitch(bridge, 0, bridge + 4), node);
    for (size_t nic = 0; nic < nics_per_switch; ++nic) {
      host.AddNic("nic" + std::to_string(i * nics_per_switch + nic),
                  OnSwitch(bridge, nic + 1, bridge + 5 + nic), node);
    }
  }
}

TEST(ChooseNics, p5_stripes_over_the_four_of_the_gpus_switch) {
  Host host;
  AddSwitches(host, 4);
  for (size_t gpu = 0; gpu < 8; ++gpu) {
    const auto name = [gpu](size_t i) { return "nic" + std::to_string(gpu * 4 + i); };
    EXPECT_EQ(host.OfGpu(gpu), (Names{name(0), name(1), name(2), name(3)}));
  }
  // Ranks on its CPUs: as many rails wherever they run, and no NIC twice.
  EXPECT_EQ(host.OfCpus({0, 1}, 1, 8), (Names{"nic4", "nic5"}));
  EXPECT_EQ(host.OfCpus({0}, 0, 2).size(), 8u);
  EXPECT_EQ(host.OfCpus({1}, 1, 2).front(), "nic24");
  EXPECT_EQ(host.OfCpus({0, 1}, 0, 1).size(), 16u);
}

TEST(ChooseNics, dgx_h100_leaves_its_storage_nics_alone) {
  Host host;
  AddSwitches(host, 1);
  host.AddNic("storage0", "pci0000:a0/0000:a0:01.0/0000:a1:00.0", 0);
  host.AddNic("storage1", "pci0000:b0/0000:b0:01.0/0000:b1:00.0", 1);
  for (size_t gpu = 0; gpu < 8; ++gpu) {
    EXPECT_EQ(host.OfGpu(gpu), Names{"nic" + std::to_string(gpu)});
  }
}

// A second NIC on the GPU's switch, but a slow one: rails in turn would wait for it.
TEST(ChooseNics, slower_nics_are_left_alone) {
  Host host;
  AddSwitches(host, 1);
  host.AddNic("slow", OnSwitch(0x10, 9, 0x1f), 0, 25000);
  EXPECT_EQ(host.OfGpu(0), Names{"nic0"});
}

// DGX A100, p4d: two GPUs per switch.
TEST(ChooseNics, gpus_of_one_switch_divide_its_nics) {
  for (const size_t nics_per_switch : {1u, 2u, 4u}) {
    Host host;
    for (size_t i = 0; i < 4; ++i) {
      const size_t bridge = 0x10 * (i + 1);
      for (size_t gpu = 0; gpu < 2; ++gpu) host.AddGpu(OnSwitch(bridge, gpu, bridge + 4 + gpu), 0);
      for (size_t nic = 0; nic < nics_per_switch; ++nic) {
        host.AddNic(std::to_string(i) + "." + std::to_string(nic),
                    OnSwitch(bridge, 4 + nic, bridge + 8 + nic), 0);
      }
    }
    EXPECT_EQ(host.OfGpu(4), nics_per_switch == 4 ? (Names{"2.0", "2.1"}) : Names{"2.0"});
    EXPECT_EQ(host.OfGpu(5), nics_per_switch == 1   ? Names{"2.0"}
                             : nics_per_switch == 2 ? Names{"2.1"}
                                                    : (Names{"2.2", "2.3"}));
  }
}

// A virtual machine that shows every device as a PCI domain of its own: only NUMA nodes are known.
TEST(ChooseNics, gpus_of_one_numa_node_divide_its_nics) {
  Host host;
  for (size_t i = 0; i < 8; ++i) {
    const std::string number = std::to_string(i);
    const int node = i < 4 ? 0 : 1;
    host.AddGpu("pci000" + number + ":00/000" + number + ":00:00.0", node);
    host.AddNic("ib" + number, "pci010" + number + ":00/010" + number + ":00:00.0", node);
  }
  for (size_t gpu = 0; gpu < 8; ++gpu)
    EXPECT_EQ(host.OfGpu(gpu), Names{"ib" + std::to_string(gpu)});
}

TEST(ChooseNics, a_single_nic_is_everybodys) {
  Host host;
  AddSwitches(host, 0);
  host.AddNic("only", "pci0000:a0/0000:a0:01.0/0000:a1:00.0", 0);
  for (size_t gpu = 0; gpu < 8; ++gpu) EXPECT_EQ(host.OfGpu(gpu), Names{"only"});
  for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(host.OfCpus({1}, rank, 3), Names{"only"});
}

// A GPU of which nothing is near has one rail, so all have.
TEST(ChooseNics, the_gpu_with_the_fewest_near_nics_sets_the_number) {
  Host host;
  AddSwitches(host, 2);
  host.AddGpu("pci0000:c0/0000:c0:01.0/0000:c1:00.0", 2);
  for (size_t gpu = 0; gpu < 9; ++gpu) EXPECT_EQ(host.OfGpu(gpu).size(), 1u);
  EXPECT_EQ(host.OfGpu(1), Names{"nic2"});
}

TEST(ChooseNics, where_sysfs_tells_nothing_ranks_take_turns_with_one_rail) {
  Host host;  // soft-RoCE in a virtual machine
  host.AddVirtualNic("rxe0");
  host.AddVirtualNic("rxe1");
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const Names turn{"rxe" + std::to_string(rank % 2)};
    EXPECT_EQ(host.OfCpus({0}, rank, 4), turn);
    EXPECT_EQ(host.OfCpus({}, rank, 4), turn);
    EXPECT_EQ(host.Choose(NicUser::Read(host.sysfs().root(), rank, RankPlace{})), turn);
  }
  EXPECT_EQ(host.OfCpus({0}, 0, 1), Names{"rxe0"});
  Host with_gpu;
  with_gpu.AddGpu("pci0000:00/0000:00:05.0", -1);
  with_gpu.AddVirtualNic("rxe0");
  with_gpu.AddVirtualNic("rxe1");
  EXPECT_EQ(with_gpu.OfGpu(0), Names{"rxe0"});
}

// Without num_local nobody knows who else wants the NICs.
TEST(ChooseNics, ranks_of_unknown_number_have_one_rail_of_their_numa_node) {
  Host host;
  AddSwitches(host, 1);
  for (uint32_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(host.OfCpus({1}, rank, 0), Names{"nic" + std::to_string(4 + rank % 4)});
  }
}

TEST(ChooseNics, ranks_bound_to_numa_nodes_divide_the_nodes_nics) {
  Host host;
  AddSwitches(host, 1);  // nic0..3 of node 0, nic4..7 of node 1
  EXPECT_EQ(host.OfCpus({0}, 0, 2), (Names{"nic0", "nic1"}));
  EXPECT_EQ(host.OfCpus({1}, 1, 2), (Names{"nic6", "nic7"}));
  EXPECT_EQ(host.OfCpus({0, 1}, 1, 2), (Names{"nic4", "nic5"}));
  for (uint32_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(host.OfCpus({rank < 4 ? 0 : 1}, rank, 8), Names{"nic" + std::to_string(rank)});
  }
  // Of another node, and of none: as many.
  EXPECT_EQ(host.OfCpus({2}, 1, 2).size(), 2u);
  EXPECT_EQ(host.OfCpus({0}, 1, 2).size(), 2u);
}

// A device that the list of GPUs does not know (another vendor's) is an anchor all the same.
TEST(ChooseNics, an_accelerator_of_another_vendor_has_a_place) {
  Host host;
  AddSwitches(host, 1);
  const std::string address = host.sysfs().AddPci(OnSwitch(0x30, 7, 0x3f), 0, "0x8086", "0x120000");
  const NicUser user =
      NicUser::Read(host.sysfs().root(), 0, {.num_local = 1, .device_pci = address});
  EXPECT_EQ(user.gpus.size(), 9u);
  EXPECT_EQ(host.Choose(user), Names{"nic2"});
}

// A host of random shape: up to 8 GPUs and 24 NICs, below up to 4 host bridges and 3 levels of
// bridges, of two speeds, some without a NUMA node.
NicUser RandomHost(std::mt19937& random, std::vector<Nic>* nics) {
  const auto below = [&random](size_t n) { return random() % n; };
  const size_t num_bridges = 1 + below(4);
  size_t bus = 0;
  const auto device = [&] {
    const std::string number = Hex(below(num_bridges));
    PciDevice made{.address = "0000:" + Hex(bus++) + ":00.0", .path = {"pci0000:" + number}};
    made.numa_node = below(4) == 0 ? -1 : number.back() % 2;
    for (size_t depth = below(4); depth > 0; --depth) {
      made.path.push_back("0000:f" + number.substr(1) + ":" + Hex(depth * 2 + below(2)) + ".0");
    }
    made.path.push_back(made.address);
    return made;
  };
  NicUser user;
  for (size_t i = 1 + below(8); i > 0; --i) user.gpus.push_back(device());
  for (size_t i = 1 + below(24); i > 0; --i) {
    nics->push_back({"nic" + std::to_string(i), device(), below(5) == 0 ? 100000u : 400000u});
  }
  return user;
}

// The nearest and of these the fastest, told the long way.
std::set<size_t> NearNics(const std::vector<Nic>& nics, const PciDevice& gpu) {
  std::set<size_t> near;
  for (size_t i = 0; i < nics.size(); ++i) {
    const auto is_better = [&](const Nic& other) {
      const Distance theirs = DistanceOf(gpu, other.pci);
      const Distance mine = DistanceOf(gpu, nics[i].pci);
      return theirs < mine || (theirs == mine && other.mbits_per_s > nics[i].mbits_per_s);
    };
    if (std::none_of(nics.begin(), nics.end(), is_better)) near.insert(i);
  }
  return near;
}

using Shares = std::vector<std::vector<size_t>>;

void ExpectDisjoint(const Shares& shares) {
  std::set<size_t> all;
  size_t count = 0;
  for (const auto& share : shares) {
    all.insert(share.begin(), share.end());
    count += share.size();
  }
  EXPECT_EQ(all.size(), count);
}

TEST(ChooseNics, gpus_of_any_host_have_equally_many_of_their_near_nics) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<Nic> nics;
    NicUser user = RandomHost(random, &nics);
    std::map<std::set<size_t>, Shares> by_near_nics;
    size_t num_rails = 0;
    for (const PciDevice& gpu : user.gpus) {
      user.gpu = gpu.address;
      const std::vector<size_t> chosen = ChooseNics(nics, user);
      if (num_rails == 0) num_rails = chosen.size();
      EXPECT_EQ(chosen.size(), num_rails);
      const std::set<size_t> near = NearNics(nics, gpu);
      for (const size_t nic : chosen) EXPECT_TRUE(near.contains(nic));
      by_near_nics[near].push_back(chosen);
    }
    EXPECT_GE(num_rails, 1u);
    EXPECT_LE(num_rails, kMaxRails);
    for (const auto& [near, shares] : by_near_nics) {
      if (near.size() >= shares.size()) ExpectDisjoint(shares);
    }
    // In whatever order a library lists them.
    std::vector<Nic> shuffled = nics;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    const std::vector<size_t> before = ChooseNics(nics, user);
    const std::vector<size_t> after = ChooseNics(shuffled, user);
    ASSERT_EQ(after.size(), before.size());
    for (size_t rail = 0; rail < before.size(); ++rail) {
      EXPECT_EQ(shuffled[after[rail]].name, nics[before[rail]].name);
    }
  }
}

TEST(ChooseNics, ranks_on_cpus_of_any_host_have_equally_many_wherever_they_are_bound) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<Nic> nics;
    NicUser user = RandomHost(random, &nics);
    user.num_local = 1 + seed % 9;
    user.numa_nodes = {0, 1};
    const size_t num_rails = ChooseNics(nics, user).size();
    EXPECT_GE(num_rails, 1u);
    EXPECT_LE(num_rails, kMaxRails);
    for (const std::vector<int>& nodes : {std::vector<int>{0, 1}, {0}, {1}, {2}}) {
      user.numa_nodes = nodes;
      Shares shares;
      for (user.local_index = 0; user.local_index < user.num_local; ++user.local_index) {
        shares.push_back(ChooseNics(nics, user));
        EXPECT_EQ(shares.back().size(), num_rails);
      }
      if (num_rails > 1) ExpectDisjoint(shares);
    }
  }
}

}  // namespace
}  // namespace jax_ep
