#include "xla_ffi/worker_pool.h"

#include <utility>

#include "proxy/base/thread.h"

namespace jax_ep {
namespace {

// Fewer items per thread than this are not worth waking anybody: a wake-up and a sleep cost about
// as much as copying this many rows of 4 KiB.
constexpr int64_t kMinItemsPerThread = 32;

}  // namespace

Result<std::unique_ptr<WorkerPool>> WorkerPool::Create(int num_threads) {
  std::unique_ptr<WorkerPool> pool(new WorkerPool(num_threads));
  for (int index = 1; index < pool->num_threads_; ++index) {
    JAX_EP_ASSIGN_OR_RETURN(
        std::thread thread,
        StartThread("jax_ep worker", [p = pool.get(), index] { p->Loop(index); }));
    pool->threads_.push_back(std::move(thread));
  }
  return pool;
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::exception_ptr WorkerPool::RunShare(int index) noexcept try {
  const int64_t begin = num_items_ * index / num_threads_;
  const int64_t end = num_items_ * (index + 1) / num_threads_;
  if (begin < end) (*body_)(begin, end);
  return nullptr;
} catch (...) {
  return std::current_exception();
}

void WorkerPool::Run(int64_t num_items, const std::function<void(int64_t, int64_t)>& body) {
  if (num_threads_ == 1 || num_items < kMinItemsPerThread * num_threads_) {
    if (num_items > 0) body(0, num_items);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    num_items_ = num_items;
    num_busy_ = num_threads_ - 1;
    ++generation_;
  }
  work_ready_.notify_all();
  std::exception_ptr thrown = RunShare(0);
  std::unique_lock lock(mutex_);
  work_done_.wait(lock, [this] { return num_busy_ == 0; });
  if (thrown_ != nullptr) thrown = std::exchange(thrown_, nullptr);
  lock.unlock();
  if (thrown != nullptr) std::rethrow_exception(thrown);
}

void WorkerPool::Loop(int index) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    work_ready_.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    lock.unlock();
    std::exception_ptr thrown = RunShare(index);
    lock.lock();
    if (thrown != nullptr) thrown_ = std::move(thrown);
    if (--num_busy_ == 0) work_done_.notify_one();
  }
}

}  // namespace jax_ep
