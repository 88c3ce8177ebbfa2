// The operations of api.h: each call is checked, and launched under its rank's lock.
#pragma once

#include "kernels/gpu/api.h"

namespace jax_ep::gpu {

const char* RunPlan(RankHandle* rank, const PlanParams* params, Stream stream);
const char* RunDispatch(RankHandle* rank, const DispatchParams* params, Stream stream);
const char* RunDispatchStart(RankHandle* rank, const DispatchParams* params, int32_t* epoch,
                             Stream stream);
const char* RunDispatchDone(RankHandle* rank, const DispatchParams* params, const int32_t* epoch,
                            Stream stream);
const char* RunLlDispatch(RankHandle* rank, const LlDispatchParams* params, Stream stream);
const char* RunLlDispatchStart(RankHandle* rank, const LlDispatchParams* params, int32_t* epoch,
                               Stream stream);
const char* RunLlDispatchDone(RankHandle* rank, const LlDispatchParams* params,
                              const int32_t* epoch, Stream stream);
const char* RunCombine(RankHandle* rank, const CombineParams* params, Stream stream);
const char* RunCombineStart(RankHandle* rank, const CombineParams* params, int32_t* epoch,
                            Stream stream);
const char* RunCombineDone(RankHandle* rank, const CombineParams* params, const int32_t* epoch,
                           Stream stream);

}  // namespace jax_ep::gpu
