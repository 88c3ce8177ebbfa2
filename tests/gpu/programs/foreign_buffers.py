"""Dispatches rows from buffers inside and outside XLA's exported arena; prints what was staged.

`foreign_buffers.py arena`: with XLA's preallocated pool. `foreign_buffers.py grown`, without
preallocation: with a pool that grows beyond the range that was exported. One line of JSON per case:
its name, the bytes that each rank staged, and what was wrong with the result (null: nothing) or why
JAX or XLA refused the program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import foreign_memory
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

T, H, K, E = 1024, 512, 4, 16
X_BYTES = T * H * 4

mesh = Mesh(np.array(jax.devices()[:4]), ("ep",))
N = mesh.size
devices = list(mesh.devices.flat)
sharding = NamedSharding(mesh, P("ep"))
config = jax_ep.Config(
    num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=jnp.float32, align=16, timeout_s=20.0
)
rng = np.random.default_rng(0)
x_host = rng.standard_normal((N * T, H)).astype(np.float32)
ids_host = np.stack([rng.permutation(E)[:K] for _ in range(N * T)]).astype(np.int32)
weights_host = rng.random((N * T, K)).astype(np.float32)


def layer(group: jax_ep.Group, x: Any, ids: Any, weights: Any) -> Any:
    recv = jax_ep.dispatch(group, x, ids, weights, mode="ht")
    return jax_ep.combine(group, 2 * recv.x, recv)


def per_rank(function: Callable[..., Any], num_arrays: int = 3) -> Any:
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=(P("ep"),) * num_arrays, out_specs=P("ep"))
    )


def put(array: np.ndarray) -> jax.Array:
    return jax.block_until_ready(jax.device_put(array, sharding))


def with_shard_0(array: jax.Array, shard: jax.Array) -> jax.Array:
    """`array` with another buffer for rank 0."""
    shards = {s.device: s.data for s in array.addressable_shards}
    shards[devices[0]] = shard
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, [shards[device] for device in devices]
    )


def run(group: jax_ep.Group, name: str, call: Callable[[], Any], wanted: np.ndarray) -> None:
    """Runs one case and prints its line."""

    def staged() -> list[int]:
        ranks = sorted(group.stats()["ranks"], key=lambda rank: int(rank["rank"]))
        return [int(rank.get("bytes_staged", 0)) for rank in ranks]

    before = staged()
    line: dict[str, Any] = {"case": name, "x_bytes": X_BYTES, "num_ranks": N, "refused": None}
    try:
        out = np.asarray(call())
    except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        line |= {"refused": f"{type(error).__name__}: {error}"[:500], "wrong": None}
    else:
        is_equal = np.array_equal(out, wanted)
        line["wrong"] = None if is_equal else f"{np.sum(out != wanted)} of {out.size} elements"
    line["staged"] = [now - then for now, then in zip(staged(), before, strict=True)]
    print(json.dumps(line), flush=True)
    group.check()


def from_arena(group: jax_ep.Group, step: Any, wanted: np.ndarray, after: str) -> None:
    """The call after a foreign one reads in place again."""
    arrays = put(x_host), put(ids_host), put(weights_host)
    run(group, f"arena after {after}", lambda: step(*arrays), wanted)


def run_arena_cases(group: jax_ep.Group, step: Any, wanted: np.ndarray) -> None:
    x, ids, weights = put(x_host), put(ids_host), put(weights_host)
    run(group, "arena", lambda: step(x, ids, weights), wanted)

    lent = foreign_memory.array_of(x_host[:T], devices[0])
    mixed = with_shard_0(x, lent)
    run(group, "dlpack", lambda: step(mixed, ids, weights), wanted)
    from_arena(group, step, wanted, "dlpack")

    # Every rank dispatches rank 0's rows, which are part of the program.
    same = put(np.tile(x_host[:T], (N, 1)))
    same_wanted = np.asarray(step(same, ids, weights))
    rows = x_host[:T]
    constant = per_rank(lambda ids, weights: layer(group, jnp.asarray(rows), ids, weights), 2)
    text = constant.lower(ids, weights).compile().as_text()
    is_constant = f"f32[{T},{H}]" in text and any(
        f"f32[{T},{H}]" in line and " constant(" in line for line in text.splitlines()
    )
    print(json.dumps({"case": "constant is in the module", "is": is_constant}), flush=True)
    run(group, "constant", lambda: constant(ids, weights), same_wanted)
    from_arena(group, step, wanted, "constant")

    pinned = NamedSharding(mesh, P("ep"), memory_kind="pinned_host")
    offloaded = jax.block_until_ready(jax.device_put(x_host, pinned))
    on_device = jax.memory.Space.Device

    def fetched(x: Any, ids: Any, weights: Any) -> Any:
        return layer(group, jax.device_put(x, on_device), ids, weights)

    fetch = per_rank(fetched)
    run(group, "offloaded", lambda: fetch(offloaded, ids, weights), wanted)
    run(group, "offloaded operand", lambda: step(offloaded, ids, weights), wanted)
    from_arena(group, step, wanted, "offloaded operand")


def print_data_path(group: jax_ep.Group, case: str) -> None:
    print(json.dumps({"case": case, "is": dict(group.health().details)["data_path"]}), flush=True)


def pointer(array: jax.Array) -> int:
    return int(array.unsafe_buffer_pointer())


def bytes_on(device: Any, num_bytes: int) -> jax.Array:
    with jax.default_device(device):  # zeros(device=...) makes them on the first GPU and copies
        return jax.block_until_ready(jnp.zeros(num_bytes, jnp.uint8))


def run_grown_case(step_of: Callable[[jax_ep.Group], Any]) -> None:
    """Rank 0's rows are where the pool grew to after the group was made."""
    limit = int((devices[0].memory_stats() or {}).get("bytes_limit", 1 << 30))
    range_bytes = int(0.6 * limit) // 256 * 256
    ranges = [bytes_on(device, range_bytes) for device in devices]  # one region, most of the limit
    begin = pointer(ranges[0])
    ranges.clear()
    with jax_ep.create_group(mesh, "ep", config, "native") as group:
        print_data_path(group, "data path")
        step = step_of(group)
        x, ids, weights = put(x_host), put(ids_host), put(weights_host)
        wanted = np.asarray(step(x, ids, weights))
        run(group, "arena", lambda: step(x, ids, weights), wanted)
        held = []
        size = range_bytes
        while size >= X_BYTES // 2:  # fills what is left of the region
            try:
                block = bytes_on(devices[0], size)
            except jax.errors.JaxRuntimeError:  # neither fits nor may the pool grow so far
                size //= 2
                continue
            if begin <= pointer(block) < begin + range_bytes:
                held.append(block)
            else:
                del block
                size //= 2
        far = jax.block_until_ready(jax.device_put(x_host[:T], devices[0]))
        is_outside = not begin <= pointer(far) < begin + range_bytes
        print(json.dumps({"case": "the pool grew", "is": is_outside}), flush=True)
        mixed = with_shard_0(x, far)
        run(group, "grown", lambda: step(mixed, ids, weights), wanted)
        run(group, "arena after grown", lambda: step(x, ids, weights), wanted)


def step_of(group: jax_ep.Group) -> Any:
    return per_rank(lambda x, ids, weights: layer(group, x, ids, weights))


if sys.argv[1] == "grown":
    run_grown_case(step_of)
else:
    with jax_ep.create_group(mesh, "ep", config, "native") as group:
        print_data_path(group, "data path")
        step = step_of(group)
        wanted = np.asarray(step(put(x_host), put(ids_host), put(weights_host)))
        direct = 2 * x_host * weights_host.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(wanted, direct, rtol=1e-5, atol=1e-5)
        run_arena_cases(group, step, wanted)
        print_data_path(group, "data path at the end")
print("foreign buffers DONE", flush=True)
