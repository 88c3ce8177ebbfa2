"""How many pairs of ranks, flows, sockets and heartbeats a process has; two ranks in each node."""

import argparse
import os
import pathlib
import re
import time

import jax
import jax.numpy as jnp
from meeting import meet

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--transport", required=True)
args = parser.parse_args()

PEER_TIMEOUT_S = 4.0
MEASURE_S = 3.0


def sockets():
    """Established TCP connections of this process."""
    mine = set()
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # closed meanwhile: the descriptor of this very listing
            continue
        mine.update(re.findall(r"socket:\[(\d+)\]", target))
    found = 0
    for name in ("tcp", "tcp6"):
        lines = pathlib.Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        found += sum(line.split()[3] == "01" and line.split()[9] in mine for line in lines)
    return found


def sent(group):
    """Messages that the endpoints of this process have sent, heartbeats included."""
    return sum(map(int, re.findall(r"; rail [^:]+: (\d+) messages", group.dump_state())))


mesh = jax.make_mesh((jax.device_count(),), ("ep",))
config = jax_ep.Config(
    num_experts=jax.device_count(),
    top_k=1,
    hidden=8,
    max_tokens=4,
    dtype=jnp.float32,
    node_size=2,
    transport=args.transport,
    peer_timeout_s=PEER_TIMEOUT_S,
)
before = sockets()
with jax_ep.create_group(mesh, "ep", config) as group:
    flows = group.stats()["flows"]
    pairs = {(flow["rank"], flow["peer"]) for flow in flows}
    print("PAIRS", len(pairs), flush=True)
    print("SOCKETS", sockets() - before, flush=True)
    if args.transport == "ofi":
        time.sleep(1)
        first = sent(group)
        time.sleep(MEASURE_S)
        print("HEARTBEATS", sent(group) - first, flush=True)
    meet("counted")
