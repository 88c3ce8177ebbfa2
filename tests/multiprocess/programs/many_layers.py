"""Sixteen independent MoE layers and native psums, enqueued without waiting (xla.md facts 1 to 4).

Independent calls reach their handlers in different orders on different devices; native collectives
run beside them; nothing may wait for anything but its operands.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--executions", type=int, default=1000)
parser.add_argument("--layers", type=int, default=16)
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

N, T, H, K = jax.device_count(), 4, 8, 2
mesh = Mesh(np.array(jax.devices()), ("ep",))
group = jax_ep.create_group(
    mesh,
    "ep",
    jax_ep.Config(
        num_experts=2 * N,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        align=1,
        timeout_s=120.0,
    ),
)


@jax.jit
def layer(x, idx, scale):  # one jitted function, used sixteen times: sixteen calls with equal text
    recv = jax_ep.dispatch(group, x, idx, mode="ht")
    return jax_ep.combine(group, recv.x * scale, recv)


def program(x, idx):
    outs = []
    for i in range(args.layers):
        out = layer(x, (idx + i) % (2 * N), jnp.float32(i + 1))
        outs.append(out if i % 4 else out + lax.psum(x, "ep") * 0)
    total = sum(outs)
    return total, lax.psum(jnp.sum(total), "ep")


spec = P("ep")
run = jax.jit(
    jax.shard_map(program, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, P()), check_vma=False)
)
rng = np.random.default_rng(0)
x = rng.standard_normal((N * T, H)).astype(np.float32)
idx = rng.integers(0, 2 * N, (N * T, K)).astype(np.int32)
x_dev, idx_dev = place(x, mesh, spec), place(idx, mesh, spec)
results = [run(x_dev, idx_dev) for _ in range(args.executions)]
# Identity experts with scale s: every token comes back K * s times.
want = x * K * sum(range(1, args.layers + 1))
for out, _ in (results[0], results[len(results) // 2], results[-1]):
    for shard in out.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data), want[shard.index], rtol=1e-5)
first = float(results[0][1])
assert all(float(total) == first for _, total in results), "two executions differ"
print(f"executions {len(results)}", flush=True)
group.close()
