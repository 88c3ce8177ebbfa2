"""An elastic group that loses process 0, goes on, and takes it back; needs --coordinator.

Usage: lose_process_0.py TRANSPORT [fp8]. fp8: rows travel quantised. Process 0 kills itself in its
first life. Each process prints what it has agreed on and after how many seconds; any wrong number
ends it.
"""

import dataclasses
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._jax_compat import distributed_client

T, H = 4, 16
PEER_TIMEOUT_S = 3.0
me, ranks = jax.process_index(), jax.device_count()
store = distributed_client()
mesh = Mesh(np.array(jax.devices()), ("ep",))
config = jax_ep.Config(
    num_experts=ranks,
    top_k=2,
    hidden=H,
    max_tokens=T,
    dtype=jnp.float32,
    elastic=True,
    node_size=1,
    transport=sys.argv[1],
    wire=jax_ep.FP8(block=H, scale="ue8m0") if "fp8" in sys.argv else None,
    peer_timeout_s=PEER_TIMEOUT_S,
    timeout_s=60.0,
)
is_second_life = me == 0 and bool(store.key_value_dir_get("zero"))
if is_second_life:  # the others have an elastic group, and do not meet it in any other
    began = time.time()
    try:
        jax_ep.create_group(mesh, "ep", dataclasses.replace(config, elastic=False))
    except ValueError as error:
        assert "created with config elastic=True, this process with elastic=False" in str(error)
    else:
        raise AssertionError("a group that is not elastic")
    print("refused", f"{time.time() - began:.2f}", flush=True)
group = jax_ep.create_group(mesh, "ep", config)


def layer(x, ids, active):
    weights = jnp.full(ids.shape, 0.5)
    recv = jax_ep.dispatch(group, x, ids, weights, active=active, renormalize=True)
    factor = jnp.float32(jax.lax.axis_index("ep") + 1)  # of this rank's one expert
    return jax_ep.combine(group, recv.x * factor, recv)


ep = P("ep")
step = jax.jit(
    jax.shard_map(layer, mesh=mesh, in_specs=(ep, ep, P()), out_specs=ep, check_vma=False)
)


# What FP8 keeps exactly: four bits, and a power of two for each row.
x = np.arange(ranks * T * H, dtype=np.float32).reshape(-1, H) % 15 + 1
x *= 2.0 ** np.arange(len(x), dtype=np.float32)[:, None]
ids = np.stack([np.arange(ranks * T), np.arange(ranks * T) + 1], 1).astype(np.int32) % ranks


def check(active):
    """One step, against what it should give."""
    out = step(place(x, mesh, ep), place(ids, mesh, ep), place(active, mesh, P()))
    mine = slice(me * T, (me + 1) * T)
    reached = active[ids[mine]] != 0
    scale = (reached * (ids[mine] + 1)).sum(1) / reached.sum(1)
    got = np.asarray(jax_ep.wait(out).addressable_shards[0].data)
    assert np.array_equal(got, x[mine] * scale[:, None].astype(np.float32)), (got, active)


if me == 0 and not is_second_life:
    check(group.active)
    store.key_value_set("zero/killed_at", str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
if me != 0:
    try:
        while True:
            check(group.active)
    except (RuntimeError, ValueError) as error:
        assert "rank 0" in str(error), error
    active = group.agree()
    waited = time.time() - float(store.key_value_try_get("zero/killed_at"))
    print("alone", active.tolist(), f"{waited:.2f}", flush=True)
    for _ in range(3):
        check(active)
    group.readmit(0)
    group.agree()
print("again", group.active.tolist(), flush=True)
for _ in range(3):
    check(group.active)
group.close()
print("closed", flush=True)
