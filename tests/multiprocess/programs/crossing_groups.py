"""Groups over both axes of a mesh and over their product, used independently in one program."""

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

if not jax.distributed.is_initialized():
    jax_ep.initialize()

N, T, H, K = jax.device_count(), 6, 16, 2
mesh = Mesh(np.array(jax.devices()).reshape(2, N // 2), ("outer", "inner"))


def make(axis, num_ranks):
    config = jax_ep.Config(
        num_experts=2 * num_ranks,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        align=1,
        timeout_s=60.0,
    )
    return jax_ep.create_group(mesh, axis, config), 2 * num_ranks


groups = [make("outer", 2), make("inner", N // 2), make(("inner", "outer"), N)]


def program(x, idx):
    outs = []
    for repeat in range(3):
        for scale, (group, num_experts) in enumerate(groups, start=1):
            mode = "ll" if repeat == 1 else "ht"
            recv = jax_ep.dispatch(group, x, (idx + repeat) % num_experts, mode=mode)
            outs.append(jax_ep.combine(group, recv.x * scale, recv))
    return sum(outs), lax.psum(jnp.sum(x), ("outer", "inner"))


spec = P(("outer", "inner"))
run = jax.jit(
    jax.shard_map(program, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, P()), check_vma=False)
)
rng = np.random.default_rng(0)
x = rng.standard_normal((N * T, H)).astype(np.float32)
idx = rng.integers(0, 1 << 20, (N * T, K)).astype(np.int32)
x_dev, idx_dev = place(x, mesh, spec), place(idx, mesh, spec)
results = [run(x_dev, idx_dev)[0] for _ in range(100)]
for shard in results[-1].addressable_shards:
    np.testing.assert_allclose(np.asarray(shard.data), x[shard.index] * K * 18, rtol=1e-5)
for group, _ in groups:
    group.check()
    group.close()
print("groups 3", flush=True)
