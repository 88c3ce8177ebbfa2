"""Pairs whose expert lives on a rank that the group goes on without: left out, and counted.

A rewrite of expert ids before the plan, and of the placement, if there is one: of an expert's
replicas only those on active ranks are left to choose from (`placing.place`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._group import Group
from jax_ep._ops import operands, placing, sharding
from jax_ep._placement import Placement
from jax_ep._types import Plan

# Added to the id of an expert that cannot be reached: negative, so no expert to anyone, and native
# kernels see by which mask it was left out (kernels/launch.h, kUnreachable).
UNREACHABLE = np.int32(np.iinfo(np.int32).min)


class Reachable(NamedTuple):
    """Ids and weights [T, K] of a call, and how many of its pairs cannot be reached (i32[]).

    Ids are None with a plan; the number is None where nobody has asked who takes part.
    """

    ids: Any
    weights: jax.Array | None
    num_unreachable: jax.Array | None
    placement: Placement | None


def checked(group: Group, operation: str, active: Any) -> jax.Array:
    """bool[N] of a mask; raises unless it is one for an elastic `group`."""
    if not group.config.elastic:
        raise operands.fail(
            operation,
            "active",
            "for a group of Config.elastic=False",
            "Config(elastic=True), whose ranks agree on who takes part",
            "create the group with it, or leave active out",
        )
    if not hasattr(active, "shape") or not hasattr(active, "dtype"):
        active = np.asarray(active)
    is_mask = jnp.issubdtype(active.dtype, jnp.integer) or active.dtype == jnp.bool_
    if not is_mask or tuple(active.shape) != (group.num_ranks,):
        raise operands.fail(
            operation,
            "active",
            f"{active.dtype}{list(active.shape)}",
            f"integers or bools [N={group.num_ranks}]",
            "pass what Group.agree returned",
        )
    return jnp.asarray(active).astype(jnp.int32) != 0


def leave_out(
    group: Group,
    operation: str,
    topk_idx: Any,
    topk_weights: Any,
    active: Any,
    placement: Placement | None,
    *,
    x: Any = None,
    plan: Plan | None = None,
    renormalize: bool = False,
) -> Reachable:
    """Leaves out the pairs of `topk_idx` [T, K] whose expert lives on no active rank.

    Args:
        group: the group.
        operation: for messages.
        topk_idx: integers [T, K].
        topk_weights: floats [T, K], or None.
        active: integers or bools [N], not 0 where a rank takes part; uniform over the group. None:
            nothing is left out but what `plan` left out.
        placement: where the experts are; None: expert e on rank e // E_l.
        x: the tokens [T, H] that the pairs are of, where there are any.
        plan: that the call follows instead of `topk_idx`.
        renormalize: scale a token's weights so that those of its reachable pairs have the sum that
            all had. (None of them: all are 0.)

    Returns:
        A `Reachable`; its placement is that of the replicas on active ranks.

    Raises:
        ValueError: `active` is no such array or is given with a plan, the group is not elastic,
            there is nothing to renormalize, or the pairs are not those of x.
    """
    if active is None:
        if renormalize:
            raise operands.fail(
                operation,
                "renormalize=True",
                "without active",
                "active",
                "pass it, or leave renormalize out",
            )
        if plan is not None:
            operands.require_plan(operation, plan)
        left_out = None if plan is None else plan.num_unreachable
        return Reachable(topk_idx, topk_weights, left_out, placement)
    if plan is not None:
        raise operands.fail(
            operation,
            "active",
            "with a plan",
            "one of them",
            "plan(..., active=active) makes such a plan",
        )
    num_tokens = None
    if x is not None:  # before weights and ids of other tokens are put together
        sharding.check_call(group, operation)
        num_tokens = operands.check_tokens(group, operation, x, topk_weights)
    takes_part = checked(group, operation, active)
    if renormalize and topk_weights is None:
        raise operands.fail(
            operation, "renormalize=True", "without topk_weights", "weights", "leave it out"
        )
    ids = operands.check_ids(group, operation, topk_idx, num_tokens)
    in_range = (ids >= 0) & (ids < group.config.num_experts)
    expert = jnp.where(in_range, ids, 0)
    if placement is None:
        home, lives = ids, takes_part[expert // group.experts_per_rank]
    else:
        placing.check_types(group, operation, placement)
        home = jnp.asarray(placement.logical_to_physical)[expert, 0]
        placement = placing.among(placement, takes_part, group.experts_per_rank)
        lives = placement.replica_counts[expert] > 0
    lost = in_range & ~lives
    weights = topk_weights
    if renormalize:
        weights = jnp.asarray(topk_weights)
        reached = jnp.sum(jnp.where(lost, 0, weights), axis=1, keepdims=True)
        everything = jnp.sum(weights, axis=1, keepdims=True)
        factor = jnp.where(reached == 0, 0, everything / jnp.where(reached == 0, 1, reached))
        # Exactly the weights that were given where nothing is lost.
        weights = jnp.where(jnp.any(lost, axis=1, keepdims=True), weights * factor, weights)
    return Reachable(
        jnp.where(lost, UNREACHABLE + home, ids),
        weights,
        jnp.sum(lost, dtype=jnp.int32),
        placement,
    )
