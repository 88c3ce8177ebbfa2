"""moe: its mode, a plan of the caller's, and its statistics."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import oracle
import pytest
from harness import Case, assert_same_bits, group_of, inputs_of, run
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ep

Array = jax.Array
CASE = Case(ranks=4, tokens=10, recv_rows=16, mode="ht")


def experts(kernels: Array, rows: Array, group_sizes: Array) -> Array:
    return lax.ragged_dot(rows, kernels, group_sizes)


def kernels_of(case: Case) -> np.ndarray:
    shape = (case.ranks, case.experts // case.ranks, case.hidden, case.hidden)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def moe(case: Case, implementation: str, **options: Any) -> Any:
    group = group_of(case, implementation)
    inputs = inputs_of(case, "zipf")

    def layer(x: Array, ids: Array, w: Array, kernels: Array) -> Any:
        return jax_ep.moe(group, x, ids, w, experts, kernels, **options)

    return run(group, layer, inputs.x, inputs.ids, inputs.weights, kernels_of(case))


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_stats_are_those_of_the_plans(chunks: int, implementation: str) -> None:
    out, stats = moe(CASE, implementation, chunks=chunks, return_stats=True)
    assert_same_bits(out, moe(CASE, implementation, chunks=chunks))
    ids = inputs_of(CASE, "zipf").ids
    size = -(-CASE.tokens // chunks)
    padding = ((0, 0), (0, size * chunks - CASE.tokens), (0, 0))
    padded = np.pad(ids, padding, constant_values=-1)
    plans = [
        oracle.plan(CASE.spec, padded[:, c * size : (c + 1) * size], "ht", "expert_major")
        for c in range(chunks)
    ]
    by_rank = list(zip(*plans, strict=True))
    counts = [sum(plan.pairs_per_expert for plan in mine) for mine in by_rank]
    dropped = [sum(plan.num_dropped for plan in mine) for mine in by_rank]
    assert sum(dropped) > 0
    np.testing.assert_array_equal(stats.pairs_per_expert, counts)
    np.testing.assert_array_equal(stats.num_dropped, dropped)
    np.testing.assert_array_equal(stats.overflow, 1)
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {np.dtype(np.int32)}


def test_stats_of_a_call_that_drops_nothing(implementation: str) -> None:
    case = Case(ranks=4, tokens=10)
    _, stats = moe(case, implementation, chunks=2, return_stats=True)
    assert np.all(stats.num_dropped == 0) and np.all(stats.overflow == 0)
    assert stats.pairs_per_expert.sum() == (inputs_of(case, "zipf").ids >= 0).sum()


def test_mode_reaches_the_operations(implementation: str) -> None:
    case = Case(ranks=4, tokens=10)
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def program(mode: Any) -> str:
        def layer(x: Array, ids: Array) -> Array:
            out = jax_ep.moe(group, x[0], ids[0], None, lambda _, rows, __: rows, None, mode=mode)
            return out[None]

        mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
        return str(jax.make_jaxpr(mapped)(inputs.x, inputs.ids))

    with pytest.raises(ValueError, match="got mode='fast'"):
        program("fast")
    assert program("ll") == program(None)
    assert program("ht") != program("ll")
    if implementation == "native":
        assert "target=jax_ep_plan" in program("ht")
        assert "target=jax_ep_ll_dispatch" in program("ll")


def test_a_plan_of_the_callers_is_followed(implementation: str) -> None:
    group = group_of(CASE, implementation)
    inputs = inputs_of(CASE, "zipf")

    def layer(x: Array, ids: Array, w: Array, kernels: Array) -> Any:
        plan = jax_ep.plan(group, ids)
        return jax_ep.moe(group, x, None, w, experts, kernels, plan=plan, return_stats=True)

    got = run(group, layer, inputs.x, inputs.ids, inputs.weights, kernels_of(CASE))
    wanted = moe(CASE, implementation, return_stats=True)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


REFUSED = {
    "chunks": ({"chunks": 2}, {}, "got a plan with chunks=2, expected chunks=1"),
    "layout": ({}, {"layout": "rank_major"}, "got a plan of layout='rank_major'"),
    "mode": ({"mode": "ll"}, {}, "got mode='ll' with a plan of mode='ht'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_plans_that_moe_refuses(what: str) -> None:
    options, of_plan, message = REFUSED[what]
    group = group_of(CASE, "xla")
    inputs = inputs_of(CASE)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        plan = jax_ep.plan(group, ids, mode="ht", **of_plan)
        return jax_ep.moe(group, x, None, w, experts, None, plan=plan, **options)

    with pytest.raises(ValueError, match=message):
        run(group, layer, inputs.x, inputs.ids, inputs.weights)


@pytest.mark.parametrize("chunks", [1, 2])
def test_neither_ids_nor_a_plan(chunks: int) -> None:
    group = group_of(CASE, "xla")

    def layer(x: Array) -> Any:
        return jax_ep.moe(group, x, None, None, experts, None, chunks=chunks)

    with pytest.raises(ValueError, match="got neither"):
        run(group, layer, inputs_of(CASE).x)


def test_more_chunks_than_tokens_are_as_many_as_tokens() -> None:
    case = Case(ranks=2, tokens=3)
    group = group_of(case, "xla")
    data = inputs_of(case)

    def layer(chunks: int) -> Any:
        def body(x: Any, ids: Any, w: Any) -> Any:
            return jax_ep.moe(group, x, ids, w, lambda _, rows, sizes: rows, None, chunks=chunks)

        return run(group, body, data.x, data.ids, data.weights)

    np.testing.assert_array_equal(layer(10**6), layer(3))
