"""The workloads with skew are what their names say, and follow from (name, seed, step) alone."""

import pathlib

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
RANKS, TOKENS, TOP_K, EXPERTS = 4, 96, 4, 64
NAMES = (
    "balanced",
    "hot set",
    "hot rank",
    "hot experts spread out",
    "ragged sources",
    "a rank without tokens",
    "rotating hot set",
    "bursts",
)


@pytest.fixture
def skews(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import skews

    return skews


def ids_of(skews, name, step=0, seed=0):
    return skews.routing(name, seed, step, RANKS, TOKENS, TOP_K, EXPERTS)


def busiest(skews, name, step=0, seed=0):
    load = skews.load_of(ids_of(skews, name, step, seed), EXPERTS)
    return skews.busiest_rank(load, RANKS)


def hot_experts(skews, name, step=0, seed=0):
    load = skews.load_of(ids_of(skews, name, step, seed), EXPERTS)
    return set(np.flatnonzero(load > 4 * load.mean()).tolist())


def test_these_are_the_eight(skews):
    assert tuple(skews.WORKLOADS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_ids_follow_from_name_seed_and_step(skews, name):
    ids = ids_of(skews, name, step=2)
    np.testing.assert_array_equal(ids, ids_of(skews, name, step=2))
    assert (ids != ids_of(skews, name, step=3)).any()
    assert (ids != ids_of(skews, name, step=2, seed=1)).any()
    assert ids.shape == (RANKS, TOKENS, TOP_K) and ids.max() < EXPERTS
    real = ids[ids[..., 0] >= 0]
    assert (real >= 0).all()
    assert all(len(set(row)) == TOP_K for row in real.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_hot_sets_and_ranks(skews, seed):
    assert busiest(skews, "balanced", seed=seed) < 1.3
    hot = hot_experts(skews, "hot set", seed=seed)
    assert 4 < len(hot) <= 8 and max(hot) - min(hot) < 8
    assert hot == hot_experts(skews, "hot set", step=9, seed=seed)
    assert busiest(skews, "hot set", seed=seed) > 0.9 * RANKS
    assert busiest(skews, "hot rank", seed=seed) > 0.9 * RANKS
    spread = hot_experts(skews, "hot experts spread out", seed=seed)
    assert len(spread) == 8 and busiest(skews, "hot experts spread out", seed=seed) < 1.3


def test_ranks_with_fewer_tokens(skews):
    def tokens(name):
        return (ids_of(skews, name)[..., 0] >= 0).sum(axis=1).tolist()

    assert tokens("balanced") == [TOKENS] * RANKS
    assert tokens("ragged sources") == [24, 48, 72, 96]
    assert tokens("a rank without tokens") == [0, TOKENS, TOKENS, TOKENS]


def test_what_changes_with_the_steps(skews):
    sets = [frozenset(hot_experts(skews, "rotating hot set", step)) for step in range(40)]
    assert all(len(set(sets[era : era + 4])) == 1 for era in range(0, 40, 4))
    assert len(set(sets)) > 4
    loads = [busiest(skews, "bursts", step) for step in range(12)]
    assert all((load > 3) == (step % 4 == 3) for step, load in enumerate(loads))
