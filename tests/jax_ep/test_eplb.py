"""jax_ep.eplb: the published balancing, weights that move, gradients of replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, assert_same_bits, group_of, keep, mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import placed, placement_of

import jax_ep
from jax_ep import eplb

# The example of https://github.com/deepseek-ai/EPLB (README at d52c72d5): loads of two layers of 12
# experts, and what rebalance_experts prints for 16 replicas, 4 groups, 2 nodes and 8 GPUs.
PUBLISHED_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]

CASE = Case(ranks=4, tokens=7, experts=7, slots=12, top_k=3)


def test_the_published_example() -> None:
    placements = eplb.rebalance(PUBLISHED_LOADS, 16, 4, 2, 8)
    assert [p.physical_to_logical.tolist() for p in placements] == PUBLISHED_SLOTS


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_every_rebalancing_keeps(data: Any) -> None:
    nodes = data.draw(st.integers(1, 3))
    gpus = nodes * data.draw(st.integers(1, 3))
    groups = data.draw(st.integers(1, 2)) * nodes if data.draw(st.booleans()) else 1
    experts = groups * data.draw(st.integers(1, 4))
    slots = -(-experts // gpus) * gpus + gpus * data.draw(st.integers(0, 2))
    loads = data.draw(
        st.lists(st.integers(0, 1000), min_size=experts, max_size=experts).map(np.array)
    )
    hierarchical = groups % nodes == 0
    (placement,) = eplb.rebalance(loads[None], slots, groups, nodes, gpus)
    filled, counts = placement.physical_to_logical, placement.replica_counts
    assert sorted(set(filled.tolist())) == list(range(experts))  # Placement checks the rest
    if hierarchical:  # no group is on two nodes, and each has as many
        group_of_slot = filled.reshape(nodes, -1) // (experts // groups)
        on_node = [set(node.tolist()) for node in group_of_slot]
        assert sum(map(len, on_node)) == groups and {len(n) for n in on_node} == {groups // nodes}
        parts = [np.unique(node) for node in filled.reshape(nodes, -1)]
    else:
        parts = [np.arange(experts)]
    for part in parts:
        # No copy more of one expert in place of another's would lower the load of the busiest copy.
        per_copy = loads[part] / counts[part]
        several = part[counts[part] > 1]
        assert all(loads[e] / (counts[e] - 1) >= per_copy.max() - 1e-3 for e in several)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], 2, 1, 1, 1), r"load of shape \[2\]"),
        (([[1.0, -2.0]], 2, 1, 1, 1), "not negative"),
        (([[1.0, np.nan]], 2, 1, 1, 1), "finite"),
        (([["a", "b"]], 2, 1, 1, 1), "load of <U1"),
        (([[1], [1, 2]], 2, 1, 1, 1), "load of type list"),
        (([[1j, 1]], 2, 1, 1, 1), "load of complex128"),
        (([[1e308, 1]], 2, 1, 1, 1), "load up to 1e.308, expected at most 3.4"),
        (([[1, 2]], 2.0, 1, 1, 1), "num_replicas=2.0, expected an int of at least 1"),
        (([[1, 2]], 2, "1", 1, 1), "num_groups='1', expected an int of at least 1"),
        (([[1, 2]], 2, 1, 0, 1), "num_nodes=0, expected an int of at least 1"),
        (([[1, 2, 3]], 4, 1, 1, 3), "num_replicas=4, expected a multiple of num_gpus=3"),
        (([[1, 2, 3]], 3, 1, 2, 3), "num_gpus=3, expected a multiple of num_nodes=2"),
        (([[1, 2, 3]], 3, 2, 1, 3), "number of experts=3, expected a multiple of num_groups=2"),
        (([[1, 2, 3]], 2, 1, 1, 1), "num_replicas=2, expected at least the 3"),
    ],
)
def test_bad_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"eplb.rebalance: got .*{message}"):
        eplb.rebalance(*arguments)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64, np.float16, jnp.bfloat16, np.float64])
def test_loads_of_any_real_type(dtype: Any) -> None:
    load = np.array([[0, 1, 1]]).astype(dtype)
    (placement,) = eplb.rebalance(load, 4, 1, 1, 2)
    assert sorted(set(placement.physical_to_logical.tolist())) == [0, 1, 2]


@pytest.mark.parametrize("function", [eplb.to_physical, eplb.to_logical])
def test_rows_without_a_placement(function: Any) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__}: got placement of type NoneType"):
        function(np.ones((4, 2)), None)


def test_stacked_placements_are_refused_and_mapped() -> None:
    """They gave rows of other layers' slots."""
    both = [jax_ep.Placement.identity(4, 6), jax_ep.Placement.from_physical([3, 2, 1, 0, 0, 0], 4)]
    stacked = jax.tree.map(lambda *each: np.stack(each), *both)
    logical = np.arange(8).reshape(2, 4)
    for function in (eplb.to_physical, eplb.to_logical):
        with pytest.raises(ValueError, match=r"maps of shape \[2, 6\], expected that of one layer"):
            function(np.arange(6), stacked)
    slots = jax.vmap(eplb.to_physical)(logical, stacked)
    assert slots.tolist() == [
        row[p.physical_to_logical].tolist() for row, p in zip(logical, both, strict=True)
    ]
    np.testing.assert_array_equal(jax.vmap(eplb.to_logical)(slots, stacked), logical)


@pytest.mark.parametrize("dtype", ["complex64", "int4", "key"])
def test_what_has_no_bytes_is_not_moved(dtype: str) -> None:
    group, old = group_of(CASE, "xla"), placement_of(CASE, 0)

    def move(both: Any, tree: Any) -> Any:
        leaf = jax.vmap(jax.random.key)(tree) if dtype == "key" else tree.astype(dtype)
        return eplb.move(group, leaf, *both)

    with pytest.raises(
        ValueError, match=r"eplb.move: got an array of .*, expected bools, integers"
    ):
        placed(group, move)((old, old), np.zeros((4, 3), np.int32))


def test_gradients_are_floats() -> None:
    group = group_of(CASE, "xla")
    run = placed(group, lambda p, tree: eplb.reduce_gradients(group, tree, p))
    with pytest.raises(ValueError, match="got an array of int32, expected floats"):
        run(placement_of(CASE, 0), np.zeros((4, 3), np.int32))


@pytest.mark.parametrize("mask", [[1, 0, 1, 1], [0, 0, 1, 1]])
@pytest.mark.parametrize("function", ["move", "reduce_gradients"])
def test_a_mask_without_a_rank_that_takes_part_is_refused(function: str, mask: Any) -> None:
    """It gave wrong rows: replicas elsewhere stood in, for some ranks and not for others."""
    config = dataclasses.replace(CASE.config(), elastic=True)
    group = jax_ep.create_group(mesh_of(CASE.ranks), "ep", config, "native")
    old, new = placement_of(CASE, 0), placement_of(CASE, 10)
    active = np.array(mask, np.int32)

    def run(both: Any, tree: Any) -> Any:
        if function == "move":
            return eplb.move(group, tree, *both, active=active)
        return eplb.reduce_gradients(group, tree, both[0], active=active)

    slots = on_ranks(CASE, eplb.to_physical({"f32": params_of(CASE)["f32"]}, old))
    first = mask.index(0)
    with pytest.raises((RuntimeError, ValueError), match=f"got a mask without rank {first}, with"):
        jax.block_until_ready(placed(group, run)((old, new), slots))
    group.close()


def params_of(case: Case, seed: int = 0) -> Any:
    """Logical arrays [E, ...] of odd sizes and every width of element."""
    rng = np.random.default_rng(seed)
    return {
        "f32": rng.standard_normal((case.experts, 5, 3)).astype(np.float32),
        "bf16": jnp.asarray(rng.standard_normal((case.experts, 7)), jnp.bfloat16),
        "i8": rng.integers(-128, 128, (case.experts, 3)).astype(np.int8),
        "flag": rng.integers(0, 2, case.experts).astype(bool),
    }


def on_ranks(case: Case, tree: Any) -> Any:
    """[P, ...] as [N, slots, ...]."""
    return jax.tree.map(lambda a: np.asarray(a).reshape(case.ranks, -1, *a.shape[1:]), tree)


# Rows of 32 bytes; with max_tokens=7 fewer than slots are served at once, with 40 several rows.
@pytest.mark.parametrize("tokens", [7, pytest.param(40, marks=pytest.mark.ci)])
def test_weights_move_bit_for_bit(tokens: int, implementation: str) -> None:
    case = dataclasses.replace(CASE, tokens=tokens)
    group, logical = group_of(case, implementation), params_of(case)
    run = placed(group, lambda both, tree: eplb.move(group, tree, *both))
    for seed in range(3):
        old, new = placement_of(case, seed), placement_of(case, seed + 10)
        before = on_ranks(case, eplb.to_physical(logical, old))
        wanted = on_ranks(case, eplb.to_physical(logical, new))
        got = jax.device_get(run((old, new), before))
        for name in logical:
            np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)
        back = eplb.to_logical(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), got), new)
        for name in logical:
            np.testing.assert_array_equal(back[name], logical[name], err_msg=name)
    assert run._cache_size() == 1


def test_only_what_changes_travels() -> None:
    """Counted by the group: two ranks exchange one expert, the others send nothing."""
    group = group_of(CASE, "native")
    old = jax_ep.Placement.identity(7, 12)
    slots = old.physical_to_logical.copy()
    slots[[0, 11]] = slots[[11, 0]]  # of ranks 0 and 3
    new = jax_ep.Placement.from_physical(slots, 7)
    tree = on_ranks(CASE, eplb.to_physical({"w": np.ones((7, 8), np.float32)}, old))
    run = placed(group, lambda both, tree: eplb.move(group, tree, *both))
    before = group.stats()["rows_received"]
    jax.block_until_ready(run((old, new), tree))
    assert group.stats()["rows_received"] - before == 2


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_what_travels_between_slots_is_no_load(mode: str) -> None:
    """It was counted as tokens of experts, so a rebalancing after a move saw load that was none."""
    config = dataclasses.replace(CASE.config(), mode=mode)
    group = jax_ep.create_group(mesh_of(CASE.ranks), "ep", config, "native")
    keep(group)
    old, new = placement_of(CASE, 0), placement_of(CASE, 10)
    slots = on_ranks(CASE, eplb.to_physical(params_of(CASE), old))

    def both(placements: Any, tree: Any) -> Any:
        moved = eplb.move(group, tree, *placements)
        return eplb.reduce_gradients(group, {"f32": moved["f32"]}, placements[1])

    jax.block_until_ready(placed(group, both)((old, new), slots))
    stats = group.stats()
    assert stats["plans"] > 0 and stats["rows_received"] > 0
    assert [sum(rank["pairs_per_expert"]) for rank in stats["ranks"]] == [0] * 4


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.ci), "bfloat16"])
def test_gradients_of_replicas_are_summed_in_order(dtype: str, implementation: str) -> None:
    group = group_of(CASE, implementation)
    rng = np.random.default_rng(8)
    own = jnp.asarray(rng.standard_normal((12, 3, 2)), dtype)
    run = placed(group, lambda p, tree: eplb.reduce_gradients(group, tree, p))
    for seed in range(4):
        placement = placement_of(CASE, seed)
        got = np.asarray(run(placement, on_ranks(CASE, {"w": own}))["w"]).reshape(own.shape)
        for expert in range(7):
            slots = np.flatnonzero(placement.physical_to_logical == expert)
            total = np.asarray(own[slots[0]], np.float32)
            for slot in slots[1:]:
                total = total + np.asarray(own[slot], np.float32)
            for slot in slots:
                assert_same_bits(got[slot], np.asarray(jnp.asarray(total).astype(dtype)))
    assert run._cache_size() == 1
