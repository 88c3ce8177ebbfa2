"""Rows as FP8 records: what a quantised row travels as (docs/semantics.md, "FP8 rows")."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._ops import fp8
from jax_ep._ops.call import Call


def pack(call: Call, rows: jax.Array) -> jax.Array:
    """Rows [T, H] in dtype, quantised: u8[T, B]."""
    assert call.wire is not None
    values, scales = fp8.quantize(rows, call.wire)
    parts = [
        lax.bitcast_convert_type(values, jnp.uint8),
        lax.bitcast_convert_type(scales, jnp.uint8).reshape(
            rows.shape[0], call.wire.scale_bytes(call.hidden)
        ),
    ]
    used = sum(part.shape[1] for part in parts)
    records = jnp.concatenate(parts, axis=1)
    return jnp.pad(records, ((0, 0), (0, call.wire.record_bytes(call.hidden) - used)))


def split(call: Call, records: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Records u8[R, B] as values e4m3fn[R, H] and scales [R, H / block]."""
    assert call.wire is not None
    hidden, wire = call.hidden, call.wire
    values = lax.bitcast_convert_type(records[:, :hidden], jnp.float8_e4m3fn)
    scales = records[:, hidden : hidden + wire.scale_bytes(hidden)]
    width = wire.scale_dtype.itemsize
    per_block = scales.reshape(records.shape[0], hidden // wire.block, width)
    if width == 1:
        per_block = per_block[..., 0]
    return values, lax.bitcast_convert_type(per_block, wire.scale_dtype)


def unpack(call: Call, records: jax.Array) -> jax.Array:
    """Records u8[R, B] as rows [R, H], dequantised to dtype."""
    return fp8.dequantize(*split(call, records), call.dtype)
