#include "kernels/cpu/sync.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "proxy/base/doorbell.h"

namespace jax_ep {
namespace {

// How long a producer sleeps between tries on a full ring, after kYieldRounds yields.
constexpr std::chrono::microseconds kRingFullSleep{50};
// How often a rank that stands for a test looks whether the group has failed.
constexpr std::chrono::milliseconds kStallSlice{5};

std::atomic<uint64_t>& FlagWord(const Operation& op, uint32_t mate, Channel channel,
                                uint32_t source) {
  return op.layout().FlagIn(op.heap(mate), channel, source);
}

Doorbell& BellOf(const Operation& op, uint32_t mate) {
  return HeapAt<ControlBlock>(op.heap(mate), 0)->doorbell;
}

}  // namespace

Operation::Operation(Rank& rank, std::string_view name)
    : rank_(rank), name_(name), deadline_(Deadline::After(rank.timeout)) {}

std::string Operation::Where() const {
  std::string where =
      "group " + rank_.group_name + ": " + rank_.NameOf(rank_.rank) + ", " + std::string(name_);
  if (epoch_ != 0) where += " epoch " + std::to_string(epoch_);
  return where;
}

Status Operation::CheckLatch() const {
  if (!rank_.failure->failed()) return Status::Ok();
  const Status first = rank_.failure->status();
  return Status(first.code(), Where() + ": the group has failed: " + first.message());
}

Status Operation::Fail(const Status& status, int64_t blamed) const {
  Status named(status.code(), Where() + ": " + status.message());
  rank_.failure->Set(named, blamed);
  return named;
}

Status Operation::Invalid(std::string message) const {
  return Fail(InvalidArgument(std::move(message)));
}

Status Operation::Require(std::string wrong) const {
  return wrong.empty() ? Status::Ok() : Invalid(std::move(wrong));
}

Status Operation::OwnerLeft(uint32_t owner) const {
  JAX_EP_RETURN_IF_ERROR(CheckLatch());
  return Fail(FailedPrecondition(
      rank_.NameOf(owner) +
      " ended its call before this rank had read from it; all ranks must run the "
      "same program"));
}

uint64_t Operation::ReadFlag(Channel channel, uint32_t source) const {
  const uint32_t receiver = ReceiverOf(channel, source);
  return FlagWord(*this, receiver, channel, source).load(std::memory_order_acquire);
}

Status Operation::WaitFlag(Channel channel, uint32_t source, uint64_t value) {
  if (ReadFlag(channel, source) >= value) return Status::Ok();
  const uint32_t receiver = ReceiverOf(channel, source);
  KickProxy();
  const uint64_t begin = MonotonicNs();
  activity().Await(Phase::kAwaitsSignal, begin, source, channel, value);
  const WaitResult result = WaitUntil(
      BellOf(*this, receiver), [&] { return ReadFlag(channel, source) >= value; }, deadline_,
      *rank_.failure, is_mate(source) ? nullptr : rank_.proxy);
  const uint64_t end = MonotonicNs();
  if (rank_.counters != nullptr) {
    rank_.counters->AddWait(WaitPhaseOf(channel), source, end - begin);
  }
  activity().Enter(Phase::kWorking, end);
  Trace(TraceKind::kWait, begin, end, source, channel, value, receiver);
  if (result == WaitResult::kReady) return Status::Ok();
  if (result == WaitResult::kFailed) return CheckLatch();
  const double seconds = std::chrono::duration<double>(rank_.timeout).count();
  std::string message = "timed out after " + std::to_string(seconds) + " s waiting for " +
                        rank_.NameOf(source) + ": expected " + std::string(ChannelName(channel)) +
                        " signal " + std::to_string(value);
  if (receiver != rank_.rank) message += " at " + rank_.NameOf(receiver);
  message += ", arrived " + std::to_string(ReadFlag(channel, source)) +
             "; that rank is late or has not made this call";
  if (receiver != rank_.rank) message += ", or " + rank_.NameOf(receiver) + " does not run";
  message += " (see Config.timeout_s)";
  return Fail(DeadlineExceeded(std::move(message)));
}

void Operation::TraceSignal(uint32_t peer, Channel channel, uint64_t value) const {
  if (rank_.trace == nullptr) return;
  const uint64_t now_ns = MonotonicNs();
  Trace(TraceKind::kSignal, now_ns, now_ns, peer, channel, value, peer);
}

void Operation::Trace(TraceKind kind, uint64_t begin_ns, uint64_t end_ns, uint32_t peer,
                      Channel channel, uint64_t value, uint32_t flag_rank) const {
  if (rank_.trace == nullptr) return;
  rank_.trace->Add({.begin_ns = begin_ns,
                    .end_ns = end_ns,
                    .value = value,
                    .detail = flag_rank,
                    .peer = static_cast<uint16_t>(peer),
                    .kind = kind,
                    .channel = static_cast<uint8_t>(channel)});
}

Status Operation::WaitMates(Channel channel, uint64_t value) {
  const uint32_t begin = rank_.node_begin();
  for (uint32_t mate = begin; mate < begin + shape().node_size; ++mate) {
    if (mate == rank_.rank || !is_active(mate)) continue;
    JAX_EP_RETURN_IF_ERROR(WaitFlag(channel, mate, value));
  }
  return Status::Ok();
}

Status Operation::WaitRails(Channel channel, uint64_t value) {
  for (uint32_t rail = rank_.local_rank(); rail < shape().num_ranks; rail += shape().node_size) {
    if (rail == rank_.rank || !is_active(rail)) continue;
    JAX_EP_RETURN_IF_ERROR(WaitFlag(channel, rail, value));
  }
  return Status::Ok();
}

Status Operation::WaitAll(Channel channel, uint64_t value) {
  for (uint32_t peer = 0; peer < shape().num_ranks; ++peer) {
    if (peer == rank_.rank || !is_active(peer)) continue;
    JAX_EP_RETURN_IF_ERROR(WaitFlag(channel, peer, value));
  }
  return Status::Ok();
}

void Operation::StallForTests(Channel channel) {
  if (rank_.stall.time.count() == 0 || rank_.stall.channel != channel) return;
  const Deadline end = Deadline::After(std::exchange(rank_.stall.time, {}));
  while (!end.expired() && !rank_.failure->failed()) std::this_thread::sleep_for(kStallSlice);
}

Status Operation::Signal(uint32_t peer, Channel channel, uint64_t value) {
  StallForTests(channel);
  if (is_mate(peer)) {
    TraceSignal(peer, channel, value);
    // Orders everything that this rank wrote or read before, in its own heap or the mate's,
    // before the flag; pairs with the acquire of ReadFlag.
    FlagWord(*this, peer, channel, rank_.rank).store(value, std::memory_order_release);
    BellOf(*this, peer).Ring();
    return Status::Ok();
  }
  Command command{};
  command.op = Op::kSignal;
  command.dst_rank = peer;
  command.channel = channel;
  command.epoch = value;
  return Push(command);
}

Status Operation::SignalMates(Channel channel, uint64_t value) {
  const uint32_t begin = rank_.node_begin();
  for (uint32_t mate = begin; mate < begin + shape().node_size; ++mate) {
    if (mate == rank_.rank || !is_active(mate)) continue;
    JAX_EP_RETURN_IF_ERROR(Signal(mate, channel, value));
  }
  return Status::Ok();
}

Status Operation::SignalRails(Channel channel, uint64_t value) {
  for (uint32_t rail = rank_.local_rank(); rail < shape().num_ranks; rail += shape().node_size) {
    if (rail == rank_.rank || !is_active(rail)) continue;
    JAX_EP_RETURN_IF_ERROR(Signal(rail, channel, value));
  }
  KickProxy();
  return Status::Ok();
}

Status Operation::SignalAll(Channel channel, uint64_t value) {
  for (uint32_t peer = 0; peer < shape().num_ranks; ++peer) {
    if (peer == rank_.rank || !is_active(peer)) continue;
    JAX_EP_RETURN_IF_ERROR(Signal(peer, channel, value));
  }
  KickProxy();
  return Status::Ok();
}

Status Operation::Push(const Command& command) {
  StallForTests(command.channel);
  const auto packed = TryPack(command);
  if (!packed.has_value()) {
    return Fail(Internal(
        "a command to " + rank_.NameOf(command.dst_rank) +
        " does not fit into 16 bytes; this is a fault of jax_ep, please report it: " +
        std::to_string(command.length_bytes) + " bytes from offset " +
        std::to_string(command.local_offset) + " to offset " +
        std::to_string(command.remote_offset) + ", value " + std::to_string(command.value)));
  }
  if (command.op != Op::kWrite) TraceSignal(command.dst_rank, command.channel, command.epoch);
  int round = 0;
  uint64_t begin = 0;
  for (; !rank_.ring.TryPush(*packed); ++round) {
    if (round == 0) {
      begin = MonotonicNs();
      activity().Await(Phase::kAwaitsRing, begin, command.dst_rank, command.channel, command.epoch);
    }
    has_unannounced_commands_ = true;
    KickProxy();
    JAX_EP_RETURN_IF_ERROR(CheckLatch());
    if (deadline_.expired()) {
      return Fail(DeadlineExceeded(
          "timed out waiting for space in the command ring; the next command goes to " +
          rank_.NameOf(command.dst_rank) + " on channel " +
          std::string(ChannelName(command.channel))));
    }
    if (round < kYieldRounds) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kRingFullSleep);
    }
  }
  if (round > 0) {
    const uint64_t end = MonotonicNs();
    activity().Enter(Phase::kWorking, end);
    Trace(TraceKind::kRingFull, begin, end, command.dst_rank, command.channel, command.epoch,
          command.dst_rank);
  }
  has_unannounced_commands_ = true;
  return Status::Ok();
}

void Operation::KickProxy() {
  if (!has_unannounced_commands_) return;
  has_unannounced_commands_ = false;
  rank_.proxy->Kick();
}

const SlotKind kDispatchKind{&Rank::Epochs::dispatch_started, &Rank::Epochs::dispatch_done,
                             &Rank::dispatch_sets, &Rank::Epochs::dispatch_rounds};
const SlotKind kCombineKind{&Rank::Epochs::combine_started, &Rank::Epochs::combine_done,
                            &Rank::combine_sets, &Rank::Epochs::combine_rounds};
const SlotKind kLlDispatchKind{&Rank::Epochs::ll_dispatch_started, &Rank::Epochs::ll_dispatch_done,
                               &Rank::ll_dispatch_sets, &Rank::Epochs::ll_dispatch_rounds};
const SlotKind kLlCombineKind{&Rank::Epochs::ll_combine_started, &Rank::Epochs::ll_combine_done,
                              &Rank::ll_combine_sets, &Rank::Epochs::ll_combine_rounds};

Result<CallSlot> BeginCall(Operation& op, const SlotKind& kind) {
  Rank& rank = op.rank();
  Rank::SlotSets& sets = rank.*kind.sets;
  op.set_epoch(++(rank.epochs.*kind.started));
  // The set that has been free for the longest gives its readers the most time.
  Rank::SlotSet* best = nullptr;
  for (uint32_t set = 0; set < op.shape().depth; ++set) {
    if (sets[set].open) continue;
    if (best == nullptr || sets[set].done_seq < best->done_seq) best = &sets[set];
  }
  if (best == nullptr) {
    return op.Fail(FailedPrecondition(
        "more than max_in_flight (" + std::to_string(op.shape().depth) +
        ") starts before a done; call a *_done first or raise Config.max_in_flight"));
  }
  const CallSlot slot{.set = static_cast<uint32_t>(best - sets.data()),
                      .reusable_at = best->done_seq};
  best->epoch = op.epoch();
  best->open = true;
  return slot;
}

Result<CallSlot> OpenCall(Operation& op, const SlotKind& kind, uint64_t epoch) {
  op.set_epoch(epoch);
  const Rank::SlotSets& sets = op.rank().*kind.sets;
  for (uint32_t set = 0; set < op.shape().depth; ++set) {
    if (sets[set].open && sets[set].epoch == epoch) return CallSlot{.set = set};
  }
  return op.Fail(
      FailedPrecondition("*_done got what no open *_start of this group returned (newest start: " +
                         std::to_string(op.rank().epochs.*kind.started) +
                         "); call exactly one *_done for each *_start, also under remat"));
}

uint64_t NextDoneSeq(const Operation& op, const SlotKind& kind) {
  return op.rank().epochs.*kind.done + 1;
}

void EndCall(Operation& op, const SlotKind& kind, uint32_t set) {
  Rank& rank = op.rank();
  Rank::SlotSet& held = (rank.*kind.sets)[set];
  held.done_seq = ++(rank.epochs.*kind.done);
  held.open = false;
  held.rows.reset();
  held.weights.clear();
  held.pair_scalars.clear();
}

void CountSent(Rank& rank, uint64_t num_rows, uint64_t num_bytes) {
  if (rank.counters == nullptr) return;
  rank.counters->rows_sent_internode.fetch_add(num_rows, std::memory_order_relaxed);
  rank.counters->bytes_sent_internode.fetch_add(num_bytes, std::memory_order_relaxed);
}

bool IsNodeInProcess(const Rank& rank) {
  const uint32_t end = rank.node_begin() + rank.shape.node_size;
  for (uint32_t mate = rank.node_begin(); mate < end; ++mate) {
    if (rank.is_active(mate) && !rank.in_process[mate]) return false;
  }
  return true;
}

}  // namespace jax_ep
