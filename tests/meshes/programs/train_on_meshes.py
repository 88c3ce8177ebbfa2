"""Trains on meshes over 2 processes x 4 devices and compares with the oracle on one device.

The first axis of every mesh crosses the processes: for dp2-ep4 each process holds a whole group,
for the others every exchange of a group crosses.
"""

import pathlib
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

jax.config.update("jax_disable_most_optimizations", True)  # compilation is most of the time here
if not jax.distributed.is_initialized():
    jax_ep.initialize()

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "flax")]

from language_model import CASES, assert_same_training, mesh_history, oracle_history  # noqa: E402
from support import close_groups  # noqa: E402

WANTED = ("dp2-ep4", "ep2-fsdp2-tp2", "node2-gpu4")


with jax.default_device(jax.local_devices()[0]):
    oracle = oracle_history()
done = []
for case in CASES:
    if str(case) in WANTED:
        mesh = Mesh(np.array(jax.devices()).reshape(case.shape), case.names)
        crossing = mesh.devices.reshape(2, -1)
        assert {d.process_index for d in crossing[0]} == {0}, crossing
        gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
        history = mesh_history(case, mesh, lambda tree, gather=gather: jax.device_get(gather(tree)))
        assert_same_training(history, oracle)
        close_groups()
        done.append(str(case))
print("equal", *done, flush=True)
