#include "proxy/transport/faulty_writes.h"

#include <algorithm>

#include "proxy/abi/imm.h"

namespace jax_ep {
namespace {

constexpr uint64_t kMaxPieces = 4;  // of a split write
// The last of the queue stay for the next poll by this chance, to be overtaken by what comes then.
constexpr uint64_t kStopOneIn = 4;
constexpr size_t kMaxStaying = 8;
constexpr uint64_t kMaxDuplicateDelay = 4;  // polls
// A duplicate comes before this many later writes of its flow: networks repeat what they have not
// seen acknowledged, not what is ancient. The least that 4 bits of epoch can tell apart is 7.
constexpr int kMaxOvertaken = 5;
constexpr uint64_t kSplitUnitBytes = 16;

uint32_t FlowOf(const WriteRequest& request) { return DecodeImm(request.immediate).flow; }
bool IsSameFlow(const WriteRequest& a, const WriteRequest& b) {
  return a.peer == b.peer && FlowOf(a) == FlowOf(b);
}

}  // namespace

Status FaultyWrites::Drive() {
  JAX_EP_RETURN_IF_ERROR(PostPieces());
  for (Held& held : held_) held.polls -= held.polls > 0 ? 1 : 0;
  for (Duplicate& duplicate : duplicates_) duplicate.polls -= duplicate.polls > 0 ? 1 : 0;
  for (Sent& sent : sent_) sent.polls -= sent.polls > 0 ? 1 : 0;
  bool is_full = false;
  for (size_t i = 0; i < duplicates_.size() && !is_full;) {
    if (duplicates_[i].polls > 0 || !HasLeft(duplicates_[i])) {
      ++i;
      continue;
    }
    JAX_EP_RETURN_IF_ERROR(PostDuplicate(i, &is_full));
  }
  const bool may_stop = spec_.reorder > 0 || spec_.delay > 0;
  while (!held_.empty() && !is_full) {
    if (may_stop && held_.size() <= kMaxStaying && dice_->Below(kStopOneIn) == 0) break;
    const size_t chosen = Choose();
    if (chosen == held_.size()) break;
    JAX_EP_RETURN_IF_ERROR(Release(chosen, &is_full));
  }
  return Status::Ok();
}

// Which held write goes next: one of the first that may overtake. held_.size(): none may now.
size_t FaultyWrites::Choose() {
  // Who is ahead was overtaken at least as often, so only the head can have to go first.
  if (spec_.delay == 0 && spec_.per_flow == 0) {
    return held_[0].num_overtaken >= spec_.reorder
               ? 0
               : dice_->Below(std::min<uint64_t>(spec_.reorder + 1, held_.size()));
  }
  candidates_.clear();
  uint64_t num_seen = 0;
  for (size_t i = 0; i < held_.size() && num_seen <= spec_.reorder; ++i) {
    if (spec_.per_flow != 0 && !IsSameFlow(held_[i].request, held_[0].request)) continue;
    ++num_seen;
    if (held_[i].polls == 0) candidates_.push_back(i);
    // Without reordering a delayed head blocks what is behind it, and so does one that has been
    // overtaken often enough.
    if (held_[i].num_overtaken >= spec_.reorder) break;
  }
  if (candidates_.empty()) return held_.size();
  return candidates_[dice_->Below(candidates_.size())];
}

// The write at `index` has left.
void FaultyWrites::Forget(size_t index) {
  for (size_t i = 0; i < index; ++i) {
    if (spec_.per_flow == 0 || IsSameFlow(held_[i].request, held_[index].request)) {
      ++held_[i].num_overtaken;
    }
  }
  held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
}

Status FaultyWrites::Release(size_t index, bool* is_full) {
  const Held held = held_[index];
  const uint64_t units = held.request.length_bytes / kSplitUnitBytes;
  if (!held.is_last_piece && units >= 2 && spec_.payload_late == 0 && dice_->Chance(spec_.split)) {
    Forget(index);
    return StartSplit(held.request, units);
  }
  // Duplicates that have waited long enough go first.
  if (held.request.has_immediate) {
    for (size_t i = 0; i < duplicates_.size() && !*is_full;) {
      if (IsSameFlow(duplicates_[i].request, held.request) &&
          duplicates_[i].num_overtaken >= kMaxOvertaken) {
        *is_full = !HasLeft(duplicates_[i]);
        if (!*is_full) JAX_EP_RETURN_IF_ERROR(PostDuplicate(i, is_full));
      } else {
        ++i;
      }
    }
    if (*is_full) return Status::Ok();
  }
  WriteRequest request = held.request;
  if (spec_.payload_late != 0) request.length_bytes = 0;
  const uint64_t token = next_inner_token_;
  JAX_EP_RETURN_IF_ERROR(
      PostInner(request, {InnerWrite::Kind::kWhole, held.request.token}, is_full, &held.request));
  if (*is_full) return Status::Ok();
  Forget(index);
  if (held.request.has_immediate) {
    for (Duplicate& duplicate : duplicates_) {
      if (IsSameFlow(duplicate.request, held.request)) ++duplicate.num_overtaken;
    }
    const bool is_posted = next_inner_token_ != token;  // else the peer has closed
    if (dice_->Chance(spec_.duplicate) && is_posted) {
      request.length_bytes = 0;
      duplicates_.push_back(Duplicate{
          .request = request, .original = token, .polls = dice_->Below(kMaxDuplicateDelay)});
    }
  }
  return Status::Ok();
}

Status FaultyWrites::PostDuplicate(size_t index, bool* is_full) {
  JAX_EP_RETURN_IF_ERROR(
      PostInner(duplicates_[index].request, {InnerWrite::Kind::kDuplicate, 0}, is_full, nullptr));
  if (!*is_full) duplicates_.erase(duplicates_.begin() + static_cast<std::ptrdiff_t>(index));
  return Status::Ok();
}

Status FaultyWrites::StartSplit(const WriteRequest& request, uint64_t units) {
  const uint64_t num_pieces = std::min(units, 2 + dice_->Below(kMaxPieces - 1));
  const uint64_t number = next_split_++;
  uint64_t done = 0;
  for (uint64_t piece = 0; piece + 1 < num_pieces; ++piece) {
    WriteRequest part = request;
    part.has_immediate = false;
    part.local_offset += done;
    part.remote_offset += done;
    part.length_bytes = units / num_pieces * kSplitUnitBytes;
    done += part.length_bytes;
    pieces_.push_back({part, number});
  }
  WriteRequest last = request;
  last.local_offset += done;
  last.remote_offset += done;
  last.length_bytes -= done;
  splits_[number] = Split{.last_piece = last, .num_pieces_under_way = num_pieces - 1};
  return PostPieces();
}

Status FaultyWrites::PostPieces() {
  bool is_full = false;
  while (!pieces_.empty() && !is_full) {
    const auto [part, number] = pieces_.front();
    JAX_EP_RETURN_IF_ERROR(PostInner(part, {InnerWrite::Kind::kPiece, number}, &is_full, nullptr));
    if (!is_full) pieces_.pop_front();
  }
  return Status::Ok();
}

Status FaultyWrites::PostInner(WriteRequest request, InnerWrite meaning, bool* is_full,
                               const WriteRequest* late_payload) {
  request.token = next_inner_token_;
  const bool is_late = spec_.payload_late != 0 && late_payload != nullptr;
  // The bytes must be in the box before the arrival can be reported.
  if (is_late && late_payload->length_bytes > 0) put_late_(*late_payload);
  Status status = inner_->PostWrite(request);
  if (status.code() == StatusCode::kResourceExhausted) {
    *is_full = true;  // late bytes are put again next time: the same bytes in the same place
    return Status::Ok();
  }
  if (status.code() == StatusCode::kUnavailable) {
    // The peer has closed meanwhile: the network loses what was under way to it.
    if (meaning.kind == InnerWrite::Kind::kWhole) sent_.push_back({meaning.value, 0});
    if (meaning.kind == InnerWrite::Kind::kPiece) FinishPiece(meaning.value);
    return Status::Ok();
  }
  if (!status.ok()) return status;
  inner_writes_[next_inner_token_++] = meaning;
  ++num_inner_posted_;
  return Status::Ok();
}

// One of the split's pieces no longer is under way.
void FaultyWrites::FinishPiece(uint64_t number) {
  Split& split = splits_[number];
  if (--split.num_pieces_under_way > 0) return;
  // Its pieces were overtaken meanwhile; it goes next.
  held_.push_front(Held{.request = split.last_piece,
                        .polls = 0,
                        .is_last_piece = true,
                        .num_overtaken = spec_.reorder});
  splits_.erase(number);
}

void FaultyWrites::OnInnerSent(uint64_t token) {
  const auto it = inner_writes_.find(token);
  if (it == inner_writes_.end()) return;
  const InnerWrite write = it->second;
  inner_writes_.erase(it);
  --num_inner_posted_;
  switch (write.kind) {
    case InnerWrite::Kind::kWhole:
      sent_.push_back(
          Sent{.token = write.value, .polls = dice_->Below(spec_.slow_completions + 1)});
      break;
    case InnerWrite::Kind::kPiece:
      FinishPiece(write.value);
      break;
    case InnerWrite::Kind::kDuplicate:
      break;
  }
}

size_t FaultyWrites::TakeSent(std::span<TransportEvent> events) {
  size_t count = 0;
  for (size_t i = 0; i < sent_.size() && count < events.size();) {
    if (sent_[i].polls > 0) {
      ++i;
      continue;
    }
    events[count++] = TransportEvent{.kind = TransportEvent::Kind::kSent, .token = sent_[i].token};
    sent_.erase(sent_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return count;
}

}  // namespace jax_ep
