"""`active` and `renormalize`: what is left out, what is counted, and masks that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from harness import (
    Case,
    assert_plan,
    assert_same_bits,
    assert_sum,
    inputs_of,
    keep,
    mesh_of,
    param,
    per_rank,
    put,
    run,
)
from jax import lax
from jax.sharding import Mesh
from test_placement import placed, placement_of

import jax_ep

Array = jax.Array
CASE = Case(ranks=4, tokens=6)
MASKS = ([1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0])


def elastic_group(case: Case, implementation: str) -> jax_ep.Group:
    config = dataclasses.replace(case.config(), elastic=True)
    group = jax_ep.create_group(mesh_of(case.ranks), "ep", config, implementation)
    keep(group)
    return group


@pytest.fixture(scope="module", params=["xla", "native"])
def group(request: pytest.FixtureRequest) -> Iterator[jax_ep.Group]:
    yield elastic_group(CASE, request.param)


def lost_pairs(case: Case, ids: np.ndarray, mask: list[int]) -> np.ndarray:
    per_rank = case.experts // case.ranks
    in_range = (ids >= 0) & (ids < case.experts)
    return in_range & (np.array(mask)[np.where(in_range, ids, 0) // per_rank] == 0)


def spread(mask: Any, ranks: int) -> np.ndarray:
    """The mask of each rank, equal on all."""
    return np.tile(np.asarray(mask, np.int32), (ranks, 1))


@pytest.mark.parametrize(
    ("layout", "mode"),
    [param("expert_major", "ht"), param("expert_batched", "ll"), param("rank_major", "ht")],
)
def test_plans_and_sums_are_the_oracles_with_the_mask(layout: Any, mode: Any) -> None:
    case = dataclasses.replace(CASE, layout=layout, mode=mode)
    group = elastic_group(case, "xla")
    inputs = inputs_of(case)
    inputs.ids[0, 0] = [-1, case.experts]  # absent and dropped: never unreachable

    def layer(x: Array, ids: Array, weights: Array, active: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, weights, mode=mode, layout=layout, active=active)
        weighted = recv.x if layout != "rank_major" else recv.x * 1
        return recv.plan, jax_ep.combine(group, weighted, recv)

    program = per_rank(group, layer)
    for mask in MASKS:
        args = (inputs.x, inputs.ids, inputs.weights, spread(mask, case.ranks))
        plan, out = jax.device_get(program(*put(group, args)))
        lost = lost_pairs(case, inputs.ids, mask)
        np.testing.assert_array_equal(plan.num_unreachable, lost.sum((1, 2)))
        plans = oracle.plan(case.spec, np.where(lost, -1, inputs.ids), mode, layout)
        assert_plan(plan, plans)
        rows, weights = oracle.dispatch(plans, inputs.x, inputs.weights)
        used = None if layout == "rank_major" else weights
        assert_sum(out, *oracle.combine(plans, rows, used, case.tokens), num_terms=case.top_k)
    assert program._cache_size() == 1  # a mask is data


@pytest.mark.parametrize("mode", ["ht", pytest.param("ll", marks=pytest.mark.ci)])
def test_replicas_on_active_ranks_serve_for_the_others(mode: Any) -> None:
    case = Case(ranks=4, tokens=7, experts=7, slots=12, top_k=3, mode=mode)
    group = elastic_group(case, "xla")

    def layer(placement: Any, x: Array, ids: Array, weights: Array, active: Array) -> Any:
        options: Any = {"active": active, "placement": placement, "mode": mode}
        recv = jax_ep.dispatch(group, x, ids, weights, **options)
        again = jax_ep.plan(group, ids, **options)
        return recv.plan, again, jax_ep.combine(group, recv.x, recv)

    run = placed(group, layer)
    for seed, mask in enumerate(MASKS):
        inputs, placement = inputs_of(case, "invalid", seed), placement_of(case, seed)
        where = placement.physical_to_logical.tolist()
        slots = oracle.place(where, case.experts, inputs.ids, mask)
        args = (inputs.x, inputs.ids, inputs.weights, spread(mask, case.ranks))
        plan, again, out = jax.device_get(run(placement, *args))
        lost = (inputs.ids >= 0) & (inputs.ids < case.experts) & (slots < 0)
        plans = oracle.plan(case.spec, slots, case.resolved_mode, case.layout)
        for each in (plan, again):
            np.testing.assert_array_equal(each.num_unreachable, lost.sum((1, 2)))
            assert_plan(each, plans)
        rows, weights = oracle.dispatch(plans, inputs.x, inputs.weights)
        assert_sum(out, *oracle.combine(plans, rows, weights, case.tokens), num_terms=case.top_k)
    assert run._cache_size() == 1


def test_every_dispatch_of_a_plan_keeps_its_count() -> None:
    case = dataclasses.replace(CASE, hidden=128)  # of which FP8 has blocks
    group = elastic_group(case, "xla")
    inputs = inputs_of(case)

    def layer(x: Array, ids: Array, active: Array) -> Any:
        plan = jax_ep.plan(group, ids, active=active)
        flight = jax_ep.dispatch_start(group, x, plan=plan)
        received = [
            jax_ep.dispatch(group, x, plan=plan),
            jax_ep.dispatch_done(group, flight),
            jax_ep.dispatch_quantized(group, x, plan=plan),
        ]
        return [recv.plan.num_unreachable for recv in received]

    counts = run(group, layer, inputs.x, inputs.ids, spread(MASKS[1], case.ranks))
    lost = lost_pairs(case, inputs.ids, MASKS[1]).sum((1, 2))
    assert lost.any()
    for count in counts:
        np.testing.assert_array_equal(count, lost)


def test_renormalize_keeps_the_sum_of_each_tokens_weights() -> None:
    group = elastic_group(CASE, "xla")
    inputs = inputs_of(CASE)

    def layer(x: Array, ids: Array, weights: Array, active: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, weights, active=active, renormalize=True)
        back = jax_ep.combine(group, recv.x, recv, return_weights=True)
        plain = jax_ep.dispatch(group, x, ids, weights)
        return back[1], jax_ep.combine(group, plain.x, plain, return_weights=True)[1]

    for mask in MASKS:
        got, before = run(
            group, layer, inputs.x, inputs.ids, inputs.weights, spread(mask, CASE.ranks)
        )
        lost = lost_pairs(CASE, inputs.ids, mask)
        whole, none = ~lost.any(-1), lost.all(-1)
        assert_same_bits(got[whole], before[whole])
        assert not got[lost].any()
        some = ~none
        np.testing.assert_allclose(got.sum(-1)[some], inputs.weights.sum(-1)[some], rtol=1e-6)
        ratio = inputs.weights.sum(-1) / np.maximum(np.where(lost, 0, inputs.weights).sum(-1), 1e-9)
        want = np.where(lost, 0, inputs.weights * ratio[..., None])
        np.testing.assert_allclose(got[some], want[some], rtol=1e-6)


def test_gradients_flow_through_what_was_reached() -> None:
    group = elastic_group(CASE, "xla")
    inputs = inputs_of(CASE)
    mask = MASKS[1]
    lost = lost_pairs(CASE, inputs.ids, mask)

    def loss(x: Array, ids: Array, weights: Array, active: Array | None) -> Array:
        recv = jax_ep.dispatch(group, x, ids, weights, active=active)
        return jax.numpy.sum(jax_ep.combine(group, recv.x * recv.x, recv))

    def gradients(x: Array, ids: Array, weights: Array, active: Array) -> Any:
        return jax.grad(loss, (0, 2))(x, ids, weights, active)

    def by_hand(x: Array, ids: Array, weights: Array, _: Array) -> Any:
        return jax.grad(loss, (0, 2))(x, ids, weights, None)

    active = spread(mask, CASE.ranks)
    got = run(group, gradients, inputs.x, inputs.ids, inputs.weights, active)
    ids = np.where(lost, -1, inputs.ids)
    for ours, theirs in zip(
        got, run(group, by_hand, inputs.x, ids, inputs.weights, active), strict=True
    ):
        assert_same_bits(ours, theirs)
    assert not got[1][lost].any() and got[1][~lost].all()


@pytest.mark.parametrize("chunks", [1, 2])
def test_moe_counts_what_it_could_not_reach(chunks: int) -> None:
    group = elastic_group(CASE, "xla")
    inputs = inputs_of(CASE)
    mask = MASKS[2]

    def layer(x: Array, ids: Array, weights: Array, active: Array) -> Any:
        def experts(_: Any, rows: Array, sizes: Array) -> Array:
            return rows

        options: Any = {"chunks": chunks, "return_stats": True}
        return jax_ep.moe(
            group, x, ids, weights, experts, None, active=active, renormalize=True, **options
        )

    out, stats = run(group, layer, inputs.x, inputs.ids, inputs.weights, spread(mask, CASE.ranks))
    lost = lost_pairs(CASE, inputs.ids, mask)
    np.testing.assert_array_equal(stats.num_unreachable, lost.sum((1, 2)))
    total = inputs.weights.sum(-1) * ~lost.all(-1)
    np.testing.assert_allclose(out, inputs.x * total[..., None], rtol=1e-5)


def test_with_all_ranks_nothing_changes(group: jax_ep.Group) -> None:
    inputs = inputs_of(CASE)

    def layer(x: Array, ids: Array, weights: Array, active: Array) -> Any:
        masked = jax_ep.dispatch(group, x, ids, weights, active=active, renormalize=True)
        plain = jax_ep.dispatch(group, x, ids, weights)
        return [jax_ep.combine(group, recv.x, recv) for recv in (masked, plain)]

    first, second = run(
        group, layer, inputs.x, inputs.ids, inputs.weights, spread([1] * 4, CASE.ranks)
    )
    assert_same_bits(first, second)


def test_bad_masks_are_refused(group: jax_ep.Group) -> None:
    inputs = inputs_of(CASE)

    def call(message: str, active: Any, **options: Any) -> None:
        def layer(x: Array, ids: Array, weights: Array) -> Any:
            given = {"topk_idx": ids, "topk_weights": weights} | options
            if given.pop("with_plan", False):
                made = jax_ep.plan(group, ids, active=np.ones(4, np.int32))
                given = {"plan": made}
            return jax_ep.dispatch(group, x, active=active, **given).x

        with pytest.raises(ValueError, match=message):
            run(group, layer, inputs.x, inputs.ids, inputs.weights)

    call(
        r"dispatch: got active int32\[3\], expected integers or bools \[N=4\]", np.int32([1, 1, 1])
    )
    call(r"got active float32\[4\], expected integers", np.ones(4, np.float32))
    call("got active with a plan, expected one of them", np.int32([1] * 4), with_plan=True)
    call("renormalize=True without active", None, renormalize=True)
    call(
        "renormalize=True without topk_weights",
        np.int32([1] * 4),
        renormalize=True,
        topk_weights=None,
    )
    with pytest.raises(
        ValueError, match=r"readmit: got rank 1, which takes part, .*\[1, 1, 1, 1\]"
    ):
        group.readmit(1)
    for no_rank in (4, -1, True, "x"):
        with pytest.raises(
            ValueError, match=r"readmit: got rank .*, expected one of the group's 4,"
        ):
            group.readmit(no_rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["native", "xla"])
def test_a_closed_group_says_so(kind: str) -> None:
    """readmit said that the rank takes part."""
    group = elastic_group(CASE, kind)
    group.close()
    for call in (group.agree, lambda: group.readmit(1)):
        with pytest.raises(RuntimeError, match="is closed; create a new one"):
            call()


def test_a_group_that_is_not_elastic_says_so() -> None:
    group = jax_ep.create_group(mesh_of(CASE.ranks), "ep", CASE.config(), "xla")
    keep(group)
    inputs = inputs_of(CASE)
    for call in (group.agree, lambda: group.readmit(0)):
        with pytest.raises(ValueError, match=r"expected Config\(elastic=True\)"):
            call()
    with pytest.raises(ValueError, match="got active for a group of"):
        run(
            group,
            lambda ids, a: jax_ep.plan(group, ids, active=a),
            inputs.ids,
            np.ones((4, 4), int),
        )
    np.testing.assert_array_equal(group.active, [1, 1, 1, 1])


@pytest.mark.parametrize("timeout_s", [-1, "x", float("nan"), True])
def test_what_is_no_time_to_wait_is_refused(group: jax_ep.Group, timeout_s: Any) -> None:
    for call in (group.agree, lambda limit: group.readmit(0, limit)):
        with pytest.raises(ValueError, match=r"got timeout_s=.*, expected seconds from 0"):
            call(timeout_s)


def test_agree_takes_no_time_in_which_nobody_can_come(group: jax_ep.Group) -> None:
    """With 0 it said that executions had not ended."""
    with pytest.raises(ValueError, match=r"agree: got timeout_s=0, expected seconds from 0.1 to"):
        group.agree(0)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int32, Fraction, int])
def test_every_real_number_is_a_time(group: jax_ep.Group, number: Any) -> None:
    """Of np.float32 it was a TypeError from inside threading."""
    np.testing.assert_array_equal(group.agree(number(2)), [1, 1, 1, 1])
    with pytest.raises(ValueError, match="takes part"):
        group.readmit(0, number(0))


def test_several_teams_are_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "ep"))
    config = dataclasses.replace(CASE.config(), elastic=True)
    with pytest.raises(NotImplementedError, match="several teams, expected all axes"):
        jax_ep.create_group(mesh, "ep", config, "native")
    with pytest.raises(ValueError, match=r"Config.elastic: got 1, expected True or False"):
        dataclasses.replace(CASE.config(), elastic=1)


def test_an_agreement_that_is_interrupted_ends_the_calls_until_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others were told that this process takes part in no further call: it is to hold here, too."""
    group = elastic_group(CASE, "native")
    inputs = inputs_of(CASE)

    def layer(x: Array, ids: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, recv.x, recv.plan, None)

    program = per_rank(group, layer)

    def call() -> Any:
        return jax.device_get(program(*put(group, (inputs.x, inputs.ids))))

    before = call()
    assert group._native is not None
    with monkeypatch.context() as patch:

        def interrupt(*_: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(group._native._elastic, "agree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            group.agree()
    told = "called agree, which has not ended well yet; if it has raised, call it again"
    with pytest.raises(RuntimeError, match=told):
        group.check()
    with pytest.raises((RuntimeError, ValueError), match=told):  # not that it is closed
        call()
    np.testing.assert_array_equal(group.agree(), [1, 1, 1, 1])
    np.testing.assert_array_equal(call(), before)


def test_a_mask_that_was_not_agreed_fails_the_call_and_the_next_agreement_repairs_it() -> None:
    group = elastic_group(CASE, "native")
    inputs = inputs_of(CASE)

    def layer(x: Array, ids: Array, active: Array) -> Any:
        recv = jax_ep.dispatch(group, x, ids, active=active)
        return jax_ep.combine(group, recv.x, recv.plan, None)

    program = per_rank(group, layer)

    def call(mask: list[int]) -> Any:
        args = (inputs.x, inputs.ids, spread(mask, CASE.ranks))
        return jax.device_get(program(*put(group, args)))

    before = call([1, 1, 1, 1])
    assert group.stats()["combines"] == 4
    with pytest.raises((RuntimeError, ValueError), match="got a mask without rank 3, with which"):
        call([1, 1, 1, 0])
    with pytest.raises(RuntimeError, match="got a mask without rank 3"):
        group.check()
    np.testing.assert_array_equal(group.agree(), [1, 1, 1, 1])
    group.check()
    assert_same_bits(call([1, 1, 1, 1]), before)
    assert group.stats()["combines"] == 4
    assert program._cache_size() == 1


def test_a_start_does_not_meet_a_done_after_an_agreement() -> None:
    group = elastic_group(CASE, "native")
    inputs = inputs_of(CASE)
    start = per_rank(group, lambda x, ids: jax_ep.dispatch_start(group, x, ids))
    done = per_rank(group, lambda flight: jax_ep.dispatch_done(group, flight).x)
    flight = jax_ep.wait(start(*put(group, (inputs.x, inputs.ids))))
    group.agree()
    newer = jax_ep.wait(start(*put(group, (inputs.x, inputs.ids))))
    with pytest.raises((RuntimeError, ValueError), match="before the newest"):
        jax_ep.wait(done(flight))
    del newer
    group.agree()
    jax_ep.wait(done(start(*put(group, (inputs.x, inputs.ids)))))


def test_ids_of_lost_experts_stay_negative_up_to_the_largest(group: jax_ep.Group) -> None:
    from jax_ep._ops import reachable

    ids = np.int32([[0, CASE.experts - 1]])
    lost = reachable.leave_out(group, "plan", ids, None, np.zeros(4, bool), None).ids
    np.testing.assert_array_equal(np.asarray(lost) - reachable.UNREACHABLE, ids)
    assert lax.lt(lost, np.int32(0)).all()


@pytest.mark.parametrize("mask", [[1, 0, 1, 1], pytest.param([0, 1, 0, 1], marks=pytest.mark.ci)])
def test_experts_move_and_gradients_sum_between_active_ranks(mask: list[int]) -> None:
    case = Case(ranks=4, tokens=7, experts=7, slots=12, top_k=3)
    group = elastic_group(case, "xla")

    def both(placements: Any, rows: Array, active: Array) -> Any:
        old, new = placements
        moved = jax_ep.eplb.move(group, rows, old, new, active)
        return moved, jax_ep.eplb.reduce_gradients(group, rows, old, active)

    program = placed(group, both)
    on = np.repeat(np.array(mask, bool), 3)  # slots of active ranks
    for seed in range(3):
        old, new = placement_of(case, seed), placement_of(case, seed + 10)
        rows = np.arange(12, dtype=np.float32).reshape(4, 3, 1) + 1
        out = program((old, new), rows, spread(mask, case.ranks))
        moved, summed = (np.asarray(each).reshape(12) for each in jax.device_get(out))
        expert, wanted = np.asarray(old.physical_to_logical), np.asarray(new.physical_to_logical)
        for slot in range(12):
            own = slot + 1
            sources = np.flatnonzero((expert == wanted[slot]) & on) + 1
            if on[slot] and sources.size:
                assert moved[slot] in sources
            else:  # what nobody can send, or nobody waits for
                assert moved[slot] == own
            replicas = np.flatnonzero((expert == expert[slot]) & on) + 1
            assert summed[slot] == (replicas.sum() if on[slot] else own)
    assert program._cache_size() == 1
