"""implementation="xla": the semantics of every op with jax.lax collectives only.

It runs on any platform, uses no ragged_all_to_all (XLA:CPU has none), and is the oracle of the
tests. Moves gather whole payloads (O(N*T*H) per rank), so it is right and simple, not fast.
T = 0 has its own branch because XLA refuses collectives over zero-length dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _jax_compat
from jax_ep._ops import collectives, invalid_ids, planning, sharding, weighting
from jax_ep._ops.call import Call
from jax_ep._ops.rounding import rounded
from jax_ep._types import PlanArrays, Route

Optional = jax.Array | None


def run(operation: str, call: Call, arrays: Mapping[str, Optional]) -> dict[str, Any]:
    """Runs a whole `operation`: arrays by name in and out, as in OPERATIONS."""
    whole: dict[str, Callable[..., dict[str, Any]]]
    whole = {"plan": _plan, "dispatch": _dispatch, "ll_dispatch": _ll_dispatch, "combine": _combine}
    return whole[operation](call, **arrays)


def _plan(call: Call, *, topk_idx: jax.Array) -> dict[str, Any]:
    """Counts, slots and sources of `topk_idx` i32[T, K]."""
    if call.num_tokens == 0:
        return _empty_plan(call)._asdict()
    group = call.group
    ranks, experts, tokens, top_k = group.num_ranks, group.experts_per_rank, *topk_idx.shape
    me = sharding.rank_index(group)
    ids = invalid_ids.refuse(call, collectives.gather(call, topk_idx))
    routing = planning.route(call, ids)

    owner = jnp.minimum(routing.expert, call.num_slots - 1) // experts
    pair = lax.iota(jnp.int32, ranks * tokens * top_k)
    if call.mode == "ll":
        slot = owner * (ranks * tokens) + pair // top_k
    else:
        slot = owner * call.rows + routing.row
    mine = me * (tokens * top_k)
    send_slot = _slice(jnp.where(routing.kept, slot, -1), mine, tokens * top_k)
    sent_to = jnp.where(send_slot >= 0, _slice(owner, mine, tokens * top_k), ranks)
    dropped = (topk_idx.reshape(-1) >= 0) & (send_slot < 0)
    num_dropped = jnp.sum(dropped, dtype=jnp.int32)
    arrived = (routing.kept & (owner == me)).reshape(ranks, tokens * top_k)

    counts = _slice(routing.counts, me * experts, experts)
    sizes = _slice(routing.zones, me * experts, experts)
    planned = PlanArrays(
        group_sizes=sizes if call.layout == "expert_major" else counts,
        pairs_per_expert=counts,
        send_slot=send_slot.reshape(tokens, top_k),
        recv_src=_recv_src(call, routing, arrived, me),
        send_counts=jnp.zeros((ranks + 1,), jnp.int32).at[sent_to].add(1)[:ranks],
        recv_counts=jnp.sum(arrived, axis=1, dtype=jnp.int32),
        num_dropped=num_dropped,
        overflow=_jax_compat.uniform_max((num_dropped > 0).astype(jnp.int32), group.axes),
        recv_topk_idx=(
            jnp.where(arrived.reshape(ids.shape), ids - me * experts, -1)
            if call.layout == "rank_major"
            else None
        ),
    )
    return planned._asdict()


def _dispatch(
    call: Call,
    *,
    send_slot: jax.Array,
    recv_src: jax.Array,
    recv_topk_idx: Optional,
    x: Optional = None,
    weights: Optional = None,
    y: Optional = None,
    row_weights: Optional = None,
) -> dict[str, Any]:
    """Rows and weights to their receive rows; with `y`, the fused backward of combine."""
    del send_slot  # every rank gathers what it receives
    valid, token, k = _sources(call, recv_src)
    recv_x = recv_weights = dots = None
    if x is not None:
        bits, dtype = collectives.as_bits(x)  # a plain move must not quieten a signalling NaN
        bits = invalid_ids.after(recv_src, bits)
        moved = jnp.where(valid[:, None], _take(_gather_rows(call, bits), token), 0)
        recv_x = rows = collectives.from_bits(moved.astype(bits.dtype), dtype)
        if y is not None or row_weights is not None:
            recv_x, dots = weighting.apply(call, valid, rows, y, row_weights)
    if weights is not None:
        everyones = _gather_rows(call, invalid_ids.after(recv_src, weights))
        if recv_topk_idx is not None:
            shape = recv_topk_idx.shape
            recv_weights = jnp.where(recv_topk_idx >= 0, everyones.reshape(shape), 0.0)
        else:
            values = _take(everyones.reshape(-1, 1), token * call.top_k + k)[:, 0]
            recv_weights = jnp.where(valid, values, 0.0)
    return {"recv_x": recv_x, "recv_weights": recv_weights, "recv_dots": dots}


def _ll_dispatch(
    call: Call, *, x: jax.Array, weights: Optional, topk_idx: jax.Array
) -> dict[str, Any]:
    """Plan, then dispatch."""
    planned = _plan(call, topk_idx=topk_idx)
    route = {name: planned[name] for name in Route._fields}
    return planned | _dispatch(call, x=x, weights=weights, **route)


def _combine(
    call: Call,
    *,
    send_slot: jax.Array,
    recv_src: jax.Array,
    y: Optional = None,
    row_weights: Optional = None,
    pair_scalars: Optional = None,
) -> dict[str, Any]:
    """Rows back to their tokens, summed; `pair_scalars` comes back per (t, k)."""
    group = call.group
    ranks, (tokens, top_k) = group.num_ranks, send_slot.shape
    if tokens == 0:
        return {
            "out": None if y is None else jnp.zeros((0, call.hidden), call.dtype),
            "pair_scalars_out": None
            if pair_scalars is None
            else jnp.zeros((0, top_k), jnp.float32),
        }
    valid, token, k = _sources(call, recv_src)
    slots_per_rank = ranks * tokens if call.mode == "ll" else call.rows
    dest = jnp.where(send_slot >= 0, send_slot // slots_per_rank, ranks)
    out = pair_scalars_out = None
    if y is not None:
        partial = _rank_partials(call, y, row_weights, valid, token)
        if group.partials == "dtype":
            partial = rounded(partial, call.dtype)
        arrived = collectives.exchange(call, partial.reshape(ranks, tokens, call.hidden))
        present = jnp.any(dest[None] == lax.iota(jnp.int32, ranks)[:, None, None], axis=-1)
        out = _sum_over_ranks(call, arrived, present)
    if pair_scalars is not None:
        if call.layout == "rank_major":
            by_pair = pair_scalars.reshape(ranks, tokens, top_k)
        else:
            pairs = ranks * tokens * top_k
            index = jnp.where(valid, token * top_k + k, pairs)
            by_pair = jnp.zeros((pairs,), jnp.float32).at[index].set(pair_scalars, mode="drop")
            by_pair = by_pair.reshape(ranks, tokens, top_k)
        returned = collectives.exchange(call, by_pair)
        chosen = jnp.take_along_axis(returned, jnp.minimum(dest, ranks - 1)[None], axis=0)[0]
        pair_scalars_out = jnp.where(dest < ranks, chosen, 0.0)
    return {"out": out, "pair_scalars_out": pair_scalars_out}


def _empty_plan(call: Call) -> PlanArrays:
    group = call.group
    ranks, experts, top_k = group.num_ranks, group.experts_per_rank, call.top_k
    zero = jnp.zeros((), jnp.int32)
    return PlanArrays(
        group_sizes=jnp.zeros((experts,), jnp.int32),
        pairs_per_expert=jnp.zeros((experts,), jnp.int32),
        send_slot=jnp.zeros((0, top_k), jnp.int32),
        recv_src=jnp.full((call.rows,), -1, jnp.int32),
        send_counts=jnp.zeros((ranks,), jnp.int32),
        recv_counts=jnp.zeros((ranks,), jnp.int32),
        num_dropped=zero,
        overflow=zero,
        recv_topk_idx=(
            jnp.zeros((ranks, 0, top_k), jnp.int32) if call.layout == "rank_major" else None
        ),
    )


def _recv_src(
    call: Call, routing: planning.Routing, arrived: jax.Array, me: jax.Array
) -> jax.Array:
    """i32[R]: which pair each of this rank's rows holds, -1 for padding."""
    group = call.group
    experts, tokens, top_k = group.experts_per_rank, call.num_tokens, call.top_k
    if call.layout == "rank_major":
        slots = arrived.reshape(-1, top_k)
        k = jnp.argmax(slots, axis=1).astype(jnp.int32)  # the lowest
        pair = lax.iota(jnp.int32, call.rows) * top_k + k
        valid = jnp.any(slots, axis=1)
    else:
        starts = _slice(routing.starts, me * experts, experts)
        counts = _slice(routing.counts, me * experts, experts)
        first = _slice(routing.first, me * experts, experts)
        row = lax.iota(jnp.int32, call.rows)
        # An empty zone starts where the next one does: the last that starts by then has the row.
        begins = jnp.zeros((call.rows,), jnp.int32).at[starts].add(1, mode="drop")
        local = jnp.cumsum(begins, dtype=jnp.int32) - 1
        position = row - starts[local]
        valid = position < counts[local]
        pair = routing.order[jnp.where(valid, first[local] + position, 0)]
    source, within = pair // (tokens * top_k), pair % (tokens * top_k)
    return jnp.where(valid, source * (group.config.max_tokens * top_k) + within, -1)


def _sources(call: Call, recv_src: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row: is it used, source * T + t (0 for padding), and k."""
    stride = call.group.config.max_tokens * call.top_k
    valid = recv_src >= 0
    code = jnp.where(valid, recv_src, 0)
    within = code % max(stride, 1)
    token = code // max(stride, 1) * call.num_tokens + within // call.top_k
    return valid, token, within % call.top_k


def _rank_partials(
    call: Call,
    y: jax.Array,
    row_weights: jax.Array | None,
    valid: jax.Array,
    token: jax.Array,
) -> jax.Array:
    """f32[N*T, H]: this rank's rows of each token, added in row order (anything where none)."""

    def term(rows: jax.Array) -> jax.Array:
        # The caller's rounding, too: XLA would leave it out where f32 becomes y and then f32 again.
        value = rounded(_take(y, rows).astype(jnp.float32), call.dtype).astype(jnp.float32)
        return value if row_weights is None else value * row_weights[rows][:, None]

    tokens = call.group.num_ranks * call.num_tokens
    if call.layout == "rank_major":
        return term(lax.iota(jnp.int32, tokens))
    key = jnp.where(valid, token, tokens)
    by_token = jnp.argsort(key, stable=True).astype(jnp.int32)
    count = jnp.zeros((tokens + 1,), jnp.int32).at[key].add(1)
    first = (jnp.cumsum(count, dtype=jnp.int32) - count)[:tokens]
    count = count[:tokens]
    last_row = by_token.size - 1

    def add(j: jax.Array, total: jax.Array) -> jax.Array:
        rows = by_token[jnp.minimum(first + j, last_row)]
        return jnp.where((j < count)[:, None], total + term(rows), total)

    most = jnp.max(count)  # rows of one token here: often far below top_k
    total: jax.Array = lax.fori_loop(1, most, add, term(by_token[jnp.minimum(first, last_row)]))
    return total


def _sum_over_ranks(call: Call, partials: jax.Array, present: jax.Array) -> jax.Array:
    """[T, H]: the ranks' partials [N, T, H] added along the fixed tree, absent ones skipped."""
    group = call.group
    by_node = (group.num_ranks // group.node_size, group.node_size)
    wide = partials.astype(jnp.float32).reshape(*by_node, *partials.shape[1:])
    total, has = _tree_sum(wide, present.reshape(*by_node, -1))
    if group.partials == "dtype":
        total = rounded(total, call.dtype).astype(jnp.float32)
    total, has = _tree_sum(total[None], has[None])
    return rounded(jnp.where(has[0][:, None], total[0], 0.0), call.dtype)


def _tree_sum(terms: jax.Array, has: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Over axis 1 of [M, n, T, H]: neighbours first, an odd last one moves up unchanged."""
    while terms.shape[1] > 1:
        even = terms.shape[1] // 2 * 2
        a, b = terms[:, 0:even:2], terms[:, 1:even:2]
        has_a, has_b = has[:, 0:even:2], has[:, 1:even:2]
        both = jnp.where(has_b[..., None], jnp.where(has_a[..., None], a + b, b), a)
        terms = jnp.concatenate([both, terms[:, even:]], axis=1)
        has = jnp.concatenate([has_a | has_b, has[:, even:]], axis=1)
    return terms[:, 0], has[:, 0]


def _slice(array: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, start, size)


def _take(array: jax.Array, rows: jax.Array) -> jax.Array:
    """array[rows] for rows known to be in range; empty arrays have only padding to offer."""
    if array.shape[0] == 0:
        return jnp.zeros((rows.shape[0], *array.shape[1:]), array.dtype)
    return array.at[rows].get(mode="promise_in_bounds")


def _gather_rows(call: Call, array: jax.Array) -> jax.Array:
    """[N*T, ...]: every rank's rows, by rank."""
    if call.num_tokens == 0:
        return array
    everyones = collectives.gather(call, array)
    return everyones.reshape(-1, *array.shape[1:])
