"""Expert ids to counts, zones, slots and sources: the plan as pure jnp, without any exchange.

Every array here is about the whole group and is computed alike on all ranks from the gathered ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._ops.call import Call


class Routing(NamedTuple):
    """Where each pair p = (source * T + t) * K + k of the group goes.

    P = N*T*K pairs, E experts.
    """

    expert: jax.Array  # i32[P], E where no expert wants the pair
    row: jax.Array  # i32[P], its row at the expert's rank (valid where kept)
    kept: jax.Array  # bool[P]
    order: jax.Array  # i32[P], pairs by (expert, pair)
    first: jax.Array  # i32[E], index in `order` of each expert's first pair
    counts: jax.Array  # i32[E], kept pairs
    zones: jax.Array  # i32[E], rows of each expert's zone
    starts: jax.Array  # i32[E], first row of the zone at its rank


def water_fill(demand: jax.Array, rows: int, align: int) -> jax.Array:
    """Rows of each expert's zone when a rank has `rows` rows (docs/semantics.md, "Dropping").

    Args:
        demand: i32[..., E_l], pairs that want each local expert.
        rows: R of the rank, a multiple of align.
        align: rows of a block.

    Returns:
        i32[..., E_l], multiples of align with a sum of at most rows.
    """
    blocks = (demand + (align - 1)) // align
    available = rows // align
    # What it takes to give everyone as much as expert i wants, at most; no sum exceeds all blocks.
    at_level = jnp.sum(
        jnp.minimum(blocks[..., :, None], blocks[..., None, :]), axis=-1, dtype=jnp.int32
    )
    reached = jnp.where(at_level <= available, blocks, 0)
    reached = jnp.max(reached, axis=-1, keepdims=True)
    above = jnp.sum(blocks > reached, axis=-1, keepdims=True, dtype=jnp.int32)
    left = available - jnp.sum(
        jnp.minimum(blocks, reached), axis=-1, keepdims=True, dtype=jnp.int32
    )
    level = reached + left // jnp.maximum(above, 1)
    filled = jnp.minimum(blocks, level)
    left = available - jnp.sum(filled, axis=-1, keepdims=True, dtype=jnp.int32)
    short = blocks > level
    turn = jnp.cumsum(short, axis=-1, dtype=jnp.int32)
    return (filled + (short & (turn <= left)).astype(jnp.int32)) * align


def repeated(ids: jax.Array) -> jax.Array:
    """bool[..., K]: an earlier slot of the same token names the same expert."""
    top_k = ids.shape[-1]
    earlier = jnp.tri(top_k, k=-1, dtype=bool)
    return jnp.any((ids[..., :, None] == ids[..., None, :]) & earlier, axis=-1)


def route(call: Call, ids: jax.Array) -> Routing:
    """Routes the group's ids i32[N, T, K]."""
    ranks, tokens, top_k = ids.shape
    num_experts = call.num_slots
    per_rank = call.group.experts_per_rank
    wanted = (ids >= 0) & (ids < num_experts)
    if call.layout == "expert_batched":
        wanted &= ~repeated(ids)
    expert = jnp.where(wanted, ids, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    demand = jnp.zeros((num_experts + 1,), jnp.int32).at[expert].add(1)
    first = jnp.cumsum(demand, dtype=jnp.int32) - demand
    index = lax.iota(jnp.int32, expert.size)
    position = (
        jnp.zeros_like(index).at[order].set(index - first[expert[order]], unique_indices=True)
    )
    demand, first = demand[:-1], first[:-1]
    if call.layout == "expert_major":
        zones = water_fill(demand.reshape(ranks, per_rank), call.rows, call.group.config.align)
        starts = jnp.cumsum(zones, axis=1, dtype=jnp.int32) - zones
        zones, starts = zones.reshape(-1), starts.reshape(-1)
    else:  # an expert_batched expert has room for every token; rank_major rows are not per expert
        zones = jnp.full_like(
            demand, ranks * tokens * (top_k if call.layout == "rank_major" else 1)
        )
        starts = lax.iota(jnp.int32, num_experts) % per_rank * (ranks * tokens)
    safe = jnp.minimum(expert, num_experts - 1)
    kept = (expert < num_experts) & (position < zones[safe])
    row = index // top_k if call.layout == "rank_major" else starts[safe] + position
    counts = jnp.minimum(demand, zones)
    return Routing(expert, row, kept, order, first, counts, zones, starts)
