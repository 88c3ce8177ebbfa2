"""plan, dispatch and combine against the NumPy oracle: moves bit for bit, sums at their bound."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import (
    Case,
    assert_plan,
    assert_same_bits,
    assert_sum,
    expert_outputs,
    group_of,
    inputs_of,
    more_sizes,
    param,
    per_rank,
    put,
    run,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_ep
from jax_ep._ops import planning
from jax_ep.testing import ROUTING_KINDS

FEW = ("uniform", "repeated")

# Together: every rank count, T, K, hidden, dtype, layout and mode of testing.md; one compile each.
CASES = [
    param(Case(ranks=2, tokens=128, hidden=136, dtype="bfloat16"), ROUTING_KINDS),
    param(Case(ranks=4, tokens=129, capacity_factor=1.0), ROUTING_KINDS),
    param(Case(ranks=4, tokens=129, layout="expert_batched", dtype="bfloat16"), ROUTING_KINDS),
    param(Case(ranks=8, tokens=7, experts=16, layout="rank_major", mode="ht"), ROUTING_KINDS),
    param(Case(tokens=1, top_k=8, hidden=2048, layout="expert_batched"), ROUTING_KINDS),
    param(Case(ranks=2, tokens=1, experts=64, hidden=7168, align=128, dtype="bfloat16"), FEW),
    more_sizes(Case(ranks=1, tokens=7, top_k=1, experts=3), ROUTING_KINDS),
    more_sizes(
        Case(ranks=3, tokens=7, hidden=136, experts=6, dtype="float16", mode="ht"), ROUTING_KINDS
    ),
    more_sizes(Case(ranks=8, tokens=128, top_k=8, experts=16, layout="rank_major"), ROUTING_KINDS),
    more_sizes(
        Case(ranks=8, tokens=1000, top_k=8, experts=16, capacity_factor=1.25, align=128), FEW
    ),
    more_sizes(
        Case(tokens=7, top_k=8, max_tokens=300, align=1, capacity_factor=0.5), ROUTING_KINDS
    ),
    more_sizes(Case(ranks=3, tokens=128, experts=9, layout="rank_major", dtype="float16"), FEW),
]


def everything(group: jax_ep.Group, case: Case, x: Any, ids: Any, w: Any, y: Any) -> dict[str, Any]:
    """One program with every way to call the ops."""
    options = {"mode": case.mode, "layout": case.layout}
    recv = jax_ep.dispatch(group, x, ids, w, **options)
    y = y.reshape(recv.x.shape)
    plan = jax_ep.plan(group, ids, **options)
    again = jax_ep.dispatch(group, x, plan=plan)
    started = jax_ep.dispatch_start(group, x, ids, w, **options)
    halves = jax_ep.dispatch_done(group, started)
    results = {
        "plan": plan,
        "recv": recv,
        "again": again.x,
        "halves": halves,
        "sum": jax_ep.combine(group, y, recv.plan, weights=None),
        "halves_sum": jax_ep.combine_done(
            group, jax_ep.combine_start(group, y, plan, weights=None)
        ),
    }
    if case.layout != "rank_major":
        results["weighted"] = jax_ep.combine(group, y, plan, weights=recv.weights)
        results["per_pair"] = jax_ep.combine(group, y, plan, weights=w)
        flight = jax_ep.combine_start(group, y, plan, weights=recv.weights)
        results["halves_weighted"] = jax_ep.combine_done(group, flight)
    return results


@functools.cache
def compiled(case: Case, implementation: str) -> Any:
    group = group_of(case, implementation)
    return per_rank(group, lambda *args: everything(group, case, *args))


def check_case(case: Case, implementation: str, ids: np.ndarray, seed: int = 0) -> None:
    """Runs `everything` on `ids` and compares every result with the oracle."""
    group = group_of(case, implementation)
    inputs = inputs_of(case, seed=seed)
    plans = oracle.plan(case.spec, ids, case.resolved_mode, case.layout)
    y = expert_outputs(case, plans, seed)
    args = put(group, (inputs.x, ids, inputs.weights, y))
    got = jax.device_get(compiled(case, implementation)(*args))

    rows, weights = oracle.dispatch(plans, inputs.x, inputs.weights)
    assert weights is not None
    for plan in (got["plan"], got["recv"].plan, got["halves"].plan):
        assert_plan(plan, plans)
    assert_same_bits(got["again"].reshape(y.shape), np.stack(rows))
    for recv in (got["recv"], got["halves"]):
        assert_same_bits(recv.x.reshape(y.shape), np.stack(rows))
        assert_same_bits(recv.weights, np.stack(weights))
        np.testing.assert_array_equal(recv.group_sizes, got["plan"].group_sizes)
    if case.layout == "rank_major":
        np.testing.assert_array_equal(got["recv"].topk_idx, got["plan"].recv_topk_idx)

    roundings = 3 if group.partials == "dtype" else 1
    for names, row_weights in (
        (("sum", "halves_sum"), None),
        (("weighted", "per_pair", "halves_weighted"), weights),
    ):
        if names[0] not in got:
            continue
        expected, magnitude = oracle.combine(plans, list(y), row_weights, case.tokens)
        assert_sum(got[names[0]], expected, magnitude, case.top_k, roundings)
        for name in names[1:]:
            assert_same_bits(got[name], got[names[0]], name)


@pytest.mark.parametrize(("case", "kinds"), CASES)
def test_every_result_equals_the_oracle(case: Case, kinds: Any, implementation: str) -> None:
    for seed, kind in enumerate(kinds):
        check_case(case, implementation, inputs_of(case, kind, seed).ids, seed)


@pytest.mark.parametrize("short_by", [more_sizes("nothing"), "one block", more_sizes("half")])
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_capacity_drops_the_same_pairs_as_the_oracle(
    short_by: str, mode: str, implementation: str
) -> None:
    sized = Case(tokens=40, top_k=2, experts=16, mode=mode)
    ids = inputs_of(sized, "zipf", 3).ids
    plans = oracle.plan(sized.spec, ids, mode, "expert_major")
    exact = max(int(plan.group_sizes.sum()) for plan in plans)
    rows = {"nothing": exact, "one block": exact - 4, "half": exact // 8 * 4}[short_by]
    case = Case(tokens=40, top_k=2, experts=16, mode=mode, recv_rows=rows)
    check_case(case, implementation, ids)
    dropped = sum(p.num_dropped for p in oracle.plan(case.spec, ids, mode, "expert_major"))
    assert (dropped == 0) == (short_by == "nothing")


@pytest.mark.parametrize(
    "layout", ["expert_major", more_sizes("expert_batched"), more_sizes("rank_major")]
)
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_no_tokens_is_a_legal_call(layout: str, mode: str, implementation: str) -> None:
    case = Case(ranks=2, tokens=0, max_tokens=4, layout=layout, mode=mode)
    check_case(case, implementation, np.zeros((2, 0, 2), np.int32))


def test_no_tokens_with_given_rows_is_all_padding(implementation: str) -> None:
    case = Case(ranks=2, tokens=0, max_tokens=4, recv_rows=16)
    check_case(case, implementation, np.zeros((2, 0, 2), np.int32))


@pytest.mark.parametrize("kind", ["uniform", "holes"])
def test_rounded_partials_stay_within_three_roundings(kind: str, implementation: str) -> None:
    case = Case(ranks=8, tokens=9, dtype="bfloat16", top_k=8, experts=16, partials="dtype")
    check_case(case, implementation, inputs_of(case, kind).ids)


def test_f32_partials_give_equal_bits_for_every_node_size(implementation: str) -> None:
    base = Case(
        ranks=8, tokens=9, dtype="bfloat16", top_k=8, experts=16, mode="ht", partials="float32"
    )
    ids = inputs_of(base, "holes").ids
    results = []
    # The reference has one tree; only the native path differs by node size.
    sizes = (None, 2) if implementation == "xla" else (None, 1, 2, 4)
    for node_size in sizes:
        if node_size is not None and base.ranks % node_size:
            continue  # on few GPUs
        case = Case(**{**base.__dict__, "node_size": node_size})
        group = group_of(case, implementation)
        inputs = inputs_of(case)

        def layer(x: Any, ids: Any, w: Any, group: jax_ep.Group = group) -> Any:
            recv = jax_ep.dispatch(group, x, ids, w, mode="ht")
            return jax_ep.combine(group, recv.x, recv)

        results.append(run(group, layer, inputs.x, ids, inputs.weights))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("overflow", ["drop", "poison"])
def test_moves_keep_every_bit_of_a_row(implementation: str, overflow: Any) -> None:
    case = Case(ranks=2, tokens=4, top_k=1, experts=2, dtype="bfloat16", overflow=overflow)
    group = group_of(case, implementation)
    pattern = np.arange(2 * 4 * 8, dtype=np.uint16) * 1021  # NaN payloads, -0.0, subnormals
    x = pattern.reshape(2, 4, 8).view(jnp.bfloat16)
    x[0, 0] = -0.0
    ids = np.arange(8, dtype=np.int32).reshape(2, 4, 1) % 2

    def rows(x: Any, ids: Any) -> Any:
        return jax_ep.dispatch(group, x, ids).x

    plans = oracle.plan(case.spec, ids, "ll", "expert_major")
    assert_same_bits(run(group, rows, x, ids), np.stack(oracle.dispatch(plans, x, None)[0]))


def test_absent_partials_do_not_turn_minus_zero_into_zero(implementation: str) -> None:
    case = Case(ranks=4, tokens=2, top_k=1, experts=4)
    group = group_of(case, implementation)
    x = np.full((case.ranks, 2, 8), -0.0, np.float32)
    ids = np.tile(np.array([[1], [-1]], np.int32), (case.ranks, 1, 1))

    def there_and_back(x: Any, ids: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, recv.x, recv)

    out = run(group, there_and_back, x, ids)
    assert np.all(np.signbit(out[:, 0])) and not np.any(np.signbit(out[:, 1]))


def test_poison_makes_results_nan_on_every_rank_only_after_an_overflow(implementation: str) -> None:
    case = Case(tokens=16, recv_rows=16, overflow="poison")
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def layer(x: Any, ids: Any, w: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w)
        out = jax_ep.combine(group, recv.x, recv)
        return recv.x, recv.weights, out, recv.plan.overflow

    step = per_rank(group, layer)
    crowded = np.zeros_like(inputs.ids)  # rank 0 gets everything
    *values, overflow = jax.device_get(step(*put(group, (inputs.x, crowded, inputs.weights))))
    assert np.all(overflow == 1) and all(np.all(np.isnan(value)) for value in values)
    few = np.full_like(inputs.ids, -1)
    few[:, :2, 0] = 5
    *values, overflow = jax.device_get(step(*put(group, (inputs.x, few, inputs.weights))))
    assert np.all(overflow == 0) and all(np.all(np.isfinite(value)) for value in values)


def test_ids_of_any_integer_type_mean_the_same(implementation: str) -> None:
    case = Case(ranks=2, tokens=7)
    group = group_of(case, implementation)
    ids = inputs_of(case, "uniform").ids
    plans = oracle.plan(case.spec, ids, "ll", "expert_major")
    for dtype in (np.uint8, np.uint32, jnp.int4, jnp.uint4):
        assert_plan(run(group, lambda i: jax_ep.plan(group, i), ids.astype(dtype)), plans)
    huge = ids.astype(np.uint32)
    huge[0, 0, 0] = 2**32 - 1  # would be -1, "absent", if it were just cast
    got = run(group, lambda i: jax_ep.plan(group, i), huge)
    assert got.num_dropped.sum() == 1


def test_wide_ids_of_numpy_are_out_of_range_whatever_jax_enables(implementation: str) -> None:
    """JAX makes int32 of a NumPy int64 array where jax_enable_x64 is off, which wraps."""
    group = group_of(Case(ranks=2, tokens=3), implementation)
    for dtype, out_of_range in ((np.int64, [2**32 + 1, 2**31]), (np.uint64, [2**64 - 1, 2**32])):
        ids = np.array([[0, 1], out_of_range, [2, 3]], dtype)
        if dtype == np.int64:
            ids[0, 1] = -(2**32) + 1  # absent
        got = run(group, lambda t, ids=ids: jax_ep.plan(group, ids), np.zeros((2, 1), np.int32))
        assert got.num_dropped.tolist() == [2, 2]
        assert got.pairs_per_expert.sum() == 2 * (3 if dtype == np.int64 else 4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_of_any_float_type_travel_as_f32(dtype: Any, implementation: str) -> None:
    case = Case(ranks=2, tokens=7)
    group = group_of(case, implementation)
    inputs = inputs_of(case)
    weights = inputs.weights.astype(dtype)
    plans = oracle.plan(case.spec, inputs.ids, "ll", "expert_major")

    def received(x: Any, i: Any, w: Any) -> Any:
        return jax_ep.dispatch(group, x, i, w).weights

    got = run(group, received, inputs.x, inputs.ids, weights)
    assert_same_bits(got, np.stack(oracle.dispatch(plans, inputs.x, weights)[1] or []))


DRAWN = [
    param(Case(ranks=4, tokens=5, top_k=3, recv_rows=12, mode="ht")),
    param(Case(ranks=4, tokens=5, top_k=3, recv_rows=8, mode="ll")),
    more_sizes(Case(ranks=4, tokens=5, top_k=3, layout="expert_batched", mode="ht")),
    more_sizes(Case(ranks=4, tokens=5, top_k=3, layout="rank_major", mode="ll")),
]


@pytest.mark.parametrize("case", DRAWN)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_routing_equals_the_oracle(case: Case, implementation: str, data: Any) -> None:
    skew = data.draw(st.sampled_from([10, 3, 1]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    ids = np.random.default_rng(seed).integers(-2, skew, (case.ranks, 5, 3)).astype(np.int32)
    check_case(case, implementation, ids)


FILL = jax.jit(planning.water_fill)  # sizes traced, so that all examples share one program


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    demand=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    rows=st.integers(0, 40),
    align=st.integers(1, 9),
)
def test_water_filling_equals_the_search(demand: list[int], rows: int, align: int) -> None:
    padded = demand + [0] * (9 - len(demand))  # one shape, one compilation
    got = FILL(jnp.array(padded, jnp.int32), jnp.int32(rows * align), jnp.int32(align))
    assert got.tolist() == oracle.zones(padded, rows * align, align)
