"""Whole training steps with ep beside dp, fsdp and tp, over tuples of axes, and in pipelines."""

from __future__ import annotations

import pathlib

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from language_model import CASES, assert_same_training, mesh_history, oracle_history
from launching import launch
from support import DEEPSEEK, assert_close, group_of, mesh_of, tokens_of, weights_of

from jax_ep import flax as ep_flax

PROGRAM = pathlib.Path(__file__).parent / "programs" / "train_on_meshes.py"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_steps_equal_the_dense_oracle_on_one_device(case):
    got = mesh_history(case, mesh_of(case.shape, case.names))
    assert_same_training(got, oracle_history())


@pytest.mark.ci
@pytest.mark.multiprocess
def test_two_processes_of_four_devices_train_the_same_model():
    """Group axes inside a process, across both, and over a tuple of axes across both."""
    outcome = launch(PROGRAM, processes=2, devices_per_process=4)
    assert outcome.returncode == 0, outcome.text[-4000:]
    for process in range(2):
        assert outcome.value(process, "equal") == "dp2-ep4 ep2-fsdp2-tp2 node2-gpu4"


STAGES, MICROBATCHES = 2, 3


def test_layers_pipelined_by_vmap_with_spmd_axis_name():
    """Each stage has its own layer and experts; microbatches move from stage to stage."""
    mesh = mesh_of((STAGES, 4), ("stage", "ep"))
    group = group_of(DEEPSEEK, mesh)
    along_stages = {nnx.PARTITION_NAME: "stage"}

    @nnx.split_rngs(splits=STAGES)
    @nnx.vmap(transform_metadata=along_stages)
    def create(rngs):
        return ep_flax.MoE(
            DEEPSEEK,
            group,
            placement=ep_flax.Placement(tokens=P("ep")),
            kernel_init=lambda key, shape, dtype: jax.random.normal(key, shape, dtype) / 4,
            rngs=rngs,
        )

    layers = nnx.jit(create)(nnx.Rngs(0))
    state = nnx.state(layers)
    nnx.update(layers, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    assert layers.w_up[...].sharding.spec == P("stage", "ep", None, None)

    @nnx.vmap(in_axes=(0, 0), out_axes=0, spmd_axis_name="stage", transform_metadata=along_stages)
    def all_stages(layer, x):
        out, stats = layer(x)
        return x + out, stats.load

    def pipeline(layers, x):
        """x [MICROBATCHES, B, H]: each tick every stage works on what it holds."""
        held = jnp.zeros((STAGES, *x.shape[1:]))
        loads, outputs = [], []
        for tick in range(MICROBATCHES + STAGES - 1):
            incoming = x[min(tick, MICROBATCHES - 1)]
            held = jnp.roll(held, 1, axis=0).at[0].set(incoming)
            held = lax.with_sharding_constraint(held, NamedSharding(mesh, P("stage", "ep")))
            held, load = all_stages(layers, held)
            outputs.append(held[-1])
            loads.append(load)
        return jnp.stack(outputs[STAGES - 1 :]), jnp.stack(loads)

    def loss(layers, x):
        out, loads = pipeline(layers, x)
        return jnp.sum(jnp.sin(out)), (out, loads)

    def dense_loss(weights, x):
        flat = x.reshape(-1, x.shape[-1])
        for i in range(STAGES):
            out, _, _ = dense.moe(DEEPSEEK, {name: leaf[i] for name, leaf in weights.items()}, flat)
            flat = flat + out
        return jnp.sum(jnp.sin(flat)), flat.reshape(x.shape)

    x = tokens_of((MICROBATCHES, 16, DEEPSEEK.hidden))
    step = nnx.jit(nnx.grad(loss, has_aux=True))
    gradients, (out, loads) = step(layers, x)
    assert loads.shape == (MICROBATCHES + STAGES - 1, STAGES, DEEPSEEK.num_experts)
    np.testing.assert_array_equal(loads.sum(-1), 16 * DEEPSEEK.top_k)
    wanted, wanted_out = jax.jit(jax.grad(dense_loss, has_aux=True))(weights_of(layers), x)
    assert_close(out, wanted_out)
    for name, gradient in weights_of(gradients).items():
        assert_close(gradient, wanted[name], name)
