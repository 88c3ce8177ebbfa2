// LL combine: the entry points that combine.cc hands LL calls to.
#pragma once

#include <cstdint>

#include "kernels/launch.h"

namespace jax_ep {

Status RunLlCombine(Rank& rank, const CombineParams& params);
Status StartLlCombine(Rank& rank, const CombineParams& params, uint64_t* epoch);
Status FinishLlCombine(Rank& rank, const CombineParams& params, uint64_t epoch);

}  // namespace jax_ep
