// What a process of a group tells the others of its ranks before they connect, by Python's
// exchange.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "proxy/base/blob.h"
#include "proxy/base/status.h"
#include "xla_ffi/session_options.h"

namespace jax_ep {

// The ranks of this process, each with what `write` adds for options.local_ranks[index].
std::string WriteRankRecords(const SessionOptions& options,
                             const std::function<void(size_t index, BlobWriter& record)>& write);

struct RankRecord {
  uint32_t team = 0;
  uint32_t rank = 0;
  uint64_t pid = 0;    // of its process
  BlobReader& record;  // what `write` has added, for `read` to take
};
// Calls `read` with each rank of `process`.
// \error kInvalidArgument  `text` is damaged, or of another version of jax_ep
Status ReadRankRecords(const SessionOptions& options, uint32_t process, std::string_view text,
                       const std::function<void(const RankRecord&)>& read);

}  // namespace jax_ep
