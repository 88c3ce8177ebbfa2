// faulty: wraps any transport and does, from a seed, everything that a network is allowed to do to
// us. For tests; every protocol test passes over it.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "proxy/base/status.h"
#include "proxy/transport.h"

namespace jax_ep {

// Parsed from "key=value,key=value". All keys are optional numbers; percentages are 0..100.
struct FaultySpec {
  uint64_t seed = 0;              // of the choices below, mixed with the endpoint's rank
  uint64_t reorder = 0;           // a write may overtake this many earlier ones, and be overtaken
                                  // by as many later ones
  uint64_t per_flow = 0;          // 1: it overtakes only writes of its own flow
  uint64_t delay = 0;             // a write is held for up to this many polls
  uint64_t duplicate = 0;         // percent of immediates that are delivered twice
  uint64_t split = 0;             // percent of writes that become several; the immediate comes on a
                                  // last piece posted after the others are acknowledged
  uint64_t again = 0;             // percent of posts that start a storm of kResourceExhausted
  uint64_t slow_completions = 0;  // kSent is held back for up to this many polls
  uint64_t payload_late = 0;      // 1: bytes appear only at Flush (peers in one process only)
  uint64_t die_after = 0;         // > 0: after this many posts nothing goes out or comes in
  uint64_t die_rank = UINT64_MAX;  // with die_after: only this rank dies (default: all)
  uint64_t max_message = 0;        // > 0: lowers max_message_bytes

  // \error kInvalidArgument  names the part of the text that is wrong
  static Result<FaultySpec> Parse(std::string_view text);
};

// Wraps `inner` as options.faulty_spec says. Both ends of a connection must be wrapped alike.
Result<std::unique_ptr<Transport>> MakeFaultyTransport(std::unique_ptr<Transport> inner,
                                                       const TransportOptions& options);

}  // namespace jax_ep
