"""Compiles programs for TPUs that are not here: `compile_for_tpu.py TOPOLOGY PROGRAM...`.

It needs libtpu. For each program it prints a line of JSON: its name, the seconds it took, and the
collectives of the compiled program as (name, element type, bytes).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from typing import Any

# Else libtpu asks a cloud's metadata server which machine this is.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no device is opened

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scripts import ROOT

import jax_ep

EXPERTS, TOP_K, WIDTH = 64, 4, 256


def group_on(mesh: Mesh, **options: Any) -> jax_ep.Group:
    """A group that can only be lowered, as all on devices that are not here."""
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": WIDTH, "max_tokens": 256}
    config = jax_ep.Config(**{**sizes, "capacity_factor": 1.5, "align": 8, **options})
    return jax_ep.create_group(mesh, "ep", config)


def compiled(group: jax_ep.Group, function: Any, *shapes: Any) -> Any:
    """`function` of local arrays; `shapes` are (dtype, dimensions) of a rank's."""
    sharding = NamedSharding(group.mesh, P("ep"))

    def of_all_ranks(dtype: Any, first: int, *rest: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((group.num_ranks * first, *rest), dtype, sharding=sharding)

    mapped = jax.shard_map(function, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.jit(mapped).lower(*(of_all_ranks(*shape) for shape in shapes)).compile()


def dispatch(mesh: Mesh) -> Any:
    group = group_on(mesh, dtype=jnp.bfloat16)

    def received(x: Any, ids: Any, weights: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids, weights)
        return recv.x, recv.weights

    pairs = (256, TOP_K)
    rows = (jnp.bfloat16, 256, WIDTH)
    return compiled(group, received, rows, (jnp.int32, *pairs), (jnp.float32, *pairs))


def combine(mesh: Mesh, **sizes: int) -> Any:
    group = group_on(mesh, dtype=jnp.bfloat16, **sizes)
    tokens, hidden, top_k = (getattr(group.config, n) for n in ("max_tokens", "hidden", "top_k"))

    def summed(y: Any, ids: Any) -> Any:
        return jax_ep.combine(group, y, jax_ep.plan(group, ids))

    rows = (jnp.bfloat16, group.recv_rows(tokens), hidden)
    return compiled(group, summed, rows, (jnp.int32, tokens, top_k))


def large_combine(mesh: Mesh) -> Any:
    """On 64 devices the partials have 2 GiB on each: libtpu 0.0.42 aborts if they go at once."""
    return combine(mesh, max_tokens=4096, hidden=2048, num_experts=256, top_k=1)


def layer_gradient(mesh: Mesh) -> Any:
    """Of a router, experts of two products, dispatch and combine."""
    group = group_on(mesh, dtype=jnp.bfloat16)

    def loss(x: Any, router: Any, w_in: Any, w_out: Any) -> Any:
        logits = (x @ router).astype(jnp.float32)
        experts, weights = jax_ep.routing.topk_softmax(logits, TOP_K)
        recv = jax_ep.dispatch(group, x, experts, weights)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(recv.x, w_in, recv.group_sizes))
        y = jax.lax.ragged_dot(hidden, w_out, recv.group_sizes)
        out = jax_ep.combine(group, y, recv.plan, weights=recv.weights)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    row, weights = (jnp.bfloat16, 256, WIDTH), (jnp.bfloat16, EXPERTS // mesh.size, WIDTH, WIDTH)
    router = (jnp.bfloat16, WIDTH, EXPERTS)
    return compiled(group, jax.grad(loss, range(4)), row, router, weights, weights)


def training_step(mesh: Mesh) -> Any:
    """The step of train_moe_lm.py; its state is made on as many CPU devices."""
    sys.path.insert(0, str(ROOT / "examples"))
    from moe_lm.model import ModelSize
    from moe_lm.training import Trainer, TrainOptions

    size = ModelSize(width=64, layers=2, heads=2, expert_width=64, num_experts=8, top_k=2)
    options = TrainOptions(steps=8, learning_rate=1e-3, seed=0)
    config = {"num_experts": 8, "top_k": 2, "hidden": 64, "dtype": np.float32}

    def trainer_on(mesh: Mesh) -> Trainer:
        return Trainer(mesh, group_on(mesh, **config), size, options)

    here = trainer_on(Mesh(np.array(jax.devices()[: mesh.size]), ("ep",)))
    tokens = here.shard_batch(np.zeros((mesh.size, 129), np.int32))

    def there(array: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, array.sharding.spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    arguments = jax.tree.map(there, (here.init(), tokens))
    return trainer_on(mesh).step.lower(*arguments).compile()


PROGRAMS = {
    f.__name__: f for f in (dispatch, combine, large_combine, layer_gradient, training_step)
}


def collectives(text: str) -> list[tuple[str, str, int]]:
    """(name, element type, bytes of the result) of each in a compiled program."""
    found = []
    for element, dims, name in re.findall(
        r" = (\w+)\[([\d,]*)\]\S* (all-gather|all-to-all)\(", text
    ):
        bits = 8 if element == "pred" else int(element.lstrip("abcdefghijklmnopqrstuvwxyz"))
        found.append((name, element, math.prod(map(int, dims.split(","))) * bits // 8))
    return found


def main() -> None:
    topology, *names = sys.argv[1:]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    jax.config.update("jax_num_cpu_devices", len(devices))
    mesh = Mesh(np.array(devices), ("ep",))
    for name in names:
        began = time.monotonic()
        text = PROGRAMS[name](mesh).as_text()
        report = {
            "program": name,
            "seconds": round(time.monotonic() - began, 1),
            "native_calls": text.count('custom_call_target="jax_ep'),
            "collectives": collectives(text),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
