// Leveled log to stderr, one line per call. Never used between pop and poll of the proxy.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace jax_ep {

enum class LogLevel : uint8_t { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

// "error", "warning", "info" or "debug".
std::optional<LogLevel> ParseLogLevel(std::string_view text);

// The level of JAX_EP_LOG (env.h); kWarning when it is unset or not a level.
LogLevel ActiveLogLevel();

inline bool IsLogged(LogLevel level) { return level <= ActiveLogLevel(); }

// Writes "jax_ep[pid] LEVEL message\n" in one write(2) if the level is active. Never fails.
void Log(LogLevel level, std::string_view message);

inline void LogError(std::string_view message) { Log(LogLevel::kError, message); }
inline void LogWarning(std::string_view message) { Log(LogLevel::kWarning, message); }
inline void LogInfo(std::string_view message) { Log(LogLevel::kInfo, message); }
inline void LogDebug(std::string_view message) { Log(LogLevel::kDebug, message); }

}  // namespace jax_ep
