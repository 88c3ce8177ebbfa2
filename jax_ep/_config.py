"""Config: what a group is, validated at construction, and the sizes that follow from it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeGuard

import jax.numpy as jnp
import numpy as np

from jax_ep import _memory
from jax_ep._fp8_format import FP8
from jax_ep._memory import Memory, Platform

Mode = Literal["ht", "ll"]
Layout = Literal["expert_major", "expert_batched", "rank_major"]
Pad = Literal["zero", "undefined"]

LAYOUTS: tuple[Layout, ...] = ("expert_major", "expert_batched", "rank_major")
MODES: tuple[Mode, ...] = ("ht", "ll")
PADS: tuple[Pad, ...] = ("zero", "undefined")

AUTO_LL_TOKENS = 128  # mode="auto" picks ll up to here: decode batches
MAX_LL_TOKENS = 512  # tokens per rank of an ll call: ids and weights of all have room
MAX_TOP_K = 64
MAX_IN_FLIGHT = 7  # with the call that waits for a set, half of a command's 4-bit epochs
INT32_MAX = 2**31 - 1  # plan codes are i32
MIN_TIMEOUT_S = 0.1  # a busy host keeps a heartbeat back for longer than less
MAX_TIMEOUT_S = 1e9  # 30 years; clocks count nanoseconds in 64 bits
DEFAULT_PEER_TIMEOUT_S = 15.0

_DTYPES = ("bfloat16", "float16", "float32")
_ELEM_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # kernels/layout.h ElemType
TRANSPORTS = ("auto", "loopback", "shm", "cuda", "ofi", "verbs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static description of an expert-parallel group; frozen, hashable, validated.

    Args:
        num_experts: experts E of the whole group; must be a multiple of its ranks, unless
            physical_experts is given.
        top_k: expert slots K per token, 1 to 64.
        hidden: elements H of a row.
        max_tokens: largest number of tokens T per rank and call.
        recv_rows: receive rows R per rank, a multiple of `align`; None: see `capacity_factor`.
        capacity_factor: receive rows as a multiple of T*K. Neither given: the worst case, in which
            nothing is ever dropped.
        overflow: "drop" (pairs beyond R are dropped and counted) or "poison" (NaN results).
        align: rows of each expert's zone are padded up to a multiple of this.
        dtype: bfloat16, float16 or float32; the dtype of x, y and results.
        mode: "ht", "ll", or "auto": ll when T <= 128.
        partials: None, "float32" or "dtype": what travels in combine.
        wire: what rows of a dispatch travel as: None (dtype), or an `FP8`, whose block divides
            hidden. Gradients are those of None (docs/fp8.md).
        wire_backward: with a wire, cotangents that combine's gradient dispatches travel so, too.
        transport: what moves rows between nodes: "auto", "loopback", "shm", "cuda", "ofi" or
            "verbs" (docs/transports.md).
        node_size: ranks per node; None: those that share a host.
        timeout_s: bound on waiting for a live but late rank, in seconds from 0.1 to 1e9.
        peer_timeout_s: silence after which a process counts as gone, in seconds, at most timeout_s.
            None: 15, or timeout_s if that is less.
        max_in_flight: how many starts may precede their done, 1 to 7 (in mode ht on GPUs any
            number may).
        overlap: True: operations of mode ht run beside other work on NVIDIA GPUs, which needs jax
            0.10.2, or 0.11.1 or newer. None: as False today, since it has not paid where it was
            measured (docs/overlap.md). On other platforms nothing changes.
        physical_experts: slots P for experts of the whole group, a multiple of its ranks and at
            least num_experts: room for replicas, which a `Placement` fills (docs/placement.md).
            Sizes that speak of E_l local experts then have P / N. None: num_experts.
        batch_invariant: True: combine adds a token's rows in the order of its slots, so that the
            sum does not depend on where the experts are: not on ranks, nodes or replicas. It takes
            top_k exchanges instead of one, and no rank_major (docs/placement.md).
        elastic: the group can go on without ranks that died (`Group.agree`, docs/failure.md). For
            groups over all axes of their mesh; on GPUs for those of one node.

    Raises:
        ValueError: a field is out of range; says got, expected and the fix.

    Example:
        >>> config = jax_ep.Config(num_experts=8, top_k=2, hidden=64, max_tokens=128)
    """

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    recv_rows: int | None = None
    capacity_factor: float | None = None
    overflow: Literal["drop", "poison"] = "drop"
    align: int = 128
    dtype: Any = jnp.bfloat16
    mode: Literal["ht", "ll", "auto"] = "auto"
    partials: Literal["float32", "dtype"] | None = None
    wire: FP8 | None = None
    wire_backward: bool = False
    transport: str = "auto"
    node_size: int | None = None
    timeout_s: float = 600.0
    peer_timeout_s: float | None = None
    max_in_flight: int = 2
    overlap: bool | None = None
    physical_experts: int | None = None
    batch_invariant: bool = False
    elastic: bool = False

    def __post_init__(self) -> None:
        """Normalises the dtype and validates every field that needs no mesh."""
        for name, as_number in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, as_number(f"Config.{name}", value))
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in _DTYPES:
            raise _bad(
                "dtype", self.dtype, f"one of {', '.join(_DTYPES)}", "cast x and y to one of them"
            )
        object.__setattr__(self, "dtype", dtype)
        _check_choice("overflow", self.overflow, ("drop", "poison"))
        _check_choice("mode", self.mode, ("auto", *MODES))
        _check_choice("partials", self.partials, (None, "float32", "dtype"))
        _check_choice("transport", self.transport, TRANSPORTS)
        if self.max_in_flight > MAX_IN_FLIGHT:
            raise _bad(
                "max_in_flight",
                self.max_in_flight,
                f"at most {MAX_IN_FLIGHT}",
                "finish calls earlier",
            )
        if self.top_k > MAX_TOP_K:
            raise _bad(
                "top_k",
                self.top_k,
                f"at most {MAX_TOP_K}",
                "split the token's experts over two calls",
            )
        if self.top_k > self.num_experts:
            raise _bad(
                "top_k",
                self.top_k,
                f"at most num_experts={self.num_experts}",
                "lower top_k or add experts",
            )
        if physical_experts(self) < self.num_experts:
            raise _bad(
                "physical_experts",
                self.physical_experts,
                f"at least num_experts={self.num_experts}",
                "raise it, or leave it out",
            )
        if self.recv_rows is not None and self.capacity_factor is not None:
            raise ValueError(
                f"Config got both recv_rows={self.recv_rows} and capacity_factor="
                f"{self.capacity_factor}; expected at most one; remove one of them"
            )
        if self.recv_rows is not None and self.recv_rows % self.align:
            raise _bad(
                "recv_rows",
                self.recv_rows,
                f"a multiple of align={self.align}",
                f"use {align_up(self.recv_rows, self.align)}",
            )
        if self.peer_timeout_s is not None and self.peer_timeout_s > self.timeout_s:
            raise _bad(
                "peer_timeout_s",
                self.peer_timeout_s,
                f"at most timeout_s={self.timeout_s}",
                "lower it, or leave it out",
            )
        if self.mode == "ll" and self.max_tokens > MAX_LL_TOKENS:
            raise _bad(
                "max_tokens",
                self.max_tokens,
                f"at most {MAX_LL_TOKENS} with mode='ll'",
                "lower it, or use mode='ht' or 'auto'",
            )
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise _bad(
                "overlap", self.overlap, "None, True or False", "pass a bool or leave it out"
            )
        for name in ("batch_invariant", "elastic", "wire_backward"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False", "pass a bool")
        self._check_wire()

    def _check_wire(self) -> None:
        if self.wire is None:
            if self.wire_backward:
                raise _bad("wire_backward", True, "False without a wire", "set wire=jax_ep.FP8()")
            return
        if not isinstance(self.wire, FP8):
            raise _bad("wire", self.wire, "None or a jax_ep.FP8", "pass jax_ep.FP8()")
        if wrong := self.wire.misfit(self.hidden, self.dtype):
            raise ValueError(f"Config.wire: got {self.wire}, expected {wrong}; or leave wire out")

    def memory(
        self,
        num_ranks: int,
        node_size: int | None = None,
        *,
        platform: Platform = "cpu",
        num_tokens: int | None = None,
    ) -> Memory:
        """What a rank of a group of this Config takes; allocates nothing, needs no device.

        Args:
            num_ranks: ranks of the group.
            node_size: ranks per node; None: Config.node_size, else all in one node.
            platform: "cpu", "gpu" or "xla": where the group's operations run.
            num_tokens: tokens per rank of the call whose rows are counted, at most max_tokens, as
                which None counts.

        Returns:
            A `Memory`. With "gpu" its heap and network stage are known where the GPU library is
            installed, which needs no GPU.

        Raises:
            ValueError: num_ranks, node_size or num_tokens do not fit, or there is no such platform.

        Example:
            >>> memory = config.memory(8, node_size=4, platform="gpu")
        """
        where = "jax_ep.Config.memory"
        _as_count(f"{where} num_ranks", num_ranks)
        if node_size is None:
            node_size = self.node_size or num_ranks
        _as_count(f"{where} node_size", node_size)
        check_sizes(where, dataclasses.replace(self, node_size=node_size), num_ranks)
        tokens = self.max_tokens if num_tokens is None else num_tokens
        _as_count(f"{where} num_tokens", tokens, minimum=0)
        check_tokens(where, self, tokens)
        f32_partials = partials(self, platform) == "float32"
        return _memory.measure(
            where,
            shape_arguments(self, num_ranks, node_size, f32_partials),
            platform,
            tokens,
            recv_rows={name: receive_rows(self, num_ranks, tokens, name) for name in LAYOUTS},
            row_bytes=self.hidden * self.dtype.itemsize,
        )


def _bad(name: str, got: object, expected: str, fix: str) -> ValueError:
    return ValueError(f"Config.{name}: got {got!r}, expected {expected}; {fix}")


def is_count(value: object, minimum: int = 1) -> TypeGuard[int]:
    """Whether `value` is an int, also of NumPy's but no bool, of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return bool(value >= minimum)


def _as_count(name: str, value: object, minimum: int = 1) -> int:
    if not is_count(value, minimum):
        raise ValueError(f"{name}: got {value!r}, expected an int of at least {minimum}")
    if value > INT32_MAX:
        raise ValueError(f"{name}: got {value!r}, expected at most {INT32_MAX}")
    return int(value)


def _as_factor(name: str, value: object) -> float:
    if not 0 < (number := as_float(value)) < math.inf:
        raise ValueError(
            f"{name}: got {value!r}, expected a finite number above 0; use None for the worst case"
        )
    return number


def _as_seconds(name: str, value: object) -> float:
    if not MIN_TIMEOUT_S <= (number := as_float(value)) <= MAX_TIMEOUT_S:
        raise ValueError(
            f"{name}: got {value!r}, expected seconds from {MIN_TIMEOUT_S:g} to "
            f"{MAX_TIMEOUT_S:g}; use {MAX_TIMEOUT_S:g} for no bound in practice"
        )
    return number


def as_float(value: object) -> float:
    """`value` as Python's float; NaN if it is no real number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


# Numbers become Python's: what processes compare is the text of their configs.
_NUMBERS: dict[str, Callable[[str, object], int | float]] = {
    **dict.fromkeys(
        (
            "num_experts",
            "top_k",
            "hidden",
            "recv_rows",
            "align",
            "node_size",
            "max_in_flight",
            "physical_experts",
        ),
        _as_count,
    ),
    "max_tokens": partial(_as_count, minimum=0),
    "capacity_factor": _as_factor,
    "timeout_s": _as_seconds,
    "peer_timeout_s": _as_seconds,
}
_OPTIONAL = ("recv_rows", "node_size", "capacity_factor", "peer_timeout_s", "physical_experts")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"Config.{name}: got {value!r}, expected one of {listed}")


def align_up(value: int, align: int) -> int:
    """`value` rounded up to a multiple of `align`."""
    return -(-value // align) * align


def physical_experts(config: Config) -> int:
    """Expert slots P of a group: what its plans, rows and kernels count as experts."""
    return config.num_experts if config.physical_experts is None else config.physical_experts


def expert_major_rows(config: Config, num_ranks: int, num_tokens: int) -> int:
    """R(T) of the expert_major layout (docs/semantics.md, "Receive rows")."""
    if config.recv_rows is not None:
        return config.recv_rows
    experts_per_rank = physical_experts(config) // num_ranks
    pairs = num_ranks * num_tokens * config.top_k
    worst = (
        (pairs + min(experts_per_rank, pairs) * (config.align - 1)) // config.align * config.align
    )
    if config.capacity_factor is None:
        return worst
    wanted = config.capacity_factor * num_tokens * config.top_k
    if wanted >= worst:
        return worst
    return min(worst, align_up(math.ceil(wanted), config.align) + experts_per_rank * config.align)


def receive_rows(config: Config, num_ranks: int, num_tokens: int, layout: Layout) -> int:
    """Rows R of `layout` for T tokens per rank."""
    if layout == "expert_major":
        return expert_major_rows(config, num_ranks, num_tokens)
    if layout == "expert_batched":
        return physical_experts(config) * num_tokens  # E_l * N * T
    return num_ranks * num_tokens


def max_ht_tokens(config: Config) -> int:
    """Tokens per rank of the largest ht call (0: the group has no ht buffers)."""
    return 0 if config.mode == "ll" else config.max_tokens


def max_ll_tokens(config: Config) -> int:
    """Tokens per rank of the largest ll call (0: the group has no ll buffers)."""
    if config.mode == "ht":
        return 0
    return min(config.max_tokens, MAX_LL_TOKENS if config.mode == "ll" else AUTO_LL_TOKENS)


def peer_timeout_s(config: Config) -> float:
    """Silence after which a process of a group counts as gone."""
    if config.peer_timeout_s is not None:
        return config.peer_timeout_s
    return min(DEFAULT_PEER_TIMEOUT_S, config.timeout_s)


def check_tokens(operation: str, config: Config, num_tokens: int) -> None:
    """Raises ValueError if no call of a group of `config` has so many tokens per rank."""
    if num_tokens > config.max_tokens:
        raise ValueError(
            f"{operation}: got T={num_tokens} tokens per rank, expected at most "
            f"max_tokens={config.max_tokens}; raise Config.max_tokens or split the tokens "
            "(jax_ep.moe with chunks)"
        )


def check_sizes(operation: str, config: Config, num_ranks: int) -> None:
    """Raises ValueError unless `config` fits a group of `num_ranks` ranks."""
    slots = physical_experts(config)
    if slots % num_ranks:
        name = "num_experts" if config.physical_experts is None else "physical_experts"
        raise ValueError(
            f"{operation}: got {name}={slots}, expected a multiple of "
            f"the group's {num_ranks} ranks; use {name}={align_up(slots, num_ranks)}, or another "
            "axis"
        )
    if config.node_size is not None and num_ranks % config.node_size:
        raise ValueError(
            f"{operation}: got node_size={config.node_size}, expected a divisor of the "
            f"group's {num_ranks} ranks; use None for the ranks of a host"
        )
    rows = expert_major_rows(config, num_ranks, config.max_tokens)
    codes = {
        "num_ranks * recv_rows": num_ranks * rows,
        "num_ranks * max_tokens * top_k": num_ranks * config.max_tokens * config.top_k,
    }
    for name, value in codes.items():
        if value > INT32_MAX:
            raise ValueError(
                f"{operation}: got {name} = {value}, expected at most {INT32_MAX} "
                "(plan codes are i32); lower max_tokens, align or the capacity, or use jax_ep.moe "
                "with chunks"
            )


def partials(config: Config, platform: str | None) -> Literal["float32", "dtype"]:
    """What travels in combine: Config.partials, or the default of native groups on `platform`.

    "dtype" on GPUs, whose links are the bottleneck, else "float32".
    """
    return config.partials or ("dtype" if platform == "gpu" else "float32")


def shape_arguments(
    config: Config, num_ranks: int, node_size: int, f32_partials: bool
) -> dict[str, Any]:
    """The kernels' GroupShape (kernels/layout.h) as keyword arguments of `_core`."""
    return {
        "num_ranks": num_ranks,
        "node_size": node_size,
        "num_experts": physical_experts(config),
        "top_k": config.top_k,
        "align": config.align,
        "hidden": config.hidden,
        "max_tokens": config.max_tokens,
        "ll_tokens": max_ll_tokens(config),
        "elem_type": _ELEM_TYPES[config.dtype.name],
        "f32_partials": f32_partials,
        "has_ht": config.mode != "ll",
        "depth": config.max_in_flight,
    }
