#include "xla_ffi/totals.h"

#include <cstddef>
#include <span>
#include <string_view>

#include "proxy/abi/channel.h"

namespace jax_ep {
namespace {

std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    out += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
  }
  return out + "\"";
}

// `"key": value`, with a comma in front unless it is the object's first.
void Add(std::string& object, std::string_view key, const std::string& value) {
  if (!object.empty()) object += ", ";
  object += Quoted(key) + ": " + value;
}
void Add(std::string& object, std::string_view key, uint64_t value) {
  Add(object, key, std::to_string(value));
}

template <typename Range, typename ToText>
std::string List(const Range& range, ToText&& to_text) {
  std::string out;
  for (const auto& each : range) {
    if (!out.empty()) out += ", ";
    out += to_text(each);
  }
  return "[" + out + "]";
}

std::string Numbers(std::span<const uint64_t> numbers) {
  return List(numbers, [](uint64_t number) { return std::to_string(number); });
}

std::string Object(const RankTotals& rank) {
  std::string waits;
  const size_t num_ranks = rank.wait_by_peer.size() / kNumWaitPhases;
  for (uint32_t index = 0; index < kNumWaitPhases; ++index) {
    Add(waits, WaitPhaseName(static_cast<WaitPhase>(index)),
        Numbers(std::span(rank.wait_by_peer).subspan(index * num_ranks, num_ranks)));
  }
  std::string out;
  Add(out, "team", rank.id.team);
  Add(out, "rank", rank.id.rank);
  Add(out, "plans", rank.plans);
  Add(out, "dispatches", rank.dispatches);
  Add(out, "combines", rank.combines);
  Add(out, "rows_received", rank.rows_received);
  Add(out, "rows_dropped", rank.rows_dropped);
  Add(out, "invalid_ids", rank.invalid_ids);
  Add(out, "wait_ns", rank.wait_ns);
  Add(out, "pairs_per_expert", Numbers(rank.pairs_per_expert));
  Add(out, "wait_by_peer", "{" + waits + "}");
  return "{" + out + "}";
}

std::string Object(const FlowStats& flow) {
  std::string out;
  Add(out, "team", flow.team);
  Add(out, "rank", flow.rank);
  Add(out, "peer", flow.peer);
  Add(out, "channel", Quoted(ChannelName(flow.channel)));
  Add(out, "messages", flow.messages);
  Add(out, "bytes", flow.bytes);
  Add(out, "stalls", flow.stalls);
  Add(out, "retries", flow.retries);
  Add(out, "reorders", flow.reorders);
  return "{" + out + "}";
}

}  // namespace

std::string ToJson(const SessionTotals& totals) {
  std::string out;
  Add(out, "name", Quoted(totals.name));
  Add(out, "num_ranks", totals.num_ranks);
  Add(out, "failure", Quoted(totals.failure));
  Add(out, "ranks", List(totals.ranks, [](const RankTotals& rank) { return Object(rank); }));
  Add(out, "flows", List(totals.flows, [](const FlowStats& flow) { return Object(flow); }));
  return "{" + out + "}";
}

}  // namespace jax_ep
