"""Plan, Received and InFlight: the arrays that ops return, as pytrees that can be exported."""

from __future__ import annotations

import ast
import dataclasses
import enum
from typing import Any, Literal, NamedTuple

import jax

from jax_ep import _jax_compat, _warn
from jax_ep._config import Layout, Mode, Pad


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every (token, k) pair goes: i32 arrays and three static fields, no pointers.

    A plan can be saved, scanned over, rematerialised, and reused for another payload.
    N ranks, E_l local experts (with a placement a rank's slots), T tokens, K = top_k, R receive
    rows (docs/semantics.md).

    Args:
        group_sizes: i32[E_l], rows of each local expert, padding included: what ragged_dot and
            grouped products take. Multiples of Config.align in expert_major; pairs in rank_major.
        pairs_per_expert: i32[E_l], (token, k) pairs that each local expert kept: its load. At most
            group_sizes, and equal to them in the other layouts.
        send_slot: i32[T, K], destination rank * R + row (mode ht) or destination rank * N*T +
            source rank * T + t (mode ll); -1 for dropped or absent pairs.
        recv_src: i32[R], source rank * max_tokens*K + t*K + k of each row, -1 for padding.
        send_counts: i32[N], pairs kept by each destination.
        recv_counts: i32[N], pairs kept from each source.
        num_dropped: i32[], this rank's pairs that were dropped.
        overflow: i32[], 1 if any rank of the group dropped a pair; uniform over the group.
        recv_topk_idx: i32[N, T, K] local expert ids (-1 elsewhere) in rank_major, else None.
        num_unreachable: i32[], this rank's pairs whose expert lives on a rank that is not active;
            they are not among num_dropped. None where `active` was not given.
        layout: static.
        mode: static.
        max_tokens: static, Config.max_tokens of the group that made it: recv_src counts in it.
            None: made before this was kept, and not checked.
    """

    group_sizes: jax.Array
    pairs_per_expert: jax.Array
    send_slot: jax.Array
    recv_src: jax.Array
    send_counts: jax.Array
    recv_counts: jax.Array
    num_dropped: jax.Array
    overflow: jax.Array
    recv_topk_idx: jax.Array | None
    layout: Layout
    mode: Mode
    max_tokens: int | None = None
    num_unreachable: jax.Array | None = None

    @property
    def group_counts(self) -> jax.Array:
        """Deprecated: `pairs_per_expert`."""
        _warn.warn(
            "jax_ep.Plan.group_counts is now pairs_per_expert; ragged_dot takes group_sizes",
            DeprecationWarning,
        )
        return self.pairs_per_expert


ScalesLayout = Literal["rows", "columns"]


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Rows in FP8 as `dispatch_quantized` delivers them; `values * scales` are the rows.

    Args:
        values: float8_e4m3fn, shaped as the `Received.x` of a dispatch, [..., R, H].
        scales: one for each block of elements: float32 or float8_e8m0fnu [..., R, H / block], or
            [..., H / block, R] with scales_layout="columns".
        carrier: zeros in Config.dtype, shaped as values. Whoever computes with the values and
            wants gradients gives this the cotangent of the rows (`jax.custom_vjp`), since float8
            would flush it: it is what flows back to the tokens. Of values and scales nothing does.
            `jax_ep.fp8.rows` does so.
        scales_layout: static.
    """

    values: jax.Array
    scales: jax.Array
    carrier: jax.Array
    scales_layout: ScalesLayout = "rows"


@dataclasses.dataclass(frozen=True)
class Received:
    """What dispatch delivers to this rank's experts; combine takes all of it.

    Args:
        x: rows, [R, H], [E_l, N*T, H] or [N, T, H] by layout.
        weights: f32[R] (rank_major: f32[N, T, K]), or None if dispatch got none.
        group_sizes: i32[E_l], rows of each local expert in `x`, padding included: what ragged_dot
            takes. (How many pairs they hold: `plan.pairs_per_expert`.)
        plan: the `Plan` that was followed.
        topk_idx: rank_major: i32[N, T, K] local expert ids, -1 elsewhere; else None.
    """

    x: jax.Array
    weights: jax.Array | None
    group_sizes: jax.Array
    plan: Plan
    topk_idx: jax.Array | None


@dataclasses.dataclass(frozen=True)
class ReceivedQuantized(Received):
    """What dispatch_quantized delivers: a `Received` whose rows are `Quantized`."""

    x: Quantized  # type: ignore[assignment]  # in place of an array


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A started dispatch or combine; hand it to exactly one matching done.

    It carries its inputs, so that gradients flow through them, and the epoch of the exchange: 0
    where the done does all of the work, as in mode ht on GPUs and with `implementation="xla"`.
    `maker` is the group or view that started it (None: saved before that was kept).
    """

    rows: jax.Array
    weights: jax.Array | None
    topk_idx: jax.Array | None
    plan: Plan | None
    epoch: jax.Array
    kind: Literal["dispatch", "combine"]
    layout: Layout
    mode: Mode
    pad: Pad
    maker: tuple[int | str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ExchangeStats:
    """What one call of `moe` kept and dropped, all chunks together.

    Args:
        pairs_per_expert: i32[E_l], (token, k) pairs that each of this rank's experts computed.
        num_dropped: i32[], pairs of this rank's tokens that were dropped.
        overflow: i32[], 1 if any rank of the group dropped a pair; uniform over the group.
        num_unreachable: i32[], pairs of this rank's tokens whose expert lives on a rank that is not
            active; None where `active` was not given.
    """

    pairs_per_expert: jax.Array
    num_dropped: jax.Array
    overflow: jax.Array
    num_unreachable: jax.Array | None = None


class NotGiven(enum.Enum):
    """The default of an argument for which None means something else."""

    NOT_GIVEN = enum.auto()

    def __repr__(self) -> str:
        """As signatures show it."""
        return self.name


NOT_GIVEN = NotGiven.NOT_GIVEN


class Route(NamedTuple):
    """The plan leaves that moving rows needs."""

    send_slot: jax.Array
    recv_src: jax.Array
    recv_topk_idx: jax.Array | None


class PlanArrays(NamedTuple):
    """The leaves of a Plan in the order in which implementations return them."""

    group_sizes: jax.Array
    pairs_per_expert: jax.Array
    send_slot: jax.Array
    recv_src: jax.Array
    send_counts: jax.Array
    recv_counts: jax.Array
    num_dropped: jax.Array
    overflow: jax.Array
    recv_topk_idx: jax.Array | None

    def route(self) -> Route:
        """The leaves that moving rows needs."""
        return Route(self.send_slot, self.recv_src, self.recv_topk_idx)


def _register(cls: type, static: tuple[str, ...]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    jax.tree_util.register_dataclass(
        cls, data_fields=[name for name in names if name not in static], meta_fields=list(static)
    )

    def to_static(data: bytes) -> Any:
        saved = tuple(ast.literal_eval(data.decode()))
        # None for static fields that came after it was saved.
        return saved + (None,) * (len(static) - len(saved))

    _jax_compat.register_export_serialization(cls, f"jax_ep.{cls.__name__}", to_static)


_register(Plan, ("layout", "mode", "max_tokens"))
_register(Quantized, ("scales_layout",))
_register(Received, ())
_register(ReceivedQuantized, ())
_register(ExchangeStats, ())
_register(InFlight, ("kind", "layout", "mode", "pad", "maker"))
