"""Dispatches of rows, quantised on their way where the call has a wire.

On GPUs, kernels quantise while they send and dequantise where they write, in whole dispatches
within a node. Everywhere else rows are opaque bytes between two passes over memory: only their
owner and their receiver look into records. So every implementation, mode and layout moves them as
it moves any rows. The bits are the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _jax_compat
from jax_ep._ops import beside, primitive, records, weighting
from jax_ep._ops.call import Call
from jax_ep._ops.operations import FP8_CALLS


class Records(NamedTuple):
    """Received rows as they travelled, and zeros [R, H] that take their cotangent."""

    values: jax.Array  # e4m3fn[R, H]
    scales: jax.Array  # call.scales_shape
    carrier: jax.Array


def run(operation: str, call: Call, **arrays: jax.Array | None) -> dict[str, Any]:
    """As `primitive.run`, for what dispatches rows, whole or half.

    Args:
        operation: its name in `operations.OPERATIONS`.
        call: what is static in it.
        **arrays: its operands by the names of that table.

    Returns:
        Its results by their names; recv_x are `Records` if the call keeps them.
    """
    x = arrays.get("x")
    if call.wire is None or x is None:
        return primitive.run(operation, call, **arrays)
    if not _has_kernels(operation, call, arrays):
        return _with_carrier(call, _run_around(operation, call, arrays))

    def run_around(arrays: dict[str, Any]) -> dict[str, Any]:
        return _run_around(operation, call, arrays)

    def run_kernels(arrays: dict[str, Any]) -> dict[str, Any]:
        return _run_kernels(operation, call, arrays)

    branches = {name: run_kernels for name in _GPUS if name in call.group._native_platforms}
    got = lax.platform_dependent(arrays, **branches, default=run_around)
    return _with_carrier(call, got)


_GPUS = ("cuda", "rocm")


def _has_kernels(operation: str, call: Call, arrays: dict[str, Any]) -> bool:
    """Whether the kernels of GPUs take this call (kernels/launch.h, Fp8Wire)."""
    group, wire = call.group, call.wire
    assert wire is not None
    units, rest = divmod(wire.block, 16)
    is_whole = arrays.get("y") is None and arrays.get("row_weights") is None
    # A lowering-only group does not know its nodes unless Config says so.
    knows_nodes = not group.lowering_only or group.config.node_size is not None
    return (
        f"{operation}_fp8" in FP8_CALLS
        and is_whole
        and rest == 0
        and units in (1, 2, 4, 8, 16, 32)
        and knows_nodes
        and group.node_size == group.num_ranks
        and call.num_tokens > 0
        and not beside.applies(call)
        and any(name in group._native_platforms for name in _GPUS)
    )


def _run_kernels(operation: str, call: Call, arrays: dict[str, Any]) -> dict[str, Any]:
    given = {name: array for name, array in arrays.items() if name not in ("y", "row_weights")}
    got = primitive.run_call(f"{operation}_fp8", call, **given)
    scales = got.pop("recv_scales")
    if call.keeps_records:
        got["recv_x"] = (got["recv_x"], scales)
    return got | ({"recv_dots": None} if operation == "dispatch" else {})


def _run_around(operation: str, call: Call, arrays: dict[str, Any]) -> dict[str, Any]:
    """Quantises, moves records, and dequantises or splits them."""
    y, row_weights = arrays.pop("y", None), arrays.pop("row_weights", None)
    x = arrays["x"]
    assert x is not None
    assert call.wire is not None
    moved = dataclasses.replace(
        call,
        wire=None,
        keeps_records=False,
        scales_in_columns=False,
        row_bytes=call.wire.record_bytes(call.hidden),
    )
    got = primitive.run(operation, moved, **(arrays | {"x": records.pack(call, x)}))
    if "recv_x" not in got:
        return got
    data = got["recv_x"]
    if call.keeps_records:
        return got | {"recv_x": records.split(call, data)}
    rows = records.unpack(call, data)
    if y is None and row_weights is None:
        return got | {"recv_x": rows}
    recv_src = arrays["recv_src"]
    assert recv_src is not None
    rows, dots = weighting.apply(call, recv_src >= 0, rows, y, row_weights)
    return got | {"recv_x": rows, "recv_dots": dots}


def _with_carrier(call: Call, got: dict[str, Any]) -> dict[str, Any]:
    if not call.keeps_records or "recv_x" not in got:
        return got
    values, scales = got["recv_x"]
    carrier = jnp.zeros((call.rows, call.hidden), call.dtype)
    carrier = _jax_compat.to_varying(carrier, _jax_compat.varying_axes(values))
    return got | {"recv_x": Records(values, scales, carrier)}
