"""Reads what JAX_EP_TRACE has written: the files of proxy/base/trace.h, one of each process."""

from __future__ import annotations

import dataclasses
import enum
import glob
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jax_ep._stats import CHANNELS

FORMAT_VERSION = "1"
NOBODY = 0xFFFF
# By number: what a command asks of a proxy (proxy/abi/command.h).
OPS = ("write", "write + signal", "signal", "quiet", "barrier")

EVENT = np.dtype(  # TraceEvent of proxy/base/trace_track.h
    [
        ("begin", "<u8"),  # ns, on the monotonic clock of the host
        ("end", "<u8"),
        ("value", "<u8"),
        ("detail", "<u8"),
        ("extra", "<u8"),
        ("peer", "<u2"),
        ("kind", "u1"),
        ("channel", "u1"),
        ("name", "u1"),
        ("unused", "u1", 3),
    ]
)


class Kind(enum.IntEnum):
    """TraceKind of proxy/base/trace_track.h, which says what the other fields mean."""

    CALL = 0
    PHASE = 1
    WAIT = 2
    RING_FULL = 3
    BARRIER = 4
    SIGNAL = 5
    COMMAND = 6
    FLAG = 7
    ACKNOWLEDGED = 8


_HEADER = struct.Struct("<II")  # of a record: its kind, and how many bytes follow
_MOST_OF_A_PROCESS = 4096  # bytes of its record: the names of a host and of its boot, numbers


class _Record(enum.IntEnum):
    PROCESS = 1
    TRACK = 2
    NAME = 3
    SITE = 4
    EVENTS = 5
    DROPPED = 6


_KINDS = frozenset(_Record)


@dataclasses.dataclass
class Track:
    """What a rank did ("rank"), or its proxy ("proxy")."""

    kind: str
    group: str
    team: int
    num_teams: int
    rank: int
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    parts: list[np.ndarray] = dataclasses.field(default_factory=list)
    num_dropped: int = 0

    @property
    def events(self) -> np.ndarray:
        """All of them, in the order in which they ended; [n] of EVENT."""
        return np.concatenate(self.parts) if self.parts else np.zeros(0, EVENT)


@dataclasses.dataclass
class Process:
    """The file of one process."""

    path: Path
    host: str
    boot_id: str  # equal where the clocks are
    pid: int
    index: int
    real_offset_ns: int  # real time minus monotonic time
    tracks: dict[int, Track] = dataclasses.field(default_factory=dict)
    sites: dict[int, str] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0  # of the file
    num_left_out: int = 0  # of these, the last: no whole record


def find(prefix: str) -> list[Path]:
    """The files that processes with JAX_EP_TRACE=prefix have written.

    Raises:
        ValueError: there are none, or the prefix ends in a slash, as JAX_EP_TRACE cannot.
    """
    folder, name = os.path.split(prefix)
    if not name:
        raise ValueError(f"got the folder {prefix!r}, expected what JAX_EP_TRACE was")
    found = sorted(Path(folder or ".").glob(f"{glob.escape(name)}.*.jaxep"))
    if not found:
        raise ValueError(
            f"no trace begins with {prefix}; expected {prefix}.HOST.PID.jaxep: run the job with "
            f"JAX_EP_TRACE={prefix}, and copy here what its other hosts have written"
        )
    return found


def read(path: Path) -> Process | None:
    """One file; None if it has no whole record: its process was killed before it had written one.

    What a killed process has not written to the end is left out: `num_left_out` of the result.

    Raises:
        ValueError: it is no such file, of another version of jax_ep, or damaged.
    """
    data = path.read_bytes()
    if _has_only_begun(data):
        return None
    try:
        process = _parse(path, data)
        for track in process.tracks.values() if process else ():
            _check(track)
    except (KeyError, ValueError, struct.error) as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again, or remove it") from error
    if process is None:
        raise ValueError(f"{path} is not a trace of jax_ep (version {FORMAT_VERSION})")
    return process


def _parse(path: Path, data: bytes) -> Process | None:
    process: Process | None = None
    tracks: dict[int, Track] = {}
    sites: dict[int, str] = {}
    num_read = 0
    for kind, body in _records(data):
        num_read += _HEADER.size + len(body)
        if kind == _Record.PROCESS:
            if process is None and (process := _process(path, body)) is None:
                break
        elif process is None:
            break
        elif kind == _Record.TRACK:
            tracks[_u32(body)] = _track(body[4:])
        elif kind == _Record.NAME:
            tracks[_u32(body)].names[_u32(body[4:])] = body[8:].decode()
        elif kind == _Record.SITE:
            sites[struct.unpack_from("<Q", body)[0]] = body[8:].decode()
        elif kind == _Record.EVENTS:
            tracks[_u32(body)].parts.append(np.frombuffer(body, EVENT, offset=8))
        elif kind == _Record.DROPPED:
            tracks[_u32(body)].num_dropped = struct.unpack_from("<Q", body, 8)[0]
    if process is not None:
        process.tracks, process.sites = tracks, sites
        process.num_bytes, process.num_left_out = len(data), len(data) - num_read
    return process


def _has_only_begun(data: bytes) -> bool:
    """Whether a file ends in its first record, or is zeros, as a host that goes down leaves it."""
    if not any(data):
        return True
    if len(data) < _HEADER.size:
        return _HEADER.pack(_Record.PROCESS, 0).startswith(data[:4])
    kind, length = _HEADER.unpack_from(data)
    if kind != _Record.PROCESS or not len(data) - _HEADER.size < length < _MOST_OF_A_PROCESS:
        return False
    version = f"{FORMAT_VERSION}\n".encode()
    return version.startswith(data[_HEADER.size : _HEADER.size + len(version)])


def _check(track: Track) -> None:
    """What draws the events looks names up by their numbers.

    Raises:
        ValueError: a number has no name.
    """
    events = track.events
    of_calls = np.isin(events["kind"], (Kind.CALL, Kind.PHASE))
    for what, numbers, known in (
        ("kind", events["kind"], list(Kind)),
        ("channel", events["channel"], range(len(CHANNELS))),
        ("command", events["name"][events["kind"] == Kind.COMMAND], range(len(OPS))),
        ("name", events["name"][of_calls], list(track.names)),
    ):
        if len(unknown := numbers[~np.isin(numbers, known)]):
            raise ValueError(f"an event of rank {track.rank} has the {what} {unknown[0]}")


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kinds and bodies, up to the first that is no whole record."""
    at = 0
    while at + _HEADER.size <= len(data):
        kind, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        if kind not in _KINDS or at + length > len(data):
            return
        yield kind, data[at : at + length]
        at += length


def _u32(body: bytes) -> int:
    return int.from_bytes(body[:4], "little")


def _process(path: Path, body: bytes) -> Process | None:
    lines = body.decode(errors="replace").split("\n")
    if len(lines) != 7 or lines[0] != FORMAT_VERSION:
        return None
    host, boot_id = lines[1:3]
    pid, index, monotonic_ns, real_ns = map(int, lines[3:])
    return Process(path, host, boot_id, pid, index, real_ns - monotonic_ns)


def _track(body: bytes) -> Track:
    kind, team, num_teams, rank, group = body.decode().split("\n", 4)
    return Track(kind, group, int(team), int(num_teams), int(rank))
