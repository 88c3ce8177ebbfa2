// BlobWriter, BlobReader: little binary messages that travel as strings (addresses, keys). A reader
// never reads past the end, whatever the bytes are.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace jax_ep {

class BlobWriter {
 public:
  BlobWriter& U64(uint64_t value) {
    blob_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  BlobWriter& Text(std::string_view text) {
    U64(text.size());
    blob_.append(text);
    return *this;
  }
  std::string Take() { return std::move(blob_); }

 private:
  std::string blob_;
};

// After any failed read ok() is false for good and values are 0 / "".
class BlobReader {
 public:
  explicit BlobReader(std::string_view blob) : rest_(blob) {}

  uint64_t U64() {
    uint64_t value = 0;
    const std::string_view bytes = Take(sizeof(value));
    if (bytes.size() == sizeof(value)) std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
  std::string_view Text() {
    const uint64_t num_bytes = U64();
    return Take(num_bytes);
  }
  bool ok() const { return ok_; }
  bool finished() const { return ok_ && rest_.empty(); }

 private:
  std::string_view Take(uint64_t num_bytes) {
    if (!ok_ || num_bytes > rest_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view taken = rest_.substr(0, num_bytes);
    rest_.remove_prefix(num_bytes);
    return taken;
  }

  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace jax_ep
