"""The gates, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import routing
from jax_ep.testing import ROUTING_KINDS, make_routing

LOGITS = np.random.default_rng(0).standard_normal((13, 8)).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("normalize", [True, False])
def test_topk_softmax(normalize: bool) -> None:
    ids, weights = routing.topk_softmax(jnp.array(LOGITS), 3, normalize=normalize)
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    wanted = np.argsort(-probabilities, axis=1)[:, :3]
    np.testing.assert_array_equal(ids, wanted)
    chosen = np.take_along_axis(probabilities, wanted, 1)
    if normalize:
        chosen = chosen / chosen.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, chosen, rtol=1e-5)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32


def test_the_bias_chooses_and_does_not_weigh() -> None:
    bias = np.zeros(8, np.float32)
    bias[5] = 10
    ids, weights = routing.topk_sigmoid_bias(jnp.array(LOGITS), jnp.array(bias), 2, scale=2.5)
    assert np.all(ids[:, 0] == 5)
    chosen = np.take_along_axis(sigmoid(LOGITS), np.asarray(ids), 1)
    np.testing.assert_allclose(weights, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    grads = jax.grad(lambda b: jnp.sum(routing.topk_sigmoid_bias(jnp.array(LOGITS), b, 2)[1] ** 2))(
        jnp.array(bias)
    )
    assert np.all(grads == 0)


def test_groups_limit_the_choice() -> None:
    ids, weights = routing.group_limited_topk(jnp.array(LOGITS), 3, num_groups=4, top_groups=2)
    affinity = sigmoid(LOGITS)
    scores = affinity.reshape(13, 4, 2).sum(-1)
    for token in range(13):
        allowed = np.sort(np.argsort(-scores[token])[:2])
        assert set(np.asarray(ids[token]) // 2) <= set(allowed)
        masked = np.where(np.isin(np.arange(8) // 2, allowed), affinity[token], -1)
        np.testing.assert_array_equal(ids[token], np.argsort(-masked)[:3])
    np.testing.assert_allclose(np.sum(weights, axis=1), 1, rtol=1e-5)


def test_load_balancing_loss_is_one_when_balanced() -> None:
    even = jnp.full((8, 8), 1 / 8, jnp.float32)
    ids = jnp.arange(8, dtype=jnp.int32)[:, None]
    np.testing.assert_allclose(routing.load_balancing_loss(even, ids), 1, rtol=1e-6)
    crowded = jax.nn.one_hot(jnp.zeros(8, jnp.int32), 8)
    np.testing.assert_allclose(routing.load_balancing_loss(crowded, ids * 0), 8, rtol=1e-6)
    assert routing.load_balancing_loss(even, ids * 0 - 1) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: routing.topk_softmax(x, 9), "top_k=9, expected an int: 1 to 8"),
        (lambda x: routing.topk_softmax(x, True), "top_k=True, expected an int"),
        (lambda x: routing.group_limited_topk(x, 2, num_groups=3, top_groups=1), "num_groups=3"),
        (lambda x: routing.group_limited_topk(x, 5, num_groups=4, top_groups=2), "top_groups=2"),
    ],
)
def test_gates_refuse_what_cannot_be(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(jnp.array(LOGITS))  # type: ignore[operator]


@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_generators_make_what_they_say(kind: str) -> None:
    sizes = {"num_ranks": 4, "num_tokens": 50, "top_k": 2, "num_experts": 8}
    ids = make_routing(kind, **sizes, seed=1)
    assert ids.shape == (200, 2) and ids.dtype == np.int32
    np.testing.assert_array_equal(ids, make_routing(kind, **sizes, seed=1))
    facts = {
        "uniform": lambda: np.all(ids[:, 0] != ids[:, 1]) and len(np.unique(ids)) == 8,
        "zipf": lambda: (ids == 0).sum() > 3 * (ids == 7).sum(),
        "one_expert": lambda: np.all(ids[:, 0] == 0) and np.all(ids[:, 1] == -1),
        "idle_rank": lambda: ids.max() == 5,
        "empty_experts": lambda: not np.any(ids % 2 == 1),
        "holes": lambda: 0 < (ids == -1).mean() < 0.6,
        "repeated": lambda: np.any(ids[:, 0] == ids[:, 1]),
        "invalid": lambda: np.any(ids >= 8),
    }
    assert facts[kind]()
    with pytest.raises(ValueError, match="got kind='odd'"):
        make_routing("odd", **sizes)
