"""create_group calls that fail on one of two processes, each followed by one that must work."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from meeting import LIMIT_MS, meet

import jax_ep
from jax_ep import _jax_compat
from jax_ep._runtime import bootstrap

me = jax.process_index()
devices = np.array(jax.devices())
LONG_S = 2 * LIMIT_MS / 1000  # who waits so long for what the other one has told misses it below


def create(devices=devices, implementation=None, **changes):
    settings = dict(num_experts=4, top_k=2, hidden=16, max_tokens=8, dtype=jnp.float32)
    settings |= dict(timeout_s=LONG_S, peer_timeout_s=LONG_S) | changes
    config = jax_ep.Config(**settings)
    return jax_ep.create_group(Mesh(devices, ("ep",)), "ep", config, implementation)


def attempt(name, call):
    """Prints what `call` raises; then a group is made and used, with equal ids everywhere."""
    try:
        call()
        print(f"{name} none", flush=True)
    except (ValueError, RuntimeError, KeyboardInterrupt) as error:
        print(f"{name} {type(error).__name__} {' '.join(str(error).split())}", flush=True)
    meet(f"{name} is over")
    with create() as group:
        print(f"{name}_id {group.session_id}", flush=True)
    meet(f"{name} works again")


def interrupted_after(last_stage):
    """Process 0 is interrupted where it waits for process 1, which arrives only then."""
    share = bootstrap.Exchange.share

    def late(self, stage, *rest):
        result = share(self, stage, *rest)
        if stage == last_stage and me == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if stage == last_stage and me == 1:
            meet(f"process 0 was interrupted after {last_stage}")
        return result

    bootstrap.Exchange.share = late
    try:
        create()
    finally:
        bootstrap.Exchange.share = share
        if me == 0:
            meet(f"process 0 was interrupted after {last_stage}")


def interrupted_in_close():
    group = create()
    try:
        if me == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            group.close()
    finally:
        meet("process 0 has closed")
        group.close()
        assert group.closed


def absent():
    """Process 1 calls when process 0 has given up."""
    if me == 0:
        try:
            create(timeout_s=2.0, peer_timeout_s=2.0)
        finally:
            meet("process 0 has given up")
    else:
        meet("process 0 has given up")
        create(timeout_s=2.0, peer_timeout_s=2.0)


def other_secret():
    secret = os.environ["JAX_EP_JOB_SECRET"]  # the launcher's
    if me == 1:
        os.environ["JAX_EP_JOB_SECRET"] = secret[::-1]
    try:
        create()
    except RuntimeError as error:
        assert secret not in str(error) and secret[::-1] not in str(error)
        raise
    finally:
        os.environ["JAX_EP_JOB_SECRET"] = secret


def stored_programs():
    """JAX's persistent compilation cache: process 0 would load what process 1 compiles."""
    with create() as group:
        plan = jax.shard_map(
            lambda ids: jax_ep.plan(group, ids).group_sizes,
            mesh=group.mesh,
            in_specs=PartitionSpec("ep"),
            out_specs=PartitionSpec("ep"),
        )
        jax.config.update("jax_compilation_cache_dir", os.devnull)
        try:
            jax.jit(plan).lower(jax.ShapeDtypeStruct((16, 2), jnp.int32))
        finally:
            jax.config.update("jax_compilation_cache_dir", None)


attempt("wrong", lambda: create(num_experts=3 if me == 1 else 4))
attempt("order", lambda: create(devices[::-1] if me == 1 else devices))
attempt("xla", lambda: create(implementation="xla" if me == 1 else None).close())
attempt("absent", absent)
attempt("store", lambda: interrupted_after("connected"))
attempt("barrier", lambda: interrupted_after("started"))
attempt("close", interrupted_in_close)
attempt("secret", other_secret)
attempt("cache", stored_programs)
stored = _jax_compat.distributed_client().key_value_dir_get_bytes("jax_ep/")
readable = [key for key, value in stored if b"record" in value or b"error" in value]
print(f"readable {len(stored) > 0} {readable}", flush=True)
meet("the end")
