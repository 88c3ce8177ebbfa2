// One verbs endpoint of ours, driven by lines on stdin, so that a peer that shares no code with us
// (pyverbs_peer.py) can test it. Addresses and keys are in hexadecimal.
//
//   connect ADDRESS KEY   -> "connected HANDLE" | "error TEXT"
//   write HANDLE FROM TO LENGTH IMMEDIATE   -> "sent" | "error TEXT", after the completion
//   fill SEED             fills our region: byte i = SEED + i
//   await                 -> "arrived IMMEDIATE CHECKSUM", the sum of all bytes of our region
//   quit
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>

#include "proxy/base/shared_memory.h"
#include "proxy/transport/registry.h"

namespace jax_ep {
namespace {

constexpr uint64_t kRegionBytes = 1 << 16;
constexpr std::chrono::seconds kTimeout{30};

std::string ToHex(const std::string& bytes) {
  std::string text;
  char pair[3];
  for (const char byte : bytes) {
    std::snprintf(pair, sizeof(pair), "%02x", static_cast<unsigned char>(byte));
    text += pair;
  }
  return text;
}

std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

class Target {
 public:
  Target(std::unique_ptr<Transport> transport, std::span<std::byte> region, LocalRegion local)
      : transport_(std::move(transport)), region_(region), local_(std::move(local)) {}

  std::string Connect(const std::string& address, const std::string& key) {
    const Result<uint32_t> peer = transport_->Connect(FromHex(address), Deadline::After(kTimeout));
    if (!peer.ok()) return "error " + peer.status().message();
    const Result<uint32_t> remote = transport_->ImportRemoteKey(*peer, FromHex(key));
    if (!remote.ok()) return "error " + remote.status().message();
    return "connected " + std::to_string(*peer);
  }

  std::string Write(uint32_t peer, uint64_t from, uint64_t to, uint64_t length,
                    uint32_t immediate) {
    const WriteRequest request{.peer = peer,
                               .local_offset = from,
                               .remote_offset = to,
                               .length_bytes = length,
                               .has_immediate = true,
                               .immediate = immediate};
    const Deadline deadline = Deadline::After(kTimeout);
    Status posted = transport_->PostWrite(request);
    // The first write to a peer connects to it.
    while (posted.code() == StatusCode::kResourceExhausted && !deadline.expired()) {
      std::this_thread::yield();
      posted = transport_->PostWrite(request);
    }
    if (!posted.ok()) return "error " + posted.message();
    return Await([](const TransportEvent& event) {
      return event.kind == TransportEvent::Kind::kSent ? "sent" : "";
    });
  }

  std::string AwaitArrival() {
    return Await([this](const TransportEvent& event) -> std::string {
      if (event.kind != TransportEvent::Kind::kArrived) return "";
      uint64_t sum = 0;
      for (const std::byte byte : region_) sum += static_cast<uint8_t>(byte);
      return "arrived " + std::to_string(event.immediate) + " " + std::to_string(sum);
    });
  }

  void Fill(uint64_t seed) {
    for (size_t i = 0; i < region_.size(); ++i) region_[i] = static_cast<std::byte>(seed + i);
  }

 private:
  template <typename Answer>
  std::string Await(Answer answer) {
    const Deadline deadline = Deadline::After(kTimeout);
    while (!deadline.expired()) {
      TransportEvent event;
      const Result<size_t> count = transport_->Poll({&event, 1});
      if (!count.ok()) return "error " + count.status().message();
      if (*count == 0) {
        std::this_thread::yield();  // soft-RoCE's own thread may need this core
        continue;
      }
      if (const std::string text = answer(event); !text.empty()) return text;
    }
    return "error timeout";
  }

  std::unique_ptr<Transport> transport_;
  std::span<std::byte> region_;
  LocalRegion local_;
};

int Run() {
  Result<SharedMemory> memory = SharedMemory::Create(kRegionBytes, /*shareable=*/false);
  auto transport = MakeTransport("verbs", TransportOptions{.rank = 7});
  if (!memory.ok() || !transport.ok()) {
    std::cerr << transport.status().message() << "\n";
    return 1;
  }
  const Result<LocalRegion> local = (*transport)->Register(MemoryRegion{.bytes = memory->bytes()});
  if (!local.ok()) {
    std::cerr << local.status().message() << "\n";
    return 1;
  }
  std::cout << ToHex((*transport)->LocalAddress()) << " " << ToHex(local->key) << std::endl;
  Target target(std::move(*transport), memory->bytes(), *local);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "quit") break;
    if (verb == "connect") {
      std::string address, key;
      words >> address >> key;
      std::cout << target.Connect(address, key) << std::endl;
    } else if (verb == "write") {
      uint32_t peer = 0, immediate = 0;
      uint64_t from = 0, to = 0, length = 0;
      words >> peer >> from >> to >> length >> immediate;
      std::cout << target.Write(peer, from, to, length, immediate) << std::endl;
    } else if (verb == "fill") {
      uint64_t seed = 0;
      words >> seed;
      target.Fill(seed);
      std::cout << "filled" << std::endl;
    } else if (verb == "await") {
      std::cout << target.AwaitArrival() << std::endl;
    }
  }
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main() { return jax_ep::Run(); }
