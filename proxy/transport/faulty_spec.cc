// The parser of FaultySpec.
#include <charconv>
#include <string>

#include "proxy/transport/faulty.h"

namespace jax_ep {

Result<FaultySpec> FaultySpec::Parse(std::string_view text) {
  struct Key {
    std::string_view name;
    uint64_t FaultySpec::* field;
    uint64_t max;
  };
  constexpr uint64_t kPercent = 100;
  constexpr uint64_t kMaxHeldPolls = 1'000'000;
  constexpr Key kKeys[] = {
      {"seed", &FaultySpec::seed, UINT64_MAX},
      {"reorder", &FaultySpec::reorder, kMaxHeldPolls},
      {"per_flow", &FaultySpec::per_flow, 1},
      {"delay", &FaultySpec::delay, kMaxHeldPolls},
      {"duplicate", &FaultySpec::duplicate, kPercent},
      {"split", &FaultySpec::split, kPercent},
      {"again", &FaultySpec::again, kPercent},
      {"slow_completions", &FaultySpec::slow_completions, kMaxHeldPolls},
      {"payload_late", &FaultySpec::payload_late, 1},
      {"die_after", &FaultySpec::die_after, UINT64_MAX},
      {"die_rank", &FaultySpec::die_rank, UINT64_MAX},
      {"max_message", &FaultySpec::max_message, UINT64_MAX},
  };
  FaultySpec spec;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const size_t equals = part.find('=');
    const std::string_view name = part.substr(0, equals);
    const Key* key = nullptr;
    std::string known;
    for (const Key& candidate : kKeys) {
      if (candidate.name == name) key = &candidate;
      known += (known.empty() ? "" : ", ") + std::string(candidate.name);
    }
    uint64_t value = 0;
    bool is_number = false;
    if (equals != std::string_view::npos) {
      const std::string_view digits = part.substr(equals + 1);
      const auto [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), value);
      is_number = error == std::errc() && end == digits.data() + digits.size();
    }
    if (key == nullptr || !is_number || value > key->max) {
      const std::string expected =
          key == nullptr
              ? "key=number with one of the keys " + known
              : std::string(name) + "= and a number of at most " + std::to_string(key->max);
      return InvalidArgument("faulty transport: got \"" + std::string(part) + "\", expected " +
                             expected + "; change JAX_EP_FAULTY");
    }
    spec.*(key->field) = value;
  }
  constexpr uint64_t kUnit = 16;
  if (spec.max_message % kUnit != 0) {
    return InvalidArgument("faulty transport: got max_message=" + std::to_string(spec.max_message) +
                           ", expected a multiple of 16; change JAX_EP_FAULTY");
  }
  return spec;
}

}  // namespace jax_ep
