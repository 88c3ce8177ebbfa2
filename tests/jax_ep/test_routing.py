"""The gates, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P

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


BIAS = np.linspace(-0.2, 0.2, 8, dtype=np.float32)
GATES = {
    "topk_softmax": lambda x, **mask: routing.topk_softmax(x, 3, **mask),
    "plain_softmax": lambda x, **mask: routing.topk_softmax(x, 3, normalize=False, **mask),
    "topk_sigmoid_bias": lambda x, **mask: routing.topk_sigmoid_bias(x, BIAS, 3, **mask),
    "group_limited_topk": lambda x, **mask: routing.group_limited_topk(
        x, 3, num_groups=4, top_groups=2, bias=BIAS, **mask
    ),
}
MASK = np.arange(13) % 3 != 1


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("mask", [MASK, np.zeros(13, bool), np.ones(13, bool)])
def test_masked_tokens_go_nowhere_and_get_no_gradient(gate: str, mask: np.ndarray) -> None:
    padded = np.where(mask[:, None], LOGITS, np.nan)  # padding may hold anything
    ids, weights = GATES[gate](jnp.array(padded), mask=jnp.array(mask))
    wanted_ids, wanted_weights = GATES[gate](jnp.array(LOGITS))
    np.testing.assert_array_equal(ids, np.where(mask[:, None], wanted_ids, -1))
    np.testing.assert_array_equal(weights, np.where(mask[:, None], wanted_weights, 0))
    assert ids.dtype == jnp.int32

    def loss(x: jax.Array, **mask: jax.Array) -> jax.Array:
        return jnp.sum(GATES[gate](x, **mask)[1] ** 2)

    got = jax.grad(loss)(jnp.array(padded), mask=jnp.array(mask))
    wanted = jax.grad(loss)(jnp.array(LOGITS[mask]))
    np.testing.assert_array_equal(np.asarray(got)[~mask], 0)
    np.testing.assert_allclose(np.asarray(got)[mask], wanted, rtol=1e-5, atol=1e-7)


# Padding once counted in p_e: the loss of a batch depended on how far it was padded.
@pytest.mark.parametrize("num_real", [0, 1, 8])
def test_the_balancing_loss_is_that_of_the_real_tokens(num_real: int) -> None:
    mask = np.arange(13) < num_real
    probabilities = np.asarray(jax.nn.softmax(LOGITS))
    ids, _ = routing.topk_softmax(jnp.array(LOGITS), 3)
    padded = np.where(mask[:, None], probabilities, np.nan)

    def loss(p: jax.Array) -> jax.Array:
        return routing.load_balancing_loss(p, ids, mask=jnp.array(mask))

    value, gradient = jax.value_and_grad(loss)(jnp.array(padded))
    if num_real == 0:
        assert value == 0 and np.all(gradient == 0)
        return
    real = jnp.array(probabilities[:num_real])
    wanted = jax.value_and_grad(routing.load_balancing_loss)(real, ids[:num_real])
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(gradient[:num_real], wanted[1], rtol=1e-5)
    assert np.all(gradient[num_real:] == 0)


def test_ranks_of_different_numbers_of_tokens_share_one_loss_and_load() -> None:
    real = (13, 4, 0, 7)  # of ranks that all pad to 13
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((4, 13, 8)).astype(np.float32)
    mask = np.arange(13) < np.array(real)[:, None]
    logits[~mask] = np.nan

    def local(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, mask = logits[0], mask[0]
        ids, _ = routing.topk_softmax(logits, 2, mask=mask)
        loss = routing.load_balancing_loss(jax.nn.softmax(logits), ids, mask=mask, axis="ep")
        return loss, routing.expert_load(ids, 8, axis="ep")

    mapped = jax.shard_map(local, mesh=mesh_of(4), in_specs=P("ep"), out_specs=(P(), P()))
    loss, load = jax.jit(mapped)(logits, mask)
    alone = jnp.array(logits[mask])
    ids, _ = routing.topk_softmax(alone, 2)
    wanted = routing.load_balancing_loss(jax.nn.softmax(alone), ids)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_array_equal(load, np.bincount(np.asarray(ids).ravel(), minlength=8))


def test_expert_load_counts_only_experts_that_exist() -> None:
    ids = jnp.array([[0, 2], [-1, 2], [3, 9], [1, -5]])
    load = routing.expert_load(ids, 4)
    assert load.tolist() == [1, 1, 2, 1] and load.dtype == jnp.int32
    mask = jnp.array([True, False, True, False])
    assert routing.expert_load(ids, 4, mask=mask).tolist() == [1, 0, 1, 1]
    assert routing.expert_load(ids.astype(jnp.uint8), 256).sum() == 8  # 256 is no uint8
    assert routing.expert_load(jnp.array([[1, 0], [-1, 1]], jnp.int2), 4).tolist() == [1, 2, 0, 0]


# Ids were cast to int32 first, which made experts of ids of 2**32 and more.
def test_expert_load_counts_no_id_that_int32_wraps() -> None:
    with jax.enable_x64(True):
        ids = jnp.array([[2**32, 2**32 + 3], [1, -(2**32)], [3, 2**31]], jnp.int64)
        assert ids.dtype == jnp.int64
        load = routing.expert_load(ids, 4)
    assert load.tolist() == [0, 1, 0, 1] and load.dtype == jnp.int32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: routing.topk_softmax(x, 9), "top_k=9, expected an int: 1 to 8"),
        (lambda x: routing.topk_softmax(x, True), "top_k=True, expected an int"),
        (lambda x: routing.group_limited_topk(x, 2, num_groups=3, top_groups=1), "num_groups=3"),
        (lambda x: routing.group_limited_topk(x, 5, num_groups=4, top_groups=2), "top_groups=2"),
        (
            lambda x: routing.topk_softmax(x, 2, mask=jnp.ones(12, bool)),
            r"got mask bool\[12\], expected bool\[13\]",
        ),
        (
            lambda x: routing.load_balancing_loss(x, x, mask=jnp.ones(13)),
            r"got mask float32\[13\], expected bool\[13\]",
        ),
        (
            lambda x: routing.topk_softmax(x, 2, mask=[True] * 13),
            r"got mask of type list, expected bool\[13\]",
        ),
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


@pytest.mark.parametrize("num_experts", [0, -3, True, "8", 2.0])
def test_expert_load_refuses_what_is_no_count(num_experts):
    with pytest.raises(ValueError, match="got num_experts="):
        routing.expert_load(jnp.zeros((2, 1), jnp.int32), num_experts)


def test_expert_load_refuses_ids_that_are_no_integers():
    with pytest.raises(ValueError, match="got topk_idx float32, expected integers"):
        routing.expert_load(jnp.zeros((2, 1)), 4)
