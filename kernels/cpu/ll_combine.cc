// LL combine: every rank writes its partial of each token straight into the slot [rank][token] of
// the token's owner, by store inside the node, by one WRITE per partial outside it.
#include "kernels/cpu/ll_combine.h"

#include <string>
#include <vector>

#include "kernels/cpu/partials.h"
#include "kernels/cpu/row_index.h"
#include "kernels/cpu/sync.h"

namespace jax_ep {
namespace {

class LlCombine {
 public:
  LlCombine(Rank& rank, std::string_view name, const CombineParams& params)
      : op_(rank, name), rank_(rank), shape_(rank.shape), layout_(rank.layout), params_(params) {}

  Status Send(uint64_t* epoch);
  Status Receive(uint64_t epoch);

 private:
  Status SendTo(const RowIndex& index, const PartialPitch& pitch, uint32_t owner);

  Operation op_;
  Rank& rank_;
  const GroupShape& shape_;
  const HeapLayout& layout_;
  const CombineParams& params_;
  uint32_t set_ = 0;
};

Status LlCombine::SendTo(const RowIndex& index, const PartialPitch& pitch, uint32_t owner) {
  const bool is_mate = op_.is_mate(owner);
  const uint64_t local_block =
      is_mate ? layout_.ll_comb.At(set_, rank_.rank) : layout_.ll_comb_send.At(set_, owner);
  std::byte* block = (is_mate ? op_.heap(owner) : op_.own_heap()) + local_block;
  rank_.parallel_for(params_.num_tokens, [&](int64_t begin, int64_t end) {
    TokenSum sum(shape_);
    for (int64_t token = begin; token < end; ++token) {
      WriteRankPartial(shape_, rank_.rank, params_, pitch, index, owner, token, sum,
                       block + static_cast<uint64_t>(token) * pitch.rank_pitch);
    }
  });
  if (owner == rank_.rank) return Status::Ok();
  if (is_mate) return op_.Signal(owner, Channel::kLlCombine, op_.epoch());

  Command command{};
  command.op = Op::kWrite;
  command.dst_rank = owner;
  command.channel = Channel::kLlCombine;
  command.epoch = op_.epoch();
  command.length_bytes = pitch.rank_pitch;
  uint32_t num_slots = 0;
  for (int64_t token = 0; token < params_.num_tokens && pitch.rank_pitch > 0; ++token) {
    if (index.Rows(owner, token).empty()) continue;
    const uint64_t row_offset = static_cast<uint64_t>(token) * pitch.rank_pitch;
    command.local_offset = local_block + row_offset;
    command.remote_offset = layout_.ll_comb.At(set_, rank_.rank) + row_offset;
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
  if (const std::string wrong = CheckCombineSend(shape_, params_); !wrong.empty()) {
    return op_.Invalid(wrong);
  }
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, BeginCall(op_, kLlCombineKind));
  set_ = slot.set;
  *epoch = op_.epoch();
  JAX_EP_ASSIGN_OR_RETURN(const RowIndex index,
                          RowIndex::Build(op_, params_.num_tokens, params_.recv_src));
  const PartialPitch pitch =
      PartialPitch::Make(shape_, params_.y != nullptr, !params_.pair_scalars.empty());
  JAX_EP_RETURN_IF_ERROR(op_.WaitAll(Channel::kLlCombineDone, slot.reusable_at));
  const TracePhase phase(rank_.trace, "send partial sums");
  // Other nodes first: theirs is the longer way.
  for (const bool wants_mates : {false, true}) {
    for (uint32_t step = 0; step < shape_.num_ranks; ++step) {
      const uint32_t owner = (rank_.rank + step) % shape_.num_ranks;
      if (!op_.is_active(owner) || op_.is_mate(owner) != wants_mates) continue;
      JAX_EP_RETURN_IF_ERROR(SendTo(index, pitch, owner));
    }
  }
  return Status::Ok();
}

Status LlCombine::Receive(uint64_t epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, OpenCall(op_, kLlCombineKind, epoch));
  set_ = slot.set;
  const uint64_t rows_per_rank =
      RowsPerRank(shape_, Mode::kLl, params_.num_tokens, params_.recv_rows);
  if (const std::string wrong = CheckCombineReceive(shape_, params_); !wrong.empty()) {
    return op_.Invalid(wrong);
  }
  JAX_EP_RETURN_IF_ERROR(CheckSlots(op_, params_.send_slot, rows_per_rank));
  JAX_EP_RETURN_IF_ERROR(op_.WaitAll(Channel::kLlCombine, epoch));

  const PartialPitch pitch =
      PartialPitch::Make(shape_, params_.out != nullptr, !params_.pair_scalars_out.empty());
  std::vector<Contribution> contributions(shape_.num_ranks);
  for (uint32_t peer = 0; peer < shape_.num_ranks; ++peer) {
    contributions[peer] = {.kind = Term::Kind::kRankPartial,
                           .rows = op_.own_heap() + layout_.ll_comb.At(set_, peer),
                           .pitch = pitch.rank_pitch,
                           .scalars_offset = pitch.scalars_offset};
  }
  {
    const TracePhase phase(rank_.trace, "sum partial sums");
    SumTokens(rank_, params_, rows_per_rank, contributions);
  }
  JAX_EP_RETURN_IF_ERROR(op_.SignalAll(Channel::kLlCombineDone, NextDoneSeq(op_, kLlCombineKind)));
  EndCall(op_, kLlCombineKind, set_);
  CountCombine(rank_);
  return Status::Ok();
}

}  // namespace

Status RunLlCombine(Rank& rank, const CombineParams& params) {
  return RunBothHalves(LlCombine(rank, "ll combine", params));
}

Status StartLlCombine(Rank& rank, const CombineParams& params, uint64_t* epoch) {
  return LlCombine(rank, "ll combine start", params).Send(epoch);
}

Status FinishLlCombine(Rank& rank, const CombineParams& params, uint64_t epoch) {
  return LlCombine(rank, "ll combine done", params).Receive(epoch);
}

}  // namespace jax_ep
