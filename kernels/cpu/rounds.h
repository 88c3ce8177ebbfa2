// Calls that are made in rounds (kernels/rounds.h), and what their starts keep for their dones.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/sync.h"
#include "kernels/launch.h"

namespace jax_ep {

// Some tokens of every rank, exchanged together (kernels/layout.h, Rounds).
struct Round {
  uint32_t set = 0;
  int64_t begin = 0, end = 0;  // tokens
  bool is_first = true, is_last = true;
  uint64_t signal = 0;   // what the flags get when its data is there
  uint64_t free_at = 0;  // what the *Done flags of all readers must have reached before it writes
  uint64_t done = 0;     // what the *Done flags get when it is read
};

// Makes every round of a split call, one after the other: make(round). All ranks make the same
// rounds in the same order.
template <typename Make>
Status MakeRounds(Operation& op, const SlotKind& kind, uint64_t round_tokens, int64_t num_tokens,
                  Make&& make) {
  uint64_t& num_made = op.rank().epochs.*kind.rounds;
  int64_t begin = 0;
  do {
    const int64_t end = std::min(num_tokens, begin + static_cast<int64_t>(round_tokens));
    ++num_made;
    JAX_EP_RETURN_IF_ERROR(op.CheckLatch());
    JAX_EP_RETURN_IF_ERROR(make(Round{.begin = begin,
                                      .end = end,
                                      .is_first = begin == 0,
                                      .is_last = end == num_tokens,
                                      .signal = num_made,
                                      .free_at = num_made - 1,
                                      .done = num_made}));
    begin = end;
  } while (begin < num_tokens);
  return Status::Ok();
}

// The start of a split call only keeps what the caller may overwrite: a copy of rows that hold
// something, and the floats beside them. Its done puts them back into its own parameters, which it
// must check as if they were a start's; they are refused if their sizes are not those of the start.
void KeepInputs(const GroupShape& shape, const DispatchParams& params, Rank::SlotSet& set);
void KeepInputs(const GroupShape& shape, const CombineParams& params, Rank::SlotSet& set);
Status TakeInputs(Operation& op, const Rank::SlotSet& set, DispatchParams& params);
Status TakeInputs(Operation& op, const Rank::SlotSet& set, CombineParams& params);

}  // namespace jax_ep
