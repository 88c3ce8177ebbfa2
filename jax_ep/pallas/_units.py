"""Cuts the rows of a grouped product into work units, on the device, in plain jnp."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Units(NamedTuple):
    """Work units: unit u computes rows start[u] to end[u] (at most one tile) of group[u].

    All i32[U]. Every row belongs to exactly one unit. Rows beyond the last group belong to units of
    group G, which stand for zero. Units that are left over have start = end.
    """

    group: jax.Array
    start: jax.Array
    end: jax.Array


def offsets(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """i32[G + 1]: group g has rows offsets[g] to offsets[g + 1], cut off at `num_rows`."""
    ends = jnp.cumsum(jnp.maximum(group_sizes, 0), dtype=jnp.int32)
    zero = jnp.zeros_like(ends[:1])
    return jnp.minimum(jnp.concatenate([zero, ends]), num_rows)


def max_units(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Bound on the units of any sizes: full tiles, and one partial tile per group and the tail."""
    return num_rows // tile_rows + min(num_groups + 1, num_rows)


def make_units(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> Units:
    """The units of these sizes; their number depends on shapes alone."""
    num_groups = group_sizes.shape[0]
    begins = offsets(group_sizes, num_rows)
    ends = jnp.concatenate([begins[1:], jnp.full_like(begins[:1], num_rows)])  # [G + 1] with tail
    tiles = -(-(ends - begins) // tile_rows)
    last_unit = jnp.cumsum(tiles, dtype=jnp.int32)
    unit = jnp.arange(max_units(num_rows, num_groups, tile_rows), dtype=jnp.int32)
    group = jnp.searchsorted(last_unit, unit, side="right").astype(jnp.int32)
    inside = jnp.minimum(group, num_groups)  # left-over units come behind the tail, empty
    tile = unit - (last_unit - tiles)[inside]
    start = jnp.minimum(begins[inside] + tile * tile_rows, ends[inside])
    end = jnp.minimum(start + tile_rows, ends[inside])
    return Units(inside, start, end)
