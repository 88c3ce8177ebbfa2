"""Logical expert ids to slots, before a plan is made: all that operations know of a placement.

What follows, on every platform and in every mode, sees a group of P experts, the slots.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _config, _jax_compat, _placement
from jax_ep._group import Group
from jax_ep._ops import collectives, invalid_ids, sharding
from jax_ep._ops.call import Call
from jax_ep._placement import Placement


def place(call: Call, operation: str, ids: jax.Array, placement: Placement | None) -> jax.Array:
    """The slots of logical ids i32[T, K]; without a placement the ids are slots.

    Token t of rank s takes replica (s*T + t) % replica_counts[e] of expert e, for each of its
    pairs. Ids that name no expert name no slot: negative ones stay as they are, those of E or more
    become P or more.
    """
    if placement is None:
        _require_none_needed(call.group, operation)
        return ids
    with jax.named_scope("jax_ep.place"):
        return _slots(call, ids, checked(call.group, operation, placement))


def _slots(call: Call, ids: jax.Array, placement: Placement) -> jax.Array:
    num_experts, more = placement.num_experts, call.num_slots - placement.num_experts
    token = lax.iota(jnp.int32, call.num_tokens)
    token += sharding.rank_index(call.group) * call.num_tokens
    expert = jnp.clip(ids, 0, num_experts - 1)
    # A traced count of 0, which no sound placement has, must not divide.
    replica = token[:, None] % jnp.maximum(placement.replica_counts[expert], 1)
    slots = placement.logical_to_physical[expert, replica]
    beyond = jnp.minimum(ids, _config.INT32_MAX - more) + more
    return jnp.where(ids < 0, ids, jnp.where(ids < num_experts, slots, beyond))


def _require_none_needed(group: Group, operation: str) -> None:
    config = group.config
    if _config.physical_experts(config) != config.num_experts:
        raise ValueError(
            f"jax_ep.{operation}: got no placement in a group of num_experts={config.num_experts} "
            f"and physical_experts={config.physical_experts}, expected one that says which expert "
            "is in which slot; pass placement=, such as jax_ep.Placement.identity"
            f"({config.num_experts}, {config.physical_experts})"
        )


def checked(group: Group, operation: str, placement: Any) -> Placement:
    """`placement` in i32; raises unless it is one for layers of `group`, by its types alone.

    With JAX_EP_DEBUG it is there only once it is certain that all ranks have the same; not in
    elastic groups, as a collective over a dead process never ends.
    """
    check_types(group, operation, placement)
    placement = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.int32), placement)
    call = Call(group, "ht", "expert_major", 1)
    looks = not group.config.elastic and invalid_ids.may_look(call)
    return _refuse_differing(call, placement) if looks else placement


def among(placement: Placement, takes_part: jax.Array, slots_per_rank: int) -> Placement:
    """`placement` with the replicas on ranks that take part, in their order, before the others."""
    maps = jnp.asarray(placement.logical_to_physical)
    lives = (maps >= 0) & takes_part[jnp.maximum(maps, 0) // slots_per_rank]
    order = jnp.argsort(~lives, axis=1, stable=True)
    living = jnp.take_along_axis(maps, order, axis=1)
    counts = jnp.sum(lives, axis=1, dtype=jnp.int32)
    # Not by the constructor, which would refuse maps that leave out slots.
    leaves = [placement.physical_to_logical, living, counts]
    of_living: Placement = jax.tree.unflatten(jax.tree.structure(placement), leaves)
    return of_living


def check_types(group: Group, operation: str, placement: Any) -> None:
    """Raises unless it has the types and shapes of a placement for layers of `group`."""
    _placement.require(f"jax_ep.{operation}", placement)
    experts, slots = group.config.num_experts, _config.physical_experts(group.config)
    got = {name: np.shape(leaf) for name, leaf in vars(placement).items()}
    maps = got["logical_to_physical"]
    expected = {
        "physical_to_logical": (slots,),
        "logical_to_physical": (experts, *maps[1:2]),
        "replica_counts": (experts,),
    }
    for name, shape in expected.items():
        if got[name] != shape or len(maps) != 2 or maps[1] == 0:
            raise ValueError(
                f"jax_ep.{operation}: got placement.{name} of shape {list(got[name])}, expected "
                f"{list(shape) if name != 'logical_to_physical' else f'[{experts}, X]'} for "
                f"num_experts={experts} and physical_experts={slots}; build the placement for "
                "this group's Config, and of stacked ones pass that of the layer"
            )
        if not jnp.issubdtype(jnp.result_type(getattr(placement, name)), jnp.integer):
            raise ValueError(
                f"jax_ep.{operation}: got placement.{name} of "
                f"{jnp.result_type(getattr(placement, name))}, expected int32; cast it"
            )


def _refuse_differing(call: Call, placement: Placement) -> Placement:
    """`placement`, once it is certain that all ranks have the same."""
    group = call.group

    def look(digests: Any) -> Any:
        differing = np.flatnonzero(np.asarray(digests) != np.asarray(digests)[0]).tolist()
        if differing:
            raise ValueError(
                f"jax_ep, group {group._label}: got a placement on rank(s) {differing} that "
                "differs from that of rank 0, expected one placement on all ranks of the group; "
                "make it on one process and send it to the others, or pass it with in_specs P() "
                "(JAX_EP_DEBUG is set; without it rows would go to other experts)"
            )
        return np.int32(0)

    digest = _jax_compat.to_varying(_digest(placement).reshape(1), group.axes)
    digests = collectives.gather(call, digest).reshape(-1)
    of_zero = _jax_compat.result_type(digests, (), jnp.int32)
    zero: jax.Array = jax.pure_callback(look, of_zero, digests, vmap_method="sequential")
    agreed: Placement = jax.tree.map(lambda leaf: leaf + zero, placement)
    return agreed


def _digest(placement: Placement) -> jax.Array:
    """An i32 that tells placements apart, but for one pair in 2^32."""
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(placement):
        place = lax.iota(jnp.uint32, leaf.size) * jnp.uint32(0x9E3779B9)
        mixed = (leaf.reshape(-1).astype(jnp.uint32) + place) * jnp.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
        total = total * jnp.uint32(31) + jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
    return lax.bitcast_convert_type(total, jnp.int32)
