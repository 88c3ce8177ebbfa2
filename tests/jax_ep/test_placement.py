"""Experts in slots of any rank, with replicas: plan, dispatch and combine against the oracle."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
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
    param,
)
from jax.sharding import PartitionSpec as P

import jax_ep


def in_ci(case: Case) -> Any:
    return param(case, marks=pytest.mark.ci)


# 7 experts in 12 slots: more experts than ranks' multiples, several replicas, odd T.
CASE = Case(ranks=4, tokens=7, experts=7, slots=12, top_k=3)
CASES = [
    param(dataclasses.replace(CASE, mode="ht")),
    param(dataclasses.replace(CASE, mode="ll")),
    param(dataclasses.replace(CASE, mode="ht", layout="rank_major", node_size=2)),
    param(dataclasses.replace(CASE, mode="ll", layout="expert_batched", node_size=2)),
    in_ci(dataclasses.replace(CASE, mode="ll", layout="rank_major")),
    in_ci(dataclasses.replace(CASE, mode="ht", layout="expert_batched", capacity_factor=1.0)),
    in_ci(dataclasses.replace(CASE, mode="ht", capacity_factor=0.6, node_size=1)),
]


def placement_of(case: Case, seed: int) -> jax_ep.Placement:
    """A random placement: each expert somewhere, the other slots any expert's."""
    rng = np.random.default_rng([seed, 5])
    slots = case.slots or case.experts
    more = rng.integers(0, case.experts, slots - case.experts)
    filled = rng.permutation(np.concatenate([np.arange(case.experts), more]))
    return jax_ep.Placement.from_physical(filled, case.experts)


def placed(group: jax_ep.Group, function: Any, *, check_vma: bool = True) -> Any:
    """Jits `function(placement, *local arrays)`; the placement is an argument, equal everywhere."""

    def local(placement: jax_ep.Placement, *args: Any) -> Any:
        outs = function(placement, *jax.tree.map(lambda a: a[0], args))
        return jax.tree.map(lambda a: a[None], outs)

    def whole(placement: jax_ep.Placement, *args: Any) -> Any:
        specs = (P(), *(P(group.axes) for _ in args))
        return jax.shard_map(
            local, mesh=group.mesh, in_specs=specs, out_specs=P(group.axes), check_vma=check_vma
        )(placement, *args)

    return jax.jit(whole)


@functools.cache
def program(case: Case, implementation: str) -> Any:
    group = group_of(case, implementation)
    options: Any = {"mode": case.mode, "layout": case.layout}

    def everything(placement: Any, x: Any, ids: Any, w: Any, y: Any) -> Any:
        with_placement = options | {"placement": placement}
        recv = jax_ep.dispatch(group, x, ids, w, **with_placement)
        plan = jax_ep.plan(group, ids, **with_placement)
        started = jax_ep.dispatch_start(group, x, ids, w, **with_placement)
        halves = jax_ep.dispatch_done(group, started)
        total = jax_ep.combine(group, y.reshape(recv.x.shape), recv.plan, weights=None)
        return recv, plan, halves, total

    return placed(group, everything)


@pytest.mark.parametrize("case", CASES)
def test_every_result_equals_the_oracle_and_a_new_placement_compiles_nothing(
    case: Case, implementation: str
) -> None:
    run = program(case, implementation)
    for seed, kind in enumerate(("uniform", "zipf", "holes", "repeated", "invalid")):
        data, placement = inputs_of(case, kind, seed), placement_of(case, seed)
        slots = oracle.place(placement.physical_to_logical.tolist(), case.experts, data.ids)
        plans = oracle.plan(case.spec, slots, case.resolved_mode, case.layout)
        y = expert_outputs(case, plans, seed)
        recv, plan, halves, total = jax.device_get(
            run(placement, data.x, data.ids, data.weights, y)
        )
        rows, weights = oracle.dispatch(plans, data.x, data.weights)
        for each in (plan, recv.plan, halves.plan):
            assert_plan(each, plans)
        for each in (recv, halves):
            assert_same_bits(each.x.reshape(y.shape), np.stack(rows))
            assert_same_bits(each.weights, np.stack(weights or []))
        assert_sum(total, *oracle.combine(plans, list(y), None, case.tokens), case.top_k)
    assert run._cache_size() == 1


def test_a_permutation_needs_no_physical_experts(implementation: str) -> None:
    case = dataclasses.replace(CASE, experts=8, slots=None)
    group, data = group_of(case, implementation), inputs_of(case)
    run = placed(group, lambda p, i: jax_ep.plan(group, i, placement=p))
    identity = jax.device_get(run(jax_ep.Placement.identity(8), data.ids))
    assert_plan(identity, oracle.plan(case.spec, data.ids, "ll", "expert_major"))
    order = [3, 1, 4, 0, 7, 6, 2, 5]
    got = jax.device_get(run(jax_ep.Placement.from_physical(order, 8), data.ids))
    slots = oracle.place(order, 8, data.ids)
    assert_plan(got, oracle.plan(case.spec, slots, "ll", "expert_major"))


@pytest.mark.parametrize("mode", ["ht", pytest.param("ll", marks=pytest.mark.ci)])
def test_gradients_with_replicas_equal_those_of_a_dense_layer(
    mode: Any, implementation: str
) -> None:
    """Expert weights in slots; a replica's gradient is its share, and their sum is the expert's."""
    case = dataclasses.replace(CASE, mode=mode, node_size=2)
    group, data, placement = group_of(case, implementation), inputs_of(case), placement_of(case, 4)
    rng = np.random.default_rng(3)
    kernels = rng.standard_normal((case.experts, case.hidden, case.hidden)).astype(np.float32)

    def experts(own: Any, rows: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(rows, own, sizes)

    def step(placement: Any, x: Any, ids: Any, w: Any, own: Any) -> Any:
        def loss(x: Any, w: Any, own: Any) -> Any:
            out = jax_ep.moe(group, x, ids, w, experts, own, mode=mode, placement=placement)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, w, own)

    slots = placement.physical_to_logical
    own = kernels[slots].reshape(case.ranks, -1, case.hidden, case.hidden)
    (d_x, d_w, d_own), out = placed(group, step)(placement, data.x, data.ids, data.weights, own)

    def dense(x: Any, w: Any, kernels: Any) -> Any:
        terms = jnp.einsum("sth,stkhi->stki", x, kernels[data.ids])
        out = jnp.einsum("stk,stki->sti", w, terms)
        return jnp.sum(jnp.sin(out)), out

    with jax.default_matmul_precision("highest"):
        wanted, wanted_out = jax.grad(dense, argnums=(0, 1, 2), has_aux=True)(
            data.x, data.weights, kernels
        )
    summed = np.zeros_like(kernels)
    np.add.at(summed, slots, np.asarray(d_own).reshape(-1, case.hidden, case.hidden))
    for got, expected in zip((out, d_x, d_w, summed), (wanted_out, *wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)


BAD = {
    "misses one": (lambda: jax_ep.Placement.from_physical([0, 1, 1, 3], 4), "no slot for expert 2"),
    "unknown": (lambda: jax_ep.Placement.from_physical([0, 1, 2, 4], 4), "expert 4 in slot 3"),
    "too few": (lambda: jax_ep.Placement.identity(4, 3), "num_experts=4"),
    "floats": (lambda: jax_ep.Placement.from_physical(np.zeros(4), 1), "float64"),
    "no count of experts": (
        lambda: jax_ep.Placement.from_physical([0, 1], "2"),  # type: ignore[arg-type]
        "num_experts='2', expected an int of at least 1",
    ),
    "a float of experts": (
        lambda: jax_ep.Placement.from_physical([0, 1], 2.0),  # type: ignore[arg-type]
        "num_experts=2.0, expected an int",
    ),
    "no experts": (
        lambda: jax_ep.Placement.identity(0, 4),
        "num_experts=0, expected an int of at least 1",
    ),
    "no count of slots": (
        lambda: jax_ep.Placement.identity(4, "6"),  # type: ignore[arg-type]
        "physical_experts='6', expected an int of at least 1",
    ),
    "a count": (
        lambda: jax_ep.Placement(
            np.array([0, 1, 0]), np.array([[0, 2], [1, -1]]), np.array([2, 2])
        ),
        r"replica_counts\[1\] = 2, expected 1",
    ),
    "one slot twice": (
        lambda: jax_ep.Placement(
            np.array([0, 1, 0]), np.array([[0, 0], [1, -1]]), np.array([2, 1])
        ),
        r"logical_to_physical\[0\] = \[0, 0\]",
    ),
    "beyond its slots": (
        lambda: jax_ep.Placement(np.array([0, 1]), np.array([[0, 1], [1, -1]]), np.array([1, 1])),
        r"logical_to_physical\[0\] = \[0, 1\]",
    ),
    "no padding": (
        lambda: jax_ep.Placement(np.array([0, 1]), np.array([[0, 7], [1, -1]]), np.array([1, 1])),
        "then -1",
    ),
    "shapes": (
        lambda: jax_ep.Placement(np.array([0, 1]), np.array([0, 1]), np.array([1, 1])),
        r"expected \[E, X\] and \[E\]",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_placement_that_contradicts_itself_is_refused(what: str) -> None:
    make, message = BAD[what]
    with pytest.raises(ValueError, match=rf"jax_ep\.Placement: got .*{message}"):
        make()


def test_a_placement_that_does_not_fit_the_group_is_refused() -> None:
    group, data = group_of(CASE, "xla"), inputs_of(CASE)
    identity = jax_ep.Placement.identity

    def plan(placement: Any) -> Any:
        return placed(group, lambda p, i: jax_ep.plan(group, i, placement=p))(placement, data.ids)

    for placement, message in (
        (identity(7), r"placement\.physical_to_logical of shape \[7\], expected \[12\]"),
        (identity(8, 12), r"placement\.logical_to_physical of shape \[8, 5\], expected \[7, X\]"),
        (jax.tree.map(lambda a: a[None], identity(7, 12)), r"stacked ones"),
        (jax.tree.map(jnp.float32, identity(7, 12)), "of float32, expected int32"),
        (None, r"no placement .* physical_experts=12.*Placement\.identity\(7, 12\)"),
        ([0, 1], "of type list, expected a jax_ep.Placement"),
    ):
        with pytest.raises(ValueError, match=rf"jax_ep\.plan: got .*{message}"):
            plan(placement)

    def with_a_plan(placement: Any, x: Any, ids: Any) -> Any:
        made = jax_ep.plan(group, ids, placement=placement)
        return jax_ep.dispatch(group, x, plan=made, placement=placement).x

    with pytest.raises(ValueError, match="both of placement and plan"):
        placed(group, with_a_plan)(identity(7, 12), data.x, data.ids)


def test_sizes_of_slots_are_checked() -> None:
    config = CASE.config()
    with pytest.raises(ValueError, match=r"physical_experts: got 6, expected at least num_exp"):
        dataclasses.replace(config, physical_experts=6)
    with pytest.raises(
        ValueError,
        match=r"got physical_experts=12, expected a multiple .* 5 ranks; use physical_experts=15",
    ):
        config.memory(5, platform="xla")
    plain = dataclasses.replace(config, num_experts=12, physical_experts=None)
    assert config.memory(4) == plain.memory(4)
    whole = group_of(CASE, "xla")
    assert whole.experts_per_rank == 3
    view = whole.view(num_experts=5, physical_experts=8)
    assert view.experts_per_rank == 2 and "physical_experts=8" in repr(view)
    assert whole.view(num_experts=4, physical_experts=None, top_k=1).experts_per_rank == 1
    with pytest.raises(ValueError, match=r"view: got physical_experts=16, expected at most 12"):
        whole.view(physical_experts=16)


DEBUG_PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np, jax_ep
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
config = jax_ep.Config(num_experts=3, physical_experts=4, top_k=1, hidden=8, max_tokens=4,
                       timeout_s=600, dtype=jnp.float32)
group = jax_ep.create_group(mesh, "ep", config, sys.argv[1])
def step(x, ids, placement):
    placement = jax.tree.map(lambda a: a[0], placement)
    recv = jax_ep.dispatch(group, x, ids, placement=placement)
    return jax_ep.combine(group, recv.x, recv)
def move(rows, placement):
    placement = jax.tree.map(lambda a: a[0], placement)
    return jax_ep.eplb.move(group, rows, placement, placement)
move = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
x, ids = np.ones((4, 8), np.float32), np.array([[0], [2], [1], [-1]], np.int32)
one, other = (jax_ep.Placement.from_physical(s, 3) for s in ([0, 1, 2, 0], [1, 0, 2, 0]))
stack = lambda *each: jax.tree.map(lambda *a: np.stack(a), *each)
print(step(x, ids, stack(one, one))[:, 0].tolist())
results = step(x, ids, stack(one, other)), move(x, stack(one, other))
for shard in [shard for result in results for shard in result.addressable_shards]:
    try:
        jax.block_until_ready(shard.data)
        print("passed")
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        print("failed", " ".join(str(error).split()))
print(step(x, ids, stack(other, other))[:, 0].tolist())
group.close()
"""


def test_debug_mode_refuses_placements_that_differ_between_ranks(implementation: str) -> None:
    """In a process of its own, for the environment. Nothing has moved: the group still works."""
    done = subprocess.run(
        [sys.executable, "-c", DEBUG_PROGRAM, implementation],
        env=os.environ | {"JAX_EP_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    valid, *shards, again = done.stdout.splitlines()
    assert valid == again == "[1.0, 1.0, 1.0, 0.0]"
    assert len(shards) == 4
    for shard in shards:
        assert shard.startswith("failed ")
        assert "placement on rank(s) [1] that differs from that of rank 0" in shard


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(6))
def test_random_sizes(seed: int, implementation: str) -> None:
    """Odd sizes of everything, drawn; placements with many replicas or none."""
    rng = np.random.default_rng([seed, 11])
    ranks, experts = int(rng.choice([1, 2, 3, 4, 8])), int(rng.integers(3, 20))
    case = Case(
        ranks=ranks,
        tokens=int(rng.integers(1, 40)),
        top_k=int(rng.integers(1, min(experts, 6) + 1)),
        experts=experts,
        slots=-(-experts // ranks) * ranks + ranks * int(rng.integers(0, 4)),
        layout=str(rng.choice(["expert_major", "expert_batched", "rank_major"])),
        mode=str(rng.choice(["ht", "ll"])),
        align=int(rng.choice([1, 4, 8])),
        hidden=int(rng.integers(1, 30)),
    )
    test_every_result_equals_the_oracle_and_a_new_placement_compiles_nothing(case, implementation)
