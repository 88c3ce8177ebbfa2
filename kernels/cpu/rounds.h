// Calls that are made in rounds (kernels/rounds.h), and what their starts keep for their dones.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/sync.h"
#include "kernels/launch.h"

namespace jax_ep {

// Some tokens of every rank, exchanged together (kernels/rounds.h).
struct Round {
  uint32_t set = 0;
  int64_t begin = 0, end = 0;  // tokens
  bool is_first = true, is_last = true;
  uint64_t signal = 0;   // what the flags get when its data is there
  uint64_t free_at = 0;  // what the *Done flags of all readers must have reached before it writes
  uint64_t done = 0;     // what the *Done flags get when it is read
};

// The start of a split call only keeps what the caller may overwrite: a copy of rows that hold
// something, and the floats beside them. Its done puts them back into its own parameters, which it
// must check as if they were a start's; they are refused if their sizes are not those of the start.
void KeepInputs(const GroupShape& shape, const DispatchParams& params, Rank::SlotSet& set);
void KeepInputs(const GroupShape& shape, const CombineParams& params, Rank::SlotSet& set);
Status TakeInputs(Operation& op, const Rank::SlotSet& set, DispatchParams& params);
Status TakeInputs(Operation& op, const Rank::SlotSet& set, CombineParams& params);

// What a Send does after its checks: send(round) of a call that is not split. Of one that is, it
// does nothing but what its done needs, if it is a start (`keeps_inputs`).
template <typename Params, typename SendRound>
Status SendRounds(Operation& op, const SlotKind& kind, const CallSlot& slot, const Rounds& rounds,
                  const Params& params, bool keeps_inputs, SendRound&& send) {
  if (!rounds.is_split) {
    return send(Round{.set = slot.set,
                      .end = params.num_tokens,
                      .signal = op.epoch(),
                      .free_at = slot.reusable_at});
  }
  if (keeps_inputs) KeepInputs(op.shape(), params, (op.rank().*kind.sets)[slot.set]);
  return Status::Ok();
}

// What is left of a call to its Receive, send(round) and receive(round) of each of its rounds. A
// call that is not split has one, which its Send has sent. All ranks make the same rounds in the
// same order.
template <typename Send, typename Receive>
Status ReceiveRounds(Operation& op, const SlotKind& kind, const CallSlot& slot, uint64_t epoch,
                     const Rounds& rounds, int64_t num_tokens, Send&& send, Receive&& receive) {
  if (!rounds.is_split) {
    return receive(
        Round{.set = slot.set, .end = num_tokens, .signal = epoch, .done = NextDoneSeq(op, kind)});
  }
  uint64_t& num_made = op.rank().epochs.*kind.rounds;
  int64_t begin = 0;
  do {
    const int64_t end = std::min(num_tokens, begin + static_cast<int64_t>(rounds.tokens));
    ++num_made;
    JAX_EP_RETURN_IF_ERROR(op.CheckLatch());
    const Round round{.begin = begin,
                      .end = end,
                      .is_first = begin == 0,
                      .is_last = end == num_tokens,
                      .signal = num_made,
                      .free_at = num_made - 1,
                      .done = num_made};
    JAX_EP_RETURN_IF_ERROR(send(round));
    JAX_EP_RETURN_IF_ERROR(receive(round));
    begin = end;
  } while (begin < num_tokens);
  return Status::Ok();
}

}  // namespace jax_ep
