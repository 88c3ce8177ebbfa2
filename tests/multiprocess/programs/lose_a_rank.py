"""A rank dies, stops or is late in the middle of a dispatch; what the others see and can still do.

`--how kill`: SIGKILL. `--how stop`: SIGSTOP, never continued. `--how pause`: SIGSTOP for less than
peer_timeout_s. `--how late`: asleep in Python for less than timeout_s. The victim is the last one.
With several `--teams` those of the victim's team end with the error, the others go on.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meeting import meet

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--how", required=True, choices=["kill", "stop", "pause", "late"])
parser.add_argument("--mode", default="ht")
parser.add_argument("--teams", type=int, default=1)
parser.add_argument("--node-size", type=int, default=None)
parser.add_argument("--transport", default="auto")
parser.add_argument("--peer-timeout", type=float, default=4.0)
parser.add_argument("--timeout", type=float, default=30.0)
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

T, H, K = 16, 32, 2
LATER_CALLS = 5
victim = jax.process_count() - 1
me = jax.process_index()
victim_pid = int(multihost_utils.process_allgather(np.int32(os.getpid()))[victim])


def make(devices, teams=1):
    mesh = Mesh(np.array(devices).reshape(teams, -1), ("team", "ep"))
    group = jax_ep.create_group(
        mesh,
        "ep",
        jax_ep.Config(
            num_experts=len(devices) // teams * 2,
            top_k=K,
            hidden=H,
            max_tokens=T,
            dtype=jnp.float32,
            align=1,
            timeout_s=args.timeout,
            peer_timeout_s=args.peer_timeout,
            transport=args.transport,
            node_size=args.node_size if len(devices) == jax.device_count() else None,
        ),
    )

    def step(x, idx):
        recv = jax_ep.dispatch(group, x, idx, mode=args.mode)
        return jax_ep.combine(group, recv.x, recv)

    spec = P(("team", "ep"))
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    )
    n = len(devices)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n * T, H)).astype(np.float32)
    idx = rng.integers(0, 2 * n // teams, (n * T, K)).astype(np.int32)
    x_dev, idx_dev = place(x, mesh, spec), place(idx, mesh, spec)

    def check():
        out = run(x_dev, idx_dev)
        for shard in out.addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data), x[shard.index] * K, rtol=1e-6)

    return group, check


group, check = make(jax.devices(), args.teams)
for _ in range(20):
    check()
# All have their result before the victim is lost: what it wrote last may still lie in its proxy.
meet("warm")
if me == victim:
    if args.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.how == "stop":
        print(f"stopping {os.getpid()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if args.how == "pause":
        pid = os.getpid()
        pause = f"kill -STOP {pid}; sleep {args.peer_timeout / 2}; kill -CONT {pid}"
        subprocess.run(["sh", "-c", pause], check=True)
    if args.how == "late":
        time.sleep(args.peer_timeout * 1.5)

# A jit call that hits JAX's C++ cache raises an execution's error as ValueError.
ExecutionError = (jax.errors.JaxRuntimeError, ValueError)
start = time.monotonic()
try:
    for _ in range(20):
        check()
    error = None
except ExecutionError as caught:
    error = str(caught)
seconds = time.monotonic() - start
ranks = jax.process_count() // args.teams
is_concerned = me // ranks == victim // ranks
survivors = [device for device in jax.devices() if device.process_index != victim]
if args.how in ("pause", "late") or not is_concerned:
    assert error is None, error
    print("survived yes", flush=True)
    group.close()
    if not is_concerned:
        meet("went on", [device.process_index for device in survivors])
        os._exit(0)
    sys.exit(0)

assert error is not None, "the loss of a rank went unnoticed"
print(f"seconds {seconds:.2f}", flush=True)
print(f"error {' '.join(error.split())}", flush=True)
try:
    group.check()
    print("check said nothing", flush=True)
except RuntimeError as latched:
    print(f"check {' '.join(str(latched).split())}", flush=True)
first, *lines = group.report().splitlines()
print(f"page {first}", flush=True)
(line,) = (line for line in lines if f", process {victim}" in line)
print(f"line {line}", flush=True)
for call in range(LATER_CALLS):  # they fail at once, with the first cause
    start = time.monotonic()
    try:
        check()
    except ExecutionError as later:
        delay = time.monotonic() - start
        print(f"later{call} {delay:.2f} {' '.join(str(later).split())}", flush=True)
group.close()
if args.teams == 1:
    smaller, check = make(survivors)
    for _ in range(5):
        check()
    smaller.close()
    print(f"went_on {len(survivors)}", flush=True)
if args.how == "stop" and me == 0:
    os.kill(victim_pid, signal.SIGKILL)
# Process 0 would take JAX's coordinator along before the others have gone on.
meet("went on", [device.process_index for device in survivors])
os._exit(0)  # JAX's own shutdown barrier would wait for the dead
