"""Starts the processes of one job on this host and outlives them all.

This is the parent side of ``python -m jax_ep launch``: one event loop in one thread owns the
children's pipes, their exits and the signals.  What runs inside a child is in
``child.py``; how output lines are put together is in ``output.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jax_ep._env import SECRET_ENV
from jax_ep._launch.output import LinePrefixer

DEFAULT_GRACE_S = 60.0
TERM_TO_KILL_S = 5.0  # from SIGTERM to SIGKILL
ORPHAN_WAIT_S = (
    0.5  # what a child left running (multiprocessing's resource tracker) may take to end
)
DRAIN_LIMIT_S = 2.0  # for output still in the pipes once every process is gone
PORT_ATTEMPTS = 3
READ_BYTES = 1 << 16
MIN_POOL_THREADS = (
    32  # below it 8 virtual devices were seen to deadlock XLA:CPU (its own all_to_all)
)
POOL_THREADS_PER_DEVICE = 4
SPEC_ENV = "JAX_EP_LAUNCH"
BINDINGS = ("none", "core")
COMMON_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What to start: ``command`` is a script and its arguments.

    With gpus_per_process G > 0, process i gets GPUs i*G to i*G + G - 1: it uses those of all that
    it sees, or with hide_other_gpus it sees no others. With bind_to "core" each process runs on its
    share of the cores only, or on one of them if there are fewer cores than processes.
    """

    num_processes: int
    command: Sequence[str]
    devices_per_process: int = 1
    gpus_per_process: int = 0
    hide_other_gpus: bool = False
    bind_to: str = "none"
    grace_s: float = DEFAULT_GRACE_S

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ValueError(f"-n: got {self.num_processes}, expected at least one process")
        if self.devices_per_process < 1:
            raise ValueError(
                f"--devices-per-process: got {self.devices_per_process}, expected at least 1"
            )
        if self.gpus_per_process < 0:
            raise ValueError(f"--gpus-per-process: got {self.gpus_per_process}, expected >= 0")
        if self.hide_other_gpus and not self.gpus_per_process:
            raise ValueError("--hide-other-gpus: expected --gpus-per-process too")
        if self.bind_to not in BINDINGS:
            raise ValueError(f"--bind-to: got {self.bind_to!r}, expected one of {BINDINGS}")
        if self.grace_s < 0:
            raise ValueError(f"--grace: got {self.grace_s}, expected seconds >= 0")
        if not self.command:
            raise ValueError("expected a script to run after the options, got nothing")
        if not Path(self.command[0]).is_file():
            raise ValueError(f"script: {self.command[0]!r} is not a file")


def launch(options: LaunchOptions) -> int:
    """Runs the job and returns its exit code: 0, or the first failure's (128 + signal)."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        exit_code = _Job(options).run()
        if exit_code is not None:
            return exit_code
        _say(f"the coordinator could not take its port (attempt {attempt} of {PORT_ATTEMPTS})")
    _say("no port could be bound on 127.0.0.1; is another job taking them all?")
    return 1


def child_environment(base: Mapping[str, str], devices_per_process: int) -> dict[str, str]:
    """The environment of a child: what the user set stays, except the device count asked for."""
    env = dict(base)
    env.setdefault("PYTHONUNBUFFERED", "1")
    if devices_per_process > 1:
        kept = [
            flag
            for flag in env.get("XLA_FLAGS", "").split()
            if not flag.startswith("--xla_force_host_platform_device_count")
        ]
        kept.append(f"--xla_force_host_platform_device_count={devices_per_process}")
        env["XLA_FLAGS"] = " ".join(kept)
        env.setdefault(
            "NPROC", str(max(MIN_POOL_THREADS, POOL_THREADS_PER_DEVICE * devices_per_process))
        )
    return env


def _gpus_of(options: LaunchOptions, index: int) -> list[int] | None:
    """The GPUs of process `index`, or None: JAX's own choice."""
    count = options.gpus_per_process
    return list(range(index * count, (index + 1) * count)) if count else None


def cores_of(index: int, num_processes: int, cores: Sequence[int]) -> list[int]:
    """The share of process `index`: equal runs of `cores`, or one of them in equal turns."""
    begin = index * len(cores) // num_processes
    end = (index + 1) * len(cores) // num_processes
    return list(cores[begin : max(end, begin + 1)])


@dataclasses.dataclass(eq=False)
class _Child:
    index: int
    process: subprocess.Popen[bytes]
    control: socket.socket  # the child's reports arrive here; "leave" goes to process 0
    lifeline: int  # write end: the kernel kills the child's group when this process is gone
    has_started: bool = False
    has_exited: bool = False
    reports: bytes = b""

    def send_signal(self, number: int) -> None:
        """Signals the whole group of a child; its id stays ours until the zombie is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Job:
    """One attempt at the job; single-threaded, used once."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        # Any user of this host reaches the coordinator's port.
        self._secret = secrets.token_hex(32)
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._first_failure: int | None = None
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._told_process_0 = False
        self._port_taken = False
        self._signals: list[int] = []

    def run(self) -> int | None:
        """Returns the exit code, or None if the coordinator's port was lost to someone else."""
        with self._signal_wakeups() as wakeup, _reserved_port() as port:
            self._selector.register(wakeup, selectors.EVENT_READ, None)
            try:
                for index in range(self._options.num_processes):
                    self._start(index, port)
                self._loop(wakeup)
            finally:
                self._clean_up()
        if self._port_taken:
            return None
        return self._first_failure or 0

    @contextlib.contextmanager
    def _signal_wakeups(self) -> Iterator[socket.socket]:
        read_end, write_end = socket.socketpair()
        read_end.setblocking(False)
        write_end.setblocking(False)
        old_wakeup = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        old = {s: signal.signal(s, self._on_signal) for s in (*COMMON_SIGNALS, signal.SIGCHLD)}
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

    def _start(self, index: int, port: int) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        spec: dict[str, object] = {
            "index": index,
            "num_processes": self._options.num_processes,
            "port": port,
            "control_fd": theirs.fileno(),
            "lifeline_fd": lifeline_read,
        }
        env = child_environment(os.environ, self._options.devices_per_process)
        gpus = _gpus_of(self._options, index)
        if gpus is not None and self._options.hide_other_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        else:
            spec["local_device_ids"] = gpus
        if self._options.bind_to == "core":
            cores = sorted(os.sched_getaffinity(0))
            spec["cores"] = cores_of(index, self._options.num_processes, cores)
            # XLA would size its pool by the bound cores, and its collectives need several threads.
            env.setdefault("NPROC", str(len(cores)))
        env.setdefault(SECRET_ENV, self._secret)
        env[SPEC_ENV] = json.dumps(spec)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "jax_ep._launch.child", *self._options.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                pass_fds=(theirs.fileno(), lifeline_read),
                process_group=0,
            )
        except BaseException:
            os.close(lifeline_write)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
        ours.setblocking(False)
        child = _Child(index, process, ours, lifeline_write)
        self._children.append(child)
        assert process.stdout is not None and process.stderr is not None
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            prefixer = LinePrefixer(f"[{index}] ", sink)
            self._selector.register(source, selectors.EVENT_READ, prefixer)
        self._selector.register(ours, selectors.EVENT_READ, child)

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

    def _pump(self, key: selectors.SelectorKey) -> bool:
        """Moves one read's worth of output; returns False at the end of the stream."""
        chunk = os.read(key.fd, READ_BYTES)
        if chunk:
            key.data.feed(chunk)
            return True
        key.data.close()
        self._selector.unregister(key.fileobj)
        return False

    def _read_reports(self, child: _Child) -> None:
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
                # Process 0 waits here for the others: it hosts JAX's coordinator.
                self._note_failure(child, int(argument), f"failed with exit code {int(argument)}")

    def _forward_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            for child in self._live():
                child.send_signal(number)
            now = time.monotonic()
            is_second = self._term_at is not None
            self._term_at = now if is_second else now + self._options.grace_s
            name = signal.Signals(number).name
            then = "ending it now" if is_second else f"{self._options.grace_s:g} s to finish"
            _say(f"{name} was passed on to {len(self._live())} processes; {then}")

    def _note_exits(self) -> None:
        for child in self._live():
            # WNOWAIT keeps the zombie, so that its process group id cannot be reused meanwhile.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            result = os.waitid(os.P_PID, child.process.pid, flags)
            if result is None:
                continue
            child.has_exited = True
            if result.si_code == os.CLD_EXITED:
                if result.si_status != 0:
                    what = f"failed with exit code {result.si_status}"
                    self._note_failure(child, result.si_status, what)
                continue
            number = result.si_status
            if child.index == 0 and not child.has_started and number == signal.SIGSEGV:
                # JAX dies so when its coordinator cannot bind; no user code has run yet.
                self._port_taken = True
                self._kill_at = self._term_at = time.monotonic()
                return
            name = signal.Signals(number).name
            self._note_failure(child, 128 + number, f"was ended by {name}")

    def _note_failure(self, child: _Child, exit_code: int, what: str) -> None:
        if self._first_failure is not None or self._port_taken:
            return
        self._first_failure = exit_code
        others = [other for other in self._live() if other is not child]
        if others and self._term_at is None:
            self._term_at = time.monotonic() + self._options.grace_s
            what += f"; the others have {self._options.grace_s:g} s (--grace) to finish"
        _say(f"process {child.index} {what}")

    def _let_process_0_leave(self) -> None:
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
                child.send_signal(signal.SIGTERM)
                child.send_signal(signal.SIGCONT)  # a stopped process cannot act on SIGTERM

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = self._kill_at if self._kill_at is not None else self._term_at
        return None if deadline is None else max(0.0, deadline - time.monotonic()) + 0.001

    def _live(self) -> list[_Child]:
        return [child for child in self._children if not child.has_exited]

    def _clean_up(self) -> None:
        for child in self._live():
            child.send_signal(signal.SIGKILL)
        groups = {child.process.pid for child in self._children}
        limit = time.monotonic() + ORPHAN_WAIT_S
        while _has_members(groups) and time.monotonic() < limit:
            time.sleep(0.02)
        for child in self._children:
            child.send_signal(signal.SIGKILL)
        self._drain()
        for child in self._children:
            child.process.wait()
            child.control.close()
            os.close(child.lifeline)
            for stream in (child.process.stdout, child.process.stderr):
                if stream is not None:
                    stream.close()
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


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port of 127.0.0.1, kept bound (not listening) until the job is over.

    gRPC binds with SO_REUSEPORT, so the coordinator can take it while nobody else is given it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _has_members(groups: set[int]) -> bool:
    """Whether any process that is not a zombie belongs to one of the process groups."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) in groups and state not in "ZX":
                return True
    return False


def _say(message: str) -> None:
    print(f"[launch] {message}", file=sys.stderr, flush=True)
