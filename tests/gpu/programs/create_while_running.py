"""Creates a group while a long program of another one runs on the same GPUs.

Prints `was_running`, `had_ended` (behind create_group) and `create DONE` if all results are right.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

T, H, K, E = 256, 1024, 2, 8
# A long program of few kernels: one of many waits on the host until the GPU has taken them.
SIZE = 8192  # of square products; each takes 20 ms or more
PRODUCTS = 12  # behind each other
ROUND_TRIPS = 6

if not jax.distributed.is_initialized():
    jax_ep.initialize()
mesh = Mesh(np.array(jax.devices()), ("ep",))
N = mesh.size
config = jax_ep.Config(
    num_experts=E * N, top_k=K, hidden=H, max_tokens=T, dtype=jnp.float32, mode="ht", timeout_s=30.0
)
sharding = NamedSharding(mesh, P("ep"))


def program(group):
    """The sum of ROUND_TRIPS, K copies of x each, with products by the unit matrix in between."""

    def trips(x, ids, one):
        total, factor = jnp.zeros_like(x), one
        for _ in range(ROUND_TRIPS):
            recv = jax_ep.dispatch(group, x, ids)
            total = total + jax_ep.combine(group, recv.x * factor[0, 0], recv)
            for _ in range(PRODUCTS):
                factor = jnp.matmul(factor, one, precision=lax.Precision.HIGHEST)
        return total * factor[0, 0]

    specs = (P("ep"), P("ep"), P())
    return jax.jit(
        jax.shard_map(trips, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False)
    )


def put(array):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


rng = np.random.default_rng(0)
x = put(np.ones((N * T, H), np.float32))
ids = put(np.stack([rng.permutation(E * N)[:K] for _ in range(N * T)]).astype(np.int32))


def check(out):
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), K * ROUND_TRIPS)


everywhere = NamedSharding(mesh, P())
one = jax.make_array_from_callback(
    (SIZE, SIZE), everywhere, lambda index: np.eye(SIZE, dtype=np.float32)[index]
)
first = jax_ep.create_group(mesh, "ep", config, "native")
run = program(first)
for _ in range(3):  # XLA captures programs when they run again
    check(run(x, ids, one))

out = run(x, ids, one)
print(f"was_running {int(not out.is_ready())}", flush=True)
second = jax_ep.create_group(mesh, "ep", config, "native")
print(f"had_ended {int(out.is_ready())}", flush=True)
check(out)
check(program(second)(x, ids, one))
for group in (first, second):
    group.check()
    group.close()
print("create DONE", flush=True)
