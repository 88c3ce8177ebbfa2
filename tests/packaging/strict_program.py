"""A user's program for `mypy --strict`, which test_typing.py runs on it. Nothing executes it."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import routing

mesh = Mesh(np.array(jax.devices()), ("ep",))
config = jax_ep.Config(
    num_experts=2 * mesh.shape["ep"],
    top_k=2,
    hidden=64,
    max_tokens=256,
    dtype=jnp.bfloat16,
    wire=jax_ep.FP8(),
)
assert_type(jax_ep.__version__, str)
assert_type(config.memory(8).heap_bytes, int | None)
layout: jax_ep.Layout = "expert_major"


def layer(group: jax_ep.Group, x: jax.Array, router: jax.Array, w: jax.Array) -> jax.Array:
    experts, weights = routing.topk_softmax(x @ router, 2)
    recv = jax_ep.dispatch(group, x, experts, weights, layout=layout)
    assert_type(recv, jax_ep.Received)
    y: jax.Array = jax.lax.ragged_dot(recv.x, w, recv.group_sizes)
    out = jax_ep.combine(group, y, recv)
    assert_type(out, jax.Array)
    _, gates = jax_ep.combine(group, y, recv, return_weights=True)
    assert_type(gates, jax.Array)
    return out


def in_halves(group: jax_ep.Group, x: jax.Array, experts: jax.Array) -> jax_ep.Received:
    in_flight = jax_ep.dispatch_start(group, x, experts)
    return jax_ep.dispatch_done(group, in_flight)


with jax_ep.create_group(mesh, "ep", config, implementation="xla") as group:
    specs = (P("ep"), P(), P("ep"))
    step = jax.jit(
        jax.shard_map(
            lambda x, router, w: layer(group, x, router, w),
            mesh=mesh,
            in_specs=specs,
            out_specs=P("ep"),
        )
    )
    health = group.health()
    assert_type(health.ok, bool)
    group.check()
    stats = group.stats()
    if "flows" in stats:
        assert_type(stats["flows"][0]["stalls"], int)
        assert_type(stats["ranks"][0]["pairs_per_expert"], list[int])
    assert_type(group.report(), str)
