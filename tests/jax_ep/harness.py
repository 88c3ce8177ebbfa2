"""Shared by the op tests: cached groups, inputs, and per-rank runs of a function in shard_map."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.testing import make_routing, sum_tolerance


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one compiled case; routing is data and does not recompile.

    On GPUs there are as many ranks as there can be, if that is fewer than a case asks for.
    """

    ranks: int = 4
    tokens: int = 7
    top_k: int = 2
    hidden: int = 8
    experts: int = 8
    dtype: str = "float32"
    layout: str = "expert_major"
    mode: str | None = None
    align: int = 4
    recv_rows: int | None = None
    capacity_factor: float | None = None
    max_tokens: int | None = None
    overflow: str = "drop"
    partials: str | None = None
    node_size: int | None = None
    slots: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if jax.default_backend() != "gpu":
            return
        possible = [
            n for n in range(1, len(jax.devices()) + 1) if (self.slots or self.experts) % n == 0
        ]
        object.__setattr__(self, "ranks", min(self.ranks, max(possible)))

    def __str__(self) -> str:
        given = dataclasses.asdict(self)
        default = dataclasses.asdict(Case())
        shown = {k: v for k, v in given.items() if v != default[k]}
        return "-".join(f"{k}={v}" for k, v in shown.items()) or "default"

    @property
    def spec(self) -> oracle.Spec:
        return oracle.Spec(
            num_ranks=self.ranks,
            num_experts=self.slots or self.experts,
            top_k=self.top_k,
            max_tokens=self.limit,
            align=self.align,
            recv_rows=self.recv_rows,
            capacity_factor=self.capacity_factor,
        )

    @property
    def limit(self) -> int:
        return self.tokens if self.max_tokens is None else self.max_tokens

    @property
    def resolved_mode(self) -> str:
        return self.mode or ("ll" if self.tokens <= 128 else "ht")

    def config(self) -> jax_ep.Config:
        return jax_ep.Config(
            num_experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=self.limit,
            recv_rows=self.recv_rows,
            capacity_factor=self.capacity_factor,
            overflow=self.overflow,
            align=self.align,
            dtype=jnp.dtype(self.dtype),
            partials=self.partials,
            node_size=self.node_size,
            physical_experts=self.slots,
            batch_invariant=self.batch_invariant,
            timeout_s=60.0,
            max_in_flight=4,  # XLA may put independent starts before the first done
        )


def param(*values: Any, marks: Any = ()) -> Any:
    """A case for pytest, named by all values but tuples."""
    name = "-".join(str(value) for value in values if not isinstance(value, tuple))
    return pytest.param(*values, id=name, marks=marks)


def more_sizes(*values: Any) -> Any:
    """One more size of a test: on GPUs it needs --all-sizes."""
    return param(*values, marks=pytest.mark.more_sizes)


@functools.cache
def mesh_of(ranks: int, axis_type: str = "Auto") -> Mesh:
    if ranks > len(jax.devices()):
        pytest.skip(f"needs {ranks} devices, {jax.default_backend()} has {len(jax.devices())}")
    kind = getattr(jax.sharding.AxisType, axis_type)
    return Mesh(np.array(jax.devices()[:ranks]), ("ep",), axis_types=(kind,))


_groups: list[jax_ep.Group] = []


@functools.cache
def group_of(case: Case, implementation: str) -> jax_ep.Group:
    group = jax_ep.create_group(mesh_of(case.ranks), "ep", case.config(), implementation)
    keep(group)
    return group


def keep(group: jax_ep.Group) -> None:
    """Closes `group` at the end of the test module."""
    _groups.append(group)


def close_groups() -> None:
    """Gives memory back between modules; later tests make their groups anew."""
    group_of.cache_clear()
    while _groups:
        _groups.pop().close()


def per_rank(
    group: jax_ep.Group, function: Callable[..., Any], *, check_vma: bool = True
) -> Callable[..., Any]:
    """Jits `function`, which takes and returns local arrays, as one over arrays [N, ...]."""

    def local(*args: Any) -> Any:
        outs = function(*jax.tree.map(lambda a: a[0], args))
        return jax.tree.map(lambda a: a[None], outs)

    mapped = jax.shard_map(
        local,
        mesh=group.mesh,
        in_specs=P(group.axes),
        out_specs=P(group.axes),
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def put(group: jax_ep.Group, tree: Any) -> Any:
    """Arrays [N, ...] on their ranks."""
    sharding = NamedSharding(group.mesh, P(group.axes))
    return jax.tree.map(lambda a: jax.device_put(a, sharding), tree)


def run(group: jax_ep.Group, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs `function` on every rank; NumPy results [N, ...]."""
    return jax.device_get(per_rank(group, function, **options)(*put(group, args)))


def eventually(check: Callable[[], None], limit_s: float = 20.0) -> None:
    """Calls `check` until it raises no AssertionError any more.

    For the counters of proxies: their threads may send and count when a call has ended, since
    nobody waits for the last signals of a call but a later one.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


@dataclasses.dataclass
class Inputs:
    """Global inputs of a case: ids and weights [N, T, K], x [N, T, H]."""

    ids: np.ndarray
    weights: np.ndarray
    x: np.ndarray


def inputs_of(case: Case, routing: str = "uniform", seed: int = 0) -> Inputs:
    rng = np.random.default_rng([seed, 17])
    shape = (case.ranks, case.tokens)
    ids = make_routing(
        routing,
        num_ranks=case.ranks,
        num_tokens=case.tokens,
        top_k=case.top_k,
        num_experts=case.experts,
        seed=seed,
    ).reshape(*shape, case.top_k)
    x = rng.standard_normal((*shape, case.hidden)).astype(case.dtype)
    return Inputs(ids, rng.uniform(0.1, 1, (*shape, case.top_k)).astype(np.float32), x)


def expert_outputs(case: Case, plans: list[oracle.RankPlan], seed: int = 1) -> np.ndarray:
    """Random y [N, R, H] with NaN in every row that no pair uses."""
    rng = np.random.default_rng([seed, 23])
    rows = case.spec.rows(case.layout, case.tokens)
    y = rng.standard_normal((case.ranks, rows, case.hidden)).astype(case.dtype)
    for rank, rank_plan in enumerate(plans):
        y[rank, rank_plan.recv_src < 0] = np.nan
    return y


def bits(array: Any) -> np.ndarray:
    """The raw bits, so that comparison sees NaN payloads and the sign of zero."""
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(got: Any, expected: Any, what: str = "") -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, what
    np.testing.assert_array_equal(bits(got), bits(expected), err_msg=what)


def assert_sum(
    got: Any, expected: np.ndarray, magnitude: np.ndarray, num_terms: int, roundings: int = 1
) -> None:
    """`got` is within the rounding bound of the float64 sum."""
    dtype = np.asarray(got).dtype
    bound = roundings * sum_tolerance(dtype, num_terms) * magnitude
    bound += 2.0**-24 if dtype == np.float16 else 2.0**-126  # half the smallest subnormal, or tiny
    error = np.abs(np.asarray(got, np.float64) - expected)
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert np.all(error <= bound), (
        f"at {worst}: got {np.asarray(got)[worst]}, expected {expected[worst]} "
        f"within {bound[worst]}"
    )


def assert_plan(plan: jax_ep.Plan, expected: list[oracle.RankPlan]) -> None:
    """Every field of a plan [N, ...] equals the oracle's."""
    for field in (
        "group_sizes",
        "pairs_per_expert",
        "send_slot",
        "recv_src",
        "send_counts",
        "recv_counts",
        "num_dropped",
        "overflow",
    ):
        wanted = np.stack([np.asarray(getattr(p, field)) for p in expected])
        got = getattr(plan, field)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, wanted, err_msg=field)
    if expected[0].recv_topk_idx is None:
        assert plan.recv_topk_idx is None
    else:
        wanted = np.stack([p.recv_topk_idx for p in expected])
        np.testing.assert_array_equal(plan.recv_topk_idx, wanted)
