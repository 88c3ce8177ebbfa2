#include "xla_ffi/rank_records.h"

#include <unistd.h>

namespace jax_ep {
namespace {

constexpr uint64_t kVersion = 3;

}  // namespace

std::string WriteRankRecords(const SessionOptions& options,
                             const std::function<void(size_t index, BlobWriter& record)>& write) {
  BlobWriter blob;
  blob.U64(kVersion).U64(static_cast<uint64_t>(getpid())).U64(options.local_ranks.size());
  for (size_t i = 0; i < options.local_ranks.size(); ++i) {
    blob.U64(options.local_ranks[i].team).U64(options.local_ranks[i].rank);
    write(i, blob);
  }
  return blob.Take();
}

Status ReadRankRecords(const SessionOptions& options, uint32_t process, std::string_view text,
                       const std::function<void(const RankRecord&)>& read) {
  BlobReader reader(text);
  const uint64_t version = reader.U64();
  if (version != kVersion) {
    return InvalidArgument("group " + options.name + ": process " + std::to_string(process) +
                           " speaks bootstrap version " + std::to_string(version) + ", this one " +
                           std::to_string(kVersion) + "; install the same jax_ep everywhere");
  }
  const uint64_t pid = reader.U64();
  const uint64_t num_ranks = reader.U64();
  for (uint64_t i = 0; i < num_ranks && reader.ok(); ++i) {
    const auto team = static_cast<uint32_t>(reader.U64());
    const auto rank = static_cast<uint32_t>(reader.U64());
    read({.team = team, .rank = rank, .pid = pid, .record = reader});
  }
  if (reader.finished()) return Status::Ok();
  return InvalidArgument("group " + options.name + ": the bootstrap record of process " +
                         std::to_string(process) +
                         " is malformed; install the same jax_ep everywhere");
}

}  // namespace jax_ep
