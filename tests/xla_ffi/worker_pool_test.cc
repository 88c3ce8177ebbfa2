#include "xla_ffi/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <vector>

namespace jax_ep {
namespace {

TEST(WorkerPool, every_item_is_visited_once) {
  for (const int num_threads : {1, 2, 3, 8}) {
    const auto made = WorkerPool::Create(num_threads);
    WorkerPool& pool = **made;
    for (const int64_t num_items : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(num_items));
      pool.Run(num_items, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) visits[static_cast<size_t>(i)].fetch_add(1);
      });
      for (const auto& count : visits) EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(WorkerPool, runs_can_follow_each_other_at_once) {
  const auto made = WorkerPool::Create(4);
  WorkerPool& pool = **made;
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 2000; ++round) {
    pool.Run(800, [&](int64_t begin, int64_t end) { sum.fetch_add(end - begin); });
  }
  EXPECT_EQ(sum.load(), 1600000);
}

// An exception on a worker ended the process; one on the caller left while the workers still ran.
TEST(WorkerPool, what_a_share_throws_comes_out_of_run_when_all_are_done) {
  auto pool = WorkerPool::Create(3);
  ASSERT_TRUE(pool.ok());
  constexpr int64_t kNumItems = 3 * 64;
  for (const int64_t thrower : {0, 64, 128}) {
    std::atomic<int64_t> num_done{0};
    EXPECT_THROW((*pool)->Run(kNumItems,
                              [&](int64_t begin, int64_t end) {
                                if (begin == thrower) throw std::bad_alloc();
                                num_done += end - begin;
                              }),
                 std::bad_alloc);
    EXPECT_EQ(num_done, 2 * 64);
  }
  std::atomic<int64_t> num_done{0};
  (*pool)->Run(kNumItems, [&](int64_t begin, int64_t end) { num_done += end - begin; });
  EXPECT_EQ(num_done, kNumItems);
}

}  // namespace
}  // namespace jax_ep
