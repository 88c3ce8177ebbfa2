"""Dispatches of rows, quantised on their way where the call has a wire.

Below, rows are opaque bytes: only their owner and their receiver look into records. So every
implementation, mode and layout moves them as it moves any rows, and gives the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import _jax_compat
from jax_ep._ops import primitive, records, weighting
from jax_ep._ops.call import Call


class Records(NamedTuple):
    """Received rows as they travelled, u8[R, B], and zeros [R, H] that take their cotangent."""

    data: jax.Array
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
    y, row_weights = arrays.pop("y", None), arrays.pop("row_weights", None)
    arrays["x"] = records.pack(call, x)
    moved = dataclasses.replace(
        call, wire=None, keeps_records=False, row_bytes=call.wire.record_bytes(call.hidden)
    )
    got = primitive.run(operation, moved, **arrays)
    if "recv_x" not in got:
        return got
    data = got["recv_x"]
    if call.keeps_records:
        carrier = jnp.zeros((call.rows, call.hidden), call.dtype)
        carrier = _jax_compat.to_varying(carrier, _jax_compat.varying_axes(data))
        return got | {"recv_x": Records(data, carrier)}
    rows = records.unpack(call, data)
    if y is None and row_weights is None:
        return got | {"recv_x": rows}
    recv_src = arrays["recv_src"]
    assert recv_src is not None
    rows, dots = weighting.apply(call, recv_src >= 0, rows, y, row_weights)
    return got | {"recv_x": rows, "recv_dots": dots}
