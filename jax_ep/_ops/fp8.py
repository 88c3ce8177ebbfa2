"""The arithmetic of `jax_ep.fp8`, in jax.numpy (docs/semantics.md, "FP8 rows").

Every platform gives the same bits: nothing here is a division of floats, which XLA replaces by
products and, on GPUs, by approximations.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._fp8_format import FP8
from jax_ep._ops.rounding import rounded
from jax_ep._types import Quantized

_FORMAT = FP8()
_DTYPES = ("bfloat16", "float16", "float32")
_SMALLEST_AMAX = 2.0**-100  # below, a block is as good as zero: its scale must be a normal float
_LARGEST = 448  # of e4m3fn: 7 * 2^6


def quantize(x: jax.Array, fmt: FP8 = _FORMAT) -> tuple[jax.Array, jax.Array]:
    """Rows to e4m3fn values and the scales of their blocks; has no gradient.

    Args:
        x: [..., H] in bfloat16, float16 or float32; fmt.block divides H.
        fmt: block size and kind of scales.

    Returns:
        (values float8_e4m3fn[..., H], scales [..., H / block] in float32 or float8_e8m0fnu).
        NaN and infinities become NaN.

    Raises:
        ValueError: dtype or shape do not fit.

    Example:
        >>> values, scales = jax_ep.fp8.quantize(x, jax_ep.FP8(block=128))
    """
    _require_arrays("quantize", x)
    _require_format("quantize", fmt)
    if x.dtype.name not in _DTYPES or x.ndim < 1 or x.shape[-1] % fmt.block:
        raise ValueError(
            f"jax_ep.fp8.quantize: got x {x.dtype}{list(x.shape)}, expected [..., H] in one of "
            f"{', '.join(_DTYPES)}, H a multiple of block={fmt.block}; cast x or change the block"
        )
    blocks = lax.stop_gradient(x).astype(jnp.float32)
    blocks = blocks.reshape(*x.shape[:-1], x.shape[-1] // fmt.block, fmt.block)
    scales, inverse = _scales(blocks, (-1,), fmt)
    values = (blocks * inverse).astype(jnp.float8_e4m3fn)
    return values.reshape(x.shape), scales[..., 0]


def quantize_weights(w: jax.Array, fmt: FP8 = _FORMAT) -> tuple[jax.Array, jax.Array]:
    """Matrices to e4m3fn values and the scales of their square blocks; has no gradient.

    One scale for `block` x `block` elements, as DeepSeek-V3 has them (arXiv 2412.19437, section
    3.3): a product of rows and columns in FP8 can apply both scales to sums of a block.

    Args:
        w: [..., K, N] in bfloat16, float16 or float32; of the last blocks a part is enough.
        fmt: block size and kind of scales.

    Returns:
        (values float8_e4m3fn[..., K, N], scales [..., ceil(K / block), ceil(N / block)]).

    Raises:
        ValueError: dtype or shape do not fit.

    Example:
        >>> values, scales = jax_ep.fp8.quantize_weights(w_up)
    """
    _require_arrays("quantize_weights", w)
    _require_format("quantize_weights", fmt)
    if w.dtype.name not in _DTYPES or w.ndim < 2:
        raise ValueError(
            f"jax_ep.fp8.quantize_weights: got w {w.dtype}{list(w.shape)}, expected [..., K, N] in "
            f"one of {', '.join(_DTYPES)}; cast or reshape it"
        )
    *leading, rows, columns = w.shape
    block = fmt.block
    missing = [(0, 0)] * len(leading) + [(0, -rows % block), (0, -columns % block)]
    padded = jnp.pad(lax.stop_gradient(w).astype(jnp.float32), missing)
    shape = padded.shape
    blocks = padded.reshape(*leading, shape[-2] // block, block, shape[-1] // block, block)
    scales, inverse = _scales(blocks, (-3, -1), fmt)
    values = (blocks * inverse).astype(jnp.float8_e4m3fn).reshape(shape)
    return values[..., :rows, :columns], scales[..., 0, :, 0]


def _require_arrays(function: str, *arrays: Any) -> None:
    for array in arrays:
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(
                f"jax_ep.fp8.{function}: got an operand of type {type(array).__name__}, expected "
                "an array; pass a jax.Array"
            )


def _require_format(function: str, fmt: Any) -> None:
    if not isinstance(fmt, FP8):
        raise ValueError(
            f"jax_ep.fp8.{function}: got fmt of type {type(fmt).__name__}, expected a jax_ep.FP8; "
            "pass jax_ep.FP8()"
        )


def _scales(blocks: jax.Array, axes: tuple[int, ...], fmt: FP8) -> tuple[jax.Array, jax.Array]:
    """(scale, inverse f32) of f32 blocks along `axes`, which stay as 1."""
    finite = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), 0.0)
    amax = jnp.max(finite, axis=axes, initial=0.0, keepdims=True)
    is_used = amax >= _SMALLEST_AMAX
    if fmt.scale == "ue8m0":
        exponent = _ceil_exponent(amax)
        inverse = jnp.where(is_used, _power_of_two(254 - exponent), 1.0)
        biased = jnp.where(is_used, exponent, 127).astype(jnp.uint8)
        return lax.bitcast_convert_type(biased, fmt.scale_dtype), inverse
    scales = jnp.where(is_used, amax * jnp.float32(np.float32(1) / np.float32(_LARGEST)), 1.0)
    return scales, jnp.where(is_used, largest_over(amax), 1.0)


def dequantize(values: jax.Array, scales: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Values times the scales of their blocks, in f32, rounded to `dtype`; has no gradient.

    Args:
        values: float8_e4m3fn[..., H].
        scales: float32 or float8_e8m0fnu [..., H / block].
        dtype: bfloat16, float16 or float32.

    Returns:
        [..., H] in dtype.

    Raises:
        ValueError: dtypes or shapes do not fit.

    Example:
        >>> rows = jax_ep.fp8.dequantize(values, scales, jnp.bfloat16)
    """
    _require_arrays("dequantize", values, scales)
    num_blocks = scales.shape[-1] if scales.ndim else 0
    fits = values.ndim == scales.ndim and values.shape[:-1] == scales.shape[:-1]
    if not fits or values.shape[-1] % max(num_blocks, 1) or (not num_blocks and values.shape[-1]):
        raise ValueError(
            f"jax_ep.fp8.dequantize: got values {list(values.shape)} and scales "
            f"{list(scales.shape)}, expected [..., H] and [..., H / block]; pass scales in rows"
        )
    named = (values.dtype.name, scales.dtype.name, jnp.dtype(dtype).name)
    if named[0] != "float8_e4m3fn" or named[1] not in ("float32", "float8_e8m0fnu"):
        raise ValueError(
            f"jax_ep.fp8.dequantize: got values {named[0]} and scales {named[1]}, expected "
            "float8_e4m3fn and float32 or float8_e8m0fnu; pass what quantize returned"
        )
    if named[2] not in _DTYPES:
        raise ValueError(
            f"jax_ep.fp8.dequantize: got dtype {named[2]}, expected one of {', '.join(_DTYPES)}; "
            "cast the result"
        )
    values, scales = lax.stop_gradient((values, as_float(scales)))
    block = values.shape[-1] // max(num_blocks, 1)
    blocks = values.astype(jnp.float32).reshape(*scales.shape, block)
    return rounded((blocks * scales[..., None]).reshape(values.shape), dtype)


def rows(quantized: Quantized) -> jax.Array:
    """What `dispatch_quantized` delivered, dequantised; its gradient goes through the carrier.

    `rows(dispatch_quantized(...).x)` is `dispatch(...).x` of a group with that wire.

    Args:
        quantized: `Received.x`.

    Returns:
        [..., H] in the carrier's dtype.

    Raises:
        ValueError: as `dequantize`.

    Example:
        >>> x = jax_ep.fp8.rows(recv.x)
    """
    if not isinstance(quantized, Quantized):
        raise ValueError(
            f"jax_ep.fp8.rows: got quantized of type {type(quantized).__name__}, expected a "
            "jax_ep.Quantized; pass the x of what dispatch_quantized returned"
        )
    scales = quantized.scales
    if quantized.scales_layout == "columns":
        scales = jnp.swapaxes(scales, -1, -2)
    dequantized = dequantize(quantized.values, scales, quantized.carrier.dtype)
    return _straight_through(dequantized, quantized.carrier)


@jax.custom_vjp
def _straight_through(rows: jax.Array, carrier: jax.Array) -> jax.Array:
    """The rows; their cotangent is the carrier's."""
    del carrier
    return rows


def _straight_through_forward(rows: jax.Array, carrier: jax.Array) -> tuple[jax.Array, None]:
    return _straight_through(rows, carrier), None


def _straight_through_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(cotangent), cotangent


_straight_through.defvjp(_straight_through_forward, _straight_through_backward)


def as_float(scales: jax.Array) -> jax.Array:
    """Scales of either kind as f32."""
    if scales.dtype == jnp.float32:
        return scales
    biased = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    return jnp.where(biased == 0xFF, jnp.nan, _power_of_two(biased))


def _ceil_exponent(amax: jax.Array) -> jax.Array:
    """Biased exponent of the smallest 2^c with 448 * 2^c >= amax: 448 = 1.75 * 2^8."""
    beyond_1_75 = 0x1FFFFF  # carries into the exponent from a significand above 1.75
    return ((_bits(amax) + beyond_1_75) >> 23) - 8


def largest_over(amax: jax.Array) -> jax.Array:
    """448 / amax in f32, rounded to nearest even, by long division of the significands.

    With amax = m * 2^(e - 150), m of 24 bits: 448 / amax = 7 / m * 2^(156 - e).
    """
    bits = _bits(jnp.where(amax >= _SMALLEST_AMAX, amax, 1.0))
    exponent, divisor = bits >> 23, (bits & 0x7FFFFF) | 0x800000
    dividend = jnp.uint32(7 << 21)
    is_less = (divisor > dividend).astype(jnp.uint32)
    rest = (dividend << is_less) - divisor  # the quotient's first bit is 1
    quotient = jnp.uint32(0)
    for num_bits in (8, 8, 7):  # 23 more; the remainder has 24, so 8 fit into 32
        rest = rest << num_bits
        digit = rest // divisor
        rest = rest - digit * divisor
        quotient = (quotient << num_bits) | digit
    twice = rest << 1
    rounds_up = (twice > divisor) | ((twice == divisor) & ((quotient & 1) == 1))
    result = ((262 - exponent - is_less) << 23) + quotient + rounds_up.astype(jnp.uint32)
    return lax.bitcast_convert_type(result, jnp.float32)


def _power_of_two(biased: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def _bits(array: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(array, jnp.uint32)
