// SessionTable: id -> open session, or why the one that was closed under that id is not. The
// tables (one per kind of session) and the site numbering are the only process-wide mutable state.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "proxy/base/status.h"

namespace jax_ep {

inline constexpr int64_t kNoRun = -1;

// S has `options()` with session_id and name, and `newest_run()`: the execution whose call it has
// had last, or kNoRun. Thread rule: any thread.
template <typename S>
class SessionTable {
 public:
  static SessionTable& Instance() {
    static SessionTable* const table = new SessionTable();  // lives until the process ends
    return *table;
  }

  Status Add(std::shared_ptr<S> session) {
    std::lock_guard lock(mutex_);
    const int64_t id = session->options().session_id;
    if (const auto [it, is_new] = sessions_.emplace(id, session); !is_new) {
      return FailedPrecondition("group " + session->options().name + ": got the id of group " +
                                it->second->options().name +
                                ", which is open in this process; create equal groups in the same "
                                "order on every process, from one thread at a time");
    }
    closed_.erase(id);
    return Status::Ok();
  }

  // From here on a late execution gets `why`, in place of an older one, too; `cut`, if it is the
  // one that the session has had last. Nothing, if `session` was not added, whoever else has its
  // id.
  void Remove(const S& session, Status why, Status cut) {
    std::lock_guard lock(mutex_);
    const int64_t id = session.options().session_id;
    if (const auto it = sessions_.find(id); it != sessions_.end()) {
      if (it->second.get() != &session) return;
      sessions_.erase(it);
    } else if (!closed_.contains(id)) {
      return;
    }
    closed_.insert_or_assign(
        id, Closed{.why = std::move(why), .run = session.newest_run(), .cut = std::move(cut)});
  }

  // For execution `run_id`, XLA's number of it.
  Result<std::shared_ptr<S>> Find(int64_t session_id, int64_t run_id = kNoRun) const {
    std::lock_guard lock(mutex_);
    const auto it = sessions_.find(session_id);
    if (it != sessions_.end()) return it->second;
    const auto closed = closed_.find(session_id);
    if (closed != closed_.end()) {
      const bool is_cut = run_id != kNoRun && run_id == closed->second.run;
      return is_cut ? closed->second.cut : closed->second.why;
    }
    return FailedPrecondition(
        "got a program of group id " + std::to_string(session_id) +
        ", expected one of those that this process has: " + Names() +
        "; call jax_ep.create_group with the mesh shape, axis and config that the program was made "
        "with, before it runs, in the same order on every process");
  }

 private:
  struct Closed {
    Status why;
    int64_t run = kNoRun;  // the newest that came while it was open
    Status cut;
  };

  std::string Names() const {
    std::string names;
    for (const auto& [id, session] : sessions_) {
      names += (names.empty() ? "" : ", ") + session->options().name;
    }
    return names.empty() ? "none" : names;
  }

  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<S>> sessions_;
  std::map<int64_t, Closed> closed_;
};

}  // namespace jax_ep
