// Times calls of all ranks of a team in graphs: what bench programs have in common.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/kernels_gpu/gpu_team.h"

namespace jax_ep::testing {

struct GraphTimes {
  int calls_per_graph = 20;
  int launches = 11;
};

// Microseconds per call of what launch(rank) enqueues: median over launches of the slowest rank's
// mean over the calls of a graph. Ends the process if a rank fails.
template <typename Launch>
double TimeInGraphs(GpuTeam& team, const GraphTimes& times, Launch&& launch) {
  const uint32_t num_ranks = team.num_ranks();
  std::vector<cudaGraphExec_t> graphs(num_ranks);
  std::vector<cudaEvent_t> begin(num_ranks), end(num_ranks);
  for (uint32_t r = 0; r < num_ranks; ++r) {
    team.UseDeviceOf(r);
    CheckCuda(cudaEventCreate(&begin[r]), "event");
    CheckCuda(cudaEventCreate(&end[r]), "event");
    cudaGraph_t graph;
    CheckCuda(cudaStreamBeginCapture(team.stream(r), cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < times.calls_per_graph; ++i) {
      if (const char* error = launch(r)) {
        std::fprintf(stderr, "%s\n", error);
        std::exit(1);
      }
    }
    CheckCuda(cudaStreamEndCapture(team.stream(r), &graph), "capture");
    CheckCuda(cudaGraphInstantiate(&graphs[r], graph, 0), "instantiate");
    CheckCuda(cudaGraphUpload(graphs[r], team.stream(r)), "upload");
    CheckCuda(cudaGraphDestroy(graph), "destroy");
  }
  team.Synchronize();
  std::vector<double> slowest_of_launch;
  for (int i = 0; i < times.launches; ++i) {
    for (uint32_t r = 0; r < num_ranks; ++r) {
      team.UseDeviceOf(r);
      CheckCuda(cudaEventRecord(begin[r], team.stream(r)), "record");
      CheckCuda(cudaGraphLaunch(graphs[r], team.stream(r)), "launch");
      CheckCuda(cudaEventRecord(end[r], team.stream(r)), "record");
    }
    team.Synchronize();
    double slowest = 0;
    for (uint32_t r = 0; r < num_ranks; ++r) {
      float ms = 0;
      CheckCuda(cudaEventElapsedTime(&ms, begin[r], end[r]), "elapsed");
      slowest = std::max(slowest, static_cast<double>(ms) * 1000 / times.calls_per_graph);
    }
    slowest_of_launch.push_back(slowest);
  }
  for (uint32_t r = 0; r < num_ranks; ++r) {
    CheckCuda(cudaGraphExecDestroy(graphs[r]), "destroy");
    CheckCuda(cudaEventDestroy(begin[r]), "event");
    CheckCuda(cudaEventDestroy(end[r]), "event");
    const gpu::RankStatus& status = team.status(r);
    if (status.failed.load() == 0) continue;
    std::fprintf(stderr, "rank %u failed: kind %u operation %u peer %u\n", r, status.kind,
                 status.operation, status.peer);
    std::exit(1);
  }
  std::sort(slowest_of_launch.begin(), slowest_of_launch.end());
  return slowest_of_launch[slowest_of_launch.size() / 2];
}

}  // namespace jax_ep::testing
