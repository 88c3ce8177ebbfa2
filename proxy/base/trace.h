// JAX_EP_TRACE: what the ranks of this process and their proxies did, and when, in a file that
// grows while the job runs, so that one which is killed leaves its last moments. `python -m jax_ep
// trace` makes one picture of the files of all processes (jax_ep/_cli/trace.py).
//
// The file is a row of records: u32 type, u32 length, then so many bytes; in the byte order of the
// host. TraceRecord says what they hold.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "proxy/base/rank_name.h"
#include "proxy/base/status.h"
#include "proxy/base/trace_track.h"

namespace jax_ep {

enum class TraceRecord : uint32_t {
  kProcess = 1,  // text, a line each: format's version, host, boot id, pid, index in the job, the
                 // monotonic and the real time of one moment in ns
  kTrack = 2,    // u32 track, then text, a line each: see TrackLabel
  kName = 3,     // u32 track, u32 index, then the name
  kSite = 4,     // u64 call site, then where it stands in the program: "train.py:42"
  kEvents = 5,   // u32 track, u32 0, then TraceEvents
  kDropped = 6,  // u32 track, u32 0, u64 events dropped so far
};

enum class TrackKind : uint8_t { kRank, kProxy };

struct TrackLabel {
  TrackKind kind = TrackKind::kRank;
  TeamId team = {};
  uint32_t rank = 0;
  std::string group_name = {};

  // "rank" or "proxy", team, number of teams, rank, group: a line each.
  std::string Text() const;
};

// Thread rule: any thread. In a forked child nothing may be called.
class Tracer {
 public:
  using DescribeSite = std::function<std::string(uint64_t site)>;

  // The one of this process, made where there is none: opens PREFIX.HOST.PID.jaxep (the first of a
  // process truncates it, a later one appends) and starts a thread that writes.
  // \error kInvalidArgument    the file cannot be opened
  // \error kResourceExhausted  no thread
  static Result<std::shared_ptr<Tracer>> Open(const std::string& prefix, uint32_t process_index,
                                              DescribeSite describe_site);
  ~Tracer();  // writes what is left
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  // A track is written out and forgotten when nobody else holds it. It may outlive this object;
  // then what is added is lost.
  std::shared_ptr<TraceTrack> AddTrack(const TrackLabel& label);

 private:
  struct Stream {
    std::shared_ptr<TraceTrack> track;
    size_t num_names = 0;      // written
    uint64_t num_dropped = 0;  // written
  };

  Tracer(int file, std::string path, DescribeSite describe_site);
  void Loop();
  // The three below under mutex_.
  void WriteNew();
  void Write(Stream& stream);
  void Append(TraceRecord type, std::string_view head, std::string_view rest = {});
  void Flush();

  const int file_;
  const std::string path_;
  const DescribeSite describe_site_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool is_stopping_ = false;
  bool has_failed_ = false;
  std::vector<Stream> streams_;
  std::set<uint64_t> known_sites_;
  std::string buffer_;
  std::thread thread_;
};

}  // namespace jax_ep
