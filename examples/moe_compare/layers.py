"""One MoE layer, written once per way of exchanging its tokens; each runs inside shard_map.

Every layer takes this rank's (kernels, x [T, H], ids [T, K], gates [T, K]) and gives [T, H]. All
compute the same sum; they differ in what travels and in how the experts' rows are laid out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

import jax_ep

AXIS = "ep"
Kernels = tuple[jax.Array, jax.Array, jax.Array]
Layer = Callable[[Kernels, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one case. The last two are measured on its routing, so nobody drops."""

    ranks: int
    tokens: int  # per rank
    hidden: int
    width: int
    experts: int
    top_k: int
    rank_rows: int  # most (token, k) pairs that one rank's experts get
    expert_rows: int  # most pairs that one rank sends to one expert

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks


def ragged_experts(kernels: Kernels, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The gated FFN on rows grouped by expert."""
    w_gate, w_up, w_down = kernels
    dot = partial(lax.ragged_dot, group_sizes=group_sizes)
    return dot(jax.nn.silu(dot(rows, w_gate)) * dot(rows, w_up), w_down)


def batched_experts(kernels: Kernels, rows: jax.Array) -> jax.Array:
    """The gated FFN on rows [experts, rows of each, H]."""
    w_gate, w_up, w_down = kernels
    dot = partial(jnp.einsum, "erk,ekn->ern")
    return dot(jax.nn.silu(dot(rows, w_gate)) * dot(rows, w_up), w_down)


def with_jax_ep(sizes: Sizes, group: jax_ep.Group) -> Layer:
    """dispatch, experts, combine."""

    def layer(kernels: Kernels, x: jax.Array, ids: jax.Array, gates: jax.Array) -> jax.Array:
        return jax_ep.moe(group, x, ids, gates, ragged_experts, kernels)

    return layer


def with_all_to_all(sizes: Sizes) -> Layer:
    """Dense all_to_all: a buffer of `expert_rows` rows for every (rank, expert), full or not."""
    capacity = sizes.expert_rows

    def layer(kernels: Kernels, x: jax.Array, ids: jax.Array, gates: jax.Array) -> jax.Array:
        flat = ids.reshape(-1)
        chosen = jax.nn.one_hot(flat, sizes.experts, dtype=jnp.int32)
        place = jnp.take_along_axis(jnp.cumsum(chosen, axis=0) - 1, flat[:, None], axis=1)[:, 0]
        slot = jnp.where(place < capacity, flat * capacity + place, sizes.experts * capacity)
        send = jnp.zeros((sizes.experts * capacity, sizes.hidden), x.dtype)
        send = send.at[slot].set(jnp.repeat(x, sizes.top_k, axis=0), mode="drop")
        shape = (sizes.ranks, sizes.local_experts, capacity, sizes.hidden)
        there = lax.all_to_all(send.reshape(shape), AXIS, split_axis=0, concat_axis=0)
        rows = jnp.swapaxes(there, 0, 1).reshape(sizes.local_experts, -1, sizes.hidden)
        y = batched_experts(kernels, rows)
        y = jnp.swapaxes(y.reshape(sizes.local_experts, sizes.ranks, *shape[2:]), 0, 1)
        back = lax.all_to_all(y, AXIS, split_axis=0, concat_axis=0).reshape(send.shape)
        mine = back.at[slot].get(mode="fill", fill_value=0)
        return weighted_sum(mine, gates)

    return layer


def with_ragged_all_to_all(sizes: Sizes) -> Layer:
    """lax.ragged_all_to_all: only the rows that are needed, after an exchange of their counts."""
    ranks, local = sizes.ranks, sizes.local_experts

    def layer(kernels: Kernels, x: jax.Array, ids: jax.Array, gates: jax.Array) -> jax.Array:
        me = lax.axis_index(AXIS)
        flat = ids.reshape(-1)
        by_expert = jnp.argsort(flat, stable=True)
        rows = x[by_expert // sizes.top_k]
        counts = lax.all_gather(jnp.bincount(flat, length=sizes.experts), AXIS)  # [from, expert]
        pairs = counts.reshape(ranks, ranks, local).sum(axis=2).astype(jnp.int32)  # [from, to]
        lie_at = exclusive_sum(pairs, axis=1)  # where the rows for `to` start at `from`
        land_at = exclusive_sum(pairs, axis=0)  # where the rows of `from` land at `to`
        landing = jnp.zeros((sizes.rank_rows, sizes.hidden), x.dtype)
        received = lax.ragged_all_to_all(
            rows,
            lax.pcast(landing, AXIS, to="varying"),
            lie_at[me],
            pairs[me],
            land_at[me],
            pairs[:, me],
            axis_name=AXIS,
        )
        # They lie by (source, expert); a second sort groups them by expert.
        mine = counts.reshape(ranks, ranks, local)[:, me]  # [from, local expert]
        row = jnp.arange(sizes.rank_rows)
        block = jnp.searchsorted(jnp.cumsum(mine.reshape(-1)), row, side="right")
        expert = jnp.where(block < ranks * local, block % local, local)
        grouping = jnp.argsort(expert, stable=True)
        y = ragged_experts(kernels, received[grouping], mine.sum(axis=0).astype(jnp.int32))
        y = jnp.zeros_like(y).at[grouping].set(y)
        back = lax.ragged_all_to_all(
            y,
            jnp.zeros_like(rows),
            land_at[:, me],
            pairs[:, me],
            lie_at[:, me],
            pairs[me],
            axis_name=AXIS,
        )
        return weighted_sum(jnp.zeros_like(back).at[by_expert].set(back), gates)

    return layer


def with_all_gather(sizes: Sizes) -> Layer:
    """all_gather of every token, local choice of the own experts' pairs, psum_scatter back."""

    def layer(kernels: Kernels, x: jax.Array, ids: jax.Array, gates: jax.Array) -> jax.Array:
        everyone, all_ids, all_gates = (
            lax.all_gather(array, AXIS, tiled=True) for array in (x, ids, gates)
        )
        local = all_ids.reshape(-1) - lax.axis_index(AXIS) * sizes.local_experts
        local = jnp.where((local >= 0) & (local < sizes.local_experts), local, sizes.local_experts)
        pair = jnp.argsort(local, stable=True)[: sizes.rank_rows]
        group_sizes = jnp.bincount(local, length=sizes.local_experts + 1)[:-1].astype(jnp.int32)
        y = ragged_experts(kernels, everyone[pair // sizes.top_k], group_sizes)
        # Rows beyond the groups are other ranks' pairs; their y is zero.
        y = y * all_gates.reshape(-1)[pair][:, None]
        partial_sums = jnp.zeros_like(everyone).at[pair // sizes.top_k].add(y)
        return lax.psum_scatter(partial_sums, AXIS, tiled=True)

    return layer


def dense(sizes: Sizes) -> Layer:
    """The oracle: every expert on every token, on one device, with all of its arguments global."""

    def layer(kernels: Kernels, x: jax.Array, ids: jax.Array, gates: jax.Array) -> jax.Array:
        def add(total: jax.Array, expert: tuple[jax.Array, Kernels]) -> tuple[jax.Array, None]:
            number, own = expert
            gate = jnp.sum(jnp.where(ids == number, gates, 0), axis=1)
            y = batched_experts(jax.tree.map(lambda w: w[None], own), x[None])[0]
            return total + gate[:, None] * y, None

        numbers = jnp.arange(sizes.experts)
        return lax.scan(add, jnp.zeros_like(x), (numbers, kernels))[0]

    return layer


def weighted_sum(rows: jax.Array, gates: jax.Array) -> jax.Array:
    """[T, H]: the rows [T * K, H] of each token, times their gates, added up."""
    tokens, top_k = gates.shape
    return jnp.sum(rows.reshape(tokens, top_k, -1) * gates[..., None], axis=1)


def exclusive_sum(counts: jax.Array, axis: int) -> jax.Array:
    """Sum of what comes before along `axis`."""
    return jnp.cumsum(counts, axis=axis, dtype=counts.dtype) - counts
