#include "proxy/base/trace.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <utility>

#include "proxy/base/log.h"
#include "proxy/base/thread.h"

namespace jax_ep {
namespace {

constexpr std::string_view kFormatVersion = "1";
// How often the file grows: what a killed process loses. A ring takes 650,000 events a second.
constexpr std::chrono::milliseconds kPeriod{50};
constexpr int kNice = 10;

std::string HostName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

// Equal for all processes that share a monotonic clock, whatever their containers are called.
std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id.empty() ? HostName() : id;
}

template <typename Clock>
uint64_t NowNs() {
  const auto since = Clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

template <typename... Number>
std::string Bytes(Number... numbers) {
  std::string out;
  (out.append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
  return out;
}

std::string ProcessText(uint32_t process_index) {
  const uint64_t monotonic_ns = NowNs<std::chrono::steady_clock>();
  const uint64_t real_ns = NowNs<std::chrono::system_clock>();
  return std::string(kFormatVersion) + "\n" + HostName() + "\n" + BootId() + "\n" +
         std::to_string(getpid()) + "\n" + std::to_string(process_index) + "\n" +
         std::to_string(monotonic_ns) + "\n" + std::to_string(real_ns);
}

}  // namespace

std::string TrackLabel::Text() const {
  return std::string(kind == TrackKind::kRank ? "rank" : "proxy") + "\n" +
         std::to_string(team.index) + "\n" + std::to_string(team.num_teams) + "\n" +
         std::to_string(rank) + "\n" + group_name;
}

Result<std::shared_ptr<Tracer>> Tracer::Open(const std::string& prefix, uint32_t process_index,
                                             DescribeSite describe_site) {
  static std::mutex mutex;
  static std::weak_ptr<Tracer> newest;
  static pid_t opened_by = 0;  // the process that has made its file

  std::lock_guard lock(mutex);
  const bool is_first = opened_by != getpid();  // a forked child knows its parent's
  if (!is_first) {
    if (std::shared_ptr<Tracer> open = newest.lock()) return open;
  }
  const std::string path = prefix + "." + HostName() + "." + std::to_string(getpid()) + ".jaxep";
  const int flags = O_WRONLY | O_CREAT | O_CLOEXEC | (is_first ? O_TRUNC : O_APPEND);
  const int file = open(path.c_str(), flags, 0644);
  if (file < 0) {
    return InvalidArgument("JAX_EP_TRACE: cannot open " + path + " (" + std::strerror(errno) +
                           "); set it to the beginning of a path whose folder exists and can be "
                           "written, or unset it");
  }
  std::shared_ptr<Tracer> tracer(new Tracer(file, path, std::move(describe_site)));
  tracer->Append(TraceRecord::kProcess, ProcessText(process_index));
  JAX_EP_ASSIGN_OR_RETURN(tracer->thread_,
                          StartThread("jax_ep trace", [raw = tracer.get()] { raw->Loop(); }));
  opened_by = getpid();
  newest = tracer;
  return tracer;
}

Tracer::Tracer(int file, std::string path, DescribeSite describe_site)
    : file_(file), path_(std::move(path)), describe_site_(std::move(describe_site)) {}

Tracer::~Tracer() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  close(file_);
}

std::shared_ptr<TraceTrack> Tracer::AddTrack(const TrackLabel& label) {
  static std::atomic<uint32_t> num_tracks{0};  // unique in the file, whoever appends to it
  auto track = std::make_shared<TraceTrack>(num_tracks.fetch_add(1), label.Text());
  std::lock_guard lock(mutex_);
  Append(TraceRecord::kTrack, Bytes(track->id()), track->label());
  streams_.push_back({.track = track});
  // Whoever holds this has the track; the last to let go of it ends it.
  return {track.get(), [track](TraceTrack* ended) { ended->End(); }};
}

void Tracer::Loop() {
  (void)setpriority(PRIO_PROCESS, 0, kNice);  // of this thread: the job goes first
  std::unique_lock lock(mutex_);
  bool is_last = false;
  while (!is_last) {
    is_last = wake_.wait_for(lock, kPeriod, [this] { return is_stopping_; });
    WriteNew();
  }
}

void Tracer::WriteNew() {
  for (size_t i = 0; i < streams_.size();) {
    const bool has_ended = streams_[i].track->has_ended();  // before its last events are read
    Write(streams_[i]);
    if (has_ended) {
      streams_.erase(streams_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  Flush();
}

void Tracer::Write(Stream& stream) {
  TraceTrack& track = *stream.track;
  const auto take = [&](const TraceEvent* events, uint64_t count) {
    for (; stream.num_names < track.num_names(); ++stream.num_names) {
      Append(TraceRecord::kName, Bytes(track.id(), static_cast<uint32_t>(stream.num_names)),
             track.name(stream.num_names));
    }
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t site = events[i].kind == TraceKind::kCall ? events[i].detail : 0;
      if (site == 0 || !known_sites_.insert(site).second) continue;
      if (const std::string line = describe_site_(site); !line.empty()) {
        Append(TraceRecord::kSite, Bytes(site), line);
      }
    }
    Append(TraceRecord::kEvents, Bytes(track.id(), uint32_t{0}),
           {reinterpret_cast<const char*>(events), count * sizeof(TraceEvent)});
  };
  // Twice: once up to the end of the ring's memory, once from its beginning.
  for (int part = 0; part < 2 && track.Read(take) > 0; ++part) {
  }
  if (const uint64_t dropped = track.num_dropped(); dropped != stream.num_dropped) {
    stream.num_dropped = dropped;
    Append(TraceRecord::kDropped, Bytes(track.id(), uint32_t{0}, dropped));
  }
}

void Tracer::Append(TraceRecord type, std::string_view head, std::string_view rest) {
  buffer_ += Bytes(static_cast<uint32_t>(type), static_cast<uint32_t>(head.size() + rest.size()));
  buffer_.append(head).append(rest);
}

void Tracer::Flush() {
  std::string_view left = buffer_;
  while (!left.empty() && !has_failed_) {
    const ssize_t written = write(file_, left.data(), left.size());
    if (written >= 0) {
      left.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      has_failed_ = true;  // the job goes on
      LogWarning("JAX_EP_TRACE: cannot write to " + path_ + " (" + std::strerror(errno) +
                 "); this process is traced no further");
    }
  }
  buffer_.clear();
}

}  // namespace jax_ep
