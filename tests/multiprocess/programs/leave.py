"""How ranks leave a group: late, after an asynchronous step, by an exception, beside a fork."""

import os
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meeting import meet

import jax_ep
from jax_ep._runtime import session

if not jax.distributed.is_initialized():
    jax_ep.initialize()
ME = jax.process_index()
PEER_TIMEOUT_S = 2.0


def make(**changes):
    config = jax_ep.Config(
        num_experts=2 * jax.device_count(),
        top_k=2,
        hidden=32,
        max_tokens=16,
        dtype=jnp.float32,
        timeout_s=60.0,
        peer_timeout_s=PEER_TIMEOUT_S,
        **changes,
    )
    group = jax_ep.create_group(Mesh(np.array(jax.devices()), ("ep",)), "ep", config)

    def body(x):
        ids = jnp.tile(jnp.arange(2, dtype=jnp.int32), (x.shape[0], 1))
        recv = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, recv.x, recv)

    spec = P("ep")
    x = place(np.ones((16 * jax.device_count(), 32), np.float32), group.mesh, spec)
    run = jax.shard_map(body, mesh=group.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    step = jax.jit(run).lower(x).compile()
    return group, lambda: step(x)


def is_right(y):
    return all((np.asarray(shard.data) == 2.0).all() for shard in y.addressable_shards)


def ended_well(group):
    """Whether it is closed and nothing had failed."""
    return "is closed" in group.health().message


for name, changes in (("mates", {}), ("nodes", {"node_size": 1, "transport": "shm"})):
    # Rank 0 closes at once; rank 1 writes "a last checkpoint", longer than peer_timeout_s.
    group, step = make(**changes)
    y = step()
    meet(f"{name} closing")  # the lateness counts from the moment when rank 0 closes
    if ME == 1:
        jax.block_until_ready(y)
        time.sleep(2 * PEER_TIMEOUT_S)
        group.check()
    begin = time.monotonic()
    group.close()
    waited = time.monotonic() - begin
    good = is_right(y) and ended_well(group) and group.heap_bytes == 0
    print(f"{name}_late {'ok' if good and (ME == 1 or waited > 1) else group.health()}", flush=True)

    # A child of rank 1 does everything that a child may do by mistake.
    meet(f"{name} fork")
    group, step = make(**changes)
    jax.block_until_ready(step())
    if ME == 1:
        warnings.simplefilter("ignore")  # Python's and JAX's, of forks
        child = os.fork()
        if child == 0:
            group.close()
            session.close_all()  # what runs at exit
            told = group.dump_state()
            knows_it = "is a fork of the group's process" in told + group.health().message
            os._exit(0 if knows_it and not group.closed and not group.health().ok else 1)
        _, status = os.waitpid(child, 0)
        print(f"{name}_child {os.waitstatus_to_exitcode(status)}", flush=True)
    good = all(is_right(step()) for _ in range(3))
    group.close()
    print(f"{name}_fork {'ok' if good and ended_well(group) else group.health()}", flush=True)

    # Rank 1 raises before its second step; rank 0 calls it.
    meet(f"{name} raise")
    group, step = make(**changes)
    jax.block_until_ready(step())
    begin = time.monotonic()
    try:
        with group:
            if ME == 1:
                raise KeyError("a mistake of the program")
            jax.block_until_ready(step())
    except KeyError:
        print(f"{name}_raised yes", flush=True)
    except Exception as error:
        print(f"{name}_error {str(error).splitlines()[0]}", flush=True)
    print(f"{name}_seconds {time.monotonic() - begin}", flush=True)
    meet(f"{name} end")

# A program that ends right after an asynchronous step, without a close.
group, step = make()
step()
