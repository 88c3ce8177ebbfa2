"""Results of operations as users get them: named for remat policies, NaN after an overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _jax_compat
from jax_ep._ops.call import Call
from jax_ep._types import Plan, PlanArrays, Received


def as_plan(call: Call, arrays: PlanArrays) -> Plan:
    """What plan returns."""
    return Plan(
        **arrays._asdict(),
        layout=call.layout,
        mode=call.mode,
        max_tokens=call.group.config.max_tokens,
    )


def make_received(
    call: Call, arrays: PlanArrays, recv_x: jax.Array | None, recv_weights: jax.Array | None
) -> Received:
    """What dispatch returns."""
    assert recv_x is not None
    recv_x, recv_weights = _poison(call, arrays, (recv_x, recv_weights))
    recv_x = _jax_compat.checkpoint_name(recv_x, "jax_ep_recv").reshape(call.recv_shape)
    if recv_weights is not None:
        recv_weights = _jax_compat.checkpoint_name(recv_weights, "jax_ep_recv")
    return Received(
        x=recv_x,
        weights=recv_weights,
        group_sizes=arrays.group_sizes,
        plan=as_plan(call, arrays),
        topk_idx=arrays.recv_topk_idx,
    )


def finish(call: Call, arrays: PlanArrays, result: jax.Array) -> jax.Array:
    """A result of combine."""
    return _jax_compat.checkpoint_name(_poison(call, arrays, result), "jax_ep_out")


def _poison(call: Call, arrays: PlanArrays, values: Any) -> Any:
    """With overflow="poison", NaN everywhere if any rank dropped; times 1 keeps the bits."""
    if call.group.config.overflow != "poison":
        return values
    factor = jnp.where(arrays.overflow > 0, jnp.float32(jnp.nan), jnp.float32(1))
    return jax.tree.map(lambda value: value * factor.astype(value.dtype), values)
