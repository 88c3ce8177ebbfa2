"""create_group and Group: one expert-parallel group of ranks per coordinate of the other axes.

Validation and derived sizes live here; what a native group allocates and connects is in _runtime.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import importlib
import json
import threading
import warnings
import weakref
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from jax_ep import _config, _env, _log
from jax_ep._config import Config, Layout, Mode
from jax_ep._ops import ffi, sharding
from jax_ep._runtime import bootstrap

Implementation = Literal["native", "xla"] | None

_NATIVE_PLATFORMS = frozenset({"cpu", "gpu"})  # JAX's names of platforms with handlers


@dataclasses.dataclass(frozen=True)
class Health:
    """State of a group as this process sees it.

    Args:
        ok: no failure was latched.
        message: the first cause of a failure, or "".
        details: anything else that the implementation reports.
    """

    ok: bool
    message: str = ""
    details: tuple[tuple[str, Any], ...] = ()


class _GroupCounter:
    """Counts equal groups, so that each of them gets its own, reproducible session id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def take(self, key: str) -> int:
        """The next number."""
        with self._lock:
            self._counts[key] += 1
            return self._counts[key] - 1

    def agree(self, key: str, number: int) -> None:
        """`number` is taken, too: other processes have counted further."""
        with self._lock:
            self._counts[key] = max(self._counts[key], number + 1)

    def give_back(self, key: str, number: int) -> None:
        """No group has got `number`: the next one may, if none took a later."""
        with self._lock:
            if self._counts[key] == number + 1:
                self._counts[key] = number


_groups_created = _GroupCounter()
_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def check_open_groups() -> None:
    """Raises the failure of any native group of this process that is still open."""
    for group in list(_open_groups):
        if not group.closed:
            group.check()


class Group:
    """An expert-parallel group; made by `create_group`, hashable by identity, static under jit.

    Usable as a context manager that closes it. Attributes: `mesh`, `axis`, `axes`, `config`,
    `implementation`, `num_ranks`, `experts_per_rank`, `session_id`, `lowering_only`.
    """

    def __init__(
        self,
        mesh: Any,
        axis: str | tuple[str, ...],
        config: Config,
        implementation: Implementation,
        *,
        native: bool,
        platform: str | None,
        lowering_only: bool,
        local_ranks: tuple[int, ...],
    ) -> None:
        """Use `create_group`."""
        self.mesh = mesh
        self.axis = axis
        self.axes = sharding.axis_tuple(axis)
        self.config = config
        self.implementation = implementation
        self.native = native
        self.platform = platform
        self.lowering_only = lowering_only
        self._session_key = _session_key(mesh, self.axes, config)
        # Lowering-only groups are counted apart: the n-th of them has the id of the n-th real one,
        # so a program exported on another host meets its session.
        self._counted_as = f"{'lower' if lowering_only else 'run'}:{self._session_key}"
        self.session_number = _groups_created.take(self._counted_as)
        self.num_ranks = sharding.axis_size(mesh, self.axes)
        self.experts_per_rank = config.num_experts // self.num_ranks
        self._local_ranks = local_ranks
        self._handle: Any = None
        self._closed = False

    def __repr__(self) -> str:
        """One line for messages and logs."""
        state = ", closed" if self._closed else ", lowering-only" if self.lowering_only else ""
        return (
            f"Group(axis={self.axis!r}, num_ranks={self.num_ranks}, "
            f"num_experts={self.config.num_experts}, "
            f"implementation={self.implementation!r}{state})"
        )

    def __enter__(self) -> Group:
        """The group itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the group; after an exception other ranks learn that the program ended."""
        self._close(program_ended=kind is not None)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def label(self) -> str:
        """How messages and the log quote it, before its number: its axes and ranks."""
        return f"{'/'.join(self.axes)}[{self.num_ranks}]"

    @property
    def session_id(self) -> int:
        """Signed 64-bit id, equal on all processes and in every run of the same program."""
        text = f"{self._session_key}#{self.session_number}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    @property
    def node_size(self) -> int:
        """Ranks per node: those that load and store each other's memory."""
        if self._handle is not None:
            return int(self._handle.node_size)
        return self.config.node_size or self.num_ranks

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks whose devices belong to this process, over all teams, ascending."""
        if self._handle is not None:
            return tuple(self._handle.local_ranks)
        return self._local_ranks

    @property
    def heap_bytes(self) -> int:
        """Bytes that the group holds for exchanges in this process."""
        return 0 if self._handle is None else int(self._handle.heap_bytes)

    @property
    def transport(self) -> str:
        """Name of the transport between nodes."""
        return "xla" if self._handle is None else str(self._handle.transport)

    @property
    def max_ht_tokens(self) -> int:
        """Tokens per rank of the largest ht call (0: none allowed)."""
        return _config.max_ht_tokens(self.config)

    @property
    def max_ll_tokens(self) -> int:
        """Tokens per rank of the largest ll call (0: none allowed)."""
        return _config.max_ll_tokens(self.config)

    @property
    def partials(self) -> Literal["float32", "dtype"]:
        """What travels in combine: Config.partials, or the platform's default.

        "dtype" for native groups on GPUs, whose links are the bottleneck, else "float32".
        """
        default: Literal["float32", "dtype"] = (
            "dtype" if self.native and self.platform == "gpu" else "float32"
        )
        return self.config.partials or default

    @property
    def native_platforms(self) -> tuple[str, ...]:
        """Lowering platforms on which this group's calls are ours; the others get "xla"."""
        if self.implementation == "xla":
            return ()
        if self.lowering_only or self.native:
            return ("cpu", "cuda", "rocm")
        return ("cpu",)

    def recv_rows(self, num_tokens: int, layout: Layout = "expert_major") -> int:
        """Receive rows R for T tokens per rank.

        Args:
            num_tokens: T.
            layout: "expert_major", "expert_batched" or "rank_major".

        Returns:
            R, static.

        Example:
            >>> group.recv_rows(4096)
        """
        return _config.receive_rows(self.config, self.num_ranks, num_tokens, layout)

    def call_mode(self, num_tokens: int, mode: Mode | None) -> Mode:
        """The mode of a call with T tokens: `mode`, else Config.mode, else by T."""
        chosen = mode or self.config.mode
        if chosen == "auto":
            return "ll" if num_tokens <= _config.AUTO_LL_TOKENS else "ht"
        return chosen

    def check(self) -> None:
        """Raises what made the group fail, if anything did; cheap, waits for nothing.

        Raises:
            RuntimeError: the first cause, or that the group is closed.
        """
        if self._handle is not None:
            self._handle.check()

    def stats(self) -> dict[str, Any]:
        """Counters since creation, as a dict of plain values."""
        head: dict[str, Any] = {
            "implementation": "xla" if self._handle is None else "native",
            "num_ranks": self.num_ranks,
            "heap_bytes": self.heap_bytes,
        }
        return head if self._handle is None else head | dict(self._handle.stats())

    def health(self) -> Health:
        """State of the group as this process sees it."""
        if self._handle is None:
            return Health(ok=True)
        health: Health = self._handle.health()
        return health

    def dump_state(self) -> str:
        """Everything that the group knows about itself, for a bug report."""
        if self._handle is None:
            return repr(self)
        return f"{self!r}\n{self._handle.dump_state()}"

    def close(self) -> None:
        """Ends the group on this process and gives its memory back; idempotent.

        Waits for the executions that use it, then for the other processes to close it too (at most
        timeout_s, and for none that is gone). Does nothing in a forked child.
        """
        self._close(program_ended=False)

    def __del__(self) -> None:
        """Says that only `close` frees: other processes may still use what this one holds."""
        handle = getattr(self, "_handle", None)
        if handle is not None and not handle.closed:
            text = f"{self!r} was dropped, not closed"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    def _close(self, *, program_ended: bool) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.close(program_ended=program_ended)

    def agree_on_number(self, number: int) -> None:
        """Before the start: the largest `session_number` of the processes, which all take."""
        _groups_created.agree(self._counted_as, number)
        self.session_number = number

    def _start(self, exchange: bootstrap.Exchange) -> None:
        """Registers the handlers and starts the native session (collective over processes)."""
        try:
            runtime: Any = importlib.import_module("jax_ep._runtime.start")
            ffi.register(_ffi_platform(self.mesh))
        except ImportError as error:
            raise RuntimeError(
                f"jax_ep.create_group: the native extension jax_ep._core cannot be imported "
                f"({error}); "
                "expected a built package; run `pip install .`, or pass implementation='xla'"
            ) from error
        self._handle = runtime.start(self, exchange)
        _open_groups.add(self)


def create_group(
    mesh: Any,
    axis: str | tuple[str, ...],
    config: Config,
    implementation: Implementation = None,
) -> Group:
    """Creates the group(s) over `axis` of `mesh`; eager, and collective over the mesh's processes.

    Args:
        mesh: a `jax.sharding.Mesh`. With an `AbstractMesh`, or devices that this job does not own,
            the group is lowering-only: nothing is allocated and running it raises.
        axis: an axis name, or a tuple of names (ranks are row-major over it). Every other mesh axis
            gives an independent group.
        config: sizes and limits.
        implementation: None (native on cpu and GPUs, else "xla"), "native" or "xla".

    Returns:
        The `Group`.

    Raises:
        ValueError: axis or config do not fit the mesh; says got, expected and the fix.
        NotImplementedError: "native" on a platform without handlers.

    Example:
        >>> mesh = jax.make_mesh((4,), ("ep",))
        >>> config = jax_ep.Config(num_experts=8, top_k=2, hidden=64, max_tokens=128)
        >>> with jax_ep.create_group(mesh, "ep", config, implementation="xla") as group:
        ...     print(group.num_ranks)
        4
    """
    _check_mesh(mesh)
    owned = _owned(mesh)
    platform = mesh.devices.flat[0].platform if owned else None
    native = owned and implementation != "xla" and platform in _NATIVE_PLATFORMS
    if owned and implementation == "native" and not native:
        raise NotImplementedError(
            f"jax_ep.create_group: got implementation='native' on platform {platform!r}, expected "
            f"one of {sorted(_NATIVE_PLATFORMS)}; use implementation=None or 'xla'"
        )
    process = jax.process_index(mesh.devices.flat[0].client) if owned else 0
    if owned and all(device.process_index != process for device in mesh.devices.flat):
        raise ValueError(
            "jax_ep.create_group: got a mesh in which this process owns no device, expected at "
            "least one; call create_group only in the processes of the mesh"
        )
    # From here on the others are told of an error, and count this call as this process does.
    exchange = bootstrap.Exchange(mesh.devices.flat, process) if native else None
    try:
        _env.check()
        _check_arguments(mesh, axis, config, implementation)
        axes = sharding.axis_tuple(axis)
        _check_sizes(config, sharding.axis_size(mesh, axes))
        group = Group(
            mesh,
            axis if isinstance(axis, str) else axes,
            config,
            implementation,
            native=native,
            platform=platform,
            lowering_only=not owned,
            local_ranks=_local_ranks(mesh, axes, process) if owned else (),
        )
        if exchange is not None:
            try:
                group._start(exchange)
            except BaseException as error:
                if not isinstance(error, NotImplementedError) or implementation == "native":
                    _groups_created.give_back(group._counted_as, group.session_number)
                    raise
                exchange.fail(error)
                group.native = False
                warnings.warn(f"{error}; using implementation='xla'", RuntimeWarning, stacklevel=2)
    except BaseException as error:
        if exchange is not None:
            exchange.fail(error)
        raise
    if owned and process == min(device.process_index for device in mesh.devices.flat):
        _log.info(_summary(group))
    return group


def _summary(group: Group) -> str:
    """The line that JAX_EP_LOG=info has for each group."""
    nodes = group.num_ranks // group.node_size
    parts = [
        f"{'native' if group.native else 'xla'} on {group.platform}",
        f"ranks {group.num_ranks}, nodes {nodes}",
        f"transport {group.transport}",
        f"R = {group.recv_rows(group.config.max_tokens)} for T = {group.config.max_tokens}",
        f"{group.heap_bytes} bytes in this process",
    ]
    details = dict(group.health().details)
    if group.platform == "gpu" and "data_path" in details:
        parts.append(f"rows travel {details['data_path']}")
    name = group.label if group._handle is None else group._handle.name
    return f"group {name}: " + ", ".join(parts)


def _ffi_platform(mesh: Any) -> str:
    """The name under which XLA knows handlers for the mesh's devices."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return "cpu"
    return "ROCM" if "rocm" in device.client.platform_version.lower() else "CUDA"


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise ValueError(
            f"jax_ep.create_group: got mesh of type {type(mesh).__name__}, expected "
            f"jax.sharding.Mesh or "
            "AbstractMesh; build one with jax.make_mesh"
        )


def _check_arguments(mesh: Any, axis: Any, config: Any, implementation: Any) -> None:
    if not isinstance(config, Config):
        raise ValueError(
            f"jax_ep.create_group: got config of type {type(config).__name__}, expected "
            f"jax_ep.Config; "
            "pass create_group(mesh, axis, jax_ep.Config(...))"
        )
    if implementation not in (None, "native", "xla"):
        raise ValueError(
            f"jax_ep.create_group: got implementation={implementation!r}, expected None, 'native' "
            f"or "
            "'xla'; use None for the best one of the platform"
        )
    axes = sharding.axis_tuple(axis)
    unknown = [name for name in axes if name not in mesh.shape]
    if not axes or unknown or len(set(axes)) != len(axes):
        raise ValueError(
            f"jax_ep.create_group: got axis={axis!r}, expected one or several distinct names of "
            f"the mesh "
            f"axes {tuple(mesh.shape)}; correct the name"
        )


def _check_sizes(config: Config, num_ranks: int) -> None:
    if config.num_experts % num_ranks:
        raise ValueError(
            f"jax_ep.create_group: got num_experts={config.num_experts}, expected a multiple of "
            f"the "
            f"group's {num_ranks} ranks; use {_config.align_up(config.num_experts, num_ranks)} "
            f"experts, "
            "or another axis"
        )
    if config.node_size is not None and num_ranks % config.node_size:
        raise ValueError(
            f"jax_ep.create_group: got node_size={config.node_size}, expected a divisor of the "
            f"group's "
            f"{num_ranks} ranks; use None for the ranks of a host"
        )
    codes = {
        "num_ranks * recv_rows": num_ranks
        * _config.expert_major_rows(config, num_ranks, config.max_tokens),
        "num_ranks * max_tokens * top_k": num_ranks * config.max_tokens * config.top_k,
    }
    for name, value in codes.items():
        if value > _config.INT32_MAX:
            raise ValueError(
                f"jax_ep.create_group: got {name} = {value}, expected at most {_config.INT32_MAX} "
                f"(plan "
                "codes are i32); lower max_tokens or capacity_factor, or use jax_ep.moe with chunks"
            )


def _owned(mesh: Any) -> bool:
    """Whether every device of the mesh belongs to this job, so that programs can run on it."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return False
    devices = set(mesh.devices.flat)
    try:
        return devices <= set(jax.devices(next(iter(devices)).platform))
    except RuntimeError:  # no such backend in this job
        return False


def _local_ranks(mesh: Any, axes: tuple[str, ...], process: int) -> tuple[int, ...]:
    """Ranks of the devices of `process`, by their coordinates along `axes`."""
    names = list(mesh.axis_names)
    ranks = set()
    for position, device in np.ndenumerate(mesh.devices):
        if device.process_index != process:
            continue
        rank = 0
        for name in axes:
            rank = rank * mesh.shape[name] + position[names.index(name)]
        ranks.add(rank)
    return tuple(sorted(ranks))


def _session_key(mesh: Any, axes: tuple[str, ...], config: Config) -> str:
    """What equal groups share; they are numbered."""
    fields = dataclasses.asdict(config) | {"dtype": config.dtype.name}
    return json.dumps([list(mesh.shape.items()), list(axes), fields], sort_keys=True)
