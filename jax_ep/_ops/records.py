"""Rows as FP8 records: what a quantised row travels as (docs/semantics.md, "FP8 rows").

Native groups on CPUs have kernels for it; the rest is jax.numpy. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _jax_compat
from jax_ep._ops import fp8
from jax_ep._ops.call import Call

TARGETS = {name: f"jax_ep_{name}" for name in ("quantize", "dequantize")}  # xla_ffi/quantize.cc


def pack(call: Call, rows: jax.Array) -> jax.Array:
    """Rows [T, H] in dtype, quantised: u8[T, B]."""
    assert call.wire is not None
    result = (rows.shape[0], call.wire.record_bytes(call.hidden)), jnp.uint8
    return _choose(call, "quantize", rows, result, _pack)


def unpack(call: Call, records: jax.Array) -> jax.Array:
    """Records u8[R, B] as rows [R, H], dequantised to dtype."""
    result = (records.shape[0], call.hidden), call.dtype
    return _choose(call, "dequantize", records, result, _unpack)


def _choose(
    call: Call,
    kernel: str,
    operand: jax.Array,
    result: tuple[tuple[int, ...], Any],
    otherwise: Callable[[Call, jax.Array], jax.Array],
) -> jax.Array:
    """`kernel` where there is one, else the same in jax.numpy."""
    if "cpu" not in call.group._native_platforms or operand.shape[0] == 0:
        return otherwise(call, operand)
    wire = call.wire
    assert wire is not None
    run: Any = jax.ffi.ffi_call(
        TARGETS[kernel],
        _jax_compat.result_type(operand, *result),
        vmap_method="broadcast_all",
    )
    attributes = {"block": np.int64(wire.block), "scale": np.int64(wire.scale == "ue8m0")}
    chosen: jax.Array = lax.platform_dependent(
        operand,
        cpu=lambda operand: run(operand, **attributes),
        default=lambda operand: otherwise(call, operand),
    )
    return chosen


def _pack(call: Call, rows: jax.Array) -> jax.Array:
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
    """Records u8[R, B] as values e4m3fn[R, H] and scales as the call wants them."""
    values, scales = _split(call, records)
    scales = scales.reshape(*call.recv_rows_shape, scales.shape[-1])
    return values, jnp.swapaxes(scales, -1, -2) if call.scales_in_columns else scales


def _split(call: Call, records: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def _unpack(call: Call, records: jax.Array) -> jax.Array:
    return fp8.dequantize(*_split(call, records), call.dtype)
