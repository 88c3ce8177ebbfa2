"""A training loop that mixes our calls with native collectives and big products, on any processes.

Prints `losses` of the first steps for both implementations, and `steps DONE` at the end.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--mode", default="ht", choices=["ht", "ll"])
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

T, H, F, K, E, BIG = 256, 512, 512, 4, 16, 2048
FEW = 10  # losses that are looked at, at the beginning and at the end
RATE = 2.0  # the loss is a mean over H too, so gradients are small
mesh = Mesh(np.array(jax.devices()), ("ep",))
N = mesh.size
if args.mode == "ll":
    T = 64
config = jax_ep.Config(
    num_experts=E,
    top_k=K,
    hidden=H,
    max_tokens=T,
    dtype=jnp.float32,
    capacity_factor=2.0,
    align=16,
    timeout_s=30.0,
)


def make_step(group):
    def experts(params, rows, group_sizes):
        return lax.ragged_dot(
            jax.nn.relu(lax.ragged_dot(rows, params["up"], group_sizes)),
            params["down"],
            group_sizes,
        )

    def loss_of(params, x, target):
        logits = x @ params["router"]
        weights, idx = lax.top_k(jax.nn.softmax(logits), K)
        out = jax_ep.moe(group, x, idx, weights, experts, params)
        return lax.pmean(jnp.mean((x + out - target) ** 2), "ep")

    def step(params, key, big):
        key = jax.random.fold_in(key, lax.axis_index("ep"))
        x = jax.random.normal(key, (T, H))
        loss, grads = jax.value_and_grad(loss_of)(params, x, jnp.roll(x, 1, axis=1))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        # A product as long as a layer's, and a collective of XLA's that depends on it.
        big = jnp.tanh(big @ big.T / BIG)
        everyone = lax.all_gather(big[:8, :8], "ep")
        return params, loss + 0 * lax.psum(jnp.sum(everyone), "ep"), big

    specs = {"router": P(), "up": P("ep"), "down": P("ep")}
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P(), P("ep")),
        out_specs=(specs, P(), P("ep")),
    )
    return jax.jit(mapped, donate_argnums=(0, 2))


def start():
    def put(shape, spec, seed):
        value = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / np.sqrt(
            shape[-2]
        )
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index: value[index]
        )

    params = {
        "router": put((H, E), P(), 0),
        "up": put((E, H, F), P("ep"), 1),
        "down": put((E, F, H), P("ep"), 2),
    }
    return params, put((N * BIG, BIG), P("ep"), 3)


def losses(implementation, steps):
    with jax_ep.create_group(mesh, "ep", config, implementation) as group:
        step = make_step(group)
        params, big = start()
        key = jax.random.key(0)
        seen = []
        began = time.monotonic()
        for i in range(steps):
            params, loss, big = step(params, jax.random.fold_in(key, i), big)
            if i < FEW or i >= steps - FEW:
                seen.append(loss)
            if i % 100 == 99:
                group.check()
        jax_ep.wait(params)
        seconds = time.monotonic() - began
        return [float(loss) for loss in seen], seconds


native, seconds = losses("native", args.steps)
reference, _ = losses("xla", FEW)
if jax.process_index() == 0:
    print("losses", *native[:FEW], flush=True)
np.testing.assert_allclose(native[:FEW], reference[:FEW], rtol=2e-4)
# A single loss differs from batch to batch by more than few steps learn.
assert np.mean(native[-FEW:]) < 0.98 * np.mean(native[:FEW]), native
print(f"steps {args.steps} ranks {N} {seconds:.1f}s last {native[-1]:.5f} DONE", flush=True)
