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

// For one handshake. A host that is gone is found silent by heartbeats long before.
constexpr std::chrono::seconds kHandshakeTime{30};

// An error of this rank's own device is no sign that the peer is gone.
Status OfOwnDevice(const Status& status) { return Internal(status.message()); }

}  // namespace

Result<std::unique_ptr<VerbsConnector>> VerbsConnector::Create(const Options& options) {
  std::unique_ptr<VerbsConnector> made(new VerbsConnector(options));
  VerbsConnector* const connector = made.get();
  JAX_EP_ASSIGN_OR_RETURN(made->thread_,
                          StartThread("jax_ep connect", [connector] { connector->Run(); }));
  return made;
}

VerbsConnector::~VerbsConnector() {
  {
    std::lock_guard lock(mutex_);
    is_closing_.store(true, std::memory_order_relaxed);
  }
  is_asked_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void VerbsConnector::Ask(uint32_t peer, uint64_t rank, std::string side) {
  {
    std::lock_guard lock(mutex_);
    questions_.push_back({.peer = peer, .rank = rank, .side = std::move(side)});
  }
  is_asked_.notify_one();
}

std::optional<Result<VerbsConnector::Senders>> VerbsConnector::Take(uint32_t peer) {
  // Relaxed: the mutex orders the rest, and who comes too early asks again.
  if (num_outcomes_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  std::lock_guard lock(mutex_);
  auto outcome = outcomes_.extract(peer);
  if (outcome.empty()) return std::nullopt;
  num_outcomes_.fetch_sub(1, std::memory_order_relaxed);
  return std::move(outcome.mapped());
}

void VerbsConnector::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    is_asked_.wait(lock, [this] { return is_closing_ || !questions_.empty(); });
    if (is_closing_) return;
    const Question question = std::move(questions_.front());
    questions_.pop_front();
    lock.unlock();
    Result<Senders> senders = ConnectOrSayWhy(question);
    if (senders.ok()) num_connected_.fetch_add(1, std::memory_order_relaxed);
    lock.lock();
    outcomes_.insert_or_assign(question.peer, std::move(senders));
    num_outcomes_.fetch_add(1, std::memory_order_relaxed);
  }
}

Result<VerbsConnector::Senders> VerbsConnector::ConnectOrSayWhy(const Question& question) const
    try {
  return Connect(question);
} catch (const std::bad_alloc&) {
  return Internal("verbs: out of memory");
}

Result<VerbsConnector::Senders> VerbsConnector::Connect(const Question& question) const {
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
      if (!sender.ok()) return failed(OfOwnDevice(sender.status()));
      senders.push_back(*sender);
    }
  }
  const Result<std::string> answer =
      AskPeer(question.side, own.Encode(), Deadline::After(kHandshakeTime), &is_closing_);
  if (!answer.ok()) {
    const bool is_refused = answer.status().code() == StatusCode::kInvalidArgument;
    return failed(is_refused ? answer.status() : Unavailable(answer.status().message()));
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
    if (!status.ok()) {
      const bool is_refused = status.code() == StatusCode::kInvalidArgument;
      return failed(is_refused ? status : OfOwnDevice(status));
    }
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
    return InvalidArgument("it has " + std::to_string(options_.rails.size()) + " rails of " +
                           std::to_string(options_.num_qps) + " queue pairs, the asking rank " +
                           std::to_string(theirs.addresses.size()) +
                           " rails; on hosts that differ, set JAX_EP_VERBS_DEVICE to equally "
                           "many devices everywhere, and JAX_EP_VERBS_QPS alike");
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
