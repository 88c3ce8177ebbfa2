"""Trains one MoE layer whose experts are a Pallas grouped GEMM, and checks it against ragged_dot.

    python -m jax_ep launch -n 2 examples/pallas_experts.py

`jax_ep.pallas.grouped_ffn` takes `recv.x` and `recv.group_sizes` as dispatch gives them: no sort,
no padding to tiles, no mask. On CUDA it is compiled by Triton; on CPU Pallas interprets it, which
shows that it is right, not how fast it is. With --experts tokamax the product is Tokamax's
ragged_dot (pip install 'jax_ep[tokamax]').
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.pallas import grouped_ffn, tokamax_ffn

TOKENS, HIDDEN, WIDTH, TOP_K, EXPERTS_PER_RANK = 32, 32, 48, 2, 2
LEARNING_RATE = 0.3
TOLERANCE = 1e-4  # of the largest element: sums in another order, in float32
SPECS = {"router": P(), "w_gate": P("ep"), "w_up": P("ep"), "w_down": P("ep")}
Experts = Callable[..., jax.Array]


def ragged_ffn(
    x: jax.Array, group_sizes: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """The same experts with jax.lax alone."""
    dot = partial(lax.ragged_dot, group_sizes=group_sizes)
    return dot(jax.nn.silu(dot(x, w_gate)) * dot(x, w_up), w_down)


def layer(group: jax_ep.Group, experts: Experts, params: Any, x: jax.Array) -> jax.Array:
    """One MoE layer on this rank's tokens [T, H]."""
    ids, weights = jax_ep.routing.topk_softmax(x @ params["router"], TOP_K)
    recv = jax_ep.dispatch(group, x, ids, weights)
    kernels = (params["w_gate"], params["w_up"], params["w_down"])
    y = experts(recv.x, recv.group_sizes, *kernels)
    return jax_ep.combine(group, y, recv)


def make_step(group: jax_ep.Group, experts: Experts) -> Any:
    """Jitted (params, x, target) -> (loss, gradients)."""

    def loss(params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        error = layer(group, experts, params, x) - target
        return lax.pmean(jnp.mean(error**2), "ep")

    return jax.jit(
        jax.shard_map(
            jax.value_and_grad(loss),
            mesh=group.mesh,
            in_specs=(SPECS, P("ep"), P("ep")),
            out_specs=(P(), SPECS),
        )
    )


def make_inputs(mesh: Mesh) -> tuple[Any, jax.Array, jax.Array]:
    """Parameters, tokens, and the targets: a rotation of the tokens, which experts can learn."""
    ranks = mesh.size
    rng = np.random.default_rng(0)
    num_experts = EXPERTS_PER_RANK * ranks

    def put(spec: P, *shape: int, scale: float = 1.0) -> jax.Array:
        values = (rng.standard_normal(shape) * scale).astype(np.float32)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: values[index])

    params = {
        "router": put(P(), HIDDEN, num_experts, scale=0.1),
        "w_gate": put(P("ep"), num_experts, HIDDEN, WIDTH, scale=HIDDEN**-0.5),
        "w_up": put(P("ep"), num_experts, HIDDEN, WIDTH, scale=HIDDEN**-0.5),
        "w_down": put(P("ep"), num_experts, WIDTH, HIDDEN, scale=WIDTH**-0.5),
    }
    x = put(P("ep"), TOKENS * ranks, HIDDEN)
    return params, x, jax.jit(lambda x: jnp.roll(x, 1, axis=1))(x)


def main() -> int:
    """Runs the example; the exit code is 1 if the experts differ or nothing is learnt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", choices=("pallas", "tokamax"), default="pallas")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if not jax.distributed.is_initialized():
        jax_ep.initialize()
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    config = jax_ep.Config(
        num_experts=EXPERTS_PER_RANK * mesh.size,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        align=8,
        dtype=jnp.float32,
    )
    experts = grouped_ffn if options.experts == "pallas" else tokamax_ffn
    with jax_ep.create_group(mesh, "ep", config) as group:
        params, x, target = make_inputs(mesh)
        step, oracle = make_step(group, experts), make_step(group, ragged_ffn)
        # ragged_dot's default on GPUs is TF32; the kernels multiply float32 in float32.
        with jax.default_matmul_precision("highest"):
            ours, theirs = step(params, x, target), oracle(params, x, target)
            difference = jax.jit(
                lambda a, b: jax.tree.map(
                    lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)), a, b
                )
            )(ours, theirs)
            worst = max(float(leaf) for leaf in jax.tree.leaves(difference))
            sgd = jax.jit(partial(jax.tree.map, lambda p, g: p - LEARNING_RATE * g))
            losses = []
            for _ in range(options.steps):
                value, gradients = step(params, x, target)
                params = sgd(params, gradients)
                losses.append(float(value))
                group.check()
    is_same, has_learnt = worst <= TOLERANCE, losses[-1] < losses[0]
    if jax.process_index() == 0:
        print(
            f"{options.experts} experts on {mesh.size} {mesh.devices.flat[0].platform} device(s): "
            f"loss and gradients {'equal' if is_same else 'DIFFER FROM'} ragged_dot's "
            f"(largest relative difference {worst:.1e})"
        )
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps")
    return 0 if is_same and has_learnt else 1


if __name__ == "__main__":
    sys.exit(main())
