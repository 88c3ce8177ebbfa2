"""Process 1 is late for each operation in turn: what process 0 says of that.

For two processes, which may share one GPU. A page for each phase, whose lines begin with its name.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np

import jax_ep

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "multiprocess" / "programs"))
from meeting import meet
from two_processes import H, K, N, T, create_group, mesh, on_all, spec

parser = argparse.ArgumentParser()
parser.add_argument("--node-size", type=int, default=None)
args = parser.parse_args()

LATE_S, LONG_S = 1.5, 0.5
STOPPED_S = 4.5  # a heartbeat is missed after 2


def over_ranks(local):
    """Scalars have an axis outside, as all arrays must have the ranks in front there."""

    def boxed(*operands):
        own = jax.tree.map(lambda array: array[0], operands)
        return jax.tree.map(lambda array: array[None], local(*own))

    return jax.shard_map(boxed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def look(phase, words, pages, over):
    """Until process 0 has waited long enough, and the first line has the words; or it is over."""
    while not pages and not over.is_set():
        page = group.report()
        waited = re.match(r".* waiting for ([0-9.]+) s", page)
        if waited and float(waited[1]) > LONG_S and words in page.partition("\n")[0]:
            pages.append(f"{phase}: " + page.rstrip("\n").replace("\n", f"\n{phase}: "))
        time.sleep(0.05)


def be_late(stops):
    """The process with its proxy, if it stops."""
    if not stops:
        time.sleep(LATE_S)
        return
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def on_time(phase, function, *operands, stops=False):
    return jax.block_until_ready(function(*operands))


def waited_s():
    """Seconds that rank 0 has waited for rank 1, by phase."""
    phases = group.stats()["ranks"][0]["wait_by_peer"]
    return {name: group.wait_ns(name)[0, 1] / 1e9 for name in phases}


def with_a_late_rank(phase, function, *operands, stops=False):
    meet(phase)
    if jax.process_index() == 1:
        be_late(stops)
        return jax.block_until_ready(function(*operands))
    deadline = time.monotonic() + LATE_S / 2
    while "nobody is waiting" not in group.report():  # the wait before is shown for a moment
        assert time.monotonic() < deadline, group.report()
        time.sleep(0.05)
    pages, over = [], threading.Event()
    words = "silent" if stops and args.node_size is None else ""
    looking = threading.Thread(target=look, args=(phase, words, pages, over), daemon=True)
    before = waited_s()
    looking.start()
    out = jax.block_until_ready(function(*operands))
    over.set()
    looking.join()
    print(*pages or [f"{phase}: nothing"], sep="\n", flush=True)
    waits = [f"{name} {seconds - before[name]:.2f}" for name, seconds in waited_s().items()]
    print(f"{phase}: WAITED", *waits, flush=True)
    return out


with create_group(args.node_size) as group:

    @jax.jit
    @over_ranks
    def plan(ids):
        return jax_ep.plan(group, ids, mode="ht")  # PLAN

    @over_ranks
    def dispatch(x, plan):
        return jax_ep.dispatch(group, x, plan=plan)  # DISPATCH

    @over_ranks
    def combine(rows, recv):
        return jax_ep.combine(group, rows, recv)  # COMBINE

    @jax.jit
    @over_ranks
    def ll_dispatch(x, ids):
        return jax_ep.dispatch(group, x, ids, mode="ll")  # LL DISPATCH

    @jax.jit
    @over_ranks
    def ll_combine(recv):
        return jax_ep.combine(group, recv.x, recv)  # LL COMBINE

    @jax.jit
    @over_ranks
    def ll_dispatch_halves(x, ids):
        inflight = jax_ep.dispatch_start(group, x, ids, mode="ll")  # LL DISPATCH START
        return jax_ep.dispatch_done(group, inflight)  # LL DISPATCH DONE

    @jax.jit
    @over_ranks
    def ll_combine_halves(recv):
        inflight = jax_ep.combine_start(group, recv.x, recv)  # LL COMBINE START
        return jax_ep.combine_done(group, inflight)  # LL COMBINE DONE

    @jax.jit
    def dispatch_forward(x, plan):
        return jax.vjp(lambda x: dispatch(x, plan).x, x)

    @jax.jit
    def combine_forward(recv):
        return jax.vjp(lambda rows: combine(rows, recv), recv.x)

    @jax.jit
    def backward(pull, cotangent):
        return pull(cotangent)

    whole_dispatch, whole_combine = jax.jit(dispatch), jax.jit(combine)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((N, T, H)).astype(np.float32)
    experts = rng.permuted(np.tile(np.arange(2 * N, dtype=np.int32), (N, T, 1)), axis=2)[..., :K]
    x, ids = on_all(rows), on_all(experts)
    for step in (on_time, with_a_late_rank):  # the first time it compiles
        made = step("plan", plan, ids)
        recv = step("dispatch", whole_dispatch, x, made)
        step("combine", whole_combine, recv.x, recv)
        arrived, pull = jax.block_until_ready(dispatch_forward(x, made))
        step("dispatch-backward", backward, pull, arrived)
        summed, pull = jax.block_until_ready(combine_forward(recv))
        step("combine-backward", backward, pull, summed)
        recv = step("ll-dispatch", ll_dispatch, x, ids)
        step("ll-combine", ll_combine, recv)
        recv = step("ll-dispatch-halves", ll_dispatch_halves, x, ids)
        step("ll-combine-halves", ll_combine_halves, recv)
        step("stopped", plan, ids, stops=True)
    meet("over")
os._exit(0)  # without JAX's shutdown barrier
