"""Real exchanges of virtual nodes on this machine's cores, to check the simulator against.

One process plays all ranks: `NPROC=64 python benchmarks/simulator/real_run.py --ranks 8
--node-size 2 --transport ofi` prints a JSON line: the least microseconds of dispatch and combine,
in both modes, and the messages and bytes of a call on each channel, of all ranks.
"""

import argparse
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


def least_us(step, *arrays):
    def looped(x, *rest):
        return lax.scan(lambda c, _: (step(c, *rest), None), x, None, length=args.calls)[0]

    run = jax.jit(
        jax.shard_map(looped, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    )
    run(*arrays).block_until_ready()
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        run(*arrays).block_until_ready()
        times.append((time.perf_counter() - start) / args.calls * 1e6)
    return min(times)  # what the other programs of the machine add is not of interest


result = vars(args) | {"ll_tokens": LL_TOKENS, "load": os.getloadavg()[0], "us": {}, "per_call": {}}
for mode, tokens in SIZES.items():
    with jax_ep.create_group(mesh, "ep", config(mode)) as group:
        rows = jnp.ones((args.ranks * tokens, args.hidden), jnp.float32)
        x, chosen = jax.device_put((rows, ids(tokens)), NamedSharding(mesh, P("ep")))

        def pair(x, chosen, group=group, mode=mode):
            received = jax_ep.dispatch(group, x, chosen, mode=mode, pad="undefined")
            back = jax_ep.combine(group, received.x, received)
            return back / jnp.float32(args.top_k)

        result["us"][mode] = least_us(pair, x, chosen)
        calls = args.calls * (1 + args.repeats)
        flows = group.stats()["flows"]
        result["per_call"][mode] = {
            channel: [
                sum(flow[key] for flow in flows if flow["channel"] == number) / calls
                for key in ("messages", "bytes")
            ]
            for number, channel in enumerate(CHANNELS)
        }
# The same copy as in run_cpu.py: how fast this machine is just now.
source = np.ones(1 << 28, np.uint8)
target = np.zeros_like(source)
start = time.perf_counter()
for _ in range(4):
    np.copyto(target, source)
result["memcpy_us_per_byte"] = (time.perf_counter() - start) / 4 / source.size * 1e6
print("RESULT " + json.dumps(result), flush=True)
