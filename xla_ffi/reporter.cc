#include "xla_ffi/reporter.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "proxy/base/descriptor.h"
#include "proxy/base/log.h"
#include "proxy/base/thread.h"
#include "xla_ffi/report_clients.h"

namespace jax_ep {
namespace {

// What the handler uses: it may run on any thread, at any time.
std::atomic<int> signal_event{-1};
std::atomic<pid_t> signal_owner{0};

void OnSignal(int number) {
  const int saved = errno;
  if (signal_owner.load(std::memory_order_relaxed) != getpid()) {
    signal(number, SIG_DFL);  // a forked child's: it dies, as it would without jax_ep
    raise(number);
  } else {
    const uint64_t one = 1;
    (void)!write(signal_event.load(std::memory_order_relaxed), &one, sizeof(one));
  }
  errno = saved;
}

// The socket whose name is this process's, or -1. A forked child closes its copy: while that is
// open, the parent could not take the name again, and whoever asked the parent would get no answer.
std::atomic<int> listening{-1};

void CloseInChild() {
  if (const int fd = listening.exchange(-1, std::memory_order_relaxed); fd >= 0) close(fd);
}

// Thread rule: Add and Remove on any thread.
class Reporter {
 public:
  // A group while it is listed. Its answers are asked for under its own lock, which its removal
  // takes: one that is slow to answer holds up no other.
  struct Listed {
    std::mutex asking;
    GroupAnswers answers;  // without functions once it is removed
  };
  using Groups = std::list<std::shared_ptr<Listed>>;

  // This process's; lives until the process ends. A forked child does not use its parent's, which
  // somebody may have held when it was copied.
  static Reporter& Instance() {
    static std::atomic<Reporter*> newest{nullptr};
    Reporter* found = newest.load(std::memory_order_acquire);
    while (found == nullptr || found->creator_ != getpid()) {
      auto* const fresh = new Reporter();
      if (newest.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
      delete fresh;
    }
    return *found;
  }

  Groups::iterator Add(GroupAnswers group) {
    const std::lock_guard life(life_mutex_);
    Groups::iterator at;
    {
      const std::lock_guard lock(mutex_);
      at = groups_.insert(groups_.end(), std::make_shared<Listed>());
      (*at)->answers = std::move(group);
    }
    if (groups_.size() == 1) Start();
    return at;
  }

  void Remove(Groups::iterator at) {
    if (getpid() != creator_) return;
    const std::shared_ptr<Listed> group = *at;
    {
      const std::lock_guard life(life_mutex_);
      if (groups_.size() == 1) Stop();
      const std::lock_guard lock(mutex_);
      groups_.erase(at);
    }
    const std::lock_guard asking(group->asking);
    group->answers = {};
  }

 private:
  void Start() {
    stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
    // Never closed: a handler may still be about to write to it.
    if (signal_.fd() < 0) signal_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    socket_ = Listen();
    if (stop_.fd() < 0 || signal_.fd() < 0) return Explain(std::strerror(errno));
    Result<std::thread> thread = StartThread("jax_ep report", [this] { Loop(); });
    if (!thread.ok()) return Explain(thread.status().message());
    thread_ = std::move(*thread);
    TakeSignal();
  }

  void Stop() {
    if (!thread_.joinable()) return;
    LeaveSignal();
    const uint64_t one = 1;
    (void)!write(stop_.fd(), &one, sizeof(one));
    thread_.join();
    stop_ = Descriptor();
    listening.store(-1, std::memory_order_relaxed);  // before its number is used again
    socket_ = Descriptor();
  }

  static void Explain(std::string_view why) {
    LogInfo("no reports by signal or by `python -m jax_ep report`: " + std::string(why));
  }

  static Descriptor Listen() {
    static const int is_heard = pthread_atfork(nullptr, nullptr, &CloseInChild);
    (void)is_heard;  // without memory for it: as if no child were forked
    Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const std::string name = "jax_ep/report/" + std::to_string(getpid());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    listening.store(listener.fd(), std::memory_order_relaxed);  // before it has a name
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (listener.fd() < 0 ||
        bind(listener.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        listen(listener.fd(), SOMAXCONN) != 0) {
      Explain(std::strerror(errno));
      listening.store(-1, std::memory_order_relaxed);
      return Descriptor();  // poll ignores it
    }
    return listener;
  }

  void TakeSignal() {
    struct sigaction now{};
    if (sigaction(SIGUSR1, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 ||
        now.sa_handler != SIG_DFL) {
      return;
    }
    signal_event.store(signal_.fd(), std::memory_order_relaxed);
    signal_owner.store(getpid(), std::memory_order_relaxed);
    struct sigaction ours{};
    ours.sa_handler = &OnSignal;
    ours.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &ours, nullptr);
  }

  static void LeaveSignal() {
    struct sigaction now{};
    if (sigaction(SIGUSR1, nullptr, &now) != 0 || now.sa_handler != &OnSignal) return;
    struct sigaction none{};
    none.sa_handler = SIG_DFL;
    sigaction(SIGUSR1, &none, nullptr);
  }

  // visit(answers) of each group that is listed.
  template <typename Visit>
  void ForEachGroup(Visit&& visit) {
    const Groups groups = [&] {
      const std::lock_guard lock(mutex_);
      return groups_;
    }();
    for (const std::shared_ptr<Listed>& group : groups) {
      const std::lock_guard asking(group->asking);
      if (group->answers.page != nullptr) visit(group->answers);
    }
  }

  std::string AllPages() {
    std::string all;
    ForEachGroup([&](const GroupAnswers& group) {
      if (!all.empty()) all += kReportSeparator;
      all += group.page();
    });
    return all;
  }

  std::string AllCounters() {
    std::string all;
    int num_uncounted = 0;
    ForEachGroup([&](const GroupAnswers& group) {
      if (group.counters == nullptr) return;
      const std::string counters = group.counters();
      num_uncounted += counters.empty();
      if (!all.empty() && !counters.empty()) all += ", ";
      all += counters;
    });
    return R"({"version": 1, "groups": [)" + all + R"(], "uncounted": )" +
           std::to_string(num_uncounted) + "}";
  }

  std::string AnswerTo(std::string_view request) {
    if (request.empty()) return AllPages();
    if (request == kCountersRequest) return AllCounters();
    return R"({"version": 1, "error": "this job knows the request of version 1 only"})";
  }

  void Loop() noexcept {
    ReportClients clients;
    std::array<pollfd, 3 + ReportClients::kMost> events;
    bool may_accept = true;
    while (true) {
      const int listened = may_accept && !clients.is_full() ? socket_.fd() : -1;
      events[0] = {.fd = stop_.fd(), .events = POLLIN, .revents = 0};
      events[1] = {.fd = signal_.fd(), .events = POLLIN, .revents = 0};
      events[2] = {.fd = listened, .events = POLLIN, .revents = 0};
      const auto of_clients = std::span(events).last<ReportClients::kMost>();
      int limit_ms = clients.Watch(of_clients);
      constexpr int kNapMs = kAcceptNap.count();
      if (!may_accept && (limit_ms < 0 || limit_ms > kNapMs)) limit_ms = kNapMs;
      if (poll(events.data(), events.size(), limit_ms) < 0 && errno != EINTR) return;
      if (events[0].revents != 0) return;
      if (uint64_t count = 0;
          events[1].revents != 0 && read(signal_.fd(), &count, sizeof(count)) > 0) {
        WritePages();
      }
      clients.Serve(of_clients, [this](std::string_view request) { return AnswerTo(request); });
      may_accept = events[2].revents == 0 || Accept(clients);
    }
  }

  void WritePages() noexcept {
    try {
      std::string text = AllPages();
      for (char& letter : text) letter = letter == kReportSeparator ? '\n' : letter;
      LogWarning("SIGUSR1: this process's groups\n" + text);
    } catch (...) {  // no memory: nobody gets a page
    }
  }

  // False: nobody can be let in for now, and whoever wants in waits in the socket's queue.
  bool Accept(ReportClients& clients) {
    Descriptor peer(accept4(socket_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.fd() < 0) return WasNobodyThere(errno);
    ucred who{};
    socklen_t length = sizeof(who);
    if (getsockopt(peer.fd(), SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 &&
        (who.uid == geteuid() || who.uid == 0)) {
      clients.Add(std::move(peer));
    }
    return true;
  }

  const pid_t creator_ = getpid();
  std::mutex life_mutex_;  // Start and Stop, one after the other
  std::mutex mutex_;
  Groups groups_;  // changes under both
  Descriptor stop_, signal_, socket_;
  std::thread thread_;
};

class Entry final : public ReportEntry {
 public:
  explicit Entry(GroupAnswers answers)
      : reporter_(Reporter::Instance()), at_(reporter_.Add(std::move(answers))) {}
  ~Entry() override { reporter_.Remove(at_); }

 private:
  Reporter& reporter_;
  const Reporter::Groups::iterator at_;
};

}  // namespace

std::unique_ptr<ReportEntry> ListForReports(GroupAnswers answers) {
  return std::make_unique<Entry>(std::move(answers));
}

}  // namespace jax_ep
