#include "tests/kernels/network.h"

#include <gtest/gtest.h>

#include <chrono>
#include <span>
#include <utility>

#include "proxy/proxy.h"

namespace jax_ep::testing {
namespace {

// One proxy (one process) for the whole team.
class LoopbackNetwork : public Network {
 public:
  explicit LoopbackNetwork(std::unique_ptr<Proxy> proxy) : proxy_(std::move(proxy)) {}
  ~LoopbackNetwork() override { proxy_->Stop(); }

  void Connect(std::vector<Rank>& ranks) {
    for (Rank& rank : ranks) AddEndpoint(rank);
    for (size_t r = 0; r < ranks.size(); ++r) {
      for (size_t peer = 0; peer < ranks.size(); ++peer) {
        if (ranks[r].heaps[peer] != nullptr) continue;
        const Status connected = proxy_->Connect(static_cast<int>(r), static_cast<uint32_t>(peer),
                                                 proxy_->LocalBlob(static_cast<int>(peer)),
                                                 Deadline::After(std::chrono::seconds(30)));
        ASSERT_TRUE(connected.ok()) << connected.message();
      }
    }
    const Status started = proxy_->Start();
    ASSERT_TRUE(started.ok()) << started.message();
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].ring = proxy_->ring(static_cast<int>(r));
      ranks[r].proxy = proxy_.get();
    }
  }

 private:
  void AddEndpoint(Rank& rank) {
    EndpointOptions options;
    options.rank = rank.rank;
    options.num_ranks = rank.shape.num_ranks;
    for (uint32_t peer = 0; peer < rank.shape.num_ranks; ++peer) {
      if (rank.heaps[peer] == nullptr) options.peers.push_back(peer);
    }
    options.ll_slots = static_cast<uint32_t>(rank.shape.ll_tokens) + 1;
    std::byte* heap = rank.heaps[rank.rank];
    options.heap = {heap, rank.layout.total_bytes};
    options.flag = [heap, layout = rank.layout](Channel channel, uint32_t source) {
      return reinterpret_cast<std::atomic<uint64_t>*>(heap + layout.flag_offset(channel, source));
    };
    options.doorbell = &reinterpret_cast<ControlBlock*>(heap)->doorbell;
    options.ring_slots = 64;  // small: producers meet a full ring
    const Result<int> endpoint = proxy_->AddEndpoint(std::move(options));
    ASSERT_TRUE(endpoint.ok()) << endpoint.status().message();
    ASSERT_EQ(*endpoint, static_cast<int>(rank.rank));
  }

  std::unique_ptr<Proxy> proxy_;
};

}  // namespace

std::unique_ptr<Network> Network::Create(std::vector<Rank>& ranks, const std::string& faulty_spec,
                                         FailureLatch* failure) {
  ProxyOptions options;
  options.group_name = ranks[0].group_name;
  options.transport = "loopback";
  options.faulty_spec = faulty_spec;
  options.timeout = ranks[0].timeout;
  Result<std::unique_ptr<Proxy>> proxy = Proxy::Create(options, failure);
  if (!proxy.ok()) {
    ADD_FAILURE() << proxy.status().message();
    return nullptr;
  }
  auto network = std::make_unique<LoopbackNetwork>(std::move(*proxy));
  network->Connect(ranks);
  return network;
}

}  // namespace jax_ep::testing
