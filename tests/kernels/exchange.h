// One scenario: plan, dispatch, combine and both backward forms on a team with random data, checked
// element by element against the oracle.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernels/oracle.h"
#include "tests/kernels/team.h"

namespace jax_ep::testing {

enum class Capacity : uint8_t { kWorst, kExact, kOneShort, kHalf };

struct Scenario {
  GroupShape shape;
  bool in_process = true;
  int threads_per_rank = 1;
  std::string faulty_spec;
  Mode mode = Mode::kHt;
  Layout layout = Layout::kExpertMajor;
  int64_t num_tokens = 7;
  Draw draw = Draw::kUniform;
  Capacity capacity = Capacity::kWorst;  // expert_major only
  bool in_halves = false;                // start/done with two in flight
  bool is_view = false;                  // the heaps have room for more than `shape`
  int num_rounds = 3;
  uint32_t seed = 1;
  uint64_t first_epoch = 0;  // TeamOptions

  std::string Name() const;
};

// Shape with what most scenarios share.
GroupShape MakeShape(uint32_t num_ranks, uint32_t node_size, uint32_t num_experts, uint32_t top_k,
                     uint64_t hidden, uint64_t max_tokens, ElemType type = ElemType::kF32);

// Runs and checks `scenario`. Returns the bytes of every summed output of every round and rank, for
// comparisons between scenarios that must give the same bits.
std::vector<std::byte> RunScenario(const Scenario& scenario);

}  // namespace jax_ep::testing
