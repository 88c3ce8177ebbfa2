"""Layers in two nodes with JAX_EP_TRACE set; prints what its trace must agree with.

With `--kill R`, process R ends by SIGKILL after the calls.
"""

import argparse
import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import PartitionSpec as P

import jax_ep

TOKENS, HIDDEN, EXPERTS, TOP_K, STEPS = 16, 64, 8, 2, 6

parser = argparse.ArgumentParser()
parser.add_argument("--kill", type=int, default=-1)
options = parser.parse_args()

num_ranks = jax.device_count()
mesh = jax.make_mesh((num_ranks,), ("ep",))
rng = np.random.default_rng(0)


x = rng.standard_normal((num_ranks * TOKENS, HIDDEN)).astype(np.float32)
ids = rng.integers(0, EXPERTS, (num_ranks * TOKENS, TOP_K)).astype(np.int32)
x, ids = place(x, mesh, P("ep")), place(ids, mesh, P("ep"))

for mode in ("ht", "ll"):
    config = jax_ep.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        dtype=jnp.float32,
        mode=mode,
        node_size=2,
        timeout_s=60,
        peer_timeout_s=5,
    )
    group = jax_ep.create_group(mesh, "ep", config)

    def layer(x, ids, group=group):
        recv = jax_ep.dispatch(group, x, ids)  # THE DISPATCH
        return jax_ep.combine(group, recv.x, recv)

    step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    for _ in range(STEPS):
        out = step(x, ids)
    jax.block_until_ready(out)
    time.sleep(0.5)  # signals for the next call are still under way; a trace is written by then
    if options.kill >= 0:
        if jax.process_index() == options.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    print("group", mode, group.name)
    print("flows", mode, json.dumps(group.stats()["flows"]), flush=True)
    group.close()
