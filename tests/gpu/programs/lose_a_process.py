"""A process dies between steps; its GPU's peers get NaN, then its name, and go on without it."""

import argparse
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../multiprocess/programs"))
from meeting import meet

parser = argparse.ArgumentParser()
parser.add_argument("--node-size", type=int, default=None)
parser.add_argument("--transport", default="auto")
parser.add_argument("--mode", default="ht", choices=["ht", "ll"])
parser.add_argument("--peer-timeout", type=float, default=4.0)
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

T, H, K = 16, 64, 2
LIMIT_S = 30.0
victim = jax.process_count() - 1


def make(devices, node_size):
    mesh = Mesh(np.array(devices), ("ep",))
    n = len(devices)
    config = jax_ep.Config(
        num_experts=2 * n,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        align=1,
        timeout_s=60.0,
        peer_timeout_s=args.peer_timeout,
        node_size=node_size,
        transport=args.transport,
    )
    group = jax_ep.create_group(mesh, "ep", config, "native")

    def step(x, idx):
        recv = jax_ep.dispatch(group, x, idx, mode=args.mode)
        return jax_ep.combine(group, recv.x, recv)

    spec = P("ep")
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n * T, H)).astype(np.float32)
    idx = rng.integers(0, 2 * n, (n * T, K)).astype(np.int32)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    arrays = [
        jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in (x, idx)
    ]

    def outcome():
        """ "right", "poisoned", or a text that says what else came."""
        for shard in run(*arrays).addressable_shards:
            got = np.asarray(shard.data)
            if np.isnan(got).all():
                return "poisoned"
            if not np.allclose(got, x[shard.index] * K, rtol=1e-6):
                return f"neither rows nor NaN: {got.ravel()[:8]}"
        return "right"

    return group, outcome


group, outcome = make(jax.devices(), args.node_size)
for _ in range(20):
    assert outcome() == "right"
group.check()
meet("warm")
if jax.process_index() == victim:
    os.kill(os.getpid(), signal.SIGKILL)

start = time.monotonic()
outcomes = set()
error = ""
while not error:
    assert time.monotonic() - start < LIMIT_S, "the loss of a process went unnoticed"
    try:
        outcomes.add(outcome())
        group.check()
    except (RuntimeError, ValueError) as caught:  # cached jit calls raise ValueError
        error = " ".join(str(caught).split())
print(f"seconds {time.monotonic() - start:.2f}", flush=True)
print(f"outcomes {sorted(outcomes)}", flush=True)
print(f"error {error}", flush=True)
group.close()
survivors = [device for device in jax.devices() if device.process_index != victim]
smaller, outcome = make(survivors, None)
for _ in range(5):
    assert outcome() == "right"
smaller.check()
smaller.close()
print(f"went_on {len(survivors)}", flush=True)
meet("went on", [device.process_index for device in survivors])
os._exit(0)  # JAX's own shutdown barrier would wait for the dead
