// HT combine: rows back to their tokens' owners. In one process the owner reads the rows in place;
// else each rank stages its partials, owners read those of node-mates, and for owners in other
// nodes the rank of equal local index sums the node and sends one row per token.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "kernels/cpu/huge_pages.h"
#include "kernels/cpu/internode.h"
#include "kernels/cpu/ll_combine.h"
#include "kernels/cpu/partials.h"
#include "kernels/cpu/published.h"
#include "kernels/cpu/rounds.h"
#include "kernels/cpu/row_index.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/sync.h"
#include "kernels/launch.h"

namespace jax_ep {
namespace {

// One HT combine call, or one half of it.
class HtCombine {
 public:
  HtCombine(Rank& rank, const CombineParams& params, bool is_whole)
      : op_(rank, "combine"),
        rank_(rank),
        shape_(rank.shape),
        layout_(rank.layout),
        params_(params),
        keeps_inputs_(layout_.combine_rounds.is_split && !is_whole),
        is_whole_(is_whole || layout_.combine_rounds.is_split),
        is_direct_(is_whole_ && IsNodeInProcess(rank)) {}

  Status Send(uint64_t* epoch);
  Status Receive(uint64_t epoch);

 private:
  uint64_t StageOf(uint32_t source) const { return layout_.reduce_stage.At(set_, source); }
  uint64_t StageRowsOf(uint32_t source) const { return StageOf(source) + layout_.presence_bytes; }
  // Whether the partials for `source` are staged (else it reads y in place).
  bool IsStagedFor(uint32_t source) const {
    if (!op_.is_mate(source)) return true;
    return source == rank_.rank ? !is_whole_ : !is_direct_;
  }

  PublishedBuffers* PublishedBy(uint32_t mate) const {
    return HeapAt<PublishedBuffers>(op_.heap(mate), layout_.combine_published.At(set_));
  }
  const float* RowWeights() const {
    return params_.row_weights.empty() ? nullptr : params_.row_weights.data();
  }

  Status SendRound(const Round& round);
  Status ReceiveRound(const Round& round);
  Status StagePartials(const Round& round);
  Status SendNodePartials(const Round& round, uint32_t owner);
  // `row`: the token's, from the first of the round.
  void WriteNodePartial(uint32_t owner, uint64_t row, TokenSum& sum, std::byte* to) const;
  // Where each rank's contribution is; `readings` must live while those are read.
  Status Locate(const Round& round, std::vector<Contribution>& contributions,
                std::vector<int32_t>& maps, std::vector<Reading>& readings) const;
  Status Sum(const Round& round);

  Operation op_;
  Rank& rank_;
  const GroupShape& shape_;
  const HeapLayout& layout_;
  CombineParams params_;
  const bool keeps_inputs_;  // from the start of a split call to its done
  const bool is_whole_;
  const bool is_direct_;  // owners in this node read this rank's y, not its stage
  uint32_t set_ = 0;
  std::optional<RowIndex> index_;
  PartialPitch pitch_;
  Publication publication_;
};

Status HtCombine::StagePartials(const Round& round) {
  bool stages_any = false;
  for (uint32_t source = 0; source < shape_.num_ranks; ++source) {
    stages_any |= op_.is_active(source) && IsStagedFor(source);
  }
  if (!stages_any) return Status::Ok();
  const TracePhase phase(rank_.trace, "stage partial sums");
  if (!index_.has_value()) {
    JAX_EP_ASSIGN_OR_RETURN(index_, RowIndex::Build(op_, params_.num_tokens, params_.recv_src));
  }
  const RowIndex& index = *index_;
  const int64_t num_tokens = round.end - round.begin;
  const bool is_streamed =
      shape_.num_ranks * static_cast<uint64_t>(num_tokens) * pitch_.rank_pitch >= kStreamFromBytes;
  for (uint32_t step = 0; step < shape_.num_ranks; ++step) {
    const uint32_t source = (rank_.rank + step) % shape_.num_ranks;
    if (!op_.is_active(source) || !IsStagedFor(source)) continue;
    JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
    auto* presence = HeapAt<uint8_t>(op_.own_heap(), StageOf(source));
    std::byte* rows = op_.own_heap() + StageRowsOf(source);
    rank_.parallel_for(num_tokens, [&](int64_t begin, int64_t end) {
      TokenSum sum(shape_);
      std::vector<std::byte> partial(is_streamed ? pitch_.rank_pitch : 0);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = round.begin + i;
        presence[i] = index.Rows(source, token).empty() ? 0 : 1;
        if (presence[i] == 0) continue;
        std::byte* row = rows + static_cast<uint64_t>(i) * pitch_.rank_pitch;
        WriteRankPartial(shape_, rank_.rank, params_, pitch_, index, source, token, sum,
                         is_streamed ? partial.data() : row);
        if (is_streamed) StreamCopy(row, partial.data(), partial.size());
      }
      if (is_streamed) StreamFence();
    });
  }
  return Status::Ok();
}

// The sum over this node's ranks of a token of another node's rank, and all of their pair scalars.
void HtCombine::WriteNodePartial(uint32_t owner, uint64_t row_index, TokenSum& sum,
                                 std::byte* to) const {
  std::array<Term, kMaxTopK> terms;
  uint32_t num_terms = 0;
  for (uint32_t local = 0; local < shape_.node_size; ++local) {
    const uint32_t mate = rank_.node_begin() + local;
    if (!op_.is_active(mate)) continue;
    if (HeapAt<uint8_t>(op_.heap(mate), StageOf(owner))[row_index] == 0) continue;
    const std::byte* row = op_.heap(mate) + StageRowsOf(owner) + row_index * pitch_.rank_pitch;
    if (num_terms < kMaxTopK) {
      terms[num_terms++] = {.row = row, .rank = mate, .kind = Term::Kind::kRankPartial};
    }
    if (!params_.pair_scalars.empty()) {
      std::memcpy(to + pitch_.scalars_offset + local * shape_.top_k * sizeof(float),
                  row + pitch_.scalars_offset, shape_.top_k * sizeof(float));
    }
  }
  if (params_.y != nullptr) sum.Evaluate({terms.data(), num_terms}, SumLevel::kNode, to);
}

Status HtCombine::SendNodePartials(const Round& round, uint32_t owner) {
  const TracePhase phase(rank_.trace, "pack partial sums", owner);
  const uint32_t owner_node = owner / shape_.node_size;
  PackedStream stream(op_, Channel::kCombine, round.signal, owner,
                      layout_.comb_send.At(set_, owner_node),
                      layout_.comb_recv.At(set_, rank_.node()));
  std::vector<uint64_t> tokens;  // that have a partial in this node; the owner knows the same
  for (uint64_t token = 0; token < static_cast<uint64_t>(round.end - round.begin); ++token) {
    bool is_present = false;
    for (uint32_t local = 0; local < shape_.node_size; ++local) {
      if (!op_.is_active(rank_.node_begin() + local)) continue;
      std::byte* heap = op_.heap(rank_.node_begin() + local);
      is_present |= HeapAt<uint8_t>(heap, StageOf(owner))[token] != 0;
    }
    if (is_present) tokens.push_back(token);
  }
  const uint64_t pitch = pitch_.node_pitch;
  const uint64_t chunk = pitch == 0 ? 0 : std::max<uint64_t>(1, kWriteChunkBytes / pitch);
  for (uint64_t first = 0; first < tokens.size() && chunk > 0; first += chunk) {
    JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
    const uint64_t count = std::min(chunk, tokens.size() - first);
    std::byte* to = stream.end();
    rank_.parallel_for(static_cast<int64_t>(count), [&](int64_t begin, int64_t end) {
      TokenSum sum(shape_);
      for (auto i = static_cast<uint64_t>(begin); i < static_cast<uint64_t>(end); ++i) {
        WriteNodePartial(owner, tokens[first + i], sum, to + i * pitch);
      }
    });
    JAX_EP_RETURN_IF_ERROR(stream.Advance(count * pitch));
  }
  CountSent(rank_, tokens.size(), stream.num_bytes());
  return stream.Finish();
}

Status HtCombine::Send(uint64_t* epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckCombineSend(shape_, params_)));
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, BeginCall(op_, kCombineKind));
  *epoch = op_.epoch();
  return SendRounds(op_, kCombineKind, slot, layout_.combine_rounds, params_, keeps_inputs_,
                    [&](const Round& round) { return SendRound(round); });
}

Status HtCombine::SendRound(const Round& round) {
  set_ = round.set;
  pitch_ = PartialPitch::Make(shape_, params_.y != nullptr, !params_.pair_scalars.empty());
  JAX_EP_RETURN_IF_ERROR(op_.WaitMates(Channel::kReduceDone, round.free_at));
  JAX_EP_RETURN_IF_ERROR(op_.WaitRails(Channel::kCombineDone, round.free_at));

  if (is_direct_ && round.is_first) {
    publication_.Open(PublishedBy(rank_.rank), params_.y, RowWeights(),
                      params_.pair_scalars.data());
  }
  if (is_direct_ && shape_.num_nodes() == 1) {
    return op_.SignalMates(Channel::kReduce, round.signal);
  }
  JAX_EP_RETURN_IF_ERROR(StagePartials(round));
  JAX_EP_RETURN_IF_ERROR(op_.SignalMates(Channel::kReduce, round.signal));
  if (shape_.num_nodes() == 1) return Status::Ok();
  JAX_EP_RETURN_IF_ERROR(op_.WaitMates(Channel::kReduce, round.signal));
  for (uint32_t step = 1; step < shape_.num_nodes(); ++step) {
    const uint32_t node = (rank_.node() + step) % shape_.num_nodes();
    const uint32_t owner = node * shape_.node_size + rank_.local_rank();
    if (op_.is_active(owner)) JAX_EP_RETURN_IF_ERROR(SendNodePartials(round, owner));
  }
  return Status::Ok();
}

// `maps` [M * tokens] gets, for each other node, the packed row of each token of the round that it
// has a part of.
Status HtCombine::Locate(const Round& round, std::vector<Contribution>& contributions,
                         std::vector<int32_t>& maps, std::vector<Reading>& readings) const {
  const auto tokens = static_cast<uint64_t>(round.end - round.begin);
  const auto first_token = static_cast<uint64_t>(round.begin);
  const auto rows_per_rank = static_cast<uint64_t>(params_.recv_rows);
  if (shape_.num_nodes() > 1) {
    maps.assign(shape_.num_nodes() * tokens, -1);
    std::vector<int32_t> num_rows(shape_.num_nodes(), 0);
    const auto slots = params_.send_slot.subspan(first_token * shape_.top_k, tokens * shape_.top_k);
    for (uint64_t cell = 0; cell < slots.size(); ++cell) {
      const int32_t slot = slots[cell];
      if (slot < 0) continue;
      const uint64_t node = static_cast<uint64_t>(slot) / rows_per_rank / shape_.node_size;
      int32_t& packed = maps[node * tokens + cell / shape_.top_k];
      if (packed < 0) packed = num_rows[node]++;
    }
  }
  for (uint32_t peer = 0; peer < shape_.num_ranks; ++peer) {
    Contribution& from = contributions[peer];
    from.first_token = first_token;
    if (!op_.is_active(peer)) continue;
    if (!op_.is_mate(peer)) {
      const uint32_t node = peer / shape_.node_size;
      from.kind = Term::Kind::kNodePartial;
      from.rows = op_.own_heap() + layout_.comb_recv.At(set_, node);
      from.pitch = pitch_.node_pitch;
      from.map = maps.data() + node * tokens;
      from.scalars_offset =
          pitch_.scalars_offset + peer % shape_.node_size * shape_.top_k * sizeof(float);
    } else if (peer == rank_.rank && is_whole_) {
      from = {.kind = Term::Kind::kRow,
              .rows = params_.y,
              .row_weights = RowWeights(),
              .pair_scalars = params_.pair_scalars.data()};
    } else if (is_direct_) {
      const Reading& reading = readings.emplace_back(PublishedBy(peer));
      if (!reading.is_open()) return op_.OwnerLeft(peer);
      from = {.kind = Term::Kind::kRow,
              .rows = reading.buffers().rows,
              .row_weights = reading.buffers().weights,
              .pair_scalars = reading.buffers().pair_scalars};
    } else {
      from = {.kind = Term::Kind::kRankPartial,
              .rows = op_.heap(peer) + StageRowsOf(rank_.rank),
              .pitch = pitch_.rank_pitch,
              .first_token = first_token,
              .scalars_offset = pitch_.scalars_offset};
    }
  }
  return Status::Ok();
}

Status HtCombine::Sum(const Round& round) {
  const TracePhase phase(rank_.trace, "sum rows");
  std::vector<Contribution> contributions(shape_.num_ranks);
  std::vector<int32_t> maps;
  std::vector<Reading> readings;
  JAX_EP_RETURN_IF_ERROR(Locate(round, contributions, maps, readings));
  SumTokens(rank_, params_, round.begin, round.end, static_cast<uint64_t>(params_.recv_rows),
            contributions);
  return Status::Ok();
}

Status HtCombine::Receive(uint64_t epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, OpenCall(op_, kCombineKind, epoch));
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckCombineReceive(shape_, params_)));
  JAX_EP_RETURN_IF_ERROR(
      CheckSlots(op_, params_.send_slot, static_cast<uint64_t>(params_.recv_rows)));
  if (rank_.uses_huge_pages) {
    PreferHugePages(params_.out, static_cast<uint64_t>(params_.num_tokens) * shape_.hidden *
                                     ElemBytes(shape_.elem_type));
  }
  if (keeps_inputs_) {
    JAX_EP_RETURN_IF_ERROR(TakeInputs(op_, rank_.combine_sets[slot.set], params_));
    JAX_EP_RETURN_IF_ERROR(op_.Require(CheckCombineSend(shape_, params_)));
  }
  Rounds rounds = layout_.combine_rounds;
  // Nothing limits a round of which no rank writes anything.
  if (is_direct_ && shape_.num_nodes() == 1) rounds.tokens = shape_.max_tokens;
  JAX_EP_RETURN_IF_ERROR(ReceiveRounds(
      op_, kCombineKind, slot, epoch, rounds, params_.num_tokens,
      [&](const Round& round) { return SendRound(round); },
      [&](const Round& round) { return ReceiveRound(round); }));
  EndCall(op_, kCombineKind, slot.set);
  CountCombine(rank_);
  return Status::Ok();
}

Status HtCombine::ReceiveRound(const Round& round) {
  set_ = round.set;
  pitch_ = PartialPitch::Make(shape_, params_.out != nullptr, !params_.pair_scalars_out.empty());
  JAX_EP_RETURN_IF_ERROR(op_.WaitMates(Channel::kReduce, round.signal));
  JAX_EP_RETURN_IF_ERROR(op_.WaitRails(Channel::kCombine, round.signal));
  JAX_EP_RETURN_IF_ERROR(Sum(round));
  JAX_EP_RETURN_IF_ERROR(op_.SignalMates(Channel::kReduceDone, round.done));
  JAX_EP_RETURN_IF_ERROR(op_.SignalRails(Channel::kCombineDone, round.done));
  // Direct: XLA may reuse y when this call returns.
  if (is_direct_ && round.is_last) return op_.WaitMates(Channel::kReduceDone, round.done);
  return Status::Ok();
}

}  // namespace

Status RunCombine(Rank& rank, const CombineParams& params) {
  if (params.mode == Mode::kLl) return RunLlCombine(rank, params);
  return RunBothHalves(HtCombine(rank, params, /*is_whole=*/true));
}

Status StartCombine(Rank& rank, const CombineParams& params, uint64_t* epoch) {
  if (params.mode == Mode::kLl) return StartLlCombine(rank, params, epoch);
  return HtCombine(rank, params, /*is_whole=*/false).Send(epoch);
}

Status FinishCombine(Rank& rank, const CombineParams& params, uint64_t epoch) {
  if (params.mode == Mode::kLl) return FinishLlCombine(rank, params, epoch);
  return HtCombine(rank, params, /*is_whole=*/false).Receive(epoch);
}

}  // namespace jax_ep
