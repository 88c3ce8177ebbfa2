"""A process of several ranks is lost while no rank has anything to send; each process is a node.

`--how kill`: SIGKILL. `--how stop`: SIGSTOP, never continued. The victim is the last one. With
`--calls 0` no rank has ever sent anything to another node, so most are not connected.
"""

import argparse
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from meeting import meet
from round_trip import round_trip

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--how", required=True, choices=["kill", "stop"])
parser.add_argument("--transport", required=True)
parser.add_argument("--calls", type=int, default=0)
parser.add_argument("--peer-timeout", type=float, required=True)
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

LIMIT_S = 60.0  # for the survivors to notice; far above what is asked for
victim = jax.process_count() - 1
me = jax.process_index()
victim_pid = int(multihost_utils.process_allgather(np.int32(os.getpid()))[victim])
mesh = jax.make_mesh((jax.device_count(),), ("ep",))
n = jax.device_count()
config = jax_ep.Config(
    num_experts=n,
    top_k=1,
    hidden=8,
    max_tokens=4,
    dtype=jnp.float32,
    node_size=jax.local_device_count(),
    transport=args.transport,
    peer_timeout_s=args.peer_timeout,
)
group = jax_ep.create_group(mesh, "ep", config)
run = round_trip(mesh, group)
for _ in range(args.calls):
    idx = np.arange(4 * n, dtype=np.int32)[:, None] % n
    jax.block_until_ready(run(np.ones((4 * n, 8), np.float32), idx))
meet("ready")
if me == victim:
    os.kill(os.getpid(), signal.SIGKILL if args.how == "kill" else signal.SIGSTOP)
start = time.monotonic()
error = None
while error is None and time.monotonic() - start < LIMIT_S:
    time.sleep(0.01)
    try:
        group.check()
    except RuntimeError as lost:
        error = " ".join(str(lost).split())
print(f"seconds {time.monotonic() - start:.2f}", flush=True)
print(f"error {error}", flush=True)
start = time.monotonic()
group.close()
print(f"closed {time.monotonic() - start:.2f}", flush=True)
survivors = range(jax.process_count() - 1)
meet("noticed", list(survivors))
if args.how == "stop" and me == 0:
    os.kill(victim_pid, signal.SIGKILL)
meet("done", list(survivors))
os._exit(0)  # JAX's own shutdown barrier would wait for the dead
