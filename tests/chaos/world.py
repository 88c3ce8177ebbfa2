"""Plays episodes: forks the ranks, watches them, and says what must not have happened.

    python tests/chaos/world.py [--count 200] [--first 0] [--transports memory,shm,net,tcp]

A fork after `import jax` and before any backend saves each rank its seconds of imports.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

import jax

import jax_ep  # noqa: F401  # before the forks, which save each rank its seconds
from jax_ep import _core

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import episode as plays

HANG_S = 75.0  # of a whole episode: no bound of the library is as long
# Beyond the library's own bounds: what 2 cores need to run up to 4 ranks.
SLACK_S = 12.0
SHARED_MEMORY = pathlib.Path("/dev/shm")


def available_transports():
    names = {name for name, is_available, _ in _core.transports() if is_available}
    return ["memory", "shm", *(["net", "tcp"] if "ofi" in names else [])]


class Rank:
    """One forked rank and what it has reported."""

    def __init__(self, index, pid, reports, word, log):
        self.index = index
        self.pid = pid
        self.reports = reports  # read end
        self.word = word  # write end: a byte lets the rank go
        self.log = log
        self.said = {}
        self.status = None
        self._partial = b""

    def read(self):
        """Takes in what was reported; False at its end."""
        data = os.read(self.reports, 65536)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            key, value = json.loads(line)
            self.said[key] = value
        return bool(data)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_rank(episode, index, port, reports, word, log):
    """In the child: never returns."""
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setpgid(0, 0)
        os.environ["NPROC"] = "4"
        if episode.transport in ("net", "tcp"):
            provider = "net" if episode.transport == "net" else "tcp"
            os.environ["JAX_EP_OFI_PROVIDER"] = provider
            os.environ["JAX_EP_SOCKET_IFNAME"] = "lo"
        jax.config.update("jax_enable_recoverability", True)
        jax.config.update("jax_enable_preemption_service", False)
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, episode.ranks, index, coordinator_bind_address=address)

        def report(key, value):
            os.write(reports, json.dumps([key, value]).encode() + b"\n")

        plays.play(episode, index, report, lambda: os.read(word, 1))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork(episode, index, port, files):
    reports_out, reports_in = os.pipe()
    word_out, word_in = os.pipe()
    log_path = files / f"rank{index}.log"
    log = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    pid = os.fork()
    if pid == 0:
        os.close(reports_out)
        os.close(word_in)
        _run_rank(episode, index, port, reports_in, word_out, log)
    for fd in (reports_in, word_out, log):
        os.close(fd)
    return Rank(index, pid, reports_out, word_in, log_path)


def _watch(episode, ranks):
    """Until every rank but a stopped victim has said what it has to, or HANG_S."""
    deadline = time.monotonic() + HANG_S
    open_ranks = {rank.reports: rank for rank in ranks}

    def waited_for():
        return [
            rank
            for rank in open_ranks.values()
            if "done" not in rank.said
            and not (rank.index == episode.victim and episode.event == "stop")
        ]

    while waited_for() and time.monotonic() < deadline:
        for fd in select.select(list(open_ranks), [], [], 0.5)[0]:
            if not open_ranks[fd].read():
                del open_ranks[fd]
    return [rank.index for rank in waited_for()]


def play(episode):
    """Plays one episode; the list of what went wrong, [] if nothing."""
    shared_before = {path.name for path in SHARED_MEMORY.iterdir()}
    # Not a TemporaryDirectory: the exit hooks that a rank runs would remove it.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jax_ep_chaos"))
    try:
        port = _free_port()
        ranks = [_fork(episode, i, port, folder) for i in range(episode.ranks)]
        hung = _watch(episode, ranks)
        for rank in sorted(ranks, key=lambda rank: -rank.index):  # rank 0 last
            if rank.index in hung or (rank.index == episode.victim and episode.is_fatal):
                os.killpg(rank.pid, signal.SIGKILL)  # its children hold pipes of other ranks
            with contextlib.suppress(BrokenPipeError):
                os.write(rank.word, b".")  # not its end alone, which others may hold open
            os.close(rank.word)
            _, rank.status = os.waitpid(rank.pid, 0)
            os.close(rank.reports)
        faults = [f"rank {index} hung" for index in hung]
        faults += _judge(episode, ranks)
        left = {path.name for path in SHARED_MEMORY.iterdir()} - shared_before
        # Other programs use the folder too: of ours is what has a rank's pid in its name.
        mine = {str(rank.pid) for rank in ranks}
        faults += [
            f"left behind: /dev/shm/{name}" for name in left if mine & set(re.findall(r"\d+", name))
        ]
        if faults:
            for rank in ranks:
                text = rank.log.read_text(errors="replace")
                faults.append(f"--- rank {rank.index} said {rank.said}\n{text[-3000:]}")
    finally:
        shutil.rmtree(folder)
    return faults


def _judge(episode, ranks):
    faults = []
    for rank in ranks:
        if "wrong" in rank.said:
            faults.append(f"rank {rank.index}: {rank.said['wrong']}")
        if rank.index == episode.victim and episode.is_fatal:
            continue
        if rank.status != 0:
            code = os.waitstatus_to_exitcode(rank.status)
            faults.append(f"rank {rank.index} ended with {code}")
            continue
        error = rank.said.get("error")
        closed_s = rank.said.get("close", 0.0)
        if not episode.is_fatal and error is not None:
            faults.append(f"rank {rank.index} failed though nothing was lost: {error}")
        # Who is stopped or gone is noticed within peer_timeout_s; close waits no longer for it.
        if episode.event != "late close" and closed_s > plays.PEER_TIMEOUT_S + SLACK_S:
            faults.append(f"rank {rank.index} closed after {closed_s:.1f} s")
        if episode.is_fatal and error is not None:
            faults += _judge_blame(episode, rank.index, error)
        elif episode.is_fatal and episode.event != "kill in close":
            faults.append(f"rank {rank.index} did not notice that rank {episode.victim} was lost")
        struck_at = ranks[episode.victim].said.get("struck_at")
        if struck_at is not None and error is not None:
            late_s = rank.said["failed_at"] - struck_at
            # A process that dies before its call has told nobody that it lived.
            never_came = "did not reach stage 'hello'" in error
            limit_s = plays.TIMEOUT_S if never_came else plays.PEER_TIMEOUT_S
            if late_s > limit_s + SLACK_S:
                faults.append(f"rank {rank.index} noticed it after {late_s:.1f} s: {error}")
    return faults


# Who speaks, or passes the news on, is no culprit.
_MESSENGER = re.compile(
    r"rank \d+ (?:\(pid \d+\) )?(?:failed first:|reported a failure of)"
    r"|process \d+ failed:|group [^ ]+: rank \d+(?=[:,])"
)


def _judge_blame(episode, me, error):
    blamed = {int(n) for n in re.findall(r"(?:rank|process) (\d+)", _MESSENGER.sub("", error))}
    if blamed - {me} != {episode.victim}:
        return [f"rank {me} blames {sorted(blamed - {me})}, not rank {episode.victim}: {error}"]
    return []


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--transports", default=",".join(available_transports()))
    parser.add_argument("--event", choices=plays.EVENTS, help="this event only")
    args = parser.parse_args()
    outcome = collections.Counter()
    begin = time.monotonic()
    seed = args.first
    while sum(outcome.values()) < args.count:
        episode = plays.Episode.draw(seed, args.transports.split(","))
        seed += 1
        if args.event not in (None, episode.event):
            continue
        faults = play(episode)
        outcome["bad" if faults else "good"] += 1
        if faults:
            print(f"{episode}\n  " + "\n  ".join(faults), flush=True)
        elif sum(outcome.values()) % 10 == 0:
            print(f"{sum(outcome.values())} played, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{outcome['good']} passed, {outcome['bad']} failed", flush=True)
    return 1 if outcome["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
