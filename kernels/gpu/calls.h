// The operations of api.h: each call is checked, and launched under its rank's lock.
#pragma once

#include "kernels/gpu/api.h"

namespace jax_ep::gpu {

const char* RunCheckPosition(RankHandle* rank, const int32_t* position, int32_t expected,
                             Stream stream);
const char* RunPlan(RankHandle* rank, const GroupShape* shape, const PlanParams* params,
                    Stream stream);
const char* RunDispatch(RankHandle* rank, const GroupShape* shape, const DispatchParams* params,
                        Stream stream);
const char* RunDispatchStart(RankHandle* rank, const GroupShape* shape,
                             const DispatchParams* params, int32_t* epoch, Stream stream);
const char* RunDispatchDone(RankHandle* rank, const GroupShape* shape, const DispatchParams* params,
                            const int32_t* epoch, Stream stream);
const char* RunLlDispatch(RankHandle* rank, const GroupShape* shape, const LlDispatchParams* params,
                          Stream stream);
const char* RunLlDispatchStart(RankHandle* rank, const GroupShape* shape,
                               const LlDispatchParams* params, int32_t* epoch, Stream stream);
const char* RunLlDispatchDone(RankHandle* rank, const GroupShape* shape,
                              const LlDispatchParams* params, const int32_t* epoch, Stream stream);
const char* RunCombine(RankHandle* rank, const GroupShape* shape, const CombineParams* params,
                       Stream stream);
const char* RunCombineStart(RankHandle* rank, const GroupShape* shape, const CombineParams* params,
                            int32_t* epoch, Stream stream);
const char* RunCombineDone(RankHandle* rank, const GroupShape* shape, const CombineParams* params,
                           const int32_t* epoch, Stream stream);

}  // namespace jax_ep::gpu
