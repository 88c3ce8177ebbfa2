"""Padding through a whole layer: ranks with different numbers of real tokens, in one call."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import (
    DEEPSEEK,
    MIXTRAL,
    assert_close,
    dense_loss,
    group_of,
    mesh_of,
    moe_of,
    tokens_of,
    weights_of,
)

from jax_ep import flax as ep_flax

REAL = (6, 2, 0, 5)  # real tokens of each rank, all padded to 6
SHAPE = (4, 6, 16)  # [rank, T, H]
MASK = np.arange(6) < np.array(REAL)[:, None]
UNGATED = dataclasses.replace(  # its shared expert does not map 0 to 0
    DEEPSEEK, gated=False, activation=jax.nn.sigmoid
)


def padded_tokens() -> np.ndarray:
    x = tokens_of(SHAPE)
    x[~MASK] = np.nan  # padding may hold anything
    return x


def loss(moe, x, mask):
    out, stats = moe(x, mask=mask)
    return jnp.sum(jnp.sin(out)) + stats.balance_loss, (out, stats)


step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))


def assert_is_that_of_the_real_tokens(config, moe, got, gradients):
    """Everything equals the dense layer's on the real tokens alone, on one rank."""
    value, (out, stats) = got
    weights, real = weights_of(moe), padded_tokens()[MASK]
    oracle = jax.jit(jax.value_and_grad(lambda w: dense_loss(config, w, real), has_aux=True))
    (wanted, (wanted_out, load)), wanted_gradients = jax.device_get(oracle(weights))
    assert_close(value, wanted, "loss")
    assert_close(np.asarray(out)[MASK], wanted_out, "out")
    assert np.all(np.asarray(out)[~MASK] == 0)
    np.testing.assert_array_equal(stats.load, load)
    assert stats.load.sum() == sum(REAL) * config.top_k and stats.num_dropped == 0
    for name, gradient in weights_of(gradients).items():
        assert_close(gradient, wanted_gradients[name], name)


@pytest.mark.parametrize(
    ("config", "kind"),
    [(MIXTRAL, "Auto"), (DEEPSEEK, "Explicit"), (UNGATED, "Auto")],
    ids=["mixtral", "deepseek-explicit", "ungated"],
)
def test_ranks_may_have_different_numbers_of_tokens(config, kind):
    mesh = mesh_of((4,), axis_types=(getattr(AxisType, kind),))
    moe = moe_of(config, group_of(config, mesh))
    got, gradients = step(moe, padded_tokens(), MASK)
    assert_is_that_of_the_real_tokens(config, moe, got, gradients)


def test_masks_with_tp_and_fsdp():
    mesh = mesh_of((2, 2, 2), ("fsdp", "ep", "tp"))
    placement = ep_flax.Placement(fsdp="fsdp", tp="tp")
    moe = moe_of(DEEPSEEK, group_of(DEEPSEEK, mesh), placement=placement)
    got, gradients = step(moe, padded_tokens(), MASK)
    assert_is_that_of_the_real_tokens(DEEPSEEK, moe, got, gradients)


def test_inside_a_shard_map_and_in_linen_masks_are_local():
    group = group_of(MIXTRAL, mesh_of((4,)))
    moe = moe_of(MIXTRAL, group)
    wanted, _ = nnx.jit(lambda moe, x, mask: moe(x, mask=mask))(moe, padded_tokens(), MASK)
    linen = ep_flax.linen.MoE(MIXTRAL, group)
    weights = weights_of(moe)
    specs = {name: P("ep") if name.startswith("w_") else P() for name in weights}

    def local(params, x, mask):
        return linen.apply({"params": params}, x, mask=mask, mode="ht")[0]

    mapped = jax.shard_map(
        local, mesh=group.mesh, in_specs=(specs, P("ep"), P("ep")), out_specs=P("ep")
    )
    np.testing.assert_array_equal(jax.jit(mapped)(weights, padded_tokens(), MASK), wanted)


def test_a_mask_that_does_not_fit_is_refused():
    moe = moe_of(MIXTRAL, group_of(MIXTRAL, mesh_of((4,)), implementation="xla"))
    with pytest.raises(ValueError, match=r"got mask bool\[4\], expected bool\[4, 6\]"):
        moe(tokens_of(SHAPE), mask=jnp.ones(4, bool))
    with pytest.raises(ValueError, match=r"got mask int32\[4, 6\], expected bool\[4, 6\]"):
        moe(tokens_of(SHAPE), mask=jnp.ones((4, 6), jnp.int32))
    with pytest.raises(ValueError, match=r"got mask of type list, expected bool\[4, 6\]"):
        moe(tokens_of(SHAPE), mask=MASK.tolist())
