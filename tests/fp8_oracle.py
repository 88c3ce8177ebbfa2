"""A NumPy oracle of FP8 rows, written from docs/semantics.md ("FP8 rows") alone.

It imports nothing of jax_ep. `exact` says the same of one block in fractions, which round nowhere.
"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = np.float32(448)
SMALLEST = 2.0**-100


def scales_of(amax: np.ndarray, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """(scale, inverse) f32 of each amax f32."""
    scales, inverses = np.ones_like(amax), np.ones_like(amax)
    for index, value in np.ndenumerate(amax):
        if value < SMALLEST:
            continue
        if scale == "float32":
            scales[index] = value * (np.float32(1) / LARGEST)
            inverses[index] = LARGEST / value
        else:
            c = int(np.ceil(np.log2(float(value) / 448))) - 1
            while Fraction(float(value)) > 448 * Fraction(2) ** c:
                c += 1
            scales[index], inverses[index] = 2.0**c, 2.0**-c
    return scales, inverses


def quantize(rows: np.ndarray, block: int, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """Values e4m3fn [..., H] and scales [..., H / block], f32 or e8m0."""
    wide = rows.astype(np.float32).reshape(*rows.shape[:-1], rows.shape[-1] // block, block)
    with np.errstate(invalid="ignore"):
        amax = np.max(np.where(np.isfinite(wide), np.abs(wide), 0), axis=-1, initial=0)
        scales, inverses = scales_of(amax.astype(np.float32), scale)
        values = (wide * inverses[..., None]).astype(E4M3).reshape(rows.shape)
    return values, scales.astype(np.float32 if scale == "float32" else ml_dtypes.float8_e8m0fnu)


def dequantize(values: np.ndarray, scales: np.ndarray, dtype: str) -> np.ndarray:
    """Rows [..., H]."""
    block = values.shape[-1] // scales.shape[-1]
    wide = values.astype(np.float32).reshape(*scales.shape, block)
    with np.errstate(invalid="ignore", over="ignore"):
        product = wide * scales.astype(np.float32)[..., None]
        return product.reshape(values.shape).astype(
            ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        )


def travelled(rows: np.ndarray, block: int, scale: str) -> np.ndarray:
    """Rows as they arrive: quantised and dequantised."""
    return dequantize(*quantize(rows, block, scale), rows.dtype.name)


def record(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """u8[..., B] of each row."""
    parts = [values.view(np.uint8), np.ascontiguousarray(scales).view(np.uint8)]
    data = np.concatenate([part.reshape(*values.shape[:-1], -1) for part in parts], axis=-1)
    missing = -data.shape[-1] % 32
    return np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, missing)])


def nearest(value: Fraction) -> float:
    """The e4m3fn value that is nearest to `value`; of two, the one with the even code."""
    codes = np.arange(0x7F, dtype=np.uint8)
    known = [Fraction(float(v)) for v in codes.view(E4M3)]
    best = min(codes, key=lambda code: (abs(known[code] - abs(value)), code % 2))
    return float(known[best]) * (-1 if value < 0 else 1)
