"""Measures one case of ``bench --report``: jax_ep and JAX's own exchanges, in turns.

A script, started by ``bench_report.py`` through ``launch``. Each program is one jitted loop of
calls that depend on each other. Every round runs each program once, so that a disturbance hits all
of them. A method that cannot run here is named with its reason, and the others are measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
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
from jax_ep._cli.baselines import BASELINES, Exchange, Sizes
from jax_ep._cli.bench_report_cases import OPERATIONS, OURS
from jax_ep._cli.loop_steps import Step, Tree, steps_of
from jax_ep._cli.shapes import SHAPES, Shape
from jax_ep.testing import make_routing

AXIS = "ep"
SAMPLE_S = 0.05  # of one timed run, unless one call takes longer
MAX_CALLS = 4000
CASE_S = 25.0  # of all timed runs of a case; fewer rounds rather than more time, but ...
LEAST_ROUNDS = 5
GPU_UNROLL = 8  # calls in a step of the loop: XLA's loop costs a GPU's host several us a step
TOLERANCE = 0.05  # of a round trip, in bf16 and with top-8
REASON_CHARS = 300


class _Ours:
    """jax_ep as the baselines' interface has it."""

    def __init__(self, group: jax_ep.Group, mode: str) -> None:
        self._group, self._mode = group, mode

    def dispatch(self, x: jax.Array, idx: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        # A decoder reads the rows that are counted, and no padding.
        pad: Any = "undefined" if self._mode == "ll" else "zero"
        recv = jax_ep.dispatch(self._group, x, idx, weights, mode=self._mode, pad=pad)  # type: ignore[arg-type]
        return recv.x, recv

    def combine(self, rows: jax.Array, state: Any, weights: jax.Array) -> jax.Array:
        del weights  # they went with the rows
        return jax_ep.combine(self._group, rows, state)


@dataclasses.dataclass
class _Program:
    """One method's operation: ``run(count, carry, context)`` makes count * unroll calls.

    It gives the next carry, in the memory of the last.
    """

    method: str
    operation: str
    run: Any
    carry: jax.Array
    context: Tree
    count: int = 1
    samples_us: list[float] = dataclasses.field(default_factory=list)


class _Case:
    """The inputs of one case on this mesh, and its programs."""

    def __init__(self, options: dict[str, Any], progress: Path) -> None:
        self.shape: Shape = SHAPES[options["shape"]]
        devices = jax.devices()[: options["num_ranks"]]
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.num_ranks, self.platform = len(devices), devices[0].platform
        self.unroll = 1 if self.platform == "cpu" else GPU_UNROLL
        self._options, self._progress = options, progress
        shape, ranks = self.shape, self.num_ranks
        self._ids = ids = make_routing(
            "zipf" if shape.zipf_exponent else "uniform",
            num_ranks=ranks,
            num_tokens=shape.tokens,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
        ).reshape(ranks, shape.tokens, shape.top_k)
        self.owners = ids // (shape.num_experts // ranks)
        rng = np.random.default_rng(1)
        weights = rng.random(ids.shape).astype(np.float32)
        weights /= weights.sum(axis=2, keepdims=True)
        x = rng.standard_normal((ranks, shape.tokens, shape.hidden)).astype(np.float32)
        self.inputs = tuple(
            self._shard(array) for array in (x.astype(jnp.dtype(shape.dtype)), ids, weights)
        )

    def _shard(self, array: np.ndarray[Any, Any]) -> jax.Array:
        sharding = NamedSharding(self.mesh, P(AXIS))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def sizes(self) -> Sizes:
        """For the baselines: as many rows for each pair of ranks as the fullest pair needs."""
        shape, ranks = self.shape, self.num_ranks
        loads = np.stack([np.bincount(of.ravel(), minlength=ranks) for of in self.owners])
        capacity = math.ceil(int(loads.max()) / 8) * 8
        return Sizes(ranks, shape.tokens, shape.hidden, shape.top_k, shape.num_experts, capacity)

    def remote_bytes(self) -> float:
        """Bytes that must leave a rank: a token once for each other rank that wants it."""
        ranks = range(self.num_ranks)
        wants = np.stack([(self.owners == rank).any(axis=2) for rank in ranks])  # [owner, from, t]
        rows = sum(int(wants[to, of].sum()) for to in ranks for of in ranks if to != of)
        itemsize = jnp.dtype(self.shape.dtype).itemsize
        return rows / self.num_ranks * self.shape.hidden * itemsize

    def config(self) -> jax_ep.Config:
        """jax_ep's group: capacity 1.25, or what the fullest rank needs, so that nothing drops."""
        shape, align = self.shape, 8 if self.platform == "cpu" else 128
        counts = np.bincount(self._ids.ravel(), minlength=shape.num_experts)
        zones = (-(-counts // align) * align).reshape(self.num_ranks, -1).sum(axis=1)
        usual = math.ceil(1.25 * shape.tokens * shape.top_k / align) * align
        is_ht = self._options["mode"] == "ht"
        return jax_ep.Config(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden=shape.hidden,
            max_tokens=shape.tokens,
            recv_rows=max(int(zones.max()), usual) if is_ht else None,
            align=align,
            dtype=shape.dtype,
            mode=self._options["mode"],
            node_size=self._options["node_size"],
            transport=self._options["transport"],
        )

    def per_rank(self, function: Callable[..., Tree], *, counted: bool = False) -> Any:
        """``function`` of one rank's arrays, jitted over arrays [N, ...]."""

        def local(*arrays: Tree) -> Tree:
            count, arrays = (arrays[:1], arrays[1:]) if counted else ((), arrays)
            outs = function(*count, *jax.tree.map(lambda a: a[0], arrays))
            return jax.tree.map(lambda a: a[None], outs)

        def run(*arrays: Tree) -> Tree:
            first = (P(),) if counted else ()
            specs = first + (P(AXIS),) * (len(arrays) - len(first))
            mapped = jax.shard_map(
                local, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False
            )
            return mapped(*arrays)

        # A loop takes its carry's memory and gives it back: a copy of it would be timed as well.
        return jax.jit(run, donate_argnums=(1,) if counted else ())

    def _looped(self, step: Step) -> Any:
        def run(count: jax.Array, carry: jax.Array, context: Tree) -> jax.Array:
            def calls(_: Any, carry: Tree) -> Tree:
                for _ in range(self.unroll):
                    carry = step(carry, context)
                return carry

            last: jax.Array = lax.fori_loop(0, count, calls, carry)
            return last

        return self.per_rank(run, counted=True)

    def programs(self, name: str, method: Exchange) -> list[_Program]:
        """The method's programs, compiled and run once; its round trip has been checked.

        Raises:
            ValueError: it brought wrong rows back.
        """
        self._say(name)
        x, ids, weights = self.inputs
        rows, state = self.per_rank(method.dispatch)(x, ids, weights)
        out = self.per_rank(method.combine)(rows, state, weights)
        far = self.per_rank(
            lambda a, b: jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))
        )(out, x)
        error = max(float(shard.data[0]) for shard in far.addressable_shards)
        if not _slowest(error if math.isfinite(error) else math.inf) < TOLERANCE:
            raise ValueError(f"its round trip gave other values than went in (by {error:.2g})")
        programs = []
        for operation, step in steps_of(method).items():
            carry, context = (
                (rows, (state, weights)) if operation == "combine" else (x, (ids, weights))
            )
            program = _Program(name, operation, self._looped(step), jnp.copy(carry), context)
            self.time(program)  # compiles
            programs.append(program)
        return programs

    def time(self, program: _Program) -> float:
        """Seconds of one run on this process; the processes start together."""
        _together()
        begin = time.perf_counter()
        carry = program.run(np.int32(program.count), program.carry, program.context)
        program.carry = jax.block_until_ready(carry)
        return time.perf_counter() - begin

    def _say(self, name: str) -> None:
        """Who is to blame if the job ends now, for the parent."""
        if jax.process_index() == 0:
            self._progress.write_text(name)


def _together() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("bench")


def _slowest(value: float) -> float:
    return float(np.max(multihost_utils.process_allgather(np.float64(value))))


def _calibrate(case: _Case, programs: list[_Program], repeats: int) -> int:
    """Sets each program's calls per sample; returns the number of rounds, alike on all ranks."""
    round_s = 0.0
    for program in programs:
        once = max(_slowest(case.time(program)), 1e-7)
        program.count = min(4, max(1, int(SAMPLE_S / once)))
        step_s = max(_slowest(case.time(program)) / program.count, 1e-7)
        program.count = max(1, min(MAX_CALLS, round(SAMPLE_S / step_s)))
        round_s += step_s * program.count
    return max(min(repeats, LEAST_ROUNDS), min(repeats, int(CASE_S / round_s)))


def _result(program: _Program, shape: Shape, unroll: int) -> dict[str, Any]:
    """Samples of the slowest process, and what follows from them."""
    mine = np.array(program.samples_us)
    slowest = np.max(np.atleast_2d(multihost_utils.process_allgather(mine)), axis=0)
    payload = shape.payload_bytes(jnp.dtype(shape.dtype).itemsize)
    low, median, high = np.percentile(slowest, (25, 50, 75))
    moved = OPERATIONS[program.operation] * payload
    return {
        "method": program.method,
        "operation": program.operation,
        "median_us": float(median),
        "q1_us": float(low),
        "q3_us": float(high),
        "samples": len(slowest),
        "calls_per_sample": program.count * unroll,
        "payload_bytes": moved,
        "payload_gb_per_s": moved / float(median) / 1e3,
        "samples_us": [round(float(us), 3) for us in slowest],
    }


def _measure(case: _Case, methods: dict[str, Exchange], options: dict[str, Any]) -> dict[str, Any]:
    missing: dict[str, str] = dict(options["missing"])
    programs = []
    for name, method in methods.items():
        if name in missing:
            continue
        try:
            programs += case.programs(name, method)
        except Exception as error:  # whatever it is, the others are to be measured
            lines = str(error).strip().splitlines() or [type(error).__name__]
            missing[name] = lines[0][:REASON_CHARS]
    case._say("")
    rounds = _calibrate(case, programs, options["repeats"])
    for index in range(rounds):
        start = index % len(programs) if programs else 0
        for program in programs[start:] + programs[:start]:
            seconds = case.time(program)
            program.samples_us.append(seconds / (program.count * case.unroll) * 1e6)
    return {
        "results": [_result(p, case.shape, case.unroll) for p in programs],
        "missing": [{"method": name, "reason": reason} for name, reason in missing.items()],
    }


def main() -> None:
    """Options and two paths come from the command line; process 0 writes the case's JSON."""
    options, path, progress = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    case = _Case(options, progress)
    without_native = ""
    try:
        group = jax_ep.create_group(case.mesh, AXIS, case.config(), implementation="native")
    except (RuntimeError, NotImplementedError) as error:
        without_native = str(error)
        group = jax_ep.create_group(case.mesh, AXIS, case.config(), implementation="xla")
    methods: dict[str, Exchange] = {OURS: _Ours(group, options["mode"])}
    methods |= {name: make(case.sizes()) for name, make in BASELINES.items()}
    measured = _measure(case, methods, options)
    if not any(missing["method"] == OURS for missing in measured["missing"]):
        group.check()
    group.close()
    if jax.process_index() == 0:
        shape = dataclasses.asdict(case.shape)
        record = {
            "shape": shape,
            "ranks": case.num_ranks,
            "processes": jax.process_count(),
            "platform": case.platform,
            "device": jax.devices()[0].device_kind,
            "implementation": "xla" if without_native else "native",
            "without_native": without_native,
            "remote_bytes_per_rank": case.remote_bytes(),
            **measured,
        }
        path.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
