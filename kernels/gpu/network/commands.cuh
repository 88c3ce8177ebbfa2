// How kernels speak with other nodes: commands into the rings of this rank's proxies, and the
// signals that those count beside the stages.
#pragma once

#include "kernels/gpu/network/network.h"
#include "kernels/gpu/protocol/control.cuh"
#include "proxy/abi/command.h"

namespace jax_ep::gpu {

__device__ inline NetState* NetStateOf(const DeviceRank& device) {
  return OwnHeapAt<NetState>(device, device.layout.net_state);
}
// Of the sets that rounds of dispatches, and of combines, take in turn in a stage; `num_before`:
// rounds before it.
__device__ inline uint32_t RoundSet(const DeviceRank& device, uint64_t num_before) {
  return static_cast<uint32_t>(num_before % device.network->layout.num_round_sets);
}
__device__ inline uint32_t NodeOf(const DeviceRank& device) {
  return device.node_begin / device.shape.node_size;
}
__device__ inline uint32_t LocalRankOf(const DeviceRank& device) {
  return device.rank - device.node_begin;
}
__device__ inline std::byte* OwnStage(const DeviceRank& device) {
  return device.network->stages[LocalRankOf(device)];
}
// The rank of another node on this rank's rail.
__device__ inline uint32_t RailRank(const DeviceRank& device, uint32_t node) {
  return node * device.shape.node_size + LocalRankOf(device);
}

// Where `peer`, of another node, keeps what comes from this node over a rail, and from this rank.
__device__ inline uint32_t OwnNodeAt(const DeviceRank& device, uint32_t peer) {
  const GroupShape& shape = device.shape;
  return OtherNode(shape.num_nodes(), peer / shape.node_size, NodeOf(device));
}
__device__ inline uint32_t OwnIndexAt(const DeviceRank& device, uint32_t peer) {
  return RemoteIndex(device.shape, peer / device.shape.node_size, device.rank);
}

// The ring of the proxy that speaks with a node.
struct Ring {
  uint64_t* slots;
  const uint64_t* tail;    // written by the proxy
  RingCounters* counters;  // of all producers
  uint32_t num_slots, num_slots_log2;

  __device__ Ring(const DeviceRank& device, uint32_t node) {
    const DeviceNetwork& net = *device.network;
    const uint32_t number = RingOfNode(net.num_rings, node);
    slots = net.slots[number];
    tail = net.tails[number];
    counters = &NetStateOf(device)->rings[number];
    num_slots = net.ring_slots;
    num_slots_log2 = net.ring_slots_log2;
  }
};

// One thread waits until the ring has room for the commands before `end`. An acquire: what the
// caller stores into those slots comes after the proxy's reads of what they held.
__device__ inline bool WaitForRoom(const DeviceRank& device, const Ring& ring, uint64_t end,
                                   Operation operation) {
  uint64_t* cached_tail = &ring.counters->cached_tail;
  if (end - LoadAcquireSys(cached_tail) <= ring.num_slots) return true;
  uint64_t tail = 0;
  const bool has_room =
      SpinOn(device, ring.tail, device.rank, operation, end, FailureKind::kRingFull,
             [&](uint64_t seen, uint64_t) {
               tail = seen;
               return end - seen <= ring.num_slots ? Seen::kThere : Seen::kTooEarly;
             });
  // An older value that comes later only makes the next one look again.
  if (has_room) StoreReleaseSys(cached_tail, tail);
  return has_room;
}

// One warp: a command of each lane with `has`, all to ranks of the ring's node. What the warp has
// stored and acquired is visible to the proxy that takes the command. False: this rank has failed.
__device__ inline bool WarpPush(const DeviceRank& device, Operation operation, const Ring& ring,
                                bool has, const Command& command) {
  const LaneMask lanes = Ballot(has);
  if (lanes == 0) return true;
  uint64_t first = 0;
  uint32_t is_ok = 1;
  if (LaneId() == 0) {
    const uint32_t count = CountLanes(lanes);
    first = atomicAdd(reinterpret_cast<unsigned long long*>(&ring.counters->head),
                      static_cast<unsigned long long>(count));
    is_ok = WaitForRoom(device, ring, first + count, operation) ? 1 : 0;
  }
  SyncWarp();  // the room that lane 0 has seen comes before the stores of all
  is_ok = FromLane(is_ok, 0);
  if (is_ok == 0) return false;  // the slots stay empty: the proxy is at its end as well
  first = FromLane(first, 0);
  const uint64_t index = first + CountLanes(lanes & LanesBelow());
  uint64_t* slot = ring.slots + 2 * (index & (ring.num_slots - 1));
  uint64_t commit = 0;
  bool is_good = false;
  if (has) {
    const std::optional<PackedCommand> packed = TryPack(command);
    is_good = packed.has_value();
    if (is_good) {
      StoreRelaxedSys(slot, packed->words[0]);
      commit = (packed->words[1] & ~kCommandLapMask) |
               ((~(index >> ring.num_slots_log2) & 1) << kCommandLapShift);
    } else {
      Fail(device, FailureKind::kBadCommand, operation, command.dst_rank, command.length_bytes,
           command.remote_offset);
    }
  }
  SyncWarp();  // the other lanes' stores come before this lane's fence
  if (is_good) {
    FenceSys();
    StoreRelaxedSys(slot + 1, commit);
  }
  return AllLanes(is_good || !has);
}
__device__ inline bool WarpPush(const DeviceRank& device, Operation operation, uint32_t node,
                                bool has, const Command& command) {
  return WarpPush(device, operation, Ring(device, node), has, command);
}

// One warp: one command to every rank of other nodes that wants(peer) says, by all lanes.
// make(peer) is it, and is called once for each.
template <typename Wants, typename Make>
__device__ bool WarpPushToRemotes(const DeviceRank& device, Operation operation, Wants&& wants,
                                  Make&& make) {
  const GroupShape& shape = device.shape;
  bool is_ok = true;
  for (uint32_t other = 0; other + 1 < shape.num_nodes(); ++other) {
    const uint32_t node = NodeOfOther(shape.num_nodes(), NodeOf(device), other);
    for (uint32_t first = 0; first < shape.node_size; first += kWarpSize) {
      const uint32_t local = first + LaneId();
      const uint32_t peer = node * shape.node_size + (local < shape.node_size ? local : 0);
      const bool is_wanted = wants(peer);
      const bool has = local < shape.node_size && is_wanted;
      is_ok = is_ok && WarpPush(device, operation, node, has, has ? make(peer) : Command{});
    }
  }
  return is_ok;
}
template <typename Make>
__device__ bool WarpPushToAllRemotes(const DeviceRank& device, Operation operation, Make&& make) {
  return WarpPushToRemotes(device, operation, [](uint32_t) { return true; }, make);
}
// The same for the ranks of this rank's rail.
template <typename Make>
__device__ bool WarpPushToRail(const DeviceRank& device, Operation operation, Make&& make) {
  return WarpPushToRemotes(
      device, operation,
      [&](uint32_t peer) { return peer % device.shape.node_size == LocalRankOf(device); }, make);
}

// Where signals of `source` to this rank's mate `local` are counted.
__device__ inline const uint64_t* SignalOf(const DeviceRank& device, uint32_t local,
                                           Channel channel, uint32_t source) {
  return device.network->signals[local] + SignalIndex(device.shape.num_ranks, channel, source);
}

// One thread waits until `source` has sent `wanted` signals (epochs of a counted channel) to this
// rank's mate `local`. What they followed can be read in that mate's stage.
__device__ inline bool WaitSignals(const DeviceRank& device, uint32_t local, Channel channel,
                                   uint32_t source, Operation operation, uint64_t wanted) {
  return SpinOn(device, SignalOf(device, local, channel, source), source,
                {operation, WaitPhaseOf(channel)}, wanted, FailureKind::kTimeout,
                [](uint64_t seen, uint64_t sought) {
                  return seen >= sought ? Seen::kThere : Seen::kTooEarly;
                });
}

// Ranks of other nodes, by number; `number` < num_ranks - node_size.
__device__ inline uint32_t RemoteRank(const DeviceRank& device, uint32_t number) {
  return number < device.node_begin ? number : number + device.shape.node_size;
}
__device__ inline uint32_t NumRemotes(const DeviceRank& device) {
  return device.shape.num_ranks - device.shape.node_size;
}

}  // namespace jax_ep::gpu
