"""JAX_EP_DEBUG=1: rank 2 gets an expert id that no expert has; what do all ranks say of it?"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

mesh = Mesh(np.array(jax.devices()), ("ep",))
TOKENS, HIDDEN = 4, 8


def attempt(name, implementation, mode, node_size):
    config = jax_ep.Config(
        num_experts=mesh.size,
        top_k=1,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        dtype=jnp.float32,
        mode=mode,
        node_size=node_size,
    )
    with jax_ep.create_group(mesh, "ep", config, implementation) as group:

        def step(x, ids):
            recv = jax_ep.dispatch(group, x, ids)
            return jax_ep.combine(group, recv.x, recv)

        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        x = place(np.ones((mesh.size * TOKENS, HIDDEN), np.float32), mesh, P("ep"))
        ids = np.zeros((mesh.size * TOKENS, 1), np.int32)
        jax.block_until_ready(step(x, place(ids, mesh, P("ep"))))
        ids[2 * TOKENS] = 99
        start = time.monotonic()
        for shard in step(x, place(ids, mesh, P("ep"))).addressable_shards:
            rank = shard.index[0].start // TOKENS
            try:
                jax.block_until_ready(shard.data)
                print(f"{name}_{rank} passed", flush=True)
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                print(f"{name}_{rank} {' '.join(str(error).split())}", flush=True)
        print(f"{name}_seconds {time.monotonic() - start:.2f}", flush=True)


attempt("host", "native", "ht", None)
attempt("decode", "native", "ll", None)
attempt("network", "native", "ht", 1)
attempt("xla", "xla", "ht", None)
