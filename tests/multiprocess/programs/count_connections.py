"""Pairs of ranks, sockets, queue pairs and heartbeats of a process, idle and after a call.

Each process is a node."""

import argparse
import json
import os
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from meeting import meet
from round_trip import round_trip

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--transport", required=True)
parser.add_argument("--mode", default="ht", choices=["ht", "ll"])
args = parser.parse_args()
jax_ep.initialize()

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
    """Heartbeats that the endpoints of this process have sent."""
    return sum(map(int, re.findall(r"heartbeats sent (\d+)", group.dump_state())))


def count(group, when):
    flows = group.stats()["flows"]
    print(f"PAIRS_{when}", len({(flow["rank"], flow["peer"]) for flow in flows}), flush=True)
    used = {}
    for flow in flows:
        used.setdefault(str(flow["channel"]), set()).add((flow["rank"], flow["peer"]))
    print(f"CHANNELS_{when}", json.dumps({name: len(used[name]) for name in used}), flush=True)
    print(f"SOCKETS_{when}", sockets() - before, flush=True)
    # Of verbs: peers to which queue pairs were made, for writing.
    reached = re.findall(r"queue pairs per peer and rail, to (\d+) peers", group.dump_state())
    print(f"QUEUE_PAIRS_{when}", sum(map(int, reached)), flush=True)
    meet(f"counted {when}")


mesh = Mesh(np.array(jax.devices()), ("ep",))  # make_mesh refuses CPUs of several hosts
config = jax_ep.Config(
    num_experts=jax.device_count(),
    top_k=1,
    hidden=8,
    max_tokens=4,
    dtype=jnp.float32,
    node_size=jax.local_device_count(),
    transport=args.transport,
    peer_timeout_s=PEER_TIMEOUT_S,
)
before = sockets()
with jax_ep.create_group(mesh, "ep", config) as group:
    meet("created")
    count(group, "IDLE")
    first = sent(group)
    time.sleep(MEASURE_S)
    print("HEARTBEATS", sent(group) - first, flush=True)
    meet("measured")

    # Each token goes to the same rank of the next node: to its rail mate.
    n, local = jax.device_count(), jax.local_device_count()
    x = np.ones((4 * n, 8), np.float32)
    idx = (np.repeat(np.arange(n), 4)[:, None] + local) % n
    out = round_trip(mesh, group, args.mode)(x, idx.astype(np.int32))
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])
    meet("called")
    count(group, "CALLED")
    print("FAILURE", group.health(), flush=True)
