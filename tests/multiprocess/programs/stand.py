"""Four ranks in two nodes; rank 1 stands in Python before its third call, then before its close.

It goes on when the file GO1, then GO2, appears in the folder that is the argument.
"""

import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import PartitionSpec as P

import jax_ep

folder = pathlib.Path(sys.argv[1])
print("PID", os.getpid(), flush=True)
mesh = jax.make_mesh((jax.device_count(),), ("ep",))
config = jax_ep.Config(
    num_experts=8,
    top_k=2,
    hidden=16,
    max_tokens=8,
    dtype=jnp.float32,
    node_size=2,
    timeout_s=100,
    peer_timeout_s=60,
)


def stand(name):
    if jax.process_index() == 1:
        print("STANDS", name, flush=True)
        while not (folder / name).exists():
            time.sleep(0.05)


def layer(x, ids):
    recv = jax_ep.dispatch(group, x, ids)  # THE CALL
    return jax_ep.combine(group, recv.x, recv)


x = place(np.ones((32, 16), np.float32), mesh, P("ep"))
ids = place(np.tile(np.array([[0, 5]], np.int32), (32, 1)), mesh, P("ep"))
with jax_ep.create_group(mesh, "ep", config) as group:
    step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    for number in range(4):
        if number == 2:
            stand("GO1")
        jax.block_until_ready(step(x, ids))
    stand("GO2")
print("DONE", flush=True)
