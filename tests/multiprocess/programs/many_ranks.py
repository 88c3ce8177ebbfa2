"""Many ranks: every operation against numpy, and what memory the group takes.

Rows are small integers and weights powers of two, so that no sum rounds: the results are numpy's
bits, in whatever order something is added.
"""

import argparse
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--node-size", type=int)
parser.add_argument("--tokens", type=int, default=192)
parser.add_argument("--hidden", type=int, default=64)
args = parser.parse_args()
jax.config.update("jax_disable_most_optimizations", True)  # compilation is most of the time here
if not jax.distributed.is_initialized():
    jax_ep.initialize()

N, K, E_L = jax.device_count(), 4, 2
T, H, E = args.tokens, args.hidden, N * E_L
mesh = Mesh(np.array(jax.devices()), ("ep",))
rng = np.random.default_rng(5)
x = rng.integers(-2, 3, (N * T, H)).astype(np.float32)
ids = np.argsort(rng.random((N * T, E)), axis=1)[:, :K].astype(np.int32)
ids[rng.random(ids.shape) < 0.1] = -1
weights = rng.choice([0.5, 1.0, 2.0], (N * T, K)).astype(np.float32)
kept = np.where(ids < 0, 0, weights * (1 + ids % 3))
expected = {"whole": kept.sum(1, keepdims=True) * x}
expected["halves"] = expected["whole"]
# Of half the squared norm of x times that factor.
expected["grad_x"] = kept.sum(1, keepdims=True) ** 2 * x
expected["grad_w"] = np.where(ids < 0, 0, 1 + ids % 3) * (expected["whole"] * x).sum(
    1, keepdims=True
)

begin = time.monotonic()
group = jax_ep.create_group(
    mesh,
    "ep",
    jax_ep.Config(
        num_experts=E,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        align=1,
        capacity_factor=4.0,
        node_size=args.node_size,
        timeout_s=300.0,
    ),
)


def experts(recv):
    """Expert e multiplies its rows by 1 + e % 3."""
    ends = jnp.cumsum(recv.group_sizes)
    local = jnp.searchsorted(ends, jnp.arange(recv.x.shape[0]), side="right")
    expert = jax.lax.axis_index("ep") * E_L + jnp.minimum(local, E_L - 1)
    return recv.x * (1 + expert % 3)[:, None]


def layers(mode):
    def whole(x, ids, weights):
        recv = jax_ep.dispatch(group, x, ids, weights, mode=mode)
        return jax_ep.combine(group, experts(recv), recv), recv.plan.num_dropped[None]

    def halves(x, ids, weights):
        inflight = jax_ep.dispatch_start(group, x, ids, weights, mode=mode)
        recv = jax_ep.dispatch_done(group, inflight)
        return jax_ep.combine_done(group, jax_ep.combine_start(group, experts(recv), recv))

    def step(x, ids, weights):
        def loss(x, weights):
            out, dropped = whole(x, ids, weights)
            return jnp.sum(out**2) / 2, (out, dropped)

        (_, (out, dropped)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, weights)
        return out, halves(x, ids, weights), *grads, dropped

    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    )


for mode, tokens in (("ht", T), ("ll", min(T, 128))):
    rows = np.arange(N * T).reshape(N, T)[:, :tokens].reshape(-1)
    step = layers(mode)
    for _ in range(2):  # sets and flags are used again
        placed = [place(a[rows], mesh, P("ep")) for a in (x, ids, weights)]
        outs = jax.block_until_ready(step(*placed))
    *results, dropped = outs
    for name, result in zip(("whole", "halves", "grad_x", "grad_w"), results, strict=True):
        for shard in result.addressable_shards:
            want = expected[name][rows][shard.index]
            assert np.array_equal(np.asarray(shard.data), want), (mode, name, shard.index)
    assert not any(np.asarray(shard.data).any() for shard in dropped.addressable_shards)
group.check()
with open("/proc/self/status") as status:
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1)
print(f"heap {group.heap_bytes // len(jax.local_devices())}", flush=True)
print(f"peak_rss {int(peak) << 10}", flush=True)
print(f"seconds {time.monotonic() - begin:.1f}", flush=True)
group.close()
