#include "proxy/transport/verbs_connector.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "proxy/base/deadline.h"
#include "proxy/base/thread.h"
#include "proxy/transport/side_channel.h"

namespace jax_ep {
namespace {

// For one handshake. Heartbeats find a host that is gone; this ends the wait for one that is heard
// and never answers.
constexpr std::chrono::minutes kHandshakeTime{5};
// Handshakes at a time.
constexpr size_t kMaxThreads = 8;

}  // namespace

VerbsConnector::~VerbsConnector() {
  {
    std::lock_guard lock(mutex_);
    is_closing_.store(true, std::memory_order_relaxed);
  }
  is_asked_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::optional<Result<VerbsConnector::Senders>> VerbsConnector::Connect(uint32_t peer, uint64_t rank,
                                                                       const std::string& side) {
  std::lock_guard lock(mutex_);
  const auto [outcome, is_first] = outcomes_.try_emplace(peer);
  if (is_first) {
    questions_.push_back({.peer = peer, .rank = rank, .side = side});
    JAX_EP_RETURN_IF_ERROR(StartThreadIfNeeded());
    is_asked_.notify_one();
  }
  return std::exchange(outcome->second, std::nullopt);
}

Status VerbsConnector::StartThreadIfNeeded() {
  if (num_idle_ >= questions_.size() || threads_.size() == kMaxThreads) return Status::Ok();
  threads_.reserve(kMaxThreads);
  Result<std::thread> thread = StartThread("jax_ep connect", [this] { Run(); });
  if (thread.ok()) {
    threads_.push_back(std::move(*thread));
  } else if (threads_.empty()) {
    return Internal("verbs: " + thread.status().message());
  }  // else one of the others comes to it
  return Status::Ok();
}

void VerbsConnector::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++num_idle_;
    is_asked_.wait(lock, [this] { return is_closing_ || !questions_.empty(); });
    --num_idle_;
    if (is_closing_) return;
    const Question question = std::move(questions_.front());
    questions_.pop_front();
    lock.unlock();
    Result<Senders> senders = ShakeHandsOrSayWhy(question);
    if (senders.ok()) num_connected_.fetch_add(1, std::memory_order_relaxed);
    lock.lock();
    outcomes_.find(question.peer)->second = std::move(senders);
  }
}

Result<VerbsConnector::Senders> VerbsConnector::ShakeHandsOrSayWhy(
    const Question& question) const noexcept try {
  return ShakeHands(question);
} catch (const std::bad_alloc&) {
  return out_of_memory_;
}

Result<VerbsConnector::Senders> VerbsConnector::ShakeHands(const Question& question) const {
  const auto failed = [&](const Status& status) {
    return Status(status.code(), "verbs: connecting to " +
                                     RankName(options_.team, static_cast<uint32_t>(question.rank)) +
                                     ": " + status.message());
  };
  Senders senders;
  VerbsHandshake own{.rank = options_.rank};
  for (const auto& rail : options_.rails) {
    auto& addresses = own.addresses.emplace_back();
    for (uint32_t i = 0; i < options_.num_qps; ++i) {
      const Result<VerbsSender> sender = rail->Open(&addresses.emplace_back());
      // Of this rank's own device: no sign that the peer is gone.
      if (!sender.ok()) return failed(Internal(sender.status().message()));
      senders.push_back(*sender);
    }
  }
  const Result<std::string> answer =
      AskPeer(question.side, own.Encode(), Deadline::After(kHandshakeTime), &is_closing_);
  if (!answer.ok()) {
    const bool is_late = answer.status().code() == StatusCode::kDeadlineExceeded;
    return failed(is_late ? Unavailable(answer.status().message()) : answer.status());
  }
  const Result<VerbsHandshake> theirs = VerbsHandshake::Decode(*answer);
  if (!theirs.ok()) return failed(theirs.status());
  if (theirs->rank != question.rank || !HasSameShape(*theirs)) {
    return failed(InvalidArgument("the answer does not fit the question"));
  }
  for (size_t i = 0; i < senders.size(); ++i) {
    const size_t rail = i / options_.num_qps;
    const size_t pair = i % options_.num_qps;
    const Status status = options_.rails[rail]->Complete(senders[i].qp, own.addresses[rail][pair],
                                                         theirs->addresses[rail][pair]);
    if (!status.ok()) return failed(status);
  }
  return senders;
}

bool VerbsConnector::HasSameShape(const VerbsHandshake& handshake) const {
  return handshake.addresses.size() == options_.rails.size() &&
         std::all_of(handshake.addresses.begin(), handshake.addresses.end(),
                     [this](const auto& rail) { return rail.size() == options_.num_qps; });
}

Result<std::string> VerbsConnector::Answer(std::string_view question) const {
  JAX_EP_ASSIGN_OR_RETURN(const VerbsHandshake theirs, VerbsHandshake::Decode(question));
  if (!HasSameShape(theirs)) {
    return InvalidArgument("the question is of other rails or queue pairs than the address told");
  }
  VerbsHandshake own{.rank = options_.rank};
  for (size_t i = 0; i < options_.rails.size(); ++i) {
    auto& rail = own.addresses.emplace_back();
    for (const VerbsAddress& address : theirs.addresses[i]) {
      JAX_EP_ASSIGN_OR_RETURN(const VerbsAddress ours, options_.rails[i]->Accept(address));
      rail.push_back(ours);
    }
  }
  return own.Encode();
}

}  // namespace jax_ep
