// HT dispatch: rows from their owners to the ranks of their experts. Inside a node readers pull
// from the owner's buffers or stage; to other nodes each row goes once, to the rank of equal local
// index, whose node-mates pull it there. LL calls go to ll_dispatch.cc.
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cpu/huge_pages.h"
#include "kernels/cpu/internode.h"
#include "kernels/cpu/ll_dispatch.h"
#include "kernels/cpu/published.h"
#include "kernels/cpu/rounds.h"
#include "kernels/cpu/row_index.h"
#include "kernels/cpu/sync.h"
#include "kernels/cpu/unpack.h"
#include "kernels/launch.h"

namespace jax_ep {
namespace {

// One HT dispatch call, or one half of it.
class HtDispatch {
 public:
  HtDispatch(Rank& rank, const DispatchParams& params, bool is_whole)
      : op_(rank, "dispatch"),
        rank_(rank),
        shape_(rank.shape),
        layout_(rank.layout),
        params_(params),
        keeps_inputs_(layout_.dispatch_rounds.is_split && !is_whole),
        is_whole_(is_whole || layout_.dispatch_rounds.is_split),
        is_direct_(is_whole_ && IsNodeInProcess(rank)) {}

  Status Send(uint64_t* epoch);
  Status Receive(uint64_t epoch);

 private:
  // Where the rows of one source are.
  struct Source {
    const std::byte* rows = nullptr;  // row of token t: rows + index(t) * row_pitch
    const std::byte* weights = nullptr;
    uint64_t row_pitch = 0;
    uint64_t weights_pitch = 0;
    const int32_t* map = nullptr;  // token of the round -> packed row; null: the token itself
  };

  uint64_t elem_row_bytes() const { return shape_.hidden * ElemBytes(shape_.elem_type); }
  Status CheckSend();
  Status SendRound(const Round& round);
  Status ReceiveRound(const Round& round, const RowUnpacker& unpacker);
  Status StageRows();
  Status SendToNode(const Round& round, uint32_t node);
  // Copies row and weights of a token of this rank.
  void Pack(std::byte* to, int64_t token) const;
  PublishedBuffers* PublishedBy(uint32_t mate) const {
    return HeapAt<PublishedBuffers>(op_.heap(mate), layout_.dispatch_published.At(set_));
  }
  // Whether this rank reads the buffers of `source` in place, as another rank's.
  bool IsPublished(uint32_t source) const {
    return is_direct_ && source != rank_.rank && op_.is_mate(source);
  }
  Source Locate(uint32_t source, int64_t num_tokens) const;
  // Tokens [first, last) of `source`.
  Status Pull(const RowUnpacker& unpacker, uint32_t source, int64_t first, int64_t last);

  Operation op_;
  Rank& rank_;
  const GroupShape& shape_;
  const HeapLayout& layout_;
  DispatchParams params_;
  const bool keeps_inputs_;  // from the start of a split call to its done
  const bool is_whole_;
  const bool is_direct_;  // node-mates read this rank's buffers, not its stage
  uint32_t set_ = 0;
  DispatchPitch pitch_;
  Publication publication_;
};

void HtDispatch::Pack(std::byte* to, int64_t token) const {
  const auto index = static_cast<uint64_t>(token);
  const uint64_t row_bytes = elem_row_bytes();
  if (params_.x != nullptr) std::memcpy(to, params_.x + index * row_bytes, row_bytes);
  if (!params_.weights.empty()) {
    std::memcpy(to + pitch_.weights_offset, params_.weights.data() + index * shape_.top_k,
                shape_.top_k * sizeof(float));
  }
}

// Rows that a node-mate reads (this rank itself counts in a start half, when x will be gone).
Status HtDispatch::StageRows() {
  const TracePhase phase(rank_.trace, "stage rows");
  const uint64_t rows_per_rank = static_cast<uint64_t>(params_.recv_rows);
  std::byte* stage = op_.own_heap() + layout_.stage.At(set_);
  rank_.parallel_for(params_.num_tokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const uint64_t first = static_cast<uint64_t>(token) * shape_.top_k;
      for (const int32_t slot : params_.send_slot.subspan(first, shape_.top_k)) {
        if (slot < 0) continue;
        const auto target = static_cast<uint32_t>(static_cast<uint64_t>(slot) / rows_per_rank);
        if (op_.is_mate(target) && (target != rank_.rank || !is_whole_)) {
          Pack(stage + static_cast<uint64_t>(token) * pitch_.pitch, token);
          break;
        }
      }
    }
  });
  return op_.CheckLatch();
}

Status HtDispatch::SendToNode(const Round& round, uint32_t node) {
  const TracePhase phase(rank_.trace, "pack rows for node",
                         node * shape_.node_size + rank_.local_rank());
  const uint64_t rows_per_node = static_cast<uint64_t>(params_.recv_rows) * shape_.node_size;
  const uint32_t rail = node * shape_.node_size + rank_.local_rank();
  const uint64_t local_offset = layout_.send_stage.At(set_, node);
  int32_t* map = HeapAt<int32_t>(op_.own_heap(), local_offset);
  const auto first = static_cast<uint64_t>(round.begin);
  const auto tokens = static_cast<uint64_t>(round.end - round.begin);
  int32_t num_rows = 0;
  for (uint64_t token = 0; token < tokens; ++token) {
    bool is_needed = false;
    for (const int32_t slot :
         params_.send_slot.subspan((first + token) * shape_.top_k, shape_.top_k)) {
      is_needed |= slot >= 0 && static_cast<uint64_t>(slot) / rows_per_node == node;
    }
    map[token] = is_needed ? num_rows++ : -1;
  }
  PackedStream stream(op_, Channel::kDispatch, round.signal, rail, local_offset,
                      layout_.net_recv.At(set_, rank_.node()));
  JAX_EP_RETURN_IF_ERROR(stream.Advance(AlignUp(tokens * sizeof(int32_t), kWireUnitBytes)));
  for (uint64_t token = 0; token < tokens; ++token) {
    if (map[token] < 0 || pitch_.pitch == 0) continue;
    Pack(stream.end(), static_cast<int64_t>(first + token));
    JAX_EP_RETURN_IF_ERROR(stream.Advance(pitch_.pitch));
  }
  CountSent(rank_, static_cast<uint64_t>(num_rows), stream.num_bytes());
  return stream.Finish();
}

Status HtDispatch::CheckSend() {
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckDispatchSend(shape_, params_)));
  return CheckSlots(op_, params_.send_slot, static_cast<uint64_t>(params_.recv_rows));
}

Status HtDispatch::Send(uint64_t* epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_RETURN_IF_ERROR(CheckSend());
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, BeginCall(op_, kDispatchKind));
  *epoch = op_.epoch();
  return SendRounds(op_, kDispatchKind, slot, layout_.dispatch_rounds, params_, keeps_inputs_,
                    [&](const Round& round) { return SendRound(round); });
}

Status HtDispatch::SendRound(const Round& round) {
  set_ = round.set;
  pitch_ = DispatchPitch::Make(shape_, params_.x != nullptr, !params_.weights.empty());
  JAX_EP_RETURN_IF_ERROR(op_.WaitMates(Channel::kDispatchDone, round.free_at));
  JAX_EP_RETURN_IF_ERROR(op_.WaitRails(Channel::kDispatchDone, round.free_at));

  if (round.is_first) {  // node-mates take the whole call
    if (is_direct_) {
      publication_.Open(PublishedBy(rank_.rank), params_.x, params_.weights.data(),
                        /*pair_scalars=*/nullptr);
    } else {
      JAX_EP_RETURN_IF_ERROR(StageRows());
    }
  }
  JAX_EP_RETURN_IF_ERROR(op_.SignalMates(Channel::kDispatch, round.signal));
  for (uint32_t step = 1; step < shape_.num_nodes(); ++step) {
    const uint32_t node = (rank_.node() + step) % shape_.num_nodes();
    if (!op_.is_active(node * shape_.node_size + rank_.local_rank())) continue;
    JAX_EP_RETURN_IF_ERROR(SendToNode(round, node));
  }
  return Status::Ok();
}

HtDispatch::Source HtDispatch::Locate(uint32_t source, int64_t num_tokens) const {
  Source from{.row_pitch = elem_row_bytes(), .weights_pitch = shape_.top_k * sizeof(float)};
  if (source == rank_.rank && is_whole_) {
    from.rows = params_.x;
    from.weights = reinterpret_cast<const std::byte*>(params_.weights.data());
    return from;
  }
  if (IsPublished(source)) {
    const PublishedBuffers* published = PublishedBy(source);
    from.rows = published->rows;
    from.weights = reinterpret_cast<const std::byte*>(published->weights);
    return from;
  }
  from.row_pitch = from.weights_pitch = pitch_.pitch;
  if (op_.is_mate(source)) {
    from.rows = op_.heap(source) + layout_.stage.At(set_);
  } else {
    const uint64_t block = layout_.net_recv.At(set_, source / shape_.node_size);
    std::byte* rail_heap = op_.heap(op_.ReceiverOf(Channel::kDispatch, source));
    from.map = HeapAt<int32_t>(rail_heap, block);
    from.rows = rail_heap + block +
                AlignUp(static_cast<uint64_t>(num_tokens) * sizeof(int32_t), kWireUnitBytes);
  }
  from.weights = from.rows + pitch_.weights_offset;
  return from;
}

Status HtDispatch::Pull(const RowUnpacker& unpacker, uint32_t source, int64_t first, int64_t last) {
  const TracePhase phase(rank_.trace, "pull rows", source);
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  std::optional<Reading> reading;  // until this returns
  if (IsPublished(source)) {
    reading.emplace(PublishedBy(source));
    if (!reading->is_open()) return op_.OwnerLeft(source);
  }
  const Source from = Locate(source, last - first);
  const bool has_rows = params_.recv_x != nullptr;
  const bool has_weights = !params_.recv_weights.empty();
  std::atomic<int64_t> missing{-1};
  std::atomic<uint64_t> num_pulled{0};
  rank_.parallel_for(last - first, [&](int64_t begin, int64_t end) {
    begin += first;
    end += first;
    uint64_t num_tokens = 0;
    const auto packed_row = [&](int64_t token) {
      return from.map == nullptr ? token : from.map[token - first];
    };
    int64_t next = unpacker.NextToken(source, begin, end);
    while (next < end) {
      const int64_t token = next;
      next = unpacker.NextToken(source, token + 1, end);
      const int64_t row = packed_row(token);
      if (row < 0 || row >= last - first) {  // first is 0 where there is no map
        missing.store(token, std::memory_order_relaxed);
        continue;
      }
      if (has_rows && next < end) {
        PrefetchBytes(from.rows + static_cast<uint64_t>(packed_row(next)) * from.row_pitch,
                      elem_row_bytes());
      }
      const auto index = static_cast<uint64_t>(row);
      const std::byte* weights = has_weights ? from.weights + index * from.weights_pitch : nullptr;
      unpacker.Place(source, token, has_rows ? from.rows + index * from.row_pitch : nullptr,
                     reinterpret_cast<const float*>(weights));
      ++num_tokens;
    }
    unpacker.FinishPlacing();
    num_pulled.fetch_add(num_tokens, std::memory_order_relaxed);
  });
  // Relaxed: parallel_for has joined its threads.
  if (const int64_t token = missing.load(std::memory_order_relaxed); token >= 0) {
    return op_.Invalid(rank_.NameOf(source) + " did not send the row of its token " +
                       std::to_string(token) + "; all ranks must pass the same plan");
  }
  if (source != rank_.rank && rank_.counters != nullptr) {
    rank_.counters->bytes_pulled.fetch_add(
        num_pulled.load(std::memory_order_relaxed) * pitch_.pitch, std::memory_order_relaxed);
  }
  return Status::Ok();
}

Status HtDispatch::Receive(uint64_t epoch) {
  JAX_EP_RETURN_IF_ERROR(op_.CheckLatch());
  JAX_EP_ASSIGN_OR_RETURN(const CallSlot slot, OpenCall(op_, kDispatchKind, epoch));
  JAX_EP_RETURN_IF_ERROR(op_.Require(CheckDispatchReceive(shape_, params_)));
  JAX_EP_ASSIGN_OR_RETURN(const RowIndex index,
                          RowIndex::Build(op_, params_.num_tokens, params_.recv_src));
  const RowUnpacker unpacker(shape_, params_, index);
  if (rank_.uses_huge_pages) {
    PreferHugePages(params_.recv_x, static_cast<uint64_t>(params_.recv_rows) * elem_row_bytes());
  }
  if (keeps_inputs_) {
    JAX_EP_RETURN_IF_ERROR(TakeInputs(op_, rank_.dispatch_sets[slot.set], params_));
    JAX_EP_RETURN_IF_ERROR(CheckSend());
  }
  JAX_EP_RETURN_IF_ERROR(ReceiveRounds(
      op_, kDispatchKind, slot, epoch, layout_.dispatch_rounds, params_.num_tokens,
      [&](const Round& round) { return SendRound(round); },
      [&](const Round& round) { return ReceiveRound(round, unpacker); }));
  EndCall(op_, kDispatchKind, slot.set);
  CountDispatch(rank_, index.num_rows());
  return Status::Ok();
}

Status HtDispatch::ReceiveRound(const Round& round, const RowUnpacker& unpacker) {
  set_ = round.set;
  pitch_ = DispatchPitch::Make(shape_, params_.recv_x != nullptr, !params_.recv_weights.empty());
  // What needs no peer comes first, then whoever is ready; positions do not depend on the order.
  if (round.is_first) {
    JAX_EP_RETURN_IF_ERROR(Pull(unpacker, rank_.rank, 0, params_.num_tokens));
    unpacker.ZeroPadding(rank_.parallel_for);
  }
  std::vector<uint32_t> pending;
  for (uint32_t step = 1; step < shape_.num_ranks; ++step) {
    const uint32_t source = (rank_.rank + step) % shape_.num_ranks;
    if (op_.is_active(source) && (round.is_first || !op_.is_mate(source))) {
      pending.push_back(source);
    }
  }
  while (!pending.empty()) {
    auto next = pending.begin();
    for (auto source = pending.begin(); source != pending.end(); ++source) {
      if (op_.ReadFlag(Channel::kDispatch, *source) >= round.signal) {
        next = source;
        break;
      }
    }
    const uint32_t source = *next;
    pending.erase(next);
    JAX_EP_RETURN_IF_ERROR(op_.WaitFlag(Channel::kDispatch, source, round.signal));
    const bool is_mate = op_.is_mate(source);
    JAX_EP_RETURN_IF_ERROR(Pull(unpacker, source, is_mate ? 0 : round.begin,
                                is_mate ? params_.num_tokens : round.end));
  }

  JAX_EP_RETURN_IF_ERROR(op_.SignalMates(Channel::kDispatchDone, round.done));
  const bool is_multi_node = shape_.num_nodes() > 1;
  // Direct: XLA may reuse x when this call returns. Several nodes: mates read this rank's net_recv,
  // so its senders may go on only when all of the node is through.
  if (is_direct_ || is_multi_node) {
    JAX_EP_RETURN_IF_ERROR(op_.WaitMates(Channel::kDispatchDone, round.done));
  }
  return op_.SignalRails(Channel::kDispatchDone, round.done);
}

}  // namespace

Status RunDispatch(Rank& rank, const DispatchParams& params) {
  if (params.mode == Mode::kLl) return RunLlPlannedDispatch(rank, params);
  return RunBothHalves(HtDispatch(rank, params, /*is_whole=*/true));
}

Status StartDispatch(Rank& rank, const DispatchParams& params, uint64_t* epoch) {
  if (params.mode == Mode::kLl) return StartLlPlannedDispatch(rank, params, epoch);
  return HtDispatch(rank, params, /*is_whole=*/false).Send(epoch);
}

Status FinishDispatch(Rank& rank, const DispatchParams& params, uint64_t epoch) {
  if (params.mode == Mode::kLl) return FinishLlPlannedDispatch(rank, params, epoch);
  return HtDispatch(rank, params, /*is_whole=*/false).Receive(epoch);
}

}  // namespace jax_ep
