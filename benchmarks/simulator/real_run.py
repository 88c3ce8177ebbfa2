"""Real exchanges of virtual nodes on this machine's cores, to check the simulator against.

One process plays all ranks: `NPROC=64 python benchmarks/simulator/real_run.py --ranks 8
--node-size 2 --transport ofi` prints a JSON line: the least microseconds of dispatch and combine,
in both modes, and the messages and bytes of a call on each channel, of all ranks.
"""

import argparse
import contextlib
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.metrics import CHANNELS

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, required=True)
parser.add_argument("--node-size", type=int, required=True)
parser.add_argument("--transport", default="ofi", choices=["loopback", "shm", "ofi"])
parser.add_argument("--tokens", type=int, default=256)
parser.add_argument("--hidden", type=int, default=2048)
parser.add_argument("--top-k", type=int, default=4)
parser.add_argument("--experts", type=int, default=32)
parser.add_argument("--calls", type=int, default=8, help="in one scan")
parser.add_argument("--repeats", type=int, default=7)
args = parser.parse_args()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", args.ranks)
mesh = jax.make_mesh((args.ranks,), ("ep",))
rng = np.random.default_rng(0)
LL_TOKENS = 8
SIZES = {"ht": args.tokens, "ll": LL_TOKENS}


def ids(tokens):
    draws = [rng.permutation(args.experts)[: args.top_k] for _ in range(args.ranks * tokens)]
    return jnp.asarray(np.stack(draws).astype(np.int32))


def config(mode):
    return jax_ep.Config(
        num_experts=args.experts,
        top_k=args.top_k,
        hidden=args.hidden,
        max_tokens=SIZES[mode],
        dtype=jnp.float32,
        node_size=args.node_size,
        transport=args.transport,
        timeout_s=120,
    )


def looped(step):
    def run(x, *rest):
        return lax.scan(lambda c, _: (step(c, *rest), None), x, None, length=args.calls)[0]

    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    )


def pairs(group, mode):
    """A function of no arguments that does `args.calls` pairs of calls."""
    rows = jnp.ones((args.ranks * SIZES[mode], args.hidden), jnp.float32)
    x, chosen = jax.device_put((rows, ids(SIZES[mode])), NamedSharding(mesh, P("ep")))

    def pair(x, chosen):
        received = jax_ep.dispatch(group, x, chosen, mode=mode, pad="undefined")
        back = jax_ep.combine(group, received.x, received)
        return back / jnp.float32(args.top_k)

    run = looped(pair)
    return lambda: run(x, chosen).block_until_ready()


def sent_per_call(group):
    """[messages, bytes] of each channel, of all ranks."""
    calls = args.calls * (1 + 2 * args.repeats)
    flows = group.stats()["flows"]
    return {
        channel: [
            sum(flow[key] for flow in flows if flow["channel"] == number) / calls
            for key in ("messages", "bytes")
        ]
        for number, channel in enumerate(CHANNELS)
    }


# The same copy as in run_cpu.py: how fast this machine is just now.
source = np.ones(1 << 28, np.uint8)
target = np.zeros_like(source)
with contextlib.ExitStack() as stack:
    groups = {
        mode: stack.enter_context(jax_ep.create_group(mesh, "ep", config(mode))) for mode in SIZES
    }
    programs = {mode: pairs(group, mode) for mode, group in groups.items()}
    programs["memcpy"] = lambda: np.copyto(target, source)
    for program in programs.values():
        program()
    # In turns, so that what other programs do for a while slows all three; and the least of each,
    # since what they add is not of interest. Each turn warms the caches that the last one used.
    least_s = dict.fromkeys(programs, float("inf"))
    for _ in range(args.repeats):
        for name, program in programs.items():
            program()
            start = time.perf_counter()
            program()
            least_s[name] = min(least_s[name], time.perf_counter() - start)
    per_call = {mode: sent_per_call(group) for mode, group in groups.items()}

result = vars(args) | {
    "ll_tokens": LL_TOKENS,
    "load": os.getloadavg()[0],
    "us": {mode: least_s[mode] / args.calls * 1e6 for mode in SIZES},
    "memcpy_us_per_byte": least_s["memcpy"] / source.size * 1e6,
    "per_call": per_call,
}
print("RESULT " + json.dumps(result), flush=True)
