// Transport: how bytes and 32-bit immediates get from one rank to another. The reference
// implementation, and so the manual for writing another, is proxy/transport/loopback.cc; the suite
// that every implementation passes is tests/proxy/transport_conformance.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "proxy/base/deadline.h"
#include "proxy/base/device_copies.h"
#include "proxy/base/doorbell.h"
#include "proxy/base/rank_name.h"
#include "proxy/base/status.h"

namespace jax_ep {

// Positive promises: false / 0 always means "not promised" and is always safe to state.
struct TransportCaps {
  bool arrival_implies_visible = false;  // payload is visible when its arrival is reported
  bool delivery_complete = false;        // kSent means written at the target, not only sent
  bool cheap_wake = false;               // senders ring the bell themselves: sleeping costs little
  uint64_t max_message_bytes = 0;        // longest PostWrite
  // Bytes of one flow that may be unacknowledged unless the user says it: several times what the
  // link carries until an acknowledgement is back.
  uint64_t window_bytes = uint64_t{8} << 20;
  // At least 32 for our protocol; 64: WriteRequest::secret travels too.
  uint32_t immediate_bits = 0;
};

// Memory to be read and written by peers.
struct MemoryRegion {
  std::span<std::byte> bytes = {};
  // What shm and cuda find exactly these bytes by: SharedMemory::Export of host memory, a name that
  // DeviceCopies::Find of peers knows of a GPU's; "" if there is none.
  std::string export_blob = {};
  int device = -1;     // -1: host memory
  int dmabuf_fd = -1;  // of device memory, where the platform exports it and verbs is to use it
};

struct LocalRegion {
  uint32_t handle = 0;   // for WriteRequest::local_region
  std::string key = {};  // for the peer's ImportRemoteKey
};

struct WriteRequest {
  uint32_t peer = 0;           // handle of Connect
  uint32_t local_region = 0;   // handle of Register; ignored when length_bytes is 0
  uint32_t remote_region = 0;  // handle of ImportRemoteKey; ignored when length_bytes is 0
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length_bytes = 0;  // 0: only the immediate travels
  bool has_immediate = false;
  uint32_t immediate = 0;
  uint32_t secret = 0;  // travels beside the immediate where Caps says that there is room
  uint64_t token = 0;   // comes back in the kSent event
};

struct TransportEvent {
  enum class Kind : uint8_t {
    kSent,     // a write of ours no longer needs its source bytes; `token` is set
    kArrived,  // a write with immediate has arrived; `immediate` (and `secret`, where Caps says
               // so) are set. Says not from whom: on some networks that may be a stranger
    kFlushed,  // a Flush has completed; `token` is set
  };
  Kind kind = Kind::kSent;
  uint32_t immediate = 0;
  uint32_t secret = 0;
  uint64_t token = 0;
};

// One Transport serves one local rank ("endpoint").
//
// Thread rule: one call at a time; the caller orders the calls of different threads. Lifetime:
// registered memory outlives the Transport, and peers stop writing (barrier or failure) before the
// memory is unmapped.
//
// Promises to callers, whatever the network: each posted write is delivered exactly once as far as
// its bytes go; its immediate is reported at least once; nothing is ever written outside a
// registered region. No promise on order, on time, or on noticing that a peer is gone, unless Caps
// says so. An implementation never blocks in PostWrite, Flush or Poll.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual const TransportCaps& Caps() const = 0;

  // Opaque address, to be handed to Connect of every peer.
  virtual std::string LocalAddress() const = 0;

  // Makes a peer reachable and returns its handle (dense, from 0). Called once per peer. May wait
  // within the deadline; what takes a round trip is better left to the first write.
  // \error kInvalidArgument   not an address of this transport, or of one with other settings
  // \error kUnavailable       the peer is gone
  // \error kDeadlineExceeded
  virtual Result<uint32_t> Connect(std::string_view address, Deadline deadline) = 0;

  virtual Result<LocalRegion> Register(const MemoryRegion& region) = 0;

  // Makes a region of a connected peer writable; returns its handle (dense per peer, from 0).
  virtual Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) = 0;

  // Posts one write. The source bytes must stay unchanged until its kSent event.
  // \error kResourceExhausted  nothing was posted, as a queue is full or the peer has not answered
  //                            yet: Poll, then try again
  // \error kInvalidArgument    unknown handle, or outside a region (nothing was posted); the peer
  //                            refuses to connect
  // \error kUnavailable        the peer is gone for good
  // \error kInternal           this host's own devices or limits
  virtual Status PostWrite(const WriteRequest& request) = 0;

  // Asks that the payload of every arrival reported so far become visible to this host (and its
  // GPUs). true: it is. false: wait for the kFlushed event with `token`. Only called if
  // arrival_implies_visible is not promised, and never while an earlier one is under way.
  virtual Result<bool> Flush(uint64_t token) = 0;

  // Reports up to events.size() events and returns how many. Also drives progress, so it is called
  // again and again while anything is under way.
  virtual Result<size_t> Poll(std::span<TransportEvent> events) = 0;

  // The poller is about to sleep until its bell rings. true: the bell will ring once there is
  // something for Poll. false: not now, Poll and ask again.
  virtual bool PrepareToSleep() { return true; }

  // Adds lines for dump_state: devices and what went through each. Any thread.
  virtual void AppendState(std::string* /*text*/) const {}
};

// Where a rank sits in its host: what the choice of its NICs needs.
struct RankPlace {
  uint32_t local_index = 0;  // among the group's ranks on this host, of all its teams
  uint32_t num_local = 0;    // how many those are; 0: not known
  // PCI address of its accelerator, "0000:4f:00.0"; "" for a rank on CPUs.
  std::string device_pci = {};
};

// What a transport may need from its proxy.
struct TransportOptions {
  uint32_t rank = 0;         // of this endpoint, for messages
  TeamId team = {};          // of it and its peers, for messages
  uint32_t inbox_slots = 0;  // power of two; 0: default
  // The bell of the thread that polls. A transport rings it when Poll has something new to report
  // (also from another process, through bell_export). Both may be empty: then nobody sleeps.
  Doorbell* bell = nullptr;
  std::string bell_export = {};  // SharedMemory::Export; the Doorbell is at its first byte
  // Spec of the faulty wrapper; "" for none.
  std::string faulty_spec = {};
  RankPlace place = {};
  bool serves_device = false;      // it will be asked to Register memory of a GPU
  DeviceCopies* copies = nullptr;  // for cuda, of a rank on a GPU; outlives the transport
};

}  // namespace jax_ep
