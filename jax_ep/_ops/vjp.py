"""Custom VJPs: the backward of each operation is the opposite operation.

Dispatch D and the unweighted combine C are linear and each other's transpose, so any order of
reverse differentiation stays inside this file. Forward rules call the differentiable function
itself (not the raw one), which is what makes reverse over reverse work.

Residuals:
  dispatch, ll_dispatch, *_done of them: the route (3 plan leaves): where rows went.
  combine (unweighted): the route.
  combine_weighted: the route, y and the row weights; d_weights = <g, y> and d_y = w * g read both.
  combine_backward: its operands; it is bilinear in them, and only second order reaches it.
Integer operands have no cotangent (None).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _jax_compat
from jax_ep._ops import primitive, wire
from jax_ep._ops.call import Call
from jax_ep._ops.rounding import rounded
from jax_ep._ops.wire import Records
from jax_ep._types import PlanArrays, Route

Optional = jax.Array | None
Pair = tuple[Optional, Optional]
Arrived = tuple[Optional | Records, Optional]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(call: Call, x: Optional, weights: Optional, route: Route) -> Arrived:
    """Rows [T, H] to [R, H] and weights f32[T, K] to their rows; either may be None."""
    got = wire.run("dispatch", call, x=x, weights=weights, **route._asdict())
    return got["recv_x"], got["recv_weights"]


def _dispatch_fwd(
    call: Call, x: Optional, weights: Optional, route: Route
) -> tuple[Arrived, Route]:
    return dispatch(call, x, weights, route), route


def _dispatch_bwd(call: Call, route: Route, cotangents: Arrived) -> tuple[Optional, Optional, None]:
    return *_transpose(call, route, cotangents), None


def _transpose(call: Call, route: Route, cotangents: Arrived) -> Pair:
    """Cotangents of x and weights: one combine with the weights' cotangent aboard.

    Quantising has the gradient 1 (straight-through, arXiv 1308.3432).
    """
    arrived, weights = cotangents
    rows = arrived.carrier if isinstance(arrived, Records) else arrived
    call = call.for_cotangents
    pair_scalars = weights
    if weights is not None and call.layout == "rank_major":
        pair_scalars = weights.reshape(call.rows, call.top_k)
    return combine(call, rows, pair_scalars, route)


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _dispatch_rows(call: Call, x: Optional, weights: Optional, route: Route) -> Pair:
    """`dispatch` of a call that keeps no records."""
    rows, row_weights = dispatch(call, x, weights, route)
    assert not isinstance(rows, Records)
    return rows, row_weights


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(call: Call, y: Optional, pair_scalars: Optional, route: Route) -> Pair:
    """Rows [R, H] summed to [T, H] and pair_scalars f32[R] (rank_major [R, K]) to f32[T, K]."""
    got = primitive.run("combine", call, y=y, pair_scalars=pair_scalars, **_slots(route))
    return got["out"], got["pair_scalars_out"]


def _slots(route: Route) -> dict[str, jax.Array]:
    """What a combine reads of the route."""
    return {"send_slot": route.send_slot, "recv_src": route.recv_src}


def _combine_fwd(
    call: Call, y: Optional, pair_scalars: Optional, route: Route
) -> tuple[Pair, Route]:
    return combine(call, y, pair_scalars, route), route


def _combine_bwd(call: Call, route: Route, cotangents: Pair) -> tuple[Optional, Optional, None]:
    rows, pair_scalars = _dispatch_rows(call, *cotangents, route)
    if pair_scalars is not None and call.layout == "rank_major":
        pair_scalars = pair_scalars.reshape(call.rows, call.top_k)
    return rows, pair_scalars, None


combine.defvjp(_combine_fwd, _combine_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_weighted(
    call: Call, y: jax.Array, row_weights: jax.Array, pair_scalars: Optional, route: Route
) -> Pair:
    """Rows [R, H] times f32[R], summed to [T, H], and pair_scalars f32[R] to f32[T, K]."""
    got = primitive.run(
        "combine", call, y=y, row_weights=row_weights, pair_scalars=pair_scalars, **_slots(route)
    )
    return got["out"], got["pair_scalars_out"]


_WeightedResiduals = tuple[jax.Array, jax.Array, Route]


def _combine_weighted_fwd(
    call: Call, y: jax.Array, row_weights: jax.Array, pair_scalars: Optional, route: Route
) -> tuple[Pair, _WeightedResiduals]:
    out = combine_weighted(call, y, row_weights, pair_scalars, route)
    return out, (y, row_weights, route)


def _combine_weighted_bwd(
    call: Call, residuals: _WeightedResiduals, cotangents: Pair
) -> tuple[jax.Array, jax.Array, Optional, None]:
    cotangent, returned = cotangents
    assert cotangent is not None
    d_y, d_weights = combine_backward(call, cotangent, *residuals)
    d_scalars = None if returned is None else dispatch(call, None, returned, residuals[2])[1]
    return d_y, d_weights, d_scalars, None


combine_weighted.defvjp(_combine_weighted_fwd, _combine_weighted_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_backward(
    call: Call, cotangent: jax.Array, y: jax.Array, row_weights: jax.Array, route: Route
) -> tuple[jax.Array, jax.Array]:
    """With g = D(cotangent): row_weights * g and <g, y> per row, fused in one dispatch."""
    got = wire.run("dispatch", call, x=cotangent, y=y, row_weights=row_weights, **route._asdict())
    return got["recv_x"], got["recv_dots"]


_BackwardResiduals = tuple[jax.Array, jax.Array, jax.Array, Route]


def _combine_backward_fwd(
    call: Call, cotangent: jax.Array, y: jax.Array, row_weights: jax.Array, route: Route
) -> tuple[tuple[jax.Array, jax.Array], _BackwardResiduals]:
    out = combine_backward(call, cotangent, y, row_weights, route)
    return out, (cotangent, y, row_weights, route)


def _combine_backward_bwd(
    call: Call, residuals: _BackwardResiduals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    cotangent, y, row_weights, route = residuals
    rows, dots = cotangents
    used = route.recv_src >= 0  # padding of y may hold anything, NaN included
    g, _ = _dispatch_rows(call, cotangent, None, route)
    assert g is not None
    wide_rows, wide_g = rows.astype(jnp.float32), g.astype(jnp.float32)
    wide_y = y.astype(jnp.float32)
    d_g = rounded(row_weights[:, None] * wide_rows + dots[:, None] * wide_y, call.dtype)
    d_cotangent, _ = combine(
        call, jnp.where(used[:, None], d_g, jnp.zeros((), call.dtype)), None, route
    )
    assert d_cotangent is not None
    d_y = rounded(dots[:, None] * wide_g, call.dtype)
    d_weights = jnp.where(used, jnp.sum(wide_rows * wide_g, axis=-1), 0.0)
    return d_cotangent, d_y, d_weights, None


combine_backward.defvjp(_combine_backward_fwd, _combine_backward_bwd)


_Received = tuple[PlanArrays, Optional | Records, Optional]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ll_dispatch(call: Call, x: jax.Array, weights: Optional, topk_idx: jax.Array) -> _Received:
    """Plan and dispatch in one exchange; in two when differentiated.

    Then a remat policy that keeps the plan has one to keep: a recomputed dispatch follows it.
    """
    got = wire.run("ll_dispatch", call, x=x, weights=weights, topk_idx=topk_idx)
    return _received(got)


def _received(got: dict[str, Any]) -> _Received:
    arrays = PlanArrays(*(got[name] for name in PlanArrays._fields))
    return arrays, got["recv_x"], got["recv_weights"]


def plan(call: Call, topk_idx: jax.Array) -> PlanArrays:
    """The plan of `topk_idx` i32[T, K], named."""
    return name_plan(PlanArrays(**primitive.run("plan", call, topk_idx=topk_idx)))


def name_plan(arrays: PlanArrays) -> PlanArrays:
    """The plan under the name that remat policies know."""
    named: PlanArrays = jax.tree.map(
        lambda leaf: _jax_compat.checkpoint_name(leaf, "jax_ep_plan"), arrays
    )
    return named


def _ll_dispatch_fwd(
    call: Call, x: jax.Array, weights: Optional, topk_idx: jax.Array
) -> tuple[_Received, Route]:
    arrays = plan(call, topk_idx)
    route = arrays.route()
    recv_x, recv_weights = dispatch(call, x, weights, route)
    return (arrays, recv_x, recv_weights), route


def _ll_dispatch_bwd(
    call: Call, route: Route, cotangents: _Received
) -> tuple[Optional, Optional, None]:
    return *_transpose(call, route, cotangents[1:]), None


ll_dispatch.defvjp(_ll_dispatch_fwd, _ll_dispatch_bwd)


def dispatch_start(call: Call, x: jax.Array, weights: Optional, route: Route) -> jax.Array:
    """First half of a dispatch: its epoch i32[1]."""
    return _start("dispatch_start", call, x=x, weights=weights, **route._asdict())


def ll_dispatch_start(
    call: Call, x: jax.Array, weights: Optional, topk_idx: jax.Array
) -> jax.Array:
    """First half of an ll_dispatch: its epoch i32[1]."""
    return _start("ll_dispatch_start", call, x=x, weights=weights, topk_idx=topk_idx)


def combine_start(call: Call, y: jax.Array, row_weights: Optional, route: Route) -> jax.Array:
    """First half of a combine: its epoch i32[1]."""
    return _start("combine_start", call, y=y, row_weights=row_weights, **_slots(route))


def _start(name: str, call: Call, **arrays: Optional) -> jax.Array:
    """Has no gradient: it is the done's, in what is carried."""
    epoch: jax.Array = wire.run(name, call, **jax.lax.stop_gradient(arrays))["epoch"]
    return epoch


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_done(
    call: Call, x: jax.Array, weights: Optional, route: Route, epoch: jax.Array
) -> Pair:
    """Second half of a dispatch; differentiates as the whole of it in the carried inputs."""
    got = wire.run("dispatch_done", call, epoch=epoch, x=x, weights=weights, **route._asdict())
    return got["recv_x"], got["recv_weights"]


def _dispatch_done_fwd(
    call: Call, x: jax.Array, weights: Optional, route: Route, epoch: jax.Array
) -> tuple[Pair, Route]:
    return dispatch_done(call, x, weights, route, epoch), route


def _dispatch_done_bwd(
    call: Call, route: Route, cotangents: Pair
) -> tuple[Optional, Optional, None, None]:
    return *_transpose(call, route, cotangents), None, None


dispatch_done.defvjp(_dispatch_done_fwd, _dispatch_done_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ll_dispatch_done(
    call: Call, x: jax.Array, weights: Optional, topk_idx: jax.Array, epoch: jax.Array
) -> _Received:
    """Second half of an ll_dispatch; differentiates as the whole of it in the carried inputs."""
    got = wire.run("ll_dispatch_done", call, epoch=epoch, x=x, weights=weights, topk_idx=topk_idx)
    return _received(got)


def _ll_dispatch_done_fwd(
    call: Call, x: jax.Array, weights: Optional, topk_idx: jax.Array, epoch: jax.Array
) -> tuple[_Received, Route]:
    received = ll_dispatch_done(call, x, weights, topk_idx, epoch)
    return received, received[0].route()


def _ll_dispatch_done_bwd(
    call: Call, route: Route, cotangents: _Received
) -> tuple[Optional, Optional, None, None]:
    return *_transpose(call, route, cotangents[1:]), None, None


ll_dispatch_done.defvjp(_ll_dispatch_done_fwd, _ll_dispatch_done_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_done(
    call: Call, y: jax.Array, row_weights: Optional, route: Route, epoch: jax.Array
) -> jax.Array:
    """Second half of a combine; differentiates as the whole of it in the carried inputs."""
    got = primitive.run(
        "combine_done", call, epoch=epoch, y=y, row_weights=row_weights, **_slots(route)
    )
    out: jax.Array = got["out"]
    return out


_DoneResiduals = tuple[Optional, Optional, Route]


def _combine_done_fwd(
    call: Call, y: jax.Array, row_weights: Optional, route: Route, epoch: jax.Array
) -> tuple[jax.Array, _DoneResiduals]:
    kept = y if row_weights is not None else None  # the unweighted backward does not read y
    return combine_done(call, y, row_weights, route, epoch), (kept, row_weights, route)


def _combine_done_bwd(
    call: Call, residuals: _DoneResiduals, cotangent: jax.Array
) -> tuple[Optional, Optional, None, None]:
    y, row_weights, route = residuals
    if y is None or row_weights is None:
        return _dispatch_rows(call, cotangent, None, route)[0], None, None, None
    return *combine_backward(call, cotangent, y, row_weights, route), None, None


combine_done.defvjp(_combine_done_fwd, _combine_done_bwd)
