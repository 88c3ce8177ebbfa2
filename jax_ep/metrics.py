"""Groups as Prometheus metrics: `register(group)` exports `Group.stats` and its health.

Needs the package prometheus_client (`pip install 'jax_ep[metrics]'`); docs/metrics.md has the
names, and a dashboard for Grafana.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jax_ep._group import Group
from jax_ep._stats import CHANNELS, GroupStats

__all__ = ["CHANNELS", "Exporter", "register"]

READ_LIMIT_S = 1.0  # that a scrape waits for the new values of all groups

_OF_RANK = {  # of RankStats: the metric's name, its help, and what to multiply by
    "plans": ("plans", "Plans made.", 1.0),
    "dispatches": ("dispatches", "Dispatches that have ended.", 1.0),
    "combines": ("combines", "Combines that have ended.", 1.0),
    "rows_received": ("rows_received", "Rows that dispatches have placed.", 1.0),
    "rows_dropped": ("rows_dropped", "Pairs (token, k) that found no room.", 1.0),
    "invalid_ids": ("invalid_ids", "Expert ids out of range.", 1.0),
    "bytes_pulled": ("pulled_bytes", "Bytes of rows read from ranks of the node.", 1.0),
    "bytes_staged": ("staged_bytes", "Bytes copied before others could read them.", 1.0),
    "rows_sent_internode": ("sent_internode_rows", "Rows sent to other nodes.", 1.0),
    "bytes_sent_internode": ("sent_internode_bytes", "Bytes sent to other nodes.", 1.0),
    "wait_ns": ("wait_seconds", "Time spent waiting for other ranks.", 1e-9),
    "launches": ("launches", "Operations given to the GPU.", 1.0),
}
WAITS_LIMIT = 64  # ranks of a group, up to which waits by peer are exported unless asked for

_OF_FLOW = {  # of FlowStats
    "messages": ("flow_messages", "Messages posted to the peer."),
    "bytes": ("flow_bytes", "Bytes posted to the peer."),
    "signals": ("flow_signals", "Flags of the peer that were raised."),
    "stalls": ("flow_stalls", "Times that the window was closed."),
    "retries": ("flow_retries", "Times that the transport's queue was full."),
    "reorders": ("flow_reorders", "Messages of the peer that came before an earlier one."),
    "duplicates": ("flow_duplicates", "Messages of the peer that came again."),
}


def register(group: Group, registry: Any = None, *, waits_by_peer: bool | None = None) -> Exporter:
    """Exports a group of this process, until it is closed and forgotten or `unregister` is called.

    Each process exports its own ranks: scrape all of them. Values are read when they are scraped.
    On GPUs that copies from the device. A scrape waits for a second at most; then the values of the
    time before are shown, and `jax_ep_stats_age_seconds` says how old they are.

    Args:
        group: any group, also with `implementation="xla"` (which has its health alone). It is not
            kept alive. Once it is closed, its counters stay as they were. A view exports the group
            that it is a view of, whose counters it shares.
        registry: a prometheus_client.CollectorRegistry; None: its REGISTRY.
        waits_by_peer: export `jax_ep_wait_for_peer_seconds_total`, 4 * (N - 1) series for each
            local rank of a group of N ranks. None: in groups of up to 64 ranks.

    Returns:
        An `Exporter`, also a context manager that unregisters.

    Raises:
        ImportError: prometheus_client is not installed.
        TypeError: it is no Group, or no CollectorRegistry.
        ValueError: the group is registered there already.

    Example:
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> registry = CollectorRegistry()
        >>> exporter = jax_ep.metrics.register(group, registry)
        >>> b"jax_ep_healthy{" in generate_latest(registry)
        True
        >>> exporter.unregister()
    """
    client = _client()
    if registry is None:
        registry = client.REGISTRY
    for got, expected, name in (
        (group, Group, "jax_ep.Group"),
        (registry, client.CollectorRegistry, "prometheus_client.CollectorRegistry"),
    ):
        if not isinstance(got, expected):
            raise TypeError(f"jax_ep.metrics.register: got {got!r}, expected a {name}")
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = _Collector()
            registry.register(collector)
        if waits_by_peer is None:
            waits_by_peer = group.num_ranks <= WAITS_LIMIT
        return collector.add(group._whole, waits_by_peer)  # whose experts the counters are of


class Exporter:
    """One exported group; made by `register`."""

    def __init__(self, collector: _Collector, reader: _Reader) -> None:
        """Use `register`."""
        self._collector = collector
        self._reader = reader

    def unregister(self) -> None:
        """Exports the group no more; again is harmless."""
        self._collector.remove(self._reader)

    def __enter__(self) -> Exporter:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Unregisters."""
        self.unregister()


_lock = threading.Lock()
_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()


def _forget_all() -> None:
    """In a forked child: its parent's groups are not its own, and locks may be held for ever."""
    global _lock
    _lock = threading.Lock()
    for collector in list(_collectors.values()):
        collector.clear()


os.register_at_fork(after_in_child=_forget_all)


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "jax_ep.metrics needs the package prometheus_client; install it with: "
            "pip install 'jax_ep[metrics]'"
        ) from error
    return prometheus_client


class _Reader:
    """The newest values of a group. They are read on a thread: a device may be long about it."""

    def __init__(self, group: Group, waits_by_peer: bool) -> None:
        self.name = group.name
        self._waits_by_peer = waits_by_peer
        self._group = weakref.ref(group)
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._is_well = True
        self._newest: tuple[float, GroupStats] | None = None

    def is_forgotten(self) -> bool:
        return self._group() is None

    def start(self) -> threading.Thread:
        """Begins to read, unless that is under way; who joins the thread gets new values."""
        with self._lock:
            if self._reading is None or not self._reading.is_alive():
                self._reading = threading.Thread(
                    target=self._read, name="jax_ep metrics", daemon=True
                )
                self._reading.start()
            return self._reading

    def newest(self) -> _Values | None:
        """None before the first were read."""
        group = self._group()
        is_well = self._is_well and (group is None or group.health().ok)
        return (
            None
            if self._newest is None
            else _Values(self.name, *self._newest, is_well, self._waits_by_peer)
        )

    def _read(self) -> None:
        group = self._group()
        if group is None:
            return
        try:
            self._newest = (time.monotonic(), group.stats())
            self._is_well = True
        except Exception:  # a failed device: the values before are shown
            self._is_well = False


class _Values(NamedTuple):
    """What a scrape shows of a group."""

    name: str
    when: float  # time.monotonic()
    stats: GroupStats
    is_well: bool
    waits_by_peer: bool


class _Collector:
    """All groups of one registry: Prometheus wants each family once."""

    def __init__(self) -> None:
        self._readers: list[_Reader] = []

    def add(self, group: Group, waits_by_peer: bool) -> Exporter:
        if any(reader.name == group.name for reader in self._readers):
            raise ValueError(
                f"jax_ep.metrics.register: got group {group.name}, expected one that is not "
                "registered there yet; keep the Exporter that the first call returned"
            )
        reader = _Reader(group, waits_by_peer)
        self._readers.append(reader)
        return Exporter(self, reader)

    def remove(self, reader: _Reader) -> None:
        with _lock:
            if reader in self._readers:
                self._readers.remove(reader)

    def clear(self) -> None:
        self._readers = []

    def describe(self) -> Iterable[Any]:
        """Nothing: which families there are depends on the groups."""
        return ()

    def collect(self) -> Iterator[Any]:
        """The families of all groups; for prometheus_client."""
        with _lock:
            self._readers = [reader for reader in self._readers if not reader.is_forgotten()]
            readers = list(self._readers)
        deadline = time.monotonic() + READ_LIMIT_S  # for all of them
        for thread in [reader.start() for reader in readers]:
            thread.join(max(deadline - time.monotonic(), 0.0))
        yield from _families([values for reader in readers if (values := reader.newest())])


def _families(groups: list[_Values]) -> Iterator[Any]:
    core = _client().core
    healthy = core.GaugeMetricFamily(
        "jax_ep_healthy", "1 while the group works.", labels=["group", "implementation"]
    )
    heap = core.GaugeMetricFamily(
        "jax_ep_heap_bytes", "Memory of the local ranks' heaps.", labels=["group"]
    )
    age = core.GaugeMetricFamily(
        "jax_ep_stats_age_seconds", "How old the group's values are.", labels=["group"]
    )
    overflow = core.GaugeMetricFamily(
        "jax_ep_last_overflow",
        "1 if rows of the newest plan did not fit.",
        labels=["group", "team", "rank"],
    )
    pairs = core.CounterMetricFamily(
        "jax_ep_expert_pairs",
        "Pairs (token, k) that plans have given the expert.",
        labels=["group", "team", "rank", "expert"],
    )
    waits = core.CounterMetricFamily(
        "jax_ep_wait_for_peer_seconds",
        "Time that the rank has spent waiting for the peer.",
        labels=["group", "team", "rank", "peer", "phase"],
    )
    of_rank = {
        key: core.CounterMetricFamily(f"jax_ep_{name}", text, labels=["group", "team", "rank"])
        for key, (name, text, _) in _OF_RANK.items()
    }
    of_flow = {
        key: core.CounterMetricFamily(
            f"jax_ep_{name}", text, labels=["group", "team", "rank", "peer", "channel"]
        )
        for key, (name, text) in _OF_FLOW.items()
    }
    for name, when, stats, is_well, waits_by_peer in groups:
        healthy.add_metric([name, stats["implementation"]], float(is_well))
        heap.add_metric([name], stats["heap_bytes"])
        age.add_metric([name], time.monotonic() - when)
        for rank in stats.get("ranks", ()):
            labels = [name, str(rank["team"]), str(rank["rank"])]
            overflow.add_metric(labels, rank["last_overflow"])
            values: dict[str, Any] = dict(rank)
            for key, family in of_rank.items():
                if key in values:
                    family.add_metric(labels, values[key] * _OF_RANK[key][2])
            load = rank["pairs_per_expert"]
            for expert, count in enumerate(load, start=rank["rank"] * len(load)):
                pairs.add_metric([*labels, str(expert)], count)
            for phase, by_peer in rank.get("wait_by_peer", {}).items() if waits_by_peer else ():
                for peer, nanoseconds in enumerate(by_peer):
                    if peer != rank["rank"]:
                        waits.add_metric([*labels, str(peer), phase], nanoseconds * 1e-9)
        for flow in stats.get("flows", ()):
            values = dict(flow)
            channel = CHANNELS[flow["channel"]]
            labels = [name, *(str(values[key]) for key in ("team", "rank", "peer")), channel]
            for key, family in of_flow.items():
                family.add_metric(labels, values[key])
    yield from (healthy, heap, age, overflow, pairs, waits, *of_rank.values(), *of_flow.values())
