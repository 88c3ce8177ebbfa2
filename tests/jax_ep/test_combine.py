"""What combine takes besides y: a Received, or a Plan and weights; weights that return."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import (
    Case,
    assert_same_bits,
    expert_outputs,
    group_of,
    inputs_of,
    more_sizes,
    param,
    per_rank,
    put,
    run,
)
from jax import lax

import jax_ep

Array = jax.Array
SMALL = Case(ranks=2, tokens=5, mode="ht")


def whole(group: jax_ep.Group, y: Array, *args: Any, **options: Any) -> Array:
    return jax_ep.combine(group, y, *args, **options)


def halves(group: jax_ep.Group, y: Array, *args: Any, **options: Any) -> Array:
    return jax_ep.combine_done(group, jax_ep.combine_start(group, y, *args, **options))


WAYS = [whole, halves]
Way = Callable[..., Array]


# combine(group, y, recv.plan) once forgot the router's weights without a word.
@pytest.mark.parametrize("way", WAYS)
def test_a_received_brings_its_weights(way: Way, implementation: str) -> None:
    group = group_of(SMALL, implementation)
    inputs = inputs_of(SMALL)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w)
        bare = jax_ep.dispatch(group, x, plan=recv.plan)
        return (
            (way(group, recv.x, recv), way(group, recv.x, recv.plan, recv.weights)),
            (way(group, recv.x, recv, weights=None), way(group, recv.x, bare)),
        )

    def said(x: Array, ids: Array, w: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w)
        twice = 2 * recv.weights
        return (
            (way(group, recv.x, recv, twice), way(group, recv.x, recv.plan, weights=twice)),
            (way(group, recv.x, recv, None), way(group, recv.x, recv.plan, weights=None)),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        weighted, plain = run(group, layer, inputs.x, inputs.ids, inputs.weights)
        twice, unweighted = run(group, said, inputs.x, inputs.ids, inputs.weights)
    for one, other in (weighted, plain, twice, unweighted, (plain[0], unweighted[0])):
        assert_same_bits(one, other)
    assert np.any(weighted[0] != plain[0])
    np.testing.assert_allclose(twice[0], 2 * weighted[0], rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_rank_major_rows_are_summed_by_the_caller(way: Way, implementation: str) -> None:
    case = Case(ranks=2, tokens=5, mode="ht", layout="rank_major")
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w, layout="rank_major")
        return way(group, recv.x, recv), way(group, recv.x, recv.plan, weights=None)

    assert_same_bits(*run(group, layer, inputs.x, inputs.ids, inputs.weights))


# There a plan alone is all that combine reads, so nothing is forgotten.
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_major_plan_needs_no_weights(way: Way) -> None:
    case = Case(ranks=2, tokens=5, layout="rank_major")
    group = group_of(case, "xla")
    inputs = inputs_of(case)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w, layout="rank_major")
        return way(group, recv.x, recv), way(group, recv.x, recv.plan)

    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert_same_bits(*run(group, layer, inputs.x, inputs.ids, inputs.weights))


@pytest.mark.parametrize("name", ["combine", "combine_start"])
def test_a_plan_without_weights_said_warns_at_the_callers_line(name: str) -> None:
    group = group_of(SMALL, "xla")
    inputs = inputs_of(SMALL)
    call = getattr(jax_ep, name)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w)
        done = (lambda got: got) if name == "combine" else lambda f: jax_ep.combine_done(group, f)
        silent = done(call(group, recv.x, recv.plan))
        keyword = done(call(group, recv.x, plan=recv.plan, weights=None))
        return silent, keyword, done(call(group, recv.x, recv, weights=None))

    with pytest.warns(DeprecationWarning) as caught:
        silent, keyword, said = run(group, layer, inputs.x, inputs.ids, inputs.weights)
    assert [warning.filename for warning in caught] == [__file__] * 2
    lines = [linecache.getline(__file__, warning.lineno).strip() for warning in caught]
    assert lines == [
        "silent = done(call(group, recv.x, recv.plan))",
        "keyword = done(call(group, recv.x, plan=recv.plan, weights=None))",
    ]
    left_out, named = (str(warning.message) for warning in caught)
    assert left_out.startswith(f"jax_ep.{name}: got a Plan and no weights=")
    assert "pass recv" in left_out and "weights=None" in left_out
    assert named.startswith(f"jax_ep.{name}: got plan=")
    assert_same_bits(silent, said)
    assert_same_bits(keyword, said)


RETURNED = [
    param(Case(ranks=4, tokens=9, recv_rows=12, mode="ht"), "zipf"),
    param(Case(ranks=4, tokens=9, mode="ll"), "holes"),
    param(Case(ranks=4, tokens=9, mode="ht", layout="expert_batched"), "repeated"),
    param(Case(ranks=4, tokens=9, mode="ll", layout="rank_major"), "repeated"),
    more_sizes(Case(ranks=4, tokens=9, mode="ht", node_size=2), "invalid"),
    more_sizes(Case(ranks=4, tokens=9, mode="ll", node_size=2), "uniform"),
    more_sizes(Case(ranks=2, tokens=9, mode="ht", layout="rank_major"), "holes"),
    more_sizes(Case(ranks=3, tokens=9, experts=6, mode="ll", dtype="bfloat16"), "uniform"),
    more_sizes(Case(ranks=2, tokens=0, max_tokens=4), "uniform"),
]


@pytest.mark.parametrize(("case", "routing"), RETURNED)
def test_weights_return_to_their_pairs(case: Case, routing: str, implementation: str) -> None:
    if case.node_size is not None and implementation == "xla":
        pytest.skip("the reference has one tree")
    group = group_of(case, implementation)
    inputs = inputs_of(case, routing)
    plans = oracle.plan(case.spec, inputs.ids, case.resolved_mode, case.layout)
    y = expert_outputs(case, plans)

    def layer(x: Array, ids: Array, w: Array, y: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w, mode=case.mode, layout=case.layout)
        y = y.reshape(recv.x.shape)
        alone = jax_ep.combine(group, y, recv)
        changed = recv.weights * 3 + 1
        options = {"weights": changed, "return_weights": True}
        return (
            alone,
            jax_ep.combine(group, y, recv, return_weights=True),
            jax_ep.combine(group, y, recv.plan, **options)[1],
        )

    args = (inputs.x, inputs.ids, inputs.weights, y)
    alone, (out, returned), changed = run(group, layer, *args)
    assert_same_bits(out, alone)
    kept = np.stack([plan.send_slot for plan in plans]) >= 0
    assert_same_bits(returned, np.where(kept, inputs.weights, np.float32(0)))
    assert_same_bits(changed, np.where(kept, inputs.weights * 3 + 1, np.float32(0)))


def test_poison_reaches_returned_weights(implementation: str) -> None:
    case = Case(tokens=16, recv_rows=16, overflow="poison")
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w)
        return jax_ep.combine(group, recv.x, recv, weights=w, return_weights=True)

    crowded = np.zeros_like(inputs.ids)  # rank 0 gets everything
    out, returned = run(group, layer, inputs.x, crowded, inputs.weights)
    assert np.all(np.isnan(out)) and np.all(np.isnan(returned))
    few = np.full_like(inputs.ids, -1)
    few[:, :2, 0] = 5
    out, returned = run(group, layer, inputs.x, few, inputs.weights)
    assert_same_bits(returned, np.where(few >= 0, inputs.weights, np.float32(0)))


@pytest.mark.parametrize("layout", ["expert_major", "expert_batched", "rank_major"])
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_gradients_of_returned_weights(layout: str, mode: str, implementation: str) -> None:
    case = Case(ranks=2, tokens=5, recv_rows=12, layout=layout, mode=mode)
    group = group_of(case, implementation)
    inputs = inputs_of(case, "zipf", 3)
    rng = np.random.default_rng(7)
    g_out, g_returned = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in (inputs.x.shape, inputs.weights.shape)
    )

    def layer(x: Array, ids: Array, w: Array, g_out: Array, g_returned: Array) -> Any:
        def with_returned(x: Array, w: Array, used: float) -> Array:
            recv = jax_ep.dispatch(group, x, ids, w, layout=layout, mode=mode)
            # Squared on the way, so that the gradient depends on what came back.
            recv_weights = recv.weights**2
            out, returned = jax_ep.combine(
                group, recv.x, recv, weights=recv_weights, return_weights=True
            )
            loss = jnp.sum(out * g_out) + used * jnp.sum(returned * g_returned)
            return lax.psum(loss, "ep")

        plan = jax_ep.plan(group, ids, layout=layout, mode=mode)
        both = jax.grad(with_returned, argnums=(0, 1))(x, w, 1.0)
        only_out = jax.grad(with_returned, argnums=(0, 1))(x, w, 0.0)
        return both, only_out, plan.send_slot

    args = (inputs.x, inputs.ids, inputs.weights, g_out, g_returned)
    (d_x, d_w), (plain_x, plain_w), slots = run(group, layer, *args)
    np.testing.assert_allclose(d_x, plain_x, rtol=1e-6)
    wanted = np.where(slots >= 0, 2 * inputs.weights * g_returned, 0)
    np.testing.assert_allclose(d_w - plain_w, wanted, rtol=1e-4, atol=1e-5)
    assert np.all(d_w[slots < 0] == 0)


def test_second_order_through_returned_weights(implementation: str) -> None:
    group = group_of(SMALL, implementation)
    inputs = inputs_of(SMALL)

    def layer(x: Array, ids: Array, w: Array) -> Array:
        def loss(w: Array) -> Array:
            recv = jax_ep.dispatch(group, x, ids, w)
            _, returned = jax_ep.combine(
                group, recv.x, recv, weights=recv.weights**2, return_weights=True
            )
            return lax.psum(jnp.sum(returned**2), "ep")  # sum of w^4

        return jax.grad(lambda w: lax.psum(jnp.sum(jax.grad(loss)(w) ** 2), "ep"))(w)

    got = run(group, layer, inputs.x, inputs.ids, inputs.weights)
    np.testing.assert_allclose(got, 96 * inputs.weights**5, rtol=1e-4)  # of sum (4 w^3)^2


def test_saving_out_saves_the_returned_weights(native: str) -> None:
    group = group_of(SMALL, native)
    inputs = inputs_of(SMALL)

    def combines(*names: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def body(x: Array, ids: Array, w: Array) -> Array:
            recv = jax_ep.dispatch(group, x, ids, w)
            out, returned = jax_ep.combine(group, recv.x, recv, return_weights=True)
            # The gradients of both need both: combine's results, not only its operands.
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(returned))

        def loss(x: Array, w: Array, ids: Array) -> Array:
            return jax.checkpoint(lambda x, w: body(x, ids, w), policy=policy)(x, w)

        def step(x: Array, ids: Array, w: Array) -> Any:
            return jax.value_and_grad(loss, argnums=(0, 1))(x, w, ids)

        args = put(group, (inputs.x, inputs.ids, inputs.weights))
        return per_rank(group, step).lower(*args).as_text().count("@jax_ep_combine(")

    assert combines("jax_ep_out") == combines() - 1


REFUSED = {
    "a plan": (
        lambda g, recv: jax_ep.combine(g, recv.x, recv.plan, weights=None, return_weights=True),
        "got return_weights=True without weights",
    ),
    "weights that nobody gave": (
        lambda g, recv: jax_ep.combine(
            g, recv.x, jax_ep.dispatch(g, recv.x[:5], plan=recv.plan), return_weights=True
        ),
        "got return_weights=True without weights",
    ),
    "neither": (lambda g, recv: jax_ep.combine(g, recv.x), "got recv of type NoneType"),
    "both": (
        lambda g, recv: jax_ep.combine(g, recv.x, recv, plan=recv.plan),
        "got both recv and plan",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_combine_refuses(what: str) -> None:
    call, message = REFUSED[what]
    group = group_of(SMALL, "xla")
    inputs = inputs_of(SMALL)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        return call(group, jax_ep.dispatch(group, x, ids, w))

    with pytest.raises(ValueError, match=message):
        run(group, layer, inputs.x, inputs.ids, inputs.weights)


def test_rank_major_weights_that_only_return_have_the_received_shape() -> None:
    case = Case(ranks=2, tokens=5, layout="rank_major")
    group = group_of(case, "xla")
    inputs = inputs_of(case)

    def layer(x: Array, ids: Array, w: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w, layout="rank_major")
        return jax_ep.combine(group, recv.x, recv, weights=w, return_weights=True)

    with pytest.raises(ValueError, match=r"got weights float32\[5, 2\], expected \[2, 5, 2\]"):
        per_rank(group, layer)(*put(group, (inputs.x, inputs.ids, inputs.weights)))
