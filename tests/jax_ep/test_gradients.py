"""Gradients of every op against jax.grad of a dense layer, and numerically to second order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import (
    Case,
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
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_ep

Array = jax.Array
SMALL = Case(ranks=2, tokens=3, top_k=2, hidden=4, experts=4, align=2)


def local_experts(recv: jax_ep.Received, kernels: Array) -> Array:
    """tanh(x @ kernel) of each row's local expert, for all three layouts."""
    layout = recv.plan.layout
    if layout == "expert_major":
        # Not ragged_dot (the moe tests use it): JAX cannot differentiate it twice.
        rows = lax.iota(jnp.int32, recv.x.shape[0])
        expert = jnp.searchsorted(jnp.cumsum(recv.group_sizes), rows, side="right")
        chosen = kernels[jnp.minimum(expert, kernels.shape[0] - 1)]
        return jnp.tanh(jnp.einsum("rh,rhg->rg", recv.x, chosen))
    if layout == "expert_batched":
        return jnp.tanh(jnp.einsum("erh,ehg->erg", recv.x, kernels))
    assert recv.topk_idx is not None and recv.weights is not None
    per_expert = jnp.tanh(jnp.einsum("nth,ehg->nteg", recv.x, kernels))
    chosen = jax.nn.one_hot(recv.topk_idx, kernels.shape[0], dtype=recv.x.dtype)
    weights = jnp.einsum("ntk,ntke->nte", recv.weights.astype(recv.x.dtype), chosen)
    return jnp.einsum("nte,nteg->ntg", weights, per_expert)


def layer(
    group: jax_ep.Group,
    options: dict[str, Any],
    x: Array,
    ids: Array,
    weights: Array,
    kernels: Array,
    *,
    style: str = "rows",
) -> tuple[Array, Array]:
    """An MoE layer; `style` picks how weights and halves are used."""
    if style == "halves":
        recv = jax_ep.dispatch_done(group, jax_ep.dispatch_start(group, x, ids, weights, **options))
    elif style == "planned":
        plan = jax_ep.plan(group, ids, **options)
        recv = jax_ep.dispatch(group, x, topk_weights=weights, plan=plan)
    else:
        recv = jax_ep.dispatch(group, x, ids, weights, **options)
    y = local_experts(recv, kernels)
    if style == "halves":
        out = jax_ep.combine_done(group, jax_ep.combine_start(group, y, recv))
    elif style == "pairs":
        out = jax_ep.combine(group, y, recv, weights=weights)
    else:
        out = jax_ep.combine(group, y, recv)
    return out, recv.plan.send_slot


def sharded_loss(
    group: jax_ep.Group, options: dict[str, Any], style: str = "rows", check_vma: bool = True
) -> Callable[..., tuple[Array, Array]]:
    """Mean square of the layer over the group; arrays lead with the rank axis, kernels with E."""

    def local(x: Array, ids: Array, weights: Array, kernels: Array) -> tuple[Array, Array]:
        out, slots = layer(group, options, x[0], ids[0], weights[0], kernels, style=style)
        loss = lax.psum(jnp.sum(out.astype(jnp.float32) ** 2), group.axes)
        return loss, slots[None]

    return jax.shard_map(
        local,
        mesh=group.mesh,
        in_specs=P("ep"),
        out_specs=(P(), P("ep")),
        check_vma=check_vma,
    )


def dense_loss(x: Array, ids: Array, weights: Array, kernels: Array, kept: Array) -> Array:
    """The same loss without any exchange."""
    every = jnp.tanh(jnp.einsum("nth,ehg->nteg", x, kernels))
    safe = jnp.where(kept, ids, 0)
    chosen = jnp.take_along_axis(every, safe[..., None], axis=2)
    scale = jnp.where(kept, weights, 0).astype(chosen.dtype)
    return jnp.sum(jnp.sum(chosen * scale[..., None], axis=2) ** 2)


DENSE_GRADIENTS = jax.jit(jax.value_and_grad(dense_loss, argnums=(0, 2, 3)))


def gradient_case(
    case: Case, implementation: str, routing: str, style: str, check_vma: bool = True
) -> None:
    group = group_of(case, implementation)
    inputs = inputs_of(case, routing, 5)
    rng = np.random.default_rng(2)
    shape = (case.experts, case.hidden, case.hidden)
    kernels = (rng.standard_normal(shape) / np.sqrt(case.hidden)).astype(np.float32)
    x, ids, weights, kernels = put(group, (inputs.x, inputs.ids, inputs.weights, kernels))
    options = {"mode": case.mode, "layout": case.layout}
    step = jax.value_and_grad(
        sharded_loss(group, options, style, check_vma), argnums=(0, 2, 3), has_aux=True
    )
    (loss, slots), grads = jax.device_get(jax.jit(step)(x, ids, weights, kernels))
    kept = slots >= 0
    expected_loss, expected = DENSE_GRADIENTS(*jax.device_get((x, ids, weights, kernels)), kept)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for got, wanted in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5 * np.abs(wanted).max())
    assert np.all(grads[1][~kept] == 0)  # a dropped pair gets exactly nothing


@pytest.mark.parametrize(
    ("case", "routing", "style"),
    [
        param(Case(ranks=4, tokens=9, mode="ht"), "uniform", "rows"),
        param(Case(ranks=4, tokens=9, mode="ll"), "repeated", "pairs"),
        param(Case(ranks=4, tokens=9, mode="ht", recv_rows=12), "zipf", "pairs"),
        param(Case(ranks=4, tokens=9, mode="ht", layout="expert_batched"), "repeated", "halves"),
        param(Case(ranks=4, tokens=9, mode="ll", layout="rank_major"), "repeated", "halves"),
        more_sizes(
            Case(ranks=3, tokens=9, mode="ll", experts=6, recv_rows=12), "invalid", "halves"
        ),
        more_sizes(Case(ranks=2, tokens=9, mode="ll", layout="expert_batched"), "holes", "planned"),
        more_sizes(Case(ranks=4, tokens=9, mode="ht", layout="rank_major"), "uniform", "planned"),
        more_sizes(Case(ranks=1, tokens=9, mode="ht"), "uniform", "halves"),
    ],
)
def test_gradients_equal_those_of_a_dense_layer(
    case: Case, routing: str, style: str, implementation: str
) -> None:
    gradient_case(case, implementation, routing, style)


def test_gradients_without_vma_checks(implementation: str) -> None:
    case = Case(ranks=4, tokens=9, mode="ht")
    gradient_case(case, implementation, "uniform", "rows", check_vma=False)


@pytest.mark.parametrize(
    ("mode", "layout", "style"),
    [
        ("ll", "expert_major", "pairs"),
        more_sizes("ht", "expert_batched", "halves"),
        more_sizes("ht", "rank_major", "rows"),
    ],
)
def test_reverse_over_reverse(mode: str, layout: str, style: str, implementation: str) -> None:
    group = group_of(SMALL, implementation)
    inputs = inputs_of(SMALL, "uniform", 1)
    rng = np.random.default_rng(3)
    kernels = rng.standard_normal((SMALL.experts, 4, 4)).astype(np.float32) / 2
    x, ids, weights, kernels = put(group, (inputs.x, inputs.ids, inputs.weights, kernels))
    mapped = sharded_loss(group, {"mode": mode, "layout": layout}, style)
    loss = jax.jit(lambda x, w, kernels: mapped(x, ids, w, kernels)[0])
    check_grads(loss, (x, weights, kernels), order=2, modes=["rev"], atol=3e-2, rtol=3e-2)


def test_second_order_equals_the_dense_layer(implementation: str) -> None:
    """grad of a function of a grad, through the fused backward of combine and out again."""
    group = group_of(SMALL, implementation)
    inputs = inputs_of(SMALL, "uniform", 1)
    kernels = np.random.default_rng(3).standard_normal((4, 4, 4)).astype(np.float32) / 2
    args = put(group, (inputs.x, inputs.weights, kernels))
    ids = put(group, inputs.ids)
    mapped = sharded_loss(group, {"mode": "ht"})

    def penalty(loss: Callable[..., Array]) -> Callable[..., Any]:
        def norm(*args: Array) -> Array:
            grads = jax.grad(loss, argnums=(0, 1, 2))(*args)
            return sum((jnp.sum(g**2) for g in grads), start=jnp.float32(0))

        return jax.jit(jax.grad(norm, argnums=(0, 1, 2)))

    got = penalty(lambda x, w, k: mapped(x, ids, w, k)[0])(*args)
    kept = jnp.ones(inputs.ids.shape, bool)
    host = jax.device_get(args)
    wanted = penalty(lambda x, w, k: dense_loss(x, inputs.ids, w, k, kept))(*host)
    for g, w in zip(jax.device_get(got), wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4 * np.abs(w).max())


def test_nan_in_padding_reaches_no_gradient(implementation: str) -> None:
    case = Case(ranks=2, tokens=5, align=8)
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def loss(x: Array, ids: Array, w: Array, kernel: Array) -> tuple[Array, ...]:
        def local(x: Array, w: Array, kernel: Array) -> Array:
            recv = jax_ep.dispatch(group, x, ids, w)
            used = (recv.plan.recv_src >= 0)[:, None]
            y = jnp.where(used, recv.x * kernel, jnp.nan)
            return jnp.sum(jax_ep.combine(group, y, recv) ** 2)

        return jax.grad(local, argnums=(0, 1, 2))(x, w, kernel)

    kernel = np.ones((2, case.hidden), np.float32)
    args = put(group, (inputs.x, inputs.ids, inputs.weights, kernel))
    grads = jax.device_get(per_rank(group, loss, check_vma=False)(*args))
    assert all(np.all(np.isfinite(grad)) for grad in grads)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cotangents_have_the_callers_dtypes(dtype: str, implementation: str) -> None:
    case = Case(ranks=2, tokens=5, dtype=dtype)
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def loss(x: Array, ids: Array, w: Array) -> tuple[Array, ...]:
        def local(x: Array, w: Array) -> Array:
            recv = jax_ep.dispatch(group, x, ids, w)
            out = jax_ep.combine(group, recv.x, recv)
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(local, argnums=(0, 1))(x, w)

    weights = inputs.weights.astype(jnp.bfloat16)
    got = per_rank(group, loss)(*put(group, (inputs.x, inputs.ids, weights)))
    d_x, d_w = jax.device_get(got)
    assert d_x.dtype == jnp.dtype(dtype) and d_w.dtype == jnp.bfloat16
    expected_w = inputs.x.astype(np.float64).sum(-1)[..., None].repeat(2, -1)
    np.testing.assert_allclose(d_w.astype(np.float64), expected_w, rtol=0.02, atol=0.1)


def _sum_in_lanes(products: np.ndarray) -> np.ndarray:
    """Over the last axis, as docs/semantics.md says of `d_weights`: 256 lanes, joined by halves."""
    lanes = np.zeros((*products.shape[:-1], 256), np.float32)
    for first in range(0, products.shape[-1], 256):
        part = products[..., first : first + 256]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


@pytest.mark.parametrize("mode", ["ht", "ll"])
@pytest.mark.parametrize("dtype", ["float32", more_sizes("bfloat16")])
def test_the_order_in_which_d_weights_are_added(dtype: str, mode: str, implementation: str) -> None:
    """Native groups give the same bits everywhere; of "xla" the order is XLA's."""
    case = Case(hidden=712, dtype=dtype, mode=mode, max_tokens=200)  # not all lanes are full
    group = group_of(case, implementation)
    inputs = inputs_of(case)
    plans = oracle.plan(case.spec, inputs.ids, mode, case.layout)
    y = expert_outputs(case, plans)
    g = inputs_of(case, seed=1).x
    weights = np.random.default_rng(2).uniform(0.1, 1, y.shape[:2]).astype(np.float32)

    def gradient(ids: Array, y: Array, weights: Array, g: Array) -> Array:
        plan = jax_ep.plan(group, ids, mode=mode)
        _, pull = jax.vjp(lambda weights: jax_ep.combine(group, y, plan, weights), weights)
        return pull(g)[0]

    got = run(group, gradient, inputs.ids, y, weights, g)
    for rank, plan in enumerate(plans):
        used = plan.recv_src >= 0
        source, place = np.divmod(plan.recv_src[used], case.limit * case.top_k)
        cotangent = g[source, place // case.top_k].astype(np.float32)
        products = cotangent * y[rank][used].astype(np.float32)
        want = _sum_in_lanes(products)
        if implementation == "native":
            np.testing.assert_array_equal(got[rank][used], want)
        else:
            sizes = np.sum(np.abs(products), axis=-1)
            assert np.all(np.abs(got[rank][used] - want) <= 1e-6 * sizes)
        assert not np.any(got[rank][~used])


def test_after_an_overflow_poison_is_in_gradients_too(implementation: str) -> None:
    case = Case(tokens=16, recv_rows=16, overflow="poison")
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def gradients(x: Array, ids: Array, weights: Array) -> Any:
        def dispatched(x: Array) -> tuple[Array, Array]:
            recv = jax_ep.dispatch(group, x, ids, weights)
            return jnp.sum(recv.x), recv.plan.send_slot

        d_x, slots = jax.grad(dispatched, has_aux=True)(x)
        recv = jax_ep.dispatch(group, x, ids, weights)
        d_y = jax.grad(lambda y: jnp.sum(jax_ep.combine(group, y, recv)))(jnp.ones_like(recv.x))
        return d_x, slots, d_y, recv.plan.overflow

    step = per_rank(group, gradients)
    crowded = np.zeros_like(inputs.ids)  # rank 0 gets everything, and drops most
    for ids, is_full in ((crowded, True), (np.full_like(crowded, -1), False)):
        values = jax.device_get(step(*put(group, (inputs.x, ids, inputs.weights))))
        d_x, slots, d_y, overflow = values
        assert np.all(overflow == is_full)
        is_kept = (slots >= 0).any(axis=2)
        assert is_kept.any() == is_full
        assert np.array_equal(np.isnan(d_x).all(axis=2), is_kept)
        assert np.isnan(d_y[0]).all() == is_full


def test_forward_mode_raises_jaxs_own_error(implementation: str) -> None:
    group = group_of(SMALL, implementation)
    inputs = inputs_of(SMALL)

    def tangent(x: Array, ids: Array) -> Array:
        return jax.jvp(lambda x: jax_ep.dispatch(group, x, ids).x, (x,), (x,))[1]

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        per_rank(group, tangent)(*put(group, (inputs.x, inputs.ids)))


@functools.cache
def moe_step(group: jax_ep.Group, chunks: int) -> Any:
    def local(x: Array, ids: Array, w: Array, kernels: Array) -> Array:
        def experts(kernels: Array, rows: Array, group_sizes: Array) -> Array:
            return jnp.tanh(lax.ragged_dot(rows, kernels, group_sizes))

        out = jax_ep.moe(group, x[0], ids[0], w[0], experts, kernels, chunks=chunks)
        return lax.psum(jnp.sum(out**2), "ep")

    mapped = jax.shard_map(local, mesh=group.mesh, in_specs=P("ep"), out_specs=P())
    return jax.jit(jax.value_and_grad(mapped, argnums=(0, 2, 3)))


@pytest.mark.parametrize("chunks", [1, 3])
def test_moe_in_chunks_has_the_gradients_of_the_dense_layer(
    chunks: int, implementation: str
) -> None:
    case = Case(ranks=4, tokens=10, mode=None)  # 10 tokens in 3 chunks: the last is padded
    group = group_of(case, implementation)
    inputs = inputs_of(case, "holes")
    kernels = np.random.default_rng(0).standard_normal((8, 8, 8)).astype(np.float32) / 3
    args = put(group, (inputs.x, inputs.ids, inputs.weights, kernels))
    loss, grads = jax.device_get(moe_step(group, chunks)(*args))
    host = (inputs.x, inputs.ids, inputs.weights, kernels, inputs.ids >= 0)
    expected_loss, expected = DENSE_GRADIENTS(*host)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for got, wanted in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5 * np.abs(wanted).max())
