// Every environment variable that the C++ code reads, in one struct. docs/tuning.md repeats it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "proxy/base/log.h"
#include "proxy/base/status.h"

namespace jax_ep {

struct Env {
  // JAX_EP_LOG: error | warning | info | debug.
  LogLevel log_level = LogLevel::kWarning;
  // JAX_EP_WINDOW_MESSAGES: 1..4096. Messages of one flow that may await their acknowledgement.
  uint32_t window_messages = 256;
  // JAX_EP_WINDOW_BYTES: >= 16, suffix K, M or G allowed. The same in bytes; a single larger
  // message still goes when nothing else of its flow is under way.
  uint64_t window_bytes = uint64_t{8} << 20;
  // JAX_EP_RING_SLOTS: power of two, 16..1048576. Commands that fit into one rank's ring.
  uint32_t ring_slots = 4096;
  // JAX_EP_INBOX_SLOTS: power of two, 16..1048576. Arrivals that a loopback or shm endpoint holds
  // before its senders have to retry.
  uint32_t inbox_slots = 8192;
  // JAX_EP_FAULTY: spec of the faulty transport (proxy/transport/faulty.h); empty: none. Tests
  // only.
  std::string faulty_spec;

  using Lookup = std::function<const char*(const char* name)>;

  // Reads and validates all of them. An empty value counts as unset.
  // \error kInvalidArgument  names the variable, its value and what is allowed
  static Result<Env> Read();
  static Result<Env> Read(const Lookup& lookup);  // for tests
};

}  // namespace jax_ep
