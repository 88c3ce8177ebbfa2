"""JAX_EP_DEBUG=1 with implementation="xla": an expert id >= num_experts fails every rank's program.

A rank that failed alone would leave the others in their next collective: XLA knows no failed rank
there, and on CPUs ends the process after a minute. So all ranks look at the gathered ids, all fail,
and the collectives of jax_ep that come later wait for that look.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _env, _jax_compat, _warn
from jax_ep._ops import sharding
from jax_ep._ops.call import Call


def may_look(call: Call) -> bool:
    """Whether JAX_EP_DEBUG asks for a look at what all ranks pass, and a callback can have it."""
    if not _env.flag("JAX_EP_DEBUG") or call.group.lowering_only:
        return False
    if loose := sharding.loose_axes():
        _warn.warn(
            f"jax_ep: JAX_EP_DEBUG is set, but expert ids are not looked at where mesh axis "
            f"{loose[0]!r} is not Manual, as JAX has no callbacks there; add it to the axis_names "
            "of jax.shard_map",
            UserWarning,
        )
        return False
    return True


def refuse(call: Call, ids: jax.Array) -> jax.Array:
    """The ids i32[N, T, K] of all ranks, once it is certain that they are in range."""
    # Native kernels look themselves, and a callback would tie a program to this process's devices.
    if call.group.native or not may_look(call):
        return ids
    group = call.group
    num_experts, num_teams = call.num_slots, group.mesh.size // group.num_ranks

    def look(largest: Any, team: Any) -> Any:
        found = [
            f"{int(largest[rank])} on rank {rank}" + (f" of team {team}" if num_teams > 1 else "")
            for rank in np.flatnonzero(np.asarray(largest) >= num_experts)
        ]
        if found:
            raise ValueError(
                f"jax_ep, group {group._label}: got expert id {', '.join(found)}, expected ids "
                f"below num_experts={num_experts} (negative for no expert); correct the router "
                "(JAX_EP_DEBUG is set; without it such pairs are dropped and counted)"
            )
        return np.int32(0)

    largest = jnp.max(ids, axis=(1, 2))
    team = sharding.position(group)[0] // group.num_ranks
    of_zero = _jax_compat.result_type(ids, (), jnp.int32)
    zero: jax.Array = jax.pure_callback(look, of_zero, largest, team)
    return ids + zero


def after(planned: jax.Array, rows: jax.Array) -> jax.Array:
    """`rows`, bit by bit, but only once `planned` (entries of a plan: i32, -1 or more) is there."""
    if not _env.flag("JAX_EP_DEBUG") or not planned.size:
        return rows
    # No optimization_barrier: XLA takes it away before it puts its work in order.
    return jnp.where(jnp.min(planned) >= -1, rows, jnp.zeros((), rows.dtype))
