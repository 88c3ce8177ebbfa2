// What a launcher checks before anything runs. Each returns an empty text, or what is wrong.
#pragma once

#include <string>

#include "kernels/gpu/api.h"

namespace jax_ep::gpu {

std::string CheckConfig(const RankConfig& config);

std::string CheckPlan(const GroupShape& shape, const PlanParams& params);
std::string CheckDispatch(const GroupShape& shape, const DispatchParams& params);
std::string CheckCombine(const GroupShape& shape, const CombineParams& params);

// Halves: a start is asked for what it reads, a done for what it writes. What a done of a dispatch
// needs is CheckDispatch's.
std::string CheckDispatchStart(const GroupShape& shape, const DispatchParams& params);
std::string CheckCombineStart(const GroupShape& shape, const CombineParams& params);
std::string CheckCombineDone(const GroupShape& shape, const CombineParams& params);

}  // namespace jax_ep::gpu
