"""Dispatches whose rows are bytes to their receiver: FP8 values and scales, or the caller's own."""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp

from jax_ep._config import Layout, Mode, Pad
from jax_ep._fp8_format import FP8
from jax_ep._group import Group
from jax_ep._ops import operands, primitive, results, vjp
from jax_ep._placement import Placement
from jax_ep._types import Plan, ReceivedQuantized, ScalesLayout


def dispatch_quantized(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    *,
    plan: Plan | None = None,
    mode: Mode | None = None,
    layout: Layout | None = None,
    pad: Pad = "zero",
    scales_layout: ScalesLayout = "rows",
    placement: Placement | None = None,
) -> ReceivedQuantized:
    """Dispatch that delivers rows as they travelled, in FP8, for products that take FP8.

    Args:
        group: as in `dispatch`. The format is Config.wire, or `FP8()` without one.
        x: as in `dispatch`.
        topk_idx: as in `dispatch`.
        topk_weights: as in `dispatch`.
        plan: as in `dispatch`.
        mode: as in `dispatch`.
        layout: as in `dispatch`.
        pad: as in `dispatch`.
        scales_layout: "rows", [..., R, H / block], or "columns", [..., H / block, R], as grouped
            products on Hopper GPUs want them.
        placement: as in `dispatch`.

    Returns:
        A `ReceivedQuantized`, whose x is `Quantized`; the gradient of x is that of its carrier.

    Raises:
        ValueError: as `dispatch`, or rows do not fit the format.

    Example:
        >>> recv = jax_ep.dispatch_quantized(group, x, topk_idx, topk_weights)
        >>> rows = jax_ep.fp8.rows(recv.x)  # or a product of values and scales
    """
    name = "dispatch_quantized"
    if scales_layout not in get_args(ScalesLayout):
        expected = f"one of {get_args(ScalesLayout)}"
        raise operands.fail(
            name, f"scales_layout={scales_layout!r}", "", expected, "use one of these"
        )
    config = group.config
    wire = config.wire or FP8()
    if config.wire is None and (wrong := wire.misfit(config.hidden, config.dtype)):
        raise operands.fail(name, f"{wire}", "", wrong, "or set Config.wire")
    call, rows, weights, ids, arrays = operands.dispatch_operands(
        group, name, x, topk_idx, topk_weights, plan, mode, layout, pad, placement
    )
    call = dataclasses.replace(
        call, wire=wire, keeps_records=True, scales_in_columns=scales_layout == "columns"
    )
    if arrays is None and call.mode == "ll":
        arrays, recv_x, recv_weights = vjp.ll_dispatch(call, rows, weights, ids)
        arrays = vjp.name_plan(arrays)
    else:
        arrays = arrays or vjp.plan(call, ids)
        recv_x, recv_weights = vjp.dispatch(call, rows, weights, arrays.route())
    num_unreachable = None if plan is None else plan.num_unreachable
    return results.make_quantized(call, arrays, recv_x, recv_weights, num_unreachable)


def dispatch_bytes(group: Group, payload: jax.Array, plan: Plan, *, pad: Pad = "zero") -> jax.Array:
    """Sends opaque rows where a plan sends tokens: MXFP8, NVFP4, hashes, ids; has no gradient.

    Args:
        group: the group; call inside shard_map over its axis.
        payload: uint8[T, B], B a multiple of 16. Rows of more bytes than a row of Config has go
            in several exchanges.
        plan: the plan to follow, as `dispatch` takes it.
        pad: "zero", or "undefined" to skip zeroing unused rows.

    Returns:
        uint8, shaped as `Received.x` with B for H.

    Raises:
        ValueError: shapes or dtypes do not fit, or the axis is not in scope.

    Example:
        >>> recv = jax_ep.dispatch(group, x, topk_idx)
        >>> tags = jax_ep.dispatch_bytes(group, payload, recv.plan)
    """
    call, data, arrays = operands.payload_operands(group, "dispatch_bytes", payload, plan, pad)
    data, route = jax.lax.stop_gradient((data, arrays.route()))
    most = group.room_bytes
    pieces = []
    for start in range(0, data.shape[1], most):
        piece = data[:, start : start + most]
        part = dataclasses.replace(call, row_bytes=piece.shape[1])
        got = primitive.run("dispatch", part, x=piece, **route._asdict())
        pieces.append(got["recv_x"])
    received = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
    received = results.poison_bytes(call, arrays, received)
    return received.reshape(*call.recv_rows_shape, data.shape[1])
