"""A forked child of process 1 tries what it may not do with a group, and creates another one.

Prints what it is told of each, and that its parent goes on and creates another one, too.
"""

import os
import signal
import threading
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from meeting import meet
from round_trip import round_trip

import jax_ep

T, H = 4, 16
me, ranks = jax.process_index(), jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))
config = jax_ep.Config(
    num_experts=ranks,
    top_k=1,
    hidden=H,
    max_tokens=T,
    dtype=jnp.float32,
    elastic=True,
    timeout_s=20.0,
)
group = jax_ep.create_group(mesh, "ep", config)
run = round_trip(mesh, group)
x = np.arange(ranks * T * H, dtype=np.float32).reshape(-1, H)
ids = np.arange(ranks * T, dtype=np.int32)[:, None] % ranks


def check():
    got = np.asarray(run(x, ids).addressable_shards[0].data)
    assert np.array_equal(got, x[me * T : (me + 1) * T]), got


def told_by(name, use):
    """Prints what `use` raises."""
    try:
        got = use()
    except (RuntimeError, ValueError) as error:
        got = f"raised {error}"
    print(name, " ".join(str(got).split()), flush=True)


def tried_in_the_child():
    """All at once: none of it may wait for anybody, nor ask JAX's coordination service."""
    told_by("agree", group.agree)
    told_by("check", group.check)
    told_by("health", group.health)
    told_by("report", group.report)
    told_by("load", lambda: group.expert_load(all_processes=True))
    told_by("call", lambda: jax_ep.wait(run(x, ids)))
    told_by("create", lambda: jax_ep.create_group(mesh, "ep", config))
    jax_ep.wait(np.ones(1))  # is nobody's failure


check()
if me == 1:
    warnings.simplefilter("ignore")  # Python's and JAX's, of forks
    is_held, is_forked = threading.Event(), threading.Event()

    def hold():  # as a thread that is inside agree does
        with group._native._close_lock:
            is_held.set()
            is_forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends it if it waits for anybody
        try:
            tried_in_the_child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    is_forked.set()
    holder.join()
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)
meet("forked")
check()
assert group.agree().tolist() == [1] * ranks, group.active
check()
group.close()
jax_ep.create_group(mesh, "ep", config).close()
print("went_on yes", flush=True)
