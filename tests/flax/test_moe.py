"""The Flax layers against the dense oracle: outputs, stats, every gradient, and training."""

from __future__ import annotations

import dataclasses
import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import (
    DEEPSEEK,
    MIXTRAL,
    QWEN3,
    assert_close,
    dense_loss,
    group_of,
    keep,
    loss,
    mesh_of,
    moe_of,
    tokens_of,
    weights_of,
)

import jax_ep
from jax_ep import flax as ep_flax
from jax_ep import pallas

PLAIN = dataclasses.replace(MIXTRAL, normalize=False, gated=False, activation=jax.nn.gelu)
SIGMOID = dataclasses.replace(MIXTRAL, router="sigmoid_bias", scale=1.5, shared_width=4)
SHAPE = (8, 4, 16)  # [B, S, H]

nnx_step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))


def oracle_step(config, weights, x):
    step = jax.jit(jax.value_and_grad(functools.partial(dense_loss, config), has_aux=True))
    return jax.device_get(step(weights, x))


def assert_matches_oracle(config, got, gradients, weights, x):
    value, (out, stats) = got
    (wanted, (wanted_out, load)), wanted_gradients = oracle_step(config, weights, x)
    assert_close(value, wanted, "loss")
    assert_close(out, wanted_out, "out")
    np.testing.assert_array_equal(stats.load, load)
    assert stats.num_dropped == 0
    assert set(gradients) == set(weights) - {"router_bias"}
    for name, gradient in gradients.items():
        assert_close(gradient, wanted_gradients[name], name)


@pytest.mark.parametrize(
    ("config", "chosen"),
    [(MIXTRAL, None), (QWEN3, None), (DEEPSEEK, None), (PLAIN, None), (SIGMOID, "xla")],
    ids=["mixtral", "qwen3", "deepseek", "plain", "sigmoid-xla"],
)
def test_nnx_equals_the_dense_oracle(config, chosen):
    group = group_of(config, mesh_of((4,)), implementation=chosen)
    moe, x = moe_of(config, group), tokens_of(SHAPE)
    got, gradients = nnx_step(moe, x)
    assert_matches_oracle(config, got, weights_of(gradients), weights_of(moe), x)


@pytest.mark.parametrize("config", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_linen_equals_the_dense_oracle(config):
    group = group_of(config, mesh_of((4,)))
    moe, x = ep_flax.linen.MoE(config, group), tokens_of(SHAPE)
    boxed = jax.jit(moe.init)(jax.random.key(0), x)
    specs = nn.get_partition_spec(boxed)["params"]
    assert specs["w_up"] == P("ep", None, None) and specs["router"] == P(None, None)
    variables = nn.unbox(boxed)

    def of_params(params):
        out, stats = moe.apply(variables | {"params": params}, x)
        return jnp.sum(jnp.sin(out)) + stats.balance_loss, (out, stats)

    step = jax.jit(jax.value_and_grad(of_params, has_aux=True))
    got, gradients = step(boxed["params"])
    assert gradients["w_up"].names == ("ep", None, None)
    weights = jax.device_get(variables["params"] | variables.get(ep_flax.linen.STATE, {}))
    assert_matches_oracle(config, got, nn.unbox(gradients), weights, x)


def test_linen_and_nnx_are_one_layer():
    """The same weights by the same names give the same bits."""
    group = group_of(DEEPSEEK, mesh_of((4,)))
    moe, x = moe_of(DEEPSEEK, group), tokens_of(SHAPE)
    params = weights_of(moe)
    state = {ep_flax.linen.STATE: {"router_bias": params.pop("router_bias")}}
    linen = ep_flax.linen.MoE(DEEPSEEK, group)
    got = jax.jit(linen.apply)({"params": params} | state, x)
    wanted = nnx.jit(lambda moe, x: moe(x))(moe, x)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    specs = ({"params": {n: moe_spec(moe, n) for n in params}, ep_flax.linen.STATE: P()}, P("ep"))
    local = jax.shard_map(
        lambda variables, x: linen.apply(variables, x)[0],
        mesh=group.mesh,
        in_specs=specs,
        out_specs=P("ep"),
    )
    np.testing.assert_array_equal(jax.jit(local)({"params": params} | state, x), wanted[0])


def moe_spec(moe, name):
    return P(*getattr(moe, name).get_metadata()["out_sharding"])


def test_inside_a_shard_map_it_is_local():
    """There x, weights, out and stats are this rank's; gradients are those of the whole."""
    group = group_of(DEEPSEEK, mesh_of((4,)))
    moe, x = moe_of(DEEPSEEK, group), tokens_of(SHAPE)
    graph, params, rest = nnx.split(moe, nnx.Param, ...)
    specs = nnx.get_partition_spec((params, rest))

    def local(params, rest, x):
        out, stats = nnx.merge(graph, params, rest)(x)
        assert out.shape == (2, 4, 16)
        return jax.lax.psum(jnp.sum(jnp.sin(out)), "ep"), (out, jax.tree.map(jnp.atleast_1d, stats))

    mapped = jax.shard_map(
        local,
        mesh=group.mesh,
        in_specs=(*specs, P("ep")),
        out_specs=(P(), (P("ep"), P("ep"))),
    )
    gradients, (out, stats) = jax.jit(jax.grad(mapped, has_aux=True))(params, rest, x)

    def wanted(weights, x):
        out, _, _ = dense.moe(DEEPSEEK, weights, x.reshape(-1, 16))
        return jnp.sum(jnp.sin(out)), out

    wanted_gradients, wanted_out = jax.jit(jax.grad(wanted, has_aux=True))(weights_of(moe), x)
    assert_close(out, wanted_out.reshape(SHAPE))
    for name, gradient in weights_of(gradients).items():
        assert_close(gradient, wanted_gradients[name], name)
    pairs = x.size // 16 * DEEPSEEK.top_k
    assert stats.load.shape == (4 * DEEPSEEK.num_experts,) and stats.load.sum() == pairs


def test_expert_fn_gets_this_ranks_rows_and_weights():
    """With tp each call sees its share of the width; the results are added up."""
    mesh = mesh_of((2, 2), ("ep", "tp"))
    group = group_of(PLAIN, mesh)
    seen = []

    def experts(x, group_sizes, w_gate, w_up, w_down):
        seen.append((x.shape, group_sizes.shape, w_gate, w_up.shape, w_down.shape))
        return ep_flax.ragged_ffn(x, group_sizes, None, w_up, w_down, activation=jax.nn.gelu)

    moe = moe_of(PLAIN, group, placement=ep_flax.Placement(tp="tp"), expert_fn=experts)
    x = tokens_of(SHAPE)
    got, gradients = nnx_step(moe, x)
    rows = group.recv_rows(16)
    assert seen[0] == ((rows, 16), (4,), None, (4, 16, 12), (4, 12, 16))
    assert_matches_oracle(PLAIN, got, weights_of(gradients), weights_of(moe), x)


def test_pallas_experts_are_an_expert_fn():
    group = group_of(MIXTRAL, mesh_of((2,)))
    moe, x = moe_of(MIXTRAL, group, expert_fn=pallas.grouped_ffn), tokens_of(SHAPE)
    got, gradients = nnx_step(moe, x)
    assert_matches_oracle(MIXTRAL, got, weights_of(gradients), weights_of(moe), x)


def test_compute_dtype_is_the_groups_and_gradients_are_the_weights():
    group = group_of(MIXTRAL, mesh_of((4,)), dtype=jnp.bfloat16)
    moe, x = moe_of(MIXTRAL, group), tokens_of(SHAPE)
    (_, (out, _)), gradients = nnx_step(moe, x)
    assert out.dtype == jnp.bfloat16
    (_, (wanted, _)), _ = oracle_step(MIXTRAL, weights_of(moe), x)
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=0.05)
    assert all(g.dtype == np.float32 for g in weights_of(gradients).values())


def test_bias_updates_balance_a_skewed_router():
    """Nothing else is trained: every step moves the bias alone, and the spread of loads falls."""
    group = group_of(SIGMOID, mesh_of((4,)))
    moe, x = moe_of(SIGMOID, group), tokens_of((64, 16)) + 1.0  # a common direction: skewed
    moe.router_bias[...] = jnp.zeros_like(moe.router_bias[...])

    @nnx.jit
    def step(moe, x):
        _, stats = moe(x)
        moe.update_bias(stats.load, rate=0.02)
        return stats.load

    loads = np.stack([step(moe, x) for _ in range(40)])
    assert (loads.sum(1) == 64 * SIGMOID.top_k).all()
    spread = loads.std(1)
    assert spread[0] > 10 and spread[-5:].mean() < spread[0] / 3
    bias = weights_of(moe)["router_bias"]
    np.testing.assert_array_equal(np.sign(bias[loads[0] == 0]), 1.0)
    stacked = ep_flax.updated_bias(jnp.zeros((2, 3)), jnp.array([[0, 3, 6], [1, 1, 1]]), 0.5)
    np.testing.assert_array_equal(stacked, [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]])


def test_every_variable_carries_its_partition_spec():
    mesh = mesh_of((2, 2, 2), ("fsdp", "ep", "tp"))
    group = group_of(DEEPSEEK, mesh)
    moe = moe_of(DEEPSEEK, group, placement=ep_flax.Placement(fsdp="fsdp", tp="tp"))
    wanted = {
        "router": P("fsdp", None),
        "router_bias": P(None),
        "w_gate": P("ep", "fsdp", "tp"),
        "w_up": P("ep", "fsdp", "tp"),
        "w_down": P("ep", "tp", "fsdp"),
        "shared_gate": P("fsdp", "tp"),
        "shared_up": P("fsdp", "tp"),
        "shared_down": P("tp", "fsdp"),
    }
    specs = nnx.get_partition_spec(nnx.state(moe))
    assert {path[-1]: spec.get_value() for path, spec in nnx.to_flat_state(specs)} == wanted
    for name, spec in wanted.items():  # and is placed by it as soon as it is made
        value = getattr(moe, name)[...]
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim), name
    experts = nnx.state(moe, ep_flax.ExpertParam)
    assert {path[-1] for path, _ in nnx.to_flat_state(experts)} == {"w_gate", "w_up", "w_down"}


def test_explicit_mesh_and_a_mesh_in_context():
    x = tokens_of(SHAPE)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of((4,), axis_types=(kind,))
        group = group_of(MIXTRAL, mesh)
        moe = moe_of(MIXTRAL, group)
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P("ep")))
            got, gradients = nnx_step(moe, placed)
        assert_matches_oracle(MIXTRAL, got, weights_of(gradients), weights_of(moe), x)


def test_linen_on_an_explicit_mesh_in_context():
    mesh = mesh_of((2, 2), ("fsdp", "ep"), axis_types=(AxisType.Explicit,) * 2)
    moe = ep_flax.linen.MoE(
        DEEPSEEK, group_of(DEEPSEEK, mesh), placement=ep_flax.Placement(fsdp="fsdp")
    )
    x = tokens_of(SHAPE)

    def of_params(params, state, x):
        out, stats = moe.apply({"params": params} | state, x)
        return jnp.sum(jnp.sin(out)) + stats.balance_loss, (out, stats)

    with jax.set_mesh(mesh):
        boxed = dict(jax.jit(moe.init)(jax.random.key(0), x))
        params = boxed.pop("params")
        assert jax.typeof(params["w_up"].value).sharding.spec == P("ep", "fsdp", None)
        step = jax.jit(jax.value_and_grad(of_params, has_aux=True))
        placed = jax.device_put(x, NamedSharding(mesh, P(("fsdp", "ep"))))
        got, gradients = step(params, boxed, placed)
    weights = jax.device_get(nn.unbox(params) | nn.unbox(boxed)[ep_flax.linen.STATE])
    assert_matches_oracle(DEEPSEEK, got, nn.unbox(gradients), weights, x)


def test_inside_a_shard_map_over_other_axes_only():
    """Partial-manual code around the layer; JAX 0.10 cannot differentiate such a nest."""
    mesh = mesh_of((2, 4), ("stage", "ep"))
    group = group_of(MIXTRAL, mesh)
    moe, x = moe_of(MIXTRAL, group, placement=ep_flax.Placement(tokens=P("ep"))), tokens_of(SHAPE)
    graph, state = nnx.split(moe)
    mapped = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x)[0],
        mesh=mesh,
        in_specs=(P(), P("stage")),
        out_specs=P("stage"),
        axis_names={"stage"},
    )
    wanted, _, _ = dense.moe(MIXTRAL, weights_of(moe), x.reshape(-1, 16))
    assert_close(jax.jit(mapped)(state, x), wanted.reshape(SHAPE))


@pytest.mark.parametrize("preset", ["MIXTRAL_8X7B", "QWEN3_30B_A3B", "DEEPSEEK_V3"])
def test_full_size_presets_lower_for_a_mesh_that_is_not_here(preset):
    """Published sizes on 64 ranks: shapes, and a program for TPU and CPU, on this host."""
    published_billions = {"MIXTRAL_8X7B": 1.409, "QWEN3_30B_A3B": 0.604, "DEEPSEEK_V3": 11.32}
    config = getattr(ep_flax.presets, preset)
    mesh = AbstractMesh((8, 8), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2)
    options = config.group_config(max_tokens=4096, capacity_factor=1.25)
    group = keep(jax_ep.create_group(mesh, "ep", options))
    placement = ep_flax.Placement(fsdp="fsdp")
    with nnx.use_eager_sharding(False):  # no devices to put weights on
        moe = nnx.eval_shape(
            lambda: ep_flax.MoE(
                config, group, placement=placement, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
            )
        )
    graph, params, rest = nnx.split(moe, nnx.Param, ...)
    billions = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e9
    assert billions == pytest.approx(published_billions[preset], rel=1e-2)

    def of_params(params, rest, x):
        out, stats = nnx.merge(graph, params, rest)(x)
        return jnp.sum(out.astype(jnp.float32)) + stats.balance_loss

    def placed(tree, spec):
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            spec,
        )

    x = jax.ShapeDtypeStruct((64 * 4096, config.hidden), jnp.bfloat16)
    trees = (params, rest, x)
    specs = (*nnx.get_partition_spec((params, rest)), P(("fsdp", "ep")))
    traced = jax.jit(jax.grad(of_params)).trace(*placed(trees, specs))
    assert "jax_ep_dispatch" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "jax_ep" not in traced.lower(lowering_platforms=("tpu",)).as_text()


class TestMistakesAreNamed:
    """got, expected, and what to do, before anything is allocated."""

    def check(self, match, make):
        with pytest.raises(ValueError, match=match):
            make()

    def test_configs(self):
        change = functools.partial(dataclasses.replace, DEEPSEEK)
        self.check("top_k: got 99, expected at most 16", lambda: change(top_k=99))
        self.check("router: got 'best'", lambda: change(router="best"))
        self.check("num_groups: got 3, expected a divisor", lambda: change(num_groups=3))
        self.check("top_groups: got 1, expected groups that hold", lambda: change(top_groups=1))
        self.check("use router='group_limited'", lambda: change(router="softmax"))
        self.check("hidden: got 0", lambda: change(hidden=0))
        self.check("hidden: got True, expected an int", lambda: change(hidden=True))
        self.check("shared_width: got -1", lambda: change(shared_width=-1))

    def test_placements_and_groups(self):
        mesh = mesh_of((2, 2), ("ep", "tp"))
        group = group_of(MIXTRAL, mesh)

        def make(config=MIXTRAL, **placement):
            return lambda: moe_of(config, group, placement=ep_flax.Placement(**placement))

        self.check("got MoEConfig.num_experts=16 with a group of num_experts=8", make(QWEN3))
        self.check("got config of type Config, expected a jax_ep.flax.MoE", make(group.config))
        self.check("got group of type NoneType", lambda: moe_of(MIXTRAL, None))
        for wrong in (P("fsdp"), jax_ep.Placement.identity(8, 8)):
            self.check(
                "got placement of type P.*, expected a jax_ep.flax.Placement",
                lambda wrong=wrong: moe_of(MIXTRAL, group, placement=wrong),
            )
        self.check("Placement.fsdp='nowhere'", make(fsdp="nowhere"))
        self.check("Placement.tp='ep'", make(tp="ep"))
        self.check("Placement.fsdp='tp'", make(fsdp="tp", tp="tp"))
        self.check("with all of the group's .'ep',. and without tp=None", make(tokens=P("tp")))
        self.check("tokens split over .'ep', 'tp'.", make(tokens=P("ep", "tp"), tp="tp"))
        odd = dataclasses.replace(MIXTRAL, expert_width=23)
        self.check("expert_width=23, expected a multiple of the 2", make(odd, tp="tp"))

    def test_calls(self):
        group = group_of(MIXTRAL, mesh_of((4,)))
        moe = moe_of(MIXTRAL, group)
        self.check("got x of shape .8, 7., expected", lambda: moe(jnp.zeros((8, 7))))
        uneven = jnp.zeros((7, MIXTRAL.hidden))
        self.check("x of shape .7, 16., .* a multiple of 4 in axis 0", lambda: moe(uneven))
        self.check("expected one with a bias", lambda: moe.update_bias(jnp.zeros(8, jnp.int32)))


def test_layers_of_two_sizes_share_a_group():
    """MIXTRAL's 8 experts and top-2 through a view of DEEPSEEK's 16 and top-4, in one program."""
    mesh = mesh_of((4,))
    group = group_of(DEEPSEEK, mesh)
    view = group.view(num_experts=MIXTRAL.num_experts, top_k=MIXTRAL.top_k)
    layers = (moe_of(DEEPSEEK, group), moe_of(MIXTRAL, view))
    x = tokens_of((4, 6, 16))

    def both(layers, x):
        first, (out, _) = loss(layers[0], x)
        second, _ = loss(layers[1], out)
        return first + second

    value, gradients = nnx.jit(nnx.value_and_grad(both))(layers, x)

    def dense_both(weights, x):
        first, (out, _) = dense_loss(DEEPSEEK, weights[0], x)
        return first + dense_loss(MIXTRAL, weights[1], out)[0]

    weights = tuple(map(weights_of, layers))
    wanted, wanted_gradients = jax.jit(jax.value_and_grad(dense_both))(weights, x)
    assert_close(value, wanted, "loss")
    for got, expected in zip(gradients, wanted_gradients, strict=True):
        for name, gradient in weights_of(got).items():
            assert_close(gradient, expected[name], name)
