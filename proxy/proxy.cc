#include "proxy/proxy.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "proxy/base/random.h"
#include "proxy/base/shared_memory.h"
#include "proxy/endpoint.h"
#include "proxy/leads.h"
#include "proxy/life_signs.h"
#include "proxy/progress.h"
#include "proxy/transport/registry.h"

namespace jax_ep {

struct Proxy::Impl {
  Impl(ProxyOptions proxy_options, SharedMemory memory, FailureLatch* failure)
      : options(std::move(proxy_options)),
        bell_memory(std::move(memory)),
        bell(new (bell_memory.bytes().data()) Doorbell{}),
        progress({.group_name = options.group_name,
                  .caller_progress = options.caller_progress,
                  .cpus = options.cpus},
                 &endpoints, options.signs.get(), bell, failure) {}

  const ProxyOptions options;
  SharedMemory bell_memory;  // shared because transports of other processes ring it
  Doorbell* const bell;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  Progress progress;
  bool is_started = false;
};

Result<std::unique_ptr<Proxy>> Proxy::Create(ProxyOptions options, FailureLatch* failure) {
  const auto bad = [&options](const std::string& what) {
    return InvalidArgument("group " + options.group_name + ": proxy: " + what);
  };
  if (failure == nullptr) return bad("no failure latch");
  if (options.window_messages == 0 || options.window_messages > kMaxWindowMessages) {
    return bad("window_messages=" + std::to_string(options.window_messages) + "; expected 1 to " +
               std::to_string(kMaxWindowMessages) +
               ", half of the sequence space (JAX_EP_WINDOW_MESSAGES)");
  }
  if (options.window_bytes != 0 && options.window_bytes < kCommandUnitBytes) {
    return bad("window_bytes=" + std::to_string(options.window_bytes) +
               "; expected at least 16 (JAX_EP_WINDOW_BYTES)");
  }
  if (!std::has_single_bit(options.inbox_slots)) {
    return bad("inbox_slots=" + std::to_string(options.inbox_slots) +
               "; expected a power of two (JAX_EP_INBOX_SLOTS)");
  }
  if (options.peer_timeout.count() <= 0 || options.timeout.count() <= 0) {
    return bad("timeouts must be positive");
  }
  JAX_EP_ASSIGN_OR_RETURN(SharedMemory bell_memory,
                          SharedMemory::Create(sizeof(Doorbell), /*shareable=*/true));
  if (options.signs == nullptr) {
    JAX_EP_ASSIGN_OR_RETURN(options.signs, MakeSigns(options.group_name));
  }
  auto impl = std::make_unique<Impl>(std::move(options), std::move(bell_memory), failure);
  return std::unique_ptr<Proxy>(new Proxy(std::move(impl)));
}

Result<std::shared_ptr<LifeSigns>> Proxy::MakeSigns(const std::string& group_name) {
  uint64_t id = 0;  // random, so that nobody has to hand out numbers
  JAX_EP_RETURN_IF_ERROR(DrawRandom("group " + group_name + ": process", &id));
  return std::make_shared<LifeSigns>(id);
}

Proxy::Proxy(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Proxy::~Proxy() { Stop(); }

Result<int> Proxy::AddEndpoint(EndpointOptions options) {
  if (impl_->is_started) return FailedPrecondition("proxy: AddEndpoint after Start");
  const TransportOptions transport_options{.rank = options.rank,
                                           .team = options.team,
                                           .inbox_slots = impl_->options.inbox_slots,
                                           .bell = impl_->bell,
                                           .bell_export = impl_->bell_memory.Export(),
                                           .faulty_spec = impl_->options.faulty_spec,
                                           .place = options.place,
                                           .serves_device = options.heap_device >= 0,
                                           .copies = options.copies};
  JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport,
                          impl_->options.transport_factory
                              ? impl_->options.transport_factory(transport_options)
                              : MakeTransport(impl_->options.transport, transport_options));
  JAX_EP_ASSIGN_OR_RETURN(
      std::unique_ptr<Endpoint> endpoint,
      Endpoint::Create(impl_->options, options, std::move(transport), impl_->options.signs.get()));
  impl_->endpoints.push_back(std::move(endpoint));
  return static_cast<int>(impl_->endpoints.size()) - 1;
}

std::string Proxy::LocalBlob(int endpoint) const {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->LocalBlob();
}

Status Proxy::Connect(int endpoint, uint32_t peer, std::string_view blob, Deadline deadline) {
  if (impl_->is_started) return FailedPrecondition("proxy: Connect after Start");
  if (endpoint < 0 || static_cast<size_t>(endpoint) >= impl_->endpoints.size()) {
    return InvalidArgument("proxy: Connect of endpoint " + std::to_string(endpoint) + " of " +
                           std::to_string(impl_->endpoints.size()));
  }
  return impl_->endpoints[static_cast<size_t>(endpoint)]->Connect(peer, blob, deadline);
}

Status Proxy::StartAll(std::span<Proxy* const> proxies) {
  std::vector<Endpoint*> endpoints;
  for (Proxy* const proxy : proxies) {
    if (proxy->impl_->is_started) return FailedPrecondition("proxy: Start was already called");
    if (proxy->impl_->options.signs != proxies.front()->impl_->options.signs) {
      return FailedPrecondition("proxy: StartAll of proxies that do not share their signs");
    }
    for (const auto& endpoint : proxy->impl_->endpoints) endpoints.push_back(endpoint.get());
  }
  std::vector<PeerPair> pairs;
  for (const Endpoint* const endpoint : endpoints) {
    if (const std::optional<uint32_t> peer = endpoint->FirstUnconnectedPeer()) {
      return FailedPrecondition("proxy: Start before " + endpoint->NameOf(endpoint->rank()) +
                                " is connected to " + endpoint->NameOf(*peer));
    }
    endpoint->AppendPairs(&pairs);
  }
  const std::vector<LeadRole> roles = ChooseLeads(pairs);
  std::span<const LeadRole> left = roles;
  for (Endpoint* const endpoint : endpoints) {
    endpoint->SetRoles(left);
    left = left.subspan(endpoint->num_peers());
  }
  for (Proxy* const proxy : proxies) {
    const Status started = proxy->impl_->progress.Start();
    if (!started.ok()) {
      StopAll(proxies);
      return started;
    }
    proxy->impl_->is_started = true;
  }
  return Status::Ok();
}

void Proxy::StopAll(std::span<Proxy* const> proxies) {
  for (Proxy* const proxy : proxies) proxy->impl_->progress.BeginStop();
  for (Proxy* const proxy : proxies) proxy->impl_->progress.Stop();
}

std::vector<uint32_t> Proxy::BarrierPeers(int endpoint) const {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->BarrierPeers();
}

RingView Proxy::ring(int endpoint) {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->ring();
}

void Proxy::Kick() { impl_->progress.Kick(); }
bool Proxy::wants_help() const { return impl_->progress.wants_help(); }
void Proxy::BeginHelp() { impl_->progress.BeginHelp(); }
void Proxy::EndHelp(bool leaves_work) { impl_->progress.EndHelp(leaves_work); }
bool Proxy::Help() { return impl_->progress.Help(); }

std::atomic<uint64_t>* Proxy::quiet_flag(int endpoint) {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->quiet_flag();
}

std::string Proxy::DumpState() const {
  std::string text;
  for (const auto& endpoint : impl_->endpoints) endpoint->AppendState(&text);
  return text;
}

std::string Proxy::DumpOpenFlows(const FlowFilter& is_awaited) const {
  std::string text;
  for (const auto& endpoint : impl_->endpoints) endpoint->AppendOpenFlows(is_awaited, &text);
  return text;
}

std::vector<FlowStats> Proxy::Stats() const {
  std::vector<FlowStats> stats;
  for (const auto& endpoint : impl_->endpoints) endpoint->AppendStats(&stats);
  return stats;
}

}  // namespace jax_ep
