"""Exchanges on this machine's GPUs, one process, inside jit; prints one JSON line per case.

Times are of one call in a `lax.scan` of many, over all GPUs: the slowest rank decides. A step of
the scan is UNROLL calls, and the time of a scan that calls nothing is taken off: XLA's loop costs
the host more than a short call takes (15.6 us an iteration, two H200, jax 0.11.2). Where the calls
hide that time, up to an eighth of it is taken off too much; `loop_us` has what was, that which
makes one call depend on the one before it included. `pair` is a dispatch and the combine of its
rows, one behind the other. Every method's round trip is checked (identity experts: every token
comes back) before it is timed, and that no loop has lost a call.

jax_ep's dispatch gives rows grouped by expert; the baselines stop when the rows are with their
owner, in the order of their sources, which spares them that grouping.
"""

import argparse
import concurrent.futures
import json
import math
import re
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
from jax_ep._cli.loop_steps import after, routing_of, steps_of
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
COLLECTIVES = "all-gather|all-reduce|all-to-all|ragged-all-to-all|reduce-scatter"
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


def per_rank(function, **options):
    """`function` of local arrays, jitted over arrays [N, ...]."""

    def local(*arrays):
        outs = function(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], outs)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    return jax.jit(mapped, **options)


def looped(step, calls):
    """Many calls of `step(carry, context)`, which gives the next carry, in the same memory."""

    def run(carry, context):
        def turn(carry, _):
            return step(carry, context), None

        return lax.scan(turn, carry, None, length=calls, unroll=min(UNROLL, calls))[0]

    return per_rank(run, donate_argnums=0)


def measure(run, calls, carry, context):
    """(us of a call, carry)."""
    carry = run(carry, context).block_until_ready()
    seconds = []
    began = time.perf_counter()
    while len(seconds) < args.repeats:
        if len(seconds) >= 3 and time.perf_counter() - began > args.seconds:
            break
        start = time.perf_counter()
        carry = run(carry, context).block_until_ready()
        seconds.append((time.perf_counter() - start) / calls)
    return float(np.median(seconds)) * 1e6, carry


def calls_of(name):
    """Calls inside one scan."""
    slow = args.ragged_calls or {"ht": 1, "ll": 20}[args.mode]
    return slow if name == "ragged" else args.calls


@jax.jit
def largest_difference(a, b):
    return jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))


def nothing(carry, context):
    """What is in a step of a loop beside its call."""
    del context
    return after(carry, carry.reshape(-1)[:1])


def nothing_of_routing(x, context):
    """The same, where the routing depends on x."""
    ids, weights = routing_of(x, context)
    return after(x, (ids.astype(jnp.float32), weights))


def steps_for(name, method):
    """{what: (a step of its loop, one that calls nothing)}."""
    steps = steps_of(method)
    every = {
        "dispatch": (steps["dispatch"], nothing_of_routing),
        "combine": (steps["combine"], nothing),
        "pair": (steps["pair"], nothing_of_routing),
    }
    if name == "jax_ep":

        def plan(x, context):
            return after(x, method.plan(routing_of(x, context)[0]))

        every["plan"] = plan, nothing_of_routing
    return every


def compile_all(methods, x, idx, weights):
    """{(method, what): program}, compiled side by side.

    "dispatch once" and "combine once" are one call; what steps_for names is a loop, and (method,
    what, "nothing") the same loop without its calls.
    """
    lowered = {}
    for name, method in methods.items():
        dispatch = per_rank(method.dispatch)
        rows, state = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            jax.eval_shape(dispatch, x, idx, weights),
        )
        lowered[name, "dispatch once"] = dispatch.lower(x, idx, weights)
        lowered[name, "combine once"] = per_rank(method.combine).lower(rows, state, weights)
        for what, (step, empty) in steps_for(name, method).items():
            operands = (rows, (state, weights)) if what == "combine" else (x, (idx, weights))
            lowered[name, what] = looped(step, calls_of(name)).lower(*operands)
            lowered[name, what, "nothing"] = looped(empty, calls_of(name)).lower(*operands)
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        compiled = pool.map(lambda low: low.compile(), lowered.values())
        programs = dict(zip(lowered, compiled, strict=True))
    for name in methods:
        for what in ("dispatch", "combine"):
            of_one = num_calls(programs[name, f"{what} once"])
            expected = of_one * min(UNROLL, calls_of(name))
            got = num_calls(programs[name, what])
            assert got >= expected > 0, f"{name}: a step of {what} has {got} of {expected} calls"
    return programs


def num_calls(program):
    """Collectives and calls of libraries in a compiled program."""
    return len(re.findall(rf" (?:custom-call|(?:{COLLECTIVES})(?:-start)?)\(", program.as_text()))


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
        "loop_us": {},  # of loops without calls, taken off already
    }
    with jax_ep.create_group(mesh, "ep", config) as group:
        programs = compile_all(methods_for(sizes, group), x, idx, weights)
        for name in args.methods:
            rows, state = programs[name, "dispatch once"](x, idx, weights)
            out = programs[name, "combine once"](rows, state, weights)
            error = float(largest_difference(out, x))
            assert error < 0.1, f"{name} returned wrong rows: {error}"
            held = {"x": jnp.copy(x), "rows": rows}  # loops take this memory and give it back
            contexts = {"x": (idx, weights), "rows": (state, weights)}
            us, loop_us = {}, {}
            for what in [key[1] for key in programs if key[0] == name and key[2:]]:
                carry = "rows" if what == "combine" else "x"
                times = []
                for key in ((name, what), (name, what, "nothing")):
                    operands = held[carry], contexts[carry]
                    took, held[carry] = measure(programs[key], calls_of(name), *operands)
                    times.append(took)
                us[what], loop_us[what] = times[0] - times[1], times[1]
            shown = args.ragged_name if name == "ragged" else name
            result["us"][shown], result["loop_us"][shown] = us, loop_us
            del rows, state, out, held, contexts  # the next method's are as large
        jax_ep.wait(x)
    print("RESULT " + json.dumps(result), flush=True)


for tokens in args.tokens:
    report(tokens)
