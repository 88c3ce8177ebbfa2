"""Starts the processes of one job on this host and outlives them all.

This is the parent side of ``python -m jax_ep launch``: one event loop in one thread owns the
children's pipes, their exits and the signals.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator

from jax_ep._env import SECRET_ENV
from jax_ep._launch import noise, process
from jax_ep._launch.address import answers
from jax_ep._launch.options import LaunchOptions
from jax_ep._launch.output import LinePrefixer
from jax_ep._launch.process import Child

TERM_TO_KILL_S = 5.0  # from SIGTERM to SIGKILL
# What a child left running (multiprocessing's resource tracker) may take to end.
ORPHAN_WAIT_S = 0.5
DRAIN_LIMIT_S = 2.0  # for output still in the pipes once every process is gone
COORDINATOR_LIMIT_S = 2.0  # for one on another host to answer, when a process has failed
# From the last good end to the first word on whom the launcher still waits for; each pause until
# the next word is twice as long, up to the second number.
WAITS_FOR_S = 10.0
WAITS_FOR_MOST_S = 3600.0
MOST_NAMES = 8  # of processes in one line
PORT_ATTEMPTS = 3
READ_BYTES = 1 << 16
COMMON_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(options: LaunchOptions) -> int:
    """Runs the job and returns its exit code: 0, or the first failure's (128 + signal)."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        try:
            exit_code = _Job(options).run()
        except process.CannotStart as error:  # the others have been ended
            _say(str(error))
            return 1
        if exit_code is not None:
            return exit_code
        _say(f"the coordinator could not take its port (attempt {attempt} of {PORT_ATTEMPTS})")
    _say("no port could be bound on 127.0.0.1; is another job taking them all?")
    return 1


class _Job:
    """One attempt at the job; single-threaded, used once."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        # Any user of this host reaches the coordinator's port.
        self._secret = secrets.token_hex(32)
        self._children: list[Child] = []  # the newest of each number
        self._replaced: list[Child] = []  # ended, and started again
        self._coordinator: Child | None = None
        self._port = 0
        self._selector = selectors.DefaultSelector()
        self._first_failure: int | None = None
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._told_process_0 = False
        self._port_taken = False
        self._left_behind: list[Child] = []  # that failed, and others went on
        self._first_loss = 0  # exit code of the first of them
        self._is_over = False  # a process that decides has ended well
        self._last_end_at = 0.0  # of a process that ended well
        self._tell_at: float | None = None  # when to say who has not; None: nobody has ended
        self._tell_pause_s = WAITS_FOR_S
        self._signals: list[int] = []
        is_debugged = os.environ.get("JAX_EP_LOG") == "debug"
        self._leave_out = (lambda line: False) if is_debugged else noise.is_harmless

    def run(self) -> int | None:
        """Returns the exit code, or None if the coordinator's port was lost to someone else."""
        with self._signal_wakeups() as wakeup, process.reserved_port() as self._port:
            self._selector.register(wakeup, selectors.EVENT_READ, None)
            try:
                if self._options.has_others and not os.environ.get(SECRET_ENV):
                    _say(
                        f"{SECRET_ENV} is not set: whoever reaches the coordinator can read and "
                        "change what the job keeps there; set the same for all launchers"
                    )
                if self._options.coordinator:
                    self._coordinator = process.start_coordinator(self._options, self._port)
                    self._watch(self._coordinator, "coordinator")
                for index in range(self._options.num_processes):
                    self._children.append(self._start(index))
                self._loop(wakeup)
            finally:
                self._clean_up()
        if self._port_taken:
            return None
        if self._first_failure is None and not self._is_over and self._options.has_coordinator:
            return self._first_loss
        return self._first_failure or 0

    @contextlib.contextmanager
    def _signal_wakeups(self) -> Iterator[socket.socket]:
        read_end, write_end = socket.socketpair()
        read_end.setblocking(False)
        write_end.setblocking(False)
        old_wakeup = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        heard = (*COMMON_SIGNALS, signal.SIGUSR1, signal.SIGCHLD)
        old = {s: signal.signal(s, self._on_signal) for s in heard}
        try:
            yield read_end
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_wakeup)
            read_end.close()
            write_end.close()

    def _on_signal(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _start(self, local_index: int, num_starts: int = 1) -> Child:
        child = process.start(
            self._options,
            local_index,
            self._port,
            self._secret,
            num_starts,
            process_0_is_gone=any(
                other.index == 0 and other.has_exited for other in self._children
            ),
        )
        self._watch(child, str(child.index))
        return child

    def _watch(self, child: Child, prefix: str) -> None:
        outputs = ((child.process.stdout, sys.stdout), (child.process.stderr, sys.stderr))
        for source, sink in outputs:
            assert source is not None
            prefixer = LinePrefixer(f"[{prefix}] ", sink, self._leave_out)
            self._selector.register(source, selectors.EVENT_READ, prefixer)
        self._selector.register(child.control, selectors.EVENT_READ, child)

    def _loop(self, wakeup: socket.socket) -> None:
        while not all(child.has_exited for child in self._children):
            for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        wakeup.recv(READ_BYTES)
                elif isinstance(key.data, LinePrefixer):
                    self._pump(key)
                else:
                    self._read_reports(key.data)
            self._forward_signals()
            self._note_exits()
            self._let_process_0_leave()
            self._enforce_deadlines()
            self._tell_who_is_left()

    def _pump(self, key: selectors.SelectorKey) -> bool:
        """Moves one read's worth of output; returns False at the end of the stream."""
        chunk = os.read(key.fd, READ_BYTES)
        if chunk:
            key.data.feed(chunk)
            return True
        key.data.close()
        self._selector.unregister(key.fileobj)
        return False

    def _read_reports(self, child: Child) -> None:
        try:
            received = child.control.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = b""
        if not received:
            self._selector.unregister(child.control)
            return
        *reports, child.reports = (child.reports + received).split(b"\n")
        for report in reports:
            word, _, argument = report.partition(b" ")
            if word == b"started":
                child.has_started = True
            elif word == b"exit" and int(argument) != 0:
                child.has_ended = True
                # Process 0 waits here for the others: it hosts JAX's coordinator.
                self._note_failure(child, int(argument), f"failed with exit code {int(argument)}")
            elif word == b"exit":
                self._note_good_end(child)

    def _decides(self, child: Child) -> bool:
        """Whether the job cannot do without it: process 0 where it hosts JAX's coordinator."""
        return child.index == 0 and not self._options.has_coordinator

    def _note_good_end(self, child: Child) -> None:
        if not child.has_ended:  # it reports, and then exits
            child.has_ended = True
            self._last_end_at = time.monotonic()
            self._tell_pause_s = WAITS_FOR_S
            self._tell_at = self._last_end_at + self._tell_pause_s
        if self._options.keep_going and (self._options.has_coordinator or self._decides(child)):
            # Somebody whom it has left out may hang; then the others, and it, are ended.
            self._is_over = True
            self._term_at = self._term_at or time.monotonic() + self._options.grace_s

    def _forward_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGUSR1:
                silent = [child.index for child in self._live() if not child.ask_for_report()]
                if silent:
                    _say(f"processes {silent} do not handle SIGUSR1: they have no open group")
                continue
            for child in self._live():
                child.ask_to_end(number)
            now = time.monotonic()
            is_second = self._term_at is not None
            self._term_at = now if is_second else now + self._options.grace_s
            name = signal.Signals(number).name
            then = "ending it now" if is_second else f"{self._options.grace_s:g} s to finish"
            _say(f"{name} was passed on to {len(self._live())} processes; {then}")

    def _note_exits(self) -> None:
        ended = [(child, end) for child in self._live() if (end := _end_of(child)) is not None]
        self._note_end_of_coordinator()  # looked up last, noted first: it takes the others along
        for child, _ in ended:  # whoever is started again needs one that is still there
            child.has_exited = True
        for child, result in ended:
            if result.si_code == os.CLD_EXITED:
                if result.si_status != 0:
                    what = f"failed with exit code {result.si_status}"
                    self._note_failure(child, result.si_status, what)
                    self._start_again(child)
                else:  # it may have left without a report
                    self._note_good_end(child)
                continue
            number = result.si_status
            if self._decides(child) and not child.has_started and number == signal.SIGSEGV:
                self._note_taken_port()
                return
            name = signal.Signals(number).name
            self._note_failure(child, 128 + number, f"was ended by {name}")
            self._start_again(child)

    def _note_end_of_coordinator(self) -> None:
        child = self._coordinator
        result = None if child is None or child.has_exited else _end_of(child)
        if child is None or result is None:
            return
        child.has_exited = True
        killed = result.si_code != os.CLD_EXITED
        is_crash = killed and result.si_status == signal.SIGSEGV and not child.has_started
        if is_crash and self._options.coordinator_address is None:
            self._note_taken_port()
            return
        if killed:
            what = f"(pid {child.process.pid}) was ended by {signal.Signals(result.si_status).name}"
            exit_code = 128 + result.si_status
        else:
            what = f"(pid {child.process.pid}) ended with exit code {result.si_status}"
            exit_code = result.si_status or 1
        if not self._live():
            return
        self._is_over = False
        self._first_failure = self._first_failure or exit_code
        if not child.has_started:
            self._term_at = self._term_at or time.monotonic()
            _say(f"the coordinator {what} before any process could join it; the job ends")
            return
        grace_s = self._options.grace_s
        self._term_at = self._term_at or time.monotonic() + grace_s
        _say(
            f"the coordinator {what}: no process can go on without its coordination service; JAX "
            f"ends them, and the launcher those that are left after {grace_s:g} s (--grace)"
        )

    def _is_coordinator_lost(self) -> bool:
        """Whether this job has one that another launcher has started, and it does not answer."""
        address = self._options.coordinator_address
        return (
            address is not None
            and self._coordinator is None
            and not answers(address, COORDINATOR_LIMIT_S)
        )

    def _note_taken_port(self) -> None:
        """JAX dies so when its coordinator cannot bind; no user code has run yet."""
        self._port_taken = True
        self._kill_at = self._term_at = time.monotonic()

    def _note_failure(self, child: Child, exit_code: int, what: str) -> None:
        self._note_end_of_coordinator()  # of which this may be a consequence
        if self._first_failure is not None or self._port_taken:
            return
        if self._is_over and self._kill_at is not None:  # the launcher ends those that are left
            return
        # Before all have started, JAX would wait for it, and nothing goes on.
        has_joined = child.has_started or child.num_starts > 1
        if self._is_coordinator_lost():
            how = "is gone" if child.has_started else "does not answer: see that its launcher runs"
            what += f"; the coordinator at {self._options.coordinator_address} {how}"
        elif self._options.keep_going and not self._decides(child) and has_joined:
            if child not in self._left_behind:  # it may report, and then exit
                _say(f"process {child.index} {what}; the others go on (--keep-going)")
                self._left_behind.append(child)
                self._first_loss = self._first_loss or exit_code
            return
        self._first_failure = exit_code
        others = [other for other in self._live() if other is not child]
        if others and self._term_at is None:
            self._term_at = time.monotonic() + self._options.grace_s
            what += f"; the others have {self._options.grace_s:g} s (--grace) to finish"
        _say(f"process {child.index} {what}")

    def _start_again(self, child: Child) -> None:
        """Puts a new process in the place of one that has failed, if that is wanted."""
        is_wanted = child in self._left_behind and child.num_starts <= self._options.restarts
        if not is_wanted or self._term_at is not None or self._first_failure is not None:
            return
        if not self._live() and not self._options.has_others:
            _say("no process is left that could take another one back; the job ends")
            return
        child.send_signal(signal.SIGKILL)  # what it has left running
        self._replaced.append(child)
        place = self._children.index(child)
        self._children[place] = self._start(place, child.num_starts + 1)
        count = f"{child.num_starts} of {self._options.restarts}"
        _say(f"process {child.index} is started again (--restarts, {count})")

    def _let_process_0_leave(self) -> None:
        if self._options.has_coordinator:
            return
        first, *others = self._children
        if not self._told_process_0 and all(other.has_exited for other in others):
            self._told_process_0 = True
            with contextlib.suppress(OSError):
                first.control.send(b"leave\n")

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                for child in self._live():
                    child.send_signal(signal.SIGKILL)
        elif self._term_at is not None and now >= self._term_at:
            self._kill_at = now + TERM_TO_KILL_S
            live = self._live()
            if live:
                indices = ", ".join(str(child.index) for child in live)
                _say(f"ending process {indices}: SIGTERM, SIGKILL after {TERM_TO_KILL_S:g} s")
            for child in live:
                child.ask_to_end(signal.SIGTERM)

    def _tell_who_is_left(self) -> None:
        """Says now and then who keeps the launcher; it ends nobody, whom a user may debug."""
        if self._tell_at is None or self._term_at is not None:  # those that are left end soon
            return
        now = time.monotonic()
        if now < self._tell_at or not self._live():
            return
        self._tell_pause_s = min(2 * self._tell_pause_s, WAITS_FOR_MOST_S)
        self._tell_at = now + self._tell_pause_s
        seconds = now - self._last_end_at
        left = [child for child in self._live() if not child.has_ended]
        what = f"the others ended {seconds:.0f} s ago"
        if not left:
            if self._options.has_others:  # the processes here may be waiting for those
                return
            # Process 0 leaves last.
            left = [c for c in self._live() if self._told_process_0 or not self._decides(c)]
            what = f"the program ended {seconds:.0f} s ago, but not the exit of the process"
        _say(
            f"waits for {_described(left)}: {what}; SIGCONT lets a stopped process go on, SIGTERM "
            "to the launcher ends the job"
        )

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = self._kill_at if self._kill_at is not None else self._term_at
        if deadline is None:
            deadline = self._tell_at
        return None if deadline is None else max(0.0, deadline - time.monotonic()) + 0.001

    def _live(self) -> list[Child]:
        return [child for child in self._children if not child.has_exited]

    def _clean_up(self) -> None:
        for child in self._live():
            child.send_signal(signal.SIGKILL)
        children = self._replaced + self._children
        if self._coordinator is not None:
            self._coordinator.send_signal(signal.SIGKILL)
            children.append(self._coordinator)
        groups = {child.process.pid for child in children}
        limit = time.monotonic() + ORPHAN_WAIT_S
        while process.has_members(groups) and time.monotonic() < limit:
            time.sleep(0.02)
        for child in children:
            child.send_signal(signal.SIGKILL)
        self._drain()
        for child in children:
            child.close()
        self._selector.close()

    def _drain(self) -> None:
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.data, LinePrefixer):
                self._selector.unregister(key.fileobj)
        for key, _ in self._selector.select(0):
            self._pump(key)  # all that a pipe holds, however late it is
        limit = time.monotonic() + DRAIN_LIMIT_S
        while self._selector.get_map() and time.monotonic() < limit:
            for key, _ in self._selector.select(max(0.0, limit - time.monotonic())):
                self._pump(key)
        for key in list(self._selector.get_map().values()):
            key.data.close()


def _end_of(child: Child) -> os.waitid_result | None:
    """How it has ended, or None; the zombie stays, so that its process group id stays its own."""
    return os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _described(children: list[Child]) -> str:
    """The first few of them, each with its pid and state."""
    pids = [child.process.pid for child in children[:MOST_NAMES]]
    named = [
        f"process {child.index} (pid {pid}, {process.state(pid)})"
        for child, pid in zip(children, pids, strict=False)
    ]
    if len(children) > MOST_NAMES:
        named.append(f"{len(children) - MOST_NAMES} more")
    return ", ".join(named)


def _say(message: str) -> None:
    print(f"[launch] {message}", file=sys.stderr, flush=True)
