// Ranks in different processes over shm: bytes, flags and wake-ups cross; a killed process is named
// by the others and leaves nothing behind. The children are forked before any thread exists.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>

#include "proxy/base/blob.h"
#include "proxy/base/shared_memory.h"
#include "proxy/proxy.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint32_t kMaxProcesses = 4;
constexpr std::chrono::seconds kTimeout{30};
constexpr uint64_t kDataOffset = 8192;
constexpr uint64_t kHeapBytes = 64 << 10;

// Shared by all processes of one test, mapped before fork: stands for the key-value store.
struct Board {
  std::array<std::atomic<uint32_t>, kMaxProcesses> blob_bytes;
  std::array<char[4096], kMaxProcesses> blobs;
  std::atomic<uint32_t> num_met;
};

// One process: one rank on one node.
class Process {
 public:
  Process(uint32_t rank, uint32_t num_ranks, Board* board)
      : rank_(rank), num_ranks_(num_ranks), board_(board) {}

  // Everything up to and including a barrier of all proxies having started. "" or what failed.
  std::string Start(milliseconds peer_timeout, const std::string& faulty_spec) {
    Result<SharedMemory> heap = SharedMemory::Create(kHeapBytes, /*shareable=*/true);
    if (!heap.ok()) return heap.status().message();
    heap_ = std::move(*heap);
    auto proxy = Proxy::Create(ProxyOptions{.group_name = "test",
                                            .transport = "shm",
                                            .faulty_spec = faulty_spec,
                                            .peer_timeout = peer_timeout,
                                            .timeout = kTimeout},
                               &failure);
    if (!proxy.ok()) return proxy.status().message();
    proxy_ = std::move(*proxy);
    std::vector<uint32_t> peers;
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
      if (peer != rank_) peers.push_back(peer);
    }
    const Result<int> endpoint = proxy_->AddEndpoint(EndpointOptions{
        .rank = rank_,
        .num_ranks = num_ranks_,
        .peers = peers,
        .ll_slots = 4,
        .heap = heap_.bytes(),
        .heap_export = heap_.Export(),
        .flag = [this](Channel channel, uint32_t source) { return Flag(channel, source); },
        .doorbell = &doorbell()});
    if (!endpoint.ok()) return endpoint.status().message();
    const std::string blob = proxy_->LocalBlob(0);
    if (blob.size() > sizeof(board_->blobs[0])) return "blob too long";
    std::copy(blob.begin(), blob.end(), board_->blobs[rank_]);
    board_->blob_bytes[rank_].store(static_cast<uint32_t>(blob.size()), std::memory_order_release);
    for (const uint32_t peer : peers) {
      if (!Await([&] { return board_->blob_bytes[peer].load(std::memory_order_acquire) > 0; })) {
        return "no blob";
      }
      const Status status =
          proxy_->Connect(0, peer, {board_->blobs[peer], board_->blob_bytes[peer].load()},
                          Deadline::After(kTimeout));
      if (!status.ok()) return status.message();
    }
    if (const Status status = proxy_->Start(); !status.ok()) return status.message();
    return Meet();
  }

  // Waits until all processes have come here as often as this one. Over the board: unlike after a
  // Barrier, which its first process may leave while its own signals are still on their way.
  std::string Meet() {
    const uint32_t num_expected = ++num_meetings_ * num_ranks_;
    board_->num_met.fetch_add(1, std::memory_order_acq_rel);
    return Await([&] { return board_->num_met.load() >= num_expected; }) ? "" : "not all came";
  }

  void Push(Command command) {
    const std::optional<PackedCommand> packed = TryPack(command);
    const Deadline deadline = Deadline::After(kTimeout);
    while (!proxy_->ring(0).TryPush(*packed) && !deadline.expired() && !failure.failed()) {
      std::this_thread::yield();
    }
    proxy_->Kick();
  }

  // Sends one row with a signal to every peer and waits for theirs; checks the bytes.
  std::string ExchangeEpoch(uint64_t epoch) {
    constexpr uint64_t kRowBytes = 1024;
    const auto byte = [](uint32_t from, uint32_t to, uint64_t e, uint64_t i) {
      return static_cast<std::byte>(from * 3 + to * 5 + e * 7 + i);
    };
    const auto slot = [&](uint32_t peer) {
      return kDataOffset + (peer * 2 + epoch % 2) * kRowBytes;
    };
    constexpr uint64_t kRecv = kMaxProcesses * 2 * kRowBytes;
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_) continue;
      for (uint64_t i = 0; i < kRowBytes; ++i) {
        heap_.bytes()[slot(peer) + i] = byte(rank_, peer, epoch, i);
      }
      Push(Command{.op = Op::kWriteSignal,
                   .dst_rank = peer,
                   .length_bytes = kRowBytes,
                   .local_offset = slot(peer),
                   .remote_offset = slot(rank_) + kRecv,
                   .channel = Channel::kDispatch,
                   .epoch = epoch});
    }
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_) continue;
      const WaitResult result = WaitUntil(
          doorbell(),
          [&] { return Flag(Channel::kDispatch, peer)->load(std::memory_order_acquire) >= epoch; },
          Deadline::After(kTimeout), failure);
      if (result != WaitResult::kReady) return "wait: " + failure.status().message();
      for (uint64_t i = 0; i < kRowBytes; ++i) {
        if (heap_.bytes()[slot(peer) + kRecv + i] != byte(peer, rank_, epoch, i)) {
          return "wrong byte";
        }
      }
    }
    return "";
  }

  std::string Barrier() {
    ++barrier_epoch_;
    Push(Command{.op = Op::kQuiet, .epoch = barrier_epoch_});
    Push(Command{.op = Op::kBarrier, .epoch = barrier_epoch_});
    const WaitResult result = WaitUntil(
        doorbell(),
        [&] {
          bool all = proxy_->quiet_flag(0)->load(std::memory_order_acquire) >= barrier_epoch_;
          for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
            all = all && (peer == rank_ ||
                          Flag(Channel::kBarrier, peer)->load(std::memory_order_acquire) >=
                              barrier_epoch_);
          }
          return all;
        },
        Deadline::After(kTimeout), failure);
    return result == WaitResult::kReady ? "" : "barrier: " + failure.status().message();
  }

  void Stop() { proxy_->Stop(); }

  // "" if the group failed within the time limit and the message names `rank`.
  std::string ExpectDeath(uint32_t rank, milliseconds limit) {
    const auto begin = steady_clock::now();
    if (!Await([&] { return failure.failed(); })) return "no failure";
    if (steady_clock::now() - begin > limit) return "too late";
    const std::string message = failure.status().message();
    return message.find("rank " + std::to_string(rank)) != std::string::npos ? "" : message;
  }

  FailureLatch failure;

 private:
  Doorbell& doorbell() { return *reinterpret_cast<Doorbell*>(heap_.bytes().data()); }
  std::atomic<uint64_t>* Flag(Channel channel, uint32_t source) {
    return reinterpret_cast<std::atomic<uint64_t>*>(heap_.bytes().data() + sizeof(Doorbell)) +
           static_cast<uint32_t>(channel) * num_ranks_ + source;
  }
  static bool Await(const std::function<bool()>& ready) {
    const Deadline deadline = Deadline::After(kTimeout);
    while (!ready()) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }

  uint32_t rank_;
  uint32_t num_ranks_;
  Board* board_;
  SharedMemory heap_;
  std::unique_ptr<Proxy> proxy_;
  uint64_t barrier_epoch_ = 0;
  uint32_t num_meetings_ = 0;
};

using Body = std::function<std::string(Process&, uint32_t rank)>;

// Runs `body` as each rank in a process of its own; it returns "" or what went wrong. A rank in
// `killed` must die by SIGKILL.
void RunProcesses(uint32_t num_ranks, const Body& body, int64_t killed = -1) {
  // Not a SharedMemory: children of fork do not get those.
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      /*fd=*/-1, /*offset=*/0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* board = new (memory) Board{};
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    std::fflush(nullptr);
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      std::string problem;
      {
        Process process(rank, num_ranks, board);
        problem = body(process, rank);
      }
      if (!problem.empty()) std::fprintf(stderr, "rank %u: %s\n", rank, problem.c_str());
      _exit(problem.empty() ? 0 : 1);
    }
    children.push_back(pid);
  }
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(children[rank], &status, 0), children[rank]);
    if (rank == killed) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
  munmap(memory, sizeof(Board));
}

size_t NumFilesInDevShm() {
  std::error_code error;
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/dev/shm", error)) {
    if (entry.path().filename().string().find("jax_ep") != std::string::npos) ++count;
  }
  return count;
}

void ExchangeBetween(uint32_t num_ranks, const std::string& faulty_spec) {
  RunProcesses(num_ranks, [&](Process& process, uint32_t) -> std::string {
    if (auto problem = process.Start(milliseconds(15'000), faulty_spec); !problem.empty()) {
      return problem;
    }
    for (uint64_t epoch = 1; epoch <= 200; ++epoch) {
      if (auto problem = process.ExchangeEpoch(epoch); !problem.empty()) return problem;
    }
    if (auto problem = process.Barrier(); !problem.empty()) return problem;
    process.Stop();
    return process.failure.failed() ? process.failure.status().message() : "";
  });
}

TEST(Processes, exchange_over_shm) { ExchangeBetween(4, ""); }

TEST(Processes, exchange_over_a_faulty_shm) {
  ExchangeBetween(3, "seed=4,reorder=8,duplicate=20,split=20,delay=3,again=10,slow_completions=3");
}

TEST(Processes, a_killed_one_is_named_by_all_others_in_time_and_nothing_is_left_behind) {
  const size_t files_before = NumFilesInDevShm();
  constexpr milliseconds kPeerTimeout{1500};
  RunProcesses(
      3,
      [&](Process& process, uint32_t rank) -> std::string {
        if (auto problem = process.Start(kPeerTimeout, ""); !problem.empty()) return problem;
        for (uint64_t epoch = 1; epoch <= 5; ++epoch) {
          if (auto problem = process.ExchangeEpoch(epoch); !problem.empty()) return problem;
        }
        if (auto problem = process.Barrier(); !problem.empty()) return problem;
        if (auto problem = process.Meet(); !problem.empty()) return problem;
        if (rank == 1) kill(getpid(), SIGKILL);
        return process.ExpectDeath(/*rank=*/1, 3 * kPeerTimeout);
      },
      /*killed=*/1);
  EXPECT_EQ(NumFilesInDevShm(), files_before);
}

TEST(Processes, one_that_is_stopped_for_less_than_the_limit_does_no_harm) {
  RunProcesses(2, [&](Process& process, uint32_t rank) -> std::string {
    if (auto problem = process.Start(milliseconds(3000), ""); !problem.empty()) return problem;
    if (auto problem = process.ExchangeEpoch(1); !problem.empty()) return problem;
    if (rank == 1) {
      // A helper process wakes us again.
      const pid_t self = getpid();
      if (fork() == 0) {
        std::this_thread::sleep_for(milliseconds(700));
        kill(self, SIGCONT);
        _exit(0);
      }
      kill(self, SIGSTOP);
      wait(nullptr);
    }
    for (uint64_t epoch = 2; epoch <= 20; ++epoch) {
      if (auto problem = process.ExchangeEpoch(epoch); !problem.empty()) return problem;
    }
    if (auto problem = process.Barrier(); !problem.empty()) return problem;
    process.Stop();
    return process.failure.failed() ? process.failure.status().message() : "";
  });
}

}  // namespace
}  // namespace jax_ep
