"""Experts over the ranks that take part: none is missing while there is room for all."""

import numpy as np
import pytest

pytest.importorskip("flax")

from moe_serve.placing import num_missing, place

import jax_ep


@pytest.mark.parametrize("active", [[1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 0, 1], [1, 0, 0, 0]])
@pytest.mark.parametrize(("num_experts", "num_slots"), [(8, 8), (6, 8), (5, 16), (8, 12), (3, 4)])
def test_every_expert_for_which_there_is_room_is_on_an_active_rank(num_experts, num_slots, active):
    active = np.array(active, np.int32)
    load = np.random.default_rng(num_slots).integers(0, 99, (3, num_experts))
    slots = place(load, num_slots, active)
    assert slots.dtype == np.int32 and slots.shape == (3, num_slots)
    room = num_slots // 4 * active.sum()
    missing = num_missing(num_experts, num_slots, active)
    assert missing == max(0, num_experts - room)
    for of_layer, loads in zip(slots, load, strict=True):
        jax_ep.Placement.from_physical(of_layer, num_experts)  # names every expert
        here = set(of_layer[np.repeat(active != 0, num_slots // 4)].tolist())
        assert len(here) == num_experts - missing
        if missing:
            assert min(loads[list(here)]) >= max(np.delete(loads, list(here)))


def test_the_busiest_experts_are_spread_where_some_are_missing():
    slots = place(np.array([[90, 80, 70, 60, 1, 1]]), 6, np.array([1, 0, 1]))
    assert set(slots[0][[0, 1]].tolist()) in ({0, 3}, {1, 2})
    assert set(slots[0][[0, 1, 4, 5]].tolist()) == {0, 1, 2, 3}


def test_the_busiest_expert_has_the_replicas():
    slots = place(np.array([[1, 90, 1, 1]]), 8, np.array([1, 0, 1, 1]))
    assert np.bincount(slots[0][[0, 1, 4, 5, 6, 7]]).tolist() == [1, 3, 1, 1]
