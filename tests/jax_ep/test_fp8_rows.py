"""jax_ep.fp8 and the records of rows, bit for bit against the oracle."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep._ops import fp8

SCALES = ("float32", "ue8m0")


def assert_same(got: Any, expected: np.ndarray) -> None:
    """The same bits, where it is no NaN, and NaN in the same places."""
    got = np.asarray(got)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    kind = f"u{got.dtype.itemsize}"
    is_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), is_nan)
    different = (got.view(kind) != expected.view(kind)) & ~is_nan
    assert not different.any(), (got[different][:5], expected[different][:5])


def hard_rows(dtype: str) -> np.ndarray:
    """[n, 64]: all bits of small types, or random ones; and edges of amax and of scales."""
    rng = np.random.default_rng(3)
    if dtype == "float32":
        drawn = rng.integers(0, 2**32, 1 << 15, dtype=np.uint64).astype(np.uint32).view(np.float32)
    else:
        drawn = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(dtype))
    rows = [drawn.reshape(-1, 64), rng.permutation(drawn).reshape(-1, 64)]
    smooth = rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-20, 20, (64, 1))
    with np.errstate(over="ignore"):
        rows.append(smooth.astype(dtype))
    edges = [0.0, 2.0**-149, 2.0**-126, 2.0**-100, 1e-30, 1e-5, 1.0, 1.75, 448.0, 480.0, 3e38]
    for amax in np.array(edges, np.float32):
        for near in (amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(3e38))):
            for other in (0.0, -0.0, np.nan, np.inf, -np.inf):
                row = rng.uniform(-1, 1, 64).astype(np.float32) * near
                row[[3, 40]], row[[7, 50]] = near, other
                with np.errstate(over="ignore"):
                    rows.append(row[None].astype(dtype))
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", SCALES)
def test_rows_there_and_back(dtype: str, scale: str) -> None:
    rows, fmt = hard_rows(dtype), jax_ep.FP8(block=32, scale=scale)
    values, scales = fp8_oracle.quantize(rows, 32, scale)
    got = jax.jit(lambda x: jax_ep.fp8.quantize(x, fmt))(rows)
    assert_same(got[0], values)
    assert_same(got[1], scales)
    back = jax.jit(lambda v, s: jax_ep.fp8.dequantize(v, s, dtype))(values, scales)
    assert_same(back, fp8_oracle.dequantize(values, scales, dtype))


def test_the_oracle_rounds_as_fractions_do() -> None:
    rng = np.random.default_rng(4)
    rows = (rng.standard_normal((40, 32)) * 2.0 ** rng.integers(-40, 40, (40, 1))).astype(
        np.float32
    )
    for scale in SCALES:
        values, scales = fp8_oracle.quantize(rows, 32, scale)
        for row, value, factor in zip(rows, values, scales[:, 0], strict=True):
            amax = Fraction(float(np.max(np.abs(row))))
            exact = Fraction(float(factor.astype(np.float32)))
            if scale == "float32":
                assert abs(exact * 448 / amax - 1) < Fraction(1, 2**22)
                inverse = np.float32(float(448 / amax))  # of one rounding: doubles have room
            else:
                assert exact * 448 >= amax > exact * 224
                inverse = np.float32(1 / exact)
            for element, code in zip(row, value, strict=True):
                assert float(code) == fp8_oracle.nearest(Fraction(float(element * inverse)))


def test_the_inverse_is_rounded_as_a_division() -> None:
    drawn = np.random.default_rng(9).integers(27 << 23, 255 << 23, 1 << 20).astype(np.uint32)
    near_1_75 = np.arange((140 << 23) + 0x5FFFF0, (140 << 23) + 0x600010, dtype=np.uint32)
    amax = np.concatenate([drawn, near_1_75, np.arange(27, 255, dtype=np.uint32) << 23])
    amax = amax.astype(np.uint32).view(np.float32)
    assert_same(jax.jit(fp8.largest_over)(amax), np.float32(448) / amax)


def test_a_scale_that_is_no_number() -> None:
    ones, scales = jnp.ones((1, 4), jnp.float8_e4m3fn), jnp.full((1, 1), jnp.nan)
    for dtype in (jnp.float32, jnp.float8_e8m0fnu):
        assert jnp.isnan(jax_ep.fp8.dequantize(ones, scales.astype(dtype))).all()


def test_shapes_and_dtypes_of_rows() -> None:
    x = jnp.ones((2, 3, 64), jnp.bfloat16)
    values, scales = jax_ep.fp8.quantize(x, jax_ep.FP8(block=32, scale="ue8m0"))
    assert values.shape == x.shape and scales.shape == (2, 3, 2)
    assert (values.dtype.name, scales.dtype.name) == ("float8_e4m3fn", "float8_e8m0fnu")
    assert jax_ep.fp8.quantize(jnp.ones((0, 128)))[1].shape == (0, 1)
    assert jax_ep.fp8.dequantize(values[:0], scales[:0]).shape == (0, 3, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jax_ep.FP8(block=0), r"FP8.block: got 0, expected an int of at least 1"),
        (lambda: jax_ep.FP8(block=True), r"FP8.block: got True"),
        (lambda: jax_ep.FP8(scale="e5m2"), r"FP8.scale: got 'e5m2', expected one of"),
        (lambda: jax_ep.fp8.quantize(jnp.ones((4, 100))), r"got x float32\[4, 100\].*block=128"),
        (lambda: jax_ep.fp8.quantize(jnp.ones((4, 128), jnp.int32)), r"got x int32"),
        (
            lambda: jax_ep.fp8.quantize([1.0] * 128),
            r"got an operand of type list, expected an array",
        ),
        (
            lambda: jax_ep.fp8.dequantize(jnp.ones((4, 8), jnp.float8_e4m3fn), jnp.ones((3, 4))),
            r"expected \[..., H\] and \[..., H / block\]",
        ),
        (
            lambda: jax_ep.fp8.dequantize(jnp.ones((4, 8)), jnp.ones((4, 2))),
            r"got values float32 and scales float32, expected float8_e4m3fn",
        ),
        (
            lambda: jax_ep.fp8.dequantize(
                jnp.ones((4, 8), jnp.float8_e4m3fn), jnp.ones((4, 2)), jnp.int8
            ),
            r"got dtype int8, expected one of",
        ),
        (
            lambda: jax_ep.fp8.quantize(jnp.ones((4, 8)), "e4m3"),
            r"quantize: got fmt of type str, expected a jax_ep.FP8",
        ),
        (
            lambda: jax_ep.fp8.quantize_weights(jnp.ones((4, 8)), 32),
            r"quantize_weights: got fmt of type int, expected a jax_ep.FP8",
        ),
        (
            lambda: jax_ep.fp8.rows(jnp.ones((4, 8))),
            r"rows: got quantized of type .*, expected a jax_ep.Quantized; pass the x",
        ),
    ],
)
def test_misuse_of_rows(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


VALID: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 256, "max_tokens": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wire": jax_ep.FP8(block=96)}, r"expected a block that divides hidden=256; use 64"),
        ({"wire": "fp8"}, r"Config.wire: got 'fp8', expected None or a jax_ep.FP8"),
        (
            {"wire": jax_ep.FP8(block=2)},
            r"at most the 512 bytes .* bfloat16, not 768; use 4;",
        ),
        ({"wire_backward": True}, r"wire_backward: got True, expected False without a wire"),
        ({"wire": jax_ep.FP8(), "wire_backward": 1}, r"wire_backward: got 1, expected True or"),
    ],
)
def test_a_config_says_what_does_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax_ep.Config(**VALID, **fields)


def test_the_bytes_of_a_record() -> None:
    assert jax_ep.FP8().record_bytes(7168) == 7392
    assert jax_ep.FP8(scale="ue8m0").record_bytes(7168) == 7232
    values, scales = fp8_oracle.quantize(np.ones((3, 256), np.float32), 128, "float32")
    assert fp8_oracle.record(values, scales).shape == (3, jax_ep.FP8().record_bytes(256))
