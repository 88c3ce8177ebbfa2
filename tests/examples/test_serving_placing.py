"""Experts over the ranks that take part: none is missing while there is room for all."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("aiohttp")
pytest.importorskip("orbax.checkpoint")

import serve_moe
from moe_serve.placing import num_missing, place, redundant_needed

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


@pytest.mark.parametrize(("experts", "ranks", "lost"), [(4, 3, 1), (8, 4, 2), (5, 4, 1), (1, 2, 1)])
def test_as_many_slots_as_needed_and_no_more(experts, ranks, lost):
    active = np.array([0] * lost + [1] * (ranks - lost))
    slots = experts + redundant_needed(experts, ranks, lost)
    assert slots % ranks == 0 and num_missing(experts, slots, active) == 0
    assert num_missing(experts, slots - ranks, active) > 0


@pytest.mark.parametrize(
    ("slots", "of_process", "is_elastic", "said"),
    [
        (6, 1, True, None),
        (6, 3, True, None),  # nobody is left
        (3, 1, False, None),
        (3, 1, True, "got 3 expert slots, of which a lost process leaves 2, expected 3"),
        (6, 2, True, "pass --redundant 6"),
    ],
)
def test_a_server_says_at_its_start_if_experts_will_be_missing(slots, of_process, is_elastic, said):
    ranks = SimpleNamespace(
        active=np.ones(3, np.int32), is_elastic=is_elastic, num_experts=3, num_slots=slots
    )
    warning = serve_moe.warning_of(ranks, of_process)
    assert warning is None if said is None else said in warning
    assert ranks.active.all()
