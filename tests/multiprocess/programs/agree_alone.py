"""The first process calls agree where the others call the group once more; then they agree, too.

Usage: agree_alone.py [LOST]. Before that, process LOST is killed, and the others go on without it.
Prints what the processes that called the group were told. Any wrong number ends it.
"""

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
from meeting import meet

import jax_ep

T, H = 4, 16
TIMEOUT_S = 60.0
me, ranks = jax.process_index(), jax.device_count()
lost = int(sys.argv[1]) if sys.argv[1:] else None
living = [rank for rank in range(ranks) if rank != lost]
mask = [int(rank in living) for rank in range(ranks)]
mesh = Mesh(np.array(jax.devices()), ("ep",))
ep = P("ep")
x = np.arange(ranks * T * H, dtype=np.float32).reshape(-1, H)
ids = np.stack([np.arange(ranks * T), np.arange(ranks * T) + 1], 1).astype(np.int32) % ranks


def make(mode, node_size):
    config = jax_ep.Config(
        num_experts=ranks,
        top_k=2,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        mode=mode,
        elastic=True,
        node_size=node_size,
        transport="shm",
        timeout_s=TIMEOUT_S,
        peer_timeout_s=5.0,
    )
    group = jax_ep.create_group(mesh, "ep", config)

    def layer(x, ids, active):
        weights = jnp.full(ids.shape, 0.5)
        recv = jax_ep.dispatch(group, x, ids, weights, active=active, renormalize=True)
        return jax_ep.combine(group, recv.x, recv)

    step = jax.jit(
        jax.shard_map(layer, mesh=mesh, in_specs=(ep, ep, P()), out_specs=ep, check_vma=False)
    )

    def check():
        out = step(place(x, mesh, ep), place(ids, mesh, ep), place(group.active, mesh, P()))
        # Not by jax_ep.wait: it raises what a later group has failed with.
        got = np.asarray(out.addressable_shards[0].data)
        assert np.array_equal(got, x[me * T : (me + 1) * T]), got

    for _ in range(3):
        check()
    return group, check


cases = [("ht", ranks), ("ht", 1), ("ht", 2), ("ll", 1)]
if lost is not None:  # in mode ht a node of two goes on as a whole, or not at all
    cases = [("ht", ranks), ("ht", 1), ("ll", 2)]
groups = [make(*case) for case in cases]
if lost is not None:
    meet("made")
    if me == lost:
        os.kill(os.getpid(), signal.SIGKILL)
for case, (group, check) in zip(cases, groups, strict=True):
    if lost is not None:
        assert group.agree().tolist() == mask, group.active
        check()
    began = time.monotonic()
    if me != living[0]:
        try:
            check()
        except (RuntimeError, ValueError) as error:
            print(*case, "was told:", error, flush=True)
        else:
            raise AssertionError("a call without the first rank")
    active = group.agree()
    assert time.monotonic() - began < TIMEOUT_S / 4
    assert active.tolist() == mask, active
    check()
    group.close()
print("done", flush=True)
meet("done", living)  # process 0 takes JAX's coordinator along
