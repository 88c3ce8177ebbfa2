#include "proxy/base/env.h"

#include <bit>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace jax_ep {
namespace {

Status Bad(const char* name, std::string_view value, std::string_view allowed) {
  return InvalidArgument(std::string("environment variable ") + name + "=" + std::string(value) +
                         " is not allowed: expected " + std::string(allowed) +
                         "; unset it for the default");
}

// A decimal number, with K, M or G (powers of 1024) if `has_suffix`.
std::optional<uint64_t> ParseNumber(std::string_view text, bool has_suffix) {
  uint64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || rest == text.data()) return std::nullopt;
  const std::string_view suffix(rest, static_cast<size_t>(text.data() + text.size() - rest));
  if (suffix.empty()) return number;
  if (!has_suffix || suffix.size() != 1) return std::nullopt;
  int shift = 0;
  switch (suffix[0]) {
    case 'K':
      shift = 10;
      break;
    case 'M':
      shift = 20;
      break;
    case 'G':
      shift = 30;
      break;
    default:
      return std::nullopt;
  }
  if (number > (UINT64_MAX >> shift)) return std::nullopt;
  return number << shift;
}

class Reader {
 public:
  explicit Reader(const Env::Lookup& lookup) : lookup_(lookup) {}

  std::string_view Text(const char* name) const {
    const char* value = lookup_(name);
    return value == nullptr ? std::string_view() : std::string_view(value);
  }

  Status Number(const char* name, uint64_t min, uint64_t max, std::string_view allowed,
                uint32_t* out) const {
    uint64_t wide = *out;
    JAX_EP_RETURN_IF_ERROR(Number(name, min, max, /*has_suffix=*/false, allowed, &wide));
    *out = static_cast<uint32_t>(wide);
    return Status::Ok();
  }

  Status Number(const char* name, uint64_t min, uint64_t max, bool has_suffix,
                std::string_view allowed, uint64_t* out) const {
    const std::string_view text = Text(name);
    if (text.empty()) return Status::Ok();
    const std::optional<uint64_t> number = ParseNumber(text, has_suffix);
    if (!number || *number < min || *number > max) return Bad(name, text, allowed);
    *out = *number;
    return Status::Ok();
  }

  Status PowerOfTwo(const char* name, uint32_t* out) const {
    constexpr uint64_t kMin = 16;
    constexpr uint64_t kMax = uint64_t{1} << 20;
    constexpr std::string_view kAllowed = "a power of two from 16 to 1048576";
    JAX_EP_RETURN_IF_ERROR(Number(name, kMin, kMax, kAllowed, out));
    if (!std::has_single_bit(*out)) return Bad(name, Text(name), kAllowed);
    return Status::Ok();
  }

 private:
  const Env::Lookup& lookup_;
};

}  // namespace

std::optional<LogLevel> ParseLogLevel(std::string_view text) {
  if (text == "error") return LogLevel::kError;
  if (text == "warning") return LogLevel::kWarning;
  if (text == "info") return LogLevel::kInfo;
  if (text == "debug") return LogLevel::kDebug;
  return std::nullopt;
}

Result<Env> Env::Read() {
  return Read([](const char* name) -> const char* { return std::getenv(name); });
}

Result<Env> Env::Read(const Lookup& lookup) {
  const Reader reader(lookup);
  Env env;
  if (const std::string_view level = reader.Text("JAX_EP_LOG"); !level.empty()) {
    const std::optional<LogLevel> parsed = ParseLogLevel(level);
    if (!parsed) return Bad("JAX_EP_LOG", level, "error, warning, info or debug");
    env.log_level = *parsed;
  }
  constexpr uint64_t kMaxWindow = 4096;  // half the sequence space of proxy/abi/imm.h
  JAX_EP_RETURN_IF_ERROR(reader.Number("JAX_EP_WINDOW_MESSAGES", 1, kMaxWindow,
                                       "a number from 1 to 4096", &env.window_messages));
  constexpr uint64_t kMinWindowBytes = 16;  // one command unit
  JAX_EP_RETURN_IF_ERROR(reader.Number("JAX_EP_WINDOW_BYTES", kMinWindowBytes, UINT64_MAX,
                                       /*has_suffix=*/true,
                                       "a number of at least 16, with K, M or G if you like",
                                       &env.window_bytes));
  JAX_EP_RETURN_IF_ERROR(reader.PowerOfTwo("JAX_EP_RING_SLOTS", &env.ring_slots));
  JAX_EP_RETURN_IF_ERROR(
      reader.Number("JAX_EP_PROXY_THREADS", 1, 8, "a number from 1 to 8", &env.proxy_threads));
  JAX_EP_RETURN_IF_ERROR(reader.PowerOfTwo("JAX_EP_INBOX_SLOTS", &env.inbox_slots));
  JAX_EP_RETURN_IF_ERROR(
      reader.Number("JAX_EP_CALLER_PROGRESS", 0, 1, "0 or 1", &env.caller_progress));
  env.faulty_spec = std::string(reader.Text("JAX_EP_FAULTY"));
  env.trace = std::string(reader.Text("JAX_EP_TRACE"));
  if (env.trace.ends_with('/')) {
    return Bad("JAX_EP_TRACE", env.trace, "a folder and the beginning of the files' names in it");
  }
  env.stall_spec = std::string(reader.Text("JAX_EP_TEST_STALL"));
  env.socket_ifname = std::string(reader.Text("JAX_EP_SOCKET_IFNAME"));
  env.ofi_provider = std::string(reader.Text("JAX_EP_OFI_PROVIDER"));
  env.ofi_domain = std::string(reader.Text("JAX_EP_OFI_DOMAIN"));
  env.verbs_device = std::string(reader.Text("JAX_EP_VERBS_DEVICE"));
  if (!reader.Text("JAX_EP_VERBS_GID_INDEX").empty()) {
    uint32_t index = 0;
    JAX_EP_RETURN_IF_ERROR(
        reader.Number("JAX_EP_VERBS_GID_INDEX", 0, 255, "a number from 0 to 255", &index));
    env.verbs_gid_index = static_cast<int32_t>(index);
  }
  JAX_EP_RETURN_IF_ERROR(
      reader.Number("JAX_EP_VERBS_SL", 0, 15, "a number from 0 to 15", &env.verbs_sl));
  JAX_EP_RETURN_IF_ERROR(
      reader.Number("JAX_EP_VERBS_TC", 0, 255, "a number from 0 to 255", &env.verbs_tc));
  JAX_EP_RETURN_IF_ERROR(
      reader.Number("JAX_EP_VERBS_TIMEOUT", 1, 22, "a number from 1 to 22", &env.verbs_timeout));
  constexpr std::string_view kMtus = "256, 512, 1024, 2048 or 4096";
  JAX_EP_RETURN_IF_ERROR(reader.Number("JAX_EP_VERBS_MTU", 256, 4096, kMtus, &env.verbs_mtu));
  if (env.verbs_mtu != 0 && !std::has_single_bit(env.verbs_mtu)) {
    return Bad("JAX_EP_VERBS_MTU", reader.Text("JAX_EP_VERBS_MTU"), kMtus);
  }
  JAX_EP_RETURN_IF_ERROR(
      reader.Number("JAX_EP_VERBS_QPS", 1, 16, "a number from 1 to 16", &env.verbs_qps));
  return env;
}

}  // namespace jax_ep
