"""``python -m jax_ep trace``: one picture, for Perfetto, of what all processes have written.

Perfetto's format: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep._cli import trace_clocks
from jax_ep._cli.extras import require
from jax_ep._cli.trace_files import NOBODY, OPS, Kind, Process, Track, find, read
from jax_ep._stats import CHANNELS

# A signal on its way: group, team, from rank, to rank, channel, its number.
Signal = tuple[str, int, int, int, int, int]
Slice = tuple[int, int, str, dict[str, Any], list[Signal]]  # begin, end (equal: a moment), ...


def trace(prefix: str, out: str | None) -> int:
    """Merges PREFIX.HOST.PID.jaxep of all processes into one file for ui.perfetto.dev.

    Returns:
        The exit code.
    """
    path = Path(out or f"{prefix}.pftrace")
    builder = require("perfetto.trace_builder.proto_builder")
    try:
        processes = _one_run(_all(prefix))
        with path.open("wb") as file:
            picture = _Picture(builder.StreamingTraceProtoBuilder(file))
            num_events = picture.draw(processes)
    except (OSError, ValueError) as error:
        print(f"python -m jax_ep trace: {error}", file=sys.stderr)
        return 1
    for process, track in _tracks(processes):
        if track.num_dropped:
            print(
                f"{process.path}: {track.num_dropped} events of rank {track.rank} ({track.kind}) "
                "came too fast and are missing"
            )
    print(
        f"{path}: {num_events} events of {len(processes)} process(es), "
        f"{path.stat().st_size:,} bytes; open it with https://ui.perfetto.dev"
    )
    return 0


def _all(prefix: str) -> list[Process]:
    processes = []
    for path in find(prefix):
        if process := read(path):
            processes.append(process)
            if process.num_left_out:
                print(
                    f"{path}: the last {process.num_left_out:,} of {process.num_bytes:,} bytes are "
                    "left out, for they are no whole record: its process was killed while it wrote "
                    "them, or the file is damaged or was not copied to its end",
                    file=sys.stderr,
                )
        else:
            print(f"{path} has no record and is left out: its process ended before it wrote one")
    if not processes:
        raise ValueError(f"all traces that begin with {prefix} are without a record")
    return processes


def _one_run(processes: list[Process]) -> list[Process]:
    processes.sort(key=lambda process: process.index)
    for one, other in itertools.pairwise(processes):
        if one.index == other.index:
            raise ValueError(
                f"{one.path} and {other.path} are of two runs (both of process {one.index}); "
                "remove those of the older one, or give each run a JAX_EP_TRACE of its own"
            )
    return processes


def _tracks(processes: Iterable[Process]) -> Iterator[tuple[Process, Track]]:
    for process in processes:
        for track in process.tracks.values():
            yield process, track


def _sent(track: Track, event: np.void) -> Signal:
    """The signal that this rank has sent to the peer."""
    peer, channel, value = int(event["peer"]), int(event["channel"]), int(event["value"])
    return track.group, track.team, track.rank, peer, channel, value


def _got(track: Track, event: np.void, value: int) -> Signal:
    """The signal of that number that the peer has sent to this rank."""
    return track.group, track.team, int(event["peer"]), track.rank, int(event["channel"]), value


def _messages(processes: Iterable[Process]) -> Iterator[trace_clocks.Message]:
    """The signals between ranks whose sending and arrival are both known."""
    sent: dict[Signal, tuple[str, int]] = {}
    for process, track in _tracks(processes):
        if track.kind == "rank":
            events = track.events
            for event in events[events["kind"] == Kind.SIGNAL]:
                sent[_sent(track, event)] = (process.boot_id, int(event["begin"]))
    for process, track in _tracks(processes):
        if track.kind == "proxy":
            events = track.events
            for event in events[events["kind"] == Kind.FLAG]:
                if begun := sent.get(_got(track, event, int(event["value"]))):
                    yield *begun, process.boot_id, int(event["begin"])


class _Picture:
    """Writes the packets of one trace."""

    _SEQUENCE = 1

    def __init__(self, builder: Any) -> None:
        """Takes a StreamingTraceProtoBuilder."""
        self._builder = builder
        self._uuids = itertools.count(1)
        self._flow_ids: dict[Signal, int] = {}
        self._num_events = 0
        self._track_event = require("perfetto.protos.perfetto.trace.perfetto_trace_pb2").TrackEvent

    def draw(self, processes: list[Process]) -> int:
        """Returns the number of events."""
        first = processes[0].boot_id
        real_offsets = {process.boot_id: process.real_offset_ns for process in processes}
        messages = _messages(processes) if len(real_offsets) > 1 else ()
        offsets = trace_clocks.align(real_offsets, messages, first)
        lanes = []
        for process in processes:
            top = self._describe(f"process {process.index} ({process.host}, pid {process.pid})")
            for track in sorted(process.tracks.values(), key=lambda t: (t.group, t.team, t.rank)):
                shift = offsets[process.boot_id]
                lanes += self._lanes(process, track, top, shift)
        points = Counter(
            signal for _, slices in lanes for *_, signals in slices for signal in signals
        )
        self._flow_ids = {
            signal: number
            for number, signal in enumerate((s for s, n in points.items() if n > 1), start=1)
        }
        for uuid, slices in lanes:
            self._write(uuid, slices)
        return self._num_events

    def _lanes(
        self, process: Process, track: Track, top: int, shift: int
    ) -> list[tuple[int, list[Slice]]]:
        """The rows of a track: their uuids and what stands in them."""
        name = f"rank {track.rank}"
        if track.num_teams > 1:
            name += f" of team {track.team}"
        events = track.events.copy()
        events["begin"] += np.uint64(shift % 2**64)  # wraps as it should for one that is negative
        events["end"] += np.uint64(shift % 2**64)
        if track.kind == "rank":
            uuid = self._describe(f"{name}, {track.group}", top)
            return [(uuid, [s for e in events for s in _of_rank(process, track, e)])]
        parent = self._describe(f"proxy of {name}, {track.group}", top)
        lanes = []
        for peer, channel in sorted({(int(e["peer"]), int(e["channel"])) for e in events}):
            of_flow = events[(events["peer"] == peer) & (events["channel"] == channel)]
            title = f"rank {peer}, {CHANNELS[channel]}"
            lanes.append((self._describe(title, parent), _of_flow(track, of_flow)))
            sends = of_flow[(of_flow["kind"] == Kind.COMMAND)]
            if len(sends):
                self._count(self._describe(f"to {title}: under way", parent, "messages"), of_flow)
        return lanes

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = self._SEQUENCE
        return packet

    def _describe(self, name: str, parent: int = 0, unit: str = "") -> int:
        """A new row; its uuid."""
        packet = self._packet()
        track = packet.track_descriptor
        track.uuid = uuid = next(self._uuids)
        track.name, track.parent_uuid = name, parent
        track.sibling_order_rank = uuid
        track.child_ordering = track.EXPLICIT
        if unit:
            track.counter.unit_name = unit
        self._builder.write_packet(packet)
        return uuid

    def _event(self, uuid: int, time: int, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = time
        packet.track_event.type, packet.track_event.track_uuid = kind, uuid
        return packet

    def _count(self, uuid: int, events: np.ndarray) -> None:
        """Messages posted and not acknowledged."""
        posted = acknowledged = 0
        for event in events[np.argsort(events["end"], kind="stable")]:
            if event["kind"] == Kind.COMMAND:
                posted = int(event["extra"])
            elif event["kind"] == Kind.ACKNOWLEDGED:
                acknowledged = int(event["value"])
            else:
                continue
            packet = self._event(uuid, int(event["end"]), self._track_event.TYPE_COUNTER)
            packet.track_event.counter_value = posted - acknowledged
            self._builder.write_packet(packet)

    def _write(self, uuid: int, slices: list[Slice]) -> None:
        """Slices of one row, each within the one around it."""
        ends: list[int] = []  # of the open ones, the innermost last

        def close(time: int) -> None:
            while ends and ends[-1] <= time:
                packet = self._event(uuid, ends.pop(), self._track_event.TYPE_SLICE_END)
                self._builder.write_packet(packet)

        for begin, end, name, details, signals in sorted(slices, key=lambda s: (s[0], -s[1])):
            self._num_events += 1
            close(begin)
            if begin == end:
                kind = self._track_event.TYPE_INSTANT
            else:
                kind = self._track_event.TYPE_SLICE_BEGIN
                ends.append(min([end, *ends[-1:]]))
            packet = self._event(uuid, begin, kind)
            packet.track_event.name = name
            for key, value in details.items():
                note = packet.track_event.debug_annotations.add()
                note.name = key
                if isinstance(value, str):
                    note.string_value = value
                elif isinstance(value, float):
                    note.double_value = value
                else:
                    note.uint_value = value
            flows = [self._flow_ids[signal] for signal in signals if signal in self._flow_ids]
            packet.track_event.flow_ids.extend(flows)
            self._builder.write_packet(packet)
        close(sys.maxsize)


def _of_rank(process: Process, track: Track, event: np.void) -> Iterator[Slice]:
    begin, end, value = int(event["begin"]), int(event["end"]), int(event["value"])
    peer, channel = int(event["peer"]), CHANNELS[event["channel"]]
    match event["kind"]:
        case Kind.CALL:
            details: dict[str, Any] = {}
            if event["extra"]:  # not on GPUs
                details["waited for its turn, us"] = (begin - int(event["extra"])) / 1e3
            if value:
                details["epoch"] = value
            if line := process.sites.get(int(event["detail"])):
                details["at"] = line
            yield begin, end, track.names[event["name"]], details, []
        case Kind.PHASE:
            name = track.names[event["name"]]
            yield begin, end, name, {} if peer == NOBODY else {"rank": peer}, []
        case Kind.WAIT:
            details = {"signal": value}
            yield begin, end, f"wait for rank {peer}: {channel}", details, []
            if int(event["detail"]) == track.rank:
                signals = [_got(track, event, value)]
                yield end, end, f"{channel} of rank {peer} is here", details, signals
        case Kind.RING_FULL:
            yield begin, end, "wait: the command ring is full", {"to rank": peer}, []
        case Kind.BARRIER:
            yield begin, end, f"wait for rank {peer}: create_group or close", {"barrier": value}, []
        case Kind.SIGNAL:
            details = {"signal": value}
            yield begin, end, f"signal rank {peer}: {channel}", details, [_sent(track, event)]


def _of_flow(track: Track, events: np.ndarray) -> list[Slice]:
    """What the proxy did for one peer and channel."""
    slices: list[Slice] = []
    posted_until = flag = 0
    for event in events:
        begin, end, value = int(event["begin"]), int(event["end"]), int(event["value"])
        match event["kind"]:
            case Kind.COMMAND:
                op = OPS[event["name"]]
                details: dict[str, Any] = {"messages so far": int(event["extra"])}
                if event["detail"]:
                    details["bytes"] = int(event["detail"])
                # The window or the network lets one after the other through.
                start = max(begin, posted_until)
                details["waited in line, us"] = (start - begin) / 1e3
                posted_until = end
                signals = [] if op == "write" else [_sent(track, event)]
                slices.append((min(start, end), end, op, details, signals))
            case Kind.FLAG:
                signals = [_got(track, event, number) for number in range(flag + 1, value + 1)]
                flag = value
                details = {"signal": value, "messages so far": int(event["detail"])}
                slices.append((begin, end, "arrived", details, signals))
    return slices
