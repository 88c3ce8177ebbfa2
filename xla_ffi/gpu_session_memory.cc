// Memory of a GpuSession: its own heaps, and those of other processes, mapped here.
#include <unistd.h>

#include <utility>

#include "xla_ffi/gpu_member.h"
#include "xla_ffi/members.h"
#include "xla_ffi/rank_records.h"

namespace jax_ep {

// Of device memory that is mapped: so the stage lies in one allocation, behind the kept bytes.
constexpr uint64_t kStageAlignBytes = uint64_t{2} << 20;

std::byte* GpuSession::StageIn(std::byte* heap) const {
  return heap + AlignUp(api_->heap_bytes(&options().shape), kStageAlignBytes);
}

uint64_t GpuSession::WholeHeapBytes() const {
  const uint64_t heap_bytes = api_->heap_bytes(&options().shape);
  if (!GpuNetwork::HasDeviceStages(options())) return heap_bytes;
  return AlignUp(heap_bytes, kStageAlignBytes) + api_->stage_bytes(&options().shape);
}

Status GpuSession::AllocateMember(size_t index) {
  const gpu::DeviceMemoryApi& memory = *api_->memory;
  const GroupShape& shape = options().shape;
  // Kept in members_ from the start, so that Close frees what a later failure leaves.
  Member& member = *members_.emplace_back(std::make_unique<Member>());
  member.id = options().local_ranks[index];
  const std::string who = "group " + options().name + ": " + options().NameOf(member.id) +
                          " on GPU " + std::to_string(member.device());
  const std::vector<int> devices = Devices();
  JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(member.device()), who));
  for (const int peer : devices) {
    bool possible = false;
    JAX_EP_RETURN_IF_ERROR(ToStatus(memory.peer_access(member.device(), peer, &possible), who));
    if (!possible) {
      return InvalidArgument(who + " cannot load and store the memory of GPU " +
                             std::to_string(peer) +
                             "; expected peer access inside a node; use implementation='xla'");
    }
  }
  const bool for_nics = GpuNetwork::MoverOf(options()) == GpuNetwork::Mover::kNic;
  if (for_nics) {
    gpu::NicAccess access;
    JAX_EP_RETURN_IF_ERROR(ToStatus(memory.nic_access(member.device(), &access), who));
    const char* refusal = access.refusal;
    const bool is_ordered = shape.node_size == 1 ? access.owner_sees : access.all_see;
    if (refusal == nullptr && !is_ordered) {
      refusal = "the GPUs of its node may see a NIC's signals before its rows";
    }
    if (refusal != nullptr) {
      return InvalidArgument(who + ": JAX_EP_GPU_DIRECT=1, but " + refusal +
                             "; unset it, and rows go through pinned host memory");
    }
  }
  const uint64_t bytes = WholeHeapBytes();
  const auto num_devices = static_cast<int>(devices.size());
  if (const char* error = memory.allocate(member.device(), bytes, api_->kept_bytes(&shape),
                                          for_nics, devices.data(), num_devices, &member.heap)) {
    return ResourceExhausted(who + " could not allocate its heap of " + std::to_string(bytes) +
                             " bytes (" + error +
                             "); lower max_tokens, or leave memory free with "
                             "XLA_PYTHON_CLIENT_MEM_FRACTION");
  }
  void* status = nullptr;
  JAX_EP_RETURN_IF_ERROR(ToStatus(memory.allocate_pinned(sizeof(gpu::RankStatus), &status), who));
  member.status = new (status) gpu::RankStatus();
  JAX_EP_ASSIGN_OR_RETURN(member.control,
                          SharedMemory::Create(sizeof(ControlBlock), /*shareable=*/true));
  const uint64_t live = options_.live_pointers[index];
  if (live == 0) {
    member.no_arena = "JAX_EP_ZERO_COPY=0";
  } else {
    const char* reason = "";
    JAX_EP_RETURN_IF_ERROR(
        ToStatus(memory.find_arena(reinterpret_cast<const void*>(live), devices.data(), num_devices,
                                   &member.arena, &reason),
                 who));
    member.no_arena = reason;
    if (member.arena.bytes != 0 && member.arena.bytes < options_.min_arena_bytes) {
      member.arena = {};
      member.no_arena = "XLA's memory is not one preallocated range";
    }
  }
  if (member.arena.bytes == 0 && options_.require_arena) {
    return FailedPrecondition(who + ": JAX_EP_ZERO_COPY=1 but " + member.no_arena);
  }
  return Status::Ok();
}

std::string GpuSession::LocalBlob() const {
  return WriteRankRecords(options(), [this](size_t index, BlobWriter& record) {
    const Member& member = *members_[index];
    record.U64(member.heap.bytes).U64(member.heap.kept_bytes).U64(member.arena.bytes);
    record.Text(member.control.Export());
    record.Text(network_ == nullptr ? std::string() : network_->LocalBlob(index));
  });
}

Result<std::vector<int>> GpuSession::ExportFds() const {
  std::vector<int> fds;
  const Status status = OnOwnThread([&]() -> Status {
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->use_device(member->device()), "export"));
      const auto [kept, rest] = gpu::PartsOf(member->heap);
      for (const gpu::DeviceRange part : {kept, rest, member->arena}) {
        if (part.bytes == 0) continue;
        int fd = -1;
        JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->export_fd(part, &fd), "export"));
        fds.push_back(fd);
      }
    }
    return Status::Ok();
  });
  if (!status.ok()) {
    for (const int fd : fds) close(fd);
    return status;
  }
  return fds;
}

Status GpuSession::Connect(const std::map<uint32_t, std::string>& blobs,
                           const std::map<uint32_t, std::vector<int>>& fds) {
  std::map<std::pair<uint32_t, uint32_t>, PeerRecord> records;
  std::map<std::pair<uint32_t, uint32_t>, std::string> network_blobs;
  for (const auto& [process, blob] : blobs) {
    if (process == options().process_index) continue;
    const auto descriptors = fds.find(process);
    size_t next = 0;
    const auto take_fd = [&](uint64_t bytes) {
      if (bytes == 0 || descriptors == fds.end() || next >= descriptors->second.size()) return -1;
      return descriptors->second[next++];
    };
    JAX_EP_RETURN_IF_ERROR(ReadRankRecords(options(), process, blob, [&](const RankRecord& peer) {
      PeerRecord record;
      record.pid = peer.pid;
      record.heap_bytes = peer.record.U64();
      record.kept_bytes = peer.record.U64();
      record.arena_bytes = peer.record.U64();
      record.control_export = std::string(peer.record.Text());
      network_blobs[{peer.team, peer.rank}] = std::string(peer.record.Text());
      record.heap_fds = {take_fd(record.kept_bytes),
                         take_fd(record.heap_bytes - record.kept_bytes)};
      record.arena_fd = take_fd(record.arena_bytes);
      records[{peer.team, peer.rank}] = std::move(record);
    }));
  }
  return OnOwnThread([&]() -> Status {
    JAX_EP_RETURN_IF_ERROR(DrainDevices());
    for (const auto& member : members_) JAX_EP_RETURN_IF_ERROR(ConnectMember(*member, records));
    if (network_ == nullptr) return Status::Ok();
    std::vector<std::vector<std::byte*>> stages;
    for (const auto& member : members_) stages.push_back(member->stages);
    return network_->Connect(network_blobs, stages);
  });
}

Status GpuSession::ConnectMember(
    Member& member, const std::map<std::pair<uint32_t, uint32_t>, PeerRecord>& records) {
  const gpu::DeviceMemoryApi& memory = *api_->memory;
  const GroupShape& shape = options().shape;
  const uint32_t node_begin = member.id.rank / shape.node_size * shape.node_size;
  const GpuNetwork::Mover mover = GpuNetwork::MoverOf(options());
  const int device = member.device();
  JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(device), "connect"));
  member.peers.assign(shape.node_size, {});
  const auto import_heap = [&](uint32_t peer, const std::string& who) -> Result<std::byte*> {
    const auto found = records.find({member.id.team, peer});
    if (found == records.end() || found->second.heap_fds[0] < 0) {
      return InvalidArgument(who + " was not published by its process");
    }
    const PeerRecord& record = found->second;
    if (record.heap_bytes < WholeHeapBytes()) {
      return InvalidArgument(who + " has " + std::to_string(record.heap_bytes) +
                             " bytes, expected " + std::to_string(WholeHeapBytes()) +
                             (mover == GpuNetwork::Mover::kNic
                                  ? "; set JAX_EP_GPU_DIRECT alike on all processes of a node"
                                  : "; this group's layout differs there"));
    }
    gpu::DeviceRange heap;
    JAX_EP_RETURN_IF_ERROR(
        ToStatus(memory.import_fds(record.heap_fds, record.heap_bytes, record.kept_bytes, &device,
                                   1, /*writable=*/true, &heap),
                 who));
    member.imported.push_back(heap);
    return heap.base;
  };
  for (uint32_t local = 0; local < shape.node_size; ++local) {
    const uint32_t peer = node_begin + local;
    const std::string who =
        "group " + options().name + ": memory of " + options().NameOf(member.id.team, peer);
    if (const Member* const mate = FindMember(members_, member.id.team, peer)) {
      member.peers[local] = {
          .heap = mate->heap.base, .arena = mate->arena.base, .arena_bytes = mate->arena.bytes};
      continue;
    }
    if (!options().IsActive(peer)) continue;
    JAX_EP_ASSIGN_OR_RETURN(std::byte* const heap, import_heap(peer, who));
    const PeerRecord& record = records.at({member.id.team, peer});
    gpu::DeviceRange arena;
    if (record.arena_bytes != 0) {
      const char* error = record.arena_fd < 0
                              ? "it was not passed"
                              : memory.import_fds({record.arena_fd, -1}, record.arena_bytes,
                                                  /*kept_bytes=*/0, &device, 1,
                                                  /*writable=*/false, &arena);
      if (error != nullptr) {
        unmapped_arena_ = who + ": its XLA arena cannot be mapped here (" + error + ")";
      } else {
        member.imported.push_back(arena);
      }
    }
    JAX_EP_ASSIGN_OR_RETURN(SharedMemory control,
                            Of(who, SharedMemory::Import(record.control_export)));
    member.watched.push_back({.team = member.id.team,
                              .rank = peer,
                              .pid = record.pid,
                              .control = reinterpret_cast<ControlBlock*>(control.bytes().data())});
    member.controls.push_back(std::move(control));
    member.peers[local] = {.heap = heap, .arena = arena.base, .arena_bytes = arena.bytes};
  }
  if (mover == GpuNetwork::Mover::kHost) return Status::Ok();
  for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
    std::byte* heap = nullptr;
    if (peer / shape.node_size == node_begin / shape.node_size) {
      heap = member.peers[peer - node_begin].heap;
    } else if (mover == GpuNetwork::Mover::kNic) {
      member.stages.push_back(nullptr);  // NICs alone reach it
      continue;
    } else if (const Member* const other = FindMember(members_, member.id.team, peer)) {
      heap = other->heap.base;
    } else {
      const Result<std::byte*> imported =
          import_heap(peer, "group " + options().name + ": memory of " +
                                options().NameOf(member.id.team, peer));
      if (!imported.ok()) {
        return Status(imported.status().code(),
                      imported.status().message() +
                          "; transport 'cuda' needs GPUs that reach each other's memory, in all "
                          "nodes; else use 'shm'");
      }
      heap = *imported;
    }
    member.stages.push_back(StageIn(heap));
  }
  return Status::Ok();
}

void GpuSession::ForbidArenas(const std::string& reason) {
  for (const auto& member : members_) {
    member->arena = {};
    member->no_arena = reason;
    for (gpu::PeerMemory& peer : member->peers) {
      peer.arena = nullptr;
      peer.arena_bytes = 0;
    }
  }
}

}  // namespace jax_ep
