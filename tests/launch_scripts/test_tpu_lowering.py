"""The training step of train_moe_lm.py, as TPU programs made on a host without TPUs."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from scripts import ROOT

import jax_ep

for package in ("flax", "optax"):
    pytest.importorskip(package)

RANKS, BATCH, LENGTH = 4, 8, 16
RAGGED = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")


@pytest.fixture(scope="module")
def training():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from moe_lm import model, training

        yield training.Trainer, training.TrainOptions, model.ModelSize
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module", params=["ht", "ll"])
def traced(request, training):
    """The step and its arguments, as the script with --oracle makes them."""
    trainer_of, options_of, size_of = training
    size = size_of(width=16, layers=2, heads=2, expert_width=16, num_experts=8, top_k=2)
    config = jax_ep.Config(
        num_experts=8,
        top_k=2,
        hidden=16,
        max_tokens=BATCH // RANKS * LENGTH,
        capacity_factor=1.5,
        align=8,
        dtype=np.float32,
        mode=request.param,
    )
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("ep",))
    with (
        jax.numpy_dtype_promotion("standard"),  # JAX's default, as in the script
        jax_ep.create_group(mesh, "ep", config, implementation="xla") as group,
    ):
        trainer = trainer_of(mesh, group, size, options_of(steps=8, learning_rate=1e-3, seed=0))
        tokens = trainer.shard_batch(np.zeros((BATCH, LENGTH + 1), np.int32))
        yield trainer.step, (trainer.init(), tokens)


def test_the_step_lowers_for_tpu(traced):
    step, arguments = traced
    text = step.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert f"mhlo.num_partitions = {RANKS}" in text
    assert "stablehlo.all_to_all" in text
    assert "@jax_ep_" not in text, "a native call in a program for TPUs"


def test_the_step_exports_for_tpu(traced):
    step, arguments = traced
    leaves, tree = jax.tree.flatten(arguments)  # Flax's own containers cannot be serialised

    @jax.jit
    def flat_step(*leaves):
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))

    exported = jax.export.export(flat_step, platforms=("tpu",), disabled_checks=[RAGGED])(*leaves)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("tpu",) and again.nr_devices == RANKS
    assert "all_to_all" in again.mlir_module()


def test_only_the_check_keeps_a_ragged_exchange_from_being_exported():
    """Not jax_ep's: what programs that use both need (JAX's own layers may contain it)."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("ep",))
    spec = jax.sharding.PartitionSpec("ep")

    def exchange(rows, sizes):
        offsets = jax.numpy.arange(RANKS, dtype=np.int32)
        zeros = jax.numpy.zeros_like(rows)
        return jax.lax.ragged_all_to_all(
            rows, zeros, offsets, sizes, offsets, sizes, axis_name="ep"
        )

    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = (np.zeros((RANKS * RANKS, 16), np.float32), np.ones(RANKS * RANKS, np.int32))
    export = jax.export.export(jax.jit(mapped), platforms=("tpu",))
    with pytest.raises(ValueError, match="ragged_all_to_all"):
        export(*arguments)
    export = jax.export.export(jax.jit(mapped), platforms=("tpu",), disabled_checks=[RAGGED])
    assert export(*arguments).nr_devices == RANKS
