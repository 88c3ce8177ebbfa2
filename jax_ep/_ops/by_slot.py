"""combine with Config.batch_invariant: a token's rows are added in the order of its slots.

The tree over ranks that a combine adds along depends on which ranks a token's experts are on. So
each slot is combined alone, which adds nothing, and the results are added here.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._ops import vjp
from jax_ep._ops.call import Call
from jax_ep._ops.rounding import rounded
from jax_ep._types import PlanArrays, Route


def combine(
    call: Call, rows: jax.Array, row_weights: jax.Array | None, arrays: PlanArrays
) -> jax.Array:
    """[T, H]: rows [R, H], times f32[R] if given, to their tokens."""
    call = _of_any_rows(call)

    def of_slot(slot: int) -> jax.Array:
        route = _only(call, arrays.route(), slot)
        if row_weights is None:
            part, _ = vjp.combine(call, rows, None, route)
        else:
            part, _ = vjp.combine_weighted(call, rows, row_weights, None, route)
        assert part is not None
        return part.astype(jnp.float32)

    return rounded(functools.reduce(jnp.add, map(of_slot, range(call.top_k))), call.dtype)


def _of_any_rows(call: Call) -> Call:
    """`call` with as many rows, of which any may be unused.

    In expert_batched kernels take the first unused row for the last of its expert.
    """
    if call.layout == "expert_major" or call.rows == 0:
        return call
    view = call.group._kept_view(align=1, recv_rows=call.rows)
    return dataclasses.replace(call, group=view, layout="expert_major")


def _only(call: Call, route: Route, slot: int) -> Route:
    """The route of the pairs of one slot."""
    slots = lax.broadcasted_iota(jnp.int32, route.send_slot.shape, 1)
    return route._replace(
        send_slot=jnp.where(slots == slot, route.send_slot, -1),
        recv_src=jnp.where(route.recv_src % call.top_k == slot, route.recv_src, -1),
    )
