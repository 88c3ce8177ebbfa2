"""Runs a fixed set of cases and prints one digest per case: the same bits whatever the topology.

Rank inputs depend on the rank alone, never on the process, so every process model must agree.
"""

import argparse
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._session_number import SessionNumber

parser = argparse.ArgumentParser()
parser.add_argument(
    "--node-sizes", type=lambda text: [int(n) for n in text.split(",")], default=[None]
)
parser.add_argument("--implementation", default=None)
parser.add_argument("--transport", default="auto")
args = parser.parse_args()
jax.config.update("jax_disable_most_optimizations", True)  # compilation is most of the time here
if not jax.distributed.is_initialized():
    jax_ep.initialize()

N = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))


def digests(*trees):
    """One digest per tree, of every rank's shards in the order of ranks."""
    mine = []
    for device in jax.local_devices():
        for tree in trees:
            total = hashlib.sha256()
            for leaf in jax.tree.leaves(tree):
                (shard,) = (s for s in leaf.addressable_shards if s.device == device)
                total.update(np.ascontiguousarray(shard.data).tobytes())
            mine.append(np.frombuffer(total.digest(), np.uint8))
    # One small array, whatever the leaves: each shape to gather would be one more compilation.
    gathered = np.asarray(multihost_utils.process_allgather(np.stack(mine)))
    by_rank = gathered.reshape(N, len(trees), -1)
    return [hashlib.sha256(by_rank[:, i].tobytes()).hexdigest()[:16] for i in range(len(trees))]


# A case is one program for all node sizes, compiled once: its groups share an id.
id_of_case = 0
SessionNumber.session_id = property(lambda self: id_of_case)
programs = {}


def run_case(
    name,
    node_size,
    *,
    tokens,
    top_k,
    hidden,
    dtype,
    layout,
    mode,
    is_view=False,
    placed=False,
    **config,
):
    global id_of_case
    id_of_case = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    experts = 2 * N
    more = 3 if is_view else 0
    whole = jax_ep.create_group(
        mesh,
        "ep",
        jax_ep.Config(
            num_experts=experts + more * N,
            top_k=top_k + more,
            hidden=hidden + more,
            max_tokens=max(tokens, 1),
            dtype=dtype,
            node_size=node_size,
            transport=args.transport,
            timeout_s=60.0,
            physical_experts=3 * N if placed else None,
            **{"align": 8, "partials": "float32", **config},
        ),
        implementation=args.implementation,
    )
    group = whole.view(num_experts=experts, top_k=top_k, hidden=hidden) if is_view else whole
    rng = np.random.default_rng(7)
    x = rng.standard_normal((N * tokens, hidden)).astype(np.float32)
    skew = rng.zipf(1.5, (N * tokens, top_k)) % experts
    idx = np.where(rng.random((N * tokens, top_k)) < 0.1, -1, skew).astype(np.int32)
    weights = rng.random((N * tokens, top_k)).astype(np.float32)
    # Where experts are, and where they were: with replicas, on any ranks.
    filled = [np.append(np.arange(experts), rng.integers(0, experts, N)) for _ in range(2)]
    new, old = (jax_ep.Placement.from_physical(rng.permutation(f), experts) for f in filled)

    def step(x, idx, weights, one):
        def loss(x, weights):
            recv = jax_ep.dispatch(
                group,
                x.astype(dtype),
                idx,
                weights,
                mode=mode,
                layout=layout,
                placement=new if placed else None,
            )
            y = (recv.x.astype(jnp.float32) * 1.5).astype(dtype)
            out = jax_ep.combine(group, y, recv)
            return jnp.sum(out.astype(jnp.float32) ** 2), (recv, out)

        # XLA's partitioner refuses a shard_map whose operands are all empty (T = 0).
        x = x * one[0]
        (_, (recv, out)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
        plan = recv.plan
        extra = (plan.num_dropped[None], plan.overflow[None])
        if placed:
            rows = jnp.arange(3 * 5, dtype=f32).reshape(3, 5) + 100 * jax.lax.axis_index("ep")
            extra += (jax_ep.eplb.move(group, rows, old, new),)
            grads += (jax_ep.eplb.reduce_gradients(group, rows / 7, new),)
        return recv.x, recv.weights, plan.recv_src, plan.group_sizes, extra, out, grads

    spec = P("ep")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec, check_vma=False
    )
    run = programs.setdefault(name, jax.jit(mapped))
    result = run(*(place(a, mesh, spec) for a in (x, idx, weights)), np.ones(1, np.float32))
    moves, sums = digests(result[:5], result[5:])
    if jax.process_index() == 0:
        print(f"case {node_size} {name} {moves} {sums}", flush=True)
    group.check()
    if group.native and tokens:
        assert all(rank["dispatches"] for rank in group.stats()["ranks"])  # by this very group
    group.close()


f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
CASES = {
    "ht-f32": dict(
        tokens=37, top_k=2, hidden=136, dtype=f32, layout="expert_major", mode="ht", placed=True
    ),
    "ht-bf16": dict(
        tokens=64,
        top_k=4,
        hidden=40,
        dtype=bf16,
        layout="expert_major",
        mode="ht",
        capacity_factor=1.0,
    ),
    # Large enough to be written past the caches (kernels/cpu/rows.h, kStreamFromBytes).
    "ht-large": dict(
        tokens=300,
        top_k=4,
        hidden=2048,
        dtype=f32,
        layout="expert_major",
        mode="ht",
        capacity_factor=1.0,
    ),
    "ht-rank": dict(
        tokens=19, top_k=3, hidden=8, dtype=f32, layout="rank_major", mode="ht", is_view=True
    ),
    "ht-batched": dict(tokens=5, top_k=2, hidden=24, dtype=f16, layout="expert_batched", mode="ht"),
    "ll-f32": dict(
        tokens=8, top_k=2, hidden=136, dtype=f32, layout="expert_major", mode="ll", is_view=True
    ),
    "ll-batched": dict(
        tokens=16,
        top_k=4,
        hidden=64,
        dtype=bf16,
        layout="expert_batched",
        mode="ll",
        placed=True,
    ),
    "ht-fp8": dict(
        tokens=33,
        top_k=3,
        hidden=96,
        dtype=bf16,
        layout="rank_major",
        mode="ht",
        wire=jax_ep.FP8(block=32),
    ),
    "ll-fp8": dict(
        tokens=7,
        top_k=2,
        hidden=64,
        dtype=f32,
        layout="expert_major",
        mode="ll",
        wire=jax_ep.FP8(block=64, scale="ue8m0"),
    ),
    "ll-rank": dict(tokens=3, top_k=2, hidden=16, dtype=f32, layout="rank_major", mode="ll"),
    "empty": dict(
        tokens=0, top_k=2, hidden=16, dtype=f32, layout="expert_major", mode="ht", recv_rows=16
    ),
}
for size in args.node_sizes:
    for name, case in CASES.items():
        run_case(name, size, **case)
