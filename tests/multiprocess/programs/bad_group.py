"""Mistakes that only show between processes: every process must get the error, with words."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep

parser = argparse.ArgumentParser()
parser.add_argument("--what", required=True, choices=["config", "memory", "absent"])
args = parser.parse_args()
if not jax.distributed.is_initialized():
    jax_ep.initialize()

mesh = Mesh(np.array(jax.devices()), ("ep",))
me = jax.process_index()
settings = dict(num_experts=8, top_k=2, hidden=64, max_tokens=64, dtype=jnp.float32, timeout_s=10.0)
if args.what == "config" and me == 1:
    settings["top_k"] = 4
if args.what == "memory":
    settings |= {"hidden": 1 << 20, "max_tokens": 1 << 16, "num_experts": 8, "top_k": 1}
if args.what == "absent" and me == 1:
    settings["timeout_s"] = 3.0
try:
    if not (args.what == "absent" and me == 1):
        jax_ep.create_group(mesh, "ep", jax_ep.Config(**settings))
    print("error none", flush=True)
except (ValueError, MemoryError, RuntimeError) as error:
    print(f"error {type(error).__name__} {' '.join(str(error).split())}", flush=True)
# The same processes can make a group afterwards.
if args.what != "absent":
    good = dict(num_experts=8, top_k=2, hidden=64, max_tokens=64, dtype=jnp.float32, timeout_s=30.0)
    with jax_ep.create_group(mesh, "ep", jax_ep.Config(**good)) as group:
        print(f"afterwards {group.num_ranks}", flush=True)
