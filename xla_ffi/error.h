// Status -> xla::ffi::Error, by table. Does not invent messages.
#pragma once

#include "proxy/base/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

inline xla::ffi::ErrorCode ToXlaCode(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return xla::ffi::ErrorCode::kOk;
    case StatusCode::kInvalidArgument:
      return xla::ffi::ErrorCode::kInvalidArgument;
    case StatusCode::kFailedPrecondition:
      return xla::ffi::ErrorCode::kFailedPrecondition;
    case StatusCode::kResourceExhausted:
      return xla::ffi::ErrorCode::kResourceExhausted;
    case StatusCode::kDeadlineExceeded:
      return xla::ffi::ErrorCode::kDeadlineExceeded;
    case StatusCode::kUnavailable:
      return xla::ffi::ErrorCode::kUnavailable;
    case StatusCode::kUnimplemented:
      return xla::ffi::ErrorCode::kUnimplemented;
    case StatusCode::kInternal:
      return xla::ffi::ErrorCode::kInternal;
  }
  return xla::ffi::ErrorCode::kUnknown;
}

inline xla::ffi::Error ToFfiError(const Status& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error(ToXlaCode(status.code()), status.message());
}

}  // namespace jax_ep
