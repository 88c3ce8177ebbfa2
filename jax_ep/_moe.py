"""moe(): dispatch, experts, combine, in chunks if memory asks for it; built from the public ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_ep import _config
from jax_ep._config import Mode
from jax_ep._group import Group
from jax_ep._ops import api, operands, reachable, sharding
from jax_ep._overlap import overlap as overlap_
from jax_ep._overlap import overlap_gradients
from jax_ep._placement import Placement
from jax_ep._types import ExchangeStats, Plan

ExpertFn = Callable[[Any, jax.Array, jax.Array], jax.Array]


@overload
def moe(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None,
    topk_weights: jax.Array | None,
    expert_fn: ExpertFn,
    params: Any,
    *,
    chunks: int = 1,
    mode: Mode | None = None,
    plan: Plan | None = None,
    overlap: bool = False,
    placement: Placement | None = None,
    active: jax.Array | None = None,
    renormalize: bool = False,
    return_stats: Literal[False] = False,
) -> jax.Array: ...
@overload
def moe(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None,
    topk_weights: jax.Array | None,
    expert_fn: ExpertFn,
    params: Any,
    *,
    chunks: int = 1,
    mode: Mode | None = None,
    plan: Plan | None = None,
    overlap: bool = False,
    placement: Placement | None = None,
    active: jax.Array | None = None,
    renormalize: bool = False,
    return_stats: Literal[True],
) -> tuple[jax.Array, ExchangeStats]: ...
@overload
def moe(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None,
    topk_weights: jax.Array | None,
    expert_fn: ExpertFn,
    params: Any,
    *,
    chunks: int = 1,
    mode: Mode | None = None,
    plan: Plan | None = None,
    overlap: bool = False,
    placement: Placement | None = None,
    active: jax.Array | None = None,
    renormalize: bool = False,
    return_stats: bool,
) -> jax.Array | tuple[jax.Array, ExchangeStats]: ...
def moe(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None,
    topk_weights: jax.Array | None,
    expert_fn: ExpertFn,
    params: Any,
    *,
    chunks: int = 1,
    mode: Mode | None = None,
    plan: Plan | None = None,
    overlap: bool = False,
    placement: Placement | None = None,
    active: jax.Array | None = None,
    renormalize: bool = False,
    return_stats: bool = False,
) -> jax.Array | tuple[jax.Array, ExchangeStats]:
    """A whole mixture-of-experts layer: dispatch, `expert_fn` on this rank's rows, combine.

    Args:
        group: the group; call inside shard_map over its axis.
        x: [T, H] in Config.dtype.
        topk_idx: integers [T, K] as in `plan`; None with a plan.
        topk_weights: floats [T, K], or None for 1.
        expert_fn: `expert_fn(params, rows[R, H], group_sizes i32[E_l]) -> [R, H]` in Config.dtype,
            rows in expert_major order; rows beyond the sizes are zero and their results ignored.
        params: this rank's expert parameters, handed to expert_fn.
        chunks: > 1 (at most T) splits the tokens, padded with -1 rows, and scans over the chunks
            with a checkpointed body: R is R(T / chunks) and memory that of one chunk.
        overlap: with chunks > 1: the chunks are unrolled instead, and the exchanges of one run
            beside the experts of another (docs/overlap.md). Memory is that of two chunks; a
            backward keeps what it needs of all.
        mode: "ht" or "ll"; None: Config.mode, by the tokens of a chunk.
        plan: a plan in expert_major to follow instead of topk_idx; with chunks=1 only.
        placement: in which slots the experts are, as in `plan`; params are those of the rank's
            slots.
        active: which ranks take part, as in `plan`; not with a plan.
        renormalize: as in `dispatch`.
        return_stats: also return an `ExchangeStats`.

    Returns:
        [T, H] in Config.dtype; with return_stats a tuple of it and the stats.

    Raises:
        ValueError: as `dispatch` and `combine`, chunks < 1, a plan with chunks or of another
            layout, or overlap with one chunk.

    Example:
        >>> def experts(kernels, rows, group_sizes):
        ...     return jax.lax.ragged_dot(rows, kernels, group_sizes)
        >>> out = jax_ep.moe(group, x, topk_idx, topk_weights, experts, kernels)
    """
    if not _config.is_count(chunks):
        raise ValueError(f"jax_ep.moe: got chunks={chunks!r}, expected an int of at least 1; use 1")
    sharding.check_call(group, "moe")
    if not callable(expert_fn):
        raise operands.fail(
            "moe",
            f"expert_fn of type {type(expert_fn).__name__}",
            "",
            "a function of (params, rows, group_sizes)",
            "pass what computes the experts",
        )
    if plan is not None:
        operands.require_plan("moe", plan)
    if plan is not None and chunks > 1:
        raise ValueError(
            f"jax_ep.moe: got a plan with chunks={chunks}, expected chunks=1, as each chunk has a "
            "plan of its own; pass topk_idx instead, or leave chunks out"
        )
    if plan is not None and plan.layout != "expert_major":
        raise ValueError(
            f"jax_ep.moe: got a plan of layout={plan.layout!r}, expected 'expert_major', the order "
            "of expert_fn's rows; make the plan without layout="
        )

    def layer(
        x: jax.Array, topk_idx: jax.Array | None, topk_weights: jax.Array | None
    ) -> tuple[jax.Array, ExchangeStats]:
        x, own = overlap_gradients(x, params)
        recv = api.dispatch(
            group, x, topk_idx, topk_weights, plan=plan, mode=mode, placement=placement
        )
        y = expert_fn(own, recv.x, recv.group_sizes)
        made = recv.plan
        stats = ExchangeStats(made.pairs_per_expert, made.num_dropped, made.overflow)
        return api.combine(group, y, recv), stats

    if overlap and chunks == 1:
        raise ValueError(
            "jax_ep.moe: got overlap=True with chunks=1, expected chunks > 1, as one chunk's "
            "exchanges run beside another's experts; pass chunks=2, or leave overlap out"
        )

    num_tokens = operands.check_tokens(group, "moe", x, topk_weights)
    topk_idx, topk_weights, num_unreachable, placement = reachable.leave_out(
        group,
        "moe",
        topk_idx,
        topk_weights,
        active,
        placement,
        x=x,
        plan=plan,
        renormalize=renormalize,
    )
    if chunks == 1 or num_tokens == 0:
        out, stats = layer(x, topk_idx, topk_weights)
        stats = dataclasses.replace(stats, num_unreachable=num_unreachable)
        return (out, stats) if return_stats else out
    if topk_idx is None:
        raise ValueError(
            "jax_ep.moe: got neither topk_idx nor a plan, expected exactly one; pass one of them"
        )

    topk_idx = operands.check_ids(group, "moe", topk_idx, num_tokens)
    chunks = min(chunks, num_tokens)
    chunk_tokens = -(-num_tokens // chunks)
    missing = chunk_tokens * chunks - num_tokens

    def split(array: jax.Array, fill: int) -> jax.Array:
        padded = jnp.pad(array, ((0, missing), (0, 0)), constant_values=fill)
        return padded.reshape(chunks, chunk_tokens, array.shape[1])

    weights = None if topk_weights is None else split(topk_weights, 0)
    parts = (split(x, 0), split(topk_idx, -1), weights)
    if overlap:
        outs, each = _unrolled(group, parts, expert_fn, params, mode, placement)
    else:
        # The plan is small and costs an exchange: the backward keeps it instead of planning again.
        policy = jax.checkpoint_policies.save_only_these_names("jax_ep_plan")
        body = jax.checkpoint(lambda _, chunk: (None, layer(*chunk)), policy=policy)
        _, (outs, each) = jax.lax.scan(body, None, parts)
    joined: jax.Array = outs.reshape(-1, x.shape[1])[:num_tokens]
    if not return_stats:
        return joined
    return joined, ExchangeStats(
        jnp.sum(each.pairs_per_expert, axis=0, dtype=jnp.int32),
        jnp.sum(each.num_dropped, dtype=jnp.int32),
        jnp.max(each.overflow),
        num_unreachable,
    )


def _unrolled(
    group: Group,
    parts: tuple[jax.Array, jax.Array, jax.Array | None],
    expert_fn: ExpertFn,
    params: Any,
    mode: Mode | None,
    placement: Placement | None,
) -> tuple[jax.Array, ExchangeStats]:
    """Results and stats of each chunk of `parts`; stacked, as a scan over them would give.

    Beside the experts of chunk i run the dispatch of i + 1 and the combine of i - 1:

        exchange  dispatch 0 | dispatch 1 | combine 0, dispatch 2 | combine 1 ...
        experts              |  chunk 0   |        chunk 1        |  chunk 2  ...
    """
    chunks = parts[0].shape[0]
    outs: list[jax.Array] = []
    each: list[ExchangeStats] = []
    part, coming_params = overlap_gradients(_chunk(parts, 0), params)
    coming = api.dispatch(group, *part, mode=mode, placement=placement)
    for i in range(chunks):
        recv, own = coming, coming_params
        if i + 1 < chunks:  # which leaves when the one before it is here: memory of two
            recv, part = overlap_(recv, _chunk(parts, i + 1))
            part, coming_params = overlap_gradients(part, params)
            coming = api.dispatch(group, *part, mode=mode, placement=placement)
        y = expert_fn(own, recv.x, recv.group_sizes)
        # With all that the combine reads, so that nothing else keeps it from starting here.
        if i + 1 < chunks:
            coming, (y, recv) = overlap_(coming, (y, recv))
        if outs:
            outs[-1], (y, recv) = overlap_(outs[-1], (y, recv))
        outs.append(api.combine(group, y, recv))
        made = recv.plan
        each.append(ExchangeStats(made.pairs_per_expert, made.num_dropped, made.overflow))
    return jnp.stack(outs), jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def _chunk(
    parts: tuple[jax.Array, jax.Array, jax.Array | None], i: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, ids, weights = parts
    return x[i], ids[i], None if weights is None else weights[i]
