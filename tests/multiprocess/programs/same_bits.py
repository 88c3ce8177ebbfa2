"""Runs a fixed set of cases and prints one digest per case: the same bits whatever the topology.

Rank inputs depend on the rank alone, never on the process, so every process model must agree.
"""

import argparse
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--node-size", type=int, default=None)
parser.add_argument("--implementation", default=None)
parser.add_argument("--transport", default="auto")
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

N = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))


def digest(tree):
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        value = multihost_utils.process_allgather(leaf, tiled=True)
        total.update(np.ascontiguousarray(value).tobytes())
    return total.hexdigest()[:16]


def run_case(name, *, tokens, top_k, hidden, dtype, layout, mode, experts_per_rank=2, **config):
    experts = experts_per_rank * N
    group = jax_ep.create_group(
        mesh,
        "ep",
        jax_ep.Config(
            num_experts=experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=max(tokens, 1),
            dtype=dtype,
            node_size=args.node_size if args.implementation != "xla" else None,
            transport=args.transport if args.implementation != "xla" else "auto",
            timeout_s=60.0,
            **{"align": 8, "partials": "float32", **config},
        ),
        implementation=args.implementation,
    )
    rng = np.random.default_rng(7)
    x = rng.standard_normal((N * tokens, hidden)).astype(np.float32)
    skew = rng.zipf(1.5, (N * tokens, top_k)) % experts
    idx = np.where(rng.random((N * tokens, top_k)) < 0.1, -1, skew).astype(np.int32)
    weights = rng.random((N * tokens, top_k)).astype(np.float32)

    def step(x, idx, weights, one):
        def loss(x, weights):
            recv = jax_ep.dispatch(group, x.astype(dtype), idx, weights, mode=mode, layout=layout)
            y = (recv.x.astype(jnp.float32) * 1.5).astype(dtype)
            out = jax_ep.combine(
                group, y, recv.plan, None if layout == "rank_major" else recv.weights.reshape(-1)
            )
            return jnp.sum(out.astype(jnp.float32) ** 2), (recv, out)

        # XLA's partitioner refuses a shard_map whose operands are all empty, which T = 0 makes them.
        x = x * one[0]
        (_, (recv, out)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
        plan = recv.plan
        extra = (plan.num_dropped[None], plan.overflow[None])
        return recv.x, recv.weights, plan.recv_src, plan.group_sizes, extra, out, grads

    spec = P("ep")
    place = lambda a: jax.make_array_from_callback(  # noqa: E731
        a.shape, jax.sharding.NamedSharding(mesh, spec), lambda i: a[i]
    )
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec, check_vma=False)
    result = jax.jit(mapped)(*map(place, (x, idx, weights)), np.ones(1, np.float32))
    moves, sums = digest(result[:5]), digest(result[5:])
    if jax.process_index() == 0:
        print(f"case {name} {moves} {sums}", flush=True)
    group.check()
    group.close()


run_case("ht-f32", tokens=37, top_k=2, hidden=136, dtype=jnp.float32, layout="expert_major", mode="ht")
run_case("ht-bf16", tokens=64, top_k=4, hidden=40, dtype=jnp.bfloat16, layout="expert_major", mode="ht",
         capacity_factor=1.0)  # fmt: skip
run_case("ht-rank", tokens=19, top_k=3, hidden=8, dtype=jnp.float32, layout="rank_major", mode="ht")
run_case("ht-batched", tokens=5, top_k=2, hidden=24, dtype=jnp.float16, layout="expert_batched", mode="ht")
run_case("ll-f32", tokens=8, top_k=2, hidden=136, dtype=jnp.float32, layout="expert_major", mode="ll")
run_case("ll-batched", tokens=16, top_k=4, hidden=64, dtype=jnp.bfloat16, layout="expert_batched", mode="ll")
run_case("ll-rank", tokens=3, top_k=2, hidden=16, dtype=jnp.float32, layout="rank_major", mode="ll")
run_case("empty", tokens=0, top_k=2, hidden=16, dtype=jnp.float32, layout="expert_major", mode="ht",
         recv_rows=16)  # fmt: skip
print("done", flush=True)
