"""precision="fp8": close to the layer in dtype, the same in NNX and Linen, and it trains."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import MIXTRAL, group_of, loss, mesh_of, moe_of, tokens_of

import jax_ep
from jax_ep import flax as ep_flax

WIDE = dataclasses.replace(MIXTRAL, hidden=128, expert_width=128)
WIRE = jax_ep.FP8(block=64)
SHAPE = (4, 8, 128)

step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))


def cosine(a, b):
    a, b = (np.asarray(each, np.float64).ravel() for each in (a, b))
    return a @ b / np.sqrt((a @ a) * (b @ b))


def test_a_layer_in_fp8_is_close_to_that_in_dtype_and_trains():
    group = group_of(WIDE, mesh_of((4,)), wire=WIRE, mode="ht")
    plain_group = group_of(WIDE, mesh_of((4,)), mode="ht")
    moe, plain = moe_of(WIDE, group, precision="fp8"), moe_of(WIDE, plain_group)
    x = tokens_of(SHAPE)
    (value, (out, stats)), gradients = step(moe, x)
    (_, (wanted, wanted_stats)), wanted_gradients = step(plain, x)
    np.testing.assert_array_equal(stats.load, wanted_stats.load)
    assert 0.998 <= cosine(out, wanted) < 1
    names = ("router", "w_gate", "w_up", "w_down")
    for name in names:
        mine, theirs = (getattr(each, name)[...] for each in (gradients, wanted_gradients))
        # The router's gradient is of the experts' results, which are as far from those in dtype.
        assert cosine(mine, theirs) >= (0.998 if name == "router" else 0.999), name
    linen = ep_flax.linen.MoE(WIDE, group, precision="fp8")
    weights = {name: getattr(moe, name)[...] for name in names}
    again, _ = jax.jit(linen.apply)({"params": weights}, x)
    np.testing.assert_array_equal(again, out)

    graph, state = nnx.split(moe, nnx.Param)
    for _ in range(3):
        state = jax.tree.map(lambda w, g: w - 0.05 * g, state, nnx.state(gradients, nnx.Param))
        (newer, _), gradients = step(nnx.merge(graph, state), x)
    assert newer < value


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"precision": "int8"}, r"got precision='int8', expected None or one of \('fp8',\)"),
        ({"gated": False}, {"precision": "fp8"}, r"expected gated experts with jax.nn.silu"),
        (
            {},
            {"precision": "fp8", "expert_fn": ep_flax.ragged_ffn},
            r"with an expert_fn, expected one of both; leave one out",
        ),
    ],
)
def test_misuse_of_precision(changes, options, message):
    config = dataclasses.replace(MIXTRAL, **changes)
    group = group_of(config, mesh_of((4,)), implementation="xla")
    with pytest.raises(ValueError, match=message):
        ep_flax.MoE(config, group, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match=message):
        ep_flax.linen.MoE(config, group, **options).init(jax.random.key(0), jnp.ones((8, 16)))
