// Status and Result: how every failure in this project travels. Nothing here throws.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace jax_ep {

// A subset of XLA's error codes, so that a Status maps one to one onto an ffi::Error.
enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument,     // bad input of a caller or of a peer
  kFailedPrecondition,  // wrong state: closed group, too many starts
  kResourceExhausted,   // full queue: poll and retry (the only code that is ever retried)
  kDeadlineExceeded,    // a bounded wait ended
  kUnavailable,         // a peer is gone
  kUnimplemented,
  kInternal,
};

std::string_view StatusCodeName(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  // A copy that finds no memory has "out of memory" for its message: copies are made to tell
  // everybody of a failure, which that may be.
  Status(const Status& other) noexcept;
  Status& operator=(const Status& other) noexcept { return *this = Status(other); }
  Status(Status&&) = default;
  Status& operator=(Status&&) = default;

  static Status Ok() { return Status(); }
  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}
inline Status FailedPrecondition(std::string message) {
  return Status(StatusCode::kFailedPrecondition, std::move(message));
}
inline Status ResourceExhausted(std::string message) {
  return Status(StatusCode::kResourceExhausted, std::move(message));
}
inline Status DeadlineExceeded(std::string message) {
  return Status(StatusCode::kDeadlineExceeded, std::move(message));
}
inline Status Unavailable(std::string message) {
  return Status(StatusCode::kUnavailable, std::move(message));
}
inline Status Unimplemented(std::string message) {
  return Status(StatusCode::kUnimplemented, std::move(message));
}
inline Status Internal(std::string message) {
  return Status(StatusCode::kInternal, std::move(message));
}

// A value or the Status that explains its absence. Reading the value of a failed Result is a
// programming error (std::get throws, which terminates: -fno-exceptions callers never do it).
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : state_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status::Ok() : std::get<Status>(state_); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

// The result, whose error begins with `who`.
template <typename T>
Result<T> Of(const std::string& who, Result<T> result) {
  if (result.ok()) return result;
  return Status(result.status().code(), who + ": " + result.status().message());
}

#define JAX_EP_CONCAT_INNER(a, b) a##b
#define JAX_EP_CONCAT(a, b) JAX_EP_CONCAT_INNER(a, b)

#define JAX_EP_RETURN_IF_ERROR(expr)                                    \
  do {                                                                  \
    if (::jax_ep::Status jax_ep_status = (expr); !jax_ep_status.ok()) { \
      return jax_ep_status;                                             \
    }                                                                   \
  } while (false)

#define JAX_EP_ASSIGN_OR_RETURN(lhs, expr) \
  JAX_EP_ASSIGN_OR_RETURN_INNER(JAX_EP_CONCAT(jax_ep_result_, __LINE__), lhs, expr)
#define JAX_EP_ASSIGN_OR_RETURN_INNER(result, lhs, expr) \
  auto result = (expr);                                  \
  if (!result.ok()) return result.status();              \
  lhs = std::move(result.value())

}  // namespace jax_ep
