"""Layers whose experts are in slots: outputs, gradients of replicas, checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import (
    MIXTRAL,
    assert_close,
    dense_loss,
    group_of,
    mesh_of,
    moe_of,
    tokens_of,
    weights_of,
)

import jax_ep
from jax_ep import eplb
from jax_ep import flax as ep_flax

SHAPE = (24, 16)
SLOTS = 12


def placement_of(seed: int, slots: int = SLOTS) -> jax_ep.Placement:
    rng = np.random.default_rng(seed)
    filled = np.concatenate([np.arange(8), rng.integers(0, 8, slots - 8)])
    return jax_ep.Placement.from_physical(rng.permutation(filled), 8)


def experts_of(moe: ep_flax.MoE) -> dict[str, jax.Array]:
    """The arrays of slots, by name."""
    return {n: getattr(moe, n)[...] for n in ("w_gate", "w_up", "w_down")}


def place(moe: ep_flax.MoE, logical: Any, placement: jax_ep.Placement) -> None:
    """Puts experts [E, ...] into the layer's slots."""
    for name, array in eplb.to_physical(logical, placement).items():
        variable = getattr(moe, name)
        variable[...] = jax.device_put(array, variable[...].sharding)


def loss(moe: ep_flax.MoE, x: Any, placement: Any, active: Any = None) -> Any:
    out, stats = moe(x, placement=placement, active=active)
    return jnp.sum(jnp.sin(out)) + stats.balance_loss, (out, stats)


step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))


def test_a_layer_with_replicas_trains_as_a_dense_one() -> None:
    group = group_of(MIXTRAL, mesh_of((4,)), physical_experts=SLOTS)
    moe, x = moe_of(MIXTRAL, group), tokens_of(SHAPE)
    logical = jax.device_get(eplb.to_logical(experts_of(moe), jax_ep.Placement.identity(8, SLOTS)))

    @functools.partial(jax.jit, static_argnums=0)
    def reduced(spec: Any, gradients: Any, placement: Any) -> Any:
        return jax.shard_map(
            lambda g, p: eplb.reduce_gradients(group, g, p),
            mesh=group.mesh,
            in_specs=(spec, P()),
            out_specs=spec,
        )(gradients, placement)

    weights = weights_of(moe) | logical
    oracle = jax.jit(jax.value_and_grad(lambda w: dense_loss(MIXTRAL, w, x), has_aux=True))
    (wanted, (wanted_out, load)), wanted_gradients = jax.device_get(oracle(weights))
    for seed in range(2):
        placement = placement_of(seed)
        place(moe, logical, placement)
        (value, (out, stats)), gradients = step(moe, x, placement)
        assert_close(value, wanted, "loss")
        assert_close(out, wanted_out, "out")
        np.testing.assert_array_equal(stats.load, load)  # of logical experts
        sums = reduced(P("ep"), experts_of(gradients), placement)
        for name, array in sums.items():
            for expert, slots in enumerate(placement.logical_to_physical):
                replicas = np.asarray(array)[slots[slots >= 0]]
                np.testing.assert_array_equal(replicas, np.stack([replicas[0]] * len(replicas)))
                assert_close(replicas[0], wanted_gradients[name][expert], name)
        assert_close(gradients.router[...], wanted_gradients["router"], "router")


@pytest.mark.ci
def test_linen_takes_a_placement_and_starts_with_equal_replicas() -> None:
    group = group_of(MIXTRAL, mesh_of((4,)), physical_experts=SLOTS)
    x, first = tokens_of(SHAPE), jax_ep.Placement.identity(8, SLOTS)
    moe = ep_flax.linen.MoE(MIXTRAL, group)
    variables = moe.init(jax.random.key(0), x, placement=first)
    out, _ = jax.jit(moe.apply)(variables, x, placement=first)
    placement = placement_of(3)

    def move(box: Any) -> Any:
        array = box.unbox()
        assert array.shape[0] == SLOTS
        np.testing.assert_array_equal(array[8:], array[:4])  # as identity has them
        return box.replace_boxed(eplb.to_physical(eplb.to_logical(array, first), placement))

    params = variables["params"]
    moved = {n: move(p) if n.startswith("w_") else p for n, p in params.items()}
    again, _ = jax.jit(moe.apply)({"params": moved}, x, placement=placement)
    assert_close(again, out)


def row_by_row(x: Any, sizes: Any, gate: Any, up: Any, down: Any) -> Any:
    """Experts whose bits do not depend on other rows, as XLA's products of many rows may."""
    ends = jnp.cumsum(sizes)

    def one(numbered: Any) -> Any:
        row, index = numbered
        slot = jnp.minimum(jnp.searchsorted(ends, index, side="right"), sizes.size - 1)
        return (jax.nn.silu(row @ gate[slot]) * (row @ up[slot])) @ down[slot]

    return jax.lax.map(one, (x, jnp.arange(x.shape[0])))


def test_a_checkpoint_loads_on_any_ranks_and_placement_bit_for_bit(tmp_path: Any) -> None:
    """It holds logical experts. Short numbers make the router's product exact, whatever its T."""
    x, path = np.round(4 * tokens_of(SHAPE)) / 4, tmp_path / "experts.npz"
    outs = []
    for seed, (ranks, slots) in enumerate([(4, 12), (2, 8), (4, 16)]):
        group = group_of(MIXTRAL, mesh_of((ranks,)), physical_experts=slots, batch_invariant=True)
        moe, placement = moe_of(MIXTRAL, group, expert_fn=row_by_row), placement_of(seed, slots)
        moe.router[...] = jnp.round(moe.router[...] * 64) / 64
        if seed == 0:
            logical = {n: a[:8] for n, a in jax.device_get(experts_of(moe)).items()}
            place(moe, logical, placement)
            np.savez(path, **eplb.to_logical(jax.device_get(experts_of(moe)), placement))
        else:
            with np.load(path) as saved:
                place(moe, dict(saved), placement)
        split = NamedSharding(group.mesh, P("ep"))
        outs.append(np.asarray(nnx.jit(loss)(moe, jax.device_put(x, split), placement)[1][0]))
    for out in outs[1:]:
        np.testing.assert_array_equal(out.view(np.uint32), outs[0].view(np.uint32))


def test_a_placement_of_the_other_kind_is_refused() -> None:
    moe = moe_of(MIXTRAL, group_of(MIXTRAL, mesh_of((2,))))
    with pytest.raises(ValueError, match=r"jax_ep.flax.Placement in a call"):
        moe(tokens_of(SHAPE), placement=ep_flax.Placement())


def test_experts_that_live_answer_for_those_of_lost_ranks() -> None:
    """`active` of an elastic group: replicas take their pairs, or the token's other experts do."""
    group = group_of(
        MIXTRAL, mesh_of((4,)), implementation="xla", physical_experts=SLOTS, elastic=True
    )
    moe, x, run = moe_of(MIXTRAL, group), tokens_of(SHAPE), nnx.jit(loss)
    logical = jax.device_get(eplb.to_logical(experts_of(moe), jax_ep.Placement.identity(8, SLOTS)))
    lost = np.array([1, 0, 1, 1], np.int32)  # rank 1: slots 3, 4 and 5
    everywhere = jax_ep.Placement.from_physical([0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 0], 8)
    place(moe, logical, everywhere)
    whole, stats = run(moe, x, everywhere)[1]
    out, same = run(moe, x, everywhere, lost)[1]
    assert_close(out, whole, "out")
    np.testing.assert_array_equal(same.load, stats.load)

    missing = jax_ep.Placement.from_physical([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 6], 8)
    router = jnp.asarray(moe.router[...])
    ids, weights = jax_ep.routing.topk_softmax(x @ router, 2, normalize=True)
    reached = jnp.where((ids >= 3) & (ids <= 5), 0, weights).sum(axis=1)
    place(moe, logical, missing)
    out, _ = run(moe, x, missing, lost)[1]
    w_down = logical["w_down"].copy()
    w_down[3:6] = 0
    place(moe, logical | {"w_down": w_down}, missing)
    part, _ = run(moe, x, missing, np.ones(4, np.int32))[1]
    factor = jnp.where(reached == 0, 0, 1 / jnp.where(reached == 0, 1, reached))
    assert 0 < int((reached == 0).sum()) < int((reached < 0.999).sum()) < x.shape[0]
    assert_close(out, part * factor[:, None], "renormalised")
