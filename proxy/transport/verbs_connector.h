// VerbsConnector: joins queue pairs to those of peers, for both directions. A handshake takes a
// round trip over the side channel, so it is made on a thread of the connector's, when the first
// write to a peer asks for it: the thread that posts waits for nobody. Several are under way at a
// time, so a peer that does not answer holds up few others.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "proxy/base/rank_name.h"
#include "proxy/base/status.h"
#include "proxy/transport/verbs_handshake.h"
#include "proxy/transport/verbs_rail.h"

namespace jax_ep {

class VerbsConnector {
 public:
  // Who asks, and with what. The rails outlive the connector.
  struct Options {
    uint32_t rank = 0;
    TeamId team = {};
    uint32_t num_qps = 1;  // per peer and rail
    std::span<const std::unique_ptr<VerbsRail>> rails = {};
  };
  // [rail * num_qps + queue pair]
  using Senders = std::vector<VerbsSender>;

  explicit VerbsConnector(const Options& options) : options_(options) {}
  // Gives up the handshakes that are under way.
  ~VerbsConnector();
  VerbsConnector(const VerbsConnector&) = delete;
  VerbsConnector& operator=(const VerbsConnector&) = delete;

  // Queue pairs for writing to `peer`, of that rank and side channel: once it has answered, or why
  // they cannot be; nothing until then. The first call asks. Not to be called after an outcome.
  // \error kUnavailable      nobody has answered, or no way leads there
  // \error kInvalidArgument  the peer refuses, or answers what does not fit
  // \error kInternal         this host has no thread or descriptor, or this rank's device no queue
  //                          pair left
  std::optional<Result<Senders>> Connect(uint32_t peer, uint64_t rank, const std::string& side);
  // Peers that were connected to. Any thread.
  uint32_t num_connected() const { return num_connected_.load(std::memory_order_relaxed); }

  // The answer to a peer that asks. Any thread.
  Result<std::string> Answer(std::string_view question) const;

 private:
  struct Question {
    uint32_t peer = 0;
    uint64_t rank = 0;
    std::string side = {};
  };

  void Run();
  // OK if there is a thread that will come to the questions.
  Status StartThreadIfNeeded();
  Result<Senders> ShakeHandsOrSayWhy(const Question& question) const noexcept;
  Result<Senders> ShakeHands(const Question& question) const;
  bool HasSameShape(const VerbsHandshake& handshake) const;

  const Options options_;
  const Status out_of_memory_ = Internal("verbs: out of memory while connecting");
  std::atomic<bool> is_closing_{false};
  std::atomic<uint32_t> num_connected_{0};
  std::mutex mutex_;  // guards what follows
  std::condition_variable is_asked_;
  std::deque<Question> questions_;
  // By peer that was asked; made with the question, so that telling the outcome needs no memory.
  std::map<uint32_t, std::optional<Result<Senders>>> outcomes_;
  uint32_t num_idle_ = 0;             // threads that wait for a question
  std::vector<std::thread> threads_;  // as many as were needed at a time, at most kMaxThreads
};

}  // namespace jax_ep
