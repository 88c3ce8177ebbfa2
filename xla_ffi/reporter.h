// Tells of this process's open groups without asking Python, whose main thread may wait in XLA: on
// SIGUSR1 it writes their pages (Session::Report) to the log, and to whom connects to its socket it
// sends them (`python -m jax_ep report`, jax_ep/_cli/report.py).
//
// The socket is an abstract one of the host's (of the container's network namespace):
// "\0jax_ep/report/PID". Only processes of the same user, and root's, are answered. Who sends
// kCountersRequest at once gets the counters of all groups as a JSON object:
//   {"version": 1, "groups": [CountersJson()...], "uncounted": groups whose GPUs did not answer}
// Who sends anything else gets {"version": 1, "error": why}. Who sends nothing gets the pages, with
// kReportSeparator between them. Then the stream ends. Who is slow to ask, or to read, holds up
// nobody else.
//
// SIGUSR1 is taken only if it has its default action, which ends the process, and only while
// groups are open; a handler that the program sets, before or after, stays. Where there is neither
// a socket nor a thread to be had, groups work as well.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace jax_ep {

inline constexpr char kReportSeparator = '\f';
inline constexpr std::string_view kCountersRequest = R"({"version": 1, "want": "counters"})";

// What a group answers, on the reporter's thread. Both wait for no peer. On GPUs `counters` waits
// for a copy from the device, and so does the end of this group's entry, but no other group's.
struct GroupAnswers {
  std::function<std::string()> page;
  // JSON, "" where they cannot be had; no function: it is no group that could have any.
  std::function<std::string()> counters;
};

// Keeps a group listed. Thread rule: made and destroyed on any thread; in a forked child nothing
// happens.
class ReportEntry {
 public:
  virtual ~ReportEntry() = default;
};

// `answers` are called until the entry is gone.
std::unique_ptr<ReportEntry> ListForReports(GroupAnswers answers);

}  // namespace jax_ep
