// The faulty transport: the sender's end holds posted writes (faulty_writes.h), the receiver's end
// the bytes that come late. Speed is no aim here: it may allocate and lock.
#include "proxy/transport/faulty.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "proxy/abi/command.h"
#include "proxy/base/blob.h"
#include "proxy/base/random.h"
#include "proxy/transport/faulty_writes.h"
#include "proxy/transport/late_payload.h"

namespace jax_ep {
namespace {

constexpr uint64_t kAddressMagic = 0x3159544c55414641;
constexpr uint64_t kKeyMagic = 0x3259544c55414641;
constexpr size_t kMaxHeld = 256;   // writes under way; more answer kResourceExhausted
constexpr uint64_t kMaxStorm = 8;  // length of an AGAIN storm

class FaultyTransport : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, const FaultySpec& spec,
                  const TransportOptions& options, uint64_t token)
      : inner_(std::move(inner)),
        spec_(spec),
        dice_(spec.seed * kMaxRanks + options.rank),
        writes_(spec, inner_.get(), &dice_, [this](const WriteRequest& late) { PutLate(late); }),
        is_mortal_(spec.die_after > 0 &&
                   (spec.die_rank == UINT64_MAX || spec.die_rank == options.rank)),
        box_(std::make_shared<LateBox>(token)),
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
    return BlobWriter()
        .U64(kAddressMagic)
        .U64(box_->token)
        .U64(box_id_)
        .Text(inner_->LocalAddress())
        .Take();
  }

  Result<uint32_t> Connect(std::string_view address, Deadline deadline) override {
    BlobReader reader(address);
    const uint64_t magic = reader.U64();
    const uint64_t token = reader.U64();
    const uint64_t box_id = reader.U64();
    const std::string_view inner_address = reader.Text();
    if (!reader.finished() || magic != kAddressMagic) {
      return InvalidArgument("faulty: the peer is not wrapped by the faulty transport");
    }
    Peer peer;
    if (spec_.payload_late != 0) {
      peer.box = LateBoxes::Get().Find(box_id);
      if (peer.box == nullptr || peer.box->token != token) {
        return InvalidArgument("faulty: payload_late works between ranks of one process only");
      }
    }
    Result<uint32_t> handle = inner_->Connect(inner_address, deadline);
    if (handle.ok()) peers_.push_back(std::move(peer));
    return handle;
  }

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    if (region.device >= 0 && spec_.payload_late != 0) {
      return InvalidArgument("faulty: payload_late does not work with the memory of a GPU");
    }
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
    if (storm_ == 0 && dice_.Chance(spec_.again)) storm_ = 1 + dice_.Below(kMaxStorm);
    if (storm_ > 0) {
      --storm_;
      return Full();
    }
    if (writes_.num_held() >= kMaxHeld) return Full();
    writes_.Hold(request);
    if (is_mortal_ && ++num_posts_ >= spec_.die_after) is_dead_ = true;
    return Status::Ok();
  }

  Result<bool> Flush(uint64_t token) override {
    if (spec_.payload_late == 0) return inner_->Flush(token);
    if (dice_.Below(2) == 0) {
      ApplyLate();
      return true;
    }
    flush_polls_ = 1 + static_cast<int64_t>(dice_.Below(spec_.slow_completions + 1));
    flush_token_ = token;
    return false;
  }

  Result<size_t> Poll(std::span<TransportEvent> events) override {
    if (is_dead_) return size_t{0};
    JAX_EP_RETURN_IF_ERROR(writes_.Drive());
    size_t count = TakeFlushed(events);
    count += writes_.TakeSent(events.subspan(count));
    JAX_EP_ASSIGN_OR_RETURN(const size_t num_inner, inner_->Poll(events.subspan(count)));
    // Our own events and those of pieces are taken out; the others move together.
    size_t kept = count;
    for (size_t i = count; i < count + num_inner; ++i) {
      if (events[i].kind == TransportEvent::Kind::kSent) {
        writes_.OnInnerSent(events[i].token);
      } else {
        events[kept++] = events[i];
      }
    }
    return kept;
  }

  bool PrepareToSleep() override {
    return writes_.is_idle() && flush_polls_ == 0 && inner_->PrepareToSleep();
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

  static Status Full() { return ResourceExhausted("queue full"); }

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

  // The end of a Flush, one poll nearer; 1 if it is there.
  size_t TakeFlushed(std::span<TransportEvent> events) {
    if (flush_polls_ > 1) --flush_polls_;
    if (flush_polls_ != 1 || events.empty()) return 0;
    flush_polls_ = 0;
    ApplyLate();
    events[0] = TransportEvent{.kind = TransportEvent::Kind::kFlushed, .token = flush_token_};
    return 1;
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
  Dice dice_;
  FaultyWrites writes_;
  TransportCaps caps_;
  std::vector<Peer> peers_;
  std::vector<std::span<std::byte>> regions_;

  bool is_mortal_;
  bool is_dead_ = false;
  uint64_t num_posts_ = 0;
  uint64_t storm_ = 0;  // posts that still answer kResourceExhausted

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
  uint64_t token = 0;
  JAX_EP_RETURN_IF_ERROR(DrawRandom("faulty", &token));
  return std::unique_ptr<Transport>(
      std::make_unique<FaultyTransport>(std::move(inner), spec, options, token));
}

}  // namespace jax_ep
