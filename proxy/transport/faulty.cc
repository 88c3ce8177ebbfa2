// The faulty transport. The sender's end holds posted writes and hands them to the inner transport
// in another order, late, in pieces, or twice; so both bytes and immediates really arrive that way.
// Speed is no aim here: it may allocate and lock.
#include "proxy/transport/faulty.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "proxy/abi/imm.h"
#include "proxy/base/blob.h"
#include "proxy/transport/late_payload.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x3159544c55414641;
constexpr uint64_t kKeyMagic = 0x3259544c55414641;
constexpr size_t kMaxHeld = 256;    // writes under way; more answer kResourceExhausted
constexpr uint64_t kMaxStorm = 8;   // length of an AGAIN storm
constexpr uint64_t kMaxPieces = 4;  // of a split write
// The last of the queue stay for the next poll by this chance, to be overtaken by what comes then.
constexpr uint64_t kStopOneIn = 4;
constexpr size_t kMaxStaying = 8;
constexpr uint64_t kMaxDuplicateDelay = 4;  // polls
// A duplicate comes before this many later writes of its flow: networks repeat what they have not
// seen acknowledged, not what is ancient. The least that 4 bits of epoch can tell apart is 7.
constexpr int kMaxOvertaken = 5;
constexpr uint64_t kSplitUnitBytes = 16;

class FaultyTransport : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, const FaultySpec& spec,
                  const TransportOptions& options)
      : inner_(std::move(inner)),
        spec_(spec),
        random_(spec.seed * kMaxRanks + options.rank),
        is_mortal_(spec.die_after > 0 &&
                   (spec.die_rank == UINT64_MAX || spec.die_rank == options.rank)),
        box_(std::make_shared<LateBox>()),
        box_id_(LateBoxes::Get().Add(box_)) {
    caps_ = inner_->Caps();
    caps_.cheap_wake = false;  // like the networks that this stands for: who waits, helps
    if (spec_.payload_late != 0) caps_.arrival_implies_visible = false;
    if (spec_.max_message != 0) {
      caps_.max_message_bytes = std::min(caps_.max_message_bytes, spec_.max_message);
    }
  }

  ~FaultyTransport() override { LateBoxes::Get().Remove(box_id_); }

  const TransportCaps& Caps() const override { return caps_; }

  std::string LocalAddress() const override {
    return BlobWriter().U64(kAddressMagic).U64(box_id_).Text(inner_->LocalAddress()).Take();
  }

  Result<uint32_t> Connect(std::string_view address, Deadline deadline) override {
    BlobReader reader(address);
    const uint64_t magic = reader.U64();
    const uint64_t box_id = reader.U64();
    const std::string_view inner_address = reader.Text();
    if (!reader.finished() || magic != kAddressMagic) {
      return InvalidArgument("faulty: the peer is not wrapped by the faulty transport");
    }
    Peer peer;
    if (spec_.payload_late != 0) {
      peer.box = LateBoxes::Get().Find(box_id);
      if (peer.box == nullptr) {
        return InvalidArgument("faulty: payload_late works between ranks of one process only");
      }
    }
    Result<uint32_t> handle = inner_->Connect(inner_address, deadline);
    if (handle.ok()) peers_.push_back(std::move(peer));
    return handle;
  }

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    Result<LocalRegion> registered = inner_->Register(region);
    if (!registered.ok()) return registered;
    regions_.push_back(region.bytes);
    std::lock_guard lock(box_->mutex);
    box_->regions.push_back(region.bytes);
    registered->key = BlobWriter()
                          .U64(kKeyMagic)
                          .U64(region.bytes.size())
                          .U64(registered->handle)
                          .Text(registered->key)
                          .Take();
    return registered;
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const uint64_t num_bytes = reader.U64();
    const uint64_t handle = reader.U64();
    const std::string_view inner_key = reader.Text();
    if (!reader.finished() || magic != kKeyMagic) {
      return InvalidArgument("faulty: the key is not wrapped by the faulty transport");
    }
    Result<uint32_t> imported = inner_->ImportRemoteKey(peer, inner_key);
    if (imported.ok()) {
      peers_[peer].regions.push_back(
          {.num_bytes = num_bytes, .handle = static_cast<uint32_t>(handle)});
    }
    return imported;
  }

  Status PostWrite(const WriteRequest& request) override {
    if (is_dead_) return Status::Ok();  // swallowed: no event will ever come
    JAX_EP_RETURN_IF_ERROR(Validate(request));
    if (storm_ == 0 && Chance(spec_.again)) storm_ = 1 + Below(kMaxStorm);
    if (storm_ > 0) {
      --storm_;
      return Full();
    }
    if (held_.size() + splits_.size() >= kMaxHeld) return Full();
    held_.push_back(Held{.request = request, .polls = Below(spec_.delay + 1)});
    if (is_mortal_ && ++num_posts_ >= spec_.die_after) is_dead_ = true;
    return Status::Ok();
  }

  Result<bool> Flush(uint64_t token) override {
    if (spec_.payload_late == 0) return inner_->Flush(token);
    if (Below(2) == 0) {
      ApplyLate();
      return true;
    }
    flush_polls_ = 1 + static_cast<int64_t>(Below(spec_.slow_completions + 1));
    flush_token_ = token;
    return false;
  }

  Result<size_t> Poll(std::span<TransportEvent> events) override {
    if (is_dead_) return size_t{0};
    JAX_EP_RETURN_IF_ERROR(Drive());
    size_t count = TakeReady(events);
    JAX_EP_ASSIGN_OR_RETURN(const size_t num_inner, inner_->Poll(events.subspan(count)));
    // Our own events and those of pieces are taken out; the others move together.
    size_t kept = count;
    for (size_t i = count; i < count + num_inner; ++i) {
      if (events[i].kind == TransportEvent::Kind::kSent) {
        OnInnerSent(events[i].token);
      } else {
        events[kept++] = events[i];
      }
    }
    return kept;
  }

  bool PrepareToSleep() override {
    const bool holds = !held_.empty() || !splits_.empty() || !duplicates_.empty() ||
                       !sent_.empty() || flush_polls_ > 0 || num_inner_posted_ > 0;
    return !holds && inner_->PrepareToSleep();
  }

  void AppendState(std::string* text) const override { inner_->AppendState(text); }

 private:
  struct RemoteBounds {
    uint64_t num_bytes;
    uint32_t handle;  // the owner's
  };
  struct Peer {
    std::shared_ptr<LateBox> box;  // with payload_late
    std::vector<RemoteBounds> regions;
  };
  struct Held {
    WriteRequest request;
    uint64_t polls;
    bool is_last_piece = false;
    uint64_t num_overtaken = 0;
  };
  struct Split {
    WriteRequest last_piece;
    uint64_t num_pieces_under_way;
  };
  struct Duplicate {
    WriteRequest request;
    uint64_t polls;
    int num_overtaken = 0;
  };
  struct Sent {
    uint64_t token;
    uint64_t polls;
  };
  struct InnerWrite {  // what an inner token stands for
    enum class Kind : uint8_t { kWhole, kPiece, kDuplicate };
    Kind kind;
    uint64_t value;  // the caller's token, or the split's number
  };

  static Status Full() { return ResourceExhausted("queue full"); }

  uint64_t Below(uint64_t limit) { return limit <= 1 ? 0 : random_() % limit; }
  bool Chance(uint64_t percent) { return percent > 0 && random_() % 100 < percent; }

  static uint32_t FlowOf(const WriteRequest& request) { return DecodeImm(request.immediate).flow; }
  static bool IsSameFlow(const WriteRequest& a, const WriteRequest& b) {
    return a.peer == b.peer && FlowOf(a) == FlowOf(b);
  }

  Status Validate(const WriteRequest& request) const {
    const auto bad = [](const std::string& what) { return InvalidArgument("faulty: " + what); };
    if (request.peer >= peers_.size()) return bad("unknown peer " + std::to_string(request.peer));
    if (request.length_bytes == 0) return Status::Ok();
    const Peer& peer = peers_[request.peer];
    if (request.length_bytes > caps_.max_message_bytes) return bad("the write is too long");
    if (request.local_region >= regions_.size() || request.remote_region >= peer.regions.size()) {
      return bad("unknown region");
    }
    const auto outside = [&request](uint64_t offset, uint64_t num_bytes) {
      return request.length_bytes > num_bytes || offset > num_bytes - request.length_bytes;
    };
    if (outside(request.local_offset, regions_[request.local_region].size()) ||
        outside(request.remote_offset, peer.regions[request.remote_region].num_bytes)) {
      return bad("bytes outside a region");
    }
    return Status::Ok();
  }

  // Hands held writes to the inner transport as far as the dice allow.
  Status Drive() {
    JAX_EP_RETURN_IF_ERROR(PostPieces());
    for (Held& held : held_) held.polls -= held.polls > 0 ? 1 : 0;
    for (Duplicate& duplicate : duplicates_) duplicate.polls -= duplicate.polls > 0 ? 1 : 0;
    for (Sent& sent : sent_) sent.polls -= sent.polls > 0 ? 1 : 0;
    if (flush_polls_ > 1) --flush_polls_;
    bool is_full = false;
    for (size_t i = 0; i < duplicates_.size() && !is_full;) {
      if (duplicates_[i].polls > 0) {
        ++i;
        continue;
      }
      JAX_EP_RETURN_IF_ERROR(PostDuplicate(i, &is_full));
    }
    const bool may_stop = spec_.reorder > 0 || spec_.delay > 0;
    while (!held_.empty() && !is_full) {
      if (may_stop && held_.size() <= kMaxStaying && Below(kStopOneIn) == 0) break;
      const size_t chosen = Choose();
      if (chosen == held_.size()) break;
      JAX_EP_RETURN_IF_ERROR(Release(chosen, &is_full));
    }
    return Status::Ok();
  }

  // Which held write goes next: one of the first that may overtake. held_.size(): none may now.
  size_t Choose() {
    // Who is ahead was overtaken at least as often, so only the head can have to go first.
    if (spec_.delay == 0 && spec_.per_flow == 0) {
      return held_[0].num_overtaken >= spec_.reorder
                 ? 0
                 : Below(std::min<uint64_t>(spec_.reorder + 1, held_.size()));
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
    return candidates_[Below(candidates_.size())];
  }

  // The write at `index` has left.
  void Forget(size_t index) {
    for (size_t i = 0; i < index; ++i) {
      if (spec_.per_flow == 0 || IsSameFlow(held_[i].request, held_[index].request)) {
        ++held_[i].num_overtaken;
      }
    }
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  Status Release(size_t index, bool* is_full) {
    const Held held = held_[index];
    const uint64_t units = held.request.length_bytes / kSplitUnitBytes;
    if (!held.is_last_piece && units >= 2 && spec_.payload_late == 0 && Chance(spec_.split)) {
      Forget(index);
      return StartSplit(held.request, units);
    }
    // Duplicates that have waited long enough go first.
    if (held.request.has_immediate) {
      for (size_t i = 0; i < duplicates_.size() && !*is_full;) {
        if (IsSameFlow(duplicates_[i].request, held.request) &&
            duplicates_[i].num_overtaken >= kMaxOvertaken) {
          JAX_EP_RETURN_IF_ERROR(PostDuplicate(i, is_full));
        } else {
          ++i;
        }
      }
      if (*is_full) return Status::Ok();
    }
    WriteRequest request = held.request;
    if (spec_.payload_late != 0) request.length_bytes = 0;
    JAX_EP_RETURN_IF_ERROR(
        PostInner(request, {InnerWrite::Kind::kWhole, held.request.token}, is_full, &held.request));
    if (*is_full) return Status::Ok();
    Forget(index);
    if (held.request.has_immediate) {
      for (Duplicate& duplicate : duplicates_) {
        if (IsSameFlow(duplicate.request, held.request)) ++duplicate.num_overtaken;
      }
      if (Chance(spec_.duplicate)) {
        request.length_bytes = 0;
        duplicates_.push_back(Duplicate{.request = request, .polls = Below(kMaxDuplicateDelay)});
      }
    }
    return Status::Ok();
  }

  Status PostDuplicate(size_t index, bool* is_full) {
    JAX_EP_RETURN_IF_ERROR(
        PostInner(duplicates_[index].request, {InnerWrite::Kind::kDuplicate, 0}, is_full, nullptr));
    if (!*is_full) duplicates_.erase(duplicates_.begin() + static_cast<std::ptrdiff_t>(index));
    return Status::Ok();
  }

  Status StartSplit(const WriteRequest& request, uint64_t units) {
    const uint64_t num_pieces = std::min(units, 2 + Below(kMaxPieces - 1));
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

  Status PostPieces() {
    bool is_full = false;
    while (!pieces_.empty() && !is_full) {
      const auto [part, number] = pieces_.front();
      JAX_EP_RETURN_IF_ERROR(
          PostInner(part, {InnerWrite::Kind::kPiece, number}, &is_full, nullptr));
      if (!is_full) pieces_.pop_front();
    }
    return Status::Ok();
  }

  // Posts to the inner transport. `late_payload`: the write whose bytes go into the peer's box.
  Status PostInner(WriteRequest request, InnerWrite meaning, bool* is_full,
                   const WriteRequest* late_payload) {
    request.token = next_inner_token_;
    const bool is_late = spec_.payload_late != 0 && late_payload != nullptr;
    // The bytes must be in the box before the arrival can be reported.
    if (is_late && late_payload->length_bytes > 0) PutLate(*late_payload);
    Status status = inner_->PostWrite(request);
    if (status.code() == StatusCode::kResourceExhausted) {
      *is_full = true;  // late bytes are put again next time: the same bytes in the same place
      return Status::Ok();
    }
    if (status.code() == StatusCode::kUnavailable) {
      // The peer has closed meanwhile: the network loses what was under way to it.
      if (meaning.kind == InnerWrite::Kind::kWhole) sent_.push_back({meaning.value, 0});
      return Status::Ok();
    }
    if (!status.ok()) return status;
    inner_writes_[next_inner_token_++] = meaning;
    ++num_inner_posted_;
    return Status::Ok();
  }

  void OnInnerSent(uint64_t token) {
    const auto it = inner_writes_.find(token);
    if (it == inner_writes_.end()) return;
    const InnerWrite write = it->second;
    inner_writes_.erase(it);
    --num_inner_posted_;
    switch (write.kind) {
      case InnerWrite::Kind::kWhole:
        sent_.push_back(Sent{.token = write.value, .polls = Below(spec_.slow_completions + 1)});
        break;
      case InnerWrite::Kind::kPiece: {
        Split& split = splits_[write.value];
        if (--split.num_pieces_under_way == 0) {
          // Its pieces were overtaken meanwhile; it goes next.
          held_.push_front(Held{.request = split.last_piece,
                                .polls = 0,
                                .is_last_piece = true,
                                .num_overtaken = spec_.reorder});
          splits_.erase(write.value);
        }
        break;
      }
      case InnerWrite::Kind::kDuplicate:
        break;
    }
  }

  // kSent and kFlushed events whose time has come.
  size_t TakeReady(std::span<TransportEvent> events) {
    size_t count = 0;
    if (flush_polls_ == 1 && count < events.size()) {
      flush_polls_ = 0;
      ApplyLate();
      events[count++] =
          TransportEvent{.kind = TransportEvent::Kind::kFlushed, .token = flush_token_};
    }
    for (size_t i = 0; i < sent_.size() && count < events.size();) {
      if (sent_[i].polls > 0) {
        ++i;
        continue;
      }
      events[count++] =
          TransportEvent{.kind = TransportEvent::Kind::kSent, .token = sent_[i].token};
      sent_.erase(sent_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return count;
  }

  void PutLate(const WriteRequest& request) {
    const std::byte* from = regions_[request.local_region].data() + request.local_offset;
    Peer& peer = peers_[request.peer];
    std::lock_guard lock(peer.box->mutex);
    peer.box->late.push_back({.bytes = {from, from + request.length_bytes},
                              .region = peer.regions[request.remote_region].handle,
                              .offset = request.remote_offset});
  }

  void ApplyLate() {
    std::lock_guard lock(box_->mutex);
    for (const LateBox::Late& late : box_->late) {
      std::memcpy(box_->regions[late.region].data() + late.offset, late.bytes.data(),
                  late.bytes.size());
    }
    box_->late.clear();
  }

  std::unique_ptr<Transport> inner_;
  const FaultySpec spec_;
  std::mt19937_64 random_;
  TransportCaps caps_;
  std::vector<Peer> peers_;
  std::vector<std::span<std::byte>> regions_;

  bool is_mortal_;
  bool is_dead_ = false;
  uint64_t num_posts_ = 0;
  uint64_t storm_ = 0;  // posts that still answer kResourceExhausted

  std::vector<size_t> candidates_;  // of Choose
  std::deque<Held> held_;           // accepted, not yet posted to the inner transport; oldest first
  std::deque<Duplicate> duplicates_;
  std::map<uint64_t, Split> splits_;
  std::deque<std::pair<WriteRequest, uint64_t>> pieces_;  // of splits, to be posted
  uint64_t next_split_ = 0;
  std::deque<Sent> sent_;  // kSent events held back
  std::map<uint64_t, InnerWrite> inner_writes_;
  uint64_t next_inner_token_ = 0;
  uint64_t num_inner_posted_ = 0;

  std::shared_ptr<LateBox> box_;
  uint64_t box_id_;
  int64_t flush_polls_ = 0;  // > 0: a Flush is under way; 1: it completes at the next poll
  uint64_t flush_token_ = 0;
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeFaultyTransport(std::unique_ptr<Transport> inner,
                                                       const TransportOptions& options) {
  JAX_EP_ASSIGN_OR_RETURN(const FaultySpec spec, FaultySpec::Parse(options.faulty_spec));
  if (spec.split > 0 && !inner->Caps().delivery_complete) {
    return InvalidArgument("faulty: split needs a transport whose kSent means delivered");
  }
  return std::unique_ptr<Transport>(
      std::make_unique<FaultyTransport>(std::move(inner), spec, options));
}

}  // namespace jax_ep
