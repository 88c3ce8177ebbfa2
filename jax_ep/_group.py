"""Group: one expert-parallel group of ranks per coordinate of the other axes.

A value: what `create_group` was asked for and the sizes that follow. What a native group allocates
and connects is behind its handle, about which nothing is known here but the methods below.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack, cast

import numpy as np

from jax_ep import _config, _extension, _jax_compat, _memory, _mesh, _stats, _view_config, _warn
from jax_ep._config import Config, Layout, Mode
from jax_ep._memory import Memory, Platform
from jax_ep._session_number import SessionNumber
from jax_ep._stats import GroupStats
from jax_ep._view_config import ViewSizes

if TYPE_CHECKING:
    from jax_ep._placement import Placement

Implementation = Literal["native", "xla"] | None


@dataclasses.dataclass(frozen=True)
class Health:
    """State of a group as this process sees it.

    Args:
        ok: the group can be used: `Group.check` would not raise.
        message: what it would raise: the first cause of a failure, else that the group is closed.
        details: pairs of name and value: "closed", and what else the implementation reports.
    """

    ok: bool
    message: str = ""
    details: tuple[tuple[str, Any], ...] = ()


def closed_message(name: str) -> str:
    """What is wrong with a closed group that had no failure."""
    return f"group {name} is closed; create a new one"


def takes_part_message(call: str, rank: int, active: np.ndarray[Any, Any]) -> str:
    """To who would take back a rank that nobody has lost."""
    return (
        f"{call}: got rank {rank}, which takes part, expected one that does not; group.active is "
        f"{active.tolist()}"
    )


def forked_message(name: str, call: str = "") -> str:
    """What a forked child is told of its parent's group, by `call` or by all that uses it."""
    where, what = (f"{call}: ", f"call {call}") if call else ("", "use it")
    return (
        f"group {name}: {where}this process is a fork of the group's process, and takes no part in "
        f"it; {what} in the parent"
    )


class Handle(Protocol):
    """The native side of a group in this process (_runtime/session.py)."""

    name: str  # how messages and the log quote the group
    transport: str
    node_size: int

    @property
    def heap_bytes(self) -> int:
        """Bytes that it holds; 0 after close."""

    @property
    def closed(self) -> bool:
        """Whether it holds nothing any more."""

    def close(self, *, program_ended: bool) -> None:
        """As `Group.close`; `program_ended` is what ranks are told that still use the group."""

    def check(self) -> None:
        """As `Group.check`."""

    def health(self) -> Health:
        """As `Group.health`."""

    def stats(self) -> dict[str, Any]:
        """The native part of `Group.stats`."""

    @property
    def active(self) -> Any:
        """As `Group.active`; None if it is not elastic."""

    def agree(self, timeout_s: float | None) -> Any:
        """As `Group.agree`; not in a forked child."""

    def readmit(self, rank: int, timeout_s: float | None) -> None:
        """As `Group.readmit`; not in a forked child."""

    def report(self) -> str:
        """As `Group.report`."""

    def dump_state(self) -> str:
        """As `Group.dump_state`."""


_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def check_open_groups() -> None:
    """Raises the failure of any native group of this process that is still open."""
    for group in list(_open_groups):
        if not group.closed and not group._is_forked:
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
        local_ranks: tuple[int, ...],
        number: SessionNumber,
    ) -> None:
        """Use `create_group`."""
        self.mesh = mesh
        self.axis = axis
        self.axes = _mesh.axis_tuple(axis)
        self.config = config
        self.implementation = implementation
        self.native = native
        self.platform = platform
        self.lowering_only = platform is None
        self.number = number
        self.num_ranks = _mesh.axis_size(mesh, self.axes)
        self.experts_per_rank = _config.physical_experts(config) // self.num_ranks
        self.local_ranks = local_ranks  # whose devices belong to this process, over all teams
        self._handle: Handle | None = None
        self._closed = False
        self._pid = os.getpid()
        self._parent: Group | None = None  # of a view: what create_group made
        self._kept_views: dict[Any, Group] = {}

    def __repr__(self) -> str:
        """One line for messages and logs."""
        state = ", closed" if self.closed else ", lowering-only" if self.lowering_only else ""
        mode: str = self.config.mode
        if mode == "auto":
            mode += f" (ll: T <= {self.max_ll_tokens})"
        sizes = ""
        if self._parent is not None:
            state += ", view"
            sizes = f"top_k={self.config.top_k}, hidden={self.config.hidden}, "
        if self.config.wire is not None:
            sizes += f"wire={self.config.wire}, "
        if self.config.physical_experts is not None:
            sizes += f"physical_experts={self.config.physical_experts}, "
        return (
            f"Group(axis={self.axis!r}, num_ranks={self.num_ranks}, "
            f"num_experts={self.config.num_experts}, {sizes}"
            f"implementation={self.resolved!r}, mode={mode!r}, partials={self.partials!r}, "
            f"node_size={self.node_size}, transport={self.transport!r}, "
            f"heap_bytes={self.heap_bytes}{state})"
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
        """Whether it is closed: by `close`, on the group or a view, or at the program's end.

        In a forked child, whether it was at the fork.
        """
        if self._whole._closed or self._native is None or self._is_forked:
            return self._whole._closed
        return self._native.closed

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a child of the one whose group it is."""
        return os.getpid() != self._whole._pid

    def _trouble(self) -> str:
        """Why a group of `implementation="xla"` cannot be used here; nothing if it can."""
        if self._is_forked:
            return forked_message(self.name)
        return closed_message(self.name) if self.closed else ""

    @property
    def _whole(self) -> Group:
        """What create_group made."""
        return self if self._parent is None else self._parent

    @property
    def _native(self) -> Handle | None:
        return self._whole._handle

    @property
    def _label(self) -> str:
        """How messages and the log quote it, before its number: its axes and ranks."""
        return f"{'/'.join(self.axes)}[{self.num_ranks}]"

    @property
    def name(self) -> str:
        """How messages and the log quote it once it is started."""
        return self._label if self._native is None else self._native.name

    @property
    def session_id(self) -> int:
        """Signed 64-bit id, equal on all processes and in every run of the same program."""
        return self.number.session_id

    @property
    def node_size(self) -> int:
        """Ranks per node: those that load and store each other's memory."""
        if self._native is not None:
            return self._native.node_size
        return self.config.node_size or self.num_ranks

    @property
    def heap_bytes(self) -> int:
        """Bytes that the group holds for exchanges in this process."""
        return 0 if self._native is None else self._native.heap_bytes

    @property
    def transport(self) -> str:
        """Name of the transport between nodes."""
        return "xla" if self._native is None else self._native.transport

    @property
    def room_bytes(self) -> int:
        """Bytes of the largest opaque row that one exchange can move, a multiple of 16."""
        config = self._whole.config
        return config.hidden * int(config.dtype.itemsize) // 16 * 16

    @property
    def max_ht_tokens(self) -> int:
        """Tokens per rank of the largest ht call (0: none allowed)."""
        return _config.max_ht_tokens(self.config)

    @property
    def max_ll_tokens(self) -> int:
        """Tokens per rank of the largest ll call (0: none allowed)."""
        return _config.max_ll_tokens(self.config)

    @property
    def _ll_round_tokens(self) -> int:
        """Tokens per rank that a call of mode ll moves at once on GPUs; of more it takes rounds.

        0 where nobody knows, in a pure Python installation.
        """
        if self.node_size == self.num_ranks:
            return self.max_ll_tokens
        if not _extension.is_built():
            return 0
        config = self._whole.config
        is_f32 = self.partials == "float32"
        shape = _config.shape_arguments(config, self.num_ranks, self.node_size, is_f32)
        return int(_extension.load().GroupShape(**shape).gpu_ll_round_tokens)

    @property
    def partials(self) -> Literal["float32", "dtype"]:
        """What travels in combine: Config.partials, or the platform's default.

        "dtype" for native groups on GPUs, whose links are the bottleneck, else "float32".
        """
        return _config.partials(self.config, self.platform if self.native else None)

    @property
    def resolved(self) -> Implementation:
        """The implementation that operations use; None: chosen where they are lowered."""
        if self.lowering_only:
            return self.implementation
        return "native" if self.native else "xla"

    @property
    def _native_platforms(self) -> tuple[str, ...]:
        """Lowering platforms on which this group's calls are ours; the others get "xla"."""
        if self.implementation == "xla":
            return ()
        if self.lowering_only or self.native:
            return ("cpu", "cuda", "rocm")
        # On CPUs that is a group whose native half cannot start: nothing else is registered.
        return () if self.platform == "cpu" else ("cpu",)

    @property
    def _overlaps(self) -> bool:
        """Whether calls of mode ht run beside other work where they are lowered for CUDA.

        All of them or none, as calls in order would meet those beside them.
        """
        return self.config.overlap is True and _jax_compat.has_streams()

    def recv_rows(self, num_tokens: int, layout: Layout = "expert_major") -> int:
        """Receive rows R for T tokens per rank.

        Args:
            num_tokens: T.
            layout: "expert_major", "expert_batched" or "rank_major".

        Returns:
            R, static.

        Raises:
            ValueError: num_tokens is no count or above Config.max_tokens, or there is no such
                layout.

        Example:
            >>> rows = group.recv_rows(64)
        """
        if not _config.is_count(num_tokens, minimum=0) or layout not in _config.LAYOUTS:
            raise ValueError(
                f"jax_ep.Group.recv_rows: got num_tokens={num_tokens!r} and layout={layout!r}, "
                f"expected an int of at least 0 and one of {_config.LAYOUTS}"
            )
        _config.check_tokens("jax_ep.Group.recv_rows", self.config, num_tokens)
        return _config.receive_rows(self.config, self.num_ranks, num_tokens, layout)

    def memory(self, platform: Platform | None = None) -> Memory:
        """What a rank of the group takes, also of a lowering-only group, which holds nothing.

        Args:
            platform: as in `Config.memory`; None: the group's own, of a lowering-only group "cpu".

        Returns:
            A `Memory` for calls of max_tokens; of a view, with the group's heap and stages.

        Raises:
            ValueError: there is no such platform.

        Example:
            >>> heap_bytes = group.memory().heap_bytes
        """
        if platform is not None:
            _memory.check_platform("Group.memory", platform)
        if platform is None and (self.native or self.lowering_only):
            platform = "gpu" if self.platform == "gpu" else "cpu"
        if platform is None or self.implementation == "xla":
            platform = "xla"
        memory = self.config.memory(self.num_ranks, self.node_size, platform=platform)
        if self._parent is None:
            return memory
        shared = self._parent.memory(platform)
        return dataclasses.replace(
            memory,
            heap_bytes=shared.heap_bytes,
            network_stage_bytes=shared.network_stage_bytes,
        )

    def _call_mode(self, num_tokens: int, mode: Mode | None) -> Mode:
        """The mode of a call with T tokens: `mode`, else Config.mode, else by T."""
        chosen = mode or self.config.mode
        if chosen == "auto":
            return "ll" if num_tokens <= _config.AUTO_LL_TOKENS else "ht"
        return chosen

    def view(self, **sizes: Unpack[ViewSizes]) -> Group:
        """This group for a layer of other sizes: the same ranks, memory and connections.

        The group's own Config is the upper bound, so create it with the largest of all layers.
        Operations take a view where they take a group. It is no group of its own: `close` of
        either closes both, counters count the calls of all, and starts that have not met their
        done count together against `max_in_flight`. Making one allocates and sends nothing.

        Args:
            **sizes: fields of `Config` to replace. num_experts (or physical_experts, where the
                group has it), top_k and hidden may be lower; align, recv_rows, capacity_factor and
                overflow may be any that a Config takes.

        Returns:
            A `Group`. Make one per layer, not one per call: each is static under jit.

        Raises:
            ValueError: another field, a size above the group's, or sizes that no Config takes.
            RuntimeError: the group is closed.

        Example:
            >>> config = jax_ep.Config(num_experts=8, top_k=4, hidden=64, max_tokens=128)
            >>> group = jax_ep.create_group(mesh, "ep", config)
            >>> narrow = group.view(num_experts=4, top_k=1, hidden=32)
        """
        if self.closed:
            raise RuntimeError(closed_message(self.name))
        return self._make_view(sizes)

    def _make_view(self, sizes: ViewSizes) -> Group:
        whole = self._whole
        config = _view_config.shrink(whole.config, self.config, self.num_ranks, sizes)
        view = copy.copy(whole)
        view.config = config
        view.experts_per_rank = _config.physical_experts(config) // view.num_ranks
        view._parent = whole
        view._handle = None  # the whole has it, and says when it was dropped
        return view

    def _kept_view(self, **sizes: Unpack[ViewSizes]) -> Group:
        """A view for what is traced again and again: equal sizes give the same one."""
        kept: dict[Any, Group] = self._whole._kept_views
        key = (self.config, tuple(sorted(sizes.items())))
        if key not in kept:
            # Who traces an operation of a closed group is told so by the operation.
            kept[key] = self._make_view(sizes)
        return kept[key]

    def check(self) -> None:
        """Raises what made the group fail, if anything did; cheap, waits for nothing.

        Raises:
            RuntimeError: the first cause, that the group is closed, or that this is a forked child.
        """
        if self._native is not None:
            self._native.check()
        elif trouble := self._trouble():
            raise RuntimeError(trouble)

    @property
    def active(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Which ranks take part: i32[N], 1 = active. What the newest `agree` returned."""
        mask = None if self._native is None else self._native.active
        return np.ones(self.num_ranks, np.int32) if mask is None else mask

    def agree(self, timeout_s: float | None = None) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Decides with the other living processes who goes on, and makes the group work again.

        For groups with `Config(elastic=True)`. Call it on every living process, from the thread
        that runs the group's programs, after a call has failed because a process died, or after
        `readmit`. It waits for this process's executions, then for the other processes: until each
        of them has called it too, or is known to be lost. From then on the group works with those
        alone, as after `create_group`: give the result to `plan` and `dispatch` as `active`. No
        program is compiled again; what `stats` counts begins anew.

        A process that others have left out, as it was stopped for longer than peer_timeout_s or
        came later than their timeout_s, finds out here or at its next call of the group.

        Args:
            timeout_s: processes that have not come by then are left out, also if they live. None:
                Config.timeout_s.

        Returns:
            i32[N], 1 for each rank that takes part, equal on all of them.

        Raises:
            ValueError: the group is not elastic, or timeout_s is no time of at least 0.1 s: in less
                nobody can come.
            RuntimeError: the others have left this process out, the group is closed, or this is a
                forked child.
            TimeoutError: executions of this process did not end, or no connections could be made.

        Example:
            >>> import dataclasses
            >>> elastic = dataclasses.replace(config, elastic=True)
            >>> with jax_ep.create_group(mesh, "ep", elastic) as group_of_four:
            ...     group_of_four.agree().tolist()
            [1, 1, 1, 1]
        """
        limit_s = self._limit_of("agree", timeout_s, _config.MIN_TIMEOUT_S)
        if self._native is None:  # XLA's collectives need all ranks
            self.check()
            return self.active
        mask: np.ndarray[Any, np.dtype[np.int32]] = self._native.agree(limit_s)
        return mask

    def readmit(self, rank: int, timeout_s: float | None = None) -> None:
        """Lets a process that was started again take part from the next `agree` on.

        That process calls `create_group` with the same arguments, which returns when the others
        have agreed. Call this on one of them at least, or on all, then `agree` on all.

        Args:
            rank: a rank of that process, which does not take part now.
            timeout_s: how long to wait for its `create_group`; 0: it waits there already. None:
                Config.timeout_s.

        Raises:
            ValueError: the group is not elastic, it has no such rank, the rank takes part, or
                timeout_s is no time.
            RuntimeError: the others have left this process out, the group is closed, or this is a
                forked child.
            TimeoutError: the process has not called `create_group` of this group.

        Example:
            After the process of rank 2 was started again, on every survivor::

                group.readmit(2)
                active = group.agree()
        """
        limit_s = self._limit_of("readmit", timeout_s, 0.0)
        if not _config.is_count(rank, minimum=0) or rank >= self.num_ranks:
            raise ValueError(
                f"jax_ep.Group.readmit: got rank {rank!r}, expected one of the group's "
                f"{self.num_ranks}, from 0"
            )
        if self._native is not None:
            self._native.readmit(rank, limit_s)
            return
        self.check()
        raise ValueError(takes_part_message("jax_ep.Group.readmit", rank, self.active))

    def _limit_of(self, what: str, timeout_s: float | None, least_s: float) -> float | None:
        """`timeout_s` of a call of an elastic group, as Python's float; raises in a child."""
        # A child is not to be told to create the group anew, nor to wait for a lock of the native
        # side, which may have been held at the fork.
        if self._is_forked:
            raise RuntimeError(forked_message(self.name, what))
        if not self.config.elastic:
            raise ValueError(
                f"jax_ep.Group.{what}: got a group of Config.elastic=False, expected "
                "Config(elastic=True); create the group with it"
            )
        if timeout_s is None:
            return None
        limit_s = _config.as_float(timeout_s)
        if not least_s <= limit_s <= _config.MAX_TIMEOUT_S:
            raise ValueError(
                f"jax_ep.Group.{what}: got timeout_s={timeout_s!r}, expected seconds from "
                f"{least_s:g} to {_config.MAX_TIMEOUT_S:g}; leave it out for Config.timeout_s"
            )
        return limit_s

    def stats(self) -> GroupStats:
        """Counters since creation, as plain values; `GroupStats` says what they mean.

        On GPUs they are copied from the device: what still runs there is not in them yet.
        """
        head: GroupStats = {
            "implementation": "xla" if self._native is None else "native",
            "num_ranks": self.num_ranks,
            "heap_bytes": self.heap_bytes,
        }
        return head if self._native is None else cast(GroupStats, head | self._native.stats())

    def wait_ns(self, phase: str | None = None, team: int = 0) -> np.ndarray[Any, Any]:
        """How long ranks have waited for each other since creation; of "xla", zeros.

        Args:
            phase: "plan", "dispatch", "combine" or "reuse" (`RankStats.wait_by_peer`); None: all.
            team: which of the group's teams (0 in a group over one axis of the mesh).

        Returns:
            Nanoseconds, i64[N, N], where [i, j] is how long rank i has waited for rank j. Rows of
            ranks of other processes are zeros.

        Raises:
            ValueError: there is no such phase or team.

        Example:
            >>> waits = group.wait_ns()
            >>> slowest = waits.sum(axis=0).argmax()  # whom the others wait for
        """
        num_teams = self.mesh.size // self.num_ranks
        if team not in range(num_teams):
            raise ValueError(
                f"Group.wait_ns: got team={team!r}, expected one of the group's {num_teams}, from 0"
            )
        ranks = self.stats().get("ranks", ())
        return _stats.wait_matrix(self.num_ranks, ranks, phase, team)

    def expert_load(
        self, placement: Placement | None = None, *, all_processes: bool = False
    ) -> np.ndarray[Any, Any]:
        """Rows per logical expert since creation, of all plans and from all ranks.

        What `jax_ep.eplb.rebalance` wants is the difference of two readings: stack those of the
        layers, whose groups count apart. The counters are by slot: read them before another
        placement comes into use, and subtract that reading from later ones. `agree` begins them
        anew. What `eplb.move` and `eplb.reduce_gradients` exchange is no load.

        Args:
            placement: the one that was used; None if the group has as many slots as experts and
                plans were given none.
            all_processes: sum over all processes of the job, a collective: every process calls it,
                outside of jit. Else experts that live on other processes alone have 0.

        Returns:
            The pairs (token, k) of each expert, i64[E]. Views of the group count into their own
            local indices of it.

        Raises:
            ValueError: no placement where one is needed, one of other sizes, all processes of a
                group that has lost some, or the group has `implementation="xla"`, which counts
                nothing.
            RuntimeError: all processes of a group that has failed or is closed, or in a forked
                child.

        Example:
            >>> load = group.expert_load()
            >>> load.shape
            (8,)
        """
        if all_processes and self._is_forked:  # it would wait for the others for ever
            raise RuntimeError(forked_message(self.name, "expert_load(all_processes=True)"))
        if self._native is None:
            raise ValueError(
                f'Group.expert_load: group {self.name} has implementation="xla", which counts '
                "nothing; sum jax_ep.routing.expert_load of the ids instead"
            )
        if all_processes:  # the others may be gone
            self.check()
        if all_processes and not self.active.all():
            raise ValueError(
                f"Group.expert_load: got all_processes=True in group {self.name}, which has lost "
                "ranks, expected all of them; sum over the living processes yourself"
            )
        config = self._whole.config
        ranks = self.stats().get("ranks", ())
        slots = _stats.pairs_per_slot(ranks, _config.physical_experts(config))
        load = _stats.pairs_per_logical(slots, placement, config.num_experts)
        return _stats.sum_over_processes(load) if all_processes else load

    def health(self) -> Health:
        """State of the group as this process sees it.

        Not ok once it has failed or is closed, nor in a forked child of the group's process.
        """
        if self._native is not None:
            return self._native.health()
        message = self._trouble()
        return Health(ok=not message, message=message, details=(("closed", self.closed),))

    def report(self) -> str:
        """Who hangs: one page, its first line names the culprit; waits for nothing.

        Then a line for each rank: its call, operation and epoch, the file and line of the program
        that made the call, and for whom it has waited how long; then the flows to other nodes with
        their windows. This process sees its own ranks and those of its node; of other nodes it
        knows the flows. The same page goes to the log when a rank has waited longer than a tenth of
        timeout_s.

        Returns:
            The page. With `implementation="xla"`, which keeps no books, what the group is.
        """
        return f"{self!r}\n" if self._native is None else self._native.report()

    def dump_state(self) -> str:
        """The report, and all else that the group knows about itself, for a bug report."""
        if self._native is None:
            return repr(self)
        return f"{self!r}\n{self._native.dump_state()}"

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
            _warn.warn(text, ResourceWarning, source=self)

    def _attach(self, handle: Handle) -> None:
        """Gives the group its native side, which `create_group` has started."""
        self._handle = handle
        _open_groups.add(self)

    def _close(self, *, program_ended: bool) -> None:
        if self._is_forked:  # the group is the parent's
            return
        self._whole._closed = True
        if self._native is not None:
            self._native.close(program_ended=program_ended)
