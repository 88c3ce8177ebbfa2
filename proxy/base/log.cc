#include "proxy/base/log.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "proxy/base/env.h"

namespace jax_ep {
namespace {

std::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return "ERROR";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kDebug:
      return "DEBUG";
  }
  return "?";
}

}  // namespace

LogLevel ActiveLogLevel() {
  // A bad value must not silence the error that Env::Read makes of it, so it falls back here.
  static const LogLevel level = [] {
    const char* text = std::getenv("JAX_EP_LOG");
    return ParseLogLevel(text == nullptr ? "" : text).value_or(LogLevel::kWarning);
  }();
  return level;
}

void Log(LogLevel level, std::string_view message) try {
  if (!IsLogged(level)) return;
  std::string line = "jax_ep[" + std::to_string(getpid()) + "] ";
  line.append(LevelName(level)).append(" ").append(message).append("\n");
  // One write keeps lines of several processes apart; a log that cannot be written is dropped.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
} catch (...) {  // no memory for the line
}

}  // namespace jax_ep
