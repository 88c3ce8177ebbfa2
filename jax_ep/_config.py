"""Config: what a group is, validated at construction, and the sizes that follow from it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

Mode = Literal["ht", "ll"]
Layout = Literal["expert_major", "expert_batched", "rank_major"]
Pad = Literal["zero", "undefined"]

LAYOUTS: tuple[Layout, ...] = ("expert_major", "expert_batched", "rank_major")
MODES: tuple[Mode, ...] = ("ht", "ll")
PADS: tuple[Pad, ...] = ("zero", "undefined")

AUTO_LL_TOKENS = 128  # mode="auto" picks ll up to here: decode batches
MAX_LL_TOKENS = 512  # tokens per rank of an ll call: its slots are allocated for all of them
MAX_TOP_K = 64
MAX_IN_FLIGHT = 7  # with the call that waits for a set, half of a command's 4-bit epochs
INT32_MAX = 2**31 - 1  # plan codes are i32

_DTYPES = ("bfloat16", "float16", "float32")
_TRANSPORTS = ("auto", "loopback", "shm", "ofi", "verbs")


@dataclasses.dataclass(frozen=True)
class FP8:
    """FP8 e4m3 wire format: one scale per `block` values along hidden.

    Args:
        block: values that share a scale.
        scale: "float32", or "ue8m0" (powers of two).
    """

    block: int = 128
    scale: Literal["float32", "ue8m0"] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static description of an expert-parallel group; frozen, hashable, validated.

    Args:
        num_experts: experts E of the whole group; must be a multiple of its ranks.
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
        wire: None (= dtype); FP8 is not implemented yet.
        transport: "auto", "loopback", "shm", "ofi" or "verbs".
        node_size: ranks per node; None: those that share a host.
        timeout_s: bound on waiting for a live but late rank, in seconds.
        peer_timeout_s: silence after which a process counts as gone, in seconds.
        max_in_flight: how many starts may precede their done, 1 to 7.

    Raises:
        ValueError: a field is out of range; says got, expected and the fix.
        NotImplementedError: wire=FP8.

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
    transport: str = "auto"
    node_size: int | None = None
    timeout_s: float = 600.0
    peer_timeout_s: float = 15.0
    max_in_flight: int = 2

    def __post_init__(self) -> None:
        """Normalises the dtype and validates every field that needs no mesh."""
        for name in ("num_experts", "top_k", "hidden", "align", "max_in_flight"):
            _check_int(name, getattr(self, name), minimum=1)
        _check_int("max_tokens", self.max_tokens, minimum=0)
        for name in ("recv_rows", "node_size"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), minimum=1)
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
        _check_choice("transport", self.transport, _TRANSPORTS)
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
        for name in ("capacity_factor", "timeout_s", "peer_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise _bad(name, value, "a finite number above 0", "pick one")
        if self.mode == "ll" and self.max_tokens > MAX_LL_TOKENS:
            raise _bad(
                "max_tokens",
                self.max_tokens,
                f"at most {MAX_LL_TOKENS} with mode='ll'",
                "lower it, or use mode='ht' or 'auto'",
            )
        if self.wire is not None:
            raise NotImplementedError(
                f"Config got wire={self.wire}; the FP8 wire is not implemented in this version; "
                "use wire=None"
            )


def _bad(name: str, got: object, expected: str, fix: str) -> ValueError:
    return ValueError(f"Config.{name}: got {got!r}, expected {expected}; {fix}")


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise _bad(name, value, f"an int of at least {minimum}", "correct it")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise _bad(name, value, f"one of {listed}", "correct it")


def align_up(value: int, align: int) -> int:
    """`value` rounded up to a multiple of `align`."""
    return -(-value // align) * align


def expert_major_rows(config: Config, num_ranks: int, num_tokens: int) -> int:
    """R(T) of the expert_major layout (docs/semantics.md, "Receive rows")."""
    if config.recv_rows is not None:
        return config.recv_rows
    experts_per_rank = config.num_experts // num_ranks
    pairs = num_ranks * num_tokens * config.top_k
    worst = (
        (pairs + min(experts_per_rank, pairs) * (config.align - 1)) // config.align * config.align
    )
    if config.capacity_factor is None:
        return worst
    wanted = align_up(math.ceil(config.capacity_factor * num_tokens * config.top_k), config.align)
    return min(worst, wanted + experts_per_rank * config.align)


def receive_rows(config: Config, num_ranks: int, num_tokens: int, layout: Layout) -> int:
    """Rows R of `layout` for T tokens per rank."""
    if layout == "expert_major":
        return expert_major_rows(config, num_ranks, num_tokens)
    if layout == "expert_batched":
        return config.num_experts * num_tokens  # E_l * N * T
    return num_ranks * num_tokens


def max_ht_tokens(config: Config) -> int:
    """Tokens per rank of the largest ht call (0: the group has no ht buffers)."""
    return 0 if config.mode == "ll" else config.max_tokens


def max_ll_tokens(config: Config) -> int:
    """Tokens per rank of the largest ll call (0: the group has no ll buffers)."""
    if config.mode == "ht":
        return 0
    return min(config.max_tokens, MAX_LL_TOKENS if config.mode == "ll" else AUTO_LL_TOKENS)
