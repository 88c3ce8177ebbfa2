"""Measures dispatch, combine and their round trip against JAX's own exchanges.

A script, started by ``bench.py`` through ``launch``.  Every program is one jitted ``lax.scan`` of
many calls, each depending on the one before, so that Python and dispatch overhead are not measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._cli.baselines import AllGather, DenseAllToAll, Exchange, Sizes
from jax_ep._cli.shapes import SHAPES, Shape

AXIS = "ep"
SCAN_BYTES = 64 << 20  # payload of one timed program; sets the number of calls in it
MAX_CALLS = 200
ROUND_TRIP = 2

Arrays = tuple[jax.Array, jax.Array, jax.Array]  # x, ids, weights: one rank's
Body = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # x, ids, weights -> next x


@dataclasses.dataclass(frozen=True)
class _Program:
    """What is timed: ``call`` over and over, on a carry and a context made once."""

    name: str
    num_trips: int  # how often the payload moves in a call
    prepare: Callable[[Arrays], tuple[Any, Any]]  # -> carry, context
    call: Callable[[Any, Any], Any]  # carry, context -> next carry


def _fed_back(name: str, num_trips: int, body: Body) -> _Program:
    """A program whose result is its next x; routing depends on x, as in a model.

    Otherwise XLA would move the plan out of the loop.
    """

    def call(x: jax.Array, context: tuple[jax.Array, jax.Array]) -> jax.Array:
        ids, weights = context
        return body(x, jnp.where(jnp.isnan(x[0, 0]), -1, ids), weights)

    return _Program(name, num_trips, lambda arrays: (arrays[0], arrays[1:]), call)


def _routing(shape: Shape, num_ranks: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Distinct experts per token (Gumbel top-k), uniform or Zipf; weights that add up to 1."""
    rng = np.random.default_rng(0)
    popularity = np.arange(1, shape.num_experts + 1) ** -shape.zipf_exponent
    draws = np.log(popularity) + rng.gumbel(size=(num_ranks * shape.tokens, shape.num_experts))
    ids = np.argsort(-draws, axis=1)[:, : shape.top_k].astype(np.int32)
    return ids, np.full(ids.shape, 1 / shape.top_k, np.float32)


def _next(x: jax.Array, result: jax.Array) -> jax.Array:
    """The next call's x: its first row comes from ``result``, all of which must exist before."""
    return x.at[0].set(lax.optimization_barrier(result)[0])


def _ours(label: str, group: jax_ep.Group) -> list[_Program]:
    """The three programs of one implementation of jax_ep."""

    def dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return _next(x, jax_ep.dispatch(group, x, ids, weights).x)

    def received(arrays: Arrays) -> tuple[jax.Array, jax_ep.Received]:
        recv = jax_ep.dispatch(group, *arrays)
        return recv.x, recv

    def combine(y: jax.Array, recv: jax_ep.Received) -> jax.Array:
        return _next(y, jax_ep.combine(group, y, recv))

    def round_trip(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        recv = jax_ep.dispatch(group, x, ids, weights)
        return jax_ep.combine(group, recv.x, recv)

    return [
        _fed_back(f"jax_ep {label} dispatch", 1, dispatch),
        _Program(f"jax_ep {label} combine", 1, received, combine),
        _fed_back(f"jax_ep {label} round trip", 2, round_trip),
    ]


def _baseline(exchange: Exchange) -> Body:
    """Its dispatch and combine, each of which exists as a whole before the next begins."""

    def body(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        rows, state = lax.optimization_barrier(exchange.dispatch(x, ids, weights))
        return exchange.combine(rows, state, weights)

    return body


class _Bench:
    """Times programs on one mesh; every process takes part in every run."""

    def __init__(self, mesh: Mesh, shape: Shape, repeats: int) -> None:
        self._mesh, self._shape, self._repeats = mesh, shape, repeats
        self.payload_bytes = shape.payload_bytes(jnp.dtype(shape.dtype).itemsize)
        self._calls = max(1, min(MAX_CALLS, SCAN_BYTES // self.payload_bytes))
        ids, weights = _routing(shape, mesh.size)
        x = np.random.default_rng(1).standard_normal((mesh.size * shape.tokens, shape.hidden))
        self._inputs = [self._shard(x.astype(shape.dtype)), self._shard(ids), self._shard(weights)]

    def _shard(self, array: np.ndarray[Any, Any]) -> jax.Array:
        sharding = NamedSharding(self._mesh, P(AXIS))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def time(self, program: _Program) -> dict[str, Any]:
        """Microseconds per call: medians and 99th percentiles of the slowest process."""

        def scanned(*arrays: jax.Array) -> Any:
            carry, context = program.prepare(arrays)  # type: ignore[arg-type]

            def call(carry: Any, _: None) -> tuple[Any, None]:
                return program.call(carry, context), None

            return lax.scan(call, carry, length=self._calls)[0]

        run = jax.jit(
            jax.shard_map(scanned, mesh=self._mesh, in_specs=(P(AXIS),) * 3, out_specs=P(AXIS))
        )
        jax.block_until_ready(run(*self._inputs))  # compiles
        times = []
        for _ in range(self._repeats):
            begin = time.perf_counter()
            jax.block_until_ready(run(*self._inputs))
            times.append((time.perf_counter() - begin) / self._calls * 1e6)
        slowest = np.max(np.atleast_2d(multihost_utils.process_allgather(np.array(times))), axis=0)
        return {
            "name": program.name,
            "median_us": float(np.median(slowest)),
            "p99_us": float(np.percentile(slowest, 99)),
            "calls_per_run": self._calls,
            "payload_bytes": program.num_trips * self.payload_bytes,
            "is_round_trip": program.num_trips == ROUND_TRIP,
        }


def _programs(mesh: Mesh, shape: Shape, groups: dict[str, jax_ep.Group]) -> list[_Program]:
    ours = [program for label, group in groups.items() for program in _ours(label, group)]
    ranks = mesh.size
    owners = _routing(shape, ranks)[0].reshape(ranks, -1) // (shape.num_experts // ranks)
    fullest = max(int(np.bincount(of, minlength=ranks).max()) for of in owners)
    sizes = Sizes(ranks, shape.tokens, shape.hidden, shape.top_k, shape.num_experts, fullest)
    return [
        *ours,
        _fed_back(
            "lax.all_to_all, padded, round trip", ROUND_TRIP, _baseline(DenseAllToAll(sizes))
        ),
        _fed_back("lax.all_gather + psum_scatter", ROUND_TRIP, _baseline(AllGather(sizes))),
    ]


def main() -> None:
    """Reads options and path from the command line; process 0 writes the JSON report."""
    options, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    shape = SHAPES[options["shape"]]
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    config = jax_ep.Config(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        max_tokens=shape.tokens,
        capacity_factor=shape.capacity_factor,
        align=8,
        dtype=shape.dtype,
        mode=options["mode"],
        node_size=options["node_size"],
        transport=options["transport"],
    )
    groups = {}
    try:
        groups["native"] = jax_ep.create_group(mesh, AXIS, config, implementation="native")
    except (RuntimeError, NotImplementedError) as error:
        if jax.process_index() == 0:
            print(f"without the native implementation: {error}")
    groups["xla"] = jax_ep.create_group(mesh, AXIS, config, implementation="xla")
    bench = _Bench(mesh, shape, options["repeats"])
    results = []
    for program in _programs(mesh, shape, groups):
        results.append(bench.time(program))
        if jax.process_index() == 0:
            print(f"{program.name}: {results[-1]['median_us']:,.0f} us")
    for group in groups.values():
        group.check()
        group.close()
    if jax.process_index() == 0:
        report = {
            "options": options,
            "ours": f"jax_ep {next(iter(groups))} round trip",
            "results": results,
            "machine": {
                "platform": jax.default_backend(),
                "cpu_cores": len(os.sched_getaffinity(0)),
                "kernel": platform.release(),
                "jax": jax.__version__,
            },
        }
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
