"""Which calls XLA captures under its default flags: launches by handlers against executions.

Prints a JSON line per program. A call whose handler does not run in a warm execution was replayed.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

T, H, K, E, RUNS = 64, 256, 2, 8, 8
mesh = Mesh(np.array(jax.devices()), ("ep",))
N = mesh.size
sharding = NamedSharding(mesh, P("ep"))
config = jax_ep.Config(
    num_experts=E * N, top_k=K, hidden=H, max_tokens=T, dtype=jnp.float32, timeout_s=15.0
)
rng = np.random.default_rng(0)
x = jax.device_put(jnp.ones((N * T, H), jnp.float32), sharding)
ids = np.stack([rng.permutation(E * N)[:K] for _ in range(N * T)]).astype(np.int32)
ids = jax.device_put(ids, sharding)
matrix = jnp.eye(H, dtype=jnp.float32)

with jax_ep.create_group(mesh, "ep", config, "native") as group:

    def pairs(count, mode, has_products, x, ids, matrix):
        for _ in range(count):
            recv = jax_ep.dispatch(group, x, ids, mode=mode)
            rows = recv.x @ matrix if has_products else 0.5 * recv.x
            x = jax_ep.combine(group, rows, recv)
        return x

    for mode in ("ll", "ht"):
        for has_products in (False, True):
            for count in (1, 2, 4):

                def program(x, ids, matrix, args=(count, mode, has_products)):
                    return pairs(*args, x, ids, matrix)

                step = jax.jit(
                    jax.shard_map(
                        program,
                        mesh=mesh,
                        in_specs=(P("ep"), P("ep"), P()),
                        out_specs=P("ep"),
                        check_vma=False,
                    )
                )
                for _ in range(4):  # compiled, captured
                    step(x, ids, matrix).block_until_ready()
                before = group.stats()
                for _ in range(RUNS):
                    step(x, ids, matrix).block_until_ready()
                after = group.stats()
                combines = (after["combines"] - before["combines"]) / (RUNS * N)
                launches = (after["launches"] - before["launches"]) / (RUNS * N)
                line = {
                    "mode": mode,
                    "pairs": count,
                    "products": has_products,
                    "combines_per_run": combines,
                    "launches_per_run": launches,
                }
                print(json.dumps(line), flush=True)
    group.check()
print("captured DONE", flush=True)
