// The semantics of docs/semantics.md for a whole team, written without a look at the kernels: naive
// loops over all ranks, sums in double.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/layout.h"

namespace jax_ep::testing {

// [rank][...] arrays of one routing.
struct PlanOracle {
  std::vector<std::vector<int32_t>> group_sizes, group_counts, send_slot, recv_src, send_counts,
      recv_counts, recv_topk_idx;
  std::vector<int32_t> num_dropped;
  int32_t overflow = 0;
  // [rank][t * K + k]: the row that holds the pair at its owner (in LL too), -1 if dropped or
  // absent.
  std::vector<std::vector<int64_t>> pair_row;
  std::vector<std::vector<int64_t>> pair_owner;
};

struct Routing {
  GroupShape shape;
  Mode mode = Mode::kHt;
  Layout layout = Layout::kExpertMajor;
  int64_t num_tokens = 0;
  int64_t recv_rows = 0;
  std::vector<std::vector<int32_t>> topk_idx;  // [rank][T * K]
};

PlanOracle MakePlanOracle(const Routing& routing);

// How expert ids are drawn.
enum class Draw : uint8_t {
  kUniform,    // distinct experts of a token
  kZipf,       // skewed, distinct
  kOneExpert,  // everything to the last expert
  kIdleRank,   // rank 0's experts get nothing, rank 1 sends nothing
  kMessy,      // -1, ids >= E, repeats in one token
};
std::string DrawName(Draw draw);
std::vector<std::vector<int32_t>> DrawTopk(const GroupShape& shape, int64_t num_tokens, Draw draw,
                                           std::mt19937& random);

// R(T) without a capacity: never drops (except duplicates and invalid ids).
int64_t WorstRecvRows(const GroupShape& shape, Layout layout, int64_t num_tokens);
// Rows that the fullest rank needs for this routing, for "exact, one short, half" capacities.
int64_t NeededRecvRows(const Routing& routing);

// Element conversions by arithmetic, not by bits.
double DecodeElem(ElemType type, const std::byte* elem);
void EncodeElem(ElemType type, double value, std::byte* elem);  // exact inputs only
double Epsilon(ElemType type);                                  // half a unit in the last place

}  // namespace jax_ep::testing
