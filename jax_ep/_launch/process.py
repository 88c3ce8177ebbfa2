"""One launched process as the launcher sees it: started, reached by signals, gone.

What runs inside it is in ``child.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jax_ep._env import SECRET_ENV
from jax_ep._launch.options import LaunchOptions, child_environment, cores_of, gpus_of

SPEC_ENV = "JAX_EP_LAUNCH"
COORDINATOR = -1
_BIND_ENV = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own name


@dataclasses.dataclass(eq=False)
class Child:
    """A process that the launcher has started, and the two ends that it holds of it."""

    index: int  # its number in the job, or COORDINATOR
    process: subprocess.Popen[bytes]
    control: socket.socket  # the child's reports arrive here; "leave" goes to process 0
    lifeline: int  # write end: the kernel kills the child's group when this process is gone
    num_starts: int = 1  # of processes of this number, up to this one
    has_started: bool = False
    has_ended: bool = False  # its program, whose exit hooks may still run
    has_exited: bool = False
    reports: bytes = b""

    def close(self) -> None:
        """Reaps it, and frees what the launcher holds of it; it has exited, or is about to."""
        self.process.wait()
        self.control.close()
        os.close(self.lifeline)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def ask_for_report(self) -> bool:
        """SIGUSR1 to the process alone, whose children may not expect it; whether it can answer.

        One that does not handle it (yet: a group does) would be ended by it.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if expects(self.process.pid, signal.SIGUSR1):
                os.kill(self.process.pid, signal.SIGUSR1)
                return True
        return False

    def send_signal(self, number: int) -> None:
        """Signals the whole group of a child; its id stays ours until the zombie is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def ask_to_end(self, number: int) -> None:
        """Signals the whole group, and lets it go on: who is stopped cannot act on the signal."""
        self.send_signal(number)
        self.send_signal(signal.SIGCONT)


def start(
    options: LaunchOptions,
    local_index: int,
    port: int,
    secret: str,
    num_starts: int = 1,
    *,
    process_0_is_gone: bool = False,
) -> Child:
    """Starts a process; without --coordinator-address, the service is at `port` of 127.0.0.1.

    Args:
        options: of the job.
        local_index: its number among this launcher's processes.
        port: see above.
        secret: of the job, unless the environment has one.
        num_starts: of processes of this number, up to this one.
        process_0_is_gone: and comes no more, as far as this launcher knows.
    """
    index = options.first_process + local_index
    spec: dict[str, object] = {
        "index": index,
        "num_processes": options.job_processes,
        "address": options.coordinator_address or f"127.0.0.1:{port}",
        "has_coordinator": options.has_coordinator,
        "waits_for_others": options.coordinator and options.has_others,
        "is_again": num_starts > 1,
        "process_0_is_gone": process_0_is_gone,
        "is_module": options.is_module,
    }
    env = child_environment(os.environ, options.devices_per_process)
    gpus = gpus_of(options, local_index)
    if gpus is not None and options.hide_other_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    else:
        spec["local_device_ids"] = gpus
    if options.bind_to == "core":
        cores = sorted(os.sched_getaffinity(0))
        spec["cores"] = cores_of(local_index, options.num_processes, cores)
        # XLA would size its pool by the bound cores, and its collectives need several threads.
        env.setdefault("NPROC", str(len(cores)))
    if not options.has_others:  # those of other launchers would not know it
        env.setdefault(SECRET_ENV, secret)
    child = _spawn(["jax_ep._launch.child", *options.command], index, spec, env)
    child.num_starts = num_starts
    return child


def start_coordinator(options: LaunchOptions, port: int) -> Child:
    """Starts the process that serves the job's key-value store, and nothing else."""
    address, named_by = options.coordinator_address, "--coordinator-address"
    if address is not None and _BIND_ENV in os.environ:
        address, named_by = os.environ[_BIND_ENV], _BIND_ENV
    spec: dict[str, object] = {
        "bind_address": address or f"127.0.0.1:{port}",
        "named_by": named_by,
        "is_reserved": address is None,
        "num_processes": options.job_processes,
    }
    return _spawn(["jax_ep._launch.coordinator"], COORDINATOR, spec, dict(os.environ))


class CannotStart(Exception):
    """The system gives no more of what a process takes; says which and what to do."""

    def __init__(self, index: int, error: OSError):
        """Args: which process, and what the system said."""
        name = "the coordinator" if index == COORDINATOR else f"process {index}"
        super().__init__(
            f"cannot start {name}: {error.strerror}; start fewer (-n), or raise the limits of open "
            "files and processes (ulimit -n, ulimit -u)"
        )


def _spawn(module: list[str], index: int, spec: dict[str, object], env: dict[str, str]) -> Child:
    """Starts ``python -m MODULE ARGS...``, which reads `spec` from its environment.

    Raises:
        CannotStart: nothing of it is left.
    """
    try:
        return _open(module, index, spec, env)
    except OSError as error:
        raise CannotStart(index, error) from error


def _open(module: list[str], index: int, spec: dict[str, object], env: dict[str, str]) -> Child:
    ours, theirs = socket.socketpair()
    try:
        lifeline_read, lifeline_write = os.pipe()
    except OSError:
        ours.close()
        theirs.close()
        raise
    ends = {"control_fd": theirs.fileno(), "lifeline_fd": lifeline_read}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env | {SPEC_ENV: json.dumps(spec | ends)},
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
    return Child(index, process, ours, lifeline_write)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of 127.0.0.1, kept bound (not listening) until the job is over.

    gRPC binds with SO_REUSEPORT, so the coordinator can take it while nobody else is given it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def expects(pid: int, number: int) -> bool:
    """Whether the process handles, blocks or ignores that signal."""
    masks = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in ("SigBlk", "SigIgn", "SigCgt"):
                masks |= int(value, 16)
    return bool(masks >> (number - 1) & 1)


def state(pid: int) -> str:
    """What the kernel says of the process: "state T (stopped)"."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return "it is gone"
    found = re.search(r"^State:\s*(.*)$", status, re.MULTILINE)
    return f"state {found[1]}" if found else "state unknown"


def has_members(groups: set[int]) -> bool:
    """Whether any process that is not a zombie belongs to one of the process groups."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) in groups and state not in "ZX":
                return True
    return False
