"""The last process dies inside create_group or inside close; the others must not hang.

Where it dies is fixed by replacing one private step of that process by SIGKILL.
"""

import argparse
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meeting import meet

import jax_ep
from jax_ep._runtime import bootstrap, session

parser = argparse.ArgumentParser()
parser.add_argument("--phase", required=True, choices=["bootstrap", "close"])
parser.add_argument("--node-size", type=int, default=None)
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

is_victim = jax.process_index() == jax.process_count() - 1


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def make(devices, node_size=None):
    config = jax_ep.Config(
        num_experts=2 * len(devices),
        top_k=2,
        hidden=32,
        max_tokens=16,
        dtype=jnp.float32,
        node_size=node_size,
        timeout_s=60.0,
        peer_timeout_s=4.0,
    )
    return jax_ep.create_group(Mesh(np.array(devices), ("ep",)), "ep", config)


if args.phase == "bootstrap":
    if is_victim:
        share = bootstrap.Exchange.share
        bootstrap.Exchange.share = lambda self, stage, *rest: (
            share(self, stage, *rest) if stage == "hello" else die()
        )
    meet("start")
    start = time.monotonic()
    try:
        make(jax.devices(), args.node_size)
        error = "none"
    except jax_ep.BootstrapError as caught:
        error = " ".join(str(caught).split())
else:
    group = make(jax.devices(), args.node_size)
    ids = jax.jit(
        jax.shard_map(
            lambda ids: jax_ep.plan(group, ids).send_slot,
            mesh=group.mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )
    )
    zeros = np.zeros((16 * jax.device_count(), 2), np.int32)
    ids(place(zeros, group.mesh, P("ep"))).block_until_ready()
    # All have their result before the victim dies: what it wrote last may still lie in its proxy.
    meet("ran")
    if is_victim:
        session.NativeSession.close = die
    start = time.monotonic()
    group.close()
    error = "closed"
print(f"seconds {time.monotonic() - start:.2f}", flush=True)
print(f"error {error}", flush=True)
survivors = [d for d in jax.devices() if d.process_index != jax.process_count() - 1]
make(survivors).close()
print("went_on yes", flush=True)
# Process 0 would take JAX's coordinator along before the others have gone on.
meet("went on", [device.process_index for device in survivors])
os._exit(0)  # JAX's own shutdown barrier would wait for the dead
