// cuda: as with shm, an immediate is an entry in the peer's inbox, but the bytes move by copies
// that run beside this thread, from one GPU's memory to another's.
//
// A copy costs this thread some microseconds and a copy engine as much between two of them,
// whatever its length. So writes are gathered while the copies of earlier ones run, and while more
// keep coming; those that continue each other on both sides become one copy.
//
//   PostWrite -> waiting_ -> (sorted, joined) -> flying_ -> inboxes and kSent
//
// Writes without bytes go to the inbox at once; a transport promises no order.
#include "proxy/transport/cuda.h"

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "proxy/abi/activity.h"
#include "proxy/abi/command.h"
#include "proxy/base/blob.h"
#include "proxy/base/device_copies.h"
#include "proxy/transport/sent_queue.h"
#include "proxy/transport/shared_inbox.h"
#include "proxy/transport/write_bounds.h"

namespace jax_ep {
namespace {

constexpr uint64_t kKeyMagic = 0x3359454b4c504541;
// Longer than a copy takes to begin, at the rate of a copy engine.
constexpr uint64_t kManyBytes = uint64_t{2} << 20;
// Of a batch, whose writes are reported together when its last copy has ended: 40 us of a copy
// engine.
constexpr uint64_t kMostBytes = uint64_t{16} << 20;
// Those of one call come closer together than the first of these; for the other at most they wait
// while no copy runs.
constexpr uint64_t kQuietNs = 1'500;
constexpr uint64_t kMostIdleNs = 10'000;

class CudaTransport : public Transport {
 public:
  CudaTransport(SharedInbox own, DeviceCopies* copies)
      : own_(std::move(own)), copies_(*copies), bounds_("cuda", kMaxCommandBytes) {
    waiting_.reserve(SentQueue::kMaxEntries);
    late_.reserve(SentQueue::kMaxEntries);
    for (Batch& batch : flying_) batch.reserve(SentQueue::kMaxEntries);
  }

  ~CudaTransport() override { own_.inbox().Close(); }

  const TransportCaps& Caps() const override { return caps_; }
  std::string LocalAddress() const override { return own_.Address(); }

  Result<uint32_t> Connect(std::string_view address, Deadline /*deadline*/) override {
    Peer peer;
    JAX_EP_ASSIGN_OR_RETURN(peer.mapped, own_.Open(address));
    peers_.push_back(std::move(peer));
    return bounds_.AddPeer();
  }

  Result<LocalRegion> Register(const MemoryRegion& region) override {
    if (region.device < 0) return InvalidArgument("cuda: the region is not a GPU's memory");
    if (region.bytes.empty()) return InvalidArgument("cuda: an empty region");
    if (region.export_blob.empty()) return InvalidArgument("cuda: the region has no export_blob");
    regions_.push_back(region.bytes);
    return LocalRegion{
        .handle = bounds_.AddLocal(region.bytes.size()),
        .key =
            BlobWriter().U64(kKeyMagic).U64(region.bytes.size()).Text(region.export_blob).Take()};
  }

  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    JAX_EP_RETURN_IF_ERROR(bounds_.CheckPeer(peer));
    BlobReader reader(key);
    const uint64_t magic = reader.U64();
    const uint64_t num_bytes = reader.U64();
    const std::string_view export_blob = reader.Text();
    if (!reader.finished() || magic != kKeyMagic) {
      return InvalidArgument("cuda: not a region key of cuda");
    }
    const std::span<std::byte> mapped = copies_.Find(export_blob);
    if (mapped.size() < num_bytes || mapped.empty()) {
      return InvalidArgument("cuda: " + std::to_string(num_bytes) +
                             " bytes of a peer's GPU are not mapped in this process; it reaches "
                             "GPUs of one host");
    }
    peers_[peer].regions.push_back(mapped.first(num_bytes));
    return bounds_.AddRemote(peer, num_bytes);
  }

  Status PostWrite(const WriteRequest& request) override {
    JAX_EP_RETURN_IF_ERROR(bounds_.Check(request));
    if (peers_[request.peer].mapped.inbox.closed()) {
      return Unavailable("cuda: the peer has closed its endpoint");
    }
    if (num_open_ == SentQueue::kMaxEntries) return Full();
    if (request.length_bytes > 0) {
      newest_ns_ = MonotonicNs();
      if (waiting_.empty()) oldest_ns_ = newest_ns_;
      waiting_.push_back(request);
      num_waiting_bytes_ += request.length_bytes;
    } else if (!Deliver(request)) {
      return Full();
    }
    ++num_open_;
    return Status::Ok();
  }

  // An arrival's bytes were in the GPU's memory before it was reported; kernels that have acquired
  // a flag that followed it see them.
  Result<bool> Flush(uint64_t /*token*/) override { return true; }

  Result<size_t> Poll(std::span<TransportEvent> events) override {
    JAX_EP_RETURN_IF_ERROR(FinishBatches());
    JAX_EP_RETURN_IF_ERROR(StartBatch());
    size_t count = sent_.PopInto(events);
    num_open_ -= count;
    for (; count < events.size(); ++count) {
      const std::optional<uint32_t> immediate = own_.inbox().TryPop();
      if (!immediate) break;
      events[count] =
          TransportEvent{.kind = TransportEvent::Kind::kArrived, .immediate = *immediate};
    }
    return count;
  }

  // No bell rings when a copy ends.
  bool PrepareToSleep() override { return num_open_ == 0; }

  void AppendState(std::string* text) const override {
    *text += "    cuda: inbox of " + std::to_string(own_.inbox().num_slots()) + " slots, " +
             std::to_string(num_writes_) + " writes in " + std::to_string(num_copies_) +
             " copies\n";
  }

 private:
  using Batch = std::vector<WriteRequest>;
  struct Peer {
    SharedInbox::Mapped mapped;
    std::vector<std::span<std::byte>> regions;
  };

  static Status Full() { return ResourceExhausted("queue full"); }

  Batch& BatchOf(uint64_t number) { return flying_[number % flying_.size()]; }

  // Reports a write whose bytes are at their place. False: the peer's inbox is full.
  bool Deliver(const WriteRequest& request) {
    SharedInbox::Mapped& peer = peers_[request.peer].mapped;
    // One that has closed meanwhile: the network loses what was under way to it.
    if (request.has_immediate && !peer.inbox.closed()) {
      if (!peer.inbox.TryPush(request.immediate)) return false;
      if (peer.bell != nullptr) peer.bell->Ring();
    }
    sent_.Push(request.token);
    return true;
  }

  Status FinishBatches() {
    std::erase_if(late_, [this](const WriteRequest& write) { return Deliver(write); });
    if (num_finished_ == num_started_) return Status::Ok();
    JAX_EP_ASSIGN_OR_RETURN(const uint64_t newest, copies_.NewestDone());
    for (; num_finished_ < newest; ++num_finished_) {
      Batch& batch = BatchOf(num_finished_ + 1);
      for (const WriteRequest& write : batch) {
        if (!Deliver(write)) late_.push_back(write);
      }
      batch.clear();
    }
    return Status::Ok();
  }

  // Whether it is better to wait for more writes than to start those that are here.
  bool IsGathering() const {
    if (num_waiting_bytes_ >= kMostBytes) return false;
    const uint64_t now_ns = MonotonicNs();
    if (now_ns - newest_ns_ >= kQuietNs) return false;
    const bool is_idle = num_started_ == num_finished_;
    return !is_idle || (num_waiting_bytes_ < kManyBytes && now_ns - oldest_ns_ < kMostIdleNs);
  }

  Status StartBatch() {
    if (waiting_.empty() || num_started_ - num_finished_ == flying_.size() || IsGathering()) {
      return Status::Ok();
    }
    Batch& batch = BatchOf(num_started_ + 1);
    TakeOldest(batch);
    const auto place = [](const WriteRequest& write) {
      return std::tie(write.peer, write.remote_region, write.local_region, write.remote_offset);
    };
    std::sort(batch.begin(), batch.end(),
              [&](const auto& a, const auto& b) { return place(a) < place(b); });
    WriteRequest joined = batch.front();
    for (const WriteRequest& write : std::span(batch).subspan(1)) {
      const uint64_t ahead = write.remote_offset - joined.remote_offset;
      if (write.peer == joined.peer && write.remote_region == joined.remote_region &&
          write.local_region == joined.local_region && ahead <= joined.length_bytes &&
          write.local_offset == joined.local_offset + ahead) {
        joined.length_bytes = std::max(joined.length_bytes, ahead + write.length_bytes);
      } else {
        JAX_EP_RETURN_IF_ERROR(Start(joined));
        joined = write;
      }
    }
    JAX_EP_RETURN_IF_ERROR(Start(joined));
    JAX_EP_RETURN_IF_ERROR(copies_.EndBatch());
    num_writes_ += batch.size();
    ++num_started_;
    return Status::Ok();
  }

  // Moves what waits to `batch`, which is empty: the oldest of it, up to kMostBytes.
  void TakeOldest(Batch& batch) {
    uint64_t num_bytes = 0;
    auto end = waiting_.begin();
    for (; end != waiting_.end(); ++end) {
      if (num_bytes > 0 && num_bytes + end->length_bytes > kMostBytes) break;
      num_bytes += end->length_bytes;
    }
    batch.assign(waiting_.begin(), end);
    waiting_.erase(waiting_.begin(), end);
    num_waiting_bytes_ -= num_bytes;
  }

  Status Start(const WriteRequest& joined) {
    ++num_copies_;
    return copies_.Start(
        peers_[joined.peer].regions[joined.remote_region].data() + joined.remote_offset,
        regions_[joined.local_region].data() + joined.local_offset, joined.length_bytes);
  }

  const TransportCaps caps_{.arrival_implies_visible = true,
                            .delivery_complete = true,
                            .cheap_wake = true,
                            .max_message_bytes = kMaxCommandBytes,
                            .window_bytes = uint64_t{64} << 20,  // 400 GB/s, 50 us
                            .immediate_bits = 32};
  SharedInbox own_;
  DeviceCopies& copies_;
  WriteBounds bounds_;
  std::vector<std::span<std::byte>> regions_;
  std::vector<Peer> peers_;

  Batch waiting_;                           // posted, not started
  uint64_t num_waiting_bytes_ = 0;          // of these
  uint64_t oldest_ns_ = 0, newest_ns_ = 0;  // when these were posted
  std::array<Batch, DeviceCopies::kMaxBatches> flying_;
  Batch late_;                                   // copied, but the peer's inbox was full
  uint64_t num_started_ = 0, num_finished_ = 0;  // batches
  SentQueue sent_;
  uint64_t num_open_ = 0;  // writes whose kSent was not reported
  uint64_t num_writes_ = 0, num_copies_ = 0;
};

}  // namespace

Result<std::unique_ptr<Transport>> MakeCudaTransport(const TransportOptions& options) {
  if (options.copies == nullptr) {
    return InvalidArgument(
        "cuda: it moves the memory of GPUs, and this rank is not on one; use \"shm\"");
  }
  JAX_EP_ASSIGN_OR_RETURN(SharedInbox own, SharedInbox::Create("cuda", options));
  return std::unique_ptr<Transport>(
      std::make_unique<CudaTransport>(std::move(own), options.copies));
}

}  // namespace jax_ep
