"""The checks of the selftest, on the devices that this process (or job) has.

A script, started by ``selftest.py`` through ``launch``; writes one JSON line per check.  The oracle
is closed-form: expert e multiplies by e + 1, so results and gradients are known without any MoE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _extension, testing

AXIS = "ep"
TOKENS, HIDDEN, TOP_K, NUM_EXPERTS = 16, 64, 2, 16
TOLERANCE = 1e-5  # relative to the largest expected value; f32
LAYOUTS = ("expert_major", "expert_batched", "rank_major")
QUANTITIES = ("values", "gradient of x", "gradient of weights")
NUM_INPUTS = 7
MANY_RANKS = 2

Errors = Iterator[tuple[str, float]]


def _round_trip(
    group: jax_ep.Group, way: str, mode: Any, x: jax.Array, idx: jax.Array, weights: jax.Array
) -> jax.Array:
    """Dispatch, expert e times (e + 1), combine; ``way`` is a layout or "start/done"."""
    first = lax.axis_index(AXIS) * (NUM_EXPERTS // group.num_ranks)
    if way == "start/done":
        started = jax_ep.dispatch_start(group, x, idx, weights, mode=mode)
        recv = jax_ep.dispatch_done(group, started)
    else:
        layout: Any = way
        recv = jax_ep.dispatch(group, x, idx, weights, mode=mode, layout=layout)
    if way == "rank_major":
        assert recv.topk_idx is not None and recv.weights is not None
        factor = jnp.where(recv.topk_idx >= 0, recv.topk_idx + first + 1, 0)
        summed = recv.x * (factor * recv.weights).sum(axis=-1, keepdims=True)
        return jax_ep.combine(group, summed, recv)
    if way == "expert_batched":
        local = jnp.arange(recv.x.shape[0])[:, None, None]
    else:
        rows = jnp.arange(recv.x.shape[0])
        local = jnp.searchsorted(jnp.cumsum(recv.group_sizes), rows, side="right")[:, None]
    y = recv.x * (local + first + 1).astype(recv.x.dtype)
    if way == "start/done":
        return jax_ep.combine_done(group, jax_ep.combine_start(group, y, recv))
    return jax_ep.combine(group, y, recv)


def _inputs(num_ranks: int) -> tuple[np.ndarray[Any, Any], ...]:
    """x, ids, weights, cotangent; expected values and gradients (all over the whole group)."""
    rng = np.random.default_rng(0)
    shape = (num_ranks * TOKENS, HIDDEN)
    x, cotangent = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    idx = testing.make_routing(
        "holes", num_ranks=num_ranks, num_tokens=TOKENS, top_k=TOP_K, num_experts=NUM_EXPERTS
    )
    weights = rng.random(idx.shape).astype(np.float32)
    factor = np.where(idx >= 0, idx + 1.0, 0.0)
    scale = (factor * weights).sum(axis=1, keepdims=True)
    inner = (x.astype(np.float64) * cotangent).sum(axis=1, keepdims=True)
    expected = (scale * x, scale * cotangent, factor * inner)
    return (x, idx, weights, cotangent, *(value.astype(np.float32) for value in expected))


def _check_group(mesh: Mesh, group: jax_ep.Group, mode: str, ways: tuple[str, ...]) -> Errors:
    """Relative errors of every way and quantity, from one compiled program."""

    def body(*inputs: jax.Array) -> jax.Array:
        x, idx, weights, cotangent, *expected = inputs
        errors = []
        for way in ways:

            def loss(
                x: jax.Array, weights: jax.Array, way: str = way
            ) -> tuple[jax.Array, jax.Array]:
                out = _round_trip(group, way, mode, x, idx, weights)
                return jnp.sum(out * cotangent), out

            gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (_, out), gradients = gradient(x, weights)
            for got, wanted in zip((out, *gradients), expected, strict=True):
                scale = lax.pmax(jnp.max(jnp.abs(wanted)), AXIS)
                errors.append(lax.pmax(jnp.max(jnp.abs(got - wanted)), AXIS) / scale)
        return jnp.stack(errors)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(AXIS),) * NUM_INPUTS, out_specs=P()))
    errors = np.asarray(run(*_shard(mesh, _inputs(mesh.size))))
    group.check()
    names = [f"{way}, {quantity}" for way in ways for quantity in QUANTITIES]
    yield from zip(names, map(float, errors), strict=True)


def _check_drops(mesh: Mesh, native: jax_ep.Group, oracle: jax_ep.Group) -> Errors:
    """With too few rows both implementations must drop the same pairs and agree on the rest."""

    def body(x: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
        outs, dropped = [], []
        for group in (native, oracle):
            recv = jax_ep.dispatch(group, x, idx, weights)
            outs.append(jax_ep.combine(group, recv.x, recv))
            dropped.append(lax.psum(recv.plan.num_dropped, AXIS).astype(jnp.float32))
        apart = jnp.max(jnp.abs(outs[0] - outs[1])) / jnp.max(jnp.abs(outs[1]))
        no_drop = (dropped[1] == 0).astype(jnp.float32)
        return jnp.stack([lax.pmax(apart, AXIS), jnp.abs(dropped[0] - dropped[1]) + no_drop])

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(AXIS),) * 3, out_specs=P()))
    errors = np.asarray(run(*_shard(mesh, _inputs(mesh.size)[:3])))
    yield from zip(("values", "drop counts"), map(float, errors), strict=True)


def _check_fp8(mesh: Mesh, native: jax_ep.Group, oracle: jax_ep.Group) -> Errors:
    """Rows that travel in FP8 are the same from both, and those that were sent but for rounding."""
    rounding = 2.0**-4  # of 4 significant bits, of the largest value of a block

    def body(x: jax.Array, idx: jax.Array) -> jax.Array:
        got, expected = (jax_ep.dispatch(group, x, idx).x for group in (native, oracle))
        source = jax_ep.combine(native, got, jax_ep.plan(native, idx), weights=None)
        copies = jnp.sum(idx >= 0, axis=1, keepdims=True)
        apart = jnp.max(jnp.abs(source - copies * x)) / jnp.max(jnp.abs(copies * x))
        errors = (jnp.max(jnp.abs(got - expected)), jnp.maximum(apart - rounding, 0))
        return jnp.stack([lax.pmax(error, AXIS) for error in errors])

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(AXIS),) * 2, out_specs=P()))
    errors = np.asarray(run(*_shard(mesh, _inputs(mesh.size)[:2])))
    yield from zip(("rows", "rounding"), map(float, errors), strict=True)


def _shard(mesh: Mesh, arrays: tuple[np.ndarray[Any, Any], ...]) -> list[jax.Array]:
    return [_shard_one(NamedSharding(mesh, P(AXIS)), array) for array in arrays]


def _shard_one(sharding: NamedSharding, array: np.ndarray[Any, Any]) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _config(**changes: Any) -> jax_ep.Config:
    return jax_ep.Config(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        align=8,
        dtype=np.float32,
        timeout_s=60.0,
        **changes,
    )


def _checks(mesh: Mesh) -> Iterator[tuple[str, Callable[[], Errors]]]:
    """Name and body of every check; a body runs on all processes alike."""
    all_ways = (*LAYOUTS, "start/done")
    two_ways = ("expert_major", "start/done")  # compiling is what takes the time

    def xla() -> Errors:
        # Its halves are the whole in disguise, and layouts need no second process.
        ways = LAYOUTS if jax.process_count() == 1 else LAYOUTS[:1]
        with jax_ep.create_group(mesh, AXIS, _config(), implementation="xla") as group:
            yield from _check_group(mesh, group, "ht", ways)

    def native(mode: str, node_size: int) -> Callable[[], Errors]:
        ways = two_ways if node_size == 1 and mesh.size > MANY_RANKS else all_ways

        def check() -> Errors:
            config = _config(node_size=node_size)
            with jax_ep.create_group(mesh, AXIS, config, implementation="native") as group:
                yield from _check_group(mesh, group, mode, ways)

        return check

    def drops() -> Errors:
        config = _config(recv_rows=16)
        with (
            jax_ep.create_group(mesh, AXIS, config, implementation="native") as group,
            jax_ep.create_group(mesh, AXIS, config, implementation="xla") as oracle,
        ):
            yield from _check_drops(mesh, group, oracle)

    def fp8() -> Errors:
        config = _config(wire=jax_ep.FP8(block=HIDDEN // 2))
        with (
            jax_ep.create_group(mesh, AXIS, config, implementation="native") as group,
            jax_ep.create_group(mesh, AXIS, config, implementation="xla") as oracle,
        ):
            yield from _check_fp8(mesh, group, oracle)

    def no_extension() -> Errors:
        raise RuntimeError("jax_ep._core is not built; run `pip install .`")

    yield "xla", xla
    if not _extension.is_built():
        if not _extension.is_left_out():
            yield "native", no_extension
        return
    for node_size in sorted({mesh.size, max(1, mesh.size // 2), 1}, reverse=True):
        nodes = mesh.size // node_size
        for mode in ("ht", "ll"):
            yield f"native {mode}, {nodes} node{'s' * (nodes > 1)}", native(mode, node_size)
    yield "native drops as xla does", drops
    yield "native FP8 as xla does", fp8


def _run_check(check: Callable[[], Errors]) -> tuple[bool, str]:
    try:
        errors = list(check())
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return False, f"{type(error).__name__}: {lines[0]}"
    bad = [f"{name}: off by {value:.1e}" for name, value in errors if not value <= TOLERANCE]
    return not bad, "; ".join(bad) if bad else f"({len(errors)} comparisons)"


def main() -> None:
    """Runs every check; process 0 writes what came out."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    path = Path(sys.argv[1])
    for name, check in _checks(mesh):
        is_good, detail = _run_check(check)
        if jax.process_index() == 0:
            with path.open("a") as file:
                file.write(json.dumps({"name": name, "ok": is_good, "detail": detail}) + "\n")


if __name__ == "__main__":
    main()
