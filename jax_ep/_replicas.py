"""Arrays of experts in slots: there and back, to another placement, and summed over replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _placement, _slots
from jax_ep._group import Group
from jax_ep._ops import placing, reachable, sharding
from jax_ep._placement import Placement


def to_physical(tree: Any, placement: Placement) -> Any:
    """Arrays of experts as arrays of slots: what a layer with `placement` computes with.

    Args:
        tree: arrays [E, ...], such as a checkpoint's.
        placement: where the experts go.

    Returns:
        Arrays [P, ...], row p that of the expert in slot p; global, so shard their first axis over
        the group's axes.

    Raises:
        ValueError: an array has not E rows.

    Example:
        >>> placement = jax_ep.Placement.identity(4, 6)
        >>> jax_ep.eplb.to_physical(np.arange(4), placement).tolist()
        [0, 1, 2, 3, 0, 1]
    """
    _placement.require("jax_ep.eplb.to_physical", placement)
    _require_one("to_physical", placement)
    _check_rows("to_physical", tree, placement.num_experts, "num_experts")
    return jax.tree.map(lambda leaf: leaf[placement.physical_to_logical], tree)


def to_logical(tree: Any, placement: Placement) -> Any:
    """Arrays of slots as arrays of experts: what a checkpoint holds, whatever the placement.

    Args:
        tree: arrays [P, ...], in which all replicas of an expert are equal.
        placement: where the experts are.

    Returns:
        Arrays [E, ...], row e that of the first slot of expert e.

    Raises:
        ValueError: an array has not P rows.

    Example:
        >>> placement = jax_ep.Placement.from_physical([1, 0, 1], 2)
        >>> jax_ep.eplb.to_logical(np.array([7, 5, 7]), placement).tolist()
        [5, 7]
    """
    _placement.require("jax_ep.eplb.to_logical", placement)
    _require_one("to_logical", placement)
    _check_rows("to_logical", tree, placement.physical_experts, "physical_experts")
    return jax.tree.map(lambda leaf: leaf[placement.logical_to_physical[:, 0]], tree)


def _require_one(operation: str, placement: Placement) -> None:
    if jnp.ndim(placement.physical_to_logical) != 1:
        raise ValueError(
            f"jax_ep.eplb.{operation}: got a placement with maps of shape "
            f"{list(jnp.shape(placement.physical_to_logical))}, expected that of one layer, [P]; "
            f"of stacked layers use jax.vmap(jax_ep.eplb.{operation})"
        )


def _check_rows(operation: str, tree: Any, rows: int, name: str) -> None:
    for leaf in jax.tree.leaves(tree):
        if jnp.ndim(leaf) == 0 or leaf.shape[0] != rows:
            raise ValueError(
                f"jax_ep.eplb.{operation}: got an array of shape {list(jnp.shape(leaf))}, expected "
                f"{rows} rows, {name} of the placement; pass the arrays of the experts alone"
            )


def move(
    group: Group, tree: Any, old: Placement, new: Placement, active: jax.Array | None = None
) -> Any:
    """Arrays of this rank's slots after the placement changed: weights, optimizer states.

    What a rank holds already it keeps; of the rest each slot gets one row, from one replica. The
    values are moved bit for bit, through the group's exchanges, and have no gradient.

    Args:
        group: the group; call inside shard_map over its axis.
        tree: arrays [slots, ...] of this rank (P / N slots), as `old` places them; equal on all
            replicas of an expert.
        old: where the experts are.
        new: where they shall be.
        active: in an elastic group, as in `plan`: rows travel between active ranks alone. A slot
            whose expert no active rank has keeps its row: load that expert from a checkpoint.

    Returns:
        `tree` as `new` places it.

    Raises:
        ValueError: shapes do not fit the group, or dtypes have no bytes of their own: complex
            numbers, those of less than a byte, keys of jax.random.

    Example:
        >>> old = jax_ep.Placement.identity(group.config.num_experts)
        >>> new = jax_ep.Placement.from_physical(old.physical_to_logical[::-1], old.num_experts)
        >>> kernels = jax_ep.eplb.move(group, kernels, old, new)
    """
    _check_slots(group, "eplb.move", tree)
    for leaf in jax.tree.leaves(tree):
        _check_has_bytes(jnp.result_type(leaf))
    per_rank = group.experts_per_rank
    old, takes_part = _living(group, "eplb.move", old, active)
    new = placing.checked(group, "eplb.move", new)
    slot = lax.iota(jnp.int32, new.physical_experts)
    replicas = old.logical_to_physical[new.physical_to_logical]  # [P, X]
    # On the slot's own rank if there is one (it may stay where it is), else spread over all.
    counts = old.replica_counts[new.physical_to_logical]
    number = lax.broadcasted_iota(jnp.int32, replicas.shape, 1)
    of_slot = (slot % jnp.maximum(counts, 1))[:, None]
    spread = jnp.take_along_axis(replicas, of_slot, axis=1)[:, 0]
    here = (number < counts[:, None]) & (replicas // per_rank == (slot // per_rank)[:, None])
    first = jnp.take_along_axis(replicas, jnp.argmax(here, axis=1)[:, None], axis=1)[:, 0]
    source = jnp.where(jnp.any(here, axis=1), first, jnp.where(counts > 0, spread, slot))
    return _slots.fetch(group, tree, source, takes_part)


def reduce_gradients(
    group: Group, gradients: Any, placement: Placement, active: jax.Array | None = None
) -> Any:
    """Gradients of this rank's slots, each summed over the replicas of its expert.

    Every replica gets the sum, bit for bit the same, so replicas that were equal stay equal under
    any optimizer that treats them alike. The sum is in f32, in the order of
    `logical_to_physical`, then rounded to the array's dtype.

    Args:
        group: the group; call inside shard_map over its axis.
        gradients: float arrays [slots, ...] of this rank (P / N slots).
        placement: that of the forward pass.
        active: in an elastic group, that of the forward pass: replicas on other ranks have no part.

    Returns:
        Arrays like `gradients`.

    Raises:
        ValueError: shapes do not fit the group, or arrays are not of floats.

    Example:
        >>> placement = jax_ep.Placement.identity(group.config.num_experts)
        >>> gradients = jax_ep.eplb.reduce_gradients(group, kernels, placement)
    """
    _check_slots(group, "eplb.reduce_gradients", gradients)
    for leaf in jax.tree.leaves(gradients):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"jax_ep.eplb.reduce_gradients: got an array of {jnp.result_type(leaf)}, expected "
                "floats, which are summed in float32; leave other arrays out"
            )
    placement, takes_part = _living(group, "eplb.reduce_gradients", placement, active)
    slot = lax.iota(jnp.int32, placement.physical_experts)
    replicas = placement.logical_to_physical[placement.physical_to_logical]  # [P, X]
    counts = placement.replica_counts[placement.physical_to_logical]
    home = replicas[:, 0]
    mine = sharding.rank_index(group) * group.experts_per_rank
    own = mine + lax.iota(jnp.int32, group.experts_per_rank)

    def add(index: jax.Array, sums: Any) -> Any:
        """Adds replica `index` of each expert, where it has so many, at its home."""
        takes = (home == slot) & (index < counts)
        source = jnp.where(takes, lax.dynamic_index_in_dim(replicas, index, 1, False), slot)
        terms = _slots.fetch(group, gradients, source, takes_part)

        def sum_of(total: jax.Array, term: jax.Array) -> jax.Array:
            adds = takes[own].reshape(-1, *(1,) * (term.ndim - 1))
            return jnp.where(adds, total + term.astype(jnp.float32), total)

        return jax.tree.map(sum_of, sums, terms)

    first = jax.tree.map(
        lambda leaf: _slots.varying(group, jnp.asarray(leaf).astype(jnp.float32)), gradients
    )
    sums = lax.fori_loop(1, jnp.max(placement.replica_counts), add, first)
    rounded = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, gradients)
    return _slots.fetch(group, rounded, home, takes_part)


def _check_has_bytes(dtype: Any) -> None:
    try:
        jax.eval_shape(_slots.as_bytes, jax.ShapeDtypeStruct((1, 1), dtype))
    except (TypeError, ValueError):
        raise ValueError(
            f"jax_ep.eplb.move: got an array of {dtype}, expected bools, integers or floats of a "
            "byte or more; move real and imaginary parts, jax.random.key_data, or a cast"
        ) from None


def _living(
    group: Group, operation: str, placement: Any, active: Any
) -> tuple[Placement, jax.Array | None]:
    """The placement's replicas on active ranks, and bool[N] of these ranks; None: on all."""
    placement = placing.checked(group, operation, placement)
    if active is None:
        return placement, None
    takes_part = reachable.checked(group, operation, active)
    return placing.among(placement, takes_part, group.experts_per_rank), takes_part


def _check_slots(group: Group, operation: str, tree: Any) -> None:
    sharding.check_call(group, operation)
    for leaf in jax.tree.leaves(tree):
        if jnp.ndim(leaf) == 0 or leaf.shape[0] != group.experts_per_rank:
            raise ValueError(
                f"jax_ep.{operation}: got an array of shape {list(jnp.shape(leaf))}, expected "
                f"[{group.experts_per_rank}, ...], a row for each of this rank's slots; pass the "
                "arrays of the experts alone, inside shard_map"
            )
