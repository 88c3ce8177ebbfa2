"""Creates a group over all processes, and says how long that took and that it works."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import PartitionSpec as P

import jax_ep

mesh = jax.make_mesh((jax.device_count(),), ("ep",))
config = jax_ep.Config(
    num_experts=jax.device_count(), top_k=2, hidden=16, max_tokens=4, dtype=jnp.float32
)
start = time.monotonic()
with jax_ep.create_group(mesh, "ep", config) as group:
    print("SECONDS", time.monotonic() - start, flush=True)
    tokens, ranks = 4, jax.device_count()
    ids = (np.arange(tokens * ranks)[:, None] + np.array([1, 5])) % ranks
    x = np.arange(tokens * ranks * 16, dtype=np.float32).reshape(-1, 16) % 32

    def layer(x, ids):
        recv = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, recv.x, recv)

    step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    out = step(place(x, mesh, P("ep")), place(ids.astype(np.int32), mesh, P("ep")))
    for shard in out.addressable_shards:  # each token's row once from each of two experts
        np.testing.assert_array_equal(np.asarray(shard.data), 2 * x[shard.index])
print("DONE yes", flush=True)
