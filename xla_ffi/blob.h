// Length-prefixed encoding of what a process publishes about its ranks at create_group.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "proxy/base/status.h"

namespace jax_ep {

class BlobWriter {
 public:
  void PutU64(uint64_t value) { out_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void PutString(std::string_view text) {
    PutU64(text.size());
    out_.append(text);
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads what BlobWriter wrote. Every length is checked against what is left.
class BlobReader {
 public:
  explicit BlobReader(std::string_view blob) : left_(blob) {}

  Result<uint64_t> U64() {
    uint64_t value = 0;
    if (left_.size() < sizeof(value)) return Truncated();
    std::memcpy(&value, left_.data(), sizeof(value));
    left_.remove_prefix(sizeof(value));
    return value;
  }
  Result<std::string> String() {
    JAX_EP_ASSIGN_OR_RETURN(const uint64_t num_bytes, U64());
    if (left_.size() < num_bytes) return Truncated();
    std::string text(left_.substr(0, num_bytes));
    left_.remove_prefix(num_bytes);
    return text;
  }
  bool at_end() const { return left_.empty(); }

 private:
  static Status Truncated() {
    return InvalidArgument("a peer's bootstrap record is truncated; do all processes run the same "
                           "version of jax_ep?");
  }
  std::string_view left_;
};

}  // namespace jax_ep
