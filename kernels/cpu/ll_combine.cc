// LL combine: every rank writes its partial of each token straight into the slot [token][LlSlot] of
// the token's owner, by store inside the node, by one WRITE per partial outside it.
#include "kernels/cpu/ll_combine.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/cpu/partials.h"
#include "kernels/cpu/rounds.h"
#include "kernels/cpu/row_index.h"
#include "kernels/cpu/sync.h"

namespace jax_ep {
namespace {

class LlCombine {
 public:
  LlCombine(Rank& rank, std::string_view name, const CombineParams& params, bool is_whole)
      : op_(rank, name),
        rank_(rank),
        shape_(rank.shape),
        layout_(rank.layout),
        params_(params),
        keeps_inputs_(layout_.ll_rounds.is_split && !is_whole) {}

  Status Send(uint64_t* epoch);
  Status Receive(uint64_t epoch);

 private:
  Status SendRound(const Round& round);
  Status ReceiveRound(const Round& round);
  Status SendTo(const Round& round, const PartialPitch& pitch, uint32_t owner);
  // Offset in an owner's heap of this rank's partial of its `token`, which has rows here.
  uint64_t TargetOf(const Round& round, const PartialPitch& pitch, uint32_t owner,
                    int64_t token) const;
  uint64_t rows_per_rank() const {
    return RowsPerRank(shape_, Mode::kLl, params_.num_tokens, params_.recv_rows);
  }

  Operation op_;
  Rank& rank_;
  const GroupShape& shape_;
  const HeapLayout& layout_;
  CombineParams params_;
  const bool keeps_inputs_;  // from the start of a split call to its done
  std::optional<RowIndex> index_;
};

uint64_t LlCombine::TargetOf(const Round& round, const PartialPitch& pitch, uint32_t owner,
                             int64_t token) const {
  auto lowest_k = static_cast<uint32_t>(shape_.top_k);
  for (const int32_t row : index_->Rows(owner, token)) {
    const auto code = static_cast<uint32_t>(params_.recv_src[static_cast<uint64_t>(row)]);
    lowest_k = std::min(lowest_k, code % shape_.top_k);
  }
  const uint32_t slot = LlSlot(shape_, layout_.ll_slots, rank_.rank, lowest_k);
  const uint64_t row = static_cast<uint64_t>(token) * layout_.ll_slots + slot;
  return layout_.ll_comb.At(round.set) + row * pitch.rank_pitch;
}

Status LlCombine::SendTo(const Round& round, const PartialPitch& pitch, uint32_t owner) {
  const bool is_mate = op_.is_mate(owner);
  const uint64_t stage = is_mate ? 0 : layout_.ll_comb_send.At(round.set, owner);
  const auto staged_at = [&](int64_t token) {
    return stage + static_cast<uint64_t>(token - round.begin) * pitch.rank_pitch;
  };
  rank_.parallel_for(round.end - round.begin, [&](int64_t begin, int64_t end) {
    TokenSum sum(shape_);
    for (int64_t token = round.begin + begin; token < round.begin + end; ++token) {
      if (index_->Rows(owner, token).empty()) continue;
      std::byte* to = is_mate ? op_.heap(owner) + TargetOf(round, pitch, owner, token)
                              : op_.own_heap() + staged_at(token);
      WriteRankPartial(shape_, rank_.rank, params_, pitch, *index_, owner, token, sum, to);
    }
  });
  if (owner == rank_.rank) return Status::Ok();
  if (is_mate) return op_.Signal(owner, Channel::kLlCombine, round.signal);

  Command command{};
  command.op = Op::kWrite;
  command.dst_rank = owner;
  command.channel = Channel::kLlCombine;
  command.epoch = round.signal;
  command.length_bytes = pitch.rank_pitch;
  uint32_t num_slots = 0;
  for (int64_t token = round.begin; token < round.end && pitch.rank_pitch > 0; ++token) {
    if (index_->Rows(owner, token).empty()) continue;
    command.local_offset = staged_at(token);
    command.remote_offset = TargetOf(round, pitch, owner, token);
    command.value = static_cast<uint32_t>(token);
    JAX_EP_RETURN_IF_ERROR(op_.Push(command));
    ++num_slots;
  }
  command.op = Op::kSignal;
  command.length_bytes = command.local_offset = command.remote_offset = 0;
  command.value = num_slots;
  JAX_EP_RETURN_IF_ERROR(op_.Push(command));
  op_.KickProxy();
  CountSent(rank_, num_slots, num_slots * pitch.rank_pitch);
  return Status::Ok();
}

Status LlCombine::Send(uint64_t* epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckCombineSend(shape_, params_)));
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, BeginCall(op_, kLlCombineKind));
  *epoch = op_.epoch();
  return SendRounds(op_, kLlCombineKind, slot, layout_.ll_rounds, params_, keeps_inputs_,
                    [&](const Round& round) { return SendRound(round); });
}

Status LlCombine::SendRound(const Round& round) {
  if (round.is_first) {
    JAX_EP_ASSIGN_OR_RETURN(index_, RowIndex::Build(op_, params_.num_tokens, params_.recv_src));
  }
  const PartialPitch pitch =
      PartialPitch::Make(shape_, params_.y != nullptr, !params_.pair_scalars.empty());
  JAX_EP_RETURN_IF_ERROR(op_.WaitAll(Channel::kLlCombineDone, round.free_at));
  const TracePhase phase(rank_.trace, "send partial sums");
  // Other nodes first: theirs is the longer way.
  for (const bool wants_mates : {false, true}) {
    for (uint32_t step = 0; step < shape_.num_ranks; ++step) {
      const uint32_t owner = (rank_.rank + step) % shape_.num_ranks;
      if (!op_.is_active(owner) || op_.is_mate(owner) != wants_mates) continue;
      JAX_EP_RETURN_IF_ERROR(SendTo(round, pitch, owner));
    }
  }
  return Status::Ok();
}

Status LlCombine::Receive(uint64_t epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, OpenCall(op_, kLlCombineKind, epoch));
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckCombineReceive(shape_, params_)));
  JAX_EP_RETURN_IF_ERROR(CheckSlots(op_, params_.send_slot, rows_per_rank()));
  if (keeps_inputs_) {
    JAX_EP_RETURN_IF_ERROR(TakeInputs(op_, rank_.ll_combine_sets[slot.set], params_));
    JAX_EP_RETURN_IF_ERROR(op_.Require(CheckCombineSend(shape_, params_)));
  }
  JAX_EP_RETURN_IF_ERROR(ReceiveRounds(
      op_, kLlCombineKind, slot, epoch, layout_.ll_rounds, params_.num_tokens,
      [&](const Round& round) { return SendRound(round); },
      [&](const Round& round) { return ReceiveRound(round); }));
  EndCall(op_, kLlCombineKind, slot.set);
  CountCombine(rank_);
  return Status::Ok();
}

Status LlCombine::ReceiveRound(const Round& round) {
  JAX_EP_RETURN_IF_ERROR(op_.WaitAll(Channel::kLlCombine, round.signal));
  const PartialPitch pitch =
      PartialPitch::Make(shape_, params_.out != nullptr, !params_.pair_scalars_out.empty());
  std::vector<Contribution> contributions(shape_.num_ranks);
  for (uint32_t peer = 0; peer < shape_.num_ranks; ++peer) {
    contributions[peer] = {.kind = Term::Kind::kRankPartial,
                           .rows = op_.own_heap() + layout_.ll_comb.At(round.set),
                           .pitch = pitch.rank_pitch,
                           .num_slots = layout_.ll_slots,
                           .scalars_offset = pitch.scalars_offset};
  }
  {
    const TracePhase phase(rank_.trace, "sum partial sums");
    SumTokens(rank_, params_, round.begin, round.end, rows_per_rank(), contributions);
  }
  return op_.SignalAll(Channel::kLlCombineDone, round.done);
}

}  // namespace

Status RunLlCombine(Rank& rank, const CombineParams& params) {
  return RunBothHalves(LlCombine(rank, "ll combine", params, /*is_whole=*/true));
}

Status StartLlCombine(Rank& rank, const CombineParams& params, uint64_t* epoch) {
  return LlCombine(rank, "ll combine start", params, /*is_whole=*/false).Send(epoch);
}

Status FinishLlCombine(Rank& rank, const CombineParams& params, uint64_t epoch) {
  return LlCombine(rank, "ll combine done", params, /*is_whole=*/false).Receive(epoch);
}

}  // namespace jax_ep
