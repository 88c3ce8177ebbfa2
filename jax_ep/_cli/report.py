"""``python -m jax_ep report``: who hangs, asked of the jobs that run on this host.

Each process with native groups answers on a socket of its own (xla_ffi/reporter.h).
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from jax_ep._launch import process

LIMIT_S = 2.0  # per process: who is stopped does not answer
_NAME = re.compile(r"@jax_ep/report/(\d+)$", re.MULTILINE)
_SEPARATOR = "\f"  # kReportSeparator
_WAIT = re.compile(r" (?:waiting|gone on) for ([0-9.]+) s")
_PID = re.compile(r"^  rank .*?, pid (\d+):", re.MULTILINE)
_PEER = struct.Struct("3i")  # pid, uid, gid


@dataclasses.dataclass(frozen=True)
class Page:
    """What one process says of one group."""

    pid: int
    text: str

    @property
    def wait_s(self) -> float:
        """How long the first line says that somebody has waited; 0 if nobody has."""
        found = _WAIT.search(self.text.partition("\n")[0])
        return float(found[1]) if found else 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the group has, as this process sees it, or its processes agree anew."""
        first = self.text.partition("\n")[0]
        return ": FAILED: " in first or "group.agree" in first

    @property
    def pids(self) -> frozenset[int]:
        """The processes that it sees: those of its node. It may see itself alone."""
        return frozenset({self.pid, *map(int, _PID.findall(self.text))})

    @property
    def is_wait(self) -> bool:
        """Whether it says no more than for whom a process waits inside agree (AgreePage)."""
        return "group.agree" in self.text.partition("\n")[0] and not _PID.search(self.text)

    def repeats(self, other: Page) -> bool:
        """Whether it says what `other` says: of one group, and of one node or one wait."""
        if self.group != other.group or self.is_wait != other.is_wait:
            return False
        if self.is_wait:
            return self.text.partition(" kept ")[0] == other.text.partition(" kept ")[0]
        return not self.pids.isdisjoint(other.pids)

    @property
    def group(self) -> str:
        """The group's name, as in "group ep[4]#1: rank 2 ..."."""
        return self.text.partition(": ")[0]


def report(pid: int | None) -> int:
    """Prints a page for each group and node of the jobs that run on this host.

    Args:
        pid: ask that process only; None: all of this user's.

    Returns:
        The exit code: 1 if there is nothing to ask, or nobody answers.
    """
    found = to_ask(pid)
    if not found:
        return 1
    pages: list[Page] = []
    for each in found:
        try:
            pages += [Page(each, text) for text in ask(each).split(_SEPARATOR) if text]
        except OSError as error:
            print(no_answer(each, error))
    for page in newest_of_each(pages):
        print(page.text, end="" if page.text.endswith("\n") else "\n")
    return 0 if pages else 1


def to_ask(pid: int | None) -> list[int]:
    """That process, or all that answer; if there is none, says so and returns nothing."""
    everyone = running()
    found = everyone if pid is None else [pid] if pid in everyone else []
    if not found:
        who = "no process" if pid is None else f"process {pid} is none"
        print(
            f"python -m jax_ep report: {who} of this host that has a native group open; in a "
            "container, run it there; GPU and CPU jobs of other users are not shown",
            file=sys.stderr,
        )
    return found


def no_answer(pid: int, error: OSError) -> str:
    """A sentence about a process that did not answer."""
    return f"process {pid} does not answer ({error}): {process.state(pid)}"


def running() -> list[int]:
    """Processes of this host, or of this container, that answer."""
    try:
        return sorted({int(pid) for pid in _NAME.findall(Path("/proc/net/unix").read_text())})
    except OSError:
        return []


def ask(pid: int, request: bytes = b"") -> str:
    """What the process says of all its groups, within LIMIT_S.

    Args:
        pid: whom to ask.
        request: as in xla_ffi/reporter.h; nothing asks for the pages.

    Raises:
        OSError: it does not answer, or is another user's.
    """
    deadline = time.monotonic() + LIMIT_S
    parts = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(LIMIT_S)
        peer.connect(f"\0jax_ep/report/{pid}")
        packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        uid = _PEER.unpack(packed)[1]
        if uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise PermissionError(f"it is of user {uid}")
        if request:
            peer.sendall(request)
        peer.shutdown(socket.SHUT_WR)
        while part := peer.recv(1 << 16):
            parts.append(part)
            peer.settimeout(max(deadline - time.monotonic(), 1e-3))
    return b"".join(parts).decode(errors="replace")


def newest_of_each(pages: Iterable[Page]) -> list[Page]:
    """Of pages about one group and node: one with a failure, else that of the longest wait.

    Who waits inside agree has a page of its own for that, one for all who wait for the same.
    """
    kept: list[Page] = []
    for page in sorted(pages, key=lambda page: (not page.has_failed, -page.wait_s)):
        if not any(map(page.repeats, kept)):
            kept.append(page)
    return kept
