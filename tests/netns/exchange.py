"""One process of a job over several hosts: checked dispatch and combine, `--calls` times.

Prints `warm` after 10 calls and `ok N` at the end; on a failure `error SECONDS TEXT`, the seconds
counted from the last good call, and ends with 0 (an expected failure is a result).
"""

import argparse
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _jax_compat

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="ht")
parser.add_argument("--transport", default="ofi")
parser.add_argument("--peer-timeout", type=float, default=15.0)
parser.add_argument("--calls", type=int, default=200)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--pause", type=float, default=0.02, help="seconds between two calls")
parser.add_argument("--victim", type=int, help="the process that will be lost")
args = parser.parse_args()
jax_ep.initialize()

T, H, K = 64, args.hidden, 2
N = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))
group = jax_ep.create_group(
    mesh,
    "ep",
    jax_ep.Config(
        num_experts=2 * N,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        align=1,
        transport=args.transport,
        peer_timeout_s=args.peer_timeout,
        timeout_s=60.0,
    ),
)


def step(x, idx):
    recv = jax_ep.dispatch(group, x, idx, mode=args.mode)
    return jax_ep.combine(group, recv.x, recv)


spec = P("ep")
run = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
)
rng = np.random.default_rng(0)
x = rng.standard_normal((N * T, H)).astype(np.float32)
idx = rng.integers(0, 2 * N, (N * T, K)).astype(np.int32)


def place(a):
    return jax.make_array_from_callback(
        a.shape, jax.sharding.NamedSharding(mesh, spec), lambda i: a[i]
    )


x_dev, idx_dev = place(x), place(idx)
last = time.monotonic()
longest = 0.0
try:
    for call in range(args.calls):
        out = run(x_dev, idx_dev)
        for shard in out.addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data), x[shard.index] * K, rtol=1e-6)
        now = time.monotonic()
        if call >= 10:
            longest = max(longest, now - last)
        last = now
        if call == 10:
            print("warm", flush=True)
        time.sleep(args.pause)
except (jax.errors.JaxRuntimeError, ValueError) as error:
    text = " ".join(str(error).split())
    print(f"error {time.monotonic() - last:.2f} {text}", flush=True)
    if args.victim != 0:  # process 0 would take JAX's coordinator along before all have said theirs
        survivors = [p for p in range(jax.process_count()) if p != args.victim]
        _jax_compat.distributed_client().wait_at_barrier("said", 60_000, survivors)
    os._exit(0)  # JAX's own exit would wait for the process that is gone
print(f"longest {longest:.2f}", flush=True)
print(f"ok {args.calls}", flush=True)
sys.exit(0)
