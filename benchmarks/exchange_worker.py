"""One run of every exchange on one set of processes; rank 0 prints a JSON line.

Each method moves the same tokens to the same experts (identity) and back with weights, many times
inside one jitted `lax.scan`, and is checked against the others. Methods take turns, so that a
noisy machine is noisy for all. Start it with `python -m jax_ep launch`, or with mpirun to include
mpi4jax.
"""

import argparse
import importlib.util
import json
import math
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from specs import SPECS

import jax_ep
from jax_ep._cli.baselines import AllGather, DenseAllToAll, Sizes

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="train", choices=sorted(SPECS))
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--calls", type=int, default=24, help="round trips inside one scan")
parser.add_argument("--mode", default="ht", choices=["ht", "ll"])
parser.add_argument("--only", default="", help="a method's name, to leave out the others")
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

spec = SPECS[args.spec]
T, H, K, E = spec.tokens, spec.hidden, spec.top_k, spec.num_experts
N = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))
sharding = NamedSharding(mesh, P("ep"))
dtype = jnp.dtype(spec.dtype)
group = jax_ep.create_group(
    mesh,
    "ep",
    jax_ep.Config(
        num_experts=E,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=dtype,
        align=8,
        capacity_factor=spec.capacity_factor,
    ),
)


rng = np.random.default_rng(0)
x = rng.standard_normal((N * T, H)).astype(dtype)
idx = np.stack([rng.permutation(E)[:K] for _ in range(N * T)]).astype(np.int32)
weights = rng.random((N * T, K)).astype(np.float32)
weights /= weights.sum(axis=1, keepdims=True)
# Capacity 1.25, or more where a small batch needs it: nothing is dropped, so results are equal.
LOADS = np.stack(
    [np.bincount(rows.ravel() // (E // N), minlength=N) for rows in idx.reshape(N, T * K)]
)
SIZES = Sizes(N, T, H, K, E, max(math.ceil(1.25 * T * K / N), int(LOADS.max())))


def ours(x, idx, weights):
    pad = "undefined" if args.mode == "ll" else "zero"  # decode reads the counted rows only
    recv = jax_ep.dispatch(group, x, idx, weights, mode=args.mode, pad=pad)
    return jax_ep.combine(group, recv.x, recv)


def round_trip(exchange):
    def run(x, idx, weights):
        rows, state = exchange.dispatch(x, idx, weights)
        return exchange.combine(rows, state, weights)

    return run


def dense(all_to_all):
    """The exchange as one writes it without a library: padded all_to_all there and back."""
    return round_trip(DenseAllToAll(SIZES, all_to_all))


methods = {
    "jax_ep": ours,
    "lax.all_to_all": dense(None),
    "all_gather": round_trip(AllGather(SIZES)),
}
methods = {name: run for name, run in methods.items() if args.only in ("", name)}
uses_mpi = (
    not args.only
    and "OMPI_COMM_WORLD_SIZE" in os.environ
    and importlib.util.find_spec("mpi4jax") is not None
)


def compile_method(run, inside_shard_map=True):
    def looped(x, idx, weights):
        # The result feeds the next call; a normalised weight sum keeps it finite.
        return lax.scan(lambda c, _: (run(c, idx, weights), None), x, None, length=args.calls)[0]

    if inside_shard_map:
        spec3 = (P("ep"),) * 3
        looped = jax.shard_map(
            looped, mesh=mesh, in_specs=spec3, out_specs=P("ep"), check_vma=False
        )
    return jax.jit(looped)


x_dev, idx_dev, weights_dev = (
    jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in (x, idx, weights)
)
runs = {name: (compile_method(run), (x_dev, idx_dev, weights_dev)) for name, run in methods.items()}
if uses_mpi:
    import mpi4jax

    me = slice(jax.process_index() * T, (jax.process_index() + 1) * T)
    local = tuple(jnp.asarray(a[me]) for a in (x, idx, weights))
    runs["mpi4jax"] = (compile_method(dense(mpi4jax.alltoall), inside_shard_map=False), local)


def barrier():
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("bench")


outputs = {}
for name, (run, arrays) in runs.items():
    barrier()
    out = run(*arrays)
    out.block_until_ready()
    outputs[name] = np.asarray(out.addressable_shards[0].data)[:T]
# Identity experts: every token comes back. jax_ep must be right; a baseline that is not is named.
truth = np.asarray(x_dev.addressable_shards[0].data)[:T].astype(np.float32)
np.testing.assert_allclose(outputs["jax_ep"].astype(np.float32), truth, rtol=2e-3, atol=1e-4)
for name, out in outputs.items():
    if not np.allclose(out.astype(np.float32), truth, rtol=2e-3, atol=1e-4):
        print(f"warning: {name} returned wrong rows in this run", flush=True)

# The bytes that must move, as memcpy counts them (a read and a write each): dispatch reads and
# writes each (t, k) row once and writes zero rows; combine reads each row and writes each token.
padding = group.recv_rows(T) - T * K if args.mode == "ht" else 0
must_move = T * K + padding / 2 + (T * K + T) / 2
must_move *= H * dtype.itemsize * (N // jax.process_count())
MEMCPY_CALLS = 8
source = np.ones(int(must_move), np.uint8)
target = np.zeros_like(source)

seconds = {name: [] for name in [*runs, "memcpy"]}
for _ in range(args.repeats):
    for name, (run, arrays) in runs.items():
        # Untimed first: memory that another method freed seconds ago may have gone back to the host
        # of this virtual machine, and fetching it again is no method's cost.
        run(*arrays).block_until_ready()
        barrier()
        start = time.perf_counter()
        run(*arrays).block_until_ready()
        seconds[name].append((time.perf_counter() - start) / args.calls)
    barrier()
    start = time.perf_counter()
    for _ in range(MEMCPY_CALLS):
        np.copyto(target, source)
    seconds["memcpy"].append((time.perf_counter() - start) / MEMCPY_CALLS)

# The slowest process decides.
everyone = multihost_utils.process_allgather(np.array([seconds[name] for name in seconds]))
slowest = everyone.reshape(-1, len(seconds), args.repeats).max(axis=0)
stats = group.stats()
group.close()
if jax.process_index() == 0:
    result = {
        "spec": args.spec,
        "mode": args.mode,
        "processes": jax.process_count(),
        "ranks": N,
        "calls_per_scan": args.calls,
        "repeats": args.repeats,
        "must_move_bytes_per_process": int(must_move),
        "median_us": {n: float(np.median(slowest[i])) * 1e6 for i, n in enumerate(seconds)},
        "min_us": {n: float(slowest[i].min()) * 1e6 for i, n in enumerate(seconds)},
        "max_us": {n: float(slowest[i].max()) * 1e6 for i, n in enumerate(seconds)},
        "wait_us_per_call": stats["wait_ns"] / 1e3 / max(1, stats["combines"]),
    }
    print("RESULT " + json.dumps(result), flush=True)
