"""Layers scanned over and rematerialised, trained on 4 ranks, saved, and loaded on 1, 2 and 8."""

from __future__ import annotations

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import DEEPSEEK, assert_close, group_of, mesh_of, tokens_of, weights_of

from jax_ep import flax as ep_flax

ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")

LAYERS = 3
SHAPE = (8, 4, DEEPSEEK.hidden)
X, TARGET = tokens_of(SHAPE, seed=1), tokens_of(SHAPE, seed=2)
BALANCE = 0.01
BIAS_RATE = 0.05
IN_LAYERS = {nnx.PARTITION_NAME: None}


def normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5


@functools.cache
def group_on(ranks):
    return group_of(DEEPSEEK, mesh_of((ranks,)))


class Block(nnx.Module):
    """x + MoE(norm(x))."""

    def __init__(self, group, rngs):
        self.norm = nnx.RMSNorm(DEEPSEEK.hidden, rngs=rngs)
        self.moe = ep_flax.MoE(DEEPSEEK, group, kernel_init=normal, rngs=rngs)

    def __call__(self, x):
        out, stats = self.moe(self.norm(x))
        return x + out, stats


class Stack(nnx.Module):
    """LAYERS blocks whose weights are stacked along a leading axis."""

    def __init__(self, group, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata=IN_LAYERS)
        def create(rngs):
            return Block(group, rngs)

        self.blocks = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=IN_LAYERS)
        @nnx.remat
        def layers(block, x):
            return block(x)

        return layers(self.blocks, x)


def loss(stack, x, target):
    out, stats = stack(x)
    return jnp.mean((out - target) ** 2) + BALANCE * stats.balance_loss.sum(), (out, stats)


def dense_loss(weights, x, target):
    """The same by the oracle; weights stacked as in Stack."""
    balances, loads = [], []
    for i in range(LAYERS):
        layer = {name: leaf[i] for name, leaf in weights.items()}
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * layer["scale"]
        out, balance, load = dense.moe(DEEPSEEK, layer, normed.reshape(-1, x.shape[-1]))
        x = x + out.reshape(x.shape)
        balances.append(balance)
        loads.append(load)
    value = jnp.mean((x - target) ** 2) + BALANCE * sum(balances)
    return value, (x, jnp.stack(loads))


oracle_step = jax.jit(jax.value_and_grad(dense_loss, has_aux=True))


@nnx.jit
def train_step(stack, optimizer, x, target):
    (value, (_, stats)), gradients = nnx.value_and_grad(loss, has_aux=True)(stack, x, target)
    with jax.numpy_dtype_promotion("standard"):  # which Optax relies on
        optimizer.update(stack, gradients)
    stack.blocks.moe.update_bias(stats.load, BIAS_RATE)
    return value, gradients, stats


@nnx.jit
def forward(stack, x):
    return stack(x)


def placed(tree, shardings):
    """Shapes, dtypes and places for Orbax to restore to."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


@nnx.jit
def create():
    stack = Stack(group_on(4), nnx.Rngs(0))
    return stack, nnx.Optimizer(stack, optax.adam(1e-2), wrt=nnx.Param)


@pytest.fixture(scope="module")
def trained():
    """A Stack after some steps on 4 ranks, each of which is checked against the oracle."""
    stack, optimizer = create()
    values = []
    for _ in range(3):
        before = weights_of(stack)
        value, gradients, stats = train_step(stack, optimizer, X, TARGET)
        (wanted, (_, load)), wanted_gradients = oracle_step(before, X, TARGET)
        assert_close(value, wanted)
        load = np.asarray(load)
        np.testing.assert_array_equal(stats.load, load)
        for name, gradient in weights_of(gradients).items():
            assert_close(gradient, wanted_gradients[name], name)
        mean = load.mean(-1, keepdims=True)
        bias = before["router_bias"] + np.float32(BIAS_RATE) * np.sign(mean - load)
        assert_close(weights_of(stack)["router_bias"], bias)
        values.append(float(value))
    assert values[-1] < values[0]
    return stack


def test_scan_and_remat_train_as_the_oracle_does(trained):
    """What it asserts is in the fixture; here: the weights' axes after the transformations."""
    moe = trained.blocks.moe
    assert moe.w_up[...].shape == (LAYERS, 16, 16, 24)
    specs = nnx.get_partition_spec(nnx.state(trained))
    assert specs["blocks"]["moe"]["w_up"].get_value() == P(None, "ep", None, None)
    assert moe.w_up[...].sharding.spec == P(None, "ep")


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_checkpoint_of_4_ranks_gives_the_same_outputs_on_others(trained, saved, ranks):
    path, wanted, wanted_stats = saved
    group = group_on(ranks)
    graph, state = nnx.split(nnx.eval_shape(lambda: Stack(group, nnx.Rngs(0))))
    state = placed(state, nnx.get_named_sharding(state, group.mesh))
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = nnx.merge(graph, checkpointer.restore(path, state))
    w_up = loaded.blocks.moe.w_up[...]
    assert w_up.addressable_shards[0].data.shape == (LAYERS, 16 // ranks, 16, 24)
    jax.tree.map(np.testing.assert_array_equal, weights_of(loaded), weights_of(trained))
    out, stats = forward(loaded, X)
    assert_close(out, wanted)
    jax.tree.map(assert_close, stats, wanted_stats)


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """(folder of the checkpoint, outputs and stats of the trained stack on its 4 ranks)."""
    path = tmp_path_factory.mktemp("checkpoint") / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.state(trained))
    return path, *jax.device_get(forward(trained, X))


class LinenBlock(nn.Module):
    """x + MoE(norm(x)), as nn.scan wants it."""

    group: object

    @nn.compact
    def __call__(self, x, _):
        moe = ep_flax.linen.MoE(DEEPSEEK, self.group, kernel_init=normal, name="moe")
        out, stats = moe(nn.RMSNorm(name="norm")(x))
        return x + out, stats


def linen_stack(group):
    scanned = nn.scan(
        nn.remat(LinenBlock),
        variable_axes={"params": 0, ep_flax.linen.STATE: 0},
        split_rngs={"params": True},
        length=LAYERS,
        metadata_params={nn.PARTITION_NAME: None},
    )
    return scanned(group)


def test_linen_scans_trains_and_loads_elsewhere(tmp_path):
    group = group_on(4)
    stack = linen_stack(group)
    boxed = jax.jit(stack.init)(jax.random.key(0), X, None)
    specs = nn.get_partition_spec(boxed)
    assert specs["params"]["moe"]["w_up"] == P(None, "ep", None, None)
    shardings = nn.get_sharding(boxed, group.mesh)
    variables = jax.device_put(nn.unbox(boxed), shardings)

    def mean_square(params, state):
        out, stats = stack.apply({"params": params, ep_flax.linen.STATE: state}, X, None)
        return jnp.mean((out - TARGET) ** 2) + BALANCE * stats.balance_loss.sum(), stats.load

    @jax.jit
    def step(variables):
        params, state = variables["params"], variables[ep_flax.linen.STATE]
        value_and_grad = jax.value_and_grad(mean_square, has_aux=True)
        (value, load), gradients = value_and_grad(params, state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        state = jax.tree.map(lambda bias: ep_flax.updated_bias(bias, load, BIAS_RATE), state)
        return value, gradients, {"params": params, ep_flax.linen.STATE: state}

    weights = jax.device_get(variables["params"]["moe"] | variables[ep_flax.linen.STATE]["moe"])
    weights["scale"] = jax.device_get(variables["params"]["norm"]["scale"])
    (wanted, _), wanted_gradients = oracle_step(weights, X, TARGET)
    first, gradients, variables = step(variables)
    assert_close(first, wanted)
    for name, gradient in (gradients["moe"] | gradients["norm"]).items():
        assert_close(gradient, wanted_gradients[name], name)
    second, _, variables = step(variables)
    assert second < first

    wanted, _ = jax.jit(stack.apply)(variables, X, None)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", variables)
    other = group_on(8)
    abstract = placed(variables, nn.get_sharding(boxed, other.mesh))
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "state", abstract)
    out, _ = jax.jit(linen_stack(other).apply)(loaded, X, None)
    assert_close(out, wanted)
