"""Native sessions: bootstrap over jax.distributed, start, health, stop.

Nothing here touches arrays. The session itself is C++ (xla_ffi/session.h).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import jax

from jax_ep import _config, _env
from jax_ep._ops import sharding
from jax_ep._runtime import bootstrap, drain, gpu

if TYPE_CHECKING:
    from jax_ep._group import Group, Health

_ELEM_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # kernels/layout.h ElemType
# In the order of their creation, which is the same on all processes: at exit each waits for the
# same group of the others. Strong, as a program may drop a Group that others still use.
_open_sessions: dict[NativeSession, None] = {}
_sessions: weakref.WeakSet[NativeSession] = weakref.WeakSet()  # open and closed
_hooks_installed = False


class NativeSession:
    """The native side of one allocated Group in this process."""

    def __init__(self, session: Any, name: str, group: Group, layout: _Layout, transport: str):
        """Wraps a started `_core.Session` of that name."""
        self._session = session
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.RLock()  # a signal handler may close while its thread does
        self._devices = [group.mesh.devices.flat[i] for i in layout.local_positions]
        self._timeout_s = group.config.timeout_s
        self._peer_timeout_s = group.config.peer_timeout_s
        self._drain = drain.Drain(self._devices) if group.platform == "cpu" else None
        self.transport = transport
        self.node_size = layout.node_size
        self.local_ranks: tuple[int, ...] = tuple(
            sorted({rank for _, _, rank in layout.local_ranks})
        )
        _open_sessions[self] = None
        _sessions.add(self)

    @property
    def heap_bytes(self) -> int:
        """Bytes of this process's ranks; 0 after close."""
        return int(self._session.heap_bytes)

    @property
    def closed(self) -> bool:
        """Whether it holds nothing any more, or is about to; in a forked child it never did."""
        return self._closed or os.getpid() != self._pid

    def close(self, *, program_ended: bool = False) -> None:
        """Waits for the executions that use the group, then for the other ranks' close; frees.

        Idempotent. Does nothing in a forked child: the group is its parent's.

        Args:
            program_ended: what ranks are told that still use the group: this program has ended.
        """
        if os.getpid() != self._pid:
            return
        with self._close_lock:  # who comes second must not cut off what the first waits for
            if not self._closed:
                self._closed = True
                self._drain_or_abort()
            self._session.close(program_ended)
            _open_sessions.pop(self, None)

    def _drain_or_abort(self) -> None:
        try:
            self._wait_for_executions()
        except BaseException:  # Ctrl-C: as _core.Session does where it waits itself
            process = self._devices[0].process_index
            self._session.abort(f"group {self.name}: process {process} was interrupted by a signal")
            _open_sessions.pop(self, None)
            raise

    def _wait_for_executions(self) -> None:
        for device in self._devices:
            with contextlib.suppress(Exception):  # a failed execution is the caller's to see
                device.synchronize_all_activity()
        if self._drain is None:
            return
        session = self._session
        begin = time.monotonic()

        def give_up() -> bool:
            waited = time.monotonic() - begin
            limit = self._timeout_s if session.is_balanced() else self._peer_timeout_s
            return bool(session.failure_text()) or waited > limit

        self._drain.run(give_up)

    def release(self) -> None:
        """After close, at exit: lets go of the native object, which may outlive its module.

        A class that JAX has registered as a pytree is never freed, nor what its module names: a
        Group there would leave nanobind with a live instance to complain of.
        """
        if os.getpid() == self._pid:  # a forked child has not closed it
            self._session = _Released(self._session)

    def check(self) -> None:
        """Raises RuntimeError with the first failure if there is one, or if it is closed."""
        text = str(self._session.failure_text())
        if text:
            raise RuntimeError(text)
        if self._closed:
            raise RuntimeError(f"group {self.name} is closed; create a new one")

    def health(self) -> Health:
        """State of the group as this process sees it."""
        from jax_ep._group import Health  # a cycle at import time

        text = str(self._session.failure_text())
        return Health(
            ok=not text,
            message=text,
            details=(
                ("closed", self._closed),
                ("transport", self.transport),
                ("data_path", getattr(self._session, "data_path", "heap")),
            ),
        )

    def stats(self) -> dict[str, Any]:
        """Counters: totals, per local rank, per proxy flow."""
        ranks = self._session.rank_stats()
        totals = {
            name: sum(rank[name] for rank in ranks)
            for name in (ranks[0] if ranks else {})
            if name not in ("team", "rank")
        }
        return {**totals, "ranks": ranks, "flows": self._session.flow_stats()}

    def dump_state(self) -> str:
        """A text with everything that a hang report needs."""
        return str(self._session.dump_state())


class _Released:
    """What a NativeSession still answers when the interpreter exits: its last words."""

    heap_bytes = 0

    def __init__(self, session: Any):
        """Takes what a closed `_core.Session` says."""
        self._failure = str(session.failure_text())
        self._ranks = session.rank_stats()
        self._flows = session.flow_stats()
        self._state = str(session.dump_state())
        self.data_path = getattr(session, "data_path", "heap")

    def close(self, program_ended: bool = False) -> None:
        """Was done."""

    def failure_text(self) -> str:
        """Of the time of the release, as all below."""
        return self._failure

    def rank_stats(self) -> Any:
        """Counters of each rank."""
        return self._ranks

    def flow_stats(self) -> Any:
        """Counters of each flow."""
        return self._flows

    def dump_state(self) -> str:
        """For a bug report."""
        return self._state


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Who runs what: the same on every process, but for the local fields."""

    team_processes: list[list[int]]
    local_ranks: list[tuple[int, int, int]]  # (device id, team, rank)
    local_positions: list[int]  # of this process's devices in mesh.devices.flat
    processes: list[int]
    node_size: int

    @property
    def mates(self) -> set[int]:
        """Processes with a rank in a node of one of this process's ranks, itself included."""
        mates = set()
        for _, team, rank in self.local_ranks:
            first = rank // self.node_size * self.node_size
            mates.update(self.team_processes[team][first : first + self.node_size])
        return mates


def _common_block(hosts: list[list[str]], num_ranks: int) -> int:
    """Largest divisor S of num_ranks such that ranks [i*S, (i+1)*S) share a host in every team."""
    for size in sorted((s for s in range(1, num_ranks + 1) if num_ranks % s == 0), reverse=True):
        blocks = (team[i : i + size] for team in hosts for i in range(0, num_ranks, size))
        if all(len(set(block)) == 1 for block in blocks):
            return size
    return 1


def _choose_node_size(group: Group, hosts: list[list[str]]) -> int:
    largest = _common_block(hosts, group.num_ranks)
    wanted = group.config.node_size
    if wanted is None:
        return largest
    if group.num_ranks % wanted:
        raise ValueError(
            f"Config.node_size: got {wanted}, expected a divisor of the group's {group.num_ranks} "
            "ranks; "
            "use one of "
            + ", ".join(str(s) for s in range(1, group.num_ranks + 1) if group.num_ranks % s == 0)
        )
    blocks = (team[i : i + wanted] for team in hosts for i in range(0, group.num_ranks, wanted))
    if any(len(set(block)) > 1 for block in blocks):
        raise ValueError(
            f"Config.node_size: got {wanted}, but some {wanted} consecutive ranks do not share a "
            "host; "
            f"use at most {largest}, or None"
        )
    return wanted


def _choose_transport(
    group: Group,
    num_nodes: int,
    one_process: bool,
    one_host: bool,
    available: dict[str, tuple[bool, str]],
) -> str:
    """The transport between nodes; "none" where there is one node and none was asked for."""
    wanted = group.config.transport
    if wanted == "auto":
        if num_nodes == 1:
            return "none"
        candidates = (["loopback"] if one_process else []) + (["shm"] if one_host else [])
        candidates += ["verbs", "ofi"]
        for name in candidates:
            if available.get(name, (False, ""))[0]:
                return name
        reasons = "; ".join(
            f"{name}: {available[name][1]}" for name in candidates if name in available
        )
        raise ValueError(
            f"Config.transport='auto' found no transport between the {num_nodes} nodes of "
            f"{group!r}: {reasons}"
        )
    usable, reason = available.get(wanted, (False, "unknown"))
    if not usable:
        raise ValueError(
            f"Config.transport: got {wanted!r}, which is not available here ({reason}); use "
            "'auto' or one of " + ", ".join(repr(name) for name, (ok, _) in available.items() if ok)
        )
    if wanted == "loopback" and not one_process:
        raise ValueError(
            "Config.transport: got 'loopback', which joins ranks of one process, but the mesh "
            "spans "
            "several; use 'shm' on one host, or 'auto'"
        )
    if wanted == "shm" and one_process and num_nodes > 1:
        raise ValueError(
            "Config.transport: got 'shm', which joins processes, but the mesh has the devices of "
            "one process only; use 'loopback' or 'auto'"
        )
    if wanted == "shm" and not one_host:
        raise ValueError(
            "Config.transport: got 'shm', which joins processes of one host, but the mesh spans "
            "several "
            "hosts; use 'auto'"
        )
    return wanted if num_nodes > 1 else "none"


def _install_hooks() -> None:
    """Once per process: close groups at exit."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    # After this, before JAX's own exit handlers: a process that ends while others still use the
    # group must say good-bye, or they take it for dead.
    atexit.register(close_all)


def close_all() -> None:
    """Closes what the program has left open, and lets go of native objects; again is harmless."""
    for session in list(_open_sessions):
        session.close(program_ended=True)
    for session in list(_sessions):
        session.release()


def start(group: Group, exchange: bootstrap.Exchange) -> NativeSession:
    """Allocates and connects the native side of `group`; collective over the mesh's processes.

    Raises:
        ValueError: configs differ between processes, or a field cannot be met here.
        MemoryError: too little shared memory; says how much was asked for.
        jax_ep.BootstrapError: another process failed, is gone, or did not take part.
    """
    from jax_ep import _core

    _install_hooks()
    if group.platform == "cpu":
        _warn_about_small_pool()
    name = f"{group.label}#{exchange.number}"
    exchange.label = f"group {name}"  # as _core quotes it
    exchange.timeout_s = group.config.timeout_s
    me = exchange.me
    teams = sharding.teams(group.mesh, group.axes)
    team_processes = [[int(device.process_index) for device in team] for team in teams]
    hello: dict[str, Any] = {
        "version": bootstrap.PROTOCOL_VERSION,
        "mesh": repr(list(group.mesh.shape.items())),
        "devices": repr([device.id for device in group.mesh.devices.flat]),
        "axis": list(group.axes),
        "config": repr(group.config),
        "number": group.session_number,
        "host": bootstrap.host_id(),
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    greetings = {process: record for process, (record, _) in exchange.share("hello", hello).items()}
    _check_greetings(exchange.label, greetings, me)
    group.agree_on_number(max(record["number"] for record in greetings.values()))
    exchange.watch(
        {p: record["pid"] for p, record in greetings.items() if record["host"] == hello["host"]}
    )
    hosts = [[greetings[process]["host"] for process in team] for team in team_processes]
    node_size = _choose_node_size(group, hosts)
    available = {name: (ok, reason) for name, ok, reason in _core.transports()}
    num_nodes = group.num_ranks // node_size
    one_host = len({host for team in hosts for host in team}) == 1
    transport = _choose_transport(group, num_nodes, exchange.alone, one_host, available)
    flat_ids = {device.id: position for position, device in enumerate(group.mesh.devices.flat)}
    on_gpu = group.platform != "cpu"
    local = [
        (device, t, r)
        for t, team in enumerate(teams)
        for r, device in enumerate(team)
        if device.process_index == me
    ]
    layout = _Layout(
        team_processes,
        [(_ordinal(device), t, r) for device, t, r in local],
        [flat_ids[device.id] for device, _, _ in local],
        exchange.processes,
        node_size,
    )
    options = _core.SessionOptions(
        session_id=group.session_id,
        name=name,
        shape=_core.GroupShape(**shape_arguments(group, node_size)),
        team_processes=team_processes,
        local_ranks=layout.local_ranks,
        host_ranks=[
            (t, r)
            for t, team in enumerate(hosts)
            for r, host in enumerate(team)
            if host == hello["host"]
        ],
        process_index=me,
        transport=transport,
        timeout_s=group.config.timeout_s,
        peer_timeout_s=group.config.peer_timeout_s,
        threads_per_rank=1 if on_gpu else _threads_per_rank(greetings, hello["host"], teams),
        huge_pages=_env.flag("JAX_EP_HUGE_PAGES") is not False,
        debug=_env.flag("JAX_EP_DEBUG") is True,
    )
    if on_gpu:
        session = gpu.start(options, exchange, [device for device, _, _ in local], layout.mates)
    else:
        session = _start_on_cpu(_core.Session(options), exchange)
    try:
        exchange.clean_up()
        return NativeSession(session, name, group, layout, transport)
    except BaseException as error:
        session.abort(f"process {me} failed in create_group: {error!r}")
        raise


def _check_greetings(label: str, greetings: dict[int, Any], me: int) -> None:
    """Raises ValueError unless all processes have called create_group alike."""
    own = greetings[me]
    for process, record in greetings.items():
        for field in ("version", "mesh", "devices", "axis", "config"):
            if record.get(field) != own[field]:
                raise ValueError(
                    f"{label}: process {process} called create_group with {field} "
                    f"{record.get(field)}, this process ({me}) with {own[field]}; all processes "
                    "must pass the same"
                )


def _start_on_cpu(session: Any, exchange: bootstrap.Exchange) -> Any:
    """Connects and starts a new `_core.Session`; ends it on any error."""
    try:
        records = exchange.share("connect", {}, session.local_blob())
        session.connect({process: blob for process, (_, blob) in records.items()})
        exchange.share("connected", {})
        session.start()
        exchange.share("started", {})  # who could not start says so here: nobody waits for it below
        session.barrier(exchange.timeout_s)
        exchange.share("ready", {})
    except BaseException as error:
        session.abort(f"process {exchange.me} failed in create_group: {error!r}")
        raise
    return session


def _ordinal(device: Any) -> int:
    """How the FFI names a device of this process."""
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


def shape_arguments(group: Group, node_size: int) -> dict[str, Any]:
    """The kernels' GroupShape (kernels/layout.h) as keyword arguments of `_core`."""
    config = group.config
    return {
        "num_ranks": group.num_ranks,
        "node_size": node_size,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "align": config.align,
        "hidden": config.hidden,
        "max_tokens": config.max_tokens,
        "ll_tokens": _config.max_ll_tokens(config),
        "elem_type": _ELEM_TYPES[config.dtype.name],
        "f32_partials": group.partials == "float32",
        "has_ht": config.mode != "ll",
        "depth": config.max_in_flight,
    }


def _warn_about_small_pool() -> None:
    """XLA:CPU's thread pool deadlocks when virtual devices outnumber it (docs/tuning.md)."""
    devices = jax.local_device_count("cpu")
    text = os.environ.get("NPROC", "")
    pool = int(text) if text.isdigit() else len(os.sched_getaffinity(0))
    if devices > 1 and pool < max(2 * devices, 8):
        warnings.warn(
            f"jax_ep: this process has {devices} CPU devices but XLA's thread pool has {pool} "
            "threads; "
            "XLA:CPU can deadlock on such a pool once many executions are queued. Set NPROC=32 "
            "or more "
            "in the environment before jax is imported, or use `python -m jax_ep launch`",
            RuntimeWarning,
            stacklevel=4,
        )


def _threads_per_rank(greetings: dict[int, Any], host: str, teams: Any) -> int:
    """This rank's share of the cores that the group's processes of this host may use, at least one.

    JAX_EP_THREADS_PER_RANK overrides. Processes may be bound to cores of their own.
    """
    wanted = _env.positive_int("JAX_EP_THREADS_PER_RANK")
    if wanted is not None:
        return wanted
    here = {process for process, record in greetings.items() if record["host"] == host}
    ranks_here = sum(device.process_index in here for team in teams for device in team)
    cores = set().union(*(greetings[process]["cpus"] for process in here))
    share = len(cores) // max(1, ranks_here)
    return max(1, min(share, len(os.sched_getaffinity(0))))
