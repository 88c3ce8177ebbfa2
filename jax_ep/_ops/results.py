"""Results of operations as users get them: named for remat policies, NaN after an overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _jax_compat
from jax_ep._ops.call import Call
from jax_ep._ops.wire import Records
from jax_ep._types import Plan, PlanArrays, Quantized, Received, ReceivedQuantized


def as_plan(call: Call, arrays: PlanArrays, num_unreachable: jax.Array | None = None) -> Plan:
    """What plan returns."""
    return Plan(
        **arrays._asdict(),
        num_unreachable=num_unreachable,
        layout=call.layout,
        mode=call.mode,
        max_tokens=call.group.config.max_tokens,
    )


def make_received(
    call: Call,
    arrays: PlanArrays,
    recv_x: jax.Array | Records | None,
    recv_weights: Any,
    num_unreachable: jax.Array | None = None,
) -> Received:
    """What dispatch returns."""
    assert recv_x is not None
    assert not isinstance(recv_x, Records)
    recv_x = _jax_compat.checkpoint_name(_poison(call, arrays, recv_x), "jax_ep_recv")
    beside = _beside_rows(call, arrays, recv_weights, num_unreachable)
    return Received(x=recv_x.reshape(call.recv_shape), **beside)


def make_quantized(
    call: Call,
    arrays: PlanArrays,
    recv_x: jax.Array | Records | None,
    recv_weights: Any,
    num_unreachable: jax.Array | None = None,
) -> ReceivedQuantized:
    """What dispatch_quantized returns."""
    assert isinstance(recv_x, Records)
    named = [
        _jax_compat.checkpoint_name(_poison_float8(call, arrays, part), "jax_ep_recv")
        for part in (recv_x.values, recv_x.scales)
    ]
    quantized = Quantized(
        values=named[0].reshape(call.recv_shape),
        scales=named[1].reshape(call.scales_shape),
        carrier=recv_x.carrier.reshape(call.recv_shape),
        scales_layout="columns" if call.scales_in_columns else "rows",
    )
    beside = _beside_rows(call, arrays, recv_weights, num_unreachable)
    return ReceivedQuantized(x=quantized, **beside)


def _beside_rows(
    call: Call, arrays: PlanArrays, weights: jax.Array | None, num_unreachable: jax.Array | None
) -> dict[str, Any]:
    """The fields of a Received besides x."""
    if weights is not None:
        weights = _jax_compat.checkpoint_name(_poison(call, arrays, weights), "jax_ep_recv")
    return {
        "weights": weights,
        "group_sizes": arrays.group_sizes,
        "plan": as_plan(call, arrays, num_unreachable),
        "topk_idx": arrays.recv_topk_idx,
    }


def finish(call: Call, arrays: PlanArrays, result: jax.Array) -> jax.Array:
    """A result of combine."""
    return _jax_compat.checkpoint_name(_poison(call, arrays, result), "jax_ep_out")


def _poison(call: Call, arrays: PlanArrays, values: Any) -> Any:
    """With overflow="poison", NaN everywhere if any rank dropped, also in gradients.

    Else the values as they are; gradients times 1.
    """
    if call.group.config.overflow != "poison":
        return values
    has_dropped = arrays.overflow > 0
    return jax.tree.map(lambda value: _nan_if(has_dropped, value), values)


@jax.custom_jvp
def _nan_if(is_nan: jax.Array, value: jax.Array) -> jax.Array:
    """Chosen as bits: in float arithmetic XLA for CPUs loses subnormals and NaNs of bf16."""
    nan = jnp.full((), jnp.nan, value.dtype)
    chosen = jnp.where(is_nan, _bits_of(nan), _bits_of(value))
    return jax.lax.bitcast_convert_type(chosen, value.dtype)


@_nan_if.defjvp
def _nan_if_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    is_nan, value = primals
    factor = jnp.where(is_nan, jnp.float32(jnp.nan), jnp.float32(1))
    return _nan_if(is_nan, value), tangents[1] * factor.astype(value.dtype)


def _bits_of(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def poison_bytes(call: Call, arrays: PlanArrays, data: jax.Array) -> jax.Array:
    """`_poison` of bytes: 0xff, NaN in every float format that has one."""
    if call.group.config.overflow != "poison":
        return data
    return jnp.where(arrays.overflow > 0, jnp.uint8(0xFF), data)


def _poison_float8(call: Call, arrays: PlanArrays, part: jax.Array) -> jax.Array:
    """`poison_bytes` of values or scales."""
    if call.group.config.overflow != "poison":
        return part
    bits = _bits_of(part)
    ones = ~jnp.zeros((), bits.dtype)
    return jax.lax.bitcast_convert_type(jnp.where(arrays.overflow > 0, ones, bits), part.dtype)
