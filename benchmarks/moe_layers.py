"""One MoE layer per way of exchanging its tokens; each runs per rank, in shard_map over axis "ep".

Every layer takes this rank's (kernels, x [T, H], ids [T, K], gates [T, K]) and gives [T, H]. All
give their experts rows grouped by expert; they differ in what travels. Rows are moved by gathers in
both directions: `spread` and `collect` are each other's transpose, so no backward scatters.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_ep

AXIS = "ep"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one case. The last two are measured on its routing, so nobody drops."""

    ranks: int
    tokens: int  # per rank
    hidden: int
    experts: int
    top_k: int
    pair_rows: int  # most (token, k) pairs from one rank to one rank
    rank_rows: int  # most pairs that one rank's experts get

    @property
    def local_experts(self):
        return self.experts // self.ranks


def sizes_of(ids, experts, hidden):
    """The `Sizes` of ids [N, T, K]."""
    ranks, tokens, top_k = ids.shape
    owners = ids // (experts // ranks)
    sent = np.stack([np.bincount(of.ravel(), minlength=ranks) for of in owners])  # [from, to]
    most = int(sent.sum(axis=0).max())
    return Sizes(ranks, tokens, hidden, experts, top_k, int(sent.max()), most)


def rows_or_zero(rows, index):
    """rows[index]; zero where index is beyond."""
    return rows.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x, token_of_row, rows_of_token):
    """Row r is x[token_of_row[r]], or zero; rows_of_token [T, m] names all rows of each token."""
    del rows_of_token
    return rows_or_zero(x, token_of_row)


@jax.custom_vjp
def collect(rows, token_of_row, rows_of_token):
    """Token t is the sum of rows[rows_of_token[t]]; the transpose of `spread`."""
    del token_of_row
    return jnp.sum(rows_or_zero(rows, rows_of_token), axis=1)


spread.defvjp(
    lambda x, *places: (spread(x, *places), places),
    lambda places, g: (collect(g, *places), None, None),
)
collect.defvjp(
    lambda rows, *places: (collect(rows, *places), places),
    lambda places, g: (spread(g, *places), None, None),
)


def inverse_of(order):
    """Where each element of a permutation is."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))


def by_expert(experts, params, rows, expert_of_row, num_experts):
    """`experts` on rows in any order, given back in it; those of expert num_experts are padding."""
    order = jnp.argsort(expert_of_row, stable=True)
    back = inverse_of(order)
    counts = jnp.bincount(expert_of_row, length=num_experts + 1)[:-1].astype(jnp.int32)
    y = experts(params, spread(rows, order, back[:, None]), counts)
    return spread(y, back, order[:, None])


def weighted(rows, gates, pair_of_row):
    """Each row times the gate of its (token, k).

    In f32, so that the gates' gradient is summed in it: of 215,000 rows of bf16 XLA for GPUs summed
    it in bf16, and half of it was lost (jax 0.11.2).
    """
    gate_of_row = rows_or_zero(gates.reshape(-1), pair_of_row)[:, None]
    return (rows.astype(jnp.float32) * gate_of_row.astype(jnp.float32)).astype(rows.dtype)


def with_jax_ep(group, experts):
    """dispatch, experts, combine."""

    def layer(params, x, ids, gates):
        return jax_ep.moe(group, x, ids, gates, experts, params)

    return layer


def with_all_to_all(s, experts):
    """Dense all_to_all: a block of `pair_rows` rows for every pair of ranks, full or not."""

    def exchange(blocks):
        return lax.all_to_all(blocks, AXIS, split_axis=0, concat_axis=0)

    def layer(params, x, ids, gates):
        pairs, blocks = s.tokens * s.top_k, (s.ranks, s.pair_rows)
        expert = ids.reshape(-1)
        owner = expert // s.local_experts
        onehot = jax.nn.one_hot(owner, s.ranks, dtype=jnp.int32)
        place = jnp.take_along_axis(jnp.cumsum(onehot, axis=0) - 1, owner[:, None], axis=1)[:, 0]
        slot = owner * s.pair_rows + place
        pair_of_slot = jnp.full(s.ranks * s.pair_rows, pairs).at[slot].set(jnp.arange(pairs))
        token_of_slot, slots = pair_of_slot // s.top_k, slot.reshape(s.tokens, s.top_k)
        expert_of_slot = jnp.full(s.ranks * s.pair_rows, s.local_experts)
        expert_of_slot = expert_of_slot.at[slot].set(expert % s.local_experts)

        there = exchange(spread(x, token_of_slot, slots).reshape(*blocks, s.hidden))
        expert_there = exchange(expert_of_slot.reshape(blocks)).reshape(-1)
        rows = there.reshape(-1, s.hidden)
        y = by_expert(experts, params, rows, expert_there, s.local_experts)
        back = exchange(y.reshape(*blocks, s.hidden)).reshape(-1, s.hidden)
        return collect(weighted(back, gates, pair_of_slot), token_of_slot, slots)

    return layer


def with_ragged_all_to_all(s, experts):
    """lax.ragged_all_to_all of exactly the rows that are needed, after an exchange of counts."""

    def layer(params, x, ids, gates):
        me = lax.axis_index(AXIS)
        flat = ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)  # pairs by expert
        row_of_pair = inverse_of(order).reshape(s.tokens, s.top_k)
        counts = lax.all_gather(jnp.bincount(flat, length=s.experts), AXIS).astype(jnp.int32)
        counts = counts.reshape(s.ranks, s.ranks, s.local_experts)  # [from, to, local expert]
        moved = counts.sum(axis=2)
        lie_at = jnp.cumsum(moved, axis=1) - moved  # where the rows for `to` start at `from`
        land_at = jnp.cumsum(moved, axis=0) - moved  # where the rows of `from` land at `to`

        rows = spread(x, order // s.top_k, row_of_pair)
        landing = jnp.zeros((s.rank_rows, s.hidden), x.dtype)
        received = lax.ragged_all_to_all(
            rows, landing, lie_at[me], moved[me], land_at[me], moved[:, me], axis_name=AXIS
        )
        # They lie by (source, expert).
        ends = jnp.cumsum(counts[:, me].reshape(-1))
        block = jnp.searchsorted(ends, jnp.arange(s.rank_rows), side="right")
        is_row = block < ends.size
        expert_of_row = jnp.where(is_row, block % s.local_experts, s.local_experts)
        y = by_expert(experts, params, received, expert_of_row, s.local_experts)
        back = lax.ragged_all_to_all(
            y,
            jnp.zeros_like(rows),
            land_at[:, me],
            moved[:, me],
            lie_at[:, me],
            moved[me],
            axis_name=AXIS,
        )
        return collect(weighted(back, gates, order), order // s.top_k, row_of_pair)

    return layer


def with_all_gather(s, experts):
    """all_gather of every token, local choice of the own experts' pairs, psum_scatter back."""

    def layer(params, x, ids, gates):
        everyone, all_ids, all_gates = (
            lax.all_gather(array, AXIS, tiled=True) for array in (x, ids, gates)
        )
        local = all_ids.reshape(-1) - lax.axis_index(AXIS) * s.local_experts
        local = jnp.where((local >= 0) & (local < s.local_experts), local, s.local_experts)
        order = jnp.argsort(local, stable=True)
        row_of_pair = inverse_of(order).reshape(all_ids.shape)  # of others: rank_rows or beyond
        pair = order[: s.rank_rows]
        is_row = local[pair] < s.local_experts
        rows_of_token = jnp.where(
            local.reshape(all_ids.shape) < s.local_experts, row_of_pair, s.rank_rows
        )
        token_of_row = jnp.where(is_row, pair // s.top_k, len(everyone))
        counts = jnp.bincount(local, length=s.local_experts + 1)[:-1].astype(jnp.int32)

        y = experts(params, spread(everyone, token_of_row, rows_of_token), counts)
        y = weighted(y, all_gates, jnp.where(is_row, pair, local.size))
        return lax.psum_scatter(collect(y, token_of_row, rows_of_token), AXIS, tiled=True)

    return layer


BASELINES = {
    "all_to_all": with_all_to_all,
    "ragged_all_to_all": with_ragged_all_to_all,
    "all_gather": with_all_gather,
}
