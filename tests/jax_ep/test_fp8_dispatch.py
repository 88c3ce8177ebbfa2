"""Dispatches in FP8 and of bytes: what arrives, bit for bit, and what crosses the network."""

from __future__ import annotations

import dataclasses
from typing import Any

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import Case, Inputs, inputs_of, keep, mesh_of, param, put, run
from test_fp8_rows import assert_same

import jax_ep

CASES = [
    param(Case(hidden=64, capacity_factor=0.8), jax_ep.FP8(block=32)),
    param(Case(hidden=64, mode="ht", node_size=2), jax_ep.FP8(block=16, scale="ue8m0")),
    param(Case(hidden=96, dtype="bfloat16", layout="rank_major"), jax_ep.FP8(block=96)),
    param(
        Case(hidden=64, dtype="bfloat16", layout="expert_batched", mode="ht", node_size=1),
        jax_ep.FP8(block=64),
    ),
    param(
        Case(hidden=48, dtype="float16", layout="rank_major", mode="ht", node_size=2),
        jax_ep.FP8(block=48, scale="ue8m0"),
    ),
    param(Case(hidden=64, mode="ll", layout="expert_batched", node_size=1), jax_ep.FP8(block=32)),
]


def group_with(case: Case, wire: jax_ep.FP8 | None, implementation: str, **options: Any) -> Any:
    config = dataclasses.replace(case.config(), wire=wire, **options)
    group = jax_ep.create_group(mesh_of(case.ranks), "ep", config, implementation)
    keep(group)
    return group


def hard_inputs(case: Case) -> Inputs:
    """Inputs whose rows have many sizes, zeros, NaN and infinities."""
    inputs = inputs_of(case, "zipf", seed=5)
    rng = np.random.default_rng(6)
    x = inputs.x * (2.0 ** rng.integers(-12, 4, (*inputs.x.shape[:2], 1))).astype(inputs.x.dtype)
    x[0, 0], x[1, 2, 3], x[2, 1, :2] = 0, np.nan, (np.inf, -0.0)
    return dataclasses.replace(inputs, x=x)


def flat(array: Any, trailing: int = 1) -> np.ndarray:
    """[N, ..., W] as [N, R, W]."""
    array = np.asarray(array)
    return array.reshape(array.shape[0], -1, *array.shape[array.ndim - trailing :])


def arrived(case: Case, payload: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """What each rank receives of `payload` [N, T, ...], by the oracle: [N, R, ...]."""
    plans = oracle.plan(case.spec, ids, case.resolved_mode, case.layout)
    rows, _ = oracle.dispatch(plans, payload, None)
    return np.stack(rows)


@pytest.mark.parametrize(("case", "wire"), CASES)
def test_what_arrives(case: Case, wire: jax_ep.FP8, implementation: str) -> None:
    group = group_with(case, wire, implementation)
    inputs = hard_inputs(case)
    rng = np.random.default_rng(7)
    most = case.hidden * jnp.dtype(case.dtype).itemsize
    payloads = [
        rng.integers(0, 256, (case.ranks, case.tokens, size), dtype=np.uint8)
        for size in (16, most, 2 * most + 16)
    ]

    def everything(x: Any, ids: Any, weights: Any, *payloads: Any) -> Any:
        given = {"mode": case.mode, "layout": case.layout}
        recv = jax_ep.dispatch(group, x, ids, weights, **given)
        halves = jax_ep.dispatch_done(group, jax_ep.dispatch_start(group, x, ids, weights, **given))
        planned = jax_ep.dispatch(group, x, plan=recv.plan)
        rows = jax_ep.dispatch_quantized(group, x, ids, weights, **given)
        columns = jax_ep.dispatch_quantized(
            group, x, plan=recv.plan, scales_layout="columns", pad="undefined"
        )
        data = [jax_ep.dispatch_bytes(group, payload, recv.plan) for payload in payloads]
        again = [jax_ep.fp8.rows(each.x) for each in (rows, columns)]
        same_weights = (recv.weights, halves.weights, rows.weights)
        return recv.x, halves.x, planned.x, rows.x, columns.x, again, data, same_weights

    got = run(group, everything, inputs.x, inputs.ids, inputs.weights, *payloads)
    whole, halves, planned, rows, columns, again, data, weights = got
    travelled = fp8_oracle.travelled(inputs.x, wire.block, wire.scale)
    expected = arrived(case, travelled, inputs.ids)
    for each in (whole, halves, planned, again[0]):
        assert_same(flat(each), expected)
    plans = oracle.plan(case.spec, inputs.ids, case.resolved_mode, case.layout)
    used = np.stack([plan.recv_src >= 0 for plan in plans])
    assert_same(flat(again[1])[used], expected[used])

    values, scales = fp8_oracle.quantize(inputs.x, wire.block, wire.scale)
    bits = arrived(case, values.view(np.uint8), inputs.ids)
    assert rows.values.shape == whole.shape
    assert_same(flat(rows.values), bits.view(fp8_oracle.E4M3))
    in_bytes = arrived(case, np.ascontiguousarray(scales).view(np.uint8), inputs.ids)
    assert_same(flat(rows.scales), in_bytes.view(scales.dtype))
    assert columns.scales.shape == rows.scales.swapaxes(-1, -2).shape
    in_rows = flat(np.ascontiguousarray(columns.scales.swapaxes(-1, -2)))
    assert_same(in_rows[used], in_bytes.view(scales.dtype)[used])
    assert not np.asarray(rows.carrier, np.float32).any() and rows.carrier.dtype == case.dtype

    for payload, each in zip(payloads, data, strict=True):
        assert each.shape == (*whole.shape[:-1], payload.shape[-1])
        np.testing.assert_array_equal(flat(each), arrived(case, payload, inputs.ids))
    for each in weights[1:]:
        np.testing.assert_array_equal(each, weights[0])


def test_an_overflow_poisons_all_of_it(implementation: str) -> None:
    case = Case(hidden=64, dtype="bfloat16", recv_rows=8, overflow="poison")
    group = group_with(case, jax_ep.FP8(block=32), implementation)
    inputs = inputs_of(case, "zipf")

    def everything(x: Any, ids: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids)
        quantized = jax_ep.dispatch_quantized(group, x, plan=recv.plan).x
        data = jax.lax.bitcast_convert_type(ids, jnp.uint8).reshape(case.tokens, -1)
        data = jax_ep.dispatch_bytes(group, jnp.pad(data, ((0, 0), (0, 8))), recv.plan)
        return recv.plan.overflow, recv.x, quantized.values, quantized.scales, data

    overflow, *floats, data = run(group, everything, inputs.x, inputs.ids)
    assert np.all(overflow == 1)
    assert all(np.isnan(np.asarray(each, np.float32)).all() for each in floats)
    assert np.all(data == 0xFF)


@pytest.mark.parametrize(
    ("block", "hidden", "dtype", "fix"),
    [
        (128, 48, "float32", "use 48"),
        (32, 48, "float32", "use 24"),
        (128, 131, "float32", "use 131"),  # a prime: with blocks of 1 its scales take too much
        (128, 262, "bfloat16", "use 131"),
        (1, 64, "bfloat16", "use 4"),  # rows of 1 scale for each element are longer
        (3, 1, "float16", "no block makes them fit"),
    ],
)
def test_a_block_that_is_refused_is_told_one_that_fits(block, hidden, dtype, fix) -> None:
    misfit = jax_ep.FP8(block=block).misfit(hidden, dtype)
    assert misfit.endswith(fix), misfit
    if fix.startswith("use "):
        assert not jax_ep.FP8(block=int(fix[4:])).misfit(hidden, dtype)


@pytest.mark.parametrize(
    ("block", "hidden", "fix"),
    [(128, 320, "use 64"), (96, 96, "use 32"), (16, 256, "use 128"), (100, 100, "no block does")],
)
def test_products_in_fp8_say_which_blocks_they_take(block, hidden, fix) -> None:
    misfit = jax_ep.FP8(block=block).product_misfit(hidden)
    assert misfit.endswith(fix), misfit
    if fix.startswith("use "):
        assert not jax_ep.FP8(block=int(fix[4:])).product_misfit(hidden)


def test_views_and_no_tokens() -> None:
    case = Case(hidden=128)
    group = group_with(case, jax_ep.FP8(block=32), "native")
    with pytest.raises(ValueError, match=r"a block that divides hidden=48; use 24"):
        group.view(hidden=48)
    view, small = group.view(hidden=64), dataclasses.replace(case, hidden=64)
    inputs = hard_inputs(small)

    def both(x: Any, ids: Any) -> Any:
        recv = jax_ep.dispatch(view, x, ids)
        none = jax_ep.dispatch_quantized(view, x[:0], ids[:0])
        nothing = jax_ep.dispatch_bytes(view, jnp.zeros((0, 32), jnp.uint8), none.plan)
        # A view has the room of its group.
        wide = jax_ep.dispatch_bytes(view, jnp.ones((7, 512), jnp.uint8), recv.plan)
        return recv.x, jax_ep.fp8.rows(none.x), nothing, wide

    rows, empty, nothing, wide = run(group, both, inputs.x, inputs.ids)
    assert_same(rows, arrived(small, fp8_oracle.travelled(inputs.x, 32, "float32"), inputs.ids))
    assert empty.shape[-1] == 64 and not empty.any() and nothing.shape[-1] == 32
    assert set(np.unique(wide)) <= {0, 1} and wide.any()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (jnp.ones((7, 16)), r"got payload float32\[7, 16\], expected uint8\[T=7, B\].*bitcast"),
        (jnp.ones((7, 24), jnp.uint8), r"got payload uint8\[7, 24\].*B a multiple of 16"),
        (jnp.ones((7, 0), jnp.uint8), r"got payload uint8\[7, 0\]"),
        (jnp.ones((6, 16), jnp.uint8), r"got payload uint8\[6, 16\]"),
        ("text", r"got payload of type str, expected an array"),
    ],
)
def test_misuse_of_bytes(payload: Any, message: str) -> None:
    case = Case()
    group = group_with(case, None, "xla")

    def call(ids: Any) -> Any:
        return jax_ep.dispatch_bytes(group, payload, jax_ep.plan(group, ids))

    with pytest.raises(ValueError, match=message):
        run(group, call, inputs_of(case).ids)


def test_misuse_of_quantized() -> None:
    case = Case()  # rows of 8: no blocks of 128
    group = group_with(case, None, "xla")
    inputs = inputs_of(case)
    calls: list[tuple[Any, str]] = [
        (lambda x, ids: jax_ep.dispatch_quantized(group, x, ids).x, r"divides hidden=8; use 8"),
        (
            lambda x, ids: jax_ep.dispatch_quantized(group, x, ids, scales_layout="tiles").x,
            r"scales_layout='tiles', expected one of",
        ),
        (
            lambda x, ids: jax_ep.dispatch_bytes(group, x, ids),
            r"got plan of type .*expected a Plan; pass recv.plan",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            run(group, call, inputs.x, inputs.ids)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="these are counters of the CPU kernels")
@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.27), ("bfloat16", 0.53)])
def test_bytes_between_nodes(dtype: str, most: float) -> None:
    case = Case(hidden=1024, tokens=32, dtype=dtype, mode="ht", node_size=2)
    inputs = inputs_of(case)
    sent = []
    for wire in (None, jax_ep.FP8()):
        group = group_with(case, wire, "native")
        x, ids = put(group, (inputs.x, inputs.ids))
        run(group, lambda x, ids, g=group: jax_ep.dispatch(g, x, ids, mode="ht").x, x, ids)
        sent.append(sum(rank["bytes_sent_internode"] for rank in group.stats()["ranks"]))
    assert 0 < sent[1] <= most * sent[0]
