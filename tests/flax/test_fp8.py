"""precision="fp8": close to the layer in dtype, the same however it is split, and it trains."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import MIXTRAL, group_of, loss, mesh_of, moe_of, tokens_of, weights_of

import jax_ep
from jax_ep import flax as ep_flax

WIDE = dataclasses.replace(MIXTRAL, hidden=128, expert_width=128)
WIRE = jax_ep.FP8(block=64)
SHAPE = (4, 8, 128)
WIDER = dataclasses.replace(MIXTRAL, hidden=256, expert_width=256)
SHARED = dataclasses.replace(WIDER, router="sigmoid_bias", expert_width=96, shared_width=32)
MORE = (16, 4, 256)

step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
apply = nnx.jit(lambda moe, x: moe(x))


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
    values = [value]
    for _ in range(3):
        state = jax.tree.map(lambda w, g: w - 0.002 * g, state, nnx.state(gradients, nnx.Param))
        (newer, _), gradients = step(nnx.merge(graph, state), x)
        values.append(newer)
    assert np.all(np.diff(values) < 0), values


@nnx.jit
def pulled(moe, x, cotangent):
    """(out, gradients of the weights and of x) for this cotangent of out."""

    def loss(moe, x):
        out, _ = moe(x)
        return jnp.sum(out.astype(jnp.float32) * cotangent), out

    (_, out), gradients = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(moe, x)
    return out, *gradients


def test_gradients_are_close_to_those_of_dtype_however_small():
    group = group_of(WIDER, mesh_of((4,)), dtype=jnp.bfloat16)
    x, g = tokens_of(MORE), tokens_of(MORE, 1)
    in_dtype, in_fp8 = moe_of(WIDER, group), moe_of(WIDER, group, precision="fp8")
    wanted_out, wanted, wanted_x = pulled(in_dtype, x, g)
    out, got, got_x = pulled(in_fp8, x, g)
    assert out.dtype == jnp.bfloat16 and 0.997 <= cosine(out, wanted_out) < 0.9999
    assert cosine(got_x, wanted_x) >= 0.999
    got, wanted = weights_of(got), weights_of(wanted)
    for name in ("w_gate", "w_up", "w_down"):
        assert got[name].dtype == np.float32 and cosine(got[name], wanted[name]) >= 0.999, name
    # A product of cotangents and results in FP8: it has the error of `out`.
    assert cosine(got["router"], wanted["router"]) >= 0.997
    small = 2.0**-17  # below 1e-5: float8 would flush it; scales every sum without rounding
    _, _, small_x = pulled(in_fp8, x, g * np.float32(small))
    assert np.abs(got_x).max() > 0
    np.testing.assert_array_equal(np.asarray(small_x) / small, got_x)


def test_linen_and_nnx_are_one_layer_with_a_shared_expert_and_scales_of_one_byte():
    wire = jax_ep.FP8(block=64, scale="ue8m0")
    group = group_of(SHARED, mesh_of((4,)), wire=wire)
    moe, x = moe_of(SHARED, group, precision="fp8"), tokens_of(MORE)
    params = weights_of(moe)
    state = {ep_flax.linen.STATE: {"router_bias": params.pop("router_bias")}}
    linen = ep_flax.linen.MoE(SHARED, group, precision="fp8")
    got = jax.jit(linen.apply)({"params": params} | state, x)
    wanted = apply(moe, x)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    moe.precision = None
    in_dtype, stats = apply(moe, x)
    # Different by the rounding of x, w and the activation to 4 bits, which routing does not see.
    assert 0.997 <= cosine(got[0], in_dtype) < 0.9999
    jax.tree.map(np.testing.assert_array_equal, got[1], stats)


def test_fsdp_and_tp_give_the_same_layer():
    """Here a rank's share of the width is a block, so tp quantises the same blocks."""
    x, outs = tokens_of(MORE), []
    for shape, placement in (
        ((1, 2, 1), ep_flax.Placement()),
        ((2, 2, 2), ep_flax.Placement(fsdp="fsdp", tp="tp")),
    ):
        group = group_of(WIDER, mesh_of(shape, ("fsdp", "ep", "tp")))
        moe = moe_of(WIDER, group, placement=placement, precision="fp8")
        outs.append(pulled(moe, x, tokens_of(MORE, 1)))
    (one, one_weights, one_x), (split, split_weights, split_x) = outs
    pairs = {"out": (split, one), "x": (split_x, one_x)}
    ours, theirs = weights_of(split_weights), weights_of(one_weights)
    for name, (got, wanted) in (pairs | {n: (ours[n], theirs[n]) for n in ours}).items():
        bound = 1e-5 * np.abs(wanted).max()  # f32 sums in another order
        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound, err_msg=name)


def test_modes_agree_and_masked_tokens_do_not_count():
    group = group_of(WIDER, mesh_of((4,)))
    moe, x = moe_of(WIDER, group, precision="fp8"), tokens_of(MORE)
    wanted, _ = nnx.jit(lambda moe, x: moe(x, mode="ht"))(moe, x)
    got, _ = nnx.jit(lambda moe, x: moe(x, mode="ll"))(moe, x)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    mask = np.random.default_rng(0).random(MORE[:-1]) < 0.5
    padded = jnp.where(mask[..., None], x, jnp.nan)
    masked, stats = nnx.jit(lambda moe, x, mask: moe(x, mask=mask, mode="ht"))(moe, padded, mask)
    np.testing.assert_array_equal(np.asarray(masked)[~mask], 0)
    np.testing.assert_array_equal(np.asarray(masked)[mask], np.asarray(wanted)[mask])
    assert stats.load.sum() == mask.sum() * WIDER.top_k


def test_it_trains_as_the_layer_in_dtype_does():
    group = group_of(SHARED, mesh_of((4,)), dtype=jnp.bfloat16)
    x, wanted = tokens_of(MORE), tokens_of(MORE, 1)

    @nnx.jit
    def train_step(moe, x):
        def loss(moe):
            out, stats = moe(x)
            return jnp.mean((out.astype(jnp.float32) - wanted) ** 2), stats

        (value, stats), gradients = nnx.value_and_grad(loss, has_aux=True)(moe)
        params = nnx.state(moe, nnx.Param)
        nnx.update(moe, jax.tree.map(lambda p, g: p - g, params, gradients))
        moe.update_bias(stats.load)
        return value

    def losses(precision):
        moe = moe_of(SHARED, group, precision=precision)
        return np.array([train_step(moe, x) for _ in range(6)])

    values = losses("fp8")
    assert np.all(np.diff(values) < 0) and values[-1] < 0.7 * values[0], values
    np.testing.assert_allclose(values, losses(None), rtol=0.01)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"precision": "int8"}, r"got precision='int8', expected None or one of \('fp8',\)"),
        (
            {"gated": False},
            {"precision": "fp8"},
            r"gated=False, activation=silu, expected gated experts with jax.nn.silu",
        ),
        ({"activation": jax.nn.gelu}, {"precision": "fp8"}, r"activation=gelu, expected gated"),
        (
            {"hidden": 64},
            {"precision": "fp8"},
            r"rows in FP8\(.*of at least 32 and divides hidden=64; use 64; set Config.wire",
        ),
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
        ep_flax.linen.MoE(config, group, **options).init(
            jax.random.key(0), jnp.ones((8, config.hidden))
        )


def test_only_a_layer_in_fp8_imports_pallas():
    code = "import sys, jax_ep.flax; print('jax_ep.pallas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_experts_in_fp8_take_no_mask():
    group = group_of(WIDE, mesh_of((2,)), wire=WIRE, implementation="xla", elastic=True)
    moe = moe_of(WIDE, group, precision="fp8")
    with pytest.raises(ValueError, match=r"got active with precision='fp8', expected precision=No"):
        moe(tokens_of((8, 128)), active=np.ones(2, np.int32))
