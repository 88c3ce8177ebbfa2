"""Ctrl-C while close() waits for an enqueued step that the other process has not begun."""

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meeting import LIMIT_MS, meet

import jax_ep

ME, N, T, H = jax.process_index(), jax.device_count(), 16, 32
LONG_S = 2 * LIMIT_MS / 1000
config = jax_ep.Config(
    num_experts=2 * N,
    top_k=2,
    hidden=H,
    max_tokens=T,
    dtype=jnp.float32,
    timeout_s=LONG_S,
    peer_timeout_s=LONG_S,
)
group = jax_ep.create_group(Mesh(np.array(jax.devices()), ("ep",)), "ep", config)


def body(x):
    ids = jnp.tile(jnp.arange(2, dtype=jnp.int32), (T, 1))
    recv = jax_ep.dispatch(group, x, ids)
    return jax_ep.combine(group, recv.x, recv)


x = place(np.ones((N * T, H), np.float32), group.mesh, P("ep"))
run = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
step = jax.jit(run).lower(x).compile()
step(x).block_until_ready()
if ME == 0:
    step(x)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        group.close()
    except KeyboardInterrupt:
        print("close KeyboardInterrupt", flush=True)
    print(f"heap_bytes {group.heap_bytes}", flush=True)
    group.close()
else:
    limit = time.monotonic() + LIMIT_MS / 1000
    while group.health().ok and time.monotonic() < limit:
        time.sleep(0.01)
    print(f"told {group.health().message}", flush=True)
meet("closed")
group.close()
