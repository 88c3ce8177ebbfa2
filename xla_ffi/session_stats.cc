// A session's counters as JSON, for whoever asks from another process (`python -m jax_ep report`).
#include <atomic>
#include <string>
#include <string_view>

#include "xla_ffi/session.h"

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

template <typename Range, typename ToText>
std::string List(const Range& range, ToText&& to_text) {
  std::string out;
  for (const auto& each : range) {
    if (!out.empty()) out += ", ";
    out += to_text(each);
  }
  return "[" + out + "]";
}

std::string Number(const std::atomic<uint64_t>& counter) {
  return std::to_string(counter.load(std::memory_order_relaxed));
}

std::string Object(const LocalRank& id, const RankCounters& counters) {
  std::string waits;
  for (uint32_t index = 0; index < kNumWaitPhases; ++index) {
    const auto phase = static_cast<WaitPhase>(index);
    Add(waits, WaitPhaseName(phase), List(counters.WaitsIn(phase), Number));
  }
  std::string out;
  Add(out, "team", std::to_string(id.team));
  Add(out, "rank", std::to_string(id.rank));
  Add(out, "plans", Number(counters.plans));
  Add(out, "dispatches", Number(counters.dispatches));
  Add(out, "combines", Number(counters.combines));
  Add(out, "rows_received", Number(counters.rows_received));
  Add(out, "rows_dropped", Number(counters.rows_dropped));
  Add(out, "invalid_ids", Number(counters.invalid_ids));
  Add(out, "wait_ns", Number(counters.wait_ns));
  Add(out, "pairs_per_expert", List(counters.pairs_per_expert, Number));
  Add(out, "wait_by_peer", "{" + waits + "}");
  return "{" + out + "}";
}

std::string Object(const FlowStats& flow) {
  std::string out;
  Add(out, "team", std::to_string(flow.team));
  Add(out, "rank", std::to_string(flow.rank));
  Add(out, "peer", std::to_string(flow.peer));
  Add(out, "channel", Quoted(ChannelName(flow.channel)));
  Add(out, "messages", std::to_string(flow.messages));
  Add(out, "bytes", std::to_string(flow.bytes));
  Add(out, "stalls", std::to_string(flow.stalls));
  Add(out, "retries", std::to_string(flow.retries));
  Add(out, "reorders", std::to_string(flow.reorders));
  return "{" + out + "}";
}

}  // namespace

std::string Session::CountersJson() const {
  std::string out;
  Add(out, "name", Quoted(options_.name));
  Add(out, "num_ranks", std::to_string(options_.shape.num_ranks));
  Add(out, "failure", Quoted(FailureText()));
  Add(out, "ranks",
      List(counters_, [](const auto& entry) { return Object(entry.first, *entry.second); }));
  Add(out, "flows", List(flow_stats(), [](const FlowStats& flow) { return Object(flow); }));
  return "{" + out + "}";
}

}  // namespace jax_ep
