"""The exchanges that a JAX user can write today, per rank, inside shard_map over axis "ep".

`Sizes` fixes the shapes. Each baseline has `dispatch(x [T, H], idx [T, K], weights [T, K])`, which
gives (rows, state), and `combine(rows, state, weights)`, which gives [T, H]; rows are what the
experts would read. `bench` and benchmarks/ measure these, and no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax


class Exchange(Protocol):
    """What is measured: a baseline, or jax_ep in the same form."""

    def dispatch(self, x: jax.Array, idx: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        """Rows at their experts' ranks, and what `combine` needs to bring them back."""

    def combine(self, rows: jax.Array, state: Any, weights: jax.Array) -> jax.Array:
        """Each token's weighted sum of its rows, [T, H]."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """N ranks, T tokens per rank, H elements, K of E experts, capacity in rows per (rank, rank)."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    capacity: int

    @property
    def experts_per_rank(self) -> int:
        """Experts that one rank owns: consecutive ones."""
        return self.experts // self.ranks


class DenseAllToAll:
    """Every top-k copy in a padded [N, capacity] block per destination, exchanged whole."""

    def __init__(
        self, sizes: Sizes, exchange: Callable[[jax.Array], jax.Array] | None = None
    ) -> None:
        self.sizes = sizes
        self.exchange = exchange or (
            lambda blocks: lax.all_to_all(blocks, "ep", split_axis=0, concat_axis=0)
        )

    def slots(self, idx: jax.Array) -> jax.Array:
        """Slot of every (t, k) in the [N * capacity] send buffer; N * capacity when full."""
        s = self.sizes
        destination = (idx // s.experts_per_rank).reshape(-1)
        onehot = jax.nn.one_hot(destination, s.ranks, dtype=jnp.int32)
        position = jnp.take_along_axis(
            jnp.cumsum(onehot, axis=0) - 1, destination[:, None], axis=1
        )[:, 0]
        full = s.ranks * s.capacity
        return jnp.where(position < s.capacity, destination * s.capacity + position, full)

    def dispatch(self, x: jax.Array, idx: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        """See `Exchange`."""
        del weights
        s = self.sizes
        slots = self.slots(idx)
        send = jnp.zeros((s.ranks * s.capacity, s.hidden), x.dtype)
        send = send.at[slots].set(jnp.repeat(x, s.top_k, axis=0), mode="drop")
        return self.exchange(send.reshape(s.ranks, s.capacity, s.hidden)), slots

    def combine(self, rows: jax.Array, state: Any, weights: jax.Array) -> jax.Array:
        """See `Exchange`."""
        s = self.sizes
        back = self.exchange(rows).reshape(s.ranks * s.capacity, s.hidden)
        mine = back.at[state].get(mode="fill", fill_value=0).reshape(s.tokens, s.top_k, s.hidden)
        return jnp.sum(mine * weights[..., None].astype(rows.dtype), axis=1)


class RaggedAllToAll:
    """Copies sorted by expert, exchanged with lax.ragged_all_to_all, as MaxText does it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def _counts(self, idx: jax.Array) -> jax.Array:
        s = self.sizes
        destination = (idx // s.experts_per_rank).reshape(-1)
        counts = jnp.bincount(destination, length=s.ranks).astype(jnp.int32)
        gathered: jax.Array = lax.all_gather(counts, "ep")  # [source, destination]
        return gathered

    def dispatch(self, x: jax.Array, idx: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        """See `Exchange`."""
        del weights
        s = self.sizes
        order = jnp.argsort(idx.reshape(-1), stable=True)
        rows = x[order // s.top_k]
        counts = self._counts(idx)
        me = lax.axis_index("ep")
        before = jnp.cumsum(counts, axis=0) - counts  # rows of lower sources at each destination
        send_sizes, recv_sizes = counts[me], counts[:, me]
        send_offsets = jnp.cumsum(send_sizes) - send_sizes
        out = jnp.zeros((s.ranks * s.capacity, s.hidden), x.dtype)
        received = lax.ragged_all_to_all(
            rows, out, send_offsets, send_sizes, before[me], recv_sizes, axis_name="ep"
        )
        state = (order, counts)
        return received, state

    def combine(self, rows: jax.Array, state: Any, weights: jax.Array) -> jax.Array:
        """See `Exchange`."""
        s = self.sizes
        order, counts = state
        me = lax.axis_index("ep")
        recv_sizes = counts[:, me]
        offsets = jnp.cumsum(recv_sizes) - recv_sizes
        # Where my rows of each destination start at that source's sorted list.
        starts = jnp.cumsum(counts, axis=1) - counts
        out = jnp.zeros((s.tokens * s.top_k, s.hidden), rows.dtype)
        back = lax.ragged_all_to_all(
            rows, out, offsets, recv_sizes, starts[:, me], counts[me], axis_name="ep"
        )
        mine = jnp.zeros_like(back).at[order].set(back)
        mine = mine.reshape(s.tokens, s.top_k, s.hidden)
        return jnp.sum(mine * weights[..., None].astype(rows.dtype), axis=1)


class AllGather:
    """all_gather of every token, local selection by masks, psum_scatter of weighted results."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def dispatch(self, x: jax.Array, idx: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        """See `Exchange`."""
        everyone = lax.all_gather(x, "ep", tiled=True)
        mine = lax.all_gather(idx, "ep", tiled=True) // self.sizes.experts_per_rank
        mine = mine == lax.axis_index("ep")
        scale = jnp.where(mine, lax.all_gather(weights, "ep", tiled=True), 0)
        return everyone, jnp.sum(scale, axis=1)

    def combine(self, rows: jax.Array, state: Any, weights: jax.Array) -> jax.Array:
        """See `Exchange`."""
        del weights
        scaled = rows * state[:, None].astype(rows.dtype)
        summed: jax.Array = lax.psum_scatter(scaled, "ep", tiled=True)
        return summed


# What a reader of a report knows them by.
BASELINES: dict[str, Callable[[Sizes], Exchange]] = {
    "all_gather + psum_scatter": AllGather,
    "all_to_all, padded": DenseAllToAll,
    "ragged_all_to_all": RaggedAllToAll,
}
