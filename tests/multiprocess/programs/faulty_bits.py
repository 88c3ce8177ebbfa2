"""The same digests on a quiet network and on faulty ones: seeds FIRST..LAST in one process."""

import argparse
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--first", type=int, default=0)
parser.add_argument("--last", type=int, default=9)
parser.add_argument("--node-size", type=int, default=2)
parser.add_argument("--transport", default="auto")
args = parser.parse_args()
N, T, H, K = jax.device_count(), 24, 128, 2
mesh = Mesh(np.array(jax.devices()), ("ep",))
rng = np.random.default_rng(3)
x = rng.standard_normal((N * T, H)).astype(np.float32)
idx = (rng.zipf(1.4, (N * T, K)) % (2 * N)).astype(np.int32)
weights = rng.random((N * T, K)).astype(np.float32)
slots = rng.permutation(np.append(np.arange(2 * N), rng.integers(0, 2 * N, N)))
placement = jax_ep.Placement.from_physical(slots, 2 * N)


programs = {}


def program_of(group, mode):
    """Compiled once: each group below has the number of the one before, so programs find it.

    On GPUs for each group: what XLA has captured in a command buffer stays with its group.
    """
    if mode in programs and jax.default_backend() == "cpu":
        return programs[mode]

    def step(x, idx, weights):
        def loss(x, weights):
            recv = jax_ep.dispatch(group, x, idx, weights, mode=mode, placement=placement)
            out = jax_ep.combine(group, recv.x * 1.5, recv)
            quantized = jax_ep.dispatch_quantized(group, x, plan=recv.plan).x
            return jnp.sum(out**2), (recv.x, out, quantized)

        (_, rows), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
        return rows, grads

    spec = P("ep")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    programs[mode] = jax.jit(mapped)
    return programs[mode]


def digests(faulty):
    """Digest of rows, sums and gradients in both modes under the JAX_EP_FAULTY spec."""
    os.environ["JAX_EP_FAULTY"] = faulty
    config = jax_ep.Config(
        num_experts=2 * N,
        physical_experts=3 * N,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        align=8,
        node_size=args.node_size,
        transport=args.transport,
        timeout_s=60.0,
    )
    total = hashlib.sha256()
    with jax_ep.create_group(mesh, "ep", config) as group:
        for mode in ("ht", "ll"):
            run = program_of(group, mode)
            for _ in range(3):  # epochs go on, sets are reused
                for leaf in jax.tree.leaves(run(x, idx, weights)):
                    total.update(np.asarray(leaf).tobytes())
        flows = group.stats()["flows"]
        # Over cuda writes without bytes overtake others, faults or not.
        counts = ("duplicates",) if args.transport == "cuda" else ("reorders", "duplicates")
        disorder = sum(flow[count] for flow in flows for count in counts)
    assert sum(rank["dispatches"] for rank in group.stats()["ranks"]) > 0  # by this very group
    group.number.give_back()
    return total.hexdigest()[:16], disorder


quiet, disorder = digests("")
assert disorder == 0, disorder
seen = 0
faults = "reorder=16,delay=8,duplicate=10,split=20,again=10"
if args.transport != "cuda":  # nobody but its GPU can hold back what comes late
    faults += ",payload_late=1"
for seed in range(args.first, args.last + 1):
    spec = f"seed={seed},{faults}"
    digest, disorder = digests(spec)
    assert digest == quiet, f"seed {seed}: {digest} instead of {quiet}"
    seen += disorder
assert seen > 0, "the faulty network was not faulty"
print(f"seeds {args.last - args.first + 1} disorder {seen}", flush=True)
