"""Group.view: layers of other sizes through one group's memory and connections."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from harness import (
    Case,
    assert_plan,
    assert_same_bits,
    expert_outputs,
    group_of,
    inputs_of,
    keep,
    mesh_of,
    per_rank,
    put,
    run,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ep

# The group has room for more of everything than the layers below.
WHOLE = Case(ranks=4, tokens=9, top_k=4, hidden=40, experts=16, align=4)
NODES = dataclasses.replace(WHOLE, node_size=2)

SMALLER = {"top_k": 3, "hidden": 10, "experts": 8, "align": 2}
LAYERS = [
    pytest.param(SMALLER, id="smaller"),
    pytest.param({"top_k": 1, "align": 16, "capacity_factor": 0.7}, id="with drops"),
]


def view_of(whole: Case, layer: dict[str, Any], implementation: str | None) -> jax_ep.Group:
    names = {"experts": "num_experts"}
    return group_of(whole, implementation).view(**{names.get(k, k): v for k, v in layer.items()})


def both_ways(group: jax_ep.Group, case: Case, mode: str, layout: str) -> Any:
    """Dispatch, combine and the gradients of both, per rank."""
    data = inputs_of(case, "zipf")

    def body(x: Any, ids: Any, weights: Any) -> Any:
        def loss(x: Any, weights: Any) -> Any:
            recv = jax_ep.dispatch(group, x, ids, weights, mode=mode, layout=layout)
            row_weights = None if layout == "rank_major" else recv.weights
            out = jax_ep.combine(group, recv.x * 0.5, recv.plan, weights=row_weights)
            return lax.psum((out**2).sum(), "ep"), (recv, out)

        (_, (recv, out)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
        return recv, out, grads

    return run(group, body, data.x, data.ids, data.weights)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("whole", "way"),
    [(WHOLE, None), (NODES, None), (WHOLE, "xla")],
    ids=["one node", "two nodes", "xla"],
)
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_a_view_is_the_group_of_its_sizes(
    whole: Case, way: str | None, layer: dict[str, Any], mode: str
) -> None:
    """Plans equal the oracle's, everything that of a group made for these sizes."""
    case = dataclasses.replace(whole, **layer)
    data = inputs_of(case, "zipf")
    view = view_of(whole, layer, way)
    for layout in ("expert_major", "expert_batched", "rank_major"):
        got = both_ways(view, case, mode, layout)
        expected = both_ways(group_of(case, way), case, mode, layout)
        assert_plan(got[0].plan, oracle.plan(case.spec, data.ids, layout=layout, mode=mode))
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for ours, reference in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(ours, reference)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_a_view_in_two_teams_rematerialised(mode: str, tokens: int) -> None:
    """Also without tokens. The scale is a second operand: XLA refuses a program without any."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    config = dataclasses.replace(WHOLE, tokens=5).config()
    group = jax_ep.create_group(jax.sharding.Mesh(devices, ("dp", "ep")), "ep", config)
    keep(group)
    view = group.view(num_experts=4, top_k=2, hidden=8, align=1)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4 * tokens, 8)).astype(np.float32)
    ids = rng.integers(0, 4, (4 * tokens, 2)).astype(np.int32)

    def local(x: Any, ids: Any, scale: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any) -> Any:
            recv = jax_ep.dispatch(view, x, ids, mode=mode)
            return jax_ep.combine(view, recv.x * scale[0], recv.plan, weights=None)

        return jax.grad(lambda x: (layer(x) ** 2).sum())(x)

    spec = P(("dp", "ep"))
    mapped = jax.shard_map(local, mesh=group.mesh, in_specs=(spec, spec, P()), out_specs=spec)
    got = jax.jit(mapped)(x, ids, np.full(1, 3.0, np.float32))
    np.testing.assert_allclose(got, 2 * (2 * 3) ** 2 * x, rtol=1e-5)  # two experts, each times 3


def test_layers_of_many_sizes_alternate_in_one_program() -> None:
    """Whole calls of one view between the halves of another, and of the group itself."""
    group = group_of(NODES, None)
    view = view_of(NODES, SMALLER, None)
    small_case = dataclasses.replace(NODES, **SMALLER)
    large, small = inputs_of(NODES), inputs_of(small_case)

    def alone(of: jax_ep.Group) -> Any:
        def body(x: Any, ids: Any) -> Any:
            recv = jax_ep.dispatch(of, x, ids, mode="ht")
            return recv.x, jax_ep.combine(of, recv.x, recv.plan, weights=None)

        return body

    def mixed(x: Any, ids: Any, small_x: Any, small_ids: Any) -> Any:
        first = jax_ep.dispatch_start(group, x, ids, mode="ht")
        second = jax_ep.dispatch_start(view, small_x, small_ids, mode="ht")
        whole_call = alone(view)(small_x, small_ids)
        small_recv = jax_ep.dispatch_done(view, second)
        small_flight = jax_ep.combine_start(view, small_recv.x, small_recv.plan, weights=None)
        recv = jax_ep.dispatch_done(group, first)
        flight = jax_ep.combine_start(group, recv.x, recv.plan, weights=None)
        small_out = jax_ep.combine_done(view, small_flight)
        out = jax_ep.combine_done(group, flight)
        return (recv.x, out), (small_recv.x, small_out), whole_call

    expected = run(group, alone(group), large.x, large.ids)
    small_expected = run(view, alone(view), small.x, small.ids)
    program = per_rank(group, mixed)
    arrays = put(group, (large.x, large.ids, small.x, small.ids))
    for _ in range(20):
        got = jax.device_get(program(*arrays))
        for ours, wanted in zip(got, (expected, small_expected, small_expected), strict=True):
            for array, reference in zip(ours, wanted, strict=True):
                assert_same_bits(array, reference)


def test_dropped_pairs_and_poison_are_the_views_own() -> None:
    case = dataclasses.replace(WHOLE, recv_rows=8)
    data = inputs_of(case, "zipf")
    y = expert_outputs(case, oracle.plan(case.spec, data.ids, layout="expert_major", mode="ht"))
    for overflow in ("drop", "poison"):
        view = group_of(WHOLE, None).view(recv_rows=8, overflow=overflow)

        def body(ids: Any, y: Any, view: jax_ep.Group = view) -> Any:
            plan = jax_ep.plan(view, ids, mode="ht")
            return plan.num_dropped, jax_ep.combine(view, y, plan, weights=None)

        dropped, out = run(view, body, data.ids, y)
        assert dropped.sum() > 0
        assert np.isnan(out).all() == (overflow == "poison")


def test_a_view_shares_memory_life_and_counters() -> None:
    group = jax_ep.create_group(
        jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",)),
        "ep",
        jax_ep.Config(num_experts=4, top_k=2, hidden=8, max_tokens=4, dtype="float32"),
    )
    view = group.view(top_k=1).view(hidden=4)
    assert (view.config.top_k, view.config.hidden, view.config.num_experts) == (1, 4, 4)
    assert "top_k=1, hidden=4" in repr(view) and ", view)" in repr(view)
    assert "view" not in repr(group)
    assert view.heap_bytes == group.heap_bytes > 0
    assert view.memory().heap_bytes == group.memory().heap_bytes == group.heap_bytes // 2
    assert view.memory().expert_major.recv_bytes * 2 == group.memory().expert_major.recv_bytes
    assert view.session_id == group.session_id
    run(
        view,
        lambda x, ids: jax_ep.dispatch(view, x, ids).x,
        np.ones((2, 4, 4), np.float32),
        np.zeros((2, 4, 1), np.int32),
    )
    assert view.stats() == group.stats()
    assert sum(rank["dispatches"] for rank in group.stats()["ranks"]) == 2
    view.close()
    assert view.closed and group.closed and group.heap_bytes == 0
    for closed in (group, view):  # one that nobody could use was made
        with pytest.raises(RuntimeError, match=r"^group ep.* is closed; create a new one$"):
            closed.view(top_k=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"top_k": 5}, "top_k=5, expected at most 4"),
        ({"hidden": 41}, "hidden=41, expected at most 40"),
        ({"num_experts": 32}, "num_experts=32, expected at most 16"),
        ({"num_experts": 6}, "num_experts=6, expected a multiple of the group's 4 ranks.*; use 8"),
        ({"num_experts": 2, "top_k": 3}, "top_k: got 3, expected at most num_experts=2"),
        ({"align": 0}, "align: got 0, expected an int of at least 1"),
        ({"recv_rows": 9}, "recv_rows: got 9, expected a multiple of align=4"),
        ({"max_tokens": 4}, "max_tokens=4, expected some of num_experts.*another max_tokens"),
        ({"topk": 4}, "topk=4, expected some of num_experts.*correct the name"),
        ({"align": 2**30}, r"num_ranks \* recv_rows = \d+, expected at most 2147483647"),
    ],
)
@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_sizes_without_room_are_refused(
    sizes: dict[str, Any], message: str, implementation: str
) -> None:
    group = group_of(WHOLE, implementation)
    gc.disable()  # all that is made until it is enabled stays young
    try:
        with pytest.raises(ValueError, match=message):
            group.view(**sizes)
        gc.collect(0)  # what was begun must not look like a group that was dropped
    finally:
        gc.enable()


def test_rows_that_the_groups_wire_does_not_fit_are_refused() -> None:
    config = dataclasses.replace(WHOLE.config(), hidden=64, wire=jax_ep.FP8(block=32))
    group = jax_ep.create_group(mesh_of(4), "ep", config, "xla")
    keep(group)
    with pytest.raises(ValueError, match=r"view: got hidden=16 .* divides hidden=16.* hidden that"):
        group.view(hidden=16)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_experts": 8},
        {"top_k": 2},
        {"hidden": 8},
        {"align": 8},
        {"recv_rows": 16},
        {"overflow": "poison"},
    ],
)
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_halves_of_two_views_are_refused(sizes: dict[str, Any], mode: str) -> None:
    group = group_of(WHOLE, "xla")
    view = group.view(**sizes)
    data = inputs_of(WHOLE)
    ids = data.ids[..., : view.config.top_k] % view.config.num_experts
    x = data.x[..., : view.config.hidden]

    def dispatched(x: Any, ids: Any) -> Any:
        return jax_ep.dispatch_done(group, jax_ep.dispatch_start(view, x, ids, mode=mode)).x

    def combined(x: Any, ids: Any) -> Any:
        recv = jax_ep.dispatch(view, x, ids, mode=mode)
        return jax_ep.combine_done(group, jax_ep.combine_start(view, recv.x, recv))

    for name, function in (("dispatch", dispatched), ("combine", combined)):
        with pytest.raises(ValueError, match=rf"got what a {name}_start returned of another group"):
            run(group, function, x, ids)


def test_halves_of_two_equal_groups_are_refused() -> None:
    first, second = (
        jax_ep.create_group(group_of(WHOLE, "xla").mesh, "ep", WHOLE.config(), "xla")
        for _ in range(2)
    )
    data = inputs_of(WHOLE)

    def mixed(x: Any, ids: Any) -> Any:
        return jax_ep.dispatch_done(second, jax_ep.dispatch_start(first, x, ids)).x

    with pytest.raises(ValueError, match="of another group or view"):
        run(first, mixed, data.x, data.ids)


def test_a_plan_of_other_sizes_is_refused() -> None:
    group = group_of(WHOLE, "xla")
    view = group.view(top_k=2)
    data = inputs_of(WHOLE)

    def body(x: Any, ids: Any) -> Any:
        return jax_ep.dispatch(view, x, plan=jax_ep.plan(group, ids)).x

    with pytest.raises(ValueError, match=r"plan.send_slot of shape \[9, 4\], expected \[9, 2\]"):
        run(group, body, data.x, data.ids)


def test_views_of_groups_that_only_lower() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("ep",))
    view = jax_ep.create_group(mesh, "ep", WHOLE.config()).view(top_k=2)
    assert view.lowering_only and view.recv_rows(8) > 0
