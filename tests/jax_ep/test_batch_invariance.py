"""A row's bits do not depend on its batch mates, T, the ranks of a node, or who served it.

Experts here are elementwise, so that no product of XLA's is in the way: what is promised is what
jax_ep does (docs/placement.md).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, assert_same_bits, group_of
from test_placement import placed, placement_of

import jax_ep

# 3 experts of 11 for each token, so that the order of additions shows.
CASE = Case(
    ranks=4,
    tokens=6,
    max_tokens=24,
    experts=11,
    slots=16,
    top_k=3,
    hidden=16,
    dtype="float32",
    mode="ht",
    partials="float32",
    batch_invariant=True,
)
PLAIN = dataclasses.replace(CASE, batch_invariant=False)
NO_REPLICAS = dataclasses.replace(PLAIN, experts=12, slots=None)


def in_ci(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.ci)


SCALES = np.linspace(0.3, 1.7, 12).astype(np.float32)


@functools.cache
def layer(case: Case, implementation: str) -> Any:
    """x, ids, weights -> out, per rank; expert e multiplies by SCALES[e]."""
    group = group_of(dataclasses.replace(case, tokens=0), implementation)

    def local(placement: Any, x: Any, ids: Any, w: Any, scales: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w, mode=case.mode, placement=placement)
        ends = jnp.cumsum(recv.group_sizes)
        slot = jnp.searchsorted(ends, jnp.arange(recv.x.shape[0]), side="right")
        of_row = scales[jnp.minimum(slot, scales.size - 1)][:, None].astype(recv.x.dtype)
        return jax_ep.combine(group, recv.x * of_row, recv)

    return placed(group, local)


def run(
    case: Case, implementation: str, placement: jax_ep.Placement, x: Any, ids: Any, w: Any
) -> np.ndarray:
    scales = SCALES[placement.physical_to_logical].reshape(case.ranks, -1)
    return np.asarray(layer(case, implementation)(placement, x.astype(case.dtype), ids, w, scales))


def batch(seed: int, tokens: int = CASE.tokens, ranks: int = CASE.ranks) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng([seed, 3])
    shape = (ranks, tokens)
    chosen = rng.random((*shape, CASE.experts)).argsort(-1)[..., : CASE.top_k].astype(np.int32)
    x = rng.standard_normal((*shape, CASE.hidden)).astype(np.float32)
    return x, chosen, rng.uniform(0.1, 1, chosen.shape).astype(np.float32)


def insert(into: tuple[Any, Any, Any], rows: tuple[Any, Any, Any], at: Any) -> Any:
    """A batch `into` with the rows `at` (ranks, tokens) replaced by those of one token each."""
    result = tuple(array.copy() for array in into)
    for array, row in zip(result, rows, strict=True):
        array[at] = row
    return result


TRACKED = (1, 2)  # rank and token of the row that is watched


@pytest.mark.parametrize(
    ("case", "mode"), [(CASE, "ll"), (PLAIN, "ht"), in_ci(CASE, "ht"), in_ci(PLAIN, "ll")]
)
def test_batch_mates_do_not_change_a_row(case: Case, mode: Any, implementation: str) -> None:
    case = dataclasses.replace(case, mode=mode)
    placement = placement_of(case, 1)
    row = tuple(array[TRACKED] for array in batch(0))
    wanted = run(case, implementation, placement, *batch(0))[TRACKED]
    for seed in (1, 2):
        mates = insert(batch(seed), row, TRACKED)
        mates[1][3] = mates[1][0]  # hot experts
        if seed == 2:
            mates[1][0] = -1  # a rank without tokens
        assert_same_bits(run(case, implementation, placement, *mates)[TRACKED], wanted)


@pytest.mark.parametrize(
    ("case", "mode"),
    [(CASE, "ht"), in_ci(CASE, "ll"), in_ci(NO_REPLICAS, "ht"), in_ci(NO_REPLICAS, "ll")],
)
def test_neither_t_nor_the_place_in_the_batch_changes_a_row(
    case: Case, mode: Any, implementation: str
) -> None:
    """Another T and another place choose other replicas, where there are any."""
    case = dataclasses.replace(case, mode=mode)
    placement = placement_of(case, 1)
    row = tuple(array[TRACKED] for array in batch(0))
    wanted = run(case, implementation, placement, *batch(0))[TRACKED]
    for tokens, at in ((1, (0, 0)), (24, (3, 17))):
        mates = insert(batch(5, tokens), row, at)
        assert_same_bits(run(case, implementation, placement, *mates)[at], wanted)


@pytest.mark.parametrize("mode", [in_ci("ht"), "ll"])
def test_neither_placement_nor_replica_changes_a_row(mode: Any, implementation: str) -> None:
    case = dataclasses.replace(CASE, mode=mode)
    wanted = run(case, implementation, jax_ep.Placement.identity(11, 16), *batch(0))
    served = set()
    for seed in range(4):
        placement = placement_of(case, seed)
        assert_same_bits(run(case, implementation, placement, *batch(0)), wanted)
        served.add(placement.logical_to_physical[batch(0)[1][TRACKED], 0].tobytes())
    assert len(served) > 1


def test_without_by_slot_the_placement_does_change_bits(implementation: str) -> None:
    """If this fails, `Config.batch_invariant` takes top_k exchanges for nothing."""
    outs = [run(PLAIN, implementation, placement_of(CASE, seed), *batch(0)) for seed in range(4)]
    assert any(not np.array_equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize(
    ("case", "mode"), [(PLAIN, "ht"), in_ci(PLAIN, "ll"), (CASE, "ll"), in_ci(CASE, "ht")]
)
def test_ranks_of_a_node_do_not_change_a_row(native: str, case: Case, mode: Any) -> None:
    placement, results = placement_of(case, 2), []
    for node_size in (None, 1, 2):
        sized = dataclasses.replace(case, node_size=node_size, mode=mode)
        results.append(run(sized, native, placement, *batch(0)))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_the_number_of_ranks_does_not_change_a_row(implementation: str) -> None:
    """The same 24 tokens on 4 ranks, and on 2."""
    wanted = run(CASE, implementation, placement_of(CASE, 0), *batch(0))
    two = dataclasses.replace(CASE, ranks=2)
    arrays = [a.reshape(2, 12, *a.shape[2:]) for a in batch(0)]
    got = run(two, implementation, placement_of(two, 3), *arrays)
    assert_same_bits(got.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("mode", [in_ci("ht"), "ll"])
def test_layouts_give_the_same_bits(mode: Any, implementation: str) -> None:
    group, placement = group_of(CASE, implementation), placement_of(CASE, 0)

    def step(placement: Any, x: Any, ids: Any, w: Any) -> Any:
        def loss(x: Any, layout: Any) -> Any:
            recv = jax_ep.dispatch(group, x, ids, w, mode=mode, layout=layout, placement=placement)
            out = jax_ep.combine(group, recv.x, recv)
            return jnp.sum(out**2), out

        return [jax.grad(loss, has_aux=True)(x, to) for to in ("expert_major", "expert_batched")]

    wanted, got = jax.device_get(placed(group, step)(placement, *batch(0)))
    assert_same_bits(got[1], wanted[1])
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [in_ci("float32"), "bfloat16"])
def test_implementations_and_partials_give_the_same_bits(native: str, dtype: str) -> None:
    placement = placement_of(CASE, 0)
    for mode, partials in (("ht", "dtype"), ("ll", "float32")):
        case = dataclasses.replace(CASE, mode=mode, partials=partials, dtype=dtype)
        outs = [run(case, name, placement, *batch(0)) for name in ("xla", native)]
        assert_same_bits(outs[1], outs[0])
