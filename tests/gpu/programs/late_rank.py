"""Process 1 is late for a call: what process 0 and the log say of that.

For two processes, which may share one GPU. Also: the load of the experts is that of the ids.
"""

import argparse
import os
import pathlib
import sys
import time

import jax
import numpy as np

import jax_ep

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "multiprocess" / "programs"))
from meeting import meet
from two_processes import H, K, N, T, create_group, mesh, on_all, spec

parser = argparse.ArgumentParser()
parser.add_argument("--mode", required=True, choices=["ht", "ll"])
parser.add_argument("--node-size", type=int, default=None)
args = parser.parse_args()

LATE_S = 3.5


with create_group(args.node_size) as group:

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def layer(x, ids):
        recv = jax_ep.dispatch(group, x, ids, mode=args.mode)  # DISPATCH
        return jax_ep.combine(group, recv.x, recv)  # COMBINE

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((N * T, H)).astype(np.float32)
    experts = rng.permuted(np.tile(np.arange(2 * N, dtype=np.int32), (N * T, 1)), axis=1)[:, :K]
    x, ids = on_all(rows), on_all(experts)
    for _ in range(5):
        layer(x, ids).block_until_ready()
    load = np.concatenate([rank["pairs_per_expert"] for rank in group.stats()["ranks"]])
    first = 2 * jax.process_index()
    wanted = 5 * np.bincount(experts.ravel(), minlength=2 * N)[first : first + 2]
    np.testing.assert_array_equal(load, wanted)
    meet("warm")
    if jax.process_index() == 1:
        time.sleep(LATE_S)
        out = layer(x, ids)
    else:
        out = layer(x, ids)
        time.sleep(LATE_S - 1.0)
        print("PAGE " + group.report().replace("\n", "\nPAGE "), flush=True)
    out.block_until_ready()
    meet("over")
    time.sleep(0.5)
    print("AFTER " + group.report().splitlines()[0], flush=True)
os._exit(0)  # without JAX's shutdown barrier
