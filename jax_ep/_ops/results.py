"""Results of operations as users get them: named for remat policies, NaN after an overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _jax_compat
from jax_ep._ops import records
from jax_ep._ops.call import Call
from jax_ep._ops.wire import Records
from jax_ep._types import Plan, PlanArrays, Quantized, Received, ReceivedQuantized, ScalesLayout


def as_plan(call: Call, arrays: PlanArrays) -> Plan:
    """What plan returns."""
    return Plan(
        **arrays._asdict(),
        layout=call.layout,
        mode=call.mode,
        max_tokens=call.group.config.max_tokens,
    )


def make_received(
    call: Call, arrays: PlanArrays, recv_x: jax.Array | Records | None, recv_weights: Any
) -> Received:
    """What dispatch returns."""
    assert recv_x is not None
    assert not isinstance(recv_x, Records)
    recv_x = _jax_compat.checkpoint_name(_poison(call, arrays, recv_x), "jax_ep_recv")
    return Received(x=recv_x.reshape(call.recv_shape), **_beside_rows(call, arrays, recv_weights))


def make_quantized(
    call: Call,
    arrays: PlanArrays,
    recv_x: jax.Array | Records | None,
    recv_weights: Any,
    scales_layout: ScalesLayout,
) -> ReceivedQuantized:
    """What dispatch_quantized returns."""
    assert isinstance(recv_x, Records)
    data = _jax_compat.checkpoint_name(poison_bytes(call, arrays, recv_x.data), "jax_ep_recv")
    values, scales = records.split(call, data)
    scales = scales.reshape(*call.recv_rows_shape, scales.shape[-1])
    quantized = Quantized(
        values=values.reshape(call.recv_shape),
        scales=jnp.swapaxes(scales, -1, -2) if scales_layout == "columns" else scales,
        carrier=recv_x.carrier.reshape(call.recv_shape),
        scales_layout=scales_layout,
    )
    return ReceivedQuantized(x=quantized, **_beside_rows(call, arrays, recv_weights))


def _beside_rows(call: Call, arrays: PlanArrays, weights: jax.Array | None) -> dict[str, Any]:
    """The fields of a Received besides x."""
    if weights is not None:
        weights = _jax_compat.checkpoint_name(_poison(call, arrays, weights), "jax_ep_recv")
    return {
        "weights": weights,
        "group_sizes": arrays.group_sizes,
        "plan": as_plan(call, arrays),
        "topk_idx": arrays.recv_topk_idx,
    }


def finish(call: Call, arrays: PlanArrays, result: jax.Array) -> jax.Array:
    """A result of combine."""
    return _jax_compat.checkpoint_name(_poison(call, arrays, result), "jax_ep_out")


def _poison(call: Call, arrays: PlanArrays, values: Any) -> Any:
    """With overflow="poison", NaN everywhere if any rank dropped; times 1 keeps the bits."""
    if call.group.config.overflow != "poison":
        return values
    factor = jnp.where(arrays.overflow > 0, jnp.float32(jnp.nan), jnp.float32(1))
    return jax.tree.map(lambda value: value * factor.astype(value.dtype), values)


def poison_bytes(call: Call, arrays: PlanArrays, data: jax.Array) -> jax.Array:
    """`_poison` of bytes: 0xff, NaN in every float format that has one."""
    if call.group.config.overflow != "poison":
        return data
    return jnp.where(arrays.overflow > 0, jnp.uint8(0xFF), data)
