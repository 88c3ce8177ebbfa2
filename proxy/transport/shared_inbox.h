// SharedInbox: an inbox in shared memory, so that senders may be other processes of this host, and
// the way to those of peers. A killed peer leaves its inbox usable and every mapping valid.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "proxy/base/blob.h"
#include "proxy/base/doorbell.h"
#include "proxy/base/shared_memory.h"
#include "proxy/base/status.h"
#include "proxy/transport.h"
#include "proxy/transport/inbox.h"

namespace jax_ep {

class SharedInbox {
 public:
  // `transport` begins every error and is part of every address.
  static Result<SharedInbox> Create(std::string transport, const TransportOptions& options) {
    const uint32_t num_slots = options.inbox_slots == 0 ? kDefaultInboxSlots : options.inbox_slots;
    JAX_EP_ASSIGN_OR_RETURN(SharedMemory memory,
                            SharedMemory::Create(InboxBytes(num_slots), /*shareable=*/true));
    const Inbox inbox = Inbox::Create(memory.bytes(), num_slots);
    return SharedInbox(std::move(transport), options.bell_export, std::move(memory), inbox);
  }

  Inbox& inbox() { return inbox_; }
  const Inbox& inbox() const { return inbox_; }

  std::string Address() const {
    return BlobWriter()
        .U64(kMagic)
        .Text(transport_)
        .Text(memory_.Export())
        .Text(bell_export_)
        .Take();
  }

  // Of a peer; the mappings live as long as this object.
  struct Mapped {
    SharedMemory inbox_memory;
    SharedMemory bell_memory;
    Inbox inbox;
    Doorbell* bell = nullptr;  // null: it has none
  };
  // \error kInvalidArgument  not an address of this transport
  // \error kUnavailable      the peer is gone
  Result<Mapped> Open(std::string_view address) const {
    BlobReader reader(address);
    const uint64_t magic = reader.U64();
    const std::string_view transport = reader.Text();
    const std::string_view inbox_export = reader.Text();
    const std::string_view bell_export = reader.Text();
    if (!reader.finished() || magic != kMagic || transport != transport_) {
      return InvalidArgument(transport_ + ": not a " + transport_ + " address (" +
                             std::to_string(address.size()) + " bytes)");
    }
    Mapped mapped;
    JAX_EP_ASSIGN_OR_RETURN(mapped.inbox_memory, SharedMemory::Import(inbox_export));
    const std::optional<Inbox> inbox = Inbox::Open(mapped.inbox_memory.bytes());
    if (!inbox) return InvalidArgument(transport_ + ": the peer's inbox has an impossible size");
    mapped.inbox = *inbox;
    if (bell_export.empty()) return mapped;
    JAX_EP_ASSIGN_OR_RETURN(mapped.bell_memory, SharedMemory::Import(bell_export));
    if (mapped.bell_memory.bytes().size() < sizeof(Doorbell)) {
      return InvalidArgument(transport_ + ": the peer's bell has an impossible size");
    }
    mapped.bell = reinterpret_cast<Doorbell*>(mapped.bell_memory.bytes().data());
    return mapped;
  }

 private:
  static constexpr uint64_t kMagic = 0x334d48534c504541;

  SharedInbox(std::string transport, std::string bell_export, SharedMemory memory, Inbox inbox)
      : transport_(std::move(transport)),
        bell_export_(std::move(bell_export)),
        memory_(std::move(memory)),
        inbox_(inbox) {}

  std::string transport_;
  std::string bell_export_;
  SharedMemory memory_;
  Inbox inbox_;
};

}  // namespace jax_ep
