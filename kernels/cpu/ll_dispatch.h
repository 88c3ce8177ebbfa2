// LL dispatch: the entry points that plan.cc and dispatch.cc hand LL calls to. Those with routing
// (RunLlDispatch, its halves) are in kernels/launch.h.
#pragma once

#include <cstdint>

#include "kernels/launch.h"

namespace jax_ep {

Status RunLlPlan(Rank& rank, const PlanParams& params);
Status RunLlPlannedDispatch(Rank& rank, const DispatchParams& params);
Status StartLlPlannedDispatch(Rank& rank, const DispatchParams& params, uint64_t* epoch);
Status FinishLlPlannedDispatch(Rank& rank, const DispatchParams& params, uint64_t epoch);

}  // namespace jax_ep
