"""Gradients of dispatches in FP8: those of plain ones, but where cotangents are quantised, too."""

from __future__ import annotations

from typing import Any

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import Case, assert_same_bits, inputs_of, param, run
from test_fp8_dispatch import arrived, flat, group_with

import jax_ep

WIRE = jax_ep.FP8(block=32)
CASES = [
    param(Case(hidden=64, capacity_factor=0.8)),
    param(Case(hidden=64, dtype="bfloat16", mode="ht", node_size=2, layout="rank_major")),
    param(Case(hidden=64, mode="ht", node_size=1, layout="expert_batched")),
]


def draw(case: Case, seed: int, scale: float = 1.0) -> np.ndarray:
    """Rows [N, R, H] as a cotangent of what is received."""
    rows = case.spec.rows(case.layout, case.tokens)
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((case.ranks, rows, case.hidden)) * scale).astype(case.dtype)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_x_is_that_of_a_plain_dispatch(case: Case, implementation: str) -> None:
    plain = group_with(case, None, implementation)
    wired = group_with(case, WIRE, implementation)
    inputs, cotangent = inputs_of(case), draw(case, 2, 1e-5)  # e4m3fn would flush it

    def gradients(x: Any, ids: Any, weights: Any, cotangent: Any) -> Any:
        given = {"mode": case.mode, "layout": case.layout}

        def pulled(received: Any) -> Any:
            def loss(x: Any, weights: Any) -> Any:
                rows, got = received(x, weights)
                products = rows.reshape(cotangent.shape) * cotangent
                return jnp.sum(products.astype(jnp.float32)) + jnp.sum(got**2)

            return jax.grad(loss, argnums=(0, 1))(x, weights)

        def plainly(x: Any, weights: Any) -> Any:
            recv = jax_ep.dispatch(plain, x, ids, weights, **given)
            return recv.x, recv.weights

        def whole(x: Any, weights: Any) -> Any:
            recv = jax_ep.dispatch(wired, x, ids, weights, **given)
            return recv.x, recv.weights

        def halves(x: Any, weights: Any) -> Any:
            flight = jax_ep.dispatch_start(wired, x, ids, weights, **given)
            recv = jax_ep.dispatch_done(wired, flight)
            return recv.x, recv.weights

        def quantized(x: Any, weights: Any) -> Any:
            recv = jax_ep.dispatch_quantized(
                wired, x, ids, weights, scales_layout="columns", **given
            )
            return jax_ep.fp8.rows(recv.x), recv.weights

        ways = (plainly, whole, halves, quantized, jax.checkpoint(whole))
        return [pulled(way) for way in ways]

    expected, *others = run(plain, gradients, inputs.x, inputs.ids, inputs.weights, cotangent)
    assert np.asarray(expected[0], np.float32).any()
    for got in others:
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wire_backward", [False, True])
def test_the_gradient_of_combine(case: Case, wire_backward: bool, implementation: str) -> None:
    group = group_with(case, WIRE, implementation, wire_backward=wire_backward)
    inputs, y = inputs_of(case), draw(case, 3)
    plans = oracle.plan(case.spec, inputs.ids, case.resolved_mode, case.layout)
    used = np.stack([plan.recv_src >= 0 for plan in plans])
    y[~used] = np.nan  # padding
    rank_major = case.layout == "rank_major"
    weights = np.random.default_rng(4).uniform(0.1, 1, y.shape[:2]).astype(np.float32)
    g = (np.random.default_rng(5).standard_normal(inputs.x.shape) * 1e-5).astype(case.dtype)

    def gradients(ids: Any, y: Any, weights: Any, g: Any) -> Any:
        plan = jax_ep.plan(group, ids, mode=case.mode, layout=case.layout)
        shaped = y.reshape(jax_ep.dispatch(group, g, plan=plan).x.shape)

        def out(y: Any, weights: Any) -> Any:
            return jax_ep.combine(group, y, plan, weights=None if rank_major else weights)

        return jax.vjp(out, shaped, weights)[1](g)

    d_y, d_weights = run(group, gradients, inputs.ids, y, weights, g)
    moved = fp8_oracle.travelled(g, WIRE.block, WIRE.scale) if wire_backward else g
    cotangent = arrived(case, moved, inputs.ids)
    scaled = cotangent.astype(np.float32)
    if not rank_major:
        scaled *= weights[..., None]
        dots = np.sum(cotangent.astype(np.float64) * np.nan_to_num(y.astype(np.float64)), axis=-1)
        sizes = np.sum(np.abs(cotangent.astype(np.float64) * np.nan_to_num(y)), axis=-1)
        assert np.all(np.abs(d_weights - dots) <= 1e-5 * sizes)
    assert_same_bits(flat(d_y)[used], scaled.astype(cotangent.dtype)[used])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_remat_changes_no_bit(dtype: str, implementation: str) -> None:
    """XLA may leave out roundings between f32 and narrower types where it sees both."""
    case = Case(hidden=256, tokens=16, dtype=dtype, align=128)
    group = group_with(case, WIRE, implementation)
    inputs = inputs_of(case)

    def gradients(wrap: Any) -> Any:
        def layer(x: Any, ids: Any, weights: Any) -> Any:
            recv = jax_ep.dispatch(group, x, ids, weights)
            return jax_ep.combine(group, recv.x, recv)

        def total(*arguments: Any) -> Any:
            return jnp.sum(wrap(layer)(*arguments).astype(jnp.float32) ** 2)

        step = jax.grad(total, argnums=(0, 2))
        return run(group, step, inputs.x, inputs.ids, inputs.weights)

    plain, again = gradients(lambda layer: layer), gradients(jax.checkpoint)  # two programs
    for mine, theirs in zip(again, plain, strict=True):
        assert_same_bits(mine, theirs)


def test_layers_under_transformations(implementation: str) -> None:
    """The same gradients from a layer, its chunks, a scan over layers, vmap and remat."""
    case = Case(hidden=64, tokens=8, experts=8)
    group = group_with(case, WIRE, implementation, wire_backward=True)
    inputs = inputs_of(case)
    kernels = np.random.default_rng(8).standard_normal((case.ranks, 2, 64, 64)).astype(np.float32)

    def experts(kernels: Any, rows: Any, group_sizes: Any) -> Any:
        del group_sizes  # vmap of ragged_dot is not implemented
        return rows @ (kernels[0] / 8)

    def gradients(x: Any, ids: Any, weights: Any, kernels: Any) -> Any:
        def layer(x: Any, kernels: Any, chunks: int = 1) -> Any:
            return jax_ep.moe(group, x, ids, weights, experts, kernels, chunks=chunks)

        def scanned(x: Any, kernels: Any) -> Any:
            return jax.lax.scan(lambda x, _: (layer(x, kernels), None), x, length=2)[0]

        def mapped(x: Any, kernels: Any) -> Any:
            return jax.vmap(layer, in_axes=(0, None))(jnp.stack([x, x]), kernels)[1]

        ways = {
            "once": layer,
            "chunks": lambda x, kernels: layer(x, kernels, 2),
            "vmap": mapped,
            "remat": jax.checkpoint(layer),
            "twice": lambda x, kernels: layer(layer(x, kernels), kernels),
            "scan": scanned,
        }
        return {
            name: jax.grad(lambda *a, way=way: jnp.sum(jnp.sin(way(*a))), argnums=(0, 1))(
                x, kernels
            )
            for name, way in ways.items()
        }

    got = run(group, gradients, inputs.x, inputs.ids, inputs.weights, kernels)
    for name, same_as in (
        ("chunks", "once"),
        ("vmap", "once"),
        ("remat", "once"),
        ("scan", "twice"),
    ):
        for mine, theirs in zip(got[name], got[same_as], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6, err_msg=name)
            assert np.isfinite(mine).all() and mine.any()
