"""Exchanges on this machine's GPUs, one process, inside jit; prints one JSON line per case.

Times are of one call in a `lax.scan` of many, over all GPUs: the slowest rank decides. A step of
the scan is UNROLL calls, and the time of a scan that calls nothing is taken off: XLA's loop costs
the host more than a short call takes (15.6 us an iteration, two H200, jax 0.11.2). Where the calls
hide that time, up to an eighth of it is taken off too much; `loop_us` has what was. `pair` is a
dispatch and the combine of its rows, one behind the other. Every method's round trip is checked
(identity experts: every token comes back) before it is timed.

jax_ep's dispatch gives rows grouped by expert; the baselines stop when the rows are with their
owner, in the order of their sources, which spares them that grouping.
"""

import argparse
import concurrent.futures
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from specs import SPECS, machine

import jax_ep
from jax_ep._cli.baselines import AllGather, DenseAllToAll, RaggedAllToAll, Sizes
from jax_ep.testing import make_routing

parser = argparse.ArgumentParser()
parser.add_argument("--spec", default="deepseek-v3", choices=sorted(SPECS))
parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
parser.add_argument("--mode", default="ht", choices=["ht", "ll"])
parser.add_argument("--routing", default="uniform", choices=["uniform", "zipf"])
parser.add_argument("--methods", nargs="+", default=["jax_ep", "dense", "ragged", "all_gather"])
parser.add_argument("--calls", type=int, default=48, help="calls inside one scan")
parser.add_argument("--seconds", type=float, default=1.0, help="stops repeats beyond 3")
parser.add_argument("--ragged-calls", type=int, default=0, help="of the slow one; 0: by mode")
parser.add_argument("--repeats", type=int, default=7)
parser.add_argument("--ragged-name", default="ragged", help="its name in the results")
parser.add_argument("--ranks", type=int, default=0, help="0: every GPU")
args = parser.parse_args()

UNROLL = 8
N = args.ranks or jax.device_count()
spec = SPECS[args.spec]
mesh = Mesh(np.array(jax.devices()[:N]), ("ep",))
sharding = NamedSharding(mesh, P("ep"))
dtype = jnp.dtype(spec.dtype)


class Ours:
    def __init__(self, group):
        self.group = group

    def dispatch(self, x, idx, weights):
        pad = "undefined" if args.mode == "ll" else "zero"
        layout = "expert_batched" if args.mode == "ll" else "expert_major"
        recv = jax_ep.dispatch(self.group, x, idx, weights, mode=args.mode, layout=layout, pad=pad)
        return recv.x, recv

    def combine(self, rows, recv, weights):
        del weights
        return jax_ep.combine(self.group, rows, recv)

    def plan(self, idx):
        return jax_ep.plan(self.group, idx, mode=args.mode).group_sizes * 1.0


def per_rank(function):
    """`function` of local arrays, jitted over arrays [N, ...]."""

    def local(*arrays):
        outs = function(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], outs)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    )


def touch(tree):
    """One element of every float leaf, of results that are computed as a whole."""
    leaves = jax.tree.leaves(lax.optimization_barrier(tree))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in floats)


def looped(body, calls):
    """Calls `body(arrays)` many times, each after the one before; arrays do not change."""

    def run(*arrays):
        def step(carry, _):
            held, _ = lax.optimization_barrier((arrays, carry))
            return touch(body(*held)), None

        return lax.scan(step, jnp.float32(0), None, length=calls, unroll=min(UNROLL, calls))[0]

    return per_rank(run)


def measure(run, calls, *arrays):
    run(*arrays).block_until_ready()
    seconds = []
    began = time.perf_counter()
    while len(seconds) < args.repeats:
        if len(seconds) >= 3 and time.perf_counter() - began > args.seconds:
            break
        start = time.perf_counter()
        run(*arrays).block_until_ready()
        seconds.append((time.perf_counter() - start) / calls)
    return float(np.median(seconds)) * 1e6


def pair_of(method):
    def pair(x, idx, weights):
        rows, state = method.dispatch(x, idx, weights)
        return method.combine(rows, state, weights)

    return pair


def calls_of(name):
    """Calls inside one scan."""
    slow = args.ragged_calls or {"ht": 1, "ll": 20}[args.mode]
    return slow if name == "ragged" else args.calls


@jax.jit
def largest_difference(a, b):
    return jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))


def compile_all(methods, arrays):
    """{method: {what: program}}, compiled side by side; arrays as dispatch takes them."""
    programs = {}
    for name, method in methods.items():
        once = per_rank(method.dispatch)
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            jax.eval_shape(once, *arrays),
        )
        there = (*shapes, arrays[2])
        calls = calls_of(name)
        programs[name, "dispatch once"] = once, arrays
        programs[name, "combine once"] = per_rank(method.combine), there
        programs[name, "dispatch"] = looped(method.dispatch, calls), arrays
        programs[name, "combine"] = looped(method.combine, calls), there
        programs[name, "pair"] = looped(pair_of(method), calls), arrays
        programs[name, "nothing"] = looped(lambda *held: held, calls), arrays
        if name == "jax_ep":
            programs[name, "plan"] = looped(method.plan, calls), arrays[1:2]
    lowered = [program.lower(*operands) for program, operands in programs.values()]
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(programs, pool.map(lambda low: low.compile(), lowered), strict=True))


def methods_for(sizes, group):
    every = {
        "jax_ep": Ours(group),
        "dense": DenseAllToAll(sizes),
        "ragged": RaggedAllToAll(sizes),
        "all_gather": AllGather(sizes),
    }
    return {name: every[name] for name in args.methods}


def inputs(tokens):
    idx = make_routing(
        args.routing,
        num_ranks=N,
        num_tokens=tokens,
        top_k=spec.top_k,
        num_experts=spec.num_experts,
        seed=0,
    ).reshape(N, tokens, spec.top_k)
    rng = np.random.default_rng(1)
    weights = rng.random((N, tokens, spec.top_k)).astype(np.float32)
    weights /= weights.sum(axis=2, keepdims=True)
    x = jax.random.normal(jax.random.key(0), (N, tokens, spec.hidden), dtype)
    return [jax.device_put(a, sharding) for a in (x, idx.astype(np.int32), weights)]


def report(tokens):
    x, idx, weights = inputs(tokens)
    owners = np.asarray(idx) // (spec.num_experts // N)
    loads = np.stack([np.bincount(o.ravel(), minlength=N) for o in owners])  # [source, owner]
    sizes = Sizes(
        N, tokens, spec.hidden, spec.top_k, spec.num_experts, math.ceil(loads.max() / 8) * 8
    )
    reached = np.stack([(owners == rank).any(axis=2) for rank in range(N)])  # [owner, source, t]
    remote = sum(int(reached[r, s].sum()) for r in range(N) for s in range(N) if r != s) / N
    # Capacity 1.25, or what the fullest rank needs with its experts' zones aligned: nothing drops.
    align = 128
    counts = np.bincount(np.asarray(idx).ravel(), minlength=spec.num_experts)
    zones = -(-counts // align) * align
    needed = zones.reshape(N, -1).sum(axis=1).max()
    rows = max(int(needed), math.ceil(1.25 * tokens * spec.top_k / align) * align)
    config = jax_ep.Config(
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        hidden=spec.hidden,
        max_tokens=tokens,
        dtype=dtype,
        mode=args.mode,
        align=align,
        recv_rows=rows if args.mode == "ht" else None,
    )
    result = {
        "machine": machine(N),
        "spec": args.spec,
        "mode": args.mode,
        "routing": args.routing,
        "tokens": tokens,
        "ranks": N,
        "recv_rows": config.recv_rows,
        "remote_rows_per_rank": remote,
        "remote_bytes_per_rank": remote * spec.hidden * dtype.itemsize,
        "calls_per_scan": {name: calls_of(name) for name in args.methods},
        "us": {},
        "loop_us": {},  # a call's share of an empty scan, taken off already
    }
    with jax_ep.create_group(mesh, "ep", config) as group:
        programs = compile_all(methods_for(sizes, group), (x, idx, weights))
        for name in args.methods:
            rows, state = programs[name, "dispatch once"](x, idx, weights)
            out = programs[name, "combine once"](rows, state, weights)
            error = float(largest_difference(out, x))
            assert error < 0.1, f"{name} returned wrong rows: {error}"
            arrays = (x, idx, weights)
            operands = {"dispatch": arrays, "combine": (rows, state, weights), "pair": arrays}
            if name == "jax_ep":
                operands["plan"] = (idx,)
            calls = calls_of(name)
            loop = measure(programs[name, "nothing"], calls, *arrays)
            shown = args.ragged_name if name == "ragged" else name
            result["us"][shown] = {
                what: measure(programs[name, what], calls, *held) - loop
                for what, held in operands.items()
            }
            result["loop_us"][shown] = loop
            del rows, state, out, operands  # the next method's are as large
        jax_ep.wait(x)
    print("RESULT " + json.dumps(result), flush=True)


for tokens in args.tokens:
    report(tokens)
