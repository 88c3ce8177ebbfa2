// How the processes of a session find each other's ranks.
#include "xla_ffi/members.h"
#include "xla_ffi/rank_records.h"
#include "xla_ffi/session_member.h"

namespace jax_ep {

struct Session::PeerRecord {
  uint64_t pid = 0;
  std::string heap_export;
  std::string endpoint_blob;
};

std::string Session::LocalBlob() const {
  return WriteRankRecords(options_, [this](size_t index, BlobWriter& record) {
    const Member& member = *members_[index];
    record.Text(member.heap.Export());
    record.Text(member.endpoint < 0 ? std::string() : proxy_->LocalBlob(member.endpoint));
  });
}

Status Session::Connect(const std::map<uint32_t, std::string>& blobs) {
  PeerRecords records;
  for (const auto& [process, blob] : blobs) {
    JAX_EP_RETURN_IF_ERROR(ReadRankRecords(options_, process, blob, [&](const RankRecord& peer) {
      std::string heap_export(peer.record.Text());
      records[{peer.team, peer.rank}] = {.pid = peer.pid,
                                         .heap_export = std::move(heap_export),
                                         .endpoint_blob = std::string(peer.record.Text())};
    }));
  }
  for (const auto& member : members_) JAX_EP_RETURN_IF_ERROR(ConnectMember(*member, records));
  return Status::Ok();
}

Status Session::ConnectMember(Member& member, const PeerRecords& records) {
  const GroupShape& shape = options_.shape;
  Rank& rank = *member.rank;
  const Deadline deadline = Deadline::After(options_.timeout);
  for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
    if (!rank.is_active(peer)) continue;
    const auto name = [&] { return options_.NameOf(member.id.team, peer); };
    const bool is_mate = peer / shape.node_size == rank.node();
    const bool is_local = process_of(member.id.team, peer) == options_.process_index;
    if (is_mate && is_local) {
      const Member* const mate = FindMember(members_, member.id.team, peer);
      if (mate == nullptr) {
        return Internal("group " + options_.name + ": " + name() +
                        " should live in this process and does not");
      }
      rank.heaps[peer] = mate->heap.bytes().data();
      rank.in_process[peer] = true;
      continue;
    }
    const auto record = records.find({member.id.team, peer});
    if (record == records.end()) {
      return InvalidArgument("group " + options_.name + ": process " +
                             std::to_string(process_of(member.id.team, peer)) +
                             " published nothing about " + name());
    }
    if (is_mate) {
      JAX_EP_ASSIGN_OR_RETURN(SharedMemory heap,
                              Of("group " + options_.name + ": memory of " + name(),
                                 SharedMemory::Import(record->second.heap_export)));
      if (heap.bytes().size() < layout_.total_bytes) {
        return InvalidArgument("group " + options_.name + ": the heap of " + name() +
                               " is smaller than this group's layout");
      }
      rank.heaps[peer] = heap.bytes().data();
      member.watched.push_back({.team = member.id.team,
                                .rank = peer,
                                .pid = record->second.pid,
                                .control = reinterpret_cast<ControlBlock*>(heap.bytes().data())});
      member.imported.push_back(std::move(heap));
    } else {
      JAX_EP_RETURN_IF_ERROR(
          proxy_->Connect(member.endpoint, peer, record->second.endpoint_blob, deadline));
    }
  }
  return Status::Ok();
}

}  // namespace jax_ep
