// libFuzzer: whatever comes from the network before it is trusted. The first byte chooses what the
// rest is: a bootstrap blob, a transport's address or key, a handshake, or immediates on arrival.
// Built with clang only (.ci/run fuzz); a crash, a sanitizer's report or a hang is a failure.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "proxy/abi/imm.h"
#include "proxy/base/blob.h"
#include "proxy/peer_blob.h"
#include "proxy/proxy.h"
#include "proxy/transport/registry.h"
#include "proxy/transport/side_channel.h"
#include "proxy/transport/verbs_handshake.h"

namespace jax_ep {
namespace {

constexpr uint64_t kHeapBytes = 4096;
constexpr uint32_t kLlSlots = 4;

Deadline Now() { return Deadline::After(std::chrono::nanoseconds(0)); }

// Decoding must end, and what it accepts must come out again the same.
void FuzzPeerBlob(std::string_view text) {
  const Result<PeerBlob> blob = PeerBlob::Decode(text);
  if (blob.ok() && !PeerBlob::Decode(blob->Encode()).ok()) __builtin_trap();
}

// An address or a key of each transport; a wrong one is refused, a right one harms nothing.
void FuzzAddress(std::string_view text) {
  for (const char* name : {"loopback", "shm"}) {
    auto transport = MakeTransport(name, TransportOptions{.inbox_slots = 16});
    if (!transport.ok()) continue;
    const Result<uint32_t> peer = (*transport)->Connect(text, Now());
    if (!peer.ok()) continue;
    const Result<uint32_t> region = (*transport)->ImportRemoteKey(*peer, text);
    if (region.ok()) __builtin_trap();  // an address is no key
  }
}

// Two endpoints in one process; the second is real, the first sends immediates that no proxy would.
// They may end the second with an error. Nothing but flags and the bytes sent may change, and the
// guard bytes around the heap's flags must stay.
void FuzzImmediates(std::string_view bytes) {
  alignas(64) static std::array<std::byte, 3 * kHeapBytes> memory;
  memory.fill(std::byte{0x5A});
  const std::span<std::byte> heap = std::span(memory).subspan(kHeapBytes, kHeapBytes);
  std::fill(heap.begin(), heap.end(), std::byte{0});
  auto* const flags = reinterpret_cast<std::atomic<uint64_t>*>(heap.data());
  std::unique_ptr<Transport> attacker;
  FailureLatch failure;
  auto proxy = Proxy::Create(ProxyOptions{.group_name = "fuzz",
                                          .transport = "loopback",
                                          .peer_timeout = std::chrono::seconds(20),
                                          .timeout = std::chrono::seconds(20)},
                             &failure);
  if (!proxy.ok()) __builtin_trap();
  const Result<int> endpoint = (*proxy)->AddEndpoint(
      EndpointOptions{.rank = 0,
                      .num_ranks = 3,
                      .peers = {1, 2},
                      .ll_slots = kLlSlots,
                      .heap = heap,
                      .flag = [flags](Channel channel, uint32_t source) {
                        return flags + static_cast<uint32_t>(channel) * 3 + source;
                      }});
  if (!endpoint.ok()) __builtin_trap();
  auto made = MakeTransport("loopback", TransportOptions{.rank = 1});
  if (!made.ok()) __builtin_trap();
  attacker = std::move(*made);
  // Both peers are the attacker: it owns their flows.
  const Result<PeerBlob> own = PeerBlob::Decode((*proxy)->LocalBlob(0));
  const Result<LocalRegion> region = attacker->Register(MemoryRegion{.bytes = heap});
  for (const uint32_t rank : {1u, 2u}) {
    const PeerBlob blob{.group_name = "fuzz",
                        .rank = rank,
                        .num_ranks = 3,
                        .window_messages = own->window_messages,
                        .ll_slots = kLlSlots,
                        .transport_address = attacker->LocalAddress(),
                        .heap_key = region->key,
                        .peers = {0}};
    if (!(*proxy)->Connect(0, rank, blob.Encode(), Now()).ok()) __builtin_trap();
  }
  const Result<uint32_t> target = attacker->Connect(own->transport_address, Now());
  if (!(*proxy)->Start().ok() || !target.ok()) __builtin_trap();
  std::array<TransportEvent, 64> events;
  for (size_t i = 0; i + sizeof(uint32_t) <= bytes.size() && !failure.failed();
       i += sizeof(uint32_t)) {
    uint32_t immediate = 0;
    std::memcpy(&immediate, bytes.data() + i, sizeof(immediate));
    while (attacker
               ->PostWrite(
                   WriteRequest{.peer = *target, .has_immediate = true, .immediate = immediate})
               .code() == StatusCode::kResourceExhausted) {
      if (!attacker->Poll(events).ok()) __builtin_trap();
    }
    (void)attacker->Poll(events);
  }
  // Goodbyes of both, so that the proxy's own end does not wait for acknowledgements.
  attacker.reset();
  (*proxy)->Stop();
  const auto is_intact = [](std::span<const std::byte> guard) {
    for (const std::byte byte : guard) {
      if (byte != std::byte{0x5A}) return false;
    }
    return true;
  };
  if (!is_intact(std::span(memory).first(kHeapBytes)) ||
      !is_intact(std::span(memory).last(kHeapBytes))) {
    __builtin_trap();
  }
}

}  // namespace
}  // namespace jax_ep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_ep;
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 5) {
    case 0:
      FuzzPeerBlob(rest);
      break;
    case 1:
      FuzzAddress(rest);
      break;
    case 2:
      (void)VerbsHandshake::Decode(rest);
      break;
    case 3:
      if (rest.size() < 64) (void)AskPeer(rest, "", Now());
      break;
    default:
      FuzzImmediates(rest.substr(0, 256));
      break;
  }
  return 0;
}
