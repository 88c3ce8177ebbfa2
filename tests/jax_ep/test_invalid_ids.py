"""Expert ids of num_experts or more: dropped and counted; an error with JAX_EP_DEBUG=1."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from harness import Case, group_of, inputs_of, mesh_of, run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

CASE = Case(ranks=2, tokens=4)


def test_an_invalid_id_is_dropped_and_counted(implementation: str) -> None:
    group = group_of(CASE, implementation)
    ids = inputs_of(CASE).ids.copy()
    ids[1, 2, 0] = 77
    got = run(group, lambda i: jax_ep.plan(group, i), ids)
    assert got.num_dropped.tolist() == [0, 1] and got.overflow.tolist() == [1, 1]
    if implementation == "native":
        assert group.stats()["invalid_ids"] >= 1


DEBUG_PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np, jax_ep
from jax.sharding import PartitionSpec as P
implementation, mode = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
config = jax_ep.Config(num_experts=4, top_k=1, hidden=8, max_tokens=4, mode=mode, timeout_s=600,
                       dtype=jnp.float32)
group = jax_ep.create_group(mesh, "ep", config, implementation)
def step(x, ids):
    def loss(x):
        recv = jax_ep.dispatch(group, x, ids)
        return jnp.sum(jax_ep.combine(group, recv.x, recv))
    return jax.lax.psum(jax.grad(loss)(x), "ep")
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P()))
x, ids = np.ones((4, 8), np.float32), np.array([[0], [3], [1], [-1]], np.int32)
print("gradient", step(x, ids).tolist())
ids[2] = 77
for shard in step(x, ids).addressable_shards:
    try:
        jax_ep.wait(shard.data)  # GPUs raise nothing by themselves
        print("passed")
    except (RuntimeError, ValueError) as error:
        print("failed", " ".join(str(error).split()))
group.close()
"""


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_debug_mode_turns_an_invalid_id_into_an_error_on_each_rank(
    implementation: str, mode: str
) -> None:
    """In a process of its own, for the environment; it takes no timeout."""
    done = subprocess.run(
        [sys.executable, "-c", DEBUG_PROGRAM, implementation, mode],
        env=os.environ | {"JAX_EP_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    valid, *shards = done.stdout.splitlines()
    assert valid == f"gradient {[[2.0] * 8, [1.0] * 8]}"
    assert len(shards) == 2
    for shard in shards:
        assert shard.startswith("failed ") and "rank 1" in shard
        assert "expected ids below num_experts" in shard


def test_debug_mode_ties_no_native_program_to_devices(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    group = group_of(CASE, native)
    mesh = group.mesh.abstract_mesh
    step = jax.jit(
        jax.shard_map(
            lambda i: jax_ep.plan(group, i).send_slot,
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )
    )
    ids = jax.ShapeDtypeStruct((8, 2), jnp.int32, sharding=NamedSharding(mesh, P("ep")))
    platform = jax.default_backend()
    text = step.trace(ids).lower(lowering_platforms=(platform,)).as_text()
    assert "jax_ep_plan" in text and "callback" not in text


@pytest.mark.parametrize("layout", ["expert_major", "expert_batched", "rank_major"])
def test_debug_mode_takes_calls_without_tokens(
    monkeypatch: pytest.MonkeyPatch, layout: jax_ep.Layout
) -> None:
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    case = dataclasses.replace(CASE, tokens=0, max_tokens=4, layout=layout)
    with jax_ep.create_group(mesh_of(2), "ep", case.config(), "xla") as group:

        def step(x: jax.Array, i: jax.Array) -> jax.Array:
            recv = jax_ep.dispatch(group, x, i, layout=layout)
            return jax_ep.combine(group, recv.x, recv)

        x = jnp.zeros((0, 8), jnp.float32)
        ids = jnp.zeros((0, 2), jnp.int32)
        out = jax.jit(jax.shard_map(step, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep")))(
            x, ids
        )
        assert out.shape == (0, 8)
