"""Rows of slots from other ranks, as opaque bytes: only what changes places travels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _jax_compat
from jax_ep._config import align_up
from jax_ep._group import Group
from jax_ep._ops import operands, quantized, reachable, results, sharding, vjp
from jax_ep._ops.operands import UNIT_BYTES
from jax_ep._types import Plan


def varying(group: Group, array: jax.Array) -> jax.Array:
    """`array`, typed as differing over the group's axes."""
    return _jax_compat.to_varying(array, frozenset(group.axes) | _jax_compat.varying_axes(array))


def fetch(group: Group, tree: Any, source: jax.Array, takes_part: jax.Array | None = None) -> Any:
    """Arrays [slots, ...] of this rank, with slot `source[p]` of the group in place of slot p.

    Args:
        group: the group; inside shard_map over its axis.
        tree: arrays [slots, ...] of this rank.
        source: i32[P], equal on all ranks.
        takes_part: bool[N], ranks that rows come from and go to, others keep theirs; None: all.
    """
    per_rank, ranks = group.experts_per_rank, group.num_ranks
    own = sharding.rank_index(group) * per_rank + lax.iota(jnp.int32, per_rank)
    slots = lax.iota(jnp.int32, ranks * per_rank)
    if takes_part is not None:
        can_come = takes_part[source // per_rank] & takes_part[slots // per_rank]
        source = jnp.where(can_come, source, slots)
    travels = source // per_rank != slots // per_rank
    nobody = jnp.full_like(slots, -1)
    if takes_part is not None:  # kernels refuse a mask without a rank that takes part
        nobody = jnp.where(takes_part[slots // per_rank], nobody, reachable.UNREACHABLE + slots)

    def of_leaf(leaf: jax.Array) -> jax.Array:
        leaf = varying(group, lax.stop_gradient(jnp.asarray(leaf)))
        local = jnp.where(travels[own], 0, source[own] - own[0])
        kept = leaf[local]
        if leaf.size == 0 or ranks == 1:
            return kept
        data = as_bytes(leaf)
        width = _row_bytes(group, data.shape[1])
        arrived = _exchange(group, _in_rows(data, width), source, travels, nobody)
        moved = _from_bytes(arrived.reshape(per_rank, -1)[:, : data.shape[1]], leaf)
        comes = travels[own].reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(comes, moved, kept)

    return jax.tree.map(of_leaf, tree)


def _exchange(
    group: Group, rows: jax.Array, source: jax.Array, travels: jax.Array, nobody: jax.Array
) -> jax.Array:
    """Rows u8[slots, C, B] of this rank's slots, fetched from those that `source` names.

    A token is a row of a slot that wants it: its rank is where the slot's source is, and it goes to
    the slot. As many tokens as the group takes go at once; a slot gets them in their order. Where
    it goes to none, i32[P] `nobody` is the id.
    """
    per_rank, num_rows, width = rows.shape
    most = max(group.max_ht_tokens, group.max_ll_tokens)
    if most == 0:
        raise ValueError(
            "jax_ep.eplb: got a group of max_tokens=0, expected at least 1, as rows of experts "
            "travel as tokens; raise Config.max_tokens"
        )
    num_slots = group.num_ranks * per_rank
    block = min(num_slots, most)  # slots that are served at once
    together = min(max(most // block, 1), num_rows)  # rows of each
    steps = -(-num_rows // together)
    rows = jnp.pad(rows, ((0, 0), (0, steps * together - num_rows), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(per_rank, steps, together, width), 1, 0)
    view = group._kept_view(
        num_experts=num_slots,
        physical_experts=num_slots,
        top_k=1,
        align=1,
        recv_rows=per_rank * together,
        overflow="drop",
    )
    rank = sharding.rank_index(group)
    arrived = jnp.zeros_like(rows)
    for start in range(0, num_slots, block):
        slots = jnp.arange(start, min(start + block, num_slots), dtype=jnp.int32)
        sends = travels[slots] & (source[slots] // per_rank == rank)
        from_slot = jnp.where(sends, source[slots] - rank * per_rank, 0)
        ids = jnp.repeat(jnp.where(sends, slots, nobody[slots]), together)[:, None]
        plan = _plan(view, ids)
        first = jnp.cumsum(plan.group_sizes, dtype=jnp.int32) - plan.group_sizes
        comes = plan.group_sizes > 0
        at = jnp.where(comes, first, 0)[:, None] + lax.iota(jnp.int32, together)

        def step(part: jax.Array, from_slot: Any = from_slot, plan: Any = plan) -> jax.Array:
            payload = part[from_slot].reshape(-1, width)
            return quantized.dispatch_bytes(view, payload, plan)

        got = lax.map(step, rows)[:, at]
        arrived = jnp.where(comes[:, None, None], got, arrived)
    whole = jnp.moveaxis(arrived, 0, 1).reshape(per_rank, steps * together, width)
    return whole[:, :num_rows]


def _plan(view: Group, slots: jax.Array) -> Plan:
    """Where rows go, i32[T, 1]; they are no tokens, so `Group.stats` counts no load of experts."""
    call = operands.make_call(view, "plan", slots.shape[0], None, None, "zero")
    call = dataclasses.replace(call, counts_load=False)
    (slots,) = operands.vary(call, slots)
    return results.as_plan(call, vjp.plan(call, slots))


def _row_bytes(group: Group, num_bytes: int) -> int:
    """Bytes of a row: those of a slot, or as many as the group moves at once."""
    return min(max(group.room_bytes, UNIT_BYTES), align_up(num_bytes, UNIT_BYTES))


def _in_rows(data: jax.Array, width: int) -> jax.Array:
    """u8[slots, bytes] as u8[slots, C, width], zeros behind the last byte."""
    per_rank, num_bytes = data.shape
    num_rows = -(-num_bytes // width)
    padded = jnp.pad(data, ((0, 0), (0, num_rows * width - num_bytes)))
    return padded.reshape(per_rank, num_rows, width)


def as_bytes(leaf: jax.Array) -> jax.Array:
    """[slots, ...] as u8[slots, bytes]."""
    flat = leaf.reshape(leaf.shape[0], -1)
    if flat.dtype == jnp.bool_:
        return flat.astype(jnp.uint8)
    return lax.bitcast_convert_type(flat, jnp.uint8).reshape(leaf.shape[0], -1)


def _from_bytes(data: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `as_bytes`."""
    if like.dtype == jnp.bool_:
        return data.astype(jnp.bool_).reshape(like.shape)
    size = math.prod(like.shape[1:])
    parts = data.reshape(like.shape[0], size, like.dtype.itemsize)
    if like.dtype.itemsize == 1:
        parts = parts[..., 0]
    return lax.bitcast_convert_type(parts, like.dtype).reshape(like.shape)
