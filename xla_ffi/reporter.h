// Tells of this process's open groups without asking Python, whose main thread may wait in XLA: on
// SIGUSR1 it writes their pages (Session::Report) to the log, and to whom connects to its socket it
// sends them (`python -m jax_ep report`, jax_ep/_cli/report.py).
//
// The socket is an abstract one of the host's (of the container's network namespace):
// "\0jax_ep/report/PID". Only processes of the same user, and root's, are answered: the pages, with
// kReportSeparator between them, then the end of the stream. Nothing is read.
//
// SIGUSR1 is taken only if it has its default action, which ends the process, and only while
// groups are open; a handler that the program sets, before or after, stays. Where there is neither
// a socket nor a thread to be had, groups work as well.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace jax_ep {

inline constexpr char kReportSeparator = '\f';

// Keeps a group listed. Thread rule: made and destroyed on any thread; in a forked child nothing
// happens.
class ReportEntry {
 public:
  virtual ~ReportEntry() = default;
};

// `page` waits for nothing; it is called on the reporter's thread until the entry is gone.
std::unique_ptr<ReportEntry> ListForReports(std::function<std::string()> page);

}  // namespace jax_ep
