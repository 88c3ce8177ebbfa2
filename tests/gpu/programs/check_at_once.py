"""What a kernel finds is what Group.check says as soon as the result is there; JAX_EP_DEBUG=1.

The last rank alone has an id out of range, so that the others know of its failure only.

Prints `found N of ROUNDS`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

ROUNDS = 20
mesh = Mesh(np.array(jax.devices()), ("ep",))
N = mesh.size
config = jax_ep.Config(
    num_experts=N, top_k=1, hidden=64, max_tokens=4, dtype=jnp.float32, timeout_s=20.0
)
found = 0
for _ in range(ROUNDS):
    with jax_ep.create_group(mesh, "ep", config, "native") as group:

        def layer(x, ids, group=group):
            recv = jax_ep.dispatch(group, x, ids)
            return jax_ep.combine(group, recv.x, recv)

        step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(P("ep"),) * 2, out_specs=P("ep")))
        x, ids = jnp.ones((4 * N, 64)), jnp.zeros((4 * N, 1), jnp.int32)
        np.testing.assert_array_equal(step(x, ids), 1)
        group.check()
        assert np.isnan(step(x, ids.at[-1].set(N))).any()
        try:
            group.check()
        except RuntimeError as error:
            found += "got 1 expert id(s) of num_experts or more" in str(error)
print(f"found {found} of {ROUNDS}", flush=True)
