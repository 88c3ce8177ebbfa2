// A fixed set of threads that share one rank's row loops (kernels/launch.h ParallelFor).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: Run is called by one thread at a time (the rank's executor).
class WorkerPool {
 public:
  // `num_threads` counts the caller: 1 starts no thread.
  // \error kResourceExhausted  no thread
  static Result<std::unique_ptr<WorkerPool>> Create(int num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls body(begin, end) on disjoint ranges that cover [0, num_items); returns when all are done.
  // What the body throws on any thread (the standard library: no memory) is thrown again here.
  void Run(int64_t num_items, const std::function<void(int64_t, int64_t)>& body);

 private:
  explicit WorkerPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {}
  void Loop(int index);
  std::exception_ptr RunShare(int index) noexcept;

  const int num_threads_;
  std::mutex mutex_;
  std::condition_variable work_ready_, work_done_;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
  int64_t num_items_ = 0;
  uint64_t generation_ = 0;
  int num_busy_ = 0;
  std::exception_ptr thrown_;  // by one of the shares
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace jax_ep
