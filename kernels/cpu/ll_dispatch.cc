// LL dispatch: every rank writes its rows straight into the slot [source][token of the round] of
// each destination's heap, once per destination rank: by store inside the node, by one WRITE per
// row outside it. With routing aboard, each rank gets all expert ids and makes the plan from them.
#include "kernels/cpu/ll_dispatch.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cpu/plan_tables.h"
#include "kernels/cpu/rounds.h"
#include "kernels/cpu/row_index.h"
#include "kernels/cpu/sync.h"
#include "kernels/cpu/unpack.h"
#include "kernels/launch.h"

namespace jax_ep {
namespace {

// First 16 bytes of a routed block. A difference means that the ranks do not run the same call.
struct RoutedHeader {
  int32_t num_tokens;
  int32_t unused[3];
};
static_assert(sizeof(RoutedHeader) == kWireUnitBytes);

// One LL dispatch call, or one half of it. `plan` is null when the caller brings a plan; then
// `params` has send_slot and recv_src, else they are the plan's outputs.
class LlDispatch {
 public:
  LlDispatch(Rank& rank, std::string_view name, const PlanParams* plan,
             const DispatchParams& params, bool is_whole)
      : op_(rank, name),
        rank_(rank),
        shape_(rank.shape),
        layout_(rank.layout),
        plan_(plan),
        params_(params),
        keeps_inputs_(layout_.ll_rounds.is_split && !is_whole),
        num_tokens_(static_cast<uint64_t>(params.num_tokens)),
        row_pitch_(RowBytes(shape_.hidden, shape_.elem_type)),
        cells_bytes_(AlignUp(num_tokens_ * shape_.top_k * sizeof(int32_t), kWireUnitBytes)) {}

  Status Send(uint64_t* epoch);
  Status Receive(uint64_t epoch);

 private:
  // A block of ll_disp or ll_disp_send: meta (header and expert ids if routed, then weights), which
  // comes in the first round, then rows: of ll_disp by the token of the round, of ll_disp_send by
  // the token.
  uint64_t RowOffset(uint64_t row) const { return layout_.ll_meta_bytes + row * row_pitch_; }
  const int32_t* IdsOf(uint32_t source) const {
    return HeapAt<int32_t>(op_.own_heap(), layout_.ll_disp.At(set_, source) + sizeof(RoutedHeader));
  }
  uint64_t weights_offset() const {
    return plan_ != nullptr ? sizeof(RoutedHeader) + cells_bytes_ : 0;
  }
  bool is_plan_alone() const {
    return plan_ != nullptr && params_.x == nullptr && params_.weights.empty() &&
           params_.recv_x == nullptr && params_.recv_weights.empty();
  }

  std::string CheckRoutedSend() const;
  Status CheckSend();
  Status SendRound(const Round& round);
  Status ReceiveRound(const Round& round, const DispatchParams& params);
  // The destination ranks of each token, without repeats.
  void FindTargets();
  template <typename Visit>
  void ForTokensOf(const Round& round, uint32_t target, Visit&& visit) const;
  void WriteMeta(std::byte* block) const;
  void WriteRow(std::byte* row, uint64_t token) const;
  Status SendToRemotes(const Round& round);
  Status CheckHeaders();
  void MakePlan();

  Operation op_;
  Rank& rank_;
  const GroupShape& shape_;
  const HeapLayout& layout_;
  const PlanParams* plan_;
  DispatchParams params_;
  const bool keeps_inputs_;  // from the start of a split call to its done
  const uint64_t num_tokens_;
  const uint64_t row_pitch_;
  const uint64_t cells_bytes_;  // of [T, K] ids or weights
  uint32_t set_ = 0;
  std::vector<int32_t> targets_;  // [T * K] ranks, -1 for none or a repeat
  std::optional<RowIndex> index_;
};

void LlDispatch::FindTargets() {
  const uint64_t top_k = shape_.top_k;
  const uint64_t rows_per_rank = shape_.num_ranks * num_tokens_;
  targets_.assign(num_tokens_ * top_k, -1);
  for (uint64_t token = 0; token < num_tokens_; ++token) {
    int32_t* targets = targets_.data() + token * top_k;
    for (uint64_t k = 0; k < top_k; ++k) {
      int32_t target = -1;
      if (plan_ != nullptr) {
        const int32_t expert = plan_->topk_idx[token * top_k + k];
        if (expert >= 0 && static_cast<uint32_t>(expert) < shape_.num_experts) {
          target = expert / static_cast<int32_t>(shape_.experts_per_rank());
        }
      } else if (const int32_t slot = params_.send_slot[token * top_k + k]; slot >= 0) {
        target = static_cast<int32_t>(static_cast<uint64_t>(slot) / rows_per_rank);
      }
      if (std::find(targets, targets + k, target) == targets + k) targets[k] = target;
    }
  }
}

template <typename Visit>
void LlDispatch::ForTokensOf(const Round& round, uint32_t target, Visit&& visit) const {
  if (params_.x == nullptr) return;
  const auto wanted = static_cast<int32_t>(target);
  const uint64_t end = static_cast<uint64_t>(round.end) * shape_.top_k;
  for (uint64_t cell = static_cast<uint64_t>(round.begin) * shape_.top_k; cell < end; ++cell) {
    if (targets_[cell] == wanted) visit(cell / shape_.top_k);
  }
}

void LlDispatch::WriteMeta(std::byte* block) const {
  if (plan_ != nullptr) {
    const RoutedHeader header{.num_tokens = static_cast<int32_t>(num_tokens_), .unused = {}};
    std::memcpy(block, &header, sizeof(header));
    std::copy(plan_->topk_idx.begin(), plan_->topk_idx.end(),
              HeapAt<int32_t>(block, sizeof(header)));
  }
  std::copy(params_.weights.begin(), params_.weights.end(), HeapAt<float>(block, weights_offset()));
}

void LlDispatch::WriteRow(std::byte* row, uint64_t token) const {
  const uint64_t row_bytes = shape_.hidden * ElemBytes(shape_.elem_type);
  std::memcpy(row, params_.x + token * row_bytes, row_bytes);
}

// One copy of every row that leaves the node, then one command per (row, rank). The slot of a row
// is its token, that of the meta block T; the count message ends the epoch for the receiver.
Status LlDispatch::SendToRemotes(const Round& round) {
  const TracePhase phase(rank_.trace, "send rows to other nodes");
  const uint64_t weights_bytes = params_.weights.empty() ? 0 : cells_bytes_;
  const uint64_t meta_bytes = round.is_first ? weights_offset() + weights_bytes : 0;
  const uint64_t local_block = layout_.ll_disp_send.At(set_);
  const uint64_t remote_block = layout_.ll_disp.At(set_, rank_.rank);
  std::byte* stage = op_.own_heap() + local_block;
  if (round.is_first) WriteMeta(stage);
  std::vector<bool> is_staged(num_tokens_, false);
  for (uint32_t step = 1; step < shape_.num_ranks; ++step) {
    const uint32_t peer = (rank_.rank + step) % shape_.num_ranks;
    if (op_.is_mate(peer) || !op_.is_active(peer)) continue;
    Command command{};
    command.op = Op::kWrite;
    command.dst_rank = peer;
    command.channel = Channel::kLlDispatch;
    command.epoch = round.signal;
    uint32_t num_slots = 0;
    Status status;
    if (meta_bytes > 0) {
      command.length_bytes = meta_bytes;
      command.local_offset = local_block;
      command.remote_offset = remote_block;
      command.value = static_cast<uint32_t>(num_tokens_);
      JAX_EP_RETURN_IF_ERROR(op_.Push(command));
      ++num_slots;
    }
    command.length_bytes = row_pitch_;
    ForTokensOf(round, peer, [&](uint64_t token) {
      if (!status.ok()) return;
      if (!is_staged[token]) WriteRow(stage + RowOffset(token), token);
      is_staged[token] = true;
      command.local_offset = local_block + RowOffset(token);
      command.remote_offset = remote_block + RowOffset(token - static_cast<uint64_t>(round.begin));
      command.value = static_cast<uint32_t>(token);
      status = op_.Push(command);
      ++num_slots;
    });
    JAX_EP_RETURN_IF_ERROR(status);
    command.op = Op::kSignal;
    command.length_bytes = command.local_offset = command.remote_offset = 0;
    command.value = num_slots;
    JAX_EP_RETURN_IF_ERROR(op_.Push(command));
    op_.KickProxy();
    const uint64_t num_rows = num_slots - (meta_bytes > 0 ? 1 : 0);
    CountSent(rank_, num_rows, meta_bytes + num_rows * row_pitch_);
  }
  return Status::Ok();
}

std::string LlDispatch::CheckRoutedSend() const {
  if (std::string wrong = CheckTokens(shape_, Mode::kLl, params_.num_tokens); !wrong.empty()) {
    return wrong;
  }
  const uint64_t cells = num_tokens_ * shape_.top_k;
  if (params_.num_tokens != plan_->num_tokens || plan_->topk_idx.size() != cells ||
      (!params_.weights.empty() && params_.weights.size() != cells)) {
    return "topk_idx or weights do not have T * K = " + std::to_string(cells) + " elements";
  }
  return "";
}

Status LlDispatch::CheckSend() {
  if (plan_ != nullptr) return op_.Require(CheckRoutedSend());
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckDispatchSend(shape_, params_)));
  return CheckSlots(op_, params_.send_slot, shape_.num_ranks * num_tokens_);
}

Status LlDispatch::Send(uint64_t* epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_RETURN_IF_ERROR(CheckSend());
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, BeginCall(op_, kLlDispatchKind));
  *epoch = op_.epoch();
  if (plan_ != nullptr) JAX_EP_RETURN_IF_ERROR(CheckIds(op_, plan_->topk_idx));
  return SendRounds(op_, kLlDispatchKind, slot, layout_.ll_rounds, params_, keeps_inputs_,
                    [&](const Round& round) { return SendRound(round); });
}

Status LlDispatch::SendRound(const Round& round) {
  set_ = round.set;
  if (round.is_first) FindTargets();
  JAX_EP_RETURN_IF_ERROR(op_.WaitAll(Channel::kLlDispatchDone, round.free_at));
  if (shape_.num_nodes() > 1) JAX_EP_RETURN_IF_ERROR(SendToRemotes(round));
  const TracePhase phase(rank_.trace, "write rows");
  for (uint32_t step = 0; step < shape_.node_size; ++step) {
    const uint32_t mate = rank_.node_begin() + (rank_.local_rank() + step) % shape_.node_size;
    if (!op_.is_active(mate)) continue;
    std::byte* block = op_.heap(mate) + layout_.ll_disp.At(set_, rank_.rank);
    if (round.is_first) WriteMeta(block);
    ForTokensOf(round, mate, [&](uint64_t token) {
      WriteRow(block + RowOffset(token - static_cast<uint64_t>(round.begin)), token);
    });
    if (mate != rank_.rank) {
      JAX_EP_RETURN_IF_ERROR(op_.Signal(mate, Channel::kLlDispatch, round.signal));
    }
  }
  return Status::Ok();
}

Status LlDispatch::CheckHeaders() {
  for (uint32_t source = 0; source < shape_.num_ranks; ++source) {
    if (!op_.is_active(source)) continue;
    const auto* header = HeapAt<RoutedHeader>(op_.own_heap(), layout_.ll_disp.At(set_, source));
    if (static_cast<uint64_t>(header->num_tokens) == num_tokens_) continue;
    return op_.Fail(FailedPrecondition(
        op_.rank().NameOf(source) +
        " runs another call: got T = " + std::to_string(header->num_tokens) +
        ", expected T = " + std::to_string(num_tokens_) + "; all ranks must run the same program"));
  }
  return Status::Ok();
}

// All ranks' expert ids have arrived: the same plan as the HT exchange makes.
void LlDispatch::MakePlan() {
  const TracePhase phase(rank_.trace, "assign rows");
  const uint32_t num_ranks = shape_.num_ranks;
  const uint64_t cells = num_tokens_ * shape_.top_k;
  const uint64_t codes_ints = SortedCodesInts(cells, num_ranks);
  const uint64_t ints_per_source = shape_.num_experts + codes_ints;
  if (rank_.scratch.size() < num_ranks * ints_per_source) {
    rank_.scratch.resize(num_ranks * ints_per_source);
  }
  std::vector<SourceRouting> sources(num_ranks);
  LocalDrops own_drops;
  const int32_t* own_codes = nullptr;
  for (uint32_t source = 0; source < num_ranks; ++source) {
    int32_t* counts = rank_.scratch.data() + source * ints_per_source;
    int32_t* codes = counts + shape_.num_experts;
    const uint64_t num_ids = op_.is_active(source) ? cells : 0;
    const LocalDrops drops =
        SortPairs(shape_, plan_->layout, {IdsOf(source), num_ids}, counts, codes);
    sources[source] = {.counts = counts,
                       .codes = codes + SegmentStarts(shape_, counts)[rank_.rank],
                       .num_locally_dropped = drops.num_dropped};
    if (source == rank_.rank) {
      own_drops = drops;
      own_codes = codes;
    }
  }
  BuildPlan(shape_, rank_.rank, *plan_, sources, own_codes);
  CountPlan(rank_, *plan_, own_drops);
}

Status LlDispatch::Receive(uint64_t epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, OpenCall(op_, kLlDispatchKind, epoch));
  if (keeps_inputs_) {
    JAX_EP_RETURN_IF_ERROR(TakeInputs(op_, rank_.ll_dispatch_sets[slot.set], params_));
    JAX_EP_RETURN_IF_ERROR(CheckSend());
  }
  DispatchParams params = params_;
  if (plan_ != nullptr) {
    JAX_EP_RETURN_IF_ERROR(op_.Require(CheckPlanParams(shape_, *plan_)));
    params.layout = plan_->layout;
    params.recv_rows = plan_->recv_rows;
    params.recv_src = plan_->out.recv_src;
    params.recv_topk_idx = plan_->out.recv_topk_idx;
  }
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckDispatchReceive(shape_, params)));
  Rounds rounds = layout_.ll_rounds;
  // Ids and weights have room for the largest call: nothing limits a round without rows.
  if (params.recv_x == nullptr) rounds.tokens = shape_.ll_tokens;
  JAX_EP_RETURN_IF_ERROR(ReceiveRounds(
      op_, kLlDispatchKind, slot, epoch, rounds, params_.num_tokens,
      [&](const Round& round) { return SendRound(round); },
      [&](const Round& round) { return ReceiveRound(round, params); }));
  EndCall(op_, kLlDispatchKind, slot.set);
  if (!is_plan_alone()) CountDispatch(rank_, index_->num_rows());
  return Status::Ok();
}

// `params`: those of the call, with what its plan says.
Status LlDispatch::ReceiveRound(const Round& round, const DispatchParams& params) {
  set_ = round.set;
  JAX_EP_RETURN_IF_ERROR(op_.WaitAll(Channel::kLlDispatch, round.signal));
  if (round.is_first) {
    if (plan_ != nullptr) {
      JAX_EP_RETURN_IF_ERROR(CheckHeaders());
      MakePlan();
    }
    JAX_EP_ASSIGN_OR_RETURN(index_, RowIndex::Build(op_, params.num_tokens, params.recv_src));
  }
  if (params.recv_x != nullptr || !params.recv_weights.empty()) {
    const TracePhase phase(rank_.trace, "unpack rows");
    const RowUnpacker unpacker(shape_, params, *index_);
    if (round.is_first) unpacker.ZeroPadding(rank_.parallel_for);
    for (uint32_t source = 0; source < shape_.num_ranks; ++source) {
      if (!op_.is_active(source)) continue;
      std::byte* block = op_.own_heap() + layout_.ll_disp.At(set_, source);
      const auto* weights = HeapAt<float>(block, weights_offset());
      rank_.parallel_for(round.end - round.begin, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t token = round.begin + row;
          unpacker.Place(source, token, block + RowOffset(static_cast<uint64_t>(row)),
                         weights + static_cast<uint64_t>(token) * shape_.top_k);
        }
        unpacker.FinishPlacing();
      });
    }
  }
  return op_.SignalAll(Channel::kLlDispatchDone, round.done);
}

}  // namespace

Status RunLlPlan(Rank& rank, const PlanParams& params) {
  DispatchParams no_rows;
  no_rows.mode = Mode::kLl;
  no_rows.layout = params.layout;
  no_rows.num_tokens = params.num_tokens;
  return RunBothHalves(LlDispatch(rank, "ll plan", &params, no_rows, /*is_whole=*/true));
}

Status RunLlPlannedDispatch(Rank& rank, const DispatchParams& params) {
  return RunBothHalves(LlDispatch(rank, "ll dispatch", nullptr, params, /*is_whole=*/true));
}

Status StartLlPlannedDispatch(Rank& rank, const DispatchParams& params, uint64_t* epoch) {
  return LlDispatch(rank, "ll dispatch start", nullptr, params, /*is_whole=*/false).Send(epoch);
}

Status FinishLlPlannedDispatch(Rank& rank, const DispatchParams& params, uint64_t epoch) {
  return LlDispatch(rank, "ll dispatch done", nullptr, params, /*is_whole=*/false).Receive(epoch);
}

Status RunLlDispatch(Rank& rank, const LlDispatchParams& params) {
  return RunBothHalves(
      LlDispatch(rank, "ll dispatch", &params.plan, params.dispatch, /*is_whole=*/true));
}

Status StartLlDispatch(Rank& rank, const LlDispatchParams& params, uint64_t* epoch) {
  return LlDispatch(rank, "ll dispatch start", &params.plan, params.dispatch, /*is_whole=*/false)
      .Send(epoch);
}

Status FinishLlDispatch(Rank& rank, const LlDispatchParams& params, uint64_t epoch) {
  return LlDispatch(rank, "ll dispatch done", &params.plan, params.dispatch, /*is_whole=*/false)
      .Receive(epoch);
}

}  // namespace jax_ep
