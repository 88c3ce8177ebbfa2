"""The only file that names FFI targets: registration, result types and attributes.

Absent arrays cross as zero-element arrays of shape [0], so every target has one arity. Rows are
always flat [R, H] here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _extension, _jax_compat
from jax_ep._ops import lowering, sharding
from jax_ep._ops.call import Call
from jax_ep._types import PlanArrays, Route

TARGETS = (
    "jax_ep_plan",
    "jax_ep_dispatch",
    "jax_ep_ll_dispatch",
    "jax_ep_combine",
    "jax_ep_dispatch_start",
    "jax_ep_dispatch_done",
    "jax_ep_ll_dispatch_start",
    "jax_ep_ll_dispatch_done",
    "jax_ep_combine_start",
    "jax_ep_combine_done",
)

_LAYOUT_CODES = {"expert_major": 0, "expert_batched": 1, "rank_major": 2}
_MODE_CODES = {"ht": 0, "ll": 1}
_PAD_CODES = {"zero": 0, "undefined": 1}

_call = _jax_compat.call_primitive("jax_ep_call", lowering.check, lowering.module_key)

_register_lock = threading.Lock()
_registered: set[str] = set()


def register(platform: str) -> None:
    """Registers the extension's FFI types and targets with XLA, once per platform.

    Called by create_group and not at import: jaxlib 0.10 needs the CPU client to exist before types
    are registered.

    Args:
        platform: "cpu", "CUDA" or "ROCM".
    """
    with _register_lock:
        if platform not in _registered:
            types, targets = _extension.load().registrations(platform)
            _jax_compat.register_ffi(types, targets, platform=platform)
            _registered.add(platform)


def plan(call: Call, topk_idx: jax.Array) -> PlanArrays:
    """Counts, slots and sources of `topk_idx` i32[T, K]."""
    results = _invoke(call, "jax_ep_plan", (topk_idx,), _plan_results(call, topk_idx))
    return _plan_arrays(call, results)


def dispatch(
    call: Call,
    x: jax.Array | None,
    weights: jax.Array | None,
    route: Route,
    y: jax.Array | None,
    row_weights: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Rows and weights to their receive rows; with `y`, the fused backward of combine."""
    like = route.send_slot
    args = (
        *_payload(call, like, x, weights),
        *_route_args(like, route),
        _or_empty(like, y, call.dtype),
        _or_empty(like, row_weights, jnp.float32),
    )
    types = (
        *_received_types(call, like, route, x is not None, weights is not None),
        _rows_type(like, call.rows if y is not None else None),
    )
    recv_x, recv_weights, dots = _invoke(
        call, "jax_ep_dispatch", args, types, pad=_PAD_CODES[call.pad]
    )
    return (
        recv_x if x is not None else None,
        recv_weights if weights is not None else None,
        dots if y is not None else None,
    )


def ll_dispatch(
    call: Call, x: jax.Array, weights: jax.Array | None, topk_idx: jax.Array
) -> tuple[PlanArrays, jax.Array, jax.Array | None]:
    """Plan and dispatch in one exchange."""
    types = _ll_types(call, topk_idx, weights is not None)
    args = (*_payload(call, topk_idx, x, weights), topk_idx)
    results = _invoke(call, "jax_ep_ll_dispatch", args, types, pad=_PAD_CODES[call.pad])
    return _ll_results(call, results, weights is not None)


def combine(
    call: Call,
    y: jax.Array | None,
    row_weights: jax.Array | None,
    ride: jax.Array | None,
    route: Route,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Rows back to their tokens, summed; `ride` comes back per (t, k)."""
    like = route.send_slot
    args = (*_combine_payload(call, like, y, row_weights, ride), like, route.recv_src)
    types = _combine_types(call, like, y is not None, ride is not None)
    out, ride_out = _invoke(call, "jax_ep_combine", args, types)
    return (out if y is not None else None, ride_out if ride is not None else None)


def dispatch_start(call: Call, x: jax.Array, weights: jax.Array | None, route: Route) -> jax.Array:
    """Sends rows along a plan; returns the epoch i32[1]."""
    like = route.send_slot
    args = (*_payload(call, like, x, weights), *_route_args(like, route))
    (epoch,) = _invoke(call, "jax_ep_dispatch_start", args, (_epoch_type(like),))
    return epoch


def dispatch_done(
    call: Call, x: jax.Array, weights: jax.Array | None, route: Route, epoch: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Receives what dispatch_start of all ranks sent; `x` and `weights` are not read."""
    like = route.send_slot
    types = _received_types(call, like, route, True, weights is not None)
    recv_x, recv_weights = _invoke(
        call,
        "jax_ep_dispatch_done",
        (epoch, *_route_args(like, route)),
        types,
        has_weights=int(weights is not None),
        pad=_PAD_CODES[call.pad],
    )
    return recv_x, recv_weights if weights is not None else None


def ll_dispatch_start(
    call: Call, x: jax.Array, weights: jax.Array | None, topk_idx: jax.Array
) -> jax.Array:
    """Sends rows and routing; returns the epoch i32[1]."""
    args = (*_payload(call, topk_idx, x, weights), topk_idx)
    (epoch,) = _invoke(call, "jax_ep_ll_dispatch_start", args, (_epoch_type(topk_idx),))
    return epoch


def ll_dispatch_done(
    call: Call, x: jax.Array, weights: jax.Array | None, topk_idx: jax.Array, epoch: jax.Array
) -> tuple[PlanArrays, jax.Array, jax.Array | None]:
    """Receives what ll_dispatch_start of all ranks sent; `x` and `weights` are not read."""
    results = _invoke(
        call,
        "jax_ep_ll_dispatch_done",
        (epoch, topk_idx),
        _ll_types(call, topk_idx, weights is not None),
        has_weights=int(weights is not None),
        pad=_PAD_CODES[call.pad],
    )
    return _ll_results(call, results, weights is not None)


def combine_start(
    call: Call, y: jax.Array, row_weights: jax.Array | None, route: Route
) -> jax.Array:
    """Sends summed rows back; returns the epoch i32[1]."""
    like = route.send_slot
    args = (*_combine_payload(call, like, y, row_weights, None), like, route.recv_src)
    (epoch,) = _invoke(call, "jax_ep_combine_start", args, (_epoch_type(like),))
    return epoch


def combine_done(
    call: Call, y: jax.Array, row_weights: jax.Array | None, route: Route, epoch: jax.Array
) -> jax.Array:
    """Sums what combine_start of all ranks sent; `y` and `row_weights` are not read."""
    like = route.send_slot
    types = _combine_types(call, like, True, False)
    out, _ = _invoke(call, "jax_ep_combine_done", (epoch, like, route.recv_src), types, has_ride=0)
    return out


def _invoke(
    call: Call, target: str, args: Sequence[jax.Array], results: Sequence[Any], **attributes: int
) -> Sequence[jax.Array]:
    common = {
        "session": call.group.session_id,
        "mode": _MODE_CODES[call.mode],
        "layout": _LAYOUT_CODES[call.layout],
    }
    encoded = {name: np.int64(value) for name, value in (common | attributes).items()}
    return _call(
        sharding.position(call.group),
        *args,
        owner=call.group,
        target=target,
        results=tuple(results),
        attributes=encoded,
    )


def _empty(like: jax.Array, dtype: Any) -> jax.Array:
    return _jax_compat.to_varying(jnp.zeros((0,), dtype), _jax_compat.varying_axes(like))


def _or_empty(like: jax.Array, array: jax.Array | None, dtype: Any) -> jax.Array:
    return _empty(like, dtype) if array is None else array


def _payload(
    call: Call, like: jax.Array, x: jax.Array | None, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return _or_empty(like, x, call.dtype), _or_empty(like, weights, jnp.float32)


def _combine_payload(
    call: Call,
    like: jax.Array,
    y: jax.Array | None,
    row_weights: jax.Array | None,
    ride: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        _or_empty(like, y, call.dtype),
        _or_empty(like, row_weights, jnp.float32),
        _or_empty(like, ride, jnp.float32),
    )


def _route_args(like: jax.Array, route: Route) -> tuple[jax.Array, jax.Array, jax.Array]:
    return route.send_slot, route.recv_src, _or_empty(like, route.recv_topk_idx, jnp.int32)


def _epoch_type(like: jax.Array) -> Any:
    return _jax_compat.result_type(like, (1,), jnp.int32)


def _rows_type(like: jax.Array, rows: int | None) -> Any:
    return _jax_compat.result_type(like, (0 if rows is None else rows,), jnp.float32)


def _plan_results(call: Call, like: jax.Array) -> tuple[Any, ...]:
    ranks, experts = call.group.num_ranks, call.group.experts_per_rank
    shapes = ((experts,), (experts,), like.shape, (call.rows,), (ranks,), (ranks,), ())
    types = [_jax_compat.result_type(like, shape, jnp.int32) for shape in shapes]
    overflow = _jax_compat.result_type(like, (), jnp.int32, invariant_over=call.group.axes)
    routing = (ranks, *like.shape) if call.layout == "rank_major" else (0,)
    return (*types, overflow, _jax_compat.result_type(like, routing, jnp.int32))


def _plan_arrays(call: Call, results: Sequence[jax.Array]) -> PlanArrays:
    arrays = PlanArrays(*results)
    return arrays if call.layout == "rank_major" else arrays._replace(recv_topk_idx=None)


def _received_types(
    call: Call, like: jax.Array, route: Route, has_x: bool, has_weights: bool
) -> tuple[Any, Any]:
    weights_shape: tuple[int, ...] = (0,)
    if has_weights:
        weights_shape = (call.rows,) if route.recv_topk_idx is None else route.recv_topk_idx.shape
    rows_shape = (call.rows, call.hidden) if has_x else (0,)
    return (
        _jax_compat.result_type(like, rows_shape, call.dtype),
        _jax_compat.result_type(like, weights_shape, jnp.float32),
    )


def _ll_types(call: Call, like: jax.Array, has_weights: bool) -> tuple[Any, ...]:
    weights_shape: tuple[int, ...] = (0,)
    if has_weights:
        rank_major = call.layout == "rank_major"
        weights_shape = (call.group.num_ranks, *like.shape) if rank_major else (call.rows,)
    return (
        *_plan_results(call, like),
        _jax_compat.result_type(like, (call.rows, call.hidden), call.dtype),
        _jax_compat.result_type(like, weights_shape, jnp.float32),
    )


def _ll_results(
    call: Call, results: Sequence[jax.Array], has_weights: bool
) -> tuple[PlanArrays, jax.Array, jax.Array | None]:
    *arrays, recv_x, recv_weights = results
    return _plan_arrays(call, arrays), recv_x, recv_weights if has_weights else None


def _combine_types(call: Call, like: jax.Array, has_y: bool, has_ride: bool) -> tuple[Any, Any]:
    return (
        _jax_compat.result_type(like, (like.shape[0], call.hidden) if has_y else (0,), call.dtype),
        _jax_compat.result_type(like, like.shape if has_ride else (0,), jnp.float32),
    )
